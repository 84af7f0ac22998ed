"""Losses. Frames are [B, 3, F, H, W] in [-1, 1]; latents [B, C, T, H, W]."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

PerceptualDistance = Callable[[Tensor, Tensor], Tensor]
"""Two batches of images [N, 3, H, W] in [-1, 1] to distances [N]."""


def charbonnier(x: Tensor, target: Tensor, eps: float = 1e-3) -> Tensor:
    """Return the mean of sqrt((x - target)^2 + eps^2), a smooth L1."""
    return (x.float() - target.float()).square().add(eps**2).sqrt().mean()


def temporal_difference(frames: Tensor, target: Tensor, still_weight: float = 0.0) -> Tensor:
    """Return the smooth L1 of frame-to-frame differences: flicker and lag.

    Pixels whose target changes by less than 1/255 count `still_weight` times more: flicker is seen
    most where nothing moves, and is smallest there.
    """
    change = target.float().diff(dim=2)
    error = (frames.float().diff(dim=2) - change).square().add(1e-6).sqrt()
    if still_weight:
        error = error * (1 + still_weight * (change.abs().amax(1, keepdim=True) < 2 / 255))
    return error.mean()


def perceptual(frames: Tensor, target: Tensor, distance: PerceptualDistance, picks: Tensor) -> Tensor:
    """Return the mean perceptual distance of the frames at indices `picks` [n] of every clip."""
    chosen, wanted = (x.index_select(2, picks).transpose(1, 2).flatten(0, 1) for x in (frames, target))
    return distance(chosen.clamp(-1, 1), wanted).mean()


def latent_statistics_penalty(latents: Tensor) -> Tensor:
    """Return how far each latent channel is from mean 0 and deviation 1 over the batch."""
    x = latents.float().transpose(0, 1).flatten(1)
    return x.mean(1).square().mean() + (x.std(1) - 1).square().mean()


def psnr(x: Tensor, target: Tensor) -> Tensor:
    """Return the PSNR in dB of frames in [-1, 1], over the whole batch."""
    error = (x.float().clamp(-1, 1) - target.float()).square().mean() / 4
    return -10 * torch.log10(error)
