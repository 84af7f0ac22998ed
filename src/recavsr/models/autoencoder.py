"""The small encoder of nano: HQ frames to latents, 48 channels of 4 x 16 x 16 as Wan2.2's, or finer ones.

It is needed for training only: the generator learns to predict what it says of the HQ frames. Each
latent is made from its own 4 frames (the first of a stream from 1), so encoding streams by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recavsr.geometry import FRAMES_PER_LATENT
from recavsr.models.lr_projector import unshuffle_frames


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes of the encoder: channels at twice the latents' resolution and at their own."""

    channels: tuple[int, int] = (128, 256)
    latent_channels: int = 48
    latent_stride: int = 16


class ResidualConv(nn.Module):
    """Two 3 x 3 convolutions with a group norm, added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to [N, C, H, W]."""
        return x + self.conv2(F.silu(self.conv1(F.silu(self.norm(x)))))


class Encoder(nn.Module):
    """Frames [B, 3, F, s H, s W] to latents [B, C, T, H, W]."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        fine, coarse = config.channels
        self.config = config
        self.opening = config.latent_stride // 2
        self.stem = nn.Conv2d(3 * self.opening**2, fine, 3, padding=1)
        self.fine = ResidualConv(fine)
        self.down = nn.Conv2d(fine, coarse, 3, stride=2, padding=1)
        self.group = nn.Conv2d(FRAMES_PER_LATENT * coarse, coarse, 1)
        self.coarse = ResidualConv(coarse)
        self.head = nn.Conv2d(coarse, config.latent_channels, 3, padding=1)

    def forward(self, frames: Tensor) -> Tensor:
        """Encode F = 4 T - 3 frames in [-1, 1] from the start of a stream.

        Raises ValueError for another count.
        """
        batch, _, count = frames.shape[:3]
        lead = FRAMES_PER_LATENT - 1
        if (count + lead) % FRAMES_PER_LATENT:
            raise ValueError(f"{count} frames are not 4 T - 3")
        frames = torch.cat([frames[:, :, :1].expand(-1, -1, lead, -1, -1), frames], dim=2)
        x = unshuffle_frames(frames, self.opening).transpose(1, 2).flatten(0, 1)
        x = x.contiguous(memory_format=torch.channels_last)
        x = self.down(F.silu(self.fine(self.stem(x))))
        x = x.unflatten(0, (-1, FRAMES_PER_LATENT)).flatten(1, 2)
        x = self.head(F.silu(self.coarse(self.group(F.silu(x)))))
        return x.unflatten(0, (batch, -1)).transpose(1, 2)
