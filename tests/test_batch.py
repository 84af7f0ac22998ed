"""Which files a batch takes and what their outputs are called: files, folders, patterns, with any names."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from media import ffmpeg, make_clip, times
from recavsr.cli.main import run
from recavsr.errors import InputError
from recavsr.stream.batch import FileResult, FileStatus, find_jobs, is_many, upscale_many
from recavsr.stream.step import IdentityModel
from recavsr.video.clips import read_clip, write_clip


def touch(folder: Path, *names: str) -> Path:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    return folder


def found(inputs: list[str | Path], tmp_path: Path) -> dict[str, str]:
    """Return {source: output}, relative to `tmp_path` and to the output folder."""
    jobs = find_jobs(inputs, tmp_path / "out")
    return {
        os.path.relpath(job.source, tmp_path): os.path.relpath(job.output, tmp_path / "out") for job in jobs
    }


def test_files_folders_and_patterns_each_file_once(tmp_path: Path) -> None:
    touch(tmp_path, "a/2.mov", "a/10.mov", "a/notes.txt", "a/.hidden.mov", "b/deep/c.mkv", "d.avi", "e.wmv")
    inputs = [tmp_path / "a", tmp_path / "d.avi", f"{tmp_path}/a/*.mov", f"{tmp_path}/**/*.mkv"]
    assert found(inputs, tmp_path) == {
        "a/2.mov": "2.mov",
        "a/10.mov": "10.mov",
        "a/notes.txt": "notes.mp4",
        "d.avi": "d.mp4",
        "b/deep/c.mkv": "c.mkv",
    }
    assert list(found([tmp_path / "a"], tmp_path)) == ["a/2.mov", "a/10.mov", "a/notes.txt"]


def test_a_file_of_that_very_name_comes_before_a_pattern(tmp_path: Path) -> None:
    touch(tmp_path, "clip [1].mp4", "clip 1.mp4", "what?.mp4", "whatx.mp4", "100%d.mp4", "-o.mp4", "ü*.mp4")
    for name in ("clip [1].mp4", "what?.mp4", "100%d.mp4", "ü*.mp4"):
        assert found([tmp_path / name], tmp_path) == {name: name}
        assert not is_many(str(tmp_path / name))
    assert set(found([f"{tmp_path}/clip [0-9].mp4"], tmp_path)) == {"clip 1.mp4"}
    assert set(found([f"{tmp_path}/*.mp4"], tmp_path)) == {path.name for path in tmp_path.glob("*.mp4")}


def test_a_dash_in_front_is_a_name_behind_two_dashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    write_clip(Path("-a.mp4"), np.zeros((3, 16, 16, 3), np.uint8), 25)
    options = ["--model", "identity", "--dry-run", "--json"]
    assert run(["batch", "-o", "out", *options, "--", "-a.mp4"]) == 0
    assert '"source": "-a.mp4", "output": "out/-a.mp4", "status": "planned"' in capsys.readouterr().err
    assert not Path("out").exists()


def test_files_of_one_name_keep_their_folders(tmp_path: Path) -> None:
    touch(tmp_path, "x/day/clip.mp4", "y/day/clip.mp4", "x/day/other.mp4")
    assert found([tmp_path / "x/day", tmp_path / "y/day"], tmp_path) == {
        "x/day/clip.mp4": "x/day/clip.mp4",
        "x/day/other.mp4": "other.mp4",
        "y/day/clip.mp4": "y/day/clip.mp4",
    }
    assert (tmp_path / "out/y/day").is_dir()


def test_never_two_outputs_of_one_name(tmp_path: Path) -> None:
    touch(tmp_path, "a.avi", "a.mp4")
    assert found([f"{tmp_path}/a.*"], tmp_path) == {"a.avi": "a.avi.mp4", "a.mp4": "a.mp4"}
    touch(tmp_path, "a.avi.mp4")
    with pytest.raises(InputError, match=r"two inputs would both become a\.avi\.mp4"):
        found([f"{tmp_path}/a.*"], tmp_path)


def test_what_does_not_exist_is_one_bad_file(tmp_path: Path) -> None:
    clip = tmp_path / "a.mp4"
    write_clip(clip, np.zeros((3, 16, 16, 3), np.uint8), 25)
    inputs = [tmp_path / "gone.mp4", f"{tmp_path}/*.mkv", clip]
    report = upscale_many(inputs, tmp_path / "out", model=IdentityModel(), scale=1)
    assert [result.status for result in report.files] == [
        FileStatus.FAILED,
        FileStatus.FAILED,
        FileStatus.DONE,
    ]
    assert report.files[0].reason == f"{tmp_path}/gone.mp4: no such file"
    assert "match this pattern" in (report.files[1].reason or "")


def test_what_lies_beside_videos_is_skipped_and_a_bad_video_is_not(tmp_path: Path) -> None:
    folder = tmp_path / "clips"
    folder.mkdir()
    write_clip(folder / "a.mp4", np.zeros((3, 16, 16, 3), np.uint8), 25)
    for name in ("bad.mkv", "a.srt", "notes.txt"):
        (folder / name).write_text("1\n00:00:01,000 --> 00:00:02,000\nwords\n")
    report = upscale_many(folder, tmp_path / "out", model=IdentityModel(), scale=1)
    assert {Path(result.source).name: result.status for result in report.files} == {
        "a.mp4": FileStatus.DONE,
        "a.srt": FileStatus.SKIPPED,
        "bad.mkv": FileStatus.FAILED,
        "notes.txt": FileStatus.SKIPPED,
    }
    assert report.exit_code == 1
    (folder / "bad.mkv").unlink()
    assert upscale_many(folder, tmp_path / "out", model=IdentityModel(), scale=1).exit_code == 0
    named = upscale_many([folder / "notes.txt"], tmp_path / "out", model=IdentityModel(), scale=1)
    assert [result.status for result in named.files] == [FileStatus.FAILED]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"size": "10"}, "size must look like 1920x1080"),
        ({"scale": -1}, "scale must be a number above 0"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"frames": "3"}, "frames must be a whole number"),
        ({"start": "1:99:99"}, "99 minutes or seconds"),
    ],
)
def test_options_that_fit_no_file_are_refused_once(tmp_path: Path, wrong: dict, said: str) -> None:
    touch(tmp_path, "clips/a.mp4", "clips/b.mp4")
    with pytest.raises(InputError, match=said):
        upscale_many(tmp_path / "clips", tmp_path / "out", model=IdentityModel(), **wrong)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "inputs", "said"),
    [
        ("batch", ["a.mp4"], "a.mp4: no such file"),
        (
            "batch",
            ["a.mp4", "b/*.mov", "f%04d.png"],
            "a.mp4: no such file (nor are the other 2 inputs there)",
        ),
        ("upscale", ["b/*.mov"], "b/*.mov: no files match this pattern"),
    ],
)
def test_nothing_but_missing_inputs_is_refused(
    command: str,
    inputs: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run([command, *inputs, "-o", "out", "--model", "identity"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(said)
    assert list(tmp_path.iterdir()) == []


def test_a_pattern_of_numbered_pictures_is_there_if_they_are(tmp_path: Path) -> None:
    touch(tmp_path, "frames/1.png", "frames/2.png")
    assert found([tmp_path / "frames/%d.png"], tmp_path) == {"frames/%d.png": "%d.png"}


def test_a_folder_of_pictures_is_one_video(tmp_path: Path) -> None:
    touch(tmp_path, "frames/1.png", "frames/2.png", "clips/a.mp4")
    assert found([tmp_path / "frames", tmp_path / "clips"], tmp_path) == {
        "frames": "frames",
        "clips/a.mp4": "a.mp4",
    }
    assert not is_many(str(tmp_path / "frames"))
    assert not is_many(f"{tmp_path}/frames/*.png")
    assert is_many(f"{tmp_path}/*/*.mp4")


def test_the_output_is_another_folder(tmp_path: Path) -> None:
    touch(tmp_path, "in/a.mp4", "file")
    for inputs, output, reason in (
        ("in", "in", "is the source folder itself"),
        ("in/*.mp4", "in", "is the source folder itself"),
        ("in", "file", "exists and is not a folder"),
    ):
        with pytest.raises(InputError, match=reason):
            find_jobs(str(tmp_path / inputs), tmp_path / output)
    with pytest.raises(InputError, match="there is no file to upscale"):
        find_jobs([], tmp_path / "out")


def test_upscale_takes_a_pattern_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("clips").mkdir()
    for name in ("a.mov", "b.mov", "c.mkv"):
        write_clip(Path("clips", name), np.zeros((3, 16, 16, 3), np.uint8), 25)
    assert run(["upscale", "clips/*.mov", "--model", "identity", "--scale", "2"]) == 0
    assert "clips_upscaled: 2 done" in capsys.readouterr().err
    assert sorted(path.name for path in Path("clips_upscaled").iterdir()) == ["a.mov", "b.mov"]
    assert read_clip(Path("clips_upscaled/a.mov")).shape == (3, 32, 32, 3)


def test_odd_things_in_a_folder(tmp_path: Path) -> None:
    """Pipes are left alone, an animated PNG becomes a video, a picture stays one."""
    folder = tmp_path / "Season [1080p]"
    folder.mkdir()
    make_clip(folder / "a.mp4", 3)
    os.mkfifo(folder / "pipe.mp4")
    ffmpeg("-f", "lavfi", "-i", "testsrc2=s=32x24:r=10", "-frames:v", 4, "-f", "apng", folder / "moving.png")
    ffmpeg("-i", folder / "a.mp4", "-frames:v", 1, folder / "still.png")
    expected = ["a.mp4", "moving.mp4", "still.png"]
    assert [Path(job.output).name for job in find_jobs(folder, tmp_path / "one")] == expected
    pattern = f"{folder}/*"  # the brackets are the folder's own
    assert [Path(job.output).name for job in find_jobs(pattern, tmp_path / "two")] == expected
    report = upscale_many(folder, tmp_path / "out", model=IdentityModel(), scale=2)
    assert [result.status for result in report.files] == [FileStatus.DONE] * 3
    assert len(times(tmp_path / "out" / "moving.mp4")) == 4


def test_a_dry_run_plans_and_does_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    make_clip(folder / "a.mp4", 3)
    report = upscale_many(folder, tmp_path / "out", model="identity", scale=2, dry_run=True)
    assert [result.status for result in report.files] == [FileStatus.PLANNED]
    assert not (tmp_path / "out").exists()


def test_a_dry_run_leaves_what_others_put_there_meanwhile(tmp_path: Path) -> None:
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    make_clip(folder / "a.mp4", 3)

    def somebody_else(result: FileResult) -> None:
        touch(out, "theirs.txt")

    upscale_many(folder, out, model="identity", scale=2, dry_run=True, on_file=somebody_else)
    assert [path.name for path in out.iterdir()] == ["theirs.txt"]
