"""Scene cuts: what is one and what is not, edit lists, and shots that come out as they would alone."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import cv2
import numpy as np
import pytest

from media import LOSSLESS, ffmpeg, make_clip, run_identity
from recavsr.errors import InputError
from recavsr.geometry import BlockPlan
from recavsr.stream.cuts import EditList
from recavsr.stream.engine import upscale
from recavsr.stream.session import Session
from recavsr.stream.step import BlockModel, IdentityModel
from recavsr.video.clips import read_clip, write_clip
from recavsr.video.frames import Stamp
from tiny import one_thread, tiny_model


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def tiny() -> BlockModel:
    return tiny_model()


LR = (36, 64)


def shot(count: int, seed: int, speed: int = 1) -> np.ndarray:
    """Return a shot: a random texture of many scales in a random colour, that moves to the left."""
    random = np.random.default_rng(seed)
    colour = random.permutation([60, 110, 170])
    texture = np.zeros((LR[0], 480, 1))
    for cell, contrast in ((12, 45), (6, 25), (3, 12)):
        grid = random.normal(0, contrast, (LR[0] // cell, 480 // cell, 1))
        texture = texture + cv2.resize(grid, (480, LR[0]), interpolation=cv2.INTER_CUBIC)[..., None]
    strip = (texture + colour).clip(0, 255).astype(np.uint8)
    return np.stack([strip[:, speed * n : speed * n + LR[1]] for n in range(count)])


def cuts(frames: np.ndarray) -> list[int]:
    """Return where a session cuts."""
    session = Session(IdentityModel(), frames.shape[1:3], (2, 2), detect_cuts=True)
    session.push(frames)
    session.flush()
    return session.cuts


# -- what is a cut -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("place", [1, 2, 5, 19, 20, 21, 22, 27, 28, 29])
def test_hard_cuts_anywhere_in_a_block(place: int, dtype: type) -> None:
    film = np.concatenate([shot(place, 1), shot(30, 2)])
    assert cuts(film if dtype is np.uint8 else film.astype(np.uint16) * 257) == [place]


def test_shots_of_a_few_frames() -> None:
    lengths = [31, 40, 3, 12, 3, 3, 20]
    film = np.concatenate([shot(length, seed) for seed, length in enumerate(lengths)])
    assert cuts(film) == [int(n) for n in np.cumsum(lengths)[:-1]]


def test_a_shot_of_three_frames_inside_another_is_no_flash() -> None:
    film = shot(40, 1)
    film[24:27] = shot(3, 2)
    assert cuts(film) == [24, 27]


def test_cards_of_one_colour() -> None:
    cards = [np.full((9, *LR, 3), colour, np.uint8) for colour in ((200, 20, 20), (20, 20, 200), (0, 0, 0))]
    assert cuts(np.concatenate([*cards, shot(9, 1)])) == [9, 18, 27]


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("white", [True, False])
def test_flashes_are_no_cuts(length: int, white: bool) -> None:
    film = shot(40, 1)
    flash = film[10 : 10 + length]
    film[10 : 10 + length] = 255 if white else (flash * 1.5 + 60.0).clip(0, 255)
    assert cuts(film) == []


def test_fades_are_no_cuts() -> None:
    share = np.linspace(0, 1, 14)[1:-1, None, None, None]
    one, other = shot(40, 1), shot(40, 2)
    cross = one[25:37] * (1 - share) + other[25:37] * share
    assert cuts(np.concatenate([one[:25], cross.astype(np.uint8), other[37:]])) == []
    brightness = np.abs(np.linspace(-1, 1, 40))[:, None, None, None]
    assert cuts((one * brightness).astype(np.uint8)) == []


def test_fast_motion_is_no_cut() -> None:
    assert cuts(shot(40, 1, speed=6)) == []


def test_a_cut_inside_fast_motion() -> None:
    assert cuts(np.concatenate([shot(25, 1, speed=6), shot(25, 2, speed=6)])) == [25]


def test_frames_and_pieces_never_matter() -> None:
    film = np.concatenate([shot(23, 1), shot(3, 2), shot(30, 3)])
    session = Session(IdentityModel(), LR, (2, 2), detect_cuts=True)
    for frame in film:
        session.push(frame[None])
    session.flush()
    assert session.cuts == cuts(film) == [23, 26]


def test_nothing_beyond_the_block_is_looked_at() -> None:
    """What a block gives depends on no later frame, also where a cut comes next."""
    one, other = shot(29, 1), shot(20, 2)
    outputs = []
    for film in (np.concatenate([one, other]), np.concatenate([one, one[:20]])):
        session = Session(IdentityModel(), LR, LR, detect_cuts=True)
        outputs.append(np.concatenate(session.push(film))[:29])
    assert np.array_equal(*outputs)


# -- a shot in a film equals that shot alone -----------------------------------------------------------


def alone(model: BlockModel, frames: np.ndarray) -> np.ndarray:
    session = Session(model, LR, LR)
    return np.concatenate([*session.push(frames), *session.flush()])


def test_every_shot_comes_out_as_it_would_alone(tiny: BlockModel) -> None:
    shots = [shot(length, seed) for seed, length in enumerate((23, 3, 8, 30, 1))]
    film = np.concatenate(shots)
    session = Session(tiny, LR, LR, detect_cuts=True)
    out = np.concatenate([*session.push(film), *session.flush()])
    assert session.cuts == [23, 26, 34, 64]
    assert np.array_equal(out, np.concatenate([alone(tiny, frames) for frames in shots]))
    assert not np.array_equal(out, alone(tiny, film))


def test_more_frames_left_after_a_cut_than_a_short_first_block_takes() -> None:
    model = tiny_model(BlockPlan(first=2))
    shots = [shot(6, 0), shot(20, 1)]  # the cut is in front of the second of a block's 8 frames
    session = Session(model, LR, LR, detect_cuts=True)
    out = np.concatenate([*session.push(np.concatenate(shots)), *session.flush()])
    assert session.cuts == [6]
    assert np.array_equal(out, np.concatenate([alone(model, frames) for frames in shots]))


def test_a_saved_session_goes_on_cutting(tiny: BlockModel, tmp_path: Path) -> None:
    film = np.concatenate([shot(33, 1), shot(30, 2)])
    whole = Session(tiny, LR, LR, detect_cuts=True)
    wanted = np.concatenate([*whole.push(film), *whole.flush()])
    for stop in (29, 31, 33):
        session = Session(tiny, LR, LR, detect_cuts=True)
        head = session.push(film[:stop])
        session.save(tmp_path / "session")
        for other in (Session.load(tmp_path / "session", tiny), session.fork()):
            out = np.concatenate([*head, *other.push(film[stop:]), *other.flush()])
            assert np.array_equal(out, wanted)
            assert other.cuts == [33]


@pytest.mark.parametrize("how", ["auto", "31\n71 # a frame number\n\n74\n", "0:01.24\n2.84\n0:00:02.96\n"])
def test_films_from_file_to_file(tiny: BlockModel, tmp_path: Path, how: str) -> None:
    shots = [shot(length, seed) for seed, length in enumerate((31, 40, 3, 10))]
    write_clip(tmp_path / "film.mp4", np.concatenate(shots), 25, crf=0)
    decoded = read_clip(tmp_path / "film.mp4")
    if how != "auto":
        (tmp_path / "cuts.txt").write_text(how)
        how = str(tmp_path / "cuts.txt")
    options = {"model": tiny, "scale": 1, **LOSSLESS}
    report = upscale(tmp_path / "film.mp4", tmp_path / "out.mkv", cuts=how, **options)
    assert report.cuts == (31, 71, 74)
    whole = read_clip(tmp_path / "out.mkv")
    for first, last in ((0, 31), (31, 71), (71, 74), (74, 84)):
        part = tmp_path / f"{first}.mkv"
        trim = f"trim=start_frame={first}:end_frame={last},setpts=PTS-STARTPTS"
        ffmpeg("-i", tmp_path / "film.mp4", "-vf", trim, "-c:v", "libx264", "-qp", 0, part)
        assert np.array_equal(read_clip(part), decoded[first:last])
        out = upscale(part, tmp_path / f"{first}_out.mkv", cuts="off", **options)
        assert out.cuts == ()
        assert np.array_equal(read_clip(tmp_path / f"{first}_out.mkv"), whole[first:last])


# -- edit lists ----------------------------------------------------------------------------------------


def starts(edit_list: EditList, rate: Fraction, count: int, shift: Fraction = Fraction(0)) -> list[int]:
    """Return which of the frames start a shot."""
    ticks = Fraction(1, 90_000)
    stamps = [Stamp(round((n / rate + shift) / ticks), round(1 / rate / ticks), ticks) for n in range(count)]
    return [number for number, stamp in enumerate(stamps) if edit_list.starts_shot(stamp, shift)]


def test_times_mean_the_nearest_frame(tmp_path: Path) -> None:
    """Times of NTSC frames are rounded to milliseconds by every tool, up or down."""
    rate, wanted = Fraction(30000, 1001), [1, 37, 38, 1000, 1799]
    for digits in (2, 3, 6):
        path = tmp_path / f"{digits}.txt"
        path.write_text("\n".join(f"{float(n / rate):.{digits}f}" for n in wanted))
        assert starts(EditList(path), rate, 1800) == wanted
        assert starts(EditList(path), rate, 1800, Fraction(-7)) == wanted


@pytest.mark.parametrize(
    ("text", "reason"),
    [("12\ntwelve\n", "line 2: 'twelve' is not a frame number"), ("00:00:01:12", "line 1"), ("-3", "line 1")],
)
def test_bad_edit_lists_are_one_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "cuts.txt"
    path.write_text(text)
    with pytest.raises(InputError, match=reason):
        EditList(path)


def test_an_edit_list_of_another_program(tmp_path: Path) -> None:
    """With a byte order mark, lines of Windows, out of order, twice, and beyond the end."""
    source, cuts = make_clip(tmp_path / "in.mp4", 60), tmp_path / "cuts.txt"
    cuts.write_bytes(b"\xef\xbb\xbf40\r\n20\r\n\r\n20\r\n0\r\n0:00.8\r\n900\r\n9:00\r\n")
    report = run_identity(source, tmp_path / "out.mp4", cuts=cuts)
    assert report.cuts == (20, 40)
    assert report.warnings == (
        f"2 of the cuts in {cuts} lie behind the last frame; is it the list of this video?",
    )
    assert run_identity(source, tmp_path / "part.mp4", cuts=cuts, frames=30).warnings == ()


def test_edit_lists_that_can_not_be_used(tmp_path: Path) -> None:
    write_clip(tmp_path / "in.mp4", shot(30, 1), 25)
    options = {"model": IdentityModel(), "scale": 1}
    with pytest.raises(InputError, match=r"nowhere can't be read .*give auto, off or a file"):
        upscale(tmp_path / "in.mp4", tmp_path / "out.mp4", cuts=tmp_path / "nowhere", **options)
    (tmp_path / "numbers").write_text("12")
    with pytest.raises(InputError, match="with a start, give times"):
        upscale(tmp_path / "in.mp4", tmp_path / "out.mp4", cuts=tmp_path / "numbers", start=0.2, **options)
    (tmp_path / "times").write_text("0.48")
    report = upscale(tmp_path / "in.mp4", tmp_path / "o.mp4", cuts=tmp_path / "times", start=0.2, **options)
    assert report.cuts == (7,)
