"""Where training batches come from: sources whose position can be saved, and drawing one batch ahead.

H W rows and columns of a clip, F frames.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from recavsr.data.clips import ClipSource
from recavsr.data.degradation import usm_sharpen
from recavsr.data.pool import PairSettings, TrainingPool, make_pairs, upsample_lr
from recavsr.errors import InputError
from recavsr.training.distributed import World
from recavsr.training.objective import Batch, BatchSettings


class BatchSource(Protocol):
    """An endless sequence of batches with a position in it."""

    def batch(self, settings: BatchSettings) -> Batch:
        """Return this process's share of the next batch, on the training device."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position: plain values and tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position that `state_dict` returned."""
        ...

    def describe(self, number: int) -> str:
        """Say what rebuilds batch `number` (from 0), for messages."""
        ...


def size_of_batch(settings: BatchSettings, seed: int, number: int) -> tuple[int, int]:
    """Return (clips, frames) of batch `number`: still images for a share of the numbers, else video.

    A pure function of its arguments, so that all ranks draw the same kind.
    """
    draws = settings.images > 0 and settings.image_fraction > 0
    if draws and np.random.default_rng((seed, number, 7)).random() < settings.image_fraction:
        return settings.images, 1
    return settings.clips, settings.frames


class PairSource:
    """Batches that are a pure function of (seed, number): exact resume, the same for any number of ranks.

    Every clip is rendered and degraded for one use, on `workers` threads that work a batch ahead.
    """

    def __init__(
        self, clips: ClipSource, pairs: PairSettings, world: World, *, seed: int = 0, workers: int = 0
    ) -> None:
        if not clips.shots and not clips.photos:
            raise InputError(f"{clips.folder} holds no training data: neither videos nor photos")
        self._clips, self._pairs, self._world, self._seed = clips, pairs, world, seed
        self._number = 0
        self._first = 0  # number of the first clip of the next batch
        self._threads = ThreadPoolExecutor(workers, "pairs") if workers else None
        self._ahead: tuple[BatchSettings, list[Future[tuple[Tensor, Tensor]]]] | None = None

    def batch(self, settings: BatchSettings) -> Batch:
        """Return this rank's clips of the next batch: [B, 3, F, H, W]."""
        count, frames = size_of_batch(settings, self._seed, self._number)
        if self._threads is None:
            made = [self._make(index, frames) for index in self._own(self._first, count)]
        else:
            if self._ahead is None or self._ahead[0] != settings:
                self._ahead = settings, self._submit(settings, self._number, self._first)
            made = [future.result() for future in self._ahead[1]]
            self._ahead = settings, self._submit(settings, self._number + 1, self._first + count)
        self._number, self._first = self._number + 1, self._first + count
        hq, lr = (torch.stack(parts).to(self._world.device, non_blocking=True) for parts in zip(*made))
        return Batch(hq, lr)

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of the next batch and its first clip."""
        return {"number": self._number, "first": self._first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a batch."""
        self._number, self._first = state["number"], state["first"]
        self._ahead = None

    def describe(self, number: int) -> str:
        """Name seed and batch."""
        return f"batch seed ({self._seed}, {number})"

    def _own(self, first: int, count: int) -> range:
        share = self._world.share(count, "clips of a batch")
        return range(first + self._world.rank * share, first + (self._world.rank + 1) * share)

    def _submit(
        self, settings: BatchSettings, number: int, first: int
    ) -> list[Future[tuple[Tensor, Tensor]]]:
        assert self._threads is not None
        count, frames = size_of_batch(settings, self._seed, number)
        return [self._threads.submit(self._make, index, frames) for index in self._own(first, count)]

    def _make(self, index: int, frames: int) -> tuple[Tensor, Tensor]:
        """Make clip `index`: HQ and enlarged LR, [3, F, H, W] in [-1, 1]."""
        settings = replace(self._pairs, frames=frames, degradations=1)
        if frames == 1 and settings.image_video_fraction is not None:
            settings = replace(settings, video_fraction=settings.image_video_fraction)
        (pair,) = make_pairs(self._clips, settings, self._seed, index)
        hq = self._clips.render(pair.spec, frames, settings.size)
        if settings.sharpen:
            hq = usm_sharpen(hq, settings.sharpen)
        lr = upsample_lr(pair.lr, settings.size)
        return hq.transpose(0, 1).mul(2).sub_(1), lr.transpose(0, 1).contiguous()


class PoolSource:
    """Batches of a `TrainingPool`: throughput for a GPU.

    What the pool holds depends on how fast its workers are, so a resumed run sees other batches than
    an uninterrupted one (with workers=0 the same, if the pool is made and filled the same way).
    """

    def __init__(self, pool: TrainingPool, world: World, *, seed: int = 0, made_before: int = 0) -> None:
        self._pool, self._world, self._seed, self._made_before = pool, world, seed, made_before
        self._number = 0

    def batch(self, settings: BatchSettings) -> Batch:
        """Return random windows of random records."""
        count, frames = size_of_batch(settings, self._seed, self._number)
        self._number += 1
        return Batch(*self._pool.batch(self._world.share(count, "clips of a batch"), frames))

    def state_dict(self) -> dict[str, Any]:
        """Return the batch's number, the pool's position, and how many records the run had made."""
        pool = self._pool.state_dict()
        return {"number": self._number, **pool, "made": self._made_before + pool["made"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on drawing from a position."""
        self._number = state["number"]
        self._pool.load_state_dict(state)

    def describe(self, number: int) -> str:
        """Name seed and batch; a pool with workers can't draw it again."""
        return f"batch {number} of pool seed {self._seed}"


class Prefetch:
    """Draws the next batch while a step runs: on a card on a stream of its own."""

    def __init__(self, source: BatchSource, settings: BatchSettings, device: torch.device) -> None:
        self._source, self._settings = source, settings
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._position: dict[str, Any] = source.state_dict()
        self._waiting: Batch | None = None
        self._taken: torch.cuda.Event | None = None

    def prepare(self) -> None:
        """Draw the next batch now, if it is not waiting already."""
        if self._waiting is not None:
            return
        if self._taken is not None:
            # Wait for the step before the present one, or the batches of a host far ahead fill the card.
            self._taken.synchronize()
        self._position = self._source.state_dict()
        with torch.cuda.stream(self._stream):  # None: no change
            self._waiting = self._source.batch(self._settings)

    def peek(self) -> Batch:
        """Return the next batch and keep it."""
        self.prepare()
        assert self._waiting is not None
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_stream(self._stream)
            for tensor in self._waiting:
                tensor.record_stream(current)
        return self._waiting

    def take(self) -> Batch:
        """Return the next batch, in order for the current stream."""
        batch = self.peek()
        self._waiting = None
        if self._stream is not None:
            self._taken = torch.cuda.current_stream(self._stream.device).record_event()
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the batch that `take` returns next."""
        return self._position if self._waiting is not None else self._source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position; a batch that waits is dropped."""
        self._source.load_state_dict(state)
        self._waiting = None
