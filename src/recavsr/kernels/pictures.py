"""Frames to pictures in one kernel: clamped, scaled, rounded, channels last."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 512


def levels_of(frames: Tensor, white: int) -> Tensor:
    """Return frames [F, 3, H, W] in [-1, 1] as pictures [F, H, W, 3], 0 to `white`: uint8 for 255, or uint16.

    Rounds half to even, as arithmetic in float32 does it.
    """
    count, _, height, width = frames.shape
    dtype = torch.uint8 if white == 255 else torch.uint16
    out = torch.empty(count, height, width, 3, dtype=dtype, device=frames.device)
    grid = (triton.cdiv(width, _COLUMNS), height, count)
    # Sums are not fused with products: what lies between two levels must round as it does elsewhere.
    _levels[grid](
        frames, out, *frames.stride(), height, width, white / 2, COLUMNS=_COLUMNS, enable_fp_fusion=False
    )
    return out


@triton.jit
def _levels(frames_at, out_at, s_f, s_c, s_h, s_w, height, width, half, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row, frame = tl.program_id(1), tl.program_id(2).to(tl.int64)
    here = column < width
    line = out_at + ((frame * height + row) * width + column) * 3
    for channel in tl.static_range(3):
        place = frames_at + frame * s_f + channel * s_c + row * s_h + column * s_w
        x = tl.load(place, mask=here, other=0.0).to(tl.float32)
        x = (tl.minimum(tl.maximum(x, -1.0), 1.0) + 1.0) * half
        x = x + 8388608.0 - 8388608.0  # 2^23: no bits are left for a fraction
        tl.store(line + channel, x.to(tl.int32).to(out_at.dtype.element_ty), mask=here)
