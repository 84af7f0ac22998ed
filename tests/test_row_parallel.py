"""Bands of rows: their windows are those of the whole grid, and attention over them gives the same rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recavsr.attention import SpatialWindow, plan_window, reference_attention, windowed_attention
from recavsr.geometry import Grid
from recavsr.models.row_parallel import LR_REACH, Band

CPU = torch.device("cpu")
CUT = {"border": "cut"}
WINDOWS = [
    SpatialWindow(22, 40),
    SpatialWindow(3, 4),
    SpatialWindow(1, 1),
    SpatialWindow(8, 8, stride=4),
    SpatialWindow(24, 24, **CUT),
    SpatialWindow(4, 2, **CUT),
]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize(("rows", "ranks"), [(34, 2), (68, 4), (17, 3), (23, 8), (5, 5), (4, 1)])
def test_a_band_sees_what_its_rows_see_in_the_whole_grid(
    window: SpatialWindow, rows: int, ranks: int
) -> None:
    whole = window.rows(Grid(rows, 6))
    covered = []
    for band in Band.split(rows, ranks, patch=2):
        plan = band.plan(6, window, CPU)
        assert plan.query_rows is not None
        own, first = band.own, plan.reach[band.rank].start
        assert [row + first for row in plan.query_rows] == list(own)
        there = window.rows(plan.grid)[plan.query_rows.start : plan.query_rows.stop]
        assert [range(span.start + first, span.stop + first) for span in there] == whole[own.start : own.stop]
        covered += own
    assert covered == list(range(rows))


def test_rows_are_shared_evenly_and_in_every_grid_alike() -> None:
    bands = Band.split(34, 3, patch=2)
    assert [len(band.own) for band in bands] == [11, 11, 12]
    assert bands[1].lr_rows == range(10, 23)
    fine = bands[1].finer(2)
    assert (fine.own, fine.lr_rows) == (range(22, 44), range(20, 46))
    assert len(fine.lr_rows) - len(fine.own) == 2 * LR_REACH
    assert bands[0].lr_rows == range(12)


@pytest.mark.parametrize(
    ("grid", "window"),
    [
        (Grid(9, 7), SpatialWindow(4, 3)),
        (Grid(11, 5), SpatialWindow(4, 4, **CUT)),
        (Grid(13, 9), SpatialWindow(4, 4, stride=2)),
        (Grid(5, 4), SpatialWindow(7, 9)),
    ],
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_attention_of_the_bands_is_attention_of_the_whole(
    grid: Grid, window: SpatialWindow, ranks: int
) -> None:
    torch.manual_seed(0)
    query = torch.randn(1, 2, grid.cells, 2, 2, 8)
    key, value = torch.randn(2, 1, 2, grid.cells, 3, 8)
    made = []
    for band in Band.split(grid.height, ranks, patch=1):
        plan = band.plan(grid.width, window, CPU)

        def cut(x: torch.Tensor, rows: range) -> torch.Tensor:
            return x[:, :, rows.start * grid.width : rows.stop * grid.width]

        reach = plan.reach[band.rank]
        made.append(windowed_attention(cut(query, band.own), cut(key, reach), cut(value, reach), plan))
    wanted = reference_attention(query, key, value, grid, window)
    torch.testing.assert_close(torch.cat(made, dim=2), wanted, atol=1e-5, rtol=1e-5)
    assert plan_window(grid, window, CPU).with_borrowed(key, value)[0] is key


def test_a_plan_refuses_cells_of_another_band() -> None:
    plan = Band.split(8, 2, patch=1)[0].plan(4, SpatialWindow(2, 2), CPU)
    query, key = torch.randn(1, 1, 32, 1, 1, 8), torch.randn(1, 1, 32, 1, 8)
    with pytest.raises(ValueError, match="16 cells, not 32"):
        windowed_attention(query, key, key, plan)


@pytest.mark.parametrize(
    ("window", "repeats"),
    [(SpatialWindow(2, 4), 1), (SpatialWindow(4, 4, **CUT), 2), (SpatialWindow(4, 4, stride=2), 1)],
)
def test_the_kernel_takes_the_rows_of_a_band(window: SpatialWindow, repeats: int) -> None:
    if torch.cuda.is_available():
        pytest.skip("interpreted where there is no card: test_kernels.py runs the compiled one")
    pytest.importorskip("triton", reason="no Triton here")
    from recavsr.kernels.window import Launch, window_attention

    torch.manual_seed(0)
    grid, launch = Grid(7, 6), Launch(queries=16 * repeats, keys=16, block=(2, 4))
    query = torch.randn(1, grid.cells, 2, 2, repeats, 16).half().permute(0, 3, 1, 2, 4, 5)
    key, value = torch.randn(2, 1, 2, grid.cells, 2, 16).half()
    wanted = reference_attention(query.float(), key.float(), value.float(), grid, window)
    for rows in (range(0, 3), range(3, 7), range(2, 3)):
        cells = slice(rows.start * grid.width, rows.stop * grid.width)
        arguments: Any = (query[:, :, cells], [(key, value)], grid, window, launch, rows)
        ours = window_attention(*arguments)
        torch.testing.assert_close(ours.float(), wanted[:, :, cells], atol=2e-3, rtol=2e-3)
