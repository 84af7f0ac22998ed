"""Sessions: one stream in any pieces, forked, saved, reset; frames in, as many frames out."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from recavsr import attention, geometry, rope
from recavsr.errors import InputError
from recavsr.geometry import BlockPlan
from recavsr.stream import blocks
from recavsr.stream.blocks import made_smaller, prepare_lr_frames, to_picture
from recavsr.stream.load import load
from recavsr.stream.session import Session
from recavsr.stream.step import BlockModel, IdentityModel, block_noise
from tiny import one_thread, tiny_model


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


LR = (12, 18)
OUT = (23, 35)  # padded to 24 x 40 in the tiny model
COUNTS = [1, 2, 4, 5, 8, 20, 21, 22, 24, 25, 29, 30]


def frames(count: int, seed: int = 0, dtype: type = np.uint8, size: tuple[int, int] = LR) -> np.ndarray:
    high = np.iinfo(dtype).max
    return np.random.default_rng(seed).integers(0, high, (count, *size, 3), dtype=dtype, endpoint=True)


CLIP = frames(30, seed=1)


def run(session: Session, lr: np.ndarray, sizes: list[int] | None = None) -> np.ndarray:
    """Push a clip in pieces (whole by default), end it, return all frames."""
    cuts = np.cumsum(sizes or [len(lr)])[:-1]
    done = [block for piece in np.split(lr, cuts) for block in session.push(piece)]
    return np.concatenate([*done, *session.flush()])


@pytest.fixture(scope="module")
def tiny() -> BlockModel:
    return tiny_model()


@pytest.fixture(params=["identity", "tiny"])
def model(request: pytest.FixtureRequest, tiny: BlockModel) -> BlockModel:
    return IdentityModel() if request.param == "identity" else tiny


@pytest.mark.parametrize("count", COUNTS)
def test_as_many_frames_out_as_in(model: BlockModel, count: int) -> None:
    lr = frames(count)
    out = run(Session(model, LR, OUT), lr)
    assert out.shape == (count, *OUT, 3)
    assert out.dtype == np.uint8


def test_a_short_last_block_changes_nothing_before_it(model: BlockModel) -> None:
    short, long = (run(Session(model, LR, OUT), clip) for clip in (CLIP, np.concatenate([CLIP, CLIP])))
    assert np.array_equal(short[:29], long[:29])


@pytest.mark.parametrize(
    ("block", "wanted", "made"), [(0, 1, 1), (0, 2, 5), (0, 20, 21), (1, 3, 4), (1, 5, 8)]
)
def test_the_end_of_a_stream_decodes_no_more_than_is_wanted(
    tiny: BlockModel, block: int, wanted: int, made: int
) -> None:
    lr = torch.rand(1, 3, 29, 24, 40) * 2 - 1
    pieces, state = lr.split([21, 8], dim=2), tiny.start(24, 40)
    for piece in pieces[:block]:
        state, _ = tiny.step(state, piece)
    _, whole = tiny.step(state, pieces[block])
    _, part = tiny.step(state, pieces[block], wanted)
    assert part.shape[2] == made
    torch.testing.assert_close(part, whole[:, :, :made], atol=1e-5, rtol=1e-5)


def test_blocks_come_as_soon_as_they_are_complete(model: BlockModel) -> None:
    session = Session(model, LR, OUT)
    assert session.push(frames(20)) == []
    assert session.frames_wanted == 1
    assert [len(block) for block in session.push(frames(18))] == [21, 8, 8]
    assert session.frames_wanted == 7
    assert [len(block) for block in session.flush()] == [1]
    assert session.frames_wanted == 21


def test_an_empty_stream_gives_nothing(model: BlockModel) -> None:
    session = Session(model, LR, OUT)
    assert session.push(frames(0)) == []
    assert session.flush() == []


@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, 30), max_size=8))
def test_pieces_never_matter(model: BlockModel, cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), 30]
    sizes = [b - a for a, b in itertools.pairwise(edges)]
    assert np.array_equal(run(Session(model, LR, OUT), CLIP, sizes), run(Session(model, LR, OUT), CLIP))


def test_frame_by_frame_equals_the_whole(model: BlockModel) -> None:
    assert np.array_equal(run(Session(model, LR, OUT), CLIP, [1] * 30), run(Session(model, LR, OUT), CLIP))


def test_the_callers_buffer_may_be_used_again(model: BlockModel) -> None:
    """A decoder that fills one buffer over and over must not change frames that wait for their block."""
    session, buffer, done = Session(model, LR, OUT), np.empty((1, *LR, 3), np.uint8), []
    for frame in CLIP:
        buffer[0] = frame
        done += session.push(buffer)
    out = np.concatenate([*done, *session.flush()])
    assert np.array_equal(out, run(Session(model, LR, OUT), CLIP))


@pytest.mark.parametrize("edge", [21, 29])
def test_output_depends_on_no_frame_beyond_its_block(model: BlockModel, edge: int) -> None:
    other = CLIP.copy()
    other[edge:] = 255 - other[edge:]
    a, b = run(Session(model, LR, OUT), CLIP), run(Session(model, LR, OUT), other)
    assert np.array_equal(a[:edge], b[:edge])
    assert not np.array_equal(a[edge:], b[edge:])


def test_the_past_matters(tiny: BlockModel) -> None:
    other = CLIP.copy()
    other[:21] = 255 - other[:21]
    a, b = run(Session(tiny, LR, OUT), CLIP), run(Session(tiny, LR, OUT), other)
    assert not np.array_equal(a[21:], b[21:])


def test_interleaved_sessions_do_not_meet(model: BlockModel) -> None:
    clips = [frames(30, seed=s) for s in (2, 3)]
    alone = [run(Session(model, LR, OUT, seed=s), clip) for s, clip in enumerate(clips)]
    sessions = [Session(model, LR, OUT, seed=s) for s in range(2)]
    done: list[list[np.ndarray]] = [[], []]
    for start in range(0, 30, 7):
        for i in range(2):
            done[i] += sessions[i].push(clips[i][start : start + 7])
    for i in range(2):
        assert np.array_equal(np.concatenate([*done[i], *sessions[i].flush()]), alone[i])


def test_forks_go_separate_ways(model: BlockModel) -> None:
    whole = run(Session(model, LR, OUT), CLIP)
    session = Session(model, LR, OUT)
    head = np.concatenate(session.push(CLIP[:24]))
    fork = session.fork()
    other = CLIP[24:] ^ 255
    different = np.concatenate([*fork.push(other), *fork.flush()])
    same = np.concatenate([*session.push(CLIP[24:]), *session.flush()])
    assert np.array_equal(np.concatenate([head, same]), whole)
    assert np.array_equal(
        np.concatenate([head, different]), run(Session(model, LR, OUT), np.concatenate([CLIP[:24], other]))
    )


def test_reset_and_flush_start_afresh(model: BlockModel) -> None:
    session, whole = Session(model, LR, OUT), run(Session(model, LR, OUT), CLIP)
    session.push(frames(25, seed=9))
    session.reset()
    assert np.array_equal(run(session, CLIP), whole)
    assert np.array_equal(run(session, CLIP), whole)  # flush ended the stream


def test_seed_and_shot_choose_the_noise(tiny: BlockModel) -> None:
    def first(**options: int) -> np.ndarray:
        return Session(tiny, LR, OUT, **options).push(CLIP[:21])[0]

    assert np.array_equal(first(seed=1, shot=2), first(seed=1, shot=2))
    assert not np.array_equal(first(seed=1), first(seed=2))
    assert not np.array_equal(first(shot=0), first(shot=1))
    session = Session(tiny, LR, OUT)
    session.push(CLIP[:21])
    session.reset(shot=1)
    assert np.array_equal(session.push(CLIP[:21])[0], first(shot=1))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("stop", [0, 5, 21, 26])
def test_a_saved_session_goes_on_bit_for_bit(
    model: BlockModel, tmp_path: Path, stop: int, dtype: type
) -> None:
    clip = frames(30, seed=4, dtype=dtype)
    options = {"seed": 7, "shot": 3, "color_fix": "wavelet"}
    whole = run(Session(model, LR, OUT, **options), clip)
    session = Session(model, LR, OUT, **options)
    head = session.push(clip[:stop])
    session.save(tmp_path / "session")
    loaded = Session.load(tmp_path / "session", model)
    assert (loaded.lr_size, loaded.out_size, loaded.color_fix) == (LR, OUT, "wavelet")
    assert np.array_equal(np.concatenate([*head, *loaded.push(clip[stop:]), *loaded.flush()]), whole)


def test_small_outputs_go_by_way_of_the_native_scale(tmp_path: Path) -> None:
    model = tiny_model()
    half, full = (2 * LR[0] - 1, 2 * LR[1] + 1), (4 * LR[0], 4 * LR[1])
    direct = run(Session(model, LR, half), CLIP)  # the model says nothing of a scale
    model.native_scale = 4.0
    session = Session(model, LR, half)
    assert (session.out_size, session.work_size) == (half, full)
    made = run(session, CLIP, sizes=[3, 19, 8])
    large = torch.from_numpy(run(Session(model, LR, full), CLIP)).permute(3, 0, 1, 2)[None]
    smaller = to_picture(made_smaller(large / 127.5 - 1, half), half, np.dtype(np.uint8))
    difference = np.abs(made.astype(int) - smaller.astype(int))
    assert difference.mean() < 0.5  # the large ones were rounded first
    assert difference.max() <= 4
    assert np.array_equal(run(Session(model, LR, half, direct=True), CLIP), direct)
    assert np.abs(made.astype(int) - direct.astype(int)).mean() > 4 * difference.mean()
    for direct_too in (False, True):
        session = Session(model, LR, half, direct=direct_too)
        session.push(CLIP[:25])
        session.save(tmp_path / "session")
        others = Session.load(tmp_path / "session", model), session.fork()
        assert [other.work_size for other in others] == [half if direct_too else full] * 2


@pytest.mark.parametrize("color_fix", ["none", "wavelet", "adain"])
def test_large_outputs_are_made_in_strips(
    color_fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is a stream of its own, and they pass into each other."""
    monkeypatch.setattr(geometry, "STRIP_OVERLAP", 4)
    monkeypatch.setattr(geometry, "LARGEST_DETOUR", (16 * 4 + 1) * LR[1] * 4)
    model, height = tiny_model(), 40
    model.native_scale = 4.0
    clip = frames(30, seed=6, size=(height, LR[1]))
    lr, out = clip.shape[1:3], (2 * height, 2 * LR[1])
    session = Session(model, lr, out, color_fix=color_fix)
    assert len(session.strips) == 3
    made = run(session, clip, sizes=[3, 19, 8])
    assert made.shape == (30, *out, 3)
    for before, strip, after in zip((None, *session.strips), session.strips, (*session.strips[1:], None)):
        rows = strip.rows
        part = clip[:, rows.start : rows.stop]
        alone = run(Session(model, part.shape[1:3], (2 * len(rows), out[1]), color_fix=color_fix), part)
        first = 0 if before is None else before.out_rows.stop - strip.out_rows.start
        last = len(strip.out_rows) - (0 if after is None else strip.out_rows.stop - after.out_rows.start)
        place = made[:, strip.out_rows.start + first : strip.out_rows.start + last]
        assert np.array_equal(place, alone[:, first:last])
    session = Session(model, lr, out, color_fix=color_fix)
    head = session.push(clip[:25])
    session.save(tmp_path / "session")
    for other in (Session.load(tmp_path / "session", model), session.fork()):
        assert np.array_equal(np.concatenate([*head, *other.push(clip[25:]), *other.flush()]), made)


