"""Passes over tokens between products, each in one kernel on a card: residual, norm, rotation, float8.

Shapes: B batch, N cells, T latents, C width, H heads, D channels of a head. The plain forms are what a CPU
runs and what gradients flow through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recavsr.fp8 import Float8Rows
from recavsr.kernels.available import kernels_for
from recavsr.onednn import PackedLinear
from recavsr.rope import rotate

CPU_ROWS = 4096
"""Rows of tokens that go through a product at once on a CPU: what it reads and writes stays in the cache."""

CPU_NORM_ROWS = 2048
"""The same of norms, whose steps between are float32."""


def add_norm(
    x: Tensor, update: Tensor | None, eps: float, float8: bool
) -> tuple[Tensor, Tensor | Float8Rows]:
    """Return x + update and its layer norm without weights, both [B, N, T, C].

    With `float8` the norm may come as float8, for a layer of float8 that takes it. A kernel writes the sum
    over `x`.
    """
    if kernels_for(x):
        from recavsr.kernels import rows

        flat = None if update is None else update.flatten(0, -2)
        total, normal, scale = rows.add_norm(x.flatten(0, -2), flat, eps, None, float8)
        total = total.view(x.shape)
        return total, normal.view(x.shape) if scale is None else Float8Rows(normal, scale, x.shape)
    if update is not None:
        x = x + update
    return x, F.layer_norm(x, x.shape[-1:], eps=eps)  # statistics are float32 for every dtype


def add_rms_norm(x: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x + update [..., C] and its RMS norm with a weight [C], computed in float32.

    A kernel writes the sum over `x`.
    """
    if update is None:
        return x, rms_norm(x, weight, eps)
    if kernels_for(x):
        from recavsr.kernels import rows

        total, normal, _ = rows.add_norm(x.flatten(0, -2), update.flatten(0, -2), eps, weight, False)
        return total.view(x.shape), normal.view(x.shape)
    x = x + update
    return x, rms_norm(x, weight, eps)


@dataclass
class Residual:
    """Tokens on their way through layers, and an update that whoever reads them next adds to them.

    Norms do so in the pass that they make anyway. On a card without gradients sums are written over `x`; an
    update is let go as soon as it is added.
    """

    x: Tensor  # [..., C]
    update: Tensor | None = None  # the same shape

    def layer_norm(self, eps: float, float8: bool) -> Tensor | Float8Rows:
        """Add the update; return the layer norm of the sum, without weights (see `add_norm`)."""
        self.x, normal = add_norm(self.x, self.update, eps, float8)
        self.update = None
        return normal

    def rms_norm(self, weight: Tensor, eps: float) -> Tensor:
        """Add the update; return the RMS norm of the sum with a weight [C]."""
        self.x, normal = add_rms_norm(self.x, self.update, weight, eps)
        self.update = None
        return normal

    def sum(self) -> Tensor:
        """Add the update; return the sum."""
        if self.update is not None:
            self.x = self.x.add_(self.update) if kernels_for(self.x) else self.x + self.update
            self.update = None
        return self.x


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of `x` [..., C] with a weight [C], computed in float32, in the dtype of `x`."""
    if kernels_for(x) and x.shape[-1] >= 128 and x.is_contiguous():
        from recavsr.kernels import rows

        return rows.add_norm(x.flatten(0, -2), None, eps, weight, False)[1].view(x.shape)
    weight = weight.float()
    if x.device.type != "cpu" or x.dtype == torch.float32 or torch.is_grad_enabled():
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    out = x.new_empty(x.shape)
    for piece, place in zip(x.flatten(0, -2).split(CPU_NORM_ROWS), out.flatten(0, -2).split(CPU_NORM_ROWS)):
        place.copy_(F.rms_norm(piece.float(), weight.shape, weight, eps))
    return out


def rms_norm_silu(
    x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return the SiLU of the RMS norm of `x` [..., C], C adjacent in memory, in the dtype of `x`.

    A `bias` [C] is added to `x` first. With `out` it is written there.
    """
    if kernels_for(x) and x.is_contiguous() and (out is None or out.is_contiguous()):
        from recavsr.kernels import rows

        flat = None if out is None else out.flatten(0, -2)
        made = rows.add_norm(x.flatten(0, -2), bias, eps, weight, False, silu=True, out=flat)[1]
        return made.view(x.shape)
    made = F.silu(rms_norm(x if bias is None else x + bias, weight, eps))
    return made if out is None else out.copy_(made)


