"""Causal 3-D convolution that streams: pieces of a clip give what the whole clip gives."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recavsr.state import State


@dataclass(frozen=True)
class ConvHistory(State):
    """The last `kernel - 1` input frames of one causal convolution, and its phase."""

    frames: Tensor | None  # [B, C, kernel - 1, H, W]; None: forgotten, the next frame stands for all of them
    phase: int  # frames still to pass before the next output, 0 .. stride - 1

    def forget(self) -> ConvHistory:
        """Return the history without its frames; outputs stay in phase with the stream."""
        return replace(self, frames=None)


class CausalConv3d(nn.Module):
    """Convolution over time, rows and columns that reads only the present and the past.

    In time it starts with the first frame repeated, and its outputs stand at input frames
    0, stride, 2 stride, ...; in space it pads with zeros. Each call reads the history, convolves,
    then stores its own last frames.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel: tuple[int, int, int], stride: tuple[int, int, int]
    ) -> None:
        super().__init__()
        self.kernel, self.stride = kernel, stride
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, *kernel))
        self.bias = nn.Parameter(torch.zeros(out_channels))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def step(self, history: ConvHistory | None, x: Tensor) -> tuple[ConvHistory, Tensor]:
        """Convolve the next frames `x` [B, C, F, H, W]; `history` is None at the start, where F >= 1.

        Returns the next history and the outputs [B, C', F', H', W'] that fell due; F' may be 0.
        """
        reach = self.kernel[0] - 1
        before, phase = (None, 0) if history is None else (history.frames, history.phase)
        if before is None:
            before = x[:, :, :1].expand(-1, -1, reach, -1, -1)
        seen = torch.cat([before, x], dim=2)
        frames, stride = x.shape[2], self.stride[0]
        outputs = max(0, -(-(frames - phase) // stride))
        after = ConvHistory(seen[:, :, frames:], phase=phase + outputs * stride - frames)
        return after, self._convolve(seen[:, :, phase:], outputs)

    def _convolve(self, x: Tensor, outputs: int) -> Tensor:
        batch, _, _, height, width = x.shape
        if outputs == 0:
            shape = [(side - 1) // step + 1 for side, step in zip((height, width), self.stride[1:])]
            return x.new_empty(batch, self.weight.shape[0], 0, *shape)
        pad = (self.kernel[1] // 2, self.kernel[2] // 2)
        if x.dtype == torch.float32:  # the reference: the library's own sums
            return F.conv3d(x, self.weight, self.bias, self.stride, (0, *pad))
        if self.stride[1:] == (1, 1):
            frames = x.permute(0, 2, 3, 4, 1).contiguous()
            step, last = self.stride[0], (outputs - 1) * self.stride[0] + 1
            pieces = [frames[:, tap : tap + last : step] for tap in range(self.kernel[0])]
            return self._as_product(torch.cat(pieces, dim=4))
        taps = x.unfold(2, self.kernel[0], self.stride[0])[:, :, :outputs]
        # The taps in time become channels of a 2-D convolution: several times faster than the
        # library's 3-D kernels in bfloat16.
        taps = taps.permute(0, 2, 1, 5, 3, 4).reshape(batch * outputs, -1, height, width)
        out = F.conv2d(taps, self.weight.flatten(1, 2), self.bias, self.stride[1:], pad)
        return out.unflatten(0, (batch, outputs)).transpose(1, 2)

    def _as_product(self, taps: Tensor) -> Tensor:
        """Convolve `taps` [B, F, H, W, kernel C] by one matrix product, then add shifted pictures.

        Every cell is multiplied by the weights of all places of the kernel in space at once; what it
        adds to each neighbour is summed in float32. Few output channels make the library's
        convolutions slow where this product is fast.
        """
        channels, _, _, rows, columns = self.weight.shape
        weight = self.weight.permute(3, 4, 0, 2, 1).flatten(3).flatten(0, 2)
        parts = F.linear(taps, weight).unflatten(4, (rows, columns, channels))
        height, width = taps.shape[2:4]
        out = self.bias.float().expand(*taps.shape[:4], -1).contiguous()
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
                out[:, :, here[0], here[1]] += parts[:, :, there[0], there[1], row, column]
        return out.to(taps.dtype).permute(0, 4, 1, 2, 3)
