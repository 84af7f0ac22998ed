"""Colour fixes: take the colours of the LR frames, keep the detail of the result. Off by default."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from recavsr.errors import InputError
from recavsr.stream.blocks import full_scale

ColorFix = Literal["none", "adain", "wavelet"]

COLOR_FIXES = get_args(ColorFix)

_LEVELS = 5
_EPS = 1e-5


def check_color_fix(name: str) -> None:
    """Raise InputError where there is no such colour fix."""
    if name not in COLOR_FIXES:
        raise InputError(f"color fix {name!r} is unknown; choose {', '.join(COLOR_FIXES)}")


def adain(frames: Tensor, reference: Tensor) -> Tensor:
    """Give each channel of each frame the mean and deviation of the reference (AdaIN).

    Both are [B, 3, F, H, W] in [-1, 1]; statistics are taken in [0, 1] with unbiased variance.
    """
    content, style = (frames + 1) / 2, (reference + 1) / 2

    def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
        variance, mean = torch.var_mean(x, dim=(-2, -1), keepdim=True, correction=1)
        return mean, (variance + _EPS).sqrt()

    (mean, deviation), (target_mean, target_deviation) = statistics(content), statistics(style)
    return ((content - mean) / deviation * target_deviation + target_mean) * 2 - 1


def wavelet(frames: Tensor, lr_frames: np.ndarray) -> Tensor:
    """Keep the frames' high frequencies and take the low ones from the LR frames.

    `frames` are [1, 3, F, H, W] in [-1, 1] at the unpadded output size; `lr_frames` [F, h, w, 3] are
    the original pictures, brought to that size by a bicubic. Low frequencies are what five levels of
    a dilated 3 x 3 binomial blur leave.
    """
    reference = torch.from_numpy(lr_frames.astype(np.float32)).to(frames.device).permute(0, 3, 1, 2)
    size = frames.shape[-2:]
    reference = reference / full_scale(lr_frames.dtype)
    reference = F.interpolate(reference, size=size, mode="bicubic", align_corners=False).clamp(0, 1)
    decoded = ((frames[0].transpose(0, 1).float() + 1) / 2).clamp(0, 1)
    fixed = decoded - _low_frequencies(decoded) + _low_frequencies(reference)
    return (fixed * 2 - 1).transpose(0, 1).unsqueeze(0)


def _low_frequencies(x: Tensor) -> Tensor:
    line = torch.tensor([1.0, 2.0, 1.0], dtype=x.dtype, device=x.device) / 4
    kernel = torch.outer(line, line).expand(3, 1, 3, 3)
    for level in range(_LEVELS):
        reach = 2**level
        x = F.conv2d(F.pad(x, (reach,) * 4, mode="replicate"), kernel, groups=3, dilation=reach)
    return x
