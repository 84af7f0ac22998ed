"""Rotary position embedding over time, rows and columns.

Adjacent channel pairs rotate by position x theta^(-2i/n), n being the axis's own channel count.
A head of d channels gives 2 (d // 6) each to rows and columns and the rest to time, in the order
time, rows, columns (128: 44/42/42; Wan2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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
    exponent = torch.arange(0, channels, 2, dtype=torch.float64, device=positions.device) / channels
    return positions.to(torch.float64)[:, None] * THETA**-exponent


def rotation(angle: Tensor) -> tuple[Tensor, Tensor]:
    """Return (cos, sin) in float32, each value repeated for the two channels of its pair."""
    cos, sin = angle.cos().float(), angle.sin().float()
    return cos.repeat_interleave(2, dim=-1), sin.repeat_interleave(2, dim=-1)


def spatial_angles(rows: Tensor, columns: Tensor, split: AxisSplit) -> Tensor:
    """Return the angles [rows x columns, (split.rows + split.columns) // 2] of a grid, row by row."""
    down, across = angles(rows, split.rows), angles(columns, split.columns)
    height, width = len(rows), len(columns)
    return torch.cat(
        [
            down[:, None].expand(height, width, -1).reshape(height * width, -1),
            across[None].expand(height, width, -1).reshape(height * width, -1),
        ],
        dim=-1,
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the adjacent channel pairs of `x` [..., n] by (cos, sin) [..., n] from `rotation`."""
    pairs = x.unflatten(-1, (-1, 2))
    turned = torch.stack([-pairs[..., 1], pairs[..., 0]], dim=-1).flatten(-2)
    return x * cos + turned * sin
