"""Causal 3-D convolution that streams: pieces of a clip give what the whole clip gives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recavsr.layers import packed
from recavsr.state import State

Method = Literal["library", "planes", "shifted", "unfolded"]
"""How a causal convolution is computed; all give the same sums (see `CausalConv3d.method`)."""

_WIDE = 512
"""Output channels from which shifted sums in float32 cost more than they save."""

_PIECE_BYTES = 1 << 29
"""How much unfolded input exists at a time: one picture of 1088 x 1920 in the 5B model's projector.

Of taps beside each other: all of a steady block at that size, one picture at a time at 4K."""


@dataclass(frozen=True)
class ConvHistory(State):
    """The last `kernel - 1` input frames of one causal convolution, and its phase."""

    frames: Tensor | None  # [B, C, kernel - 1, H, W]; None: forgotten, the next frame stands for all of them
    phase: int  # frames still to pass before the next output, 0 .. stride - 1
    empty: bool = False  # frames are memory of an earlier stream, for the next history to be written into

    def forget(self) -> ConvHistory:
        """Return the history without its frames; outputs stay in phase with the stream."""
        return replace(self, frames=None)

    def emptied(self) -> ConvHistory:
        """Return the start of another stream, which keeps its history in this one's memory."""
        return replace(self, phase=0, empty=True)


