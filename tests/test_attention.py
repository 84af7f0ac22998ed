"""Windowed attention equals its definition, for every kind of window, grid and grouping."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from recavsr import attention
from recavsr.attention import SpatialWindow, plan_window, reference_attention, windowed_attention
from recavsr.geometry import Grid
from recavsr.rope import AxisSplit, rotate, rotation_table

CPU = torch.device("cpu")
MINUS = float("-inf")

CASES = {
    "per query": (Grid(9, 11), SpatialWindow(4, 6)),
    "per query, odd sides": (Grid(10, 7), SpatialWindow(3, 5)),
    "per query, many tiles": (Grid(17, 19), SpatialWindow(5, 4)),
    "one axis covered": (Grid(5, 12), SpatialWindow(8, 4)),
    "tiles": (Grid(12, 16), SpatialWindow(8, 8, stride=4)),
    "tiles, grid not divisible": (Grid(11, 18), SpatialWindow(8, 8, stride=4)),
    "tiles, one axis covered": (Grid(6, 17), SpatialWindow(8, 8, stride=4)),
    "tiles of an odd window": (Grid(9, 10), SpatialWindow(5, 3, stride=2)),
    "cut": (Grid(9, 10), SpatialWindow(4, 6, border="cut")),
    "cut, window wider than the grid": (Grid(6, 10), SpatialWindow(8, 6, border="cut")),
    "covers": (Grid(5, 6), SpatialWindow(22, 40)),
    "covers, cut": (Grid(3, 4), SpatialWindow(6, 8, border="cut")),
    "covers, tiles": (Grid(5, 6), SpatialWindow(8, 8, stride=4)),
    "one cell": (Grid(1, 1), SpatialWindow(4, 4)),
}


def inputs(
    grid: Grid,
    *,
    batch: int = 1,
    groups: int = 2,
    repeats: int = 1,
    query_time: int = 2,
    key_time: int = 3,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    query = torch.randn(batch, groups, grid.cells, query_time, repeats, 8, dtype=dtype)
    key, value = torch.randn(2, batch, groups, grid.cells, key_time, 8, dtype=dtype)
    return query, key, value


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("biased", [False, True], ids=["", "key_bias"])
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"batch": 2, "groups": 1, "repeats": 4},
        {"repeats": 2, "query_time": 1, "key_time": 1},
        {"query_time": 6, "key_time": 6},
    ],
    ids=["plain", "grouped heads", "single latents", "first block"],
)
def test_equals_the_definition(name: str, biased: bool, sizes: dict[str, int]) -> None:
    grid, window = CASES[name]
    query, key, value = inputs(grid, **sizes)
    bias = 4 * torch.randn(key.shape[3]) if biased else None
    plan = plan_window(grid, window, CPU)
    ours = windowed_attention(query, key, value, plan, bias)
    wanted = reference_attention(query, key, value, grid, window, bias)
    assert ours.shape == query.shape
    torch.testing.assert_close(ours, wanted, atol=2e-6, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_window_on_any_grid(data: st.DataObject) -> None:
    grid = Grid(data.draw(st.integers(1, 14)), data.draw(st.integers(1, 14)))
    border = data.draw(st.sampled_from(["shift", "cut"]))
    if border == "cut":
        window = SpatialWindow(
            2 * data.draw(st.integers(1, 8)), 2 * data.draw(st.integers(1, 8)), border="cut"
        )
    else:
        height, width = data.draw(st.integers(1, 16)), data.draw(st.integers(1, 16))
        window = SpatialWindow(height, width, data.draw(st.integers(1, min(height, width))))
    query, key, value = inputs(grid, groups=1, query_time=1, key_time=2)
    ours = windowed_attention(query, key, value, plan_window(grid, window, CPU))
    wanted = reference_attention(query, key, value, grid, window)
    torch.testing.assert_close(ours, wanted, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["per query", "tiles, grid not divisible", "cut", "covers"])
def test_gradients_equal_the_definitions(name: str) -> None:
    """Against a definition of its own in float64 (`reference_attention` computes in float32)."""
    grid, window = CASES[name]
    tensors = [x.requires_grad_() for x in inputs(grid, repeats=2, dtype=torch.float64)]
    bias = torch.tensor([0.5, 0.0, -3.0], dtype=torch.float64, requires_grad=True)
    out = windowed_attention(*tensors, plan_window(grid, window, CPU), bias)

    seen = torch.zeros(grid.cells, grid.cells, dtype=torch.bool)
    for y, rows in enumerate(window.rows(grid)):
        for x, columns in enumerate(window.columns(grid)):
            for row in rows:
                for column in columns:
                    seen[y * grid.width + x, row * grid.width + column] = True
    query, key, value = tensors
    scores = torch.einsum("bgntrd,bgmsd->bgrtnms", query, key) * query.shape[-1] ** -0.5
    scores = scores + bias
    scores = scores.masked_fill(~seen[:, :, None], MINUS)
    weights = scores.flatten(-2).softmax(-1).view_as(scores)
    wanted = torch.einsum("bgrtnms,bgmsd->bgntrd", weights, value)
    torch.testing.assert_close(out, wanted, atol=1e-12, rtol=1e-10)

    upstream = torch.randn_like(out)
    ours = torch.autograd.grad(out, [*tensors, bias], upstream)
    theirs = torch.autograd.grad(wanted, [*tensors, bias], upstream)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-10)


def test_a_key_bias_is_fine_in_bfloat16() -> None:
    """One rounded channel would be off by up to 2^-9 of the bias, 3 % of the weight of log(1e-6)."""
    grid = Grid(1, 1)
    bias = torch.tensor([0.0, -13.77, -9.19, -4.57])
    query = torch.zeros(1, 1, 1, 1, 1, 64, dtype=torch.bfloat16)
    key = torch.zeros(1, 1, 1, 4, 64, dtype=torch.bfloat16)
    value = torch.zeros_like(key)
    value[0, 0, 0, :, :4] = torch.diag(1 / bias.exp())  # every weight is read at its own scale
    out = windowed_attention(query, key, value, plan_window(grid, SpatialWindow(1, 1), CPU), bias)
    wanted = bias.exp().sum().reciprocal().expand(4)
    torch.testing.assert_close(out.flatten()[:4].float(), wanted, atol=0, rtol=0.006)


def test_cells_outside_the_window_do_not_matter() -> None:
    grid, window = Grid(8, 8), SpatialWindow(3, 3)
    query, key, value = inputs(grid)
    plan = plan_window(grid, window, CPU)
    before = windowed_attention(query, key, value, plan)
    far = value.clone()
    far[:, :, -1] += 100  # the last cell
    after = windowed_attention(query, key, far, plan)
    changed = (before != after).any(-1).any(-1).any(-1)[0, 0].view(8, 8)
    wanted = torch.zeros(8, 8, dtype=torch.bool)
    wanted[6:, 6:] = True
    assert torch.equal(changed, wanted)


def test_windows_shift_inward_at_borders() -> None:
    """start = clamp(y - 11, 0, H - 22): 11 before a cell, 10 after it, a constant size."""
    rows = SpatialWindow(22, 40).rows(Grid(34, 60))
    assert rows[0] == range(0, 22)
    assert rows[11] == range(0, 22)
    assert rows[12] == range(1, 23)
    assert rows[33] == range(12, 34)
    assert {len(row) for row in rows} == {22}


def test_windows_are_cut_at_borders() -> None:
    """[q - 12, q + 12), truncated."""
    rows = SpatialWindow(24, 24, border="cut").rows(Grid(40, 40))
    assert rows[0] == range(0, 12)
    assert rows[20] == range(8, 32)
    assert rows[39] == range(27, 40)


def test_tiles_are_centred_in_their_window() -> None:
    columns = SpatialWindow(8, 8, stride=4).columns(Grid(16, 16))
    assert [columns[x] for x in (0, 4, 7, 8, 12)] == [
        range(0, 8),
        range(2, 10),
        range(2, 10),
        range(6, 14),
        range(8, 16),
    ]


@pytest.mark.parametrize(
    "arguments", [(0, 4), (4, 4, 0), (4, 8, 5), (5, 4, 1, "cut"), (4, 5, 1, "cut"), (4, 4, 2, "cut")]
)
def test_impossible_windows_are_refused(arguments: tuple) -> None:
    with pytest.raises(ValueError, match="a window"):
        SpatialWindow(*arguments)


def test_a_plan_of_another_grid_is_refused() -> None:
    query, key, value = inputs(Grid(4, 4))
    with pytest.raises(ValueError, match="20 cells, not 16"):
        windowed_attention(query, key, value, plan_window(Grid(4, 5), SpatialWindow(2, 2), CPU))


def test_a_plan_made_in_inference_mode_serves_training() -> None:
    """Plans are kept: who upscales first and trains then must not meet inference tensors."""
    grid, split = Grid(9, 11), AxisSplit.wan(32)
    with torch.inference_mode():
        plan = plan_window(grid, SpatialWindow(4, 6, border="cut"), torch.device("cpu"))
        assert plan.tiling is not None  # made here, at its first use
    table = rotation_table((3, 4), grid, split, torch.device("cpu"))
    x = torch.randn(1, grid.cells, 2, 3, 32, requires_grad=True)
    turned = rotate(x, table).permute(0, 3, 1, 2, 4)
    windowed_attention(turned[:, :, :, :, None], turned, turned, plan).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@torch.no_grad()
@pytest.mark.parametrize("held", [1, 100, 1 << 20], ids=["a head at a time", "some heads", "all at once"])
def test_two_products_give_what_fused_attention_gives(held: int, monkeypatch) -> None:
    monkeypatch.setattr(attention, "_SCORES", held)
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 5, 6, 8), torch.randn(2, 5, 7, 8), torch.randn(2, 5, 7, 12)
    made = attention._in_products(query, key, value, 0.3)
    torch.testing.assert_close(made, F.scaled_dot_product_attention(query, key, value, scale=0.3))


@torch.no_grad()
def test_products_in_bfloat16_are_right_where_keys_have_much_in_common() -> None:
    torch.manual_seed(0)
    query, common = torch.randn(4, 16, 64), 30 * torch.randn(4, 1, 64)
    key, value = torch.randn(4, 32, 64) + common, torch.randn(4, 32, 8)
    query, key, value = (x[None].bfloat16() for x in (query, key, value))
    wanted = F.scaled_dot_product_attention(query.float(), key.float(), value.float())
    made = attention._in_products(query, key, value, 64**-0.5)
    torch.testing.assert_close(made.float(), wanted, rtol=0.02, atol=0.02)


@torch.no_grad()
@pytest.mark.parametrize("case", ["tiles, grid not divisible", "covers", "per query"])
def test_windows_by_products_equal_their_definition(case: str, monkeypatch) -> None:
    monkeypatch.setattr(attention, "_products_win", lambda device, dtype: True)
    monkeypatch.setattr(attention, "_MANY_QUERIES", 1)
    grid, window = CASES[case]
    query, key, value = inputs(grid, batch=2, repeats=2, dtype=torch.bfloat16)
    made = windowed_attention(query, key, value, plan_window(grid, window, CPU))
    wanted = reference_attention(query, key, value, grid, window)
    torch.testing.assert_close(made, wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("flags", "dtype", "wins"),
    [
        ({"avx512_bf16"}, torch.bfloat16, True),
        ({"avx512_bf16"}, torch.float32, False),
        ({"avx512_bf16", "amx_tile"}, torch.bfloat16, False),
        (set(), torch.bfloat16, False),
    ],
)
def test_products_are_for_bfloat16_without_amx(flags: set, dtype, wins: bool, monkeypatch) -> None:
    monkeypatch.setattr(attention, "cpu_flags", lambda: frozenset(flags))
    assert attention._products_win.__wrapped__(CPU, dtype) is wins
