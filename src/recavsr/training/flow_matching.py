"""Flow matching: the path from latents to noise, its times and its loss (paper, Appendix B.2).

Shapes: latents are [B, C, T, H, W], times [B] in [0, 1]: 0 is clean, 1 is pure noise.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

TIMESTEPS = 1000.0
"""The networks' timestep of time 1."""


def logit_normal_times(count: int, device: torch.device, one_step_share: float = 0.0) -> Tensor:
    """Draw times [count]: t = sigmoid(u), u standard normal.

    A share of them is set to 1, where one-step generation starts and which the logit-normal never
    reaches (not from the paper; 0 is the paper's).
    """
    times = torch.randn(count, device=device).sigmoid()
    if not one_step_share:
        return times
    return times.masked_fill(torch.rand(count, device=device) < one_step_share, 1.0)


def noised(latents: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    """Return z_t = (1 - t) z + t noise, every clip at its own time."""
    return torch.lerp(latents, noise, times[:, None, None, None, None])


def flow_matching_loss(prediction: Tensor, latents: Tensor, noise: Tensor) -> Tensor:
    """Return the mean squared error of a prediction against the velocity noise - z."""
    return F.mse_loss(prediction.float(), noise - latents)
