"""Colour drift: how far a result's mean colour lies from that of its LR frames, block by block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recavsr.stream.blocks import full_scale


@dataclass(frozen=True)
class Drift:
    """What was measured so far, in 8-bit levels; a block counts with its most different channel."""

    blocks: int = 0
    total: float = 0.0
    largest: float = 0.0

    @property
    def mean(self) -> float:
        """Return the mean over the blocks."""
        return self.total / self.blocks if self.blocks else 0.0

    def with_block(self, difference: list[float]) -> Drift:
        """Return the drift with one more block, of these differences of red, green and blue."""
        worst = max(map(abs, difference))
        return Drift(self.blocks + 1, self.total + worst, max(self.largest, worst))


def color_difference(sr_frames: Tensor, lr_frames: np.ndarray) -> Tensor:
    """Return the mean RGB of SR frames [1, 3, F, H, W] in [-1, 1] less that of LR frames [F, h, w, 3].

    In 8-bit levels, [3], on the device of the SR frames. One frame at a time: no large copies.
    """
    means = [frame.float().clamp(-1, 1).mean(dim=(1, 2)) for frame in sr_frames[0].unbind(1)]
    levels = [lr_frames[..., channel].mean(dtype=np.float64) for channel in range(3)]  # faster than at once
    reference = np.array(levels) * (255 / full_scale(lr_frames.dtype))
    sr_mean = (torch.stack(means).mean(dim=0) + 1) * 127.5
    return sr_mean - torch.from_numpy(reference.astype(np.float32)).to(sr_mean.device)
