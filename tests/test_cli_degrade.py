"""`recavsr degrade`: records that rebuild, pairs that fit, folders, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from recavsr.cli.main import run
from recavsr.data import degrade_files
from recavsr.data.degradation import apply_degradation
from recavsr.data.degrade_files import DegradeSettings, FileRecord
from recavsr.errors import InputError
from recavsr.video.clips import read_clip, write_clip
from recavsr.video.images import encode_picture


def scene(count: int, height: int, width: int) -> np.ndarray:
    y, x = np.mgrid[:height, :width]
    frames = [
        np.stack([128 + 90 * np.sin((x + 2 * t) / 5 + k) * np.cos(y / (4 + k)) for k in range(3)], -1)
        for t in range(count)
    ]
    return np.stack(frames).clip(0, 255).round().astype(np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A video, a picture, and a subfolder of numbered pictures."""
    folder = tmp_path / "in"
    (folder / "frames").mkdir(parents=True)
    write_clip(folder / "clip.mp4", scene(6, 68, 100), 25)
    (folder / "photo.png").write_bytes(encode_picture(scene(1, 51, 70)[0], ".png"))
    for index, frame in enumerate(scene(3, 48, 64)):
        (folder / "frames" / f"{index:08d}.png").write_bytes(encode_picture(frame, ".png"))
    return folder


def pictures(folder: Path) -> dict[str, np.ndarray]:
    return {str(p.relative_to(folder)): read_clip(p)[0] for p in sorted(folder.rglob("*.png"))}


def read_all(path: Path) -> np.ndarray:
    return read_clip(path) if path.is_file() else np.stack(list(pictures(path).values()))


