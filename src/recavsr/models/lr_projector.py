"""Causal LR projector: LR frames become conditioning tokens (paper, Appendix A.1; after FlashVSR)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recavsr.causal_conv import CausalConv3d, ConvHistory
from recavsr.kernels.available import kernels_for
from recavsr.layers import ChannelRMSNorm, cells_of, copy_packed, halved, unshuffled
from recavsr.state import State

PIECE_FRAMES = 8
"""Frames that go through at once without gradients: those of a steady block."""


@dataclass(frozen=True)
class LRProjectorState(State):
    """One history for each of the two causal convolutions; None before the first frame."""

    first: ConvHistory | None = None
    second: ConvHistory | None = None

    def forget(self) -> LRProjectorState:
        """Return the state without its frames; tokens stay in step with the stream."""
        return LRProjectorState(self.first and self.first.forget(), self.second and self.second.forget())

    def emptied(self) -> LRProjectorState:
        """Return the start of another stream in this one's memory."""
        return LRProjectorState(self.first and self.first.emptied(), self.second and self.second.emptied())


class LRProjector(nn.Module):
    """Pixel unshuffle, two causal convolutions with a stride of 2 in time each, a linear layer.

    4 frames give one latent of tokens (the first frame of a stream gives one alone). Token j reads
    LR frames up to 4j and no later one. With `lr_halved` it reads them at half their size.
    """

    def __init__(
        self, hidden: tuple[int, int], width: int, latent_stride: int, patch: int, lr_halved: bool = False
    ) -> None:
        super().__init__()
        self.lr_halved = lr_halved
        self.cell = latent_stride // 2 if lr_halved else latent_stride  # pixels of a latent's side
        self.conv1 = CausalConv3d(3 * self.cell**2, hidden[0], (4, 3, 3), (2, 1, 1))
        self.norm1 = ChannelRMSNorm(hidden[0])
        self.conv2 = CausalConv3d(hidden[0], hidden[1], (4, 3, 3), (2, patch, patch))
        self.norm2 = ChannelRMSNorm(hidden[1])
        self.out_proj = nn.Linear(hidden[1], width)

    def step(
        self, state: LRProjectorState, lr_frames: Tensor, in_place: bool = False
    ) -> tuple[LRProjectorState, Tensor]:
        """Project the next frames [B, 3, F, H, W] in [-1, 1] at output size.

        Returns tokens [B, N, T, C], T being the latents that fell due (1 + (F - 1) // 4 at the start).
        Without gradients a long first block goes through in pieces, which bounds its memory. With `in_place`
        the state given is spent: the next one is written over it.
        """
        if torch.is_grad_enabled() or lr_frames.shape[2] <= PIECE_FRAMES:
            return self._step(state, lr_frames, in_place)
        tokens = []
        for piece in lr_frames.split(PIECE_FRAMES, dim=2):
            state, made = self._step(state, piece, in_place)
            tokens.append(made)
        return state, torch.cat(tokens, dim=2)

    def _step(
        self, state: LRProjectorState, lr_frames: Tensor, in_place: bool
    ) -> tuple[LRProjectorState, Tensor]:
        if self.lr_halved:
            lr_frames = halved(lr_frames)
        if lr_frames.element_size() == 2 and not torch.is_grad_enabled():
            first, second, x = self._convolved_in_rooms(state, lr_frames, in_place)
        else:
            x = unshuffle_frames(lr_frames, self.cell)
            first, x = self.conv1.step(state.first, x, in_place)
            second, x = self.conv2.step(state.second, self.norm1.silu(x), in_place)  # x may be empty
            x = self.norm2.silu(x)
        tokens = x.flatten(3).permute(0, 3, 2, 1).contiguous()
        return LRProjectorState(first, second), self.out_proj(tokens)

    def _convolved_in_rooms(
        self, state: LRProjectorState, lr_frames: Tensor, in_place: bool
    ) -> tuple[ConvHistory, ConvHistory, Tensor]:
        """Apply both convolutions and norms; what is read is written where it lies behind its history.

        On a card the norms add the convolutions' biases in their own pass.
        """
        late = kernels_for(lr_frames)
        height, width = (side // self.cell for side in lr_frames.shape[3:])
        seen, room = self.conv1.room(lr_frames, lr_frames.shape[2], height, width)
        cells = room.permute(0, 2, 3, 4, 1).unflatten(4, (-1, self.cell, self.cell))
        copy_packed(cells, cells_of(lr_frames, self.cell))
        first, x = self.conv1.step_in_room(state.first, seen, in_place, not late)
        del room, cells, seen
        seen, room = self.conv2.room(x, x.shape[2], height, width)
        self.norm1.silu(x, room, self.conv1.bias if late else None)  # x may be empty
        del x, room
        second, x = self.conv2.step_in_room(state.second, seen, in_place, not late)
        return first, second, self.norm2.silu(x, bias=self.conv2.bias if late else None)


def unshuffle_frames(frames: Tensor, factor: int) -> Tensor:
    """Pixel-unshuffle every frame: [B, C, F, H, W] -> [B, C f f, F, H/f, W/f], order (c, row, column)."""
    if frames.is_cuda:  # the convolutions there read channels last
        return unshuffled(frames, factor)
    return F.pixel_unshuffle(frames.transpose(1, 2), factor).transpose(1, 2)
