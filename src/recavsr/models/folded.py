"""The generator in its form for inference: what never changes during a stream is folded into its weights.

One-step generation has one timestep and one prompt, so a linear layer after a modulated norm is
W (n (1 + s) + b) + c = (W diag(1 + s)) n + (W b + c), and a gate g after a linear layer is diag(g) W.
Folded are: the modulation and its gates, the affine norm before cross-attention, q, k and v as one
product, the patch embedding P with the recycle projection S, and the prompt's keys and values. In exact
arithmetic nothing changes. The embeddings of time and prompt and the prompt's projections, 0.6 billion of
the 5.3 billion parameters, are not kept.

Weights are folded one layer at a time in float32 and rounded once to what they are used in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast, overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recavsr.attention import WindowPlan
from recavsr.fp8 import Float8Rows, FP8Linear
from recavsr.fused import Residual, gelu_float8, gelu_linear, in_pieces, norm_rotate
from recavsr.geometry import Grid
from recavsr.layers import grid_cells
from recavsr.models.dit_block import (
    DiTBlock,
    FeedForward,
    LayerCondition,
    Remember,
    SelfAttention,
    as_they_are,
)
from recavsr.models.generator import ONE_STEP, Condition, Generator, GeneratorConfig, TimeTextEmbedding
from recavsr.models.kv_history import KVHistory
from recavsr.models.lr_projector import LRProjector
from recavsr.models.offload import StreamedLayers, to_main_memory
from recavsr.models.visibility import Visibility
from recavsr.rope import AxisSplit

TensorSource = Callable[[str], Tensor]
"""Gives the tensor of one name of `Generator`'s state, in any dtype, on any device."""

PIECE_ROWS = 16_384
"""Tokens that go through a wide layer at once: only the first block of a large picture has more."""

MakeLinear = Callable[[Tensor, Tensor], nn.Module]
"""Makes a linear layer of a float32 weight [out, in] and bias [out]: in bfloat16, in float8, ..."""


def linear_in(dtype: torch.dtype) -> Callable[[Tensor, Tensor], nn.Linear]:
    """Return the maker of plain linear layers of a dtype."""

    def make(weight: Tensor, bias: Tensor) -> nn.Linear:
        layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
        layer.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
        layer.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
        return layer

    return make


