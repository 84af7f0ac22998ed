"""Rotary positions: exact far along a stream, and only differences count."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from recavsr import rope
from recavsr.geometry import Grid
from recavsr.rope import THETA, AxisSplit, angles, rotate, rotation_table

GRID = Grid(3, 4)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("width", "split"), [(128, (44, 42, 42)), (32, (12, 10, 10)), (64, (24, 20, 20)), (6, (2, 2, 2))]
)
def test_wan_split(width: int, split: tuple[int, int, int]) -> None:
    assert AxisSplit.wan(width) == AxisSplit(*split)


@pytest.mark.parametrize(("width", "split"), [(64, (16, 24, 24)), (32, (8, 12, 12))])
def test_flash_decoder_split(width: int, split: tuple[int, int, int]) -> None:
    assert AxisSplit.flash_decoder(width) == AxisSplit(*split)


def scores(queries: Tensor, keys: Tensor, times: tuple[int, ...], split: AxisSplit) -> Tensor:
    table = rotation_table(times, GRID, split, CPU)
    query, key = rotate(queries, table), rotate(keys, table)
    return torch.einsum("bnthd,bmshd->bhntms", query, key)


@pytest.mark.parametrize("origin", [1, 6 * 7, 999_996, 10**6])
def test_scores_depend_on_differences_only(origin: int) -> None:
    """Absolute positions equal the paper's advancing origin, also a million latents into a stream."""
    torch.manual_seed(0)
    split = AxisSplit.wan(32)
    queries, keys = torch.randn(2, 1, GRID.cells, 4, 2, 32)
    times = (5, 8, 9, 10)
    near = scores(queries, keys, times, split)
    far = scores(queries, keys, tuple(t + origin for t in times), split)
    torch.testing.assert_close(far, near, atol=2e-5, rtol=0)
    moved = scores(queries, keys, (5, 8, 9, 11), split)
    assert (moved - near).abs().max() > 0.1  # so the check above could have failed


def test_angles_stay_exact_at_a_million() -> None:
    exponents = [2 * i / 44 for i in range(22)]
    wanted = [10**6 * THETA**-e for e in exponents]
    assert angles(torch.tensor([10**6]), 44)[0].tolist() == pytest.approx(wanted, rel=1e-14)
    table = rotation_table((10**6,), Grid(1, 1), AxisSplit(44, 0, 0), CPU)
    assert table[0, 0, :, 0].tolist() == pytest.approx([math.cos(a) for a in wanted], abs=1e-7)
    assert table[0, 0, :, 1].tolist() == pytest.approx([math.sin(a) for a in wanted], abs=1e-7)


def test_channels_belong_to_time_then_rows_then_columns() -> None:
    table = rotation_table((0, 7), GRID, AxisSplit(4, 6, 2), CPU).view(3, 4, 2, 6, 2)
    assert torch.equal(table[..., :2, 0], angles(torch.tensor([0, 7]), 4).cos().float().expand(3, 4, 2, 2))
    assert torch.equal(table[2, 1, 1, 2:5, 1], angles(torch.tensor([2]), 6)[0].sin().float())
    assert table[2, 3, 0, 5].tolist() == pytest.approx([math.cos(3), math.sin(3)])


def test_tables_of_any_sizes_stay_few() -> None:
    rope._first_turns.cache_clear()
    split = AxisSplit(4, 6, 2)
    for side in range(1, 200):
        table = rotation_table((0,), Grid(side, 1), split, CPU, first_row=side)
        wanted = angles(torch.arange(side, 2 * side), 6)
        assert torch.equal(table[:, 0, 2:5, 0], wanted.cos().float())
        assert torch.equal(table[:, 0, 2:5, 1], wanted.sin().float())
    assert rope._first_turns.cache_info().currsize < 12


class OneDevice(TorchDispatchMode):
    """Refuses operations that move values between devices, as the capture of a CUDA graph does."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        assert {x.device.type for x in tensors} <= {"meta"}, function
        return out


def test_tables_of_consecutive_times_are_made_on_the_device() -> None:
    """Whatever was made before: a rollout of any length can be captured."""
    split = AxisSplit.wan(32)
    with OneDevice():
        for first in range(40):
            table = rotation_table((first, first + 1), GRID, split, torch.device("meta"))
            assert table.shape == (12, 2, 16, 2)
    with pytest.raises(AssertionError), OneDevice():  # so the check above could have failed
        torch.tensor([1, 2]).to("meta")
    gaps = rotation_table((3, 5, 4), GRID, split, CPU)
    assert torch.equal(gaps[:, [0, 2, 1]], rotation_table((3, 4, 5), GRID, split, CPU))


def test_rotation_turns_adjacent_pairs() -> None:
    x = torch.randn(2, GRID.cells, 2, 3, 12)
    table = rotation_table((4, 9), GRID, AxisSplit(4, 4, 4), CPU)
    turn = torch.complex(table[..., 0], table[..., 1])[None, :, :, None]
    wanted = torch.complex(x[..., ::2], x[..., 1::2]) * turn
    out = rotate(x, table)
    torch.testing.assert_close(out[..., ::2], wanted.real)
    torch.testing.assert_close(out[..., 1::2], wanted.imag)
    torch.testing.assert_close(out.square().sum(-1), x.square().sum(-1))


def test_rotation_is_float32_also_for_bfloat16() -> None:
    x = torch.randn(1, GRID.cells, 1, 2, 12).bfloat16()
    table = rotation_table((100,), GRID, AxisSplit(4, 4, 4), CPU)
    out = rotate(x, table)
    assert out.dtype == torch.float32
    assert torch.equal(out, rotate(x.float(), table))
