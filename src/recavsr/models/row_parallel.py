"""One grid over several processes: each computes a band of rows and borrows what its windows reach beyond it.

Everything in the networks is done token by token, but for two things. Convolutions of the LR frames read
neighbours: a process gets the frames of its band and of a few rows around. Window attention reads keys and
values of the rows around: each layer exchanges them once a block, those of the block's own latents only,
since a history keeps what was borrowed.

The rows that a band's windows reach make a grid of their own in which the windows of the band lie as they do
in the whole grid, also where the border shifts or cuts them: nothing else has to know of other processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from recavsr.attention import SpatialWindow, WindowPlan
from recavsr.geometry import Grid

LR_REACH = 2
"""Latent rows around a band whose LR frames its own results depend on: two 3 x 3 convolutions."""


@dataclass(frozen=True)
class Band:
    """The rows of a grid that this process computes, and who computes the others."""

    bounds: tuple[int, ...]
    """Process i computes the rows bounds[i] .. bounds[i + 1] - 1."""
    rank: int
    lr_reach: int
    """The LR frames of a band are given with so many rows of the grid around them."""

    @staticmethod
    def split(rows: int, ranks: int, patch: int) -> tuple[Band, ...]:
        """Return the processes' bands of a token grid; a token covers `patch` rows of latents."""
        bounds = tuple(rows * index // ranks for index in range(ranks + 1))
        return tuple(Band(bounds, rank, -(-LR_REACH // patch)) for rank in range(ranks))

    def finer(self, factor: int) -> Band:
        """Return the same band in a grid with `factor` times as many rows."""
        bounds = tuple(bound * factor for bound in self.bounds)
        return replace(self, bounds=bounds, lr_reach=self.lr_reach * factor)

    @property
    def own(self) -> range:
        """Return the rows that this process computes."""
        return self._own(self.rank)

    @property
    def lr_rows(self) -> range:
        """Return the rows of the LR frames that this process gets."""
        return self.around(self.lr_reach)[self.rank]

    def around(self, reach: int) -> tuple[range, ...]:
        """Return every process's band with `reach` rows of the grid on either side."""
        bands = map(self._own, range(len(self.bounds) - 1))
        return tuple(range(max(0, b.start - reach), min(self.bounds[-1], b.stop + reach)) for b in bands)

    def _own(self, rank: int) -> range:
        return range(self.bounds[rank], self.bounds[rank + 1])

    def cells_of_own(self, x: Tensor) -> Tensor:
        """Return those of the cells `x` [B, N, ...] of the LR rows that are this process's own."""
        rows, own = self.lr_rows, self.own
        return x.unflatten(1, (len(rows), -1))[:, own.start - rows.start : own.stop - rows.start].flatten(
            1, 2
        )

    def lr_frames_around(self, lr_frames: Tensor, reach: int) -> Tensor:
        """Cut the LR frames [B, 3, F, H, W] of the LR rows to the band with `reach` rows on either side."""
        given, wanted = self.lr_rows, self.around(reach)[self.rank]
        pixels = lr_frames.shape[3] // len(given)
        return lr_frames[
            :, :, :, (wanted.start - given.start) * pixels : (wanted.stop - given.start) * pixels
        ]

    def plan(self, width: int, window: SpatialWindow, device: torch.device) -> BandPlan:
        """Lay a window over this band of a grid of `width` columns."""
        return _plan(self, width, window, device)

    def with_borrowed(self, x: Tensor, reach: tuple[range, ...]) -> Tensor:
        """Return the own cells `x` [B, N, ...] with those of the rows that the band reaches around them.

        `reach` are the rows that every process wants, its own among them; all call this together.
        """
        (wide,) = self._exchange([x], reach)
        return wide

    def _exchange(self, tensors: Sequence[Tensor], reach: tuple[range, ...]) -> list[Tensor]:
        """Do `with_borrowed` for several tensors at once."""
        own, wanted = self.own, reach[self.rank]
        # Rows come first in memory: what is sent and what is received are single pieces.
        made = []
        for x in tensors:
            rows = x.unflatten(1, (len(own), -1)).permute(1, 2, 0, *range(3, x.dim() + 1))
            buffer = rows.new_empty(len(wanted), *rows.shape[1:])
            _copy(buffer[own.start - wanted.start : own.stop - wanted.start], rows)
            made.append(buffer)
        transfers = []
        for peer in range(len(reach)):
            if peer == self.rank:
                continue
            for buffer in made:
                sent, received = _common(own, reach[peer]), _common(wanted, self._own(peer))
                if sent:
                    piece = buffer[sent.start - wanted.start : sent.stop - wanted.start]
                    transfers.append(dist.P2POp(dist.isend, piece, peer))
                if received:
                    piece = buffer[received.start - wanted.start : received.stop - wanted.start]
                    transfers.append(dist.P2POp(dist.irecv, piece, peer))
        if transfers:
            for work in dist.batch_isend_irecv(transfers):
                work.wait()
        return [buffer.flatten(0, 1).transpose(0, 1) for buffer in made]


@dataclass(frozen=True)
class BandPlan(WindowPlan):
    """A window laid over a band: keys of all rows that it reaches, queries of the band alone."""

    band: Band = field(kw_only=True)
    reach: tuple[range, ...] = field(kw_only=True)

    def with_borrowed(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values [B, G, N, T, D] of all rows that the windows reach."""
        cells = [x.permute(0, 2, 3, 1, 4) for x in (key, value)]
        key, value = (x.permute(0, 3, 1, 2, 4) for x in self.band._exchange(cells, self.reach))
        return key, value


@lru_cache(maxsize=32)
def _plan(band: Band, width: int, window: SpatialWindow, device: torch.device) -> BandPlan:
    whole = window.rows(Grid(band.bounds[-1], width))

    def reached(own: range) -> range:
        first = min(span.start for span in whole[own.start : own.stop])
        last = max(span.stop for span in whole[own.start : own.stop])
        # Tiles that share a window begin at multiples of its stride; the grid of a band must, too.
        return range(min(first, own.start) // window.stride * window.stride, max(last, own.stop))

    reach = tuple(reached(band._own(rank)) for rank in range(len(band.bounds) - 1))
    keys = reach[band.rank]
    queries = range(band.own.start - keys.start, band.own.stop - keys.start)
    return BandPlan(Grid(len(keys), width), window, device, queries, band=band, reach=reach)


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _copy(target: Tensor, source: Tensor) -> None:
    """Copy, in words of eight bytes where rows allow it: strided copies on a card go number by number."""
    if source.shape[-1] * source.element_size() % 8 == 0 and source.stride(-1) == 1:
        target, source = target.view(torch.int64), source.view(torch.int64)
    target.copy_(source)
