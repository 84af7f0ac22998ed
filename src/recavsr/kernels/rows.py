"""Passes over rows of tokens, each in one kernel: norms with residuals, rotation, rounding to float8.

A program takes one row of C channels and keeps it in registers: every tensor is read and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


def add_norm(
    x: Tensor,
    update: Tensor | None,
    eps: float,
    rms_weight: Tensor | None,
    float8: bool,
    silu: bool = False,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return x + update [rows, C], its norm [rows, C], and scales [rows, 1] where the norm is float8.

    An `update` [C] is a bias: it is added to every row, and the sum is not kept (`x` is returned).
    The norm is a layer norm without weights, or with an `rms_weight` [C] an RMS norm; with `silu` it goes
    through a SiLU; it is written into `out`, where that is given. The sum is written over `x`, where its rows
    lie side by side, as they do in the models.
    """
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    normal = out
    if normal is None:
        normal = torch.empty(rows, width, dtype=FLOAT8 if float8 else x.dtype, device=x.device)
    scale = torch.empty(rows if float8 else 0, 1, dtype=torch.float32, device=x.device)
    keeps_sum = update is not None and update.dim() == 2
    total = x if not keeps_sum or x.is_contiguous() else x.new_empty(rows, width)
    _add_norm[(rows,)](
        x,
        x if update is None else update,
        x if rms_weight is None else rms_weight,
        total,
        normal,
        scale,
        x.stride(0),
        0 if update is None or not keeps_sum else update.stride(0),
        eps,
        C=width,
        BLOCK=block,
        ADD=update is not None,
        SUM=keeps_sum,
        RMS=rms_weight is not None,
        FLOAT8=float8,
        SILU=silu,
        num_warps=_warps(block),
    )
    return total, normal, scale if float8 else None


def quantize(x: Tensor, gelu: bool) -> tuple[Tensor, Tensor]:
    """Return `x` [rows, C], or its GELU (tanh form), as float8 and scales [rows, 1]."""
    rows, width = x.shape
    block = triton.next_power_of_2(width)
    values = torch.empty(rows, width, dtype=FLOAT8, device=x.device)
    scale = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    _quantize[(rows,)](
        x, values, scale, x.stride(0), C=width, BLOCK=block, GELU=gelu, num_warps=_warps(block)
    )
    return values, scale


