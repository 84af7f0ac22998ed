"""One layer of the diffusion transformer (Wan2.2's block with a streaming self-attention).

Shapes: B batch, T latents, N tokens of a latent, C width, H heads, D channels of a head, L prompt
tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recavsr.attention import WindowPlan, windowed_attention
from recavsr.layers import RMSNorm, gated_residual, modulated_norm, modulation_table
from recavsr.models.kv_history import KVHistory, latents_at
from recavsr.models.visibility import Visibility
from recavsr.rope import AxisSplit, rotate

Remember = Callable[[Tensor, Tensor], Any]
"""Takes a call's own keys and values [B, H, N, T, D] when they have been used; returns what is kept."""


def as_they_are(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return both."""
    return keys, values


@dataclass(frozen=True)
class LayerCondition:
    """What stays the same for a layer during a whole stream, computed once."""

    modulation: Tensor  # [B or 1, 6, C] float32: shift, scale, gate of attention, then of the FFN
    cross_keys: Tensor  # [B or 1, H, L, D]
    cross_values: Tensor  # [B or 1, H, L, D]


class SelfAttention(nn.Module):
    """Attention over the current latents and the visible past, inside a spatial window."""

    def __init__(self, width: int, heads: int, head_width: int, eps: float) -> None:
        super().__init__()
        inner = heads * head_width
        self.heads, self.split = heads, AxisSplit.wan(head_width)
        self.to_q = nn.Linear(width, inner)
        self.to_k = nn.Linear(width, inner)
        self.to_v = nn.Linear(width, inner)
        self.to_out = nn.Linear(inner, width)
        self.norm_q = RMSNorm(inner, eps)  # over all heads together, before they are split
        self.norm_k = RMSNorm(inner, eps)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values [..., H D] of `x` [..., C], not yet normalised."""
        return self.to_q(x), self.to_k(x), self.to_v(x)

    def heads_of(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, normalised and rotated, and values [B, N, T, H, D] of `x` [B, N, T, C]."""

        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (self.heads, -1))

        query, key, value = self.project(x)
        query = rotate(heads(self.norm_q.in_float32(query)), rotation).to(x.dtype)
        key = rotate(heads(self.norm_k.in_float32(key)), rotation).to(x.dtype)
        return query, key, heads(value)

    def forward(
        self,
        x: Tensor,
        rotation: Tensor,
        history: KVHistory | None,
        plan: WindowPlan,
        visibility: Visibility | None,
        remember: Remember = as_they_are,
    ) -> tuple[Tensor, Any]:
        """Attend from `x` [B, N, T, C], one block, to itself and the history.

        With a `visibility`, `x` is a clip of whole blocks from the start of a stream, and each block
        finds its history in `x` itself. `rotation` is the table of these tokens' absolute positions.
        Returns the result [B, N, T, C] and what `remember` makes of this call's own keys and values.
        """
        query, key, value = self.heads_of(x, rotation)
        query, key, value = (y.permute(0, 3, 1, 2, 4) for y in (query, key, value))
        query = query.unsqueeze(4)
        key, value = plan.with_borrowed(key, value)
        if visibility is not None:
            out = attend_by_block(query, key, value, plan, visibility)
        else:
            earlier = history.seen() if history and history.positions else None
            out = windowed_attention(query, key, value, plan, earlier=earlier)
        kept = remember(key, value)
        del query, key, value  # a long block's are large
        return self.to_out(out.squeeze(4).permute(0, 2, 3, 1, 4).flatten(3)), kept


def attend_by_block(
    query: Tensor, key: Tensor, value: Tensor, plan: WindowPlan, visibility: Visibility
) -> Tensor:
    """Attend from all blocks of a clip, `query` [B, H, N, T, 1, D], to what each of them sees.

    `key` and `value` are [B, H, N, T, D]. Work grows with the history, not with the clip, and needs
    no mask: a block takes its history out of the clip as it would take it out of a KVHistory.
    """
    results = []
    for view in visibility:
        seen = view.history + view.block
        bias = view.log_prior
        if bias is not None:
            bias = F.pad(bias, (0, len(view.block)))  # scores of the block itself stay as they are
        results.append(
            windowed_attention(
                query[:, :, :, view.block[0] : view.block[-1] + 1],
                latents_at(key, seen),
                latents_at(value, seen),
                plan,
                bias,
            )
        )
    return torch.cat(results, dim=3)


class CrossAttention(nn.Module):
    """Attention from every token to the prompt; keys and values are computed once a stream."""

    def __init__(self, width: int, heads: int, head_width: int, eps: float) -> None:
        super().__init__()
        inner = heads * head_width
        self.heads = heads
        self.to_q = nn.Linear(width, inner)
        self.to_k = nn.Linear(width, inner)
        self.to_v = nn.Linear(width, inner)
        self.to_out = nn.Linear(inner, width)
        self.norm_q = RMSNorm(inner, eps)
        self.norm_k = RMSNorm(inner, eps)

    def keys_and_values(self, prompt: Tensor) -> tuple[Tensor, Tensor]:
        """Project the prompt [B, L, C] to keys and values [B, H, L, D]; no rotation, no mask."""
        key, value = self.norm_k(self.to_k(prompt)), self.to_v(prompt)
        return tuple(x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (key, value))  # type: ignore[return-value]

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend from `x` [B, N, T, C] to the prompt's keys and values [B or 1, H, L, D]."""
        batch, tokens, latents, _ = x.shape
        query = self.norm_q(self.to_q(x)).flatten(1, 2).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        keys, values = (y.expand(batch, -1, -1, -1) for y in (keys, values))
        out = F.scaled_dot_product_attention(query, keys, values)
        return self.to_out(out.transpose(1, 2).flatten(2).unflatten(1, (tokens, latents)))


class FeedForward(nn.Module):
    """Linear, GELU (tanh form), linear."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to [..., C]."""
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class DiTBlock(nn.Module):
    """Modulated self-attention, cross-attention to the prompt, modulated feed-forward."""

    def __init__(self, width: int, heads: int, head_width: int, ffn_width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.modulation = modulation_table(6, width)
        self.self_attention = SelfAttention(width, heads, head_width, eps)
        self.cross_norm = nn.LayerNorm(width, eps)
        self.cross_attention = CrossAttention(width, heads, head_width, eps)
        self.ffn = FeedForward(width, ffn_width)

    def condition(self, timestep_projection: Tensor, prompt: Tensor) -> LayerCondition:
        """Fold the time embedding [B, 6, C] and the prompt [B, L, C] into this layer's constants."""
        keys, values = self.cross_attention.keys_and_values(prompt)
        return LayerCondition(self.modulation.float() + timestep_projection.float(), keys, values)

    def forward(
        self,
        x: Tensor,
        condition: LayerCondition,
        rotation: Tensor,
        history: KVHistory | None,
        plan: WindowPlan,
        visibility: Visibility | None = None,
        remember: Remember = as_they_are,
    ) -> tuple[Tensor, Any]:
        """Apply the layer to `x` [B, N, T, C]; also return what `remember` makes of its keys and values."""
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = condition.modulation.unbind(1)
        attended, kept = self.self_attention(
            modulated_norm(x, scale_a, shift_a, self.eps), rotation, history, plan, visibility, remember
        )
        x = gated_residual(x, attended, gate_a)
        x = x + self.cross_attention(self._cross_norm(x), condition.cross_keys, condition.cross_values)
        x = gated_residual(x, self.ffn(modulated_norm(x, scale_f, shift_f, self.eps)), gate_f)
        return x, kept

    def _cross_norm(self, x: Tensor) -> Tensor:
        weight, bias = self.cross_norm.weight.float(), self.cross_norm.bias.float()
        return F.layer_norm(x.float(), x.shape[-1:], weight, bias, self.eps).to(x.dtype)
