"""Triton kernels equal their plain forms: interpreted on a CPU at tiny sizes, compiled on a card."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recavsr import fused
from recavsr.attention import SpatialWindow, plan_window, reference_attention, windowed_attention
from recavsr.geometry import Grid
from recavsr.layers import copy_both
from recavsr.rope import AxisSplit, rotation_table
from recavsr.stream.blocks import to_picture

CUT = {"border": "cut"}


@pytest.fixture(scope="module")
def interpreted() -> Any:
    """The kernel modules under Triton's interpreter, which conftest.py asks for where there is no card."""
    if torch.cuda.is_available():
        pytest.skip("a card compiles the kernels: the tests marked gpu run them")
    pytest.importorskip("triton", reason="no Triton here")
    from recavsr.kernels import pictures, rows, window

    return SimpleNamespace(pictures=pictures, rows=rows, window=window)


@pytest.mark.parametrize(
    ("grid", "window", "latents", "repeats", "past"),
    [
        (Grid(4, 7), SpatialWindow(2, 4), 2, 1, 1),
        (Grid(4, 5), SpatialWindow(3, 3), 2, 1, 0),
        (Grid(3, 8), SpatialWindow(5, 3), 1, 1, 1),
        (Grid(4, 5), SpatialWindow(4, 2, **CUT), 1, 4, 1),
        (Grid(3, 4), SpatialWindow(4, 4, **CUT), 2, 2, 2),
        (Grid(4, 6), SpatialWindow(4, 4, stride=2), 2, 1, 1),
        (Grid(1, 1), SpatialWindow(2, 2), 2, 1, 1),
    ],
    ids=["history", "odd window", "one row axis covered", "cut, grouped", "cut, frames", "tiles", "one cell"],
)
def test_window_attention_equals_its_definition(
    interpreted: Any, grid: Grid, window: SpatialWindow, latents: int, repeats: int, past: int
) -> None:
    torch.manual_seed(0)
    query = torch.randn(1, grid.cells, latents, 2, repeats, 16).half().permute(0, 3, 1, 2, 4, 5)
    now = (
        torch.randn(2, 1, grid.cells, latents, 2, 16).half().permute(0, 1, 4, 2, 3, 5)
    )  # as products give it
    before = torch.randn(2, 1, 2, grid.cells, past, 16).half()
    pieces = [tuple(before), tuple(now)] if past else [tuple(now)]
    launch = interpreted.window.Launch(queries=8 * latents * repeats, keys=16, block=(2, 4))
    ours = interpreted.window.window_attention(query, pieces, grid, window, launch)
    key, value = (torch.cat(pair, dim=3) for pair in zip(*pieces))
    wanted = reference_attention(query.float(), key.float(), value.float(), grid, window)
    assert ours.shape == query.shape
    torch.testing.assert_close(ours.float(), wanted, atol=2e-3, rtol=2e-3)


def test_window_attention_writes_where_it_is_told(interpreted: Any) -> None:
    """One group's queries and results lie between those of others, as a decoder has them."""
    torch.manual_seed(0)
    grid, window = Grid(2, 3), SpatialWindow(2, 2, **CUT)
    query = torch.randn(1, grid.cells, 3, 2, 1, 16).half().permute(0, 3, 1, 2, 4, 5)
    pair = tuple(torch.randn(2, 1, 2, grid.cells, 1, 16).half())
    out = torch.zeros(1, grid.cells, 3, 2, 1, 16).half().permute(0, 3, 1, 2, 4, 5)
    launch = interpreted.window.Launch(queries=16, keys=16, block=(2, 4))
    arguments = (query[:, :, :, 1:2], [pair], grid, window, launch)
    wanted = interpreted.window.window_attention(*arguments)
    interpreted.window.window_attention(*arguments, out=out[:, :, :, 1:2])
    assert torch.equal(out[:, :, :, 1:2], wanted)
    assert not out[:, :, :, [0, 2]].any()


