"""The command line: exit codes, one line a fact, nothing but data on stdout."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import recavsr
from recavsr.cli import main
from recavsr.cli.console import Console, FrameProgress, TerminalProgress, plain_seconds
from recavsr.cli.main import run
from recavsr.stream import pipeline, resume
from recavsr.stream.resume import work_folder
from recavsr.stream.step import IdentityModel, IdentityState
from recavsr.video.clips import read_clip, write_clip

RATE = 24
FRAMES = 30


def moving_squares(count: int) -> np.ndarray:
    """Return a small clip [N, 36, 48, 3] in which every frame differs."""
    frames = np.full((count, 36, 48, 3), 60, np.uint8)
    for index in range(count):
        frames[index, 8:20, 2 + index : 14 + index] = (200, 80, 40)
    return frames


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    write_clip(path, moving_squares(FRAMES), RATE)
    return path


@pytest.fixture(autouse=True)
def own_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the user's own model names out of the tests."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def command_line(*arguments: str, **options) -> subprocess.CompletedProcess:  # type: ignore[no-untyped-def]
    return subprocess.run([sys.executable, "-m", "recavsr", *arguments], capture_output=True, **options)


# -------------------------------------------------------------------------------------------- help, usage


def test_help_names_the_commands(capsys: pytest.CaptureFixture) -> None:
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("upscale", "demo", "doctor", "models", "route"))


def test_no_argument_is_help(capsys: pytest.CaptureFixture) -> None:
    assert run([]) == 0
    assert "upscale" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"recavsr {recavsr.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["bogus"], "bogus"),
        (["upscale"], "IN"),
        (["upscale", "x.mp4", "--bogus"], "--bogus"),
        (["upscale", "x.mp4", "--frames", "many"], "--frames"),
        (["upscale", "x.mp4", "y.mp4", "z.mp4"], "y.mp4"),
        (["route"], "command"),
        (["route", "account", "--height", "0"], "--height"),
        (["demo", "--frames", "1"], "--frames"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], named: str, capsys: pytest.CaptureFixture) -> None:
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("recavsr: ")
    assert named in err
    assert "--help" in err


# ---------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--scale", "0"], "scale"),
        (["--scale", "-1"], "scale"),
        (["--scale", "nan"], "scale"),
        (["--scale", "inf"], "scale"),
        (["--size", "0x0"], "0"),
        (["--size", "large"], "large"),
        (["--height", "0"], "height"),
        (["--scale", "2", "--height", "90"], "scale and height"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--device", "toaster"], "toaster"),
        (["--precision", "fp3"], "fp3"),
        (["--color-fix", "sepia"], "sepia"),
        (["--start", "-1"], "start"),
        (["--start", "99"], "start"),
        (["--start", "soon"], "soon"),
        (["--duration", "0"], "duration"),
        (["--frames", "0"], "frames"),
        (["--codec", "divx"], "divx"),
        (["--quality", "awful"], "awful"),
        (["--preset", "warp"], "it has ultrafast, "),
        (["--codec", "hevc", "--preset", "warp"], "it has ultrafast, "),
        (["--seed", "-1"], "--seed"),
    ],
)
def test_bad_options_are_refused(
    clip: Path, tmp_path: Path, options: list[str], named: str, capfd: pytest.CaptureFixture
) -> None:
    output = tmp_path / "out" / "big.mp4"
    output.parent.mkdir()
    model = [] if "--model" in options else ["--model", "identity"]
    assert run(["upscale", str(clip), "-o", str(output), *model, *options]) == 2
    out, err = capfd.readouterr()  # of the libraries, too
    assert out == ""
    lines = [line for line in err.splitlines() if not line.startswith("loading ")]
    assert len(lines) == 1
    assert lines[0].startswith("recavsr: ")
    assert named in lines[0]
    assert list(output.parent.iterdir()) == []


@pytest.mark.parametrize("content", [None, b"", b"this is no video" * 400], ids=["missing", "empty", "text"])
def test_bad_sources_are_refused(
    tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture
) -> None:
    source = tmp_path / "source.mp4"
    if content is not None:
        source.write_bytes(content)
    assert run(["upscale", str(source), "--model", "identity"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "source.mp4" in err
    assert {path.name for path in tmp_path.iterdir()} <= {"source.mp4"}


def test_existing_output_stays_without_overwrite(
    clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    output = tmp_path / "big.mp4"
    output.write_bytes(b"precious")
    arguments = ["upscale", str(clip), "-o", str(output), "--model", "identity", "--scale", "1"]
    assert run(arguments) == 2
    assert "exists" in capsys.readouterr().err
    assert output.read_bytes() == b"precious"
    assert run([*arguments, "--overwrite"]) == 0
    assert len(read_clip(output)) == FRAMES


def test_a_second_name_is_no_output(clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    second = tmp_path / "big.mp4"
    assert run(["upscale", str(clip), str(second), "--model", "identity"]) == 2
    assert f"`recavsr upscale {clip} -o {second}`" in capsys.readouterr().err
    assert not second.exists()


@pytest.mark.parametrize(
    "arguments",
    [["upscale", ""], ["upscale", "x.mp4", "-o", ""], ["batch", "", "-o", "x"], ["live", "", "x.mp4"]],
    ids=" ".join,
)
def test_a_name_may_not_be_empty(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    assert run(arguments) == 2
    assert capsys.readouterr().err == "recavsr: the name of an input or output is empty\n"


def test_output_folder_must_exist(clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(["upscale", str(clip), "-o", str(tmp_path / "no" / "big.mp4"), "--model", "identity"]) == 2
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["evaluate", "--data", "nowhere", "-o", "r.json"], "held-out clips missing"),
        (["bench", "--model", "no-such-model"], "no-such-model"),
        (["live", "no.mp4", "x.mkv"], "no.mp4: no such file"),
        (["live", "-", "x.avi"], ".flv"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_other_commands_refuse_in_one_line(
    arguments: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    pytest.importorskip("scipy")
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("recavsr: ")
    assert named in err
    assert list(tmp_path.iterdir()) == []


def test_errors_are_json_lines_with_json(capsys: pytest.CaptureFixture) -> None:
    assert run(["upscale", "nowhere.mp4", "--model", "identity", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    error = json.loads(err)
    assert (error["event"], error["exit_code"]) == ("error", 2)
    assert "nowhere.mp4" in error["text"]


def test_unexpected_errors_are_one_line(
    clip: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setattr("recavsr.stream.engine.upscale", broken)
    monkeypatch.delenv("RECAVSR_DEBUG", raising=False)
    assert run(["upscale", str(clip)]) == 2
    err = capsys.readouterr().err
    assert err == "recavsr: unexpected RuntimeError: two lines (RECAVSR_DEBUG=1 shows where it happened)\n"
    monkeypatch.setenv("RECAVSR_DEBUG", "1")
    assert run(["upscale", str(clip)]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 2, "not enough memory"),
        (OSError(28, "No space left on device", "/big"), 2, "/big: No space left on device"),
        (recavsr.PartialError("half of it"), 1, "half of it"),
    ],
)
def test_exit_codes(
    clip: Path,
    error: BaseException,
    code: int,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("recavsr.stream.engine.upscale", fail)
    assert run(["upscale", str(clip)]) == code
    err = capsys.readouterr().err
    assert text in err
    assert err.count("\n") == 1


# ---------------------------------------------------------------------------------------------- upscaling


def test_upscale_beside_the_input(clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = Path(shutil.copy(clip, tmp_path / "holiday.mp4"))
    assert run(["upscale", str(source), "--model", "identity"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    (made,) = set(tmp_path.glob("*.mp4")) - {source}
    assert made.name.startswith("holiday_")
    assert f"{made}: {FRAMES} frames of 192x144" in err
    assert read_clip(made).shape == (FRAMES, 144, 192, 3)


def test_json_lines(clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    output = tmp_path / "big.mkv"
    assert (
        run(["upscale", str(clip), "-o", str(output), "--model", "identity", "--scale", "2", "--json"]) == 0
    )
    out, err = capsys.readouterr()
    assert out == ""
    events = [json.loads(line) for line in err.splitlines()]
    progress = [event for event in events if event["event"] == "progress"]
    assert (progress[-1]["frames"], progress[-1]["total"]) == (FRAMES, FRAMES)
    assert events[-1]["event"] == "result"
    assert events[-1]["output_size"] == [72, 96]
    assert events[-1]["frames"] == FRAMES


def test_dry_run_writes_nothing(clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["upscale", str(clip), "-o", str(tmp_path / "x.mp4"), "--dry-run", "--height", "90"]
    assert run(arguments) == 0
    assert "48x36 -> 120x90" in capsys.readouterr().err
    assert not (tmp_path / "x.mp4").exists()


def test_cuts_of_an_edit_list(clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "cuts.txt").write_text("12\n")
    arguments = ["upscale", str(clip), "--model", "identity", "--scale", "1", "--json"]
    for cuts, wanted in ((str(tmp_path / "cuts.txt"), [12]), ("off", []), ("auto", [])):
        assert run([*arguments, "-o", str(tmp_path / "out.mp4"), "--overwrite", "--cuts", cuts]) == 0
        result = json.loads(capsys.readouterr().err.splitlines()[-1])
        assert result["cuts"] == wanted
    assert run([*arguments, "-o", str(tmp_path / "other.mp4"), "--cuts", str(tmp_path / "none")]) == 2
    assert "give auto, off or a file" in capsys.readouterr().err


def test_what_is_kept_is_said_and_resumed(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    arguments = ["upscale", str(clip), "-o", str(tmp_path / "out.mp4"), "--model", "identity", "--scale", "1"]
    monkeypatch.setattr(pipeline, "MARK_FRAMES", 8)
    monkeypatch.setattr(resume, "CHECKPOINT_SECONDS", 0.0)

    def interrupted(model: IdentityModel, state: IdentityState, lr_frames: torch.Tensor, _: object) -> tuple:
        if state.block < 2:
            return IdentityState(state.block + 1), lr_frames
        kept, deadline = work_folder(tmp_path / "out.mp4") / "run.json", time.monotonic() + 60
        while not (kept.exists() and '"frames": 29' in kept.read_text()) and time.monotonic() < deadline:
            time.sleep(0.01)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(IdentityModel, "step", interrupted)
        assert run(arguments) == 130
    said = capsys.readouterr().err.splitlines()
    assert said[-2:] == [
        "29 frames are kept: the same command with --resume goes on from there",
        "recavsr: interrupted",
    ]
    assert run(arguments) == 2
    assert "continue it with --resume, or start afresh with --overwrite" in capsys.readouterr().err
    assert run([*arguments, "--resume", "--json"]) == 0
    assert json.loads(capsys.readouterr().err.splitlines()[-1])["resumed_at"] == 29
    assert [path.name for path in tmp_path.iterdir()] == ["out.mp4"]


def test_stdout_carries_only_the_video(clip: Path) -> None:
    arguments = ("upscale", str(clip), "-o", "-", "--model", "identity", "--scale", "1", "--frames", "3")
    done = command_line(*arguments, check=True)
    header, _, frames = done.stdout.partition(b"\n")
    assert header.startswith(b"YUV4MPEG2 W48 H36 F24:1")
    assert len(frames) == 3 * (len(b"FRAME\n") + 48 * 36 * 3 // 2)
    assert b"3 frames" in done.stderr


def test_reader_that_leaves_is_no_traceback(clip: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "recavsr",
            "upscale",
            str(clip),
            "-o",
            "-",
            "--model",
            "identity",
            "--scale",
            "20",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(10)
    process.stdout.close()
    err = process.stderr.read().decode()
    process.stderr.close()
    assert process.wait() in (1, 2)
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("recavsr: ")


def test_a_source_that_breaks_off_is_done_in_part(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rng = np.random.default_rng(0)
    whole = tmp_path / "whole.mp4"
    write_clip(whole, rng.integers(0, 256, (60, 64, 96, 3), dtype=np.uint8), RATE)
    mkv = tmp_path / "whole.mkv"
    assert run(["upscale", str(whole), "-o", str(mkv), "--model", "identity", "--scale", "1"]) == 0
    broken = tmp_path / "broken.mkv"
    broken.write_bytes(mkv.read_bytes()[: mkv.stat().st_size // 2])
    capsys.readouterr()
    output = tmp_path / "out.mkv"
    assert run(["upscale", str(broken), "-o", str(output), "--model", "identity", "--scale", "1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "done in part" in err
    assert 0 < len(read_clip(output)) < 60


def test_a_folder_goes_on_past_bad_files(clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    shutil.copy(clip, folder / "good.mp4")
    (folder / "bad.mp4").write_bytes(b"nothing")
    arguments = ["upscale", str(folder), "-o", str(tmp_path / "out"), "--model", "identity", "--scale", "1"]
    assert run([*arguments, "--json"]) == 1
    events = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    status = {Path(event["source"]).name: event["status"] for event in events if event["event"] == "file"}
    assert status == {"good.mp4": "done", "bad.mp4": "failed"}
    assert len(read_clip(tmp_path / "out" / "good.mp4")) == FRAMES
    assert run(arguments) == 1
    assert "skipped: " in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """A pipe that never ends is interrupted after its first block has been taken."""
    output = tmp_path / "out"
    output.mkdir()
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "recavsr",
            "upscale",
            "-",
            "-o",
            str(output / "x.mp4"),
            "--model",
            "identity",
            "--json",
        ],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdin is not None
    assert process.stderr is not None
    process.stdin.write(b"YUV4MPEG2 W32 H32 F24:1 C420\n" + (b"FRAME\n" + bytes(32 * 32 * 3 // 2)) * 40)
    process.stdin.flush()
    lines = []
    while not any('"progress"' in line for line in lines):
        lines.append(process.stderr.readline().decode())
        assert lines[-1], f"ended early: {lines}"
    process.send_signal(number)
    rest = process.stderr.read().decode()
    assert process.wait() == 130
    assert json.loads(rest.splitlines()[-1])["exit_code"] == 130
    assert "Traceback" not in rest
    assert list(output.iterdir()) == []
    process.stdin.close()
    process.stderr.close()


# --------------------------------------------------------------------------------------- what is displayed


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (59.94, "59.9 s"), (185, "3 min 05 s"), (7620, "2 h 07 min")]
)
def test_plain_seconds(seconds: float, text: str) -> None:
    assert plain_seconds(seconds) == text


def test_progress_is_sparse_where_nobody_watches(capsys: pytest.CaptureFixture) -> None:
    with Console(json_lines=False).progress(1000) as progress:
        assert type(progress) is FrameProgress
        for frames in range(0, 1001, 10):
            progress.update(frames, fps=20.0)
    assert capsys.readouterr().err.splitlines() == [
        "10/1000 frames, 20.0 fps, 49.5 s left",
        "1000/1000 frames, 20.0 fps, 0.0 s left",
    ]


def test_progress_of_unknown_length(capsys: pytest.CaptureFixture) -> None:
    with Console(json_lines=False).progress(None) as progress:
        progress.update(21, fps=7.0)
    assert capsys.readouterr().err == "21 frames, 7.0 fps\n"


def test_progress_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Console(json_lines=False).progress(90) as progress:
        assert isinstance(progress, TerminalProgress)
        progress.update(45, fps=15.0)
        time.sleep(0.15)
        progress.update(90, fps=15.0)
    out, err = capsys.readouterr()
    assert out == ""
    assert "90/90 frames 15.0 fps, 0.0 s left" in err


# ------------------------------------------------------------------------------------------ models, doctor


@pytest.fixture(scope="module")
def tiny_folder(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model folder in the released layout, made of the tiny weights of the parity fixtures."""
    parity, folder = shared / "parity", tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    for name in ("transformer", "flashdecoder", "prompt"):
        shutil.copy(parity / f"tiny_{name}.safetensors", folder / f"{name}.safetensors")
    for name in ("model_config", "flashdecoder_config"):
        shutil.copy(parity / f"tiny_{name}.json", folder / f"{name}.json")
    shutil.copy(parity / "latent_norm.json", folder / "vae_config.json")
    return folder