def norm_rotate(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, table: Tensor, head_width: int
) -> tuple[Tensor, Tensor]:
    """Return queries and keys [rows, C] of `qkv` [rows, 3 C]: RMS norm over C, then rotation in heads.

    `table` [rows of one picture, head_width / 2, 2] repeats over the batch.
    """
    rows, width = qkv.shape[0], qkv.shape[1] // 3
    query, key = (torch.empty(rows, width, dtype=qkv.dtype, device=qkv.device) for _ in range(2))
    pairs = triton.next_power_of_2(width // 2)
    _norm_rotate[(rows, 2)](
        qkv,
        query_weight,
        key_weight,
        table,
        query,
        key,
        qkv.stride(0),
        len(table),
        eps,
        C=width,
        D=head_width,
        PAIRS=pairs,
        num_warps=_warps(2 * pairs),
    )
    return query, key


def rotate_heads(
    qkv: Tensor, heads: int, groups: int, key_weight: Tensor, value_weight: Tensor, eps: float, table: Tensor
) -> Tensor:
    """Return queries, keys and values [rows, (heads + 2 groups) D] of a product of that shape.

    Queries are rotated, keys normed (RMS over D) and rotated, values normed. `table` is as in `norm_rotate`.
    """
    rows, width = qkv.shape
    together = heads + 2 * groups
    out, lines = torch.empty_like(qkv), 32
    _rotate_heads[(triton.cdiv(rows * together, lines),)](
        qkv,
        key_weight,
        value_weight,
        table,
        out,
        rows * together,
        len(table),
        eps,
        HEADS=heads,
        GROUPS=groups,
        D=width // together,
        LINES=lines,
        num_warps=4,
    )
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu(gate) up [rows, C] of `gate_up` [rows, 2 C], gates first."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    block = triton.next_power_of_2(width)
    _swiglu[(rows,)](gate_up, out, C=width, BLOCK=block, num_warps=_warps(block))
    return out


def copy_both(targets: tuple[Tensor, Tensor], sources: tuple[Tensor, Tensor]) -> None:
    """Copy two tensors [B, G, N, T, D] of one shape and type; channels must be adjacent in memory."""
    batch, groups, cells, latents, width = sources[0].shape
    count, lines = batch * groups * cells * latents, 32
    _copy_both[(triton.cdiv(count, lines), 2)](
        *targets,
        *sources,
        *(stride for x in (*targets, *sources) for stride in x.stride()[:4]),
        count,
        groups,
        cells,
        latents,
        C=width,
        BLOCK=triton.next_power_of_2(width),
        LINES=lines,
        num_warps=4,
    )


# ------------------------------------------------------------------------------------------------ kernels


@triton.jit
def _store_float8(values_at, scale_at, row, value, channel, here, C: tl.constexpr):
    largest = tl.maximum(tl.max(tl.abs(tl.where(here, value, 0.0)), 0), 1e-12)
    tl.store(values_at + row * C + channel, (value * (448.0 / largest)).to(tl.float8e4nv), mask=here)
    tl.store(scale_at + row, largest / 448.0)


@triton.jit
def _add_norm(
    x_at, update_at, weight_at, total_at, normal_at, scale_at, x_row, update_row, eps,
    C: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, SUM: tl.constexpr, RMS: tl.constexpr,
    FLOAT8: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    here = channel < C
    x = tl.load(x_at + row * x_row + channel, mask=here, other=0.0)
    if ADD:
        update = tl.load(update_at + row * update_row + channel, mask=here, other=0.0)
        x = (x.to(tl.float32) + update.to(tl.float32)).to(x.dtype)
    if SUM:
        tl.store(total_at + row * C + channel, x, mask=here)
    x = x.to(tl.float32)
    if RMS:
        weight = tl.load(weight_at + channel, mask=here, other=0.0).to(tl.float32)
        normal = x * tl.rsqrt(tl.sum(x * x, 0) / C + eps) * weight
    else:
        x = tl.where(here, x - tl.sum(x, 0) / C, 0.0)
        normal = x * tl.rsqrt(tl.sum(x * x, 0) / C + eps)
    if SILU:
        normal = normal * tl.sigmoid(normal)
    if FLOAT8:
        _store_float8(normal_at, scale_at, row, normal, channel, here, C)
    else:
        tl.store(normal_at + row * C + channel, normal.to(normal_at.dtype.element_ty), mask=here)


@triton.jit
def _quantize(x_at, values_at, scale_at, x_row, C: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    here = channel < C
    x = tl.load(x_at + row * x_row + channel, mask=here, other=0.0).to(tl.float32)
    if GELU:
        # x / 2 (1 + tanh(u)) = x sigmoid(2 u)
        x = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    _store_float8(values_at, scale_at, row, x, channel, here, C)


@triton.jit
def _norm_rotate(
    qkv_at, query_weight_at, key_weight_at, table_at, query_at, key_at, qkv_row, table_rows, eps,
    C: tl.constexpr, D: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, PAIRS)
    channel = tl.arange(0, 2 * PAIRS)
    here = channel < C
    is_key = tl.program_id(1) == 1
    weight_at = tl.where(is_key, key_weight_at, query_weight_at)
    out_at = tl.where(is_key, key_at, query_at)
    x = tl.load(qkv_at + row * qkv_row + tl.program_id(1) * C + channel, mask=here, other=0.0).to(tl.float32)
    weight = tl.load(weight_at + channel, mask=here, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 0) / C + eps) * weight
    real, imaginary = tl.split(tl.reshape(x, [PAIRS, 2]))
    turn = table_at + row % table_rows * D + pair % (D // 2) * 2
    cos, sin = tl.load(turn), tl.load(turn + 1)
    turned = tl.join(real * cos - imaginary * sin, real * sin + imaginary * cos)
    out = tl.reshape(turned, [2 * PAIRS]).to(out_at.dtype.element_ty)
    tl.store(out_at + row * C + channel, out, mask=here)


@triton.jit
def _rotate_heads(
    qkv_at, key_weight_at, value_weight_at, table_at, out_at, lines, table_rows, eps,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    # A line is one head of one row.
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    channel, pair = tl.arange(0, D), tl.arange(0, D // 2)
    here = (line < lines)[:, None]
    head = line % (HEADS + 2 * GROUPS)
    is_query, is_value = (head < HEADS)[:, None], (head >= HEADS + GROUPS)[:, None]
    place = line[:, None] * D + channel[None, :]
    x = tl.load(qkv_at + place, mask=here, other=0.0).to(tl.float32)
    key_weight = tl.load(key_weight_at + channel).to(tl.float32)[None, :]
    value_weight = tl.load(value_weight_at + channel).to(tl.float32)[None, :]
    factor = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None] * tl.where(is_value, value_weight, key_weight)
    x = tl.where(is_query, x, x * factor)
    real, imaginary = tl.split(tl.reshape(x, [LINES, D // 2, 2]))
    row = line // (HEADS + 2 * GROUPS) % table_rows
    turn = table_at + row[:, None] * D + 2 * pair[None, :]
    turns = here & (head < HEADS + GROUPS)[:, None]
    cos, sin = tl.load(turn, mask=turns, other=1.0), tl.load(turn + 1, mask=turns, other=0.0)
    out = tl.join(real * cos - imaginary * sin, real * sin + imaginary * cos)
    tl.store(out_at + place, tl.reshape(out, [LINES, D]).to(out_at.dtype.element_ty), mask=here)


@triton.jit
def _swiglu(gate_up_at, out_at, C: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    here = channel < C
    gate = tl.load(gate_up_at + row * 2 * C + channel, mask=here, other=0.0).to(tl.float32)
    up = tl.load(gate_up_at + row * 2 * C + C + channel, mask=here, other=0.0).to(tl.float32)
    tl.store(
        out_at + row * C + channel, (gate * tl.sigmoid(gate) * up).to(out_at.dtype.element_ty), mask=here
    )


@triton.jit(do_not_specialize=["count", "groups", "cells", "latents"])
def _copy_both(
    to_at, to2_at, from_at, from2_at,
    to_b, to_g, to_n, to_t,
    to2_b, to2_g, to2_n, to2_t,
    from_b, from_g, from_n, from_t,
    from2_b, from2_g, from2_n, from2_t,
    count, groups, cells, latents, C: tl.constexpr, BLOCK: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    line = tl.program_id(0) * LINES + tl.arange(0, LINES)
    channel = tl.arange(0, BLOCK)
    here = (line < count)[:, None] & (channel < C)[None, :]
    t, line = (line % latents).to(tl.int64), line // latents
    n, line = (line % cells).to(tl.int64), line // cells
    g, b = (line % groups).to(tl.int64), (line // groups).to(tl.int64)
    if tl.program_id(1) == 0:
        source = b * from_b + g * from_g + n * from_n + t * from_t
        target = b * to_b + g * to_g + n * to_n + t * to_t
        value = tl.load(from_at + source[:, None] + channel[None, :], mask=here)
        tl.store(to_at + target[:, None] + channel[None, :], value, mask=here)
    else:
        source = b * from2_b + g * from2_g + n * from2_n + t * from2_t
        target = b * to2_b + g * to2_g + n * to2_n + t * to2_t
        value = tl.load(from2_at + source[:, None] + channel[None, :], mask=here)
        tl.store(to2_at + target[:, None] + channel[None, :], value, mask=here)