def test_strips_of_an_unchanged_picture_are_the_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "LARGEST_DETOUR", 100 * 4 * 18 * 4)
    model = IdentityModel()
    model.native_scale = 4.0
    smooth = np.linspace(0, 255, 300)[None, :, None, None].repeat(18, 2).repeat(3, 3)
    clip = smooth.round().astype(np.uint8).repeat(9, 0)
    session = Session(model, (300, 18), (600, 36))
    assert len(session.strips) > 2
    seen = run(session, clip).astype(int)
    whole = run(Session(model, (300, 18), (600, 36), direct=True), clip).astype(int)
    assert np.abs(seen - whole).max() <= 1


def test_a_session_in_other_strips_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, lr, out = tiny_model(), (40, LR[1]), (80, 2 * LR[1])
    model.native_scale = 4.0
    Session(model, lr, out).save(tmp_path / "session")
    monkeypatch.setattr(geometry, "STRIP_OVERLAP", 4)
    monkeypatch.setattr(geometry, "LARGEST_DETOUR", (16 * 4 + 1) * LR[1] * 4)
    with pytest.raises(InputError, match="another version"):
        Session.load(tmp_path / "session", model)


def test_a_session_of_another_model_is_refused(tiny: BlockModel, tmp_path: Path) -> None:
    Session(tiny, LR, OUT).save(tmp_path / "session")
    with pytest.raises(InputError, match="'tiny', not 'identity'"):
        Session.load(tmp_path / "session", IdentityModel())


