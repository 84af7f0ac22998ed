"""Rotary position embedding over time, rows and columns.

Adjacent channel pairs rotate by position x theta^(-2i/n), n being the axis's own channel count.
A head of d channels gives 2 (d // 6) each to rows and columns and the rest to time, in the order
time, rows, columns (128: 44/42/42; Wan2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from recavsr.geometry import Grid

THETA = 10_000.0


@dataclass(frozen=True)
class AxisSplit:
    """How many of a head's channels turn with each axis; all even."""

    time: int
    rows: int
    columns: int

    @staticmethod
    def wan(head_width: int) -> AxisSplit:
        """Return Wan's split: rows = columns = 2 (d // 6), time = the rest."""
        side = 2 * (head_width // 6)
        return AxisSplit(head_width - 2 * side, side, side)

    @staticmethod
    def flash_decoder(head_width: int) -> AxisSplit:
        """Return FlashDecoder's split: 1/4 time, 3/8 rows, 3/8 columns (64: 16/24/24)."""
        side = 2 * (3 * head_width // 16)
        return AxisSplit(head_width - 2 * side, side, side)


def angles(positions: Tensor, channels: int) -> Tensor:
    """Return the rotation angles [len(positions), channels // 2], in float64.

    Angles are exact to 1e-9 at position 10^6, which is why they are made in double precision.
    """
    return positions[:, None] * _frequencies(channels, positions.device)


# Kept for good, and made outside of any recording: captured graphs go on reading them.
@cache
@torch.inference_mode(False)
def _frequencies(channels: int, device: torch.device) -> Tensor:
    exponent = torch.arange(0, channels, 2, dtype=torch.float64, device=device) / channels
    return THETA**-exponent


@cache
@torch.inference_mode(False)
def _first_turns(count: int, channels: int, device: torch.device) -> Tensor:
    """Return exp(i angle) [count, channels // 2, 2] of the positions 0 .. count - 1."""
    return _turns(torch.arange(count, device=device), channels)


def _turns_in_space(first: int, count: int, channels: int, device: torch.device) -> Tensor:
    """Return exp(i angle) [count, channels // 2, 2] of the rows, or columns, from `first` on."""
    last = first + count
    # Of powers of two there are few, whatever sizes of pictures come.
    return _first_turns(1 << (last - 1).bit_length(), channels, device)[first:last]


def rotation_table(
    times: Sequence[int] | Tensor, grid: Grid, split: AxisSplit, device: torch.device, first_row: int = 0
) -> Tensor:
    """Return exp(i angle) of absolute positions as [N, T, channels // 2, 2] float32 (real, imaginary).

    Angles are reduced modulo 2 pi in float64, so position 10^6 is as exact as position 0: rotating
    queries and keys by absolute positions equals the paper's advancing time origin (Appendix A.2),
    since only differences of angles enter a score. Times may be integers on the device [T], so that a
    captured graph reads them at each replay; consecutive numbers take no copy to the device.
    """
    # Sines of the three axes apart are few; the table repeats them over the grid.
    time = _turns(_positions(times, device), split.time)
    down = _turns_in_space(first_row, grid.height, split.rows, device)
    across = _turns_in_space(0, grid.width, split.columns, device)
    parts = (time, down[:, None, None], across[None, :, None])
    shape = (grid.height, grid.width, len(times), -1, 2)
    return torch.cat([part.expand(shape) for part in parts], dim=-2).flatten(0, 1)


def following(times: Sequence[int], first: Tensor | None) -> Sequence[int] | Tensor:
    """Return consecutive `times`, counted on the device from `first` [] where it is given."""
    return times if first is None else first + torch.arange(len(times), device=first.device)


def _positions(times: Sequence[int] | Tensor, device: torch.device) -> Tensor:
    if isinstance(times, Tensor):
        return times
    first = times[0]
    if list(times) == list(range(first, first + len(times))):
        return torch.arange(first, first + len(times), device=device)
    return torch.tensor(times, device=device)


def _turns(positions: Tensor, channels: int) -> Tensor:
    """Return exp(i angle) [len(positions), channels // 2, 2] in float32."""
    angle = angles(positions, channels)
    turns = torch.empty(*angle.shape, 2, dtype=torch.float32, device=angle.device)
    torch.cos(angle, out=turns[..., 0])
    torch.sin(angle, out=turns[..., 1])
    return turns


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate the adjacent channel pairs of `x` [B, N, T, heads, D] by `table` [N, T, D / 2, 2].

    Computed and returned in float32.
    """
    pairs = x.float().unflatten(-1, (-1, 2))
    turn = table[:, :, None]
    if pairs.device.type == "cpu":  # one pass; compilers on other devices fuse the real form better
        turned = torch.view_as_complex(pairs.contiguous()) * torch.view_as_complex(turn)
        return torch.view_as_real(turned).flatten(-2)
    real, imaginary = pairs.unbind(-1)
    cos, sin = turn.unbind(-1)
    return torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1).flatten(-2)
