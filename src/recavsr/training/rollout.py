"""Sequential self-rollout through the same `step` as inference (paper, Sec. 3.2, Appendix C.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from recavsr.geometry import BlockPlan
from recavsr.models.decoder import FlashDecoder
from recavsr.models.generator import Condition, Generator


def roll_out(
    generator: Generator, condition: Condition, noise: Tensor, lr_frames: Tensor, plan: BlockPlan
) -> list[Tensor]:
    """Generate a clip block by block, each in one step at t = 1000.

    `noise` [B, C, T, H, W] and `lr_frames` [B, 3, 4 T - 3, s H, s W] cover whole blocks. Recycled
    latents and history are detached between blocks, every block keeps its own graph. Returns each
    block's SR latents. Raises ValueError where T does not end at a block's end.
    """
    blocks: list[Tensor] = []
    state, latent = generator.start(), 0
    while latent < noise.shape[2]:
        index = len(blocks)
        count, first, frames = plan.latents(index), plan.first_frame(index), plan.frames(index)
        if latent + count > noise.shape[2]:
            raise ValueError(f"{noise.shape[2]} latents do not end at a block's end ({plan})")
        state, latents = generator.step(
            state.detach(),
            condition,
            noise[:, :, latent : latent + count],
            lr_frames[:, :, first : first + frames],
        )
        blocks.append(latents)
        latent += count
    return blocks


def decode_blocks(decoder: FlashDecoder, blocks: list[Tensor], lr_frames: Tensor, plan: BlockPlan) -> Tensor:
    """Decode a clip block by block, its history detached between blocks: [B, 3, 4 T - 3, s H, s W]."""
    state, pieces = decoder.start(), []
    for index, latents in enumerate(blocks):
        first, frames = plan.first_frame(index), plan.frames(index)
        state, piece = decoder.step(state.detach(), latents, lr_frames[:, :, first : first + frames])
        pieces.append(piece)
    return torch.cat(pieces, dim=2)