def norm_rotate(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, rotation: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """Return queries and keys [B, N, T, H, D] of `qkv` [B, N, T, 3 C]: RMS norm over C, then rotation.

    `rotation` is the table [N, T, D / 2, 2] of `rope.rotation_table`.
    """
    width = qkv.shape[-1] // 3
    if kernels_for(qkv):
        from recavsr.kernels import rows

        pair = rows.norm_rotate(
            qkv.flatten(0, -2), query_weight, key_weight, eps, rotation.flatten(0, 1), width // heads
        )
        query, key = (y.view(*qkv.shape[:-1], heads, -1) for y in pair)
        return query, key

    def turned(y: Tensor, weight: Tensor) -> Tensor:
        normal = F.rms_norm(y.float(), weight.shape, weight.float(), eps)
        return rotate(normal.unflatten(-1, (heads, -1)), rotation).to(qkv.dtype)

    return turned(qkv[..., :width], query_weight), turned(qkv[..., width : 2 * width], key_weight)


def gelu_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return the GELU (tanh form) of a linear layer of `x` [..., C]; where it can, the product does it."""
    if isinstance(layer, PackedLinear):
        return layer(x, "gelu")
    if kernels_for(x):
        out = torch._addmm_activation(layer.bias, x.flatten(0, -2), layer.weight.t(), use_gelu=True)
        return out.unflatten(0, x.shape[:-1])
    return F.gelu(layer(x), approximate="tanh")


def silu_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Return the SiLU of a linear layer of `x` [..., C]; where it can, the product does it."""
    return layer(x, "swish") if isinstance(layer, PackedLinear) else F.silu(layer(x))


def swiglu_linear(gate: nn.Linear, up: nn.Linear, x: Tensor) -> Tensor:
    """Return silu(gate(x)) up(x) of `x` [..., C]; where they can, the products do all of it."""
    gates = silu_linear(gate, x)
    return up.times(x, gates) if isinstance(up, PackedLinear) else gates * up(x)


def gelu_float8(x: Tensor) -> Tensor | Float8Rows:
    """Return the GELU (tanh form) of `x` [..., C], as float8 where a kernel does both."""
    if kernels_for(x):
        from recavsr.kernels import rows

        values, scale = rows.quantize(x.flatten(0, -2), gelu=True)
        return Float8Rows(values, scale, x.shape)
    return F.gelu(x, approximate="tanh")


def rotate_heads(
    qkv: Tensor,
    heads: int,
    groups: int,
    key_weight: Tensor,
    value_weight: Tensor,
    eps: float,
    rotation: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [B, N, T, H, D], keys and values [B, N, T, G, D] of `qkv` [B, N, T, (H + 2 G) D].

    Queries are rotated, keys normed (RMS over D) and rotated, values normed.
    """
    width = qkv.shape[-1] // (heads + 2 * groups)
    counts = [heads, groups, groups]
    if kernels_for(qkv) and width & (width - 1) == 0:
        from recavsr.kernels import rows

        norms = (key_weight, value_weight, eps)
        out = rows.rotate_heads(qkv.flatten(0, -2), heads, groups, *norms, rotation.flatten(0, 1))
        query, key, value = out.view(*qkv.shape[:-1], -1, width).split(counts, dim=-2)
        return query, key, value
    query, key, value = qkv.unflatten(-1, (-1, width)).split(counts, dim=-2)
    normal = F.rms_norm(key.float(), key_weight.shape, key_weight.float(), eps)
    query, key = (rotate(y, rotation).to(qkv.dtype) for y in (query, normal))
    return query, key, rms_norm(value, value_weight, eps)


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) up [..., C] of `gate_up` [..., 2 C], gates first."""
    if kernels_for(gate_up):
        from recavsr.kernels import rows

        return rows.swiglu(gate_up.flatten(0, -2)).unflatten(0, gate_up.shape[:-1])
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """Apply a linear layer to `x` [..., C], on a CPU without gradients to some rows at a time."""
    return in_pieces(_same, layer, x, CPU_ROWS) if x.device.type == "cpu" else layer(x)


def _same(x: Tensor) -> Tensor:
    return x


def in_pieces(function: Callable[[Tensor], Tensor], last: nn.Linear, x: Tensor, rows: int) -> Tensor:
    """Apply a function of rows, then a linear layer, to `x` [..., C], without gradients some rows at a time.

    What is wide between the two then exists for these only, and may stay in the cache. At most `rows` go
    through at once, on a CPU at most `CPU_ROWS`. Where autocast chooses types, all do.
    """
    flat, kind = x.flatten(0, -2), x.device.type
    rows = CPU_ROWS if kind == "cpu" else rows
    if torch.is_grad_enabled() or torch.is_autocast_enabled(kind) or len(flat) <= rows:
        return last(function(x))
    out = x.new_empty(len(flat), last.out_features)
    pieces = -(-len(flat) // rows)
    for piece, place in zip(flat.tensor_split(pieces), out.tensor_split(pieces)):
        if isinstance(last, PackedLinear):
            place.copy_(last(function(piece)))
        elif last.bias is None:
            torch.mm(function(piece), last.weight.t(), out=place)
        else:
            torch.addmm(last.bias, function(piece), last.weight.t(), out=place)
    return out.unflatten(0, x.shape[:-1])
