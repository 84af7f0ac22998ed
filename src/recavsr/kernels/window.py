"""Window attention in one pass: each query's own window, found by arithmetic, nothing gathered.

Shapes: B batch, G key/value heads, R query heads for each of them, T latents, N cells, D channels.

A program takes the queries of a small rectangle of cells, all their latents and all heads of one group,
and walks over the union of their windows, latent by latent, in blocks of a few rows and columns of keys.
Only where some of its queries do not see a block is there anything to mask. Softmax runs along (exp2,
statistics in float32).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch
import triton
import triton.language as tl
from torch import Tensor

from recavsr.attention import SpatialWindow
from recavsr.geometry import Grid

FAR = tl.constexpr(1 << 20)
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Launch:
    """How the kernel is cut: queries of a program, keys of a step, warps, depth of the pipeline."""

    queries: int = 128
    keys: int = 64
    warps: int = 8
    stages: int = 2
    block: tuple[int, int] = (4, 8)  # rows and columns of keys that lie together; divides `keys`
    registers: int | None = 128  # the most that a thread may use: two programs then share a multiprocessor


def launch_for(head_width: int, queries_of_a_cell: int) -> Launch:
    """Return what measured best on an H200 (docs/performance.md)."""
    if head_width > 64:
        return Launch(block=(2, 8))
    stages = 3 if queries_of_a_cell >= 16 else 2
    return Launch(queries=64, warps=4, stages=stages, block=(2, 8), registers=None)


def supports(query: Tensor) -> bool:
    """Return whether the kernel takes `query` [B, G, N, T, R, D]: a 16-bit type, D a power of two."""
    width = query.shape[-1]
    fits = 16 <= width <= 128 and width & (width - 1) == 0
    rows = query.shape[3] * query.shape[4]
    return fits and rows <= 64 and query.dtype in (torch.bfloat16, torch.float16)


Tile = tuple[int, int, int, int]
"""First row, first column, rows, columns of the cells whose queries one program takes."""


@lru_cache(maxsize=64)
def tiles_of(
    grid: Grid, window: SpatialWindow, cells: int, launch: Launch, query_rows: range | None = None
) -> tuple[tuple[Tile, ...], bool]:
    """Cut a grid into rectangles of at most `cells` cells, such that programs take few steps in all.

    Near the borders of a grid many cells share one window: tiles that do not reach beyond such a plateau
    walk no key in vain. The longest tiles come first, so that short ones fill the card's last round. With
    `query_rows` only these are cut. Also returns whether the blocks of every union of windows fit into the
    grid.
    """
    rows, columns = window.rows(grid), window.columns(grid)
    first = 0 if query_rows is None else query_rows.start
    if query_rows is not None:
        rows = rows[first : query_rows.stop]
    at_once = launch.keys // (launch.block[0] * launch.block[1])

    def steps(tile: Tile) -> int:
        y, x, height, width = tile
        down = _blocks(rows[y : y + height], launch.block[0])
        return -(-down * _blocks(columns[x : x + width], launch.block[1]) // at_once)

    def cut(area: Tile) -> list[Tile]:
        """Cut an area into tiles of one shape as well as can be."""
        y, x, height, width = area
        shapes = {(high, min(cells // high, width)) for high in range(1, min(cells, height) + 1)}
        choices = [
            [
                (y + top, x + left, min(high, height - top), min(wide, width - left))
                for top in range(0, height, high)
                for left in range(0, width, wide)
            ]
            for high, wide in sorted(shapes)
        ]
        return min(choices, key=lambda tiles: sum(map(steps, tiles)))

    choices = []
    for down in _stretches(rows):
        for across in _stretches(columns):
            areas = [(y.start, x.start, len(y), len(x)) for y in down for x in across]
            choices.append([tile for area in areas for tile in cut(area)])
    best = min(choices, key=lambda tiles: sum(map(steps, tiles)) + len(tiles))
    fits = all(
        _blocks(spans[start : start + side], block) * block <= extent
        for y, x, height, width in best
        for spans, start, side, block, extent in (
            (rows, y, height, launch.block[0], grid.height),
            (columns, x, width, launch.block[1], grid.width),
        )
    )
    longest_first = sorted(best, key=steps, reverse=True)
    return tuple((first + y, x, height, width) for y, x, height, width in longest_first), fits


def _blocks(spans: Sequence[range], block: int) -> int:
    return -(-(spans[-1].stop - spans[0].start) // block)


def _stretches(spans: Sequence[range]) -> list[list[range]]:
    """Return an axis whole, and cut where a plateau of cells with one window begins or ends."""
    runs = [len(list(run)) for _, run in groupby(spans)]
    stretches, start, moving = [], 0, 0
    for run in [*runs, 2]:  # the last one only ends what moves before it
        if run == 1:
            moving += 1
            continue
        if moving:
            stretches.append(range(start, start + moving))
        start, moving = start + moving, 0
        stretches.append(range(start, start + run))
        start += run
    whole = [range(len(spans))]
    return [whole, stretches[:-1]] if max(runs) > 1 else [whole]


@lru_cache(maxsize=64)
def _tiles_on(
    grid: Grid,
    window: SpatialWindow,
    cells: int,
    launch: Launch,
    device: torch.device,
    query_rows: range | None = None,
) -> tuple[Tensor, bool]:
    tiles, fits = tiles_of(grid, window, cells, launch, query_rows)
    with torch.inference_mode(False):
        return torch.tensor(tiles, dtype=torch.int32).to(device), fits


def window_attention(
    query: Tensor,
    pieces: Sequence[tuple[Tensor, Tensor]],
    grid: Grid,
    window: SpatialWindow,
    launch: Launch | None = None,
    rows: range | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from `query` [B, G, N, T, R, D] to one or two pairs of keys and values [B, G, N', T', D].

    Keys are those of the whole grid, queries those of its `rows` (None: all). Channels must be adjacent in
    memory. Returns [B, G, N, T, R, D]: `out`, or new memory in the order [B, N, T, G, R, D].
    """
    batch, groups, cells, latents, repeats, width = query.shape
    a_cell = latents * repeats
    launch = launch or launch_for(width, a_cell)
    tiles, fits = _tiles_on(grid, window, max(1, launch.queries // a_cell), launch, query.device, rows)
    if out is None:
        out = query.new_empty(batch, cells, latents, groups, repeats, width).permute(0, 3, 1, 2, 4, 5)
    (key, value), (more_keys, more_values) = pieces[0], pieces[-1]
    if any(x.stride(-1) != 1 for x in (query, key, value, more_keys, more_values, out)):
        raise ValueError("channels must be adjacent in memory")
    side = (window.height, window.width)
    if window.border == "shift":
        side = (min(window.height, grid.height), min(window.width, grid.width))
    _window_attention[(groups, len(tiles), batch)](
        tiles,
        query,
        key,
        value,
        more_keys,
        more_values,
        out,
        *query.stride()[:5],
        *key.stride()[:4],
        *value.stride()[:4],
        *more_keys.stride()[:4],
        *more_values.stride()[:4],
        *out.stride()[:5],
        key.shape[3],
        more_keys.shape[3] if len(pieces) > 1 else 0,
        width**-0.5 * LOG2_E,
        grid.height,
        grid.width,
        0 if rows is None else rows.start,
        SIDE_H=side[0],
        SIDE_W=side[1],
        REACH_H=(window.height - window.stride + 1) // 2,
        REACH_W=(window.width - window.stride + 1) // 2,
        STRIDE=window.stride,
        CUT=window.border == "cut",
        T=latents,
        R=repeats,
        D=width,
        QUERIES=max(launch.queries, triton.next_power_of_2(a_cell)),
        KEYS=launch.keys,
        BLOCK_H=launch.block[0],
        BLOCK_W=launch.block[1],
        FITS=fits,
        TWO=len(pieces) > 1,
        num_warps=launch.warps,
        num_stages=launch.stages,
        maxnreg=launch.registers,
    )
    return out


# ------------------------------------------------------------------------------------------------ kernels


@triton.jit
def _first(
    cell,
    reach: tl.constexpr,
    side: tl.constexpr,
    extent,
    stride: tl.constexpr,
    cut: tl.constexpr,
):
    """Return where the window of a cell begins on one axis; a cut one may begin outside."""
    first = cell // stride * stride - reach
    if not cut:
        first = tl.minimum(tl.maximum(first, 0), extent - side)
    return first


@triton.jit(do_not_specialize=["latents", "latents2", "grid_h", "grid_w"])
def _window_attention(
    tiles_at, query_at, key_at, value_at, key2_at, value2_at, out_at,
    q_b, q_g, q_n, q_t, q_r,
    k_b, k_g, k_n, k_t,
    v_b, v_g, v_n, v_t,
    k2_b, k2_g, k2_n, k2_t,
    v2_b, v2_g, v2_n, v2_t,
    o_b, o_g, o_n, o_t, o_r,
    latents, latents2, scale, grid_h, grid_w, rows_begin,
    SIDE_H: tl.constexpr, SIDE_W: tl.constexpr, REACH_H: tl.constexpr, REACH_W: tl.constexpr,
    STRIDE: tl.constexpr, CUT: tl.constexpr, T: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr,
    FITS: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    group, batch = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64)
    tile = tiles_at + 4 * tl.program_id(1)
    y, x, height, width = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
    y_last, x_last = y + height - 1, x + width - 1

    # Queries of the tile: heads fastest, then latents, then cells. What is left over repeats the last cell.
    index = tl.arange(0, QUERIES)
    of_cell = index // (T * R)
    latent, head = index // R % T, index % R
    real = of_cell < height * width
    of_cell = tl.minimum(of_cell, height * width - 1)
    row, column = y + of_cell // width, x + of_cell % width
    cell = (row - rows_begin) * grid_w + column
    channel = tl.arange(0, D)
    place = cell * q_n + latent * q_t + head * q_r
    query = tl.load(query_at + batch * q_b + group * q_g + place[:, None] + channel[None, :])

    # Of the windows of the tile: where the first and the last begin, and their union in blocks of keys.
    top, low = (
        _first(y, REACH_H, SIDE_H, grid_h, STRIDE, CUT),
        _first(y_last, REACH_H, SIDE_H, grid_h, STRIDE, CUT),
    )
    left, right = (
        _first(x, REACH_W, SIDE_W, grid_w, STRIDE, CUT),
        _first(x_last, REACH_W, SIDE_W, grid_w, STRIDE, CUT),
    )
    begin_y, begin_x = tl.maximum(top, 0), tl.maximum(left, 0)
    blocks_y = tl.cdiv(tl.minimum(low + SIDE_H, grid_h) - begin_y, BLOCK_H)
    blocks_x = tl.cdiv(tl.minimum(right + SIDE_W, grid_w) - begin_x, BLOCK_W)
    if FITS:  # blocks that would reach over the border move back inside
        begin_y = tl.minimum(begin_y, grid_h - blocks_y * BLOCK_H)
        begin_x = tl.minimum(begin_x, grid_w - blocks_x * BLOCK_W)
    row_first = _first(row, REACH_H, SIDE_H, grid_h, STRIDE, CUT)[:, None]
    column_first = _first(column, REACH_W, SIDE_W, grid_w, STRIDE, CUT)[:, None]

    total = tl.zeros([QUERIES, D], tl.float32)
    largest = tl.full([QUERIES], -1e30, tl.float32)  # finite: a step may hold no visible key
    weight = tl.zeros([QUERIES], tl.float32)
    keys, values = key_at + batch * k_b + group * k_g, value_at + batch * v_b + group * v_g
    if TWO:
        keys2, values2 = key2_at + batch * k2_b + group * k2_g, value2_at + batch * v2_b + group * v2_g
    key_index = tl.arange(0, KEYS)
    block_of_key = key_index // (BLOCK_H * BLOCK_W)
    row_in_block, column_in_block = key_index // BLOCK_W % BLOCK_H, key_index % BLOCK_W
    block_y, block_x, past = blocks_y * 0, blocks_x * 0, 0
    for _ in range((latents + latents2) * tl.cdiv(blocks_y * blocks_x, KEYS // (BLOCK_H * BLOCK_W))):
        # The next blocks of keys, row by row; what is left over at the end of a latent stands far away.
        key_row, key_column, load_row = row_in_block, column_in_block, row_in_block
        clear = block_y < blocks_y
        for block in tl.static_range(KEYS // (BLOCK_H * BLOCK_W)):
            first_row, first_column = begin_y + block_y * BLOCK_H, begin_x + block_x * BLOCK_W
            exists = block_y < blocks_y
            clear = clear & exists & (first_row >= low) & (first_row + BLOCK_H <= top + SIDE_H)
            clear = clear & (first_column >= right) & (first_column + BLOCK_W <= left + SIDE_W)
            if not FITS:
                clear = clear & (first_row + BLOCK_H <= grid_h) & (first_column + BLOCK_W <= grid_w)
            mine = block_of_key == block
            key_row += tl.where(mine, tl.where(exists, first_row, FAR), 0)
            load_row += tl.where(mine, tl.where(exists, first_row, begin_y), 0)
            key_column += tl.where(mine, first_column, 0)
            block_x += 1
            block_y += (block_x == blocks_x).to(tl.int32)
            block_x = tl.where(block_x == blocks_x, 0, block_x)
        key_cell = load_row * grid_w + key_column
        key_places, value_places = (
            key_cell[:, None] * k_n + channel[None, :],
            key_cell[:, None] * v_n + channel[None, :],
        )
        if FITS:
            key = tl.load(keys + key_places)
            value = tl.load(values + value_places)
        else:
            on_grid = (load_row < grid_h) & (key_column < grid_w)
            key = tl.load(keys + key_places, mask=on_grid[:, None], other=0.0)
            value = tl.load(values + value_places, mask=on_grid[:, None], other=0.0)
            key_row = tl.where(on_grid, key_row, FAR)
        score = tl.dot(query, tl.trans(key))
        if not clear:
            down = (key_row[None, :] - row_first).to(tl.uint32) < SIDE_H
            across = (key_column[None, :] - column_first).to(tl.uint32) < SIDE_W
            score += tl.where(down, 0.0, float("-inf")) + tl.where(across, 0.0, float("-inf"))
        above = tl.maximum(largest, tl.max(score, 1) * scale)
        share = tl.exp2(score * scale - above[:, None])
        fade = tl.exp2(largest - above)
        weight = weight * fade + tl.sum(share, 1)
        total = tl.dot(share.to(value.dtype), value, total * fade[:, None])
        largest = above
        done = block_y >= blocks_y
        block_y, block_x = tl.where(done, 0, block_y), tl.where(done, 0, block_x)
        keys += tl.where(done, k_t, 0)
        values += tl.where(done, v_t, 0)
        if TWO:
            past += done.to(tl.int32)
            change = done & (past == latents)
            keys, values = tl.where(change, keys2, keys), tl.where(change, values2, values)
            k_n, v_n = tl.where(change, k2_n, k_n), tl.where(change, v2_n, v_n)
            k_t, v_t = tl.where(change, k2_t, k_t), tl.where(change, v2_t, v_t)
    out = (total / weight[:, None]).to(out_at.dtype.element_ty)
    place = cell * o_n + latent * o_t + head * o_r
    tl.store(out_at + batch * o_b + group * o_g + place[:, None] + channel[None, :], out, mask=real[:, None])