def test_sixteen_bits_stay_sixteen_bits() -> None:
    clip = frames(21, dtype=np.uint16)
    out = run(Session(IdentityModel(), LR, LR), clip)
    assert out.dtype == np.uint16
    # float32 in [-1, 1] holds 16 bits to half a level
    assert np.abs(out.astype(int) - clip.astype(int)).max() <= 1
    assert (out % 256 != 0).any()


def test_eight_bits_are_kept_exactly() -> None:
    clip = np.arange(256, dtype=np.uint8)[None, :, None, None].repeat(3, axis=3).repeat(4, axis=2)
    assert np.array_equal(run(Session(IdentityModel(), (256, 4), (256, 4)), clip), clip)


def test_other_frames_are_refused() -> None:
    session = Session(IdentityModel(), LR, OUT)
    session.push(frames(2))
    with pytest.raises(InputError, match="holds uint8 frames, got uint16"):
        session.push(frames(2, dtype=np.uint16))
    for wrong in (np.zeros((1, 12, 17, 3), np.uint8), np.zeros((12, 18, 3), np.uint8)):
        with pytest.raises(InputError, match=r"frames must be \[N, 12, 18, 3\]"):
            session.push(wrong)
    assert len(np.concatenate(session.flush())) == 2  # what was refused left no trace
    for dtype in (np.float32, np.int16, ">u2"):
        with pytest.raises(InputError, match="frames must be uint8 or uint16"):
            session.push(frames(2).astype(dtype))
    with pytest.raises(InputError, match="frames must be uint8 or uint16"):
        session.push(torch.zeros(2, *LR, 3, dtype=torch.uint8))  # type: ignore[arg-type]
    assert session.flush() == []