def test_models_are_added_listed_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    assert run(["models", "add", "mine", str(folder)]) == 0
    assert run(["models", "add", "theirs", "someone/something"]) == 0
    capsys.readouterr()
    assert run(["models"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert {"nano", "identity", "mine", "theirs"} == set(lines)
    assert lines["mine"] == str(folder)
    assert run(["models", "remove", "mine"]) == 0
    assert run(["models", "remove", "mine"]) == 2
    capsys.readouterr()
    assert run(["models"]) == 0
    assert "mine" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["nano", "."], ["my name", "."], ["mine", "./no/such/folder"], ["mine", "word"]]
)
def test_bad_model_names_are_refused(arguments: list[str], capsys: pytest.CaptureFixture) -> None:
    assert run(["models", "add", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_spoilt_registry_is_named(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "config" / "recavsr" / "models.json"
    path.parent.mkdir(parents=True)
    path.write_text("{oops")
    assert run(["models"]) == 2
    assert str(path) in capsys.readouterr().err


def test_doctor_says_what_there_is(capsys: pytest.CaptureFixture) -> None:
    assert run(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["recavsr"] == recavsr.__version__
    assert "libx264" in facts["encoders"]
    assert "PyAV" in facts["video"]


def test_doctor_approves_a_complete_folder(tiny_folder: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(["models", "add", "tiny", str(tiny_folder)]) == 0
    capsys.readouterr()
    assert run(["doctor", "--model", "tiny", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert "is complete" in facts["model"]
    assert facts["layers"] == "7 of width 64, a token is 32 pixels"


def test_doctor_names_what_is_missing(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "part"))
    (folder / "flashdecoder.safetensors").unlink()
    assert run(["doctor", "--model", str(folder)]) == 2
    assert "lacks flashdecoder.safetensors" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["doctor"], ["upscale", "clip"]])
def test_a_config_that_does_not_fit_is_refused(
    tiny_folder: Path, clip: Path, tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture
) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "misfit"))
    config = json.loads((folder / "model_config.json").read_text())
    (folder / "model_config.json").write_text(json.dumps({**config, "ffn_dim": 96}))
    arguments = [str(clip) if word == "clip" else word for word in command]
    assert run([*arguments, "--model", str(folder)]) == 2
    err = capsys.readouterr().err
    assert "ffn" in err
    assert "Traceback" not in err


def test_unreadable_weights_are_refused(
    tiny_folder: Path, clip: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "noise"))
    (folder / "transformer.safetensors").write_bytes(b"no tensors here")
    assert run(["upscale", str(clip), "-o", str(tmp_path / "x.mp4"), "--model", str(folder)]) == 2
    assert "transformer.safetensors" in capsys.readouterr().err
    assert not (tmp_path / "x.mp4").exists()


# -------------------------------------------------------------------------------------------------- route


def test_route_account_reproduces_the_paper(capsys: pytest.CaptureFixture) -> None:
    arguments = ["route", "account", "--height", "704", "--width", "1280", "--model", "recavsr-5b"]
    assert run(arguments) == 0
    out = capsys.readouterr().out
    for fact in ("66, 2.2 a layer", "120 slots", "45 % less", "10.31 MiB", "680.63 MiB", "1237.50 MiB"):
        assert fact in out
    assert run([*arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["slots"], facts["uniform_w4_slots"]) == (66, 120)
    assert facts["bytes_per_slot"] == 2 * 880 * 3072 * 2
    assert main.REFUSED == 2


def test_route_export_is_what_the_config_holds(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    output = tmp_path / "route.json"
    assert run(["route", "export", "--model", str(tiny_folder), "-o", str(output)]) == 0
    config = json.loads((tiny_folder / "model_config.json").read_text())
    assert json.loads(output.read_text()) == config["static_kv_router"]
    capsys.readouterr()
    assert run(["route", "export", "--model", str(tiny_folder)]) == 0
    assert json.loads(capsys.readouterr().out) == config["static_kv_router"]


def test_route_show_has_a_row_a_layer(capsys: pytest.CaptureFixture) -> None:
    assert run(["route", "show", "--model", "recavsr-5b"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[12] == ["12", "W4+A", "6"]
    assert rows[30] == ["30", "∅", "0"]
    assert rows[31] == ["66", "slots,", "2.2", "a", "layer"]


def test_route_show_by_action_is_the_papers_table(capsys: pytest.CaptureFixture) -> None:
    assert run(["route", "show", "--model", "recavsr-5b", "--by-action"]) == 0
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    rows = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert rows[1:8] == [
        ["∅", "1, 2, 4, 6, 9, 22, 25, 27, 29, 30", "10", "0"],
        ["W1", "3, 28", "2", "1"],
        ["W2", "5, 7, 13, 17, 21, 24, 26", "7", "2"],
        ["W4", "8, 11, 20", "3", "4"],
        ["A", "15", "1", "2"],
        ["W2+A", "10, 19, 23", "3", "4"],
        ["W4+A", "12, 14, 16, 18", "4", "6"],
    ]
    assert rows[8] == ["66 slots, 2.2 a layer"]


def test_identity_has_no_route(capsys: pytest.CaptureFixture) -> None:
    assert run(["route", "show", "--model", "identity"]) == 2
    assert "identity" in capsys.readouterr().err


LEAVES_A_THREAD = """
import atexit, threading, time
import torch
from recavsr.cli import main

def compute_on() -> None:
    x = torch.ones(300, 300)
    while True:
        (x @ x).sum().item()

def run(arguments):
    atexit.register(print, "tidied up")
    threading.Thread(target=compute_on, daemon=True).start()
    time.sleep(0.3)
    print("done", end="; ")
    return 130

main.run = run
main.main()
"""


def test_a_thread_that_is_left_can_not_abort_the_end() -> None:
    """Python ends daemon threads wherever they are: inside a library that is C++, that aborts the process."""
    ended = subprocess.run([sys.executable, "-c", LEAVES_A_THREAD], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "done; tidied up\n", "")
