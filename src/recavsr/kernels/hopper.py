"""Window attention for Hopper cards, in Gluon: what `window.py` computes, with warps that do one thing each.

A program takes 128 queries: a rectangle of cells, all their latents and all heads of one group. One warp
has the copy engine bring keys and values, in blocks of some rows and columns of one latent, into a ring of
shared memory. Two groups of four warps take 64 queries each: while one does the softmax of a block, the other
keeps the matrix units busy, and each issues its next scores before it uses the last.

Shapes: G key/value heads, N cells of the grid (rows x columns), T latents, R query heads, D channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from recavsr.attention import SpatialWindow
from recavsr.geometry import Grid

ROWS = gl.constexpr(64)  # queries of a group of warps
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Ring:
    """How keys travel: rows and columns of cells that come at once, 64 or 128 in all, and places for them."""

    block: tuple[int, int] = (8, 8)
    stages: int = 4
    persistent: bool = True
    """Whether as many programs as the card has multiprocessors share all tiles: they fetch ahead."""


def supports(query: Tensor, pieces: Sequence[tuple[Tensor, Tensor]]) -> bool:
    """Return whether the kernel takes these (see `window_attention`), on this card."""
    batch, _, _, latents, repeats, width = query.shape
    right = batch == 1 and latents * repeats <= 64 and width in (64, 128) and query.stride(-1) == 1
    return (
        right
        and query.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(query.device)[0] == 9
        and all(_travels(x) for pair in pieces for x in pair)
    )


def _travels(x: Tensor) -> bool:
    """Return whether the copy engine can read a tensor: it wants multiples of sixteen bytes."""
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(step % 8 == 0 for step in x.stride()[:-1])


def window_attention(
    query: Tensor,
    pieces: Sequence[tuple[Tensor, Tensor]],
    grid: Grid,
    window: SpatialWindow,
    tiles: Tensor,
    fits: bool,
    ring: Ring = Ring(),
) -> Tensor:
    """Attend from `query` [1, G, N, T, R, D] to one or two pairs of keys and values [1, G, N, T', D].

    `tiles` [tiles, 4] are rectangles of at most 128 / (T R) cells; `fits` says whether the blocks of every
    union of windows fit into the grid. Returns [1, G, N, T, R, D], in memory [1, N, T, G, R, D].
    """
    batch, groups, cells, latents, repeats, width = query.shape
    out = query.new_empty(batch, cells, latents, groups, repeats, width).permute(0, 3, 1, 2, 4, 5)
    high, wide = ring.block
    layout = gl.NVMMASharedLayout(128, 16, rank=5)

    def described(x: Tensor) -> TensorDescriptor:
        shape = [groups, grid.height, grid.width, x.shape[3], width]
        _, group, cell, latent, _ = x.stride()
        steps = [group, cell * grid.width, cell, latent, 1]
        return TensorDescriptor(x, shape, steps, [1, high, wide, 1, width], layout)

    side = (window.height, window.width)
    if window.border == "shift":
        side = (min(window.height, grid.height), min(window.width, grid.width))
    items = groups * len(tiles)  # all groups of the longest tiles first
    programs = torch.cuda.get_device_properties(query.device).multi_processor_count
    _window_attention[(min(items, programs) if ring.persistent else items,)](
        tiles,
        items,
        groups,
        query,
        *map(described, (*pieces[0], *pieces[-1])),
        out,
        *query.stride()[1:5],
        *out.stride()[1:5],
        pieces[0][0].shape[3],
        pieces[1][0].shape[3] if len(pieces) > 1 else 0,
        width**-0.5 * LOG2_E,
        grid.height,
        grid.width,
        SIDE_H=side[0],
        SIDE_W=side[1],
        REACH_H=(window.height - window.stride + 1) // 2,
        REACH_W=(window.width - window.stride + 1) // 2,
        STRIDE=window.stride,
        CUT=window.border == "cut",
        T=latents,
        R=repeats,
        D=width,
        BLOCK_H=high,
        BLOCK_W=wide,
        STAGES=ring.stages,
        FITS=fits,
        TWO=len(pieces) > 1,
        num_warps=4,
    )
    return out


# ------------------------------------------------------------------------------------------------ kernels


@gluon.jit
def _first(cell, reach: gl.constexpr, side: gl.constexpr, extent, stride: gl.constexpr, cut: gl.constexpr):
    """Return where the window of a cell begins on one axis; a cut one may begin outside."""
    first = cell // stride * stride - reach
    if not cut:
        first = gl.minimum(gl.maximum(first, 0), extent - side)
    return first


@gluon.jit
def _axis(
    cell, cells, extent,
    REACH: gl.constexpr, SIDE: gl.constexpr, STRIDE: gl.constexpr, CUT: gl.constexpr, BLOCK: gl.constexpr,
    FITS: gl.constexpr,
):  # fmt: skip
    """Return of a tile on one axis: where first and last windows begin, their union's start and blocks."""
    first = _first(cell, REACH, SIDE, extent, STRIDE, CUT)
    last = _first(cell + cells - 1, REACH, SIDE, extent, STRIDE, CUT)
    begin = gl.maximum(first, 0)
    blocks = (gl.minimum(last + SIDE, extent) - begin + BLOCK - 1) // BLOCK
    if FITS:  # blocks that would reach over the border move back inside
        begin = gl.minimum(begin, extent - blocks * BLOCK)
    return first, last, begin, blocks


@gluon.jit
def _bring(
    tiles_at, items, groups, keys, values, keys2, values2,
    key_ring, value_ring, key_full, value_full, key_free, value_free, latents, latents2, grid_h, grid_w,
    SIDE_H: gl.constexpr, SIDE_W: gl.constexpr, REACH_H: gl.constexpr, REACH_W: gl.constexpr,
    STRIDE: gl.constexpr, CUT: gl.constexpr, D: gl.constexpr,
    BLOCK_H: gl.constexpr, BLOCK_W: gl.constexpr, STAGES: gl.constexpr, FITS: gl.constexpr,
    TWO: gl.constexpr,
):  # fmt: skip
    """Bring block after block of keys and values, for one tile after the other."""
    size: gl.constexpr = BLOCK_H * BLOCK_W * D * 2
    stage, phase = items * 0, items * 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        group, tile = item % groups, tiles_at + 4 * (item // groups)
        _, _, begin_y, blocks_y = _axis(
            gl.load(tile), gl.load(tile + 2), grid_h, REACH_H, SIDE_H, STRIDE, CUT, BLOCK_H, FITS
        )
        _, _, begin_x, blocks_x = _axis(
            gl.load(tile + 1), gl.load(tile + 3), grid_w, REACH_W, SIDE_W, STRIDE, CUT, BLOCK_W, FITS
        )
        blocks = blocks_y * blocks_x
        for step in range((latents + latents2) * blocks):
            latent, block = step // blocks, step % blocks
            y, x = begin_y + block // blocks_x * BLOCK_H, begin_x + block % blocks_x * BLOCK_W
            mbarrier.wait(key_free.index(stage), phase ^ 1)
            mbarrier.expect(key_full.index(stage), size)
            full, place = key_full.index(stage), key_ring.index(stage)
            if TWO:
                if latent < latents:
                    tma.async_copy_global_to_shared(keys, [group, y, x, latent, 0], full, place)
                else:
                    tma.async_copy_global_to_shared(keys2, [group, y, x, latent - latents, 0], full, place)
            else:
                tma.async_copy_global_to_shared(keys, [group, y, x, latent, 0], full, place)
            mbarrier.wait(value_free.index(stage), phase ^ 1)
            mbarrier.expect(value_full.index(stage), size)
            full, place = value_full.index(stage), value_ring.index(stage)
            if TWO:
                if latent < latents:
                    tma.async_copy_global_to_shared(values, [group, y, x, latent, 0], full, place)
                else:
                    tma.async_copy_global_to_shared(values2, [group, y, x, latent - latents, 0], full, place)
            else:
                tma.async_copy_global_to_shared(values, [group, y, x, latent, 0], full, place)
            stage += 1
            phase = gl.where(stage == STAGES, phase ^ 1, phase)
            stage = gl.where(stage == STAGES, 0, stage)


@gluon.jit
def _attend(
    part, tiles_at, items, groups, query_at, q_g, q_n, q_t, q_r, queries,
    key_ring, value_ring, key_full, value_full, key_free, value_free,
    out_at, o_g, o_n, o_t, o_r, together, scale, grid_h, grid_w,
    SIDE_H: gl.constexpr, SIDE_W: gl.constexpr, REACH_H: gl.constexpr, REACH_W: gl.constexpr,
    STRIDE: gl.constexpr, CUT: gl.constexpr, T: gl.constexpr, R: gl.constexpr, D: gl.constexpr,
    BLOCK_H: gl.constexpr, BLOCK_W: gl.constexpr, STAGES: gl.constexpr, FITS: gl.constexpr,
):  # fmt: skip
    """Attend for 64 queries of one tile after the other."""
    KEYS: gl.constexpr = BLOCK_H * BLOCK_W
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    share_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    of_score: gl.constexpr = gl.SliceLayout(1, score_layout)
    of_out: gl.constexpr = gl.SliceLayout(1, out_layout)

    index = gl.arange(0, KEYS, gl.SliceLayout(0, score_layout))
    row_in_block, column_in_block = index // BLOCK_W, index % BLOCK_W
    stage, phase, before, last_phase = items * 0, items * 0, items * 0, items * 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        group, tile = (item % groups).to(gl.int64), tiles_at + 4 * (item // groups)
        y, x, height, width = gl.load(tile), gl.load(tile + 1), gl.load(tile + 2), gl.load(tile + 3)
        top, low, begin_y, blocks_y = _axis(y, height, grid_h, REACH_H, SIDE_H, STRIDE, CUT, BLOCK_H, FITS)
        left, right, begin_x, blocks_x = _axis(x, width, grid_w, REACH_W, SIDE_W, STRIDE, CUT, BLOCK_W, FITS)

        # Queries: heads fastest, then latents, then cells. What is left over repeats the last cell.
        place = part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, load_layout))
        of_cell = gl.minimum(place // (T * R), height * width - 1)
        cell = (y + of_cell // width) * grid_w + x + of_cell % width
        place = cell * q_n + place // R % T * q_t + place % R * q_r
        channel = gl.arange(0, D, gl.SliceLayout(0, load_layout))
        queries.store(gl.load(query_at + group * q_g + place[:, None] + channel[None, :]))
        fence_async_shared()
        of_cell = gl.minimum((part * ROWS + gl.arange(0, ROWS, of_score)) // (T * R), height * width - 1)
        row_first = _first(y + of_cell // width, REACH_H, SIDE_H, grid_h, STRIDE, CUT)
        column_first = _first(x + of_cell % width, REACH_W, SIDE_W, grid_w, STRIDE, CUT)

        total = gl.zeros([ROWS, D], gl.float32, out_layout)
        largest = gl.full([ROWS], -1e30, gl.float32, of_score)  # finite: a block may hold no visible key
        weight = gl.zeros([ROWS], gl.float32, of_score)
        share = gl.zeros([ROWS, KEYS], queries.dtype, share_layout)
        blocks = blocks_y * blocks_x
        for step in range(together * blocks):
            # Scores of this block, and behind them in the queue what the shares of the last one add up.
            mbarrier.wait(key_full.index(stage), phase)
            coming = warpgroup_mma(
                queries,
                key_ring.index(stage).reshape([KEYS, D]).permute((1, 0)),
                gl.zeros([ROWS, KEYS], gl.float32, score_layout),
                use_acc=False,
                is_async=True,
            )
            if step > 0:
                mbarrier.wait(value_full.index(before), last_phase)
            adding = warpgroup_mma(  # the first time its result is dropped
                share, value_ring.index(before).reshape([KEYS, D]), total, use_acc=step > 1, is_async=True
            )
            score = warpgroup_mma_wait(1, deps=[coming])
            mbarrier.arrive(key_free.index(stage), count=1)

            block = step % blocks
            first_row = begin_y + block // blocks_x * BLOCK_H
            first_column = begin_x + block % blocks_x * BLOCK_W
            clear = (first_row >= low) & (first_row + BLOCK_H <= top + SIDE_H)
            clear = clear & (first_column >= right) & (first_column + BLOCK_W <= left + SIDE_W)
            if CUT:
                clear = clear & (first_row + BLOCK_H <= grid_h) & (first_column + BLOCK_W <= grid_w)
            if not clear:
                key_row, key_column = first_row + row_in_block, first_column + column_in_block
                down = key_row[None, :] - row_first[:, None]
                across = key_column[None, :] - column_first[:, None]
                seen = (down >= 0) & (down < SIDE_H) & (across >= 0) & (across < SIDE_W)
                if CUT:
                    seen = seen & (key_row < grid_h)[None, :] & (key_column < grid_w)[None, :]
                score = gl.where(seen, score, float("-inf"))
            above = gl.maximum(largest, gl.max(score, 1) * scale)
            fade = gl.exp2(largest - above)
            raised = gl.exp2(score * scale - above[:, None])
            weight = weight * fade + gl.sum(raised, 1)
            largest = above
            if step > 0:  # it came long ago: a bound that keeps the assembler from waiting before the softmax
                mbarrier.wait(value_full.index(before), last_phase)
            total = warpgroup_mma_wait(0, deps=[adding, share])[0]
            if step > 0:
                mbarrier.arrive(value_free.index(before), count=1)
            total = total * gl.convert_layout(fade, of_out)[:, None]
            share = gl.convert_layout(raised.to(queries.dtype), share_layout)

            before, last_phase = stage, phase
            stage += 1
            phase = gl.where(stage == STAGES, phase ^ 1, phase)
            stage = gl.where(stage == STAGES, 0, stage)
        mbarrier.wait(value_full.index(before), last_phase)
        total = warpgroup_mma(
            share, value_ring.index(before).reshape([KEYS, D]), total, use_acc=together * blocks > 1
        )
        mbarrier.arrive(value_free.index(before), count=1)
        total = total / gl.convert_layout(weight, of_out)[:, None]

        place = part * ROWS + gl.arange(0, ROWS, of_out)
        of_cell = place // (T * R)
        real = of_cell < height * width
        cell = (y + of_cell // width) * grid_w + x + of_cell % width
        place = cell * o_n + place // R % T * o_t + place % R * o_r
        channel = gl.arange(0, D, gl.SliceLayout(0, out_layout))
        found_at = out_at + group * o_g + place[:, None] + channel[None, :]
        gl.store(found_at, total.to(queries.dtype), mask=real[:, None])


@gluon.jit(do_not_specialize=["items", "groups", "latents", "latents2", "grid_h", "grid_w"])
def _window_attention(
    tiles_at, items, groups, query_at, keys, values, keys2, values2, out_at,
    q_g, q_n, q_t, q_r, o_g, o_n, o_t, o_r, latents, latents2, scale, grid_h, grid_w,
    SIDE_H: gl.constexpr, SIDE_W: gl.constexpr, REACH_H: gl.constexpr, REACH_W: gl.constexpr,
    STRIDE: gl.constexpr, CUT: gl.constexpr, T: gl.constexpr, R: gl.constexpr, D: gl.constexpr,
    BLOCK_H: gl.constexpr, BLOCK_W: gl.constexpr, STAGES: gl.constexpr, FITS: gl.constexpr,
    TWO: gl.constexpr,
):  # fmt: skip
    dtype: gl.constexpr = query_at.dtype.element_ty
    shape: gl.constexpr = [STAGES, 1, BLOCK_H, BLOCK_W, 1, D]
    key_ring = gl.allocate_shared_memory(dtype, shape, keys.layout)
    value_ring = gl.allocate_shared_memory(dtype, shape, keys.layout)
    queries = gl.allocate_shared_memory(dtype, [2, ROWS, D], gl.NVMMASharedLayout(128, 16, rank=2))
    key_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    key_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(key_full.index(stage), count=1)
        mbarrier.init(value_full.index(stage), count=1)
        mbarrier.init(key_free.index(stage), count=2)
        mbarrier.init(value_free.index(stage), count=2)
    fence_async_shared()
    together = latents + latents2
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    0, tiles_at, items, groups, query_at, q_g, q_n, q_t, q_r, queries.index(0),
                    key_ring, value_ring, key_full, value_full, key_free, value_free,
                    out_at, o_g, o_n, o_t, o_r, together, scale, grid_h, grid_w,
                    SIDE_H, SIDE_W, REACH_H, REACH_W, STRIDE, CUT, T, R, D, BLOCK_H, BLOCK_W, STAGES, FITS,
                ),
            ),
            (
                _attend,
                (
                    1, tiles_at, items, groups, query_at, q_g, q_n, q_t, q_r, queries.index(1),
                    key_ring, value_ring, key_full, value_full, key_free, value_free,
                    out_at, o_g, o_n, o_t, o_r, together, scale, grid_h, grid_w,
                    SIDE_H, SIDE_W, REACH_H, REACH_W, STRIDE, CUT, T, R, D, BLOCK_H, BLOCK_W, STAGES, FITS,
                ),
            ),
            (
                _bring,
                (
                    tiles_at, items, groups, keys, values, keys2, values2,
                    key_ring, value_ring, key_full, value_full, key_free, value_free,
                    latents, latents2, grid_h, grid_w,
                    SIDE_H, SIDE_W, REACH_H, REACH_W, STRIDE, CUT, D, BLOCK_H, BLOCK_W, STAGES, FITS, TWO,
                ),
            ),
        ],
        [4, 1],
        [232, 24],
    )  # fmt: skip