class CausalConv3d(nn.Module):
    """Convolution over time, rows and columns that reads only the present and the past.

    In time it starts with the first frame repeated, and its outputs stand at input frames
    0, stride, 2 stride, ...; in space it pads with zeros. Each call reads the history, convolves,
    then stores its own last frames.

    `method` says how; None chooses by dtype, device and size:

    - "library": the library's 3-D convolution: the reference, and the choice in float32.
    - "unfolded": the cells that each output reads, side by side as one row, times the weight: one matrix
      product, of a bounded number of rows at a time.
    - "planes": taps in time become channels of the library's 2-D convolution. For wide layers: on an H100 the
      5B model's projector takes 10.6 ms a block so, 14.1 unfolded, 87 with the library's 3-D convolution.
    - "shifted": one product of every cell with all places of the kernel in space, then a sum of shifted
      pictures, in float32. For few output channels, at a stride of 1 in space.
    """

    method: Method | None = None

    def __init__(
        self, in_channels: int, out_channels: int, kernel: tuple[int, int, int], stride: tuple[int, int, int]
    ) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, *kernel))
        self.bias = nn.Parameter(torch.zeros(out_channels))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def arrange_weight(self) -> None:
        """Lay the weight out in memory as the products of "unfolded" and "planes" read it.

        Shape and values stay as they are. Otherwise each call makes such a copy.
        """
        in_order = self.weight.data.permute(0, 3, 4, 2, 1).contiguous()
        self.weight.data = in_order.permute(0, 4, 3, 1, 2)

    def step(
        self, history: ConvHistory | None, x: Tensor, in_place: bool = False
    ) -> tuple[ConvHistory, Tensor]:
        """Convolve the next frames `x` [B, C, F, H, W]; `history` is None at the start, where F >= 1.

        Returns the next history and the outputs [B, C', F', H', W'] that fell due; F' may be 0. With
        `in_place` the history given is spent: the next one is written over it.
        """
        before = self._before(history, x)
        return self._step(history, torch.cat([before, x], dim=2), in_place, self.bias)

    def room(self, like: Tensor, frames: int, height: int, width: int) -> tuple[Tensor, Tensor]:
        """Return memory for `step_in_room`, and the part of it [B, C, F, H, W] that takes the next frames.

        Channels lie last in it, next to them frames where the method wants that; type and batch are those of
        `like` [B, ...].
        """
        batch, reach, channels = like.shape[0], self.kernel[0] - 1, self.weight.shape[1]
        if (self.method or self._best_method(like)) == "shifted":
            seen = like.new_empty(batch, height, width, reach + frames, channels).permute(0, 4, 3, 1, 2)
        else:
            seen = like.new_empty(batch, reach + frames, height, width, channels).permute(0, 4, 1, 2, 3)
        return seen, seen[:, :, reach:]

    def step_in_room(
        self, history: ConvHistory | None, seen: Tensor, in_place: bool = False, biased: bool = True
    ) -> tuple[ConvHistory, Tensor]:
        """Do what `step` does for frames that were written into a `room`; the bias is added if `biased`."""
        reach = self.kernel[0] - 1
        seen[:, :, :reach] = self._before(history, seen[:, :, reach:])
        return self._step(history, seen, in_place, self.bias if biased else None)

    def _before(self, history: ConvHistory | None, x: Tensor) -> Tensor:
        """Return the frames in front of `x`: at the start its first one stands for all of them."""
        if history is None or history.frames is None or history.empty:
            return x[:, :, :1].expand(-1, -1, self.kernel[0] - 1, -1, -1)
        return history.frames

    def _step(
        self, history: ConvHistory | None, seen: Tensor, in_place: bool, bias: Tensor | None
    ) -> tuple[ConvHistory, Tensor]:
        frames, phase = seen.shape[2] - self.kernel[0] + 1, 0 if history is None else history.phase
        outputs = max(0, -(-(frames - phase) // self.stride[0]))
        out = self._convolve(seen[:, :, phase:], outputs, bias)
        last = seen[:, :, frames:]
        if in_place and history is not None and history.frames is not None:
            kept = history.frames.copy_(last)
        else:  # a copy: the history must not keep the whole block alive
            kept = last.clone()
        return ConvHistory(kept, phase=phase + outputs * self.stride[0] - frames), out

    def _convolve(self, x: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
        batch, _, _, height, width = x.shape
        if outputs == 0:
            shape = [(side - 1) // step + 1 for side, step in zip((height, width), self.stride[1:])]
            return x.new_empty(batch, self.weight.shape[0], 0, *shape)
        method = self.method or self._best_method(x)
        if method == "library":
            pad = (0, self.kernel[1] // 2, self.kernel[2] // 2)
            return F.conv3d(x, self.weight, bias, self.stride, pad)
        forms = {"unfolded": self._unfolded, "planes": self._planes, "shifted": self._shifted}
        out = forms[method](x, outputs, bias)
        return out.permute(0, 4, 1, 2, 3)

    def _best_method(self, x: Tensor) -> Method:
        if x.dtype == torch.float32:
            return "library"
        wide = len(self.weight) >= _WIDE
        return "shifted" if self.stride[1:] == (1, 1) and not wide else "planes"

    def _unfolded(self, x: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
        """Convolve by products of unfolded rows: [B, C, F, H, W] -> [B, F', H', W', C']."""
        time, rows, columns = self.kernel
        frames = F.pad(x.permute(0, 2, 3, 4, 1), (0, 0, columns // 2, columns // 2, rows // 2, rows // 2))
        taps = frames.unfold(1, time, self.stride[0])[:, :outputs]
        taps = taps.unfold(2, rows, self.stride[1]).unfold(3, columns, self.stride[2])
        taps = taps.permute(0, 1, 2, 3, 6, 7, 5, 4)  # B F' H' W' row column time C
        weight = self.weight.permute(0, 3, 4, 2, 1).flatten(1)
        out = x.new_empty(*taps.shape[:4], len(weight))
        height, line = taps.shape[2], taps.shape[3] * weight.shape[1] * x.element_size()
        pieces = min(height, -(-height * line // _PIECE_BYTES))
        lines = -(-height // pieces)  # pieces of one size: a small last one would leave a card idle
        for clip, made in zip(taps, out):
            for picture, target in zip(clip, made):
                for piece, place in zip(picture.split(lines), target.split(lines)):
                    place.copy_(F.linear(piece.flatten(2), weight, bias))
        return out

    def _planes(self, x: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
        """Convolve each output's frames as channels of one picture; shapes as above."""
        time, rows, columns = self.kernel
        taps = x.unfold(2, time, self.stride[0])[:, :, :outputs].permute(0, 2, 3, 4, 5, 1)  # B F' H W time C
        weight = self.weight.transpose(1, 2).flatten(1, 2)

        def convolved(taps: Tensor) -> Tensor:
            pictures = packed(taps).flatten(4).flatten(0, 1).permute(0, 3, 1, 2)  # channels last in memory
            out = F.conv2d(pictures, weight, bias, self.stride[1:], (rows // 2, columns // 2))
            return out.unflatten(0, (-1, taps.shape[1])).permute(0, 1, 3, 4, 2)

        at_once = max(1, _PIECE_BYTES // (taps[:, :1].numel() * x.element_size()))
        if outputs <= at_once or torch.is_grad_enabled():
            return convolved(taps)
        out = x.new_empty(0)
        for first in range(0, outputs, at_once):
            made = convolved(taps[:, first : first + at_once])
            if first == 0:
                out = made.new_empty(made.shape[0], outputs, *made.shape[2:])
            out[:, first : first + at_once] = made
        return out

    def _shifted(self, x: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
        """Convolve by one product and shifted sums: [B, C, F, H, W] -> [B, F', H, W, C'].

        Every cell is multiplied by the weights of all places of the kernel in space at once; what it
        adds to each neighbour is summed in float32. Few output channels make the library's
        convolutions slow where this product is fast.
        """
        if self.stride[1:] != (1, 1):
            raise ValueError(f"the shifted form needs a stride of 1 in space, not {self.stride[1:]}")
        # A cell's frames side by side, as a `room` has them: those of an output are one row of the product.
        frames = x.permute(0, 3, 4, 2, 1).flatten(3)  # B H W (F C)
        channels, inputs, time, rows, columns = self.weight.shape
        taps = frames.unfold(3, time * inputs, self.stride[0] * inputs)[:, :, :, :outputs]
        weight = self.weight.permute(3, 4, 0, 2, 1).flatten(3).flatten(0, 2)
        start = weight.new_zeros(channels, dtype=torch.float32) if bias is None else bias.float()
        parts = (F.linear(one, weight).unflatten(3, (rows, columns, channels)) for one in taps.unbind(3))
        return torch.stack([_shifted_sum(part, start).to(x.dtype) for part in parts], dim=1)


def _shifted_sum(parts: Tensor, start: Tensor) -> Tensor:
    """Sum what each cell adds to its neighbours [B, H, W, rows, columns, C], in float32, to `start` [C]."""
    height, width, rows, columns = parts.shape[1:5]
    out = start.expand(*parts.shape[:3], -1).contiguous()
    for row in range(rows):
        for column in range(columns):
            down, across = row - rows // 2, column - columns // 2
            here = (
                slice(max(0, -down), height - max(0, down)),
                slice(max(0, -across), width - max(0, across)),
            )
            there = (
                slice(max(0, down), height - max(0, -down)),
                slice(max(0, across), width - max(0, -across)),
            )
            out[:, here[0], here[1]].add_(parts[:, there[0], there[1], row, column])
    return out
