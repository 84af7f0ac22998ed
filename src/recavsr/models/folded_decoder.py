"""The decoder in its form for cards: products that read the same input are one product."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn

from recavsr.fused import in_pieces, rotate_heads, swiglu
from recavsr.models.decoder import PIECE_ROWS, DecoderLayer, FlashDecoder, GroupedAttention, SwiGLU


class PackedAttention(GroupedAttention):
    """Grouped attention whose queries, keys and values come from one product."""

    def __init__(self, plain: GroupedAttention) -> None:
        nn.Module.__init__(self)
        self.config, self.group_frames = plain.config, plain.group_frames
        self.query_key_value = _together(plain.query, plain.key, plain.value)
        self.output, self.key_norm, self.value_norm = plain.output, plain.key_norm, plain.value_norm

    def heads_of(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, N, F, H, D], keys and values [B, N, F, G, D] of `x` [B, N, F, C]."""
        config, key_norm = self.config, self.key_norm
        norms = (key_norm.weight, self.value_norm.weight, key_norm.eps)
        return rotate_heads(self.query_key_value(x), config.heads, config.groups, *norms, rotation)


class PackedSwiGLU(SwiGLU):
    """SwiGLU whose two halves come from one product."""

    def __init__(self, plain: SwiGLU) -> None:
        nn.Module.__init__(self)
        self.gate_up, self.down = _together(plain.gate, plain.up), plain.down

    def forward(self, x: Tensor) -> Tensor:
        """Apply to [..., C]."""
        return in_pieces(lambda rows: swiglu(self.gate_up(rows)), self.down, x, PIECE_ROWS)


@torch.no_grad()
def pack(decoder: FlashDecoder) -> FlashDecoder:
    """Put the packed form into the layers of a decoder for inference; return that decoder."""
    for layer in cast(Iterable[DecoderLayer], chain(decoder.backbone, decoder.refinement)):
        layer.attention = PackedAttention(layer.attention)
        layer.feed_forward = PackedSwiGLU(layer.feed_forward)
    return decoder


def _together(*layers: nn.Linear) -> nn.Linear:
    """Return one linear layer with the outputs of several, one after the other."""
    weight = torch.cat([layer.weight for layer in layers])
    made = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    made.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), requires_grad=False)
    return made