@pytest.mark.parametrize("color_fix", ["none", "wavelet"])
def test_the_callers_autocast_changes_nothing(
    tiny: BlockModel, color_fix: Literal["none", "wavelet"]
) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        made = run(Session(tiny, LR, OUT, color_fix=color_fix), CLIP)
    assert np.array_equal(made, run(Session(tiny, LR, OUT, color_fix=color_fix), CLIP))


@contextmanager
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("color_fix", ["none", "wavelet"])
@pytest.mark.parametrize("default", [double_precision, partial(torch.device, "meta")], ids=["double", "meta"])
def test_the_processs_defaults_change_nothing(
    default: Callable[[], AbstractContextManager], color_fix: Literal["none", "wavelet"]
) -> None:
    """A host program may have set another default type, or another default device."""

    def streamed(size: tuple[int, int]) -> np.ndarray:
        rope._first_turns.cache_clear()
        attention._plan_window.cache_clear()
        blocks._lanczos.cache_clear()
        model = load("nano", device="cpu", precision="fp32", first_block_latents=1)
        return run(Session(model, LR, size, color_fix=color_fix, detect_cuts=True), CLIP[:6])

    sizes = (300, 400), (30, 40)  # the smaller one by way of x4
    with default():
        made = [streamed(size) for size in sizes]
    for size, before in zip(sizes, made):
        assert np.array_equal(before, streamed(size))


@pytest.mark.parametrize(("lr", "out"), [((0, 4), (4, 4)), ((4, 4), (4, 0))])
def test_impossible_sizes_are_refused(lr: tuple[int, int], out: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="positive"):
        Session(IdentityModel(), lr, out)