@pytest.mark.parametrize(
    ("grid", "window"),
    [
        (Grid(34, 60), SpatialWindow(22, 40)),
        (Grid(23, 40), SpatialWindow(22, 40)),
        (Grid(20, 90), SpatialWindow(22, 40)),
        (Grid(9, 12), SpatialWindow(8, 8, stride=4)),
        (Grid(17, 30), SpatialWindow(8, 8, **CUT)),
    ],
    ids=str,
)
@pytest.mark.parametrize("cells", [64, 7, 1])
def test_tiles_cover_the_grid_once(interpreted: Any, grid: Grid, window: SpatialWindow, cells: int) -> None:
    tiles, _ = interpreted.window.tiles_of(grid, window, cells, interpreted.window.Launch())
    covered = torch.zeros(grid.height, grid.width, dtype=torch.int)
    for y, x, height, width in tiles:
        assert 1 <= height * width <= cells
        covered[y : y + height, x : x + width] += 1
    assert (covered == 1).all()


def test_tiles_walk_few_keys_in_vain(interpreted: Any) -> None:
    """Over the grid of 1080p: an eighth."""
    grid, window, launch = Grid(34, 60), SpatialWindow(22, 40), interpreted.window.Launch(block=(2, 8))
    tiles, fits = interpreted.window.tiles_of(grid, window, 64, launch)
    rows, columns = window.rows(grid), window.columns(grid)

    def walked(tile: tuple[int, int, int, int]) -> int:
        y, x, height, width = tile
        down = rows[y + height - 1].stop - rows[y].start
        across = columns[x + width - 1].stop - columns[x].start
        return -(-down // 2) * -(-across // 8) * 16

    assert sum(height * width * walked((y, x, height, width)) for y, x, height, width in tiles) < (
        1.13 * grid.cells * 22 * 40
    )
    assert len(tiles) <= 38
    assert walked(tiles[0]) == max(map(walked, tiles)) > walked(tiles[-1]) == min(map(walked, tiles))
    assert fits
    assert not interpreted.window.tiles_of(Grid(23, 60), window, 64, interpreted.window.Launch())[1]


def plain_heads(x: Tensor, weight: Tensor, table: Tensor, heads: int) -> Tensor:
    """Norm over all heads, then turn complex pairs: in float64, one number after the other."""
    y = x.double()
    y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    pairs = torch.view_as_complex(y.unflatten(-1, (heads, -1, 2)))
    return torch.view_as_real(pairs * torch.view_as_complex(table.double())[:, :, None]).flatten(-2)


def test_rows_equal_their_definitions(interpreted: Any) -> None:
    rows = interpreted.rows
    torch.manual_seed(0)
    x, update = torch.randn(2, 6, 24).half()
    weight, other = torch.randn(2, 24).half()
    both = x + update
    total, normal, _ = rows.add_norm(x, update, 1e-6, None, False)
    assert torch.equal(total, both)
    assert total.data_ptr() == x.data_ptr()  # written over it
    torch.testing.assert_close(normal.float(), F.layer_norm(both.float(), (24,)), atol=2e-3, rtol=2e-3)
    _, normal, _ = rows.add_norm(x, None, 1e-5, weight, False)
    wanted = F.rms_norm(x.float(), (24,), weight.float(), 1e-5)
    torch.testing.assert_close(normal.float(), wanted, atol=2e-3, rtol=2e-3)

    _, normal, _ = rows.add_norm(x, None, 1e-5, weight, False, silu=True)
    torch.testing.assert_close(normal.float(), F.silu(wanted), atol=2e-3, rtol=2e-3)
    place = torch.zeros(9, 24).half()
    rows.add_norm(x, None, 1e-5, weight, False, silu=True, out=place[3:])
    assert torch.equal(place, torch.cat([torch.zeros(3, 24).half(), normal]))
    before, biased = x.clone(), rows.add_norm(x, other, 1e-5, weight, False)[1]  # the sum is not kept
    assert torch.equal(x, before)
    assert torch.equal(biased, rows.add_norm(x + other, None, 1e-5, weight, False)[1])

    qkv, table = torch.randn(2, 3, 2, 72).half(), torch.randn(3, 2, 6, 2)
    query, key = rows.norm_rotate(qkv.flatten(0, -2), weight, other, 1e-6, table.flatten(0, 1), 12)
    for ours, part, scale in ((query, 0, weight), (key, 1, other)):
        wanted = plain_heads(qkv.chunk(3, -1)[part], scale, table, 2)
        torch.testing.assert_close(ours.view(2, 3, 2, 2, 12).double(), wanted, atol=4e-3, rtol=2e-3)

    gate_up = torch.randn(5, 24).half()
    gate, up = gate_up.float().chunk(2, -1)
    torch.testing.assert_close(rows.swiglu(gate_up).float(), F.silu(gate) * up, atol=2e-3, rtol=2e-3)


def test_both_copies_in_one_pass(interpreted: Any) -> None:
    """Latents of a product, heads behind cells, go into slots of a history; nothing else moves."""
    torch.manual_seed(0)
    qkv = torch.randn(2, 5, 3, 3, 4, 6).half()  # B N T, queries or keys or values, H D
    _, key, value = qkv.permute(3, 0, 4, 1, 2, 5)
    history = torch.randn(2, 2, 4, 5, 4, 6).half()
    wanted = history.clone()
    wanted[..., 1:3, :] = torch.stack([key, value])[..., 1:, :]
    into, found = history[..., 1:3, :], (key[..., 1:, :], value[..., 1:, :])
    interpreted.rows.copy_both((into[0], into[1]), found)
    assert torch.equal(history, wanted)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_pictures_equal_those_of_a_cpu(interpreted: Any, dtype: type) -> None:
    """Out-of-range values and ties included; any strides."""
    white = np.iinfo(dtype).max
    ties = (torch.arange(3 * 2 * 4 * 7) + 0.5) / (white / 2) - 1
    frames = torch.stack([ties, 3 * torch.randn(len(ties), generator=torch.Generator().manual_seed(0))])
    frames = frames.view(2, 3, 2, 4, 7).transpose(1, 2).flatten(0, 1)[..., :3, :6]
    wanted = to_picture(frames.transpose(0, 1)[None], (3, 6), np.dtype(dtype))
    assert np.array_equal(interpreted.pictures.levels_of(frames, int(white)).numpy(), wanted)
    half = frames.bfloat16()
    wanted = to_picture(half.transpose(0, 1)[None], (3, 6), np.dtype(dtype))
    assert np.array_equal(interpreted.pictures.levels_of(half, int(white)).numpy(), wanted)


def test_heads_of_a_decoder_row(interpreted: Any) -> None:
    torch.manual_seed(0)
    qkv, table = torch.randn(2, 3, 2, 8 * 16).half(), torch.randn(3, 2, 8, 2)
    weights = torch.randn(2, 16).half()
    wanted = torch.cat(fused.rotate_heads(qkv, 4, 2, *weights, 1e-5, table), -2).flatten(-2)
    ours = interpreted.rows.rotate_heads(qkv.flatten(0, -2), 4, 2, *weights, 1e-5, table.flatten(0, 1))
    torch.testing.assert_close(ours.view_as(wanted), wanted, atol=4e-3, rtol=2e-3)


def error(ours: Tensor, wanted: Tensor) -> float:
    return ((ours.float() - wanted.float()).norm() / wanted.float().norm()).item()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("grid", "window", "groups", "latents", "repeats", "width", "past"),
    [
        (Grid(34, 60), SpatialWindow(22, 40), 4, 2, 1, 128, 4),
        (Grid(34, 60), SpatialWindow(22, 40), 2, 6, 1, 128, 0),
        (Grid(37, 53), SpatialWindow(22, 40), 2, 2, 1, 128, 1),
        (Grid(68, 120), SpatialWindow(24, 24, **CUT), 1, 1, 4, 64, 1),
        (Grid(40, 31), SpatialWindow(24, 24, **CUT), 1, 4, 4, 64, 4),
        (Grid(23, 40), SpatialWindow(8, 8, stride=4), 2, 2, 1, 64, 2),
    ],
)
def test_windowed_attention_on_a_card(
    grid: Grid,
    window: SpatialWindow,
    groups: int,
    latents: int,
    repeats: int,
    width: int,
    past: int,
) -> None:
    """The kernels are as near to float32 as the plain path in bfloat16 is."""
    card = torch.device("cuda")
    torch.manual_seed(0)
    query = torch.randn(1, groups, grid.cells, latents, repeats, width, device=card).bfloat16()
    key, value = torch.randn(2, 1, groups, grid.cells, past + latents, width, device=card).bfloat16()
    plan = plan_window(grid, window, card)
    earlier = (key[..., :past, :], value[..., :past, :]) if past else None
    now = key[..., past:, :], value[..., past:, :]
    with torch.inference_mode():
        ours = windowed_attention(query, *now, plan, earlier=earlier)
    plain = windowed_attention(query, key, value, plan)  # gradients are on: no kernel
    wanted = windowed_attention(query.float(), key.float(), value.float(), plan)
    assert error(ours, wanted) < 1.5 * error(plain, wanted) + 1e-4


