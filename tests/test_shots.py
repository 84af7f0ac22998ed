"""Runs of shots: made apart and joined they are the file that one run makes, byte for byte."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError

from media import ffmpeg, packets, times
from recavsr.errors import InputError
from recavsr.stream import pipeline
from recavsr.stream.engine import Options, upscale
from recavsr.stream.resume import work_folder
from recavsr.stream.session import Session
from recavsr.stream.shots import Shots, find_shots, join_shots, make_shots, share_out
from recavsr.stream.step import BlockModel, IdentityModel
from recavsr.video.clips import read_clip, write_clip
from tiny import one_thread, tiny_model


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def frequent_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MARK_FRAMES", 24)


@pytest.fixture(scope="module")
def tiny() -> BlockModel:
    return tiny_model()


STARTS = (0, 33, 41, 90, 98)
FRAMES = 128


def pictures() -> np.ndarray:
    """Return 128 frames in five shots, one of them shorter than a block, with something that moves."""
    rng = np.random.default_rng(5)
    frames = np.empty((FRAMES, 32, 48, 3), np.uint8)
    for first, last in zip(STARTS, (*STARTS[1:], FRAMES)):
        frames[first:last] = np.kron(rng.integers(0, 256, (16, 24, 3)), np.ones((2, 2, 1)))
        for index in range(first, last):
            frames[index, 8:16, (index - first) % 40 : (index - first) % 40 + 8] = 255
    return frames


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("film") / "film.mkv"
    write_clip(path.with_suffix(".mp4"), pictures(), 25)
    ffmpeg("-i", path.with_suffix(".mp4"), "-f", "lavfi", "-i", "sine=r=8000:d=5.1",
           "-c:v", "copy", "-c:a", "libopus", path)  # fmt: skip
    return path


SETTINGS: dict[str, Any] = {"scale": 2, "color_fix": "adain", "preset": "ultrafast"}


def in_pieces(film: Path, output: Path, model: BlockModel, pieces: int, options: Options) -> Shots:
    """Make a film in so many pieces, the last one first."""
    where = {"source": str(film), "output": str(output), "model": model, "options": options}
    shots = find_shots(**where, pieces=pieces)
    for number in reversed(range(len(shots.runs))):
        make_shots(**where, shots=shots, number=number)
    report = join_shots(**where, shots=shots)
    assert (report.frames, report.cuts) == (shots.frames, shots.starts[1:])
    return shots


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("out.mp4", {}),
        ("out.mkv", {"cuts": "list"}),
        ("out.mp4", {"codec": "hevc", "start": 0.4, "duration": 4.2}),
        ("out.mkv", {"codec": "ffv1", "preset": None}),
        ("out.webm", {"codec": "vp9", "preset": None}),
        ("out.mp4", {"codec": "av1", "preset": None}),
    ],
)
def test_the_same_file_in_one_piece_and_in_several(
    tiny: BlockModel, film: Path, tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    if changes.get("cuts") == "list":
        (tmp_path / "cuts.txt").write_text("10\n33\n0:03.6")
        changes = changes | {"cuts": tmp_path / "cuts.txt"}
    settings = SETTINGS | changes
    whole, out = tmp_path / f"whole{Path(name).suffix}", tmp_path / name
    report = upscale(film, whole, model=tiny, **settings)
    shots = in_pieces(film, out, tiny, 3, Options(**settings))
    assert shots.starts[1:] == report.cuts
    assert shots.frames == report.frames
    assert len(shots.runs) >= 2
    assert np.array_equal(read_clip(out), read_clip(whole))
    assert times(out) == times(whole)
    assert all(packets(out, stream) == packets(whole, stream) for stream in (0, 1))
    if name != "out.webm" and not name.endswith(".mkv"):  # Matroska files have a random identifier each
        assert out.read_bytes() == whole.read_bytes()
    assert not work_folder(out).exists()


def test_cuts_are_found_where_they_are(film: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.mp4"
    shots = find_shots(str(film), str(out), model=IdentityModel(), options=Options(scale=1), pieces=2)
    assert shots == Shots(FRAMES, STARTS, ((0, 90), (90, 128)))
    assert json.loads((work_folder(out) / "shots.json").read_text())["shots"]["frames"] == FRAMES
    one = find_shots(str(film), str(tmp_path / "o.mp4"), model=IdentityModel(), options=Options(), pieces=1)
    assert one.runs == ((0, FRAMES),)
    assert not work_folder(tmp_path / "o.mp4").exists()


def test_a_shot_in_a_film_is_encoded_as_it_would_be_alone(film: Path, tmp_path: Path) -> None:
    whole, alone = tmp_path / "whole.mp4", tmp_path / "alone.mp4"
    options: dict[str, Any] = {"model": IdentityModel(), "scale": 1}
    upscale(film, whole, **options)
    upscale(film, alone, start=41 / 25, frames=90 - 41, **options)
    data = [checksum for *_, checksum in packets(whole, 0)]
    assert data[41:90] == [checksum for *_, checksum in packets(alone, 0)]


@pytest.mark.parametrize("full_at", ["packets", "state"])
def test_a_disk_that_gets_full_at_the_end_costs_no_shots(
    film: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_at: str
) -> None:
    out = tmp_path / "out.mp4"
    where: dict[str, Any] = {"source": str(film), "output": str(out), "model": IdentityModel()}
    where["options"] = Options(scale=1)
    shots = find_shots(**where, pieces=3)
    for number in range(len(shots.runs)):
        make_shots(**where, shots=shots, number=number)
    made = sorted(path.name for path in work_folder(out).iterdir())

    def full(*_: object) -> None:
        if full_at == "packets":
            raise OSError(errno.ENOSPC, "No space left on device")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patched:
        patched.setattr(*(shutil, "copyfileobj") if full_at == "packets" else (Session, "save"), full)
        with pytest.raises(InputError, match=r"can't be written \(.*(full|No space)"):
            join_shots(**where, shots=shots)
    assert sorted(path.name for path in work_folder(out).iterdir()) == made
    join_shots(**where, shots=shots)
    assert len(times(out)) == FRAMES


def test_runs_are_whole_shots_of_about_one_length() -> None:
    starts = tuple(range(0, 1000, 50))
    assert share_out(starts, 1000, 4) == ((0, 250), (250, 500), (500, 750), (750, 1000))
    assert share_out((0,), 7, 4) == ((0, 7),)
    assert share_out((0, 5), 1000, 4) == ((0, 1000),)
    assert share_out((0, 600, 610), 1000, 2) == ((0, 600), (600, 1000))
    assert share_out((0, 990), 1000, 8) == ((0, 990), (990, 1000))


def test_what_was_begun_is_taken_up_or_refused(film: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "out.mp4", Options(scale=2)
    where: dict[str, Any] = {"source": str(film), "output": str(out), "model": IdentityModel()}
    shots = find_shots(**where, options=options, pieces=3)
    make_shots(**where, options=options, shots=shots, number=1)
    (log,) = work_folder(out).glob("shots-*[0-9]")
    made = log.stat().st_mtime_ns
    frames = shots.runs[1][1] - shots.runs[1][0]
    with pytest.raises(InputError, match=f"run of {frames} frames is kept; continue it with --resume"):
        find_shots(**where, options=options, pieces=3)
    with pytest.raises(InputError, match="seed was 42 and is now 7"):
        find_shots(**where, options=Options(scale=2, seed=7), pieces=3, resume=True)
    with pytest.raises(InputError, match="of recavsr batch is kept; continue it with that command"):
        upscale(film, out, model=IdentityModel(), scale=2, resume=True)
    assert find_shots(**where, options=options, pieces=9, resume=True) == shots
    for number in range(len(shots.runs)):
        make_shots(**where, options=options, shots=shots, number=number)
    assert log.stat().st_mtime_ns == made
    join_shots(**where, options=options, shots=shots)
    assert len(times(out)) == FRAMES
    find_shots(**where, options=options, pieces=3)
    upscale(film, out, model=IdentityModel(), scale=2, overwrite=True)
    assert not work_folder(out).exists()