def test_color_fixes(tiny: BlockModel) -> None:
    """Both bring the mean colour of the LR frames back; the default leaves the model's own."""
    lr = frames(21, seed=5)
    wanted = run(Session(IdentityModel(), LR, OUT), lr).mean((1, 2))
    errors = {
        fix: np.abs(run(Session(tiny, LR, OUT, color_fix=fix), lr).mean((1, 2)) - wanted).max()
        for fix in ("none", "adain", "wavelet")
    }
    assert errors["adain"] < errors["none"] / 2
    assert errors["wavelet"] < errors["none"] / 2
    with pytest.raises(InputError, match="choose none, adain, wavelet"):
        Session(tiny, LR, OUT, color_fix="sepia")  # type: ignore[arg-type]


def test_pictures_round_half_to_even_and_clamp() -> None:
    levels = torch.arange(255) + 0.5
    values = (levels.double() / 127.5 - 1).float()
    exact = (values + 1) * 127.5 == levels  # only those that float32 holds exactly are halves
    assert (levels[exact] % 2 < 1).any()  # some that go down,
    assert (levels[exact] % 2 > 1).any()  # and some that go up
    x = torch.cat([values[exact], torch.tensor([-3.0, 3.0])])
    out = to_picture(x.view(1, 1, 1, 1, -1).expand(1, 3, 1, 1, -1), (1, len(x)), np.dtype(np.uint8))
    assert out[0, 0, :, 0].tolist() == [int(np.rint(v)) for v in levels[exact].tolist()] + [0, 255]


@pytest.mark.parametrize(("pad_to", "mode"), [(8, "reflect"), (64, "edge")])
def test_padding_is_a_reflection_where_it_can_be(pad_to: int, mode: str) -> None:
    lr = frames(1)
    x = prepare_lr_frames(lr, LR, pad_to)
    pads = [(0, -side % pad_to) for side in LR]
    wanted = np.pad(lr[0], [*pads, (0, 0)], mode=mode)
    ours = ((x[0, :, 0] + 1) * 127.5).round().permute(1, 2, 0).numpy()
    assert np.array_equal(ours, wanted)


def test_noise_is_a_pure_function() -> None:
    shape = (1, 6, 2, 3, 4)
    noise = block_noise(shape, seed=42, shot=0, block=3)
    torch.manual_seed(1)
    assert torch.equal(noise, block_noise(shape, 42, 0, 3))
    before = torch.random.get_rng_state()
    block_noise(shape, 42, 0, 3)
    assert torch.equal(before, torch.random.get_rng_state())
    others = [
        block_noise(shape, *key) for key in ((43, 0, 3), (42, 1, 3), (42, 0, 4), (0, 42, 3), (3, 0, 42))
    ]
    assert not any(torch.equal(noise, other) for other in others)
    big = block_noise((1, 48, 6, 20, 20), 42, 0, 0)
    assert abs(big.mean()) < 0.01
    assert abs(big.std() - 1) < 0.01


@pytest.mark.parametrize("first", [1, 2])
def test_a_short_first_block_answers_sooner(first: int) -> None:
    model = tiny_model(BlockPlan(first))
    session = Session(model, LR, OUT)
    assert session.frames_wanted == 4 * first - 3
    assert [len(block) for block in session.push(CLIP)][:3] == [4 * first - 3, 8, 8]
    assert len(run(Session(model, LR, OUT), CLIP)) == 30
    assert np.array_equal(
        run(Session(model, LR, OUT), CLIP, [4] * 7 + [2]), run(Session(model, LR, OUT), CLIP)
    )


def test_nano_streams_like_the_others() -> None:
    """The packaged model, from 48 x 32 to 96 x 64 pixels."""
    model = load("nano", device="cpu", precision="fp32")
    lr = np.random.default_rng(6).integers(0, 256, (24, 32, 48, 3), dtype=np.uint8)
    whole = run(Session(model, (32, 48), (64, 96)), lr)
    assert whole.shape == (24, 64, 96, 3)
    assert np.array_equal(run(Session(model, (32, 48), (64, 96)), lr, [5, 16, 1, 2]), whole)


def test_what_is_no_model_or_no_array_is_refused() -> None:
    with pytest.raises(InputError, match=r"takes a loaded model: recavsr\.load\('nano'\)"):
        Session("nano", (8, 8), (16, 16))  # type: ignore[arg-type]
    session = Session(IdentityModel(), (8, 8), (16, 16))
    with pytest.raises(InputError, match="uint8 or uint16"):
        session.push([1, 2])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="at least 1 latent"):
        load("identity", first_block_latents=0)