@pytest.mark.gpu
@torch.inference_mode()
def test_passes_over_rows_on_a_card() -> None:
    card = torch.device("cuda")
    torch.manual_seed(0)
    x, update = torch.randn(2, 1, 77, 2, 3072, device=card).bfloat16()
    weight = torch.randn(3072, device=card).bfloat16()
    both = x + update
    total, normal = fused.add_norm(x.clone(), update, 1e-6, False)
    wanted = F.layer_norm(both.float(), (3072,), eps=1e-6)
    assert torch.equal(total, both)
    assert error(normal, wanted) < 3e-3
    _, rounded = fused.add_norm(x.clone(), update, 1e-6, True)
    assert error(rounded.values.float() * rounded.scale, wanted.flatten(0, -2)) < 4e-2
    rounded = fused.gelu_float8(x)
    wanted = F.gelu(x.float(), approximate="tanh")
    assert error(rounded.values.float() * rounded.scale, wanted.flatten(0, -2)) < 4e-2
    assert error(fused.rms_norm(x, weight, 1e-6), F.rms_norm(x.float(), (3072,), weight.float())) < 3e-3
    layer = nn.Linear(3072, 256, device=card, dtype=torch.bfloat16)
    wanted = F.gelu(F.linear(x.float(), layer.weight.float(), layer.bias.float()), approximate="tanh")
    assert error(fused.gelu_linear(layer, x), wanted) < 1e-2
    table = rotation_table((3, 4), Grid(7, 11), AxisSplit.wan(128), card)
    qkv = torch.randn(1, 77, 2, 9216, device=card).bfloat16()
    for ours, part in zip(fused.norm_rotate(qkv, weight, weight, 1e-6, table, 24), qkv.chunk(3, -1)):
        assert error(ours, plain_heads(part, weight, table, 24)) < 3e-3
    key, value = qkv.unflatten(-1, (3, 24, 128)).permute(3, 0, 4, 1, 2, 5)[1:]
    history = torch.zeros(2, 1, 24, 77, 5, 128, device=card).bfloat16()
    copy_both((history[0, ..., 2:4, :], history[1, ..., 2:4, :]), (key, value))
    assert torch.equal(history[..., 2:4, :], torch.stack([key, value]))
    assert not history[..., [0, 1, 4], :].any()


@pytest.mark.gpu
@torch.inference_mode()
def test_feed_forward_layers_in_pieces_on_a_card() -> None:
    torch.manual_seed(0)
    card = torch.device("cuda")
    x = torch.randn(1, 500, 3, 64, device=card).bfloat16()
    up, down = (
        torch.nn.Linear(64, 512, device=card).bfloat16(),
        torch.nn.Linear(512, 64, device=card).bfloat16(),
    )

    def wide(rows: Tensor) -> Tensor:
        return F.silu(up(rows))

    assert error(fused.in_pieces(wide, down, x, 400), down(wide(x))) < 3e-3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_pictures_on_a_card(dtype: type) -> None:
    torch.manual_seed(0)
    frames = torch.randn(1, 3, 5, 40, 70) * 1.5
    for x in (frames, frames.bfloat16(), frames.transpose(1, 2).contiguous().transpose(1, 2)):
        assert np.array_equal(
            to_picture(x.cuda(), (33, 65), np.dtype(dtype)), to_picture(x, (33, 65), np.dtype(dtype))
        )