class FusedSelfAttention(SelfAttention):
    """Self-attention whose queries, keys and values come from one product."""

    to_out: nn.Module  # type: ignore[assignment]  # plain or float8

    def __init__(self, plain: SelfAttention, to_qkv: nn.Module, to_out: nn.Module) -> None:
        nn.Module.__init__(self)
        self.heads, self.split = plain.heads, plain.split
        self.to_qkv, self.to_out = to_qkv, to_out
        self.norm_q, self.norm_k = plain.norm_q, plain.norm_k

    def heads_of(self, x: Tensor | Float8Rows, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys, normalised and rotated, and values [B, N, T, H, D] of `x` [B, N, T, C]."""
        count = math.prod(x.shape[:-1])
        if torch.is_grad_enabled() or x.shape[0] > 1 or count <= PIECE_ROWS:
            return self._heads_of(self.to_qkv(x), rotation)
        # The product of a long block would stay in memory for its values.
        made = rotation.new_empty(3, 0)
        turns = rotation.flatten(0, 1).unsqueeze(1)  # N T, 1, D / 2, 2
        first = 0
        for piece in _pieces(x, PIECE_ROWS // 2):
            qkv = self.to_qkv(piece)
            past = first + len(qkv)
            if first == 0:
                made = qkv.new_empty(3, count, self.heads, qkv.shape[-1] // 3 // self.heads)
            for place, heads in zip(made, self._heads_of(qkv[None, :, None], turns[first:past])):
                place[first:past] = heads[0, :, 0]
            first = past
        query, key, value = made.view(3, *x.shape[:-1], *made.shape[2:])
        return query, key, value

    def _heads_of(self, qkv: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        norms = (self.norm_q.weight, self.norm_k.weight, self.norm_q.eps)
        query, key = norm_rotate(qkv, *norms, rotation, self.heads)
        return query, key, qkv.chunk(3, dim=-1)[2].unflatten(-1, (self.heads, -1))


class FoldedFeedForward(FeedForward):
    """Linear, GELU (tanh form), linear: the GELU rides on the first product, or on the rounding to float8."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        nn.Module.__init__(self)
        self.up, self.down = up, down  # type: ignore[assignment]

    def forward(self, x: Tensor | Float8Rows) -> Tensor:
        """Apply to [..., C]."""
        if isinstance(self.up, nn.Linear):
            return in_pieces(self._hidden, cast(nn.Linear, self.down), cast(Tensor, x), PIECE_ROWS)
        if isinstance(x, Float8Rows) and len(x.values) > PIECE_ROWS:
            out = torch.empty(x.shape, dtype=torch.bfloat16, device=x.values.device)
            pieces = _pieces(x, PIECE_ROWS)
            for piece, place in zip(pieces, out.flatten(0, -2).split(len(pieces[0].values))):
                place.copy_(self.down(gelu_float8(self.up(piece))))
            return out
        return self.down(gelu_float8(self.up(x)))

    def _hidden(self, x: Tensor) -> Tensor:
        return gelu_linear(cast(nn.Linear, self.up), x)


@overload
def _pieces(x: Tensor, rows: int) -> list[Tensor]: ...
@overload
def _pieces(x: Float8Rows, rows: int) -> list[Float8Rows]: ...
def _pieces(x: Tensor | Float8Rows, rows: int) -> list[Tensor] | list[Float8Rows]:
    """Cut [..., C] into pieces [n, C] of at most so many rows, nearly equal ones."""
    if isinstance(x, Tensor):
        flat = x.flatten(0, -2)
        return list(flat.tensor_split(-(-len(flat) // rows)))
    count = -(-len(x.values) // rows)
    pairs = zip(x.values.tensor_split(count), x.scale.tensor_split(count))
    return [Float8Rows(values, scale, values.shape) for values, scale in pairs]


class FoldedBlock(nn.Module):
    """One layer without modulation, gates and affine norms: these are in its weights."""

    def __init__(self, block: DiTBlock, modulation: Tensor, make: MakeLinear, dtype: torch.dtype) -> None:
        """Fold a layer in float32 under a modulation [1, 6, C]; `dtype` is that of its q and k norms."""
        super().__init__()
        self.eps = block.eps
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = modulation[0].unbind()
        own, cross, norm = block.self_attention, block.cross_attention, block.cross_norm
        together = [own.to_q, own.to_k, own.to_v]
        weight = torch.cat([layer.weight for layer in together])
        bias = torch.cat([layer.bias for layer in together])
        self.self_attention = FusedSelfAttention(
            own, make(*_after_norm(weight, bias, 1 + scale_a, shift_a)), make(*_gated(own.to_out, gate_a))
        )
        self.self_attention.norm_q.to(dtype)
        self.self_attention.norm_k.to(dtype)
        self.cross_attention = cross
        cross.to_q = make(*_after_norm(cross.to_q.weight, cross.to_q.bias, norm.weight, norm.bias))  # type: ignore[assignment]
        cross.to_out = make(cross.to_out.weight, cross.to_out.bias)  # type: ignore[assignment]
        del cross.to_k, cross.to_v
        cross.norm_q.to(dtype)
        del cross.norm_k
        ffn = block.ffn
        self.ffn = FoldedFeedForward(
            make(*_after_norm(ffn.up.weight, ffn.up.bias, 1 + scale_f, shift_f)),
            make(*_gated(ffn.down, gate_f)),
        )

    def forward(
        self,
        x: Residual,
        condition: LayerCondition,
        rotation: Tensor,
        history: KVHistory | None,
        plan: WindowPlan,
        visibility: Visibility | None = None,
        remember: Remember = as_they_are,
    ) -> tuple[Residual, Any]:
        """Apply the layer to `x` [B, N, T, C] as `DiTBlock.forward` does; the modulation is not read.

        `x` itself is changed and returned; its last update waits for the next layer.
        """
        own, cross, ffn = self.self_attention, self.cross_attention, self.ffn

        def norm_for(reader: nn.Module) -> Tensor | Float8Rows:
            return x.layer_norm(self.eps, isinstance(reader, FP8Linear))

        x.update, kept = own(norm_for(own.to_qkv), rotation, history, plan, visibility, remember)
        x.update = cross(norm_for(cross.to_q), condition.cross_keys, condition.cross_values)
        x.update = ffn(norm_for(ffn.up))
        return x, kept


def _after_norm(weight: Tensor, bias: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight and bias of x -> W (x scale + shift) + c."""
    return weight * scale, torch.addmv(bias, weight, shift)


def _gated(layer: nn.Linear, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight and bias of x -> gate (W x + c)."""
    return gate[:, None] * layer.weight, gate * layer.bias


class FoldedGenerator(Generator):
    """A generator for inference under one prompt and one timestep; made by `fold`.

    It has the same `start` and `step`, and the same state, as the generator that it was made of.
    """

    blocks: nn.Module  # type: ignore[assignment]  # a list, or layers that travel

    def __init__(
        self,
        config: GeneratorConfig,
        prompt: Tensor,
        constants: Condition,
        embed: nn.Module,
        lr_projector: LRProjector,
        blocks: nn.Module,
        head: nn.Linear,
    ) -> None:
        nn.Module.__init__(self)
        self.config = config
        self._split = AxisSplit.wan(config.head_width)
        self._prompt, self._constants = prompt, constants
        self.embed, self.lr_projector, self.blocks, self.head = embed, lr_projector, blocks, head

    def condition(self, prompt: Tensor, timestep: Tensor | float = ONE_STEP) -> Condition:
        """Return the constants that were folded in; raise ValueError for another prompt or timestep."""
        if isinstance(timestep, Tensor) or timestep != ONE_STEP or not torch.equal(prompt, self._prompt):
            raise ValueError("this generator is folded under another prompt or timestep")
        return self._constants

    def _embed(self, noisy: Tensor, lr_tokens: Tensor, recycled: Tensor) -> tuple[Residual, Grid]:
        grid = self._grid(noisy, lr_tokens)
        both = torch.cat([noisy.to(lr_tokens.dtype), recycled.to(lr_tokens.dtype)], dim=1)
        return Residual(self.embed(grid_cells(both, self.config.patch)), lr_tokens), grid

    def _predict(self, x: Residual, condition: Condition, grid: Grid) -> Tensor:
        tokens = x.sum()
        normal = F.layer_norm(tokens, tokens.shape[-1:], eps=self.config.eps)
        return self._unpatch(self.head(normal), grid)


@torch.no_grad()
def fold(
    config: GeneratorConfig,
    source: TensorSource,
    prompt: Tensor,
    dtype: torch.dtype,
    make: MakeLinear | None = None,
    resident: Sequence[bool] | None = None,
) -> FoldedGenerator:
    """Fold the weights that `source` gives, one layer after the other, on the device of `prompt`.

    `prompt` is [1, L, text width]; `dtype` is that of activations and of what is no layer's linear map;
    `make` makes the layers' linear maps (by default plain ones of `dtype`); layers that are not `resident`
    (by default all are) wait in main memory and visit the device at every block.
    """
    device, make = prompt.device, make or linear_in(dtype)

    def load(module: nn.Module, prefix: str) -> None:
        tensors = {name: source(prefix + name).to(device, torch.float32) for name in module.state_dict()}
        module.load_state_dict(tensors, strict=True, assign=True)
        module.requires_grad_(False)

    with torch.device("meta"):
        embedding = TimeTextEmbedding(config)
    load(embedding, "embedding.")
    timestep = torch.full((1,), ONE_STEP, dtype=torch.float32, device=device)
    time, projection, text = embedding(timestep, prompt.float())
    del embedding

    blocks, layers = list[FoldedBlock](), list[LayerCondition]()
    for index in range(config.layers):
        with torch.device("meta"):
            block = DiTBlock(config.width, config.heads, config.head_width, config.ffn_width, config.eps)
        load(block, f"blocks.{index}.")
        layer = block.condition(projection, text)
        layers.append(
            LayerCondition(layer.modulation, layer.cross_keys.to(dtype), layer.cross_values.to(dtype))
        )
        blocks.append(FoldedBlock(block, layer.modulation, make, dtype))
        if resident is not None and not resident[index]:
            to_main_memory(blocks[-1], device)

    with torch.device("meta"):
        projector = config.make_lr_projector()
    load(projector, "lr_projector.")
    projector.to(dtype)
    if device.type == "cuda":
        projector.conv1.arrange_weight()
        projector.conv2.arrange_weight()

    def get(name: str) -> Tensor:
        return source(name).to(device, torch.float32)

    patch_weight, patch_bias = get("patch_embedding.weight").flatten(1), get("patch_embedding.bias")
    recycle, recycle_bias = get("recycle_projection.weight"), get("recycle_projection.bias")
    weight = torch.cat([patch_weight, recycle @ patch_weight], dim=1)
    plain = linear_in(dtype)
    embed = plain(weight, patch_bias + recycle @ patch_bias + recycle_bias)
    shift, scale = (get("modulation") + time[:, None])[0].unbind()
    head = plain(*_after_norm(get("head.weight"), get("head.bias"), 1 + scale, shift))
    constants = Condition(time, tuple(layers))
    together: nn.Module = nn.ModuleList(blocks)
    if resident is not None and not all(resident):
        together = StreamedLayers(blocks, resident, device)
    return FoldedGenerator(config, prompt, constants, embed, projector, together, head).eval()
