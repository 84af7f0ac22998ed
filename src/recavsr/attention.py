"""Attention over the current block and its history, inside a spatial window: one function.

Shapes: B batch, G key/value heads, R query heads for each of them, T latents (or frames), N cells
of a grid (rows x columns), D channels of a head. Cells come before time, so that what a window
reads of one cell is one piece of memory.

Every query sees, in every visible latent, the cells of a window around its own cell. Windows are
per query (stride 1, as in the paper and the released weights), or shared by tiles of
`stride` x `stride` queries, which needs no mask. At borders a window shifts inward and keeps its
size ("shift", the generator) or is cut ("cut", the released decoder).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from recavsr.geometry import Grid
from recavsr.kernels.available import kernels_for
from recavsr.onednn import cpu_flags

Border = Literal["shift", "cut"]

_GATHER_BYTES = 1 << 29
"""How much of the keys and values that tiles gather for themselves exists at a time."""

_SCORES = 1 << 20
"""Scores that `_in_products` holds at a time: 2 MB, which stay in the cache."""

_MANY_QUERIES = 128
"""Queries of a head from which products may win: with 32 they win little and are off most, by 44 dB."""

_TILE = 8
"""Side of a query tile where windows are per query: the tile reads the union of its windows."""


@dataclass(frozen=True)
class SpatialWindow:
    """Which cells a query sees: `height` x `width` cells around its tile of `stride` x `stride`."""

    height: int
    width: int
    stride: int = 1
    border: Border = "shift"

    def __post_init__(self) -> None:
        if min(self.height, self.width, self.stride) < 1 or self.stride > min(self.height, self.width):
            raise ValueError(f"a window must be at least one cell and its stride: {self}")
        if self.border == "cut" and (self.stride > 1 or self.height % 2 or self.width % 2):
            raise ValueError(f"a window that is cut at borders has even sides and stride 1: {self}")

    def covers(self, grid: Grid) -> bool:
        """Return whether every query sees the whole grid."""
        if self.border == "cut":  # [q - size / 2, q + size / 2) must hold 0 .. extent - 1 for every q
            return self.height >= 2 * grid.height and self.width >= 2 * grid.width
        return self.height >= grid.height and self.width >= grid.width

    def rows(self, grid: Grid) -> list[range]:
        """Return the visible rows for each query row."""
        return [_span(y, self.height, self.stride, grid.height, self.border) for y in range(grid.height)]

    def columns(self, grid: Grid) -> list[range]:
        """Return the visible columns for each query column."""
        return [_span(x, self.width, self.stride, grid.width, self.border) for x in range(grid.width)]


def _span(cell: int, size: int, stride: int, extent: int, border: Border) -> range:
    # stride 1 gives the reference: start = cell - size // 2. A tile is centred in its window.
    start = cell // stride * stride - (size - stride + 1) // 2
    if border == "cut":
        return range(max(start, 0), min(start + size, extent))
    size = min(size, extent)
    start = min(max(start, 0), extent - size)
    return range(start, start + size)


@dataclass(frozen=True)
class _Tiling:
    """Index tables of one (grid, window): which queries and keys belong to each tile."""

    query_cells: Tensor  # [tiles, q] cells of the tile; cells off the grid repeat the last one
    key_cells: Tensor  # [tiles, k]
    untile: Tensor  # [N] where each cell's result lies in the flattened [tiles, q]
    bias: Tensor | None  # [tiles, q, k] 0 or -inf; None where the whole tile shares one window


@dataclass(frozen=True)
class WindowPlan:
    """A window laid over a grid on a device: made once by `plan_window`, used by every layer."""

    grid: Grid
    window: SpatialWindow
    device: torch.device
    query_rows: range | None = None
    """The rows of the grid that ask; None: all of them. Keys are always those of the whole grid."""

    @property
    def cells(self) -> int:
        """Return the cells that ask."""
        return self.grid.cells if self.query_rows is None else len(self.query_rows) * self.grid.width

    def with_borrowed(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B, G, N, T, D] of the whole grid, of those of the cells that ask.

        Here these are the same; where they are not, another process has the rest (`models.row_parallel`).
        """
        return key, value

    @cached_property
    def tiling(self) -> _Tiling | None:
        """Return the index tables of `_tiled`, made when they are first needed.

        None where every query sees the whole grid.
        """
        if self.window.covers(self.grid):
            return None
        return _make_tiling(self.grid, self.window, self.device, self.query_rows)


def plan_window(grid: Grid, window: SpatialWindow, device: torch.device) -> WindowPlan:
    """Lay a window over a grid."""
    plan = _plan_window(grid, window, device)
    if torch.is_grad_enabled():
        _ = plan.tiling  # training needs it, and layers that are compiled can not make it
    return plan


@lru_cache(maxsize=32)
def _plan_window(grid: Grid, window: SpatialWindow, device: torch.device) -> WindowPlan:
    return WindowPlan(grid, window, device)


