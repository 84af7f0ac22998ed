"""Blocks in time, sizes in space."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from recavsr.geometry import (
    LARGEST_DETOUR,
    STRIP_OVERLAP,
    BlockPlan,
    Grid,
    Strip,
    frames_of_latents,
    native_size,
    padded_size,
    scaled_size,
    strips_of,
    working_size,
)

plans = st.builds(BlockPlan, st.integers(1, 8), st.integers(1, 4))


def test_the_papers_plan() -> None:
    plan = BlockPlan()
    assert [plan.latents(i) for i in range(4)] == [6, 2, 2, 2]
    assert [plan.frames(i) for i in range(4)] == [21, 8, 8, 8]
    assert [plan.first_frame(i) for i in range(4)] == [0, 21, 29, 37]
    assert [plan.first_latent(i) for i in range(4)] == [0, 6, 8, 10]


@pytest.mark.parametrize(
    ("frames", "blocks", "valid"),
    [(0, 0, None), (1, 1, 1), (21, 1, 21), (22, 2, 1), (24, 2, 3), (29, 2, 8), (30, 3, 1), (117, 13, 8)],
)
def test_block_count_and_valid_frames(frames: int, blocks: int, valid: int | None) -> None:
    made = list(BlockPlan().blocks(frames))
    assert len(made) == BlockPlan().block_count(frames) == blocks
    if valid is not None:
        assert made[-1].valid_frames == valid


def test_a_negative_count_has_no_blocks() -> None:
    assert BlockPlan().block_count(-3) == 0


@given(plans, st.integers(0, 40))
def test_a_clip_is_cut_as_its_latents_are_generated(plan: BlockPlan, latents: int) -> None:
    blocks = plan.cut(latents)
    assert [position for block in blocks for position in block] == list(range(latents))
    assert [len(b) for b in blocks[:-1]] == [plan.latents(i) for i in range(len(blocks) - 1)]
    assert all(1 <= len(block) <= plan.latents(i) for i, block in enumerate(blocks))


@given(plans, st.integers(1, 300))
def test_blocks_cover_every_frame_once(plan: BlockPlan, count: int) -> None:
    blocks = list(plan.blocks(count))
    assert [b.index for b in blocks] == list(range(plan.block_count(count)))
    covered = [b.first_frame + i for b in blocks for i in range(b.valid_frames)]
    assert covered == list(range(count))
    latents = [b.first_latent + i for b in blocks for i in range(b.latents)]
    assert latents == list(range(len(latents)))
    for block in blocks:
        assert block.frames == frames_of_latents(block.first_latent, block.latents)
        assert 1 <= block.valid_frames <= block.frames
    assert all(b.valid_frames == b.frames for b in blocks[:-1])


@given(plans, st.integers(1, 200), st.integers(0, 200))
def test_a_longer_clip_begins_with_the_blocks_of_a_shorter_one(
    plan: BlockPlan, count: int, more: int
) -> None:
    """Only the valid frames of the last block may differ: nothing depends on how long the clip is."""
    short, long = list(plan.blocks(count)), list(plan.blocks(count + more))
    assert long[: len(short) - 1] == short[:-1]
    last, same = short[-1], long[len(short) - 1]
    assert (last.first_frame, last.frames, last.first_latent) == (
        same.first_frame,
        same.frames,
        same.first_latent,
    )


@given(st.integers(0, 50), st.integers(0, 20), st.integers(0, 20))
def test_frames_of_latents_add_up(first: int, count: int, more: int) -> None:
    whole = frames_of_latents(first, count + more)
    assert whole == frames_of_latents(first, count) + frames_of_latents(first + count, more)


@pytest.mark.parametrize(("first", "rest"), [(0, 2), (6, 0), (-1, 2)])
def test_a_block_has_latents(first: int, rest: int) -> None:
    with pytest.raises(ValueError, match="at least one latent"):
        BlockPlan(first, rest)


def test_grid() -> None:
    assert Grid(22, 40).cells == 880
    with pytest.raises(ValueError, match="at least one row"):
        Grid(0, 4)


@pytest.mark.parametrize(
    ("size", "scale", "wanted"),
    [((180, 320), 4, (720, 1280)), ((5, 5), 2.5, (13, 13)), ((7, 9), 1.5, (11, 14)), ((3, 3), 0.5, (2, 2))],
)
def test_scaled_size_rounds_half_up(size: tuple[int, int], scale: float, wanted: tuple[int, int]) -> None:
    assert scaled_size(*size, scale) == wanted


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 64))
def test_padded_size(height: int, width: int, multiple: int) -> None:
    for side, padded in zip((height, width), padded_size(height, width, multiple)):
        assert padded % multiple == 0
        assert side <= padded < side + multiple


@pytest.mark.parametrize(
    ("out_size", "native_scale", "expected"),
    [
        ((200, 360), 4.0, (400, 720)),  # x2 goes by way of x4
        ((100, 180), 4.0, (400, 720)),
        ((60, 90), 4.0, (400, 720)),  # smaller than the source
        ((400, 720), 4.0, (400, 720)),
        ((360, 640), 4.0, (360, 640)),  # near enough
        ((300, 540), 4.0, (400, 720)),
        ((900, 1620), 4.0, (900, 1620)),
        ((800, 360), 4.0, (800, 720)),  # one side only
        ((200, 360), 0.0, (200, 360)),
        ((1, 1), 0.0, (1, 1)),
    ],
)
def test_small_enlargements_go_by_way_of_the_native_one(
    out_size: tuple[int, int], native_scale: float, expected: tuple[int, int]
) -> None:
    assert working_size((100, 180), out_size, native_scale) == expected


@pytest.mark.parametrize(
    ("lr_size", "out_size", "count"),
    [
        ((360, 640), (720, 1280), 1),
        ((540, 960), (1080, 1920), 2),
        ((720, 1280), (1440, 2560), 4),
        ((1080, 1920), (2160, 3840), 9),
        ((1080, 1920), (1620, 2880), 9),  # x1.5: strips begin at even rows
        ((1080, 1920), (1080, 1920), 9),
        ((1440, 2560), (2160, 3840), 16),
        ((2160, 3840), (2880, 5120), 40),
    ],
)
def test_very_large_frames_are_made_in_strips(
    lr_size: tuple[int, int], out_size: tuple[int, int], count: int
) -> None:
    strips = strips_of(lr_size, out_size, 4.0)
    assert len(strips) == count
    assert strips_of(lr_size, out_size, 4.0, direct=True) == (
        Strip(range(lr_size[0]), range(out_size[0]), out_size),
    )
    assert working_size(lr_size, out_size, 4.0) == native_size(lr_size, out_size, 4.0)
    assert (strips[0].rows.start, strips[-1].rows.stop) == (0, lr_size[0])
    assert (strips[0].out_rows.start, strips[-1].out_rows.stop) == (0, out_size[0])
    for strip in strips:
        height, width = strip.work_size
        assert height * width <= LARGEST_DETOUR
        assert (height, width) == (4 * len(strip.rows), 4 * lr_size[1])
        ratio = Fraction(out_size[0], lr_size[0])
        assert (strip.out_rows.start, strip.out_rows.stop) == (
            strip.rows.start * ratio,
            strip.rows.stop * ratio,
        )
    for before, after in pairwise(strips):
        assert before.rows.stop - after.rows.start >= STRIP_OVERLAP
        assert len(before.rows) == len(after.rows)
    for before, after in zip(strips, strips[2:]):
        assert before.rows.stop <= after.rows.start


@pytest.mark.parametrize(
    ("lr_size", "out_size"),
    [
        (
            (1081, 1920),
            (2000, 3700),
        ),
        ((8, 600_000), (16, 1_200_000)),
    ],
)
def test_what_can_not_be_made_in_strips_is_made_directly(
    lr_size: tuple[int, int], out_size: tuple[int, int]
) -> None:
    assert strips_of(lr_size, out_size, 4.0) == strips_of(lr_size, out_size, 4.0, direct=True)
    assert working_size(lr_size, out_size, 4.0) == out_size


@given(
    st.integers(40, 3000),
    st.integers(40, 3000),
    st.integers(8, 6000),
    st.integers(8, 6000),
    st.sampled_from([2.0, 3.0, 4.0, 3.3]),
)
def test_strips_cover_every_row(
    height: int, width: int, out_height: int, out_width: int, scale: float
) -> None:
    strips = strips_of((height, width), (out_height, out_width), scale)
    given = np.zeros(out_height)
    for strip in strips:
        assert len(strip.rows) > 0
        given[strip.out_rows.start : strip.out_rows.stop] += 1
        assert math.prod(strip.work_size) <= LARGEST_DETOUR or len(strips) == 1
    assert given.min() >= 1
    assert given.max() <= 2
