"""Losses of frames behind a frozen VAE decoder, one latent at a time, the backward pass included.

The Wan2.2 decoder keeps some 29 GB for the gradient of one latent at 704 x 1280 (14 GB where its blocks
are computed again, see `recompute`). So each latent is decoded, compared and taken back to the latent at
once, before the next one is decoded; the gradient is cut at what the decoder remembers of earlier latents.

Shapes: B batch, T latents, F = 4 T - 3 frames.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from recavsr.geometry import frames_of_latents
from recavsr.training.losses import FrameLosses, PerceptualDistance
from recavsr.training.objective import Batch


class StreamingDecoder(Protocol):
    """Decodes latents piece by piece, as `models.wan_vae.WanVAE`."""

    def start(self) -> Any:
        """Return the state before the first latent."""
        ...

    def step(self, state: Any, latents: Tensor) -> tuple[Any, Tensor]:
        """Decode the next latents to frames."""
        ...


def frame_losses_by_latent(
    decoder: StreamingDecoder,
    latents: Tensor,
    batch: Batch,
    losses: FrameLosses,
    distance: PerceptualDistance | None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what `losses` gives for the decoded latents [B, C, T, H, W], memory for one of them at a time.

    Means over all F frames: each latent counts by its frames. The sum's gradient reaches `latents` as
    usual, but is computed here already. The gain in PSNR is the mean of the latents'. Raises ValueError
    for losses between frames or of drawn frames, which a latent alone can not give.
    """
    if losses.difference_weight or losses.perceptual_frames is not None:
        raise ValueError("losses between frames, or of drawn frames, need the whole clip at once")
    state, first = decoder.start(), 0
    found: list[dict[str, Tensor]] = []
    gradients: list[Tensor] = []
    for position, piece in enumerate(latents.detach().split(1, dim=2)):
        count = frames_of_latents(position, 1)
        hq, lr = (x[:, :, first : first + count] for x in batch)
        share, first = count / batch.hq.shape[2], first + count
        leaf = piece.requires_grad_(latents.requires_grad)
        state, frames = decoder.step(state.detach(), leaf)
        total, terms = losses(frames, hq, lr, distance, checkpoint=True)
        if latents.requires_grad:
            with torch.autocast(latents.device.type, enabled=False):
                gradients += torch.autograd.grad(share * total, leaf)
        found.append({name: share * value.detach() for name, value in {"total": total, **terms}.items()})
    sums = {name: torch.stack([values[name] for values in found]).sum() for name in found[0]}
    total = sums.pop("total")
    if gradients:
        total = _WithGradient.apply(total, latents, torch.cat(gradients, dim=2))
    return total, sums


class _WithGradient(torch.autograd.Function):
    """A scalar whose gradient with respect to `latents` is known already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, latents: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *of_value: Tensor) -> tuple[None, Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return None, of_value[0] * gradient, None