def windowed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: WindowPlan,
    key_bias: Tensor | None = None,
    earlier: tuple[Tensor, Tensor] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend from `query` [B, G, N, Tq, R, D] to `key`, `value` [B, G, N, Tk, D].

    `earlier` are keys and values to see as well, as if they stood in front. `key_bias` [Tk] is added to all
    scores of a key latent: the router's log prior (Eq. 2). It must be finite, and may require gradients.
    Returns [B, G, N, Tq, R, D], written into `out` where that is given. Raises ValueError where the plan's
    grid does not fit N.
    """
    if query.shape[2] != plan.cells:
        raise ValueError(f"the plan's grid has {plan.cells} cells, not {query.shape[2]}")
    if key_bias is None and _has_kernel(query) and not plan.window.covers(plan.grid):
        from recavsr.kernels.window import window_attention

        pieces = [(key, value)] if earlier is None else [earlier, (key, value)]
        return window_attention(query, pieces, plan.grid, plan.window, rows=plan.query_rows, out=out)
    if earlier is not None:
        key, value = (torch.cat(pair, dim=3) for pair in zip(earlier, (key, value)))
    scale, width = query.shape[-1] ** -0.5, query.shape[-1]
    if key_bias is not None:
        query, key, value = _with_bias_channels(query, key, value, key_bias / scale)
    if plan.tiling is None:
        made = _dense(query, key, value, scale)[..., :width]
    else:
        made = _tiled(query, key, value, plan.tiling, scale)[..., :width]
    return made if out is None else out.copy_(made)


def _has_kernel(query: Tensor) -> bool:
    if not kernels_for(query):
        return False
    from recavsr.kernels.window import supports

    return supports(query)


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grid: Grid,
    window: SpatialWindow,
    key_bias: Tensor | None = None,
) -> Tensor:
    """Compute the same as `windowed_attention` by its definition: one masked softmax over all keys."""
    rows, columns = window.rows(grid), window.columns(grid)
    seen = torch.zeros(grid.height, grid.width, grid.height, grid.width, dtype=torch.bool)
    for y, row in enumerate(rows):
        for x, column in enumerate(columns):
            seen[y, x, row.start : row.stop, column.start : column.stop] = True
    space = torch.zeros(grid.cells, grid.cells).masked_fill(~seen.view(grid.cells, grid.cells), float("-inf"))
    scores = torch.einsum("bgntrd,bgmsd->bgrtnms", query.float(), key.float()) * query.shape[-1] ** -0.5
    scores = scores + space.to(scores.device)[:, :, None]
    if key_bias is not None:
        scores = scores + key_bias.float()
    weights = scores.flatten(-2).softmax(-1).view_as(scores)
    return torch.einsum("bgrtnms,bgmsd->bgntrd", weights, value.float()).to(query.dtype)


_BIAS_CHANNELS = 8
"""Channels that a key bias takes: two would do, but fused kernels want multiples of eight."""


def _with_bias_channels(
    query: Tensor, key: Tensor, value: Tensor, key_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Fold `key_bias` [Tk] into channels: q' k' = q k + key_bias, for fused kernels without a mask.

    A mask that requires gradients would be written out in full, forward and backward. The bias is
    the sum of two channels, its rounded value and the rest, which keeps 16 bits of it in bfloat16.
    """
    high = key_bias.to(key.dtype)
    low = (key_bias - high).to(key.dtype)
    pair = torch.stack([high, low], dim=-1)
    ones = query.new_ones(*query.shape[:-1], 2)
    padding = (0, _BIAS_CHANNELS - 2)
    return (
        F.pad(torch.cat([query, ones], dim=-1), padding),
        F.pad(torch.cat([key, pair.expand(*key.shape[:-1], 2)], dim=-1), padding),
        F.pad(value, (0, _BIAS_CHANNELS)),  # fused kernels want values as wide as keys
    )