def test_pairs_are_what_their_records_say_and_are_made_again(folder: Path, tmp_path: Path) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    assert run(["degrade", str(folder), str(out), "--pairs", "--preset", "heavy", "--seed", "3"]) == 0
    assert sorted(p.name for p in (out / "records").iterdir()) == ["clip.json", "frames.json", "photo.json"]
    for name, count, size in (("clip", 6, (64, 96)), ("frames", 3, (48, 64)), ("photo", 1, (48, 64))):
        record = FileRecord.load(out / "records" / f"{name}.json")
        leaf = "photo.png" if count == 1 else name
        hq, lr = (read_all(out / side / leaf) for side in ("HQ", "LR"))
        assert hq.shape == (count, *size, 3)
        assert lr.shape == (count, size[0] // 4, size[1] // 4, 3)
        clip = torch.from_numpy(hq).permute(0, 3, 1, 2).float() / 255
        assert (lr == apply_degradation(clip, record.degradation).permute(0, 2, 3, 1).numpy()).all()
    words = ["degrade", str(folder), str(again), "--pairs", "--from-record", str(out / "records")]
    assert run(words) == 0
    first, second = pictures(out), pictures(again)
    assert list(first) == list(second)
    assert len(first) == 20
    assert all((first[name] == second[name]).all() for name in first)


def test_one_file_is_degraded_as_in_a_folder_and_keeps_its_rate(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "lr.mkv"
    assert run(["degrade", str(folder / "clip.mp4"), str(out), "--preset", "mild", "--scale", "2"]) == 0
    lr = read_clip(out)
    assert lr.shape == (6, 34, 50, 3)
    record = FileRecord.load(tmp_path / "lr.mkv.json")
    assert record == DegradeSettings("mild", 2).draw("clip.mp4", 6, (68, 100))
    many = tmp_path / "many"
    assert run(["degrade", str(folder), str(many), "--preset", "mild", "--scale", "2"]) == 0
    assert FileRecord.load(many / "clip.json") == record
    assert (read_clip(many / "clip.mp4").shape, read_clip(many / "photo.png").shape) == (
        (6, 34, 50, 3),
        (1, 24, 34, 3),
    )
    assert len(list((many / "frames").glob("*.png"))) == 3


def test_the_centre_is_kept(tmp_path: Path) -> None:
    picture = scene(1, 43, 61)[0]
    (tmp_path / "p.png").write_bytes(encode_picture(picture, ".png"))
    assert run(["degrade", str(tmp_path / "p.png"), str(tmp_path / "o"), "--pairs", "--scale", "4"]) == 0
    assert (read_clip(tmp_path / "o" / "HQ" / "p.png")[0] == picture[1:41, 2:58]).all()


def test_long_videos_are_done_in_pieces(folder: Path, tmp_path: Path, monkeypatch) -> None:
    clip, settings = folder / "clip.mp4", DegradeSettings("test_mild")
    whole = degrade_files.degrade_file(clip, tmp_path / "whole", settings)
    monkeypatch.setattr(degrade_files, "_PIECE_PIXELS", 0)  # the shortest piece has 8 frames
    write_clip(tmp_path / "long.mp4", scene(19, 32, 32), 25)
    steps: list[tuple[int, int]] = []
    record = degrade_files.degrade_file(
        tmp_path / "long.mp4", tmp_path / "o", settings, progress=lambda *s: steps.append(s)
    )
    assert (whole.piece, record.piece) == (6, 8)
    assert steps == [(8, 19), (16, 19), (19, 19)]
    lr = pictures(tmp_path / "o")
    assert len(lr) == 19
    hq = torch.from_numpy(read_clip(tmp_path / "long.mp4")).permute(0, 3, 1, 2).float() / 255
    part = apply_degradation(hq[8:16], record.degradation.part(8, 8)).permute(0, 2, 3, 1).numpy()
    assert (np.stack(list(lr.values()))[8:16] == part).all()


def test_sharpening_reaches_both_sides(folder: Path, tmp_path: Path) -> None:
    plain, sharp = tmp_path / "plain", tmp_path / "sharp"
    for out, weight in ((plain, "0"), (sharp, "0.5")):
        words = ["degrade", str(folder / "photo.png"), str(out), "--pairs", "--preset", "test_mild"]
        assert run([*words, "--sharpen", weight]) == 0
    for side in ("HQ", "LR"):
        a, b = (read_clip(out / side / "photo.png")[0].astype(float) for out in (plain, sharp))
        assert np.abs(np.diff(b, axis=1)).mean() > 1.02 * np.abs(np.diff(a, axis=1)).mean()


def test_a_bad_file_of_a_folder_is_named_and_the_rest_is_done(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (folder / "broken.mp4").write_bytes(b"not a video")
    out = tmp_path / "out"
    assert run(["degrade", str(folder), str(out), "--json"]) == 1
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    failed = [e for e in events if e.get("status") == "failed"]
    assert [Path(e["source"]).name for e in failed] == ["broken.mp4"]
    assert (events[-1]["event"], events[-1]["done"], events[-1]["failed"]) == ("result", 3, 1)
    assert sorted(p.name for p in out.iterdir()) == [
        *("clip.json", "clip.mp4", "frames", "frames.json", "photo.json", "photo.png")
    ]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["clip.mp4", "o.mp4", "--preset", "awful"], "choose one of clean, mild, medium, heavy"),
        (["nothing.mp4", "o.mp4"], "no such file"),
        (["nothing.mp4", "o", "--pairs"], "no such file"),
        (["clip.mp4", "o.txt"], "can't write .txt"),
        (["clip.mp4", "clip.mp4", "--overwrite"], "is the source itself"),
        (["photo.png", "o.png", "--scale", "40"], "too small to shrink by 40"),
        (["clip.mp4", "o.mp4", "--from-record", "photo.png"], "photo.png"),
        (
            ["clip.mp4", "o.mp4", "--frames", "2", "--from-record", "clip.json"],
            "has 2 frames, its record is of 6",
        ),
        (["photo.png", "o.png", "--from-record", "wide.json"], "its record is of 96x64"),
        ([".", ".", "--preset", "mild"], "is the source folder itself"),
        ([".", "o", "--from-record", "clip.json"], "names the folder of its records"),
        (["clip.mp4", "clip.json/o", "--pairs"], "clip.json"),
    ],
)
def test_refusals_are_one_line(
    folder: Path, words: list[str], reason: str, monkeypatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(folder)
    record = DegradeSettings("mild").draw("clip.mp4", 6, (68, 100))
    Path("clip.json").write_text(record.to_json())
    Path("wide.json").write_text(DegradeSettings("mild").draw("clip.mp4", 1, (68, 100)).to_json())
    before = sorted(folder.iterdir())
    assert run(["degrade", *words]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1
    assert reason in err[0]
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("record", ["in/clip.mp4", "out.mp4"])
def test_a_record_takes_the_place_of_nothing(folder: Path, record: str, monkeypatch, capsys) -> None:
    monkeypatch.chdir(folder.parent)
    before = (folder / "clip.mp4").read_bytes()
    assert run(["degrade", "in/clip.mp4", "out.mp4", "--record", record, "--overwrite"]) == 2
    assert f"{record}: is a source or an output" in capsys.readouterr().err
    assert (folder / "clip.mp4").read_bytes() == before


def test_records_of_files_are_json_and_checked() -> None:
    record = DegradeSettings("heavy", 3, seed=5, sharpen=0.5).draw("a.mp4", 7, (100, 120))
    assert record.size == (96, 120)
    assert FileRecord.from_json(record.to_json()) == record
    for text in ("{}", "[1]", "no", '{"size": [2, 2], "degradation": {"stages": []}}'):
        with pytest.raises(InputError, match="not a record"):
            FileRecord.from_json(text)


def test_names_that_clash_are_refused(folder: Path) -> None:
    (folder / "clip.png").write_bytes(b"x")
    with pytest.raises(InputError, match="another source is called clip"):
        degrade_files.sources_in(folder)
