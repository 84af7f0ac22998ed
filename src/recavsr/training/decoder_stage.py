"""Training of the LR-conditioned FlashDecoder on HQ latents and paired LR frames (paper, Appendix B.4).

Shapes: B batch, T latents, F = 4 T - 3 frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from recavsr.geometry import BlockPlan
from recavsr.models.decoder import FlashDecoder
from recavsr.training.losses import FrameLosses, PerceptualDistance
from recavsr.training.objective import Batch, BatchSettings, Losses, OptimizerSettings, Player
from recavsr.training.rollout import Encode, decode_blocks, split_blocks


@dataclass(frozen=True)
class DecoderSettings:
    """Weights and sizes of decoder training; the defaults are the paper's, but for what is marked."""

    batches: BatchSettings = BatchSettings(clips=32, frames=17, images=128, image_fraction=0.2)  # noqa: RUF009
    optimizer: OptimizerSettings = OptimizerSettings(  # noqa: RUF009
        learning_rate=5e-5,
        betas=(0.9, 0.999),
        weight_decay=0.01,
        clip_norm=1.0,  # not from the paper
        warm_up_steps=100,  # not from the paper
        average_decay=0.9995,
    )
    plan: BlockPlan = BlockPlan(1, 2)  # noqa: RUF009
    """The pieces that a clip streams through the decoder in; not from the paper."""
    frames: FrameLosses = FrameLosses("l1", perceptual_weight=0.4)  # noqa: RUF009
    hard_lr_share: float = 0.0
    """Share of samples whose LR frames are blurred away, so that latents matter (not in the paper)."""
    latent_noise: float = 0.0
    """Deviation of noise on the latents of half of the samples (not in the paper)."""
    checkpoint: bool = False
    """Recompute pieces and perceptual features in the backward pass: less memory, more time."""


class DecoderObjective:
    """One player: the decoder, on the latents of a frozen encoder."""

    name = "decoder"

    def __init__(
        self,
        decoder: FlashDecoder,
        encode: Encode,
        distance: PerceptualDistance | None,
        settings: DecoderSettings,
        *,
        compiled: bool = False,
    ) -> None:
        """Set up the player; `distance` (LPIPS) may be None where its weight is 0, else InputError.

        `compiled`: the losses are.
        """
        settings.frames.check(distance)
        self.model, self.settings, self.batches = decoder, settings, settings.batches
        self.encode, self.distance, self.compiled = encode, distance, compiled
        self.players = (Player("decoder", tuple(decoder.parameters()), settings.optimizer),)

    def advance(self, progress: float) -> None:
        """Nothing changes over the stage."""

    def updates(self, batch: Batch) -> Iterator[tuple[str, Losses]]:
        """Yield the losses of the one update of a step."""
        settings, hq = self.settings, batch.hq
        with torch.no_grad():
            latents = with_noise(self.encode(hq).float(), settings.latent_noise)
            lr, _ = with_hard_share(batch.lr, settings.hard_lr_share)
        blocks = split_blocks(latents, settings.plan)
        frames = decode_blocks(self.model, blocks, lr, settings.plan, checkpoint=settings.checkpoint)
        total, terms = settings.frames(
            frames, hq, batch.lr, self.distance, checkpoint=settings.checkpoint, compiled=self.compiled
        )
        yield "decoder", {"loss": total, **terms}

    def sample(self, batch: Batch) -> Tensor:
        """Return the frames [B, 3, F, s H, s W] of HQ latents, for pictures."""
        plan = self.settings.plan
        return decode_blocks(self.model, split_blocks(self.encode(batch.hq), plan), batch.lr, plan)


def with_noise(latents: Tensor, deviation: float) -> Tensor:
    """Add normal noise of a deviation to half of the latent clips [B, C, T, H, W], drawn at random."""
    if not deviation:
        return latents
    noisy = torch.rand(latents.shape[0], 1, 1, 1, 1, device=latents.device) < 0.5
    return latents + noisy * deviation * torch.randn_like(latents)


def with_hard_share(lr_frames: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Blur away a share of the LR clips [B, 3, F, H, W], drawn at random: only 1/16 of the rows stays.

    A decoder that always has good LR frames learns to ignore its latents. Also returns which clips
    they are, [B, 1, 1, 1, 1].
    """
    hard = torch.rand(lr_frames.shape[0], 1, 1, 1, 1, device=lr_frames.device) < share
    return (torch.where(hard, _blurred(lr_frames), lr_frames) if share else lr_frames), hard


def _blurred(lr_frames: Tensor) -> Tensor:
    x = lr_frames.transpose(1, 2).flatten(0, 1)
    x = F.interpolate(F.avg_pool2d(x, 16), size=x.shape[-2:], mode="bilinear", align_corners=False)
    return x.unflatten(0, (lr_frames.shape[0], -1)).transpose(1, 2)