def _dense(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    # Query heads that share a key head become more queries of it: no copy of K and V.
    return _attend(query.flatten(2, 4), key.flatten(2, 3), value.flatten(2, 3), scale).view_as(query)


def _attend(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Attend from [B, H, Q, D] to [B, H, K, D]; the mask is added to the scores."""
    fits = query.shape[-2] >= _MANY_QUERIES and query.shape[-2] * key.shape[-2] <= 8 * _SCORES
    if mask is None and fits and not torch.is_grad_enabled() and _products_win(query.device, query.dtype):
        return _in_products(query, key, value, scale)
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)


@cache
def _products_win(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether PyTorch's fused attention is slower than plain products: in bfloat16 without AMX."""
    flags = cpu_flags() if device.type == "cpu" and dtype == torch.bfloat16 else frozenset[str]()
    return "avx512_bf16" in flags and "amx_tile" not in flags


def _in_products(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend by two products and a softmax, some heads at a time.

    Scores are rounded to the inputs' type, so they should be small: one vector, the mean of some keys, is
    taken from all of a head's. That moves a query's scores by the same and leaves their softmax as it was.
    """
    out = query.new_empty(*query.shape[:-1], value.shape[-1])
    heads = max(1, _SCORES // (query.shape[-2] * key.shape[-2]))
    parts = (x.flatten(0, 1).split(heads) for x in (query, key, value, out))
    unused = query.new_empty(1)
    for some_queries, keys, values, made in zip(*parts):
        keys = keys - keys[:, ::8].mean(1, keepdim=True)
        scores = torch.baddbmm(unused, some_queries, keys.transpose(1, 2), beta=0, alpha=scale)
        torch.bmm(scores.softmax(-1), values, out=made)
    return out


@torch.inference_mode(False)  # kept for training steps that may follow in the same process
def _make_tiling(
    grid: Grid, window: SpatialWindow, device: torch.device, query_rows: range | None = None
) -> _Tiling:
    tile = window.stride if window.stride > 1 else _TILE
    rows, columns = window.rows(grid), window.columns(grid)
    if query_rows is not None:
        rows = rows[query_rows.start : query_rows.stop]

    def pair(down: Tensor, across: Tensor) -> Tensor:
        cells = down[:, None, :, None] * grid.width + across[None, :, None, :]
        return cells.flatten(2).flatten(0, 1)

    with torch.device("cpu"):  # whatever the process's default is
        row_tiles, row_keys, row_bias = _axis_tiles(rows, tile, grid.height)
        column_tiles, column_keys, column_bias = _axis_tiles(columns, tile, grid.width)
        query_cells, key_cells = pair(row_tiles, column_tiles), pair(row_keys, column_keys)
        untile = torch.empty(len(rows) * grid.width, dtype=torch.long)
        # Later writes win; repeated cells hold equal results, so any of them serves.
        untile[query_cells.flatten()] = torch.arange(query_cells.numel())
    bias = row_bias[:, None, :, None, :, None] + column_bias[None, :, None, :, None, :]
    bias = bias.flatten(4, 5).flatten(2, 3).flatten(0, 1)
    has_bias = bool((bias != 0).any())
    return _Tiling(
        query_cells.to(device), key_cells.to(device), untile.to(device), bias.to(device) if has_bias else None
    )


def _axis_tiles(spans: list[range], tile: int, extent: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut one axis into tiles: query indices [n, tile], key indices [n, k], bias [n, tile, k].

    `spans` are the windows of the queries, `extent` is that of the keys.
    """
    starts = range(0, len(spans), tile)
    queries = torch.stack([torch.arange(s, s + tile).clamp(max=len(spans) - 1) for s in starts])
    unions = [(spans[int(q[0])].start, max(spans[int(i)].stop for i in q)) for q in queries]
    size = max(stop - start for start, stop in unions)
    keys = torch.stack([torch.arange(size) + min(start, extent - size) for start, _ in unions])
    low = torch.tensor([[spans[int(i)].start for i in q] for q in queries])
    high = torch.tensor([[spans[int(i)].stop for i in q] for q in queries])
    inside = (keys[:, None] >= low[..., None]) & (keys[:, None] < high[..., None])
    return queries, keys, torch.zeros(inside.shape).masked_fill(~inside, float("-inf"))


def _tiled(query: Tensor, key: Tensor, value: Tensor, plan: _Tiling, scale: float) -> Tensor:
    gathered = 2 * plan.key_cells.numel() * key[:, :, 0].numel() * key.element_size()
    pieces = min(len(plan.key_cells), -(-gathered // _GATHER_BYTES))
    if pieces > 1 and not torch.is_grad_enabled():
        parts = [
            _attend_tiles(query, key, value, *piece, scale)
            for piece in zip(
                plan.query_cells.tensor_split(pieces),
                plan.key_cells.tensor_split(pieces),
                [None] * pieces if plan.bias is None else plan.bias.tensor_split(pieces),
            )
        ]
        out = torch.cat(parts, dim=2)
    else:
        out = _attend_tiles(query, key, value, plan.query_cells, plan.key_cells, plan.bias, scale)
    return out.index_select(2, plan.untile)


def _attend_tiles(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_cells: Tensor,
    key_cells: Tensor,
    bias: Tensor | None,
    scale: float,
) -> Tensor:
    """Attend in some tiles: returns [B, G, tiles x cells of a tile, Tq, R, D]."""
    batch, groups = query.shape[:2]
    tiles, tile_cells = query_cells.shape

    def gather(x: Tensor, cells: Tensor) -> Tensor:
        # [B, G, N, ..., D] -> [B G, tiles, cells of a tile ..., D]; tiles then play the part of heads.
        picked = x.index_select(2, cells.flatten())
        return picked.view(batch * groups, tiles, -1, x.shape[-1])

    mask = None
    if bias is not None:
        query_time, repeats = query.shape[3:5]
        mask = bias.to(query.dtype)[:, :, None, None, :, None]
        mask = mask.expand(-1, -1, query_time, repeats, -1, key.shape[3])
        mask = mask.flatten(4, 5).flatten(1, 3)[None]
    out = _attend(gather(query, query_cells), gather(key, key_cells), gather(value, key_cells), scale, mask)
    return out.reshape(batch, groups, tiles * tile_cells, *query.shape[3:])
