"""Sequential self-rollout through the same `step` as inference (paper, Sec. 3.2, Appendix B.3)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from recavsr.geometry import BlockPlan
from recavsr.models.decoder import FlashDecoder
from recavsr.models.generator import Condition, Generator
from recavsr.training.recompute import recompute

Encode = Callable[[Tensor], Tensor]
"""HQ frames [B, 3, F, s H, s W] to normalised latents [B, C, T, H, W]: a frozen encoder."""

Decode = Callable[[list[Tensor], Tensor, BlockPlan], Tensor]
"""Blocks of latents, LR frames and the plan of the blocks to frames [B, 3, F, s H, s W]."""


def fitted_plan(plan: BlockPlan, latents: int) -> BlockPlan:
    """Return `plan`, or for clips and images shorter than its first block, a plan that starts with them."""
    return plan if latents >= plan.first else BlockPlan(latents, plan.rest)


def roll_out(
    generator: Generator,
    condition: Condition,
    noise: Tensor,
    lr_frames: Tensor,
    plan: BlockPlan,
    *,
    checkpoint: bool = False,
    through_history: bool = False,
) -> list[Tensor]:
    """Generate a clip block by block, each in one step at t = 1000.

    `noise` [B, C, T, H, W] and `lr_frames` [B, 3, 4 T - 3, s H, s W] cover whole blocks. Recycled
    latents and history are detached between blocks, every block keeps its own graph; with
    `through_history` (not in the paper) gradients flow on into the blocks before, which so learn to
    leave what later ones can use. With `checkpoint` a block keeps only its inputs, and computes again
    in the backward pass. Returns each block's SR latents. Raises ValueError where T does not end at a
    block's end.
    """
    step = partial(recompute, generator.step) if checkpoint else generator.step
    blocks: list[Tensor] = []
    state, latent = generator.start(), 0
    while latent < noise.shape[2]:
        index = len(blocks)
        count, first, frames = plan.latents(index), plan.first_frame(index), plan.frames(index)
        if latent + count > noise.shape[2]:
            raise ValueError(f"{noise.shape[2]} latents do not end at a block's end ({plan})")
        state, latents = step(
            state if through_history else state.detach(),
            condition,
            noise[:, :, latent : latent + count],
            lr_frames[:, :, first : first + frames],
        )
        blocks.append(latents)
        latent += count
    return blocks


def decode_blocks(
    decoder: FlashDecoder,
    blocks: list[Tensor],
    lr_frames: Tensor,
    plan: BlockPlan,
    *,
    checkpoint: bool = False,
    through_history: bool = False,
) -> Tensor:
    """Decode a clip block by block, its history detached between blocks: [B, 3, 4 T - 3, s H, s W].

    With `through_history` gradients flow on into the blocks before. With `checkpoint` a block keeps only
    its inputs, and computes again in the backward pass.
    """
    if through_history and not checkpoint:
        # A latent sees none after it: the whole clip at once is the same, in larger products.
        return decoder.step(decoder.start(), torch.cat(blocks, dim=2), lr_frames)[1]
    step = partial(recompute, decoder.step) if checkpoint else decoder.step
    state, pieces = decoder.start(), []
    for index, latents in enumerate(blocks):
        first, frames = plan.first_frame(index), plan.frames(index)
        before = state if through_history else state.detach()
        state, piece = step(before, latents, lr_frames[:, :, first : first + frames])
        pieces.append(piece)
    return torch.cat(pieces, dim=2)


def split_blocks(latents: Tensor, plan: BlockPlan) -> list[Tensor]:
    """Cut latents [B, C, T, H, W] into the blocks of a plan; the last one may be short."""
    sizes: list[int] = []
    while (left := latents.shape[2] - sum(sizes)) > 0:
        sizes.append(min(left, plan.latents(len(sizes))))
    return list(latents.split(sizes, dim=2))
