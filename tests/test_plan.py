"""The plan of a dry run: everything that is kept, changed and left out, what it will take, and refusals."""

from __future__ import annotations

import itertools
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from media import ffmpeg, make_clip
from recavsr.cli.main import run
from recavsr.errors import InputError
from recavsr.stream import estimate
from recavsr.stream.engine import upscale
from recavsr.stream.resume import work_folder
from recavsr.stream.step import IdentityModel


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a film with sound, subtitles, an attachment, chapters and tags."""
    folder = tmp_path_factory.mktemp("film")
    (folder / "words.srt").write_text("1\n00:00:00,100 --> 00:00:00,900\nhello\n")
    (folder / "font.ttf").write_bytes(b"not really a font" * 20)
    (folder / "chapters.txt").write_text(
        ";FFMETADATA1\ntitle=the film\nartist=we\n[CHAPTER]\nTIMEBASE=1/1000\nSTART=0\nEND=900\ntitle=one\n"
    )
    path = folder / "film.mkv"
    ffmpeg("-f", "lavfi", "-i", "testsrc2=s=96x54:r=25:d=2", "-f", "lavfi", "-i", "sine=f=440:d=2",
           "-i", folder / "words.srt", "-i", folder / "chapters.txt", "-map", 0, "-map", 1, "-map", 2,
           "-map_metadata", 3, "-map_chapters", 3, "-attach", folder / "font.ttf",
           "-metadata:s:t", "mimetype=application/x-truetype-font", "-c:v", "libx264",
           "-pix_fmt", "yuv422p10le", "-c:a", "aac", "-b:a", "64k", "-c:s", "subrip", path)  # fmt: skip
    return path


def planned(capsys: pytest.CaptureFixture, *arguments: object) -> dict[str, Any]:
    """Return the JSON object of a dry run: the only line."""
    assert run(["upscale", *map(str, arguments), "--dry-run", "--json"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return json.loads(line)


def test_the_plan_names_everything(film: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    plan = planned(capsys, film, "-o", tmp_path / "out.mp4", "--model", "identity", "--codec", "av1")
    assert plan["event"] == "plan"
    assert (plan["input_size"], plan["output_size"], plan["frames"]) == ([54, 96], [216, 384], 50)
    assert (plan["codec"], plan["encoder"], plan["pixel_format"]) == ("av1", "libsvtav1", "yuv420p10le")
    assert plan["quality"] == "quality 17 (crf 24)"
    assert plan["copied"] == ["audio 1 (aac)"]
    assert plan["converted"] == ["subtitle 2 (srt)"]
    assert plan["kept"] == ["1 chapters", "tags (ARTIST, title)"]
    assert plan["changed"] == ["chroma 4:2:2 becomes 4:2:0"]
    assert plan["left_out"] == [".mp4 can't hold attachment 3 (unknown), it is left out; .mkv can"]
    assert plan["color"]["chroma_siting"] == "left"
    assert set(plan["estimate"]["how"]) == {"size", "time", "memory"}
    assert list(tmp_path.iterdir()) == []


def test_the_plan_in_words(film: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["upscale", str(film), "-o", str(tmp_path / "out.y4m"), "--model", "identity", "--dry-run"]
    assert run(arguments) == 0
    lines = capsys.readouterr().err.splitlines()
    assert "96x54 -> 384x216, 50 frames at 25 a second" in lines
    assert "note: .y4m can't hold chapters, they are left out; .mkv can" in lines
    assert any(line.startswith("note: .y4m can't hold audio 1") for line in lines)
    assert any(line.startswith("size: about ") and "exact but for headers" in line for line in lines)
    assert any(line.startswith("time: about ") and "estimate" in line for line in lines)
    assert any(line.startswith("memory: about ") and "estimate" in line for line in lines)


def test_turned_and_trimmed_sources_are_said(tmp_path: Path) -> None:
    source, turned = make_clip(tmp_path / "in.mp4", 20), tmp_path / "turned.mp4"
    ffmpeg("-i", source, "-c", "copy", "-metadata:s:v:0", "rotate=90", turned)
    report = upscale(turned, tmp_path / "out.mp4", model=IdentityModel(), start=0.2, dry_run=True)
    assert report.plan.changes[0].startswith("the pixels are turned by ")
    assert report.plan.changes[1] == "only a part is taken; it starts at 0"


def test_an_estimate_is_near_the_run(film: Path, tmp_path: Path) -> None:
    for name, limits in (("out.y4m", (0.99, 1.01)), ("out.mkv", (0.1, 10.0))):
        options: dict[str, Any] = {"model": IdentityModel(), "scale": 2}
        guess = upscale(film, tmp_path / name, dry_run=True, **options).estimate
        upscale(film, tmp_path / name, **options)
        assert guess is not None
        assert guess.output_bytes is not None
        assert limits[0] < guess.output_bytes / (tmp_path / name).stat().st_size < limits[1]
        assert guess.seconds is not None
        assert 0 < guess.seconds < 60


def test_memory_grows_with_the_size(film: Path, tmp_path: Path) -> None:
    needs = []
    for height in (216, 1080):
        report = upscale(film, tmp_path / "out.mp4", model="nano", height=height, dry_run=True, device="cpu")
        assert report.estimate is not None
        assert report.estimate.device_memory_bytes is None
        needs.append(report.estimate.main_memory_bytes)
    assert 3 * 10**8 < needs[0] < 7 * 10**8  # a run took 464 MB
    assert 2.5 < needs[1] / needs[0] < 25


def test_a_budget_is_held_against_the_output(film: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": "nano", "device": "cpu", "memory": "2GB", "dry_run": True}
    assert upscale(film, tmp_path / "out.mp4", height=216, **options).estimate is not None
    with pytest.raises(InputError, match="too little"):
        upscale(film, tmp_path / "out.mp4", height=1080, **options)


def test_a_way_by_the_native_scale_is_said_and_counted(
    film: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(perf_counter=partial(next, itertools.count()))  # every trial block takes a second
    monkeypatch.setattr(estimate, "time", clock)
    arguments: tuple[object, ...] = (film, "-o", tmp_path / "out.mp4", "--device", "cpu", "--scale")
    full, half, direct = (
        planned(capsys, *arguments, *more)["estimate"] for more in ("4", "2", ("2", "--direct"))
    )
    assert [guess["work_size"] for guess in (full, half, direct)] == [[216, 384], [216, 384], [108, 192]]
    assert direct["main_memory_bytes"] < half["main_memory_bytes"] <= full["main_memory_bytes"]
    assert direct["seconds"] < half["seconds"]
    assert run(["upscale", *map(str, arguments), "2", "--dry-run"]) == 0
    assert "note: frames are made at 384x216, the model's own scale" in capsys.readouterr().err
    detour = estimate.detour
    assert detour((720, 1280), (1440, 2560), 4.0, direct=True) is None
    assert detour((720, 1280), (2880, 5120), 4.0, direct=False) is None
    said = detour((720, 1280), (1440, 2560), 4.0, direct=False)
    assert said is not None
    assert "made at 5120x2880, the model's own scale, in 4 strips" in said
    said = detour((721, 1280), (1440, 2560), 4.0, direct=False)
    assert said is not None
    assert "would be 5120x2884, too large" in said


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--model", "no such model"], "is unknown"),
        (["--device", "tpu"], "unknown"),
        (["--precision", "int3"], "precision"),
        (["--memory", "1MB"], "too little"),
        (["--quality", "52"], "0 (best) to 51"),
        (["--encoder", "magic"], "software or hardware"),
        (["--cuts", "no_such_file"], "no_such_file"),
        (["--codec", "ffv1"], "does not go into .mp4"),
    ],
)
def test_what_would_be_refused_is_refused(
    film: Path, tmp_path: Path, capsys: pytest.CaptureFixture, options: list[str], reason: str
) -> None:
    arguments = ["upscale", str(film), "-o", str(tmp_path / "out.mp4"), "--dry-run", *options]
    assert run(arguments) == 2
    err = capsys.readouterr().err
    assert reason in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_kept_run_is_seen_by_a_dry_run(film: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.mp4"
    work = work_folder(out)
    work.mkdir()
    known = {"facts": {"seed": 1}, "frames": 29, "log_size": 0, "state": "state"}
    (work / "run.json").write_text(json.dumps(known))
    options: dict[str, Any] = {"model": IdentityModel(), "dry_run": True}
    with pytest.raises(InputError, match="29 frames is kept"):
        upscale(film, out, **options)
    with pytest.raises(InputError, match="can't be continued"):
        upscale(film, out, resume=True, **options)
    assert upscale(film, out, overwrite=True, **options).dry_run
    assert (work / "run.json").exists()
