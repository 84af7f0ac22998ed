"""Resume: whatever ends a run, the continued one gives the same frames; nothing half-made gets the name."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from media import ffmpeg, packets, times
from recavsr.errors import InputError
from recavsr.stream import pipeline, resume
from recavsr.stream.batch import FileStatus, upscale_many
from recavsr.stream.engine import Progress, UpscaleReport, upscale
from recavsr.stream.resume import work_folder
from recavsr.stream.step import BlockModel, IdentityModel, StreamState
from recavsr.video.clips import read_clip
from tiny import one_thread, tiny_model


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(autouse=True)
def frequent_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "MARK_FRAMES", 24)
    monkeypatch.setattr(resume, "CHECKPOINT_SECONDS", 0.0)


@pytest.fixture(scope="module")
def tiny() -> BlockModel:
    return tiny_model()


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make 150 frames with a cut at 71, unequal times, and sound."""
    path = tmp_path_factory.mktemp("film") / "film.mkv"
    ffmpeg("-f", "lavfi", "-i", "testsrc2=s=48x32:r=50", "-f", "lavfi", "-i", "smptebars=s=48x32:r=50",
           "-f", "lavfi", "-i", "sine=r=8000", "-filter_complex",
           "[0]trim=end_frame=95,select='mod(n,4)'[a];[1]trim=end_frame=110,setpts=PTS-STARTPTS,"
           "select='mod(n,4)'[b];[a][b]concat[v]", "-map", "[v]", "-map", "2", "-t", 4.2, "-fps_mode", "vfr",
           "-c:v", "libx264", "-pix_fmt", "yuv420p", "-c:a", "aac", path)  # fmt: skip
    assert len(times(path)) == 153
    return path


class Breaking:
    """A model that breaks off after some blocks of a run, counted over all shots.

    With an `output` it waits until a checkpoint of `frames` frames is there: the writer lags behind.
    """

    def __init__(
        self,
        model: BlockModel,
        blocks: int,
        error: BaseException,
        output: Path | None = None,
        frames: int = 1,
    ) -> None:
        self._model, self._left, self._error = model, blocks, error
        self._run, self._frames = None if output is None else work_folder(output) / "run.json", frames
        self.name, self.fingerprint = model.name, model.fingerprint
        self.size_multiple, self.native_scale = model.size_multiple, model.native_scale
        self.blocks, self.device, self.dtype = model.blocks, model.device, model.dtype
        self.start = model.start

    def step(
        self, state: Any, lr_frames: torch.Tensor, wanted: int | None = None
    ) -> tuple[Any, torch.Tensor]:
        if not self._left:
            deadline = time.monotonic() + 60
            while self._run is not None and self._kept() < self._frames and time.monotonic() < deadline:
                time.sleep(0.01)
            raise self._error
        self._left -= 1
        return self._model.step(state, lr_frames, wanted)

    def _kept(self) -> int:
        assert self._run is not None
        return json.loads(self._run.read_text())["frames"] if self._run.exists() else 0


OPTIONS: dict[str, Any] = {"scale": 2, "color_fix": "adain", "preset": "ultrafast"}


def same_file(one: Path, other: Path) -> bool:
    """Say whether two files show the same frames at the same times with the same sound."""
    return (
        np.array_equal(read_clip(one), read_clip(other))
        and times(one) == times(other)
        and packets(one, 1) == packets(other, 1)
    )


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "whole.mp4")


@pytest.mark.parametrize(
    ("name", "codec"),
    [("out.mp4", None), ("out.mkv", "hevc"), ("out.mkv", "ffv1"), ("out.mkv", "vp9"), ("out.mp4", "av1")],
)
def test_a_run_that_fails_twice_ends_with_the_same_frames(
    tiny: BlockModel, film: Path, tmp_path: Path, name: str, codec: str | None
) -> None:
    whole, out = tmp_path / f"whole{Path(name).suffix}", tmp_path / name
    options = OPTIONS | {"codec": codec, "preset": None if codec else "ultrafast"}
    assert upscale(film, whole, model=tiny, **options).cuts == (71,)
    kept: list[int] = []

    def note(state: Progress) -> None:
        if state.stage == "kept":
            kept.append(state.frames)

    for blocks, frames, error in ((6, 53, RuntimeError("out of memory")), (9, 124, KeyboardInterrupt())):
        model = Breaking(tiny, blocks, error, out, frames)
        with pytest.raises(type(error)):
            upscale(film, out, model=model, resume=True, progress=note, **options)
        assert not out.exists()
        assert work_folder(out).is_dir()
    assert kept == [53, 124]
    report = upscale(film, out, model=tiny, resume=True, **options)
    assert (report.frames, report.resumed_at, report.cuts) == (153, 124, (71,))
    assert same_file(out, whole)
    assert not work_folder(out).exists()


@pytest.mark.parametrize(("seconds", "frames"), [(1e9, 24), (0.0, 10**9)], ids=["none is due", "cuts only"])
def test_the_state_is_copied_only_where_it_is_wanted(
    tiny: BlockModel,
    film: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    frames: int,
) -> None:
    """A copy of the 5B model's state is gigabytes of a card; where a shot begins there is nothing to copy."""
    copies = []
    monkeypatch.setattr(StreamState, "clone", lambda state: copies.append(state) or state)
    monkeypatch.setattr(resume, "CHECKPOINT_SECONDS", seconds)
    monkeypatch.setattr(pipeline, "MARK_FRAMES", frames)
    assert upscale(film, tmp_path / "out.mp4", model=tiny, **OPTIONS).cuts == (71,)
    assert copies == []


def test_pictures_are_resumed_too(tiny: BlockModel, film: Path, tmp_path: Path) -> None:
    options = {"model": tiny, "scale": 1}
    upscale(film, tmp_path / "whole", **options)
    with pytest.raises(RuntimeError):
        upscale(
            film, tmp_path / "out", **options | {"model": Breaking(tiny, 9, RuntimeError(), tmp_path / "out")}
        )
    assert left_over(tmp_path) == [".out.recavsr", "whole"]
    assert upscale(tmp_path / "whole", tmp_path / "again", **options).frames == 153
    report = upscale(film, tmp_path / "out", resume=True, **options)
    assert report.resumed_at > 24
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names
    assert all((tmp_path / "out" / n).read_bytes() == (tmp_path / "whole" / n).read_bytes() for n in names)
    two = tmp_path / "two.mkv"
    with pytest.raises(KeyboardInterrupt):
        upscale(tmp_path / "whole", two, model=Breaking(tiny, 9, KeyboardInterrupt(), two))
    assert upscale(tmp_path / "whole", two, model=tiny, resume=True).resumed_at > 24


def break_off(model: BlockModel, source: Path, output: Path) -> None:
    """Leave a run that is kept."""
    with pytest.raises(RuntimeError):
        upscale(source, output, model=Breaking(model, 9, RuntimeError(), output), **OPTIONS)


def test_before_the_first_checkpoint_nothing_is_left(tiny: BlockModel, film: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        upscale(film, tmp_path / "out.mp4", model=Breaking(tiny, 1, RuntimeError()), **OPTIONS)
    assert left_over(tmp_path) == []
    assert upscale(film, tmp_path / "out.mp4", model=tiny, resume=True, **OPTIONS).resumed_at == 0


def test_a_changed_option_or_input_is_refused_in_one_line(
    tiny: BlockModel, film: Path, tmp_path: Path
) -> None:
    source, out = tmp_path / "in.mkv", tmp_path / "out.mp4"
    source.write_bytes(film.read_bytes())
    break_off(tiny, source, out)
    changes: list[tuple[dict[str, Any], str]] = [
        ({"scale": 3}, "output size was 96x64 and is now 144x96"),
        ({"seed": 7}, "seed was 42 and is now 7"),
        ({"color_fix": "none"}, "color_fix was adain and is now none"),
        ({"cuts": "off"}, "cuts was auto and is now off"),
        ({"direct": True}, "direct was False and is now True"),
        ({"codec": "hevc"}, "codec was h264 and is now hevc|encoding"),
        ({"quality": 30}, "encoding"),
        ({"frames": 140}, "options has changed"),
        ({"model": IdentityModel()}, "model"),
    ]
    for change, reason in changes:
        with pytest.raises(InputError, match=f"can't be continued, its ({reason})") as caught:
            upscale(source, out, **{"model": tiny, "resume": True, **OPTIONS, **change})
        assert "\n" not in str(caught.value)
    data = bytearray(source.read_bytes())
    data[-1] ^= 1
    about = source.stat()
    source.write_bytes(data)
    os.utime(source, ns=(about.st_atime_ns, about.st_mtime_ns))
    with pytest.raises(InputError, match="its input has changed"):
        upscale(source, out, model=tiny, resume=True, **OPTIONS)
    source.write_bytes(film.read_bytes())
    os.utime(source, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert upscale(source, out, model=tiny, resume=True, **OPTIONS).resumed_at > 0


@pytest.mark.parametrize("what", ["words", "nothing", "facts", "state", "half a state", "packets", "short"])
def test_damaged_work_is_one_line(tiny: BlockModel, film: Path, tmp_path: Path, what: str) -> None:
    out = tmp_path / "out.mp4"
    with pytest.raises(RuntimeError):
        upscale(film, out, model=Breaking(tiny, 6, RuntimeError(), out, 53), **OPTIONS)
    folder = work_folder(out)
    state, run, log = next(folder.glob("state-*")), folder / "run.json", folder / "packets"
    {
        "words": lambda: run.write_text("words"),
        "nothing": lambda: run.write_bytes(b""),
        "facts": lambda: run.write_text('{"frames": 3}'),
        "state": state.unlink,
        "half a state": lambda: os.truncate(state, state.stat().st_size // 2),
        "packets": log.unlink,
        "short": lambda: os.truncate(log, 100),
    }[what]()
    with pytest.raises(InputError, match=r"out\.mp4: what an interrupted run kept is damaged; start afresh"):
        upscale(film, out, model=tiny, resume=True, **OPTIONS)
    assert left_over(tmp_path) == [folder.name]
    assert upscale(film, out, model=tiny, overwrite=True, **OPTIONS).frames == 153
    assert left_over(tmp_path) == ["out.mp4"]


def test_kept_work_is_never_thrown_away_unasked(tiny: BlockModel, film: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.mp4"
    break_off(tiny, film, out)
    with pytest.raises(InputError, match="continue it with --resume, or start afresh with --overwrite"):
        upscale(film, out, model=tiny, **OPTIONS)
    assert work_folder(out).is_dir()
    assert upscale(film, out, model=tiny, overwrite=True, **OPTIONS).resumed_at == 0
    assert left_over(tmp_path) == ["out.mp4"]


def test_a_kill_while_the_work_is_removed_leaves_nothing_to_continue(
    tiny: BlockModel, film: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last act of a run is to remove its folder, file by file."""
    out = tmp_path / "out.mp4"

    def killed(folder: Path, **options: Any) -> None:
        (folder / "packets").unlink()

    with monkeypatch.context() as patch:
        patch.setattr(resume.shutil, "rmtree", killed)
        upscale(film, out, model=tiny, **OPTIONS)
    assert work_folder(out).is_dir()
    out.unlink()
    assert upscale(film, out, model=tiny, resume=True, **OPTIONS).resumed_at == 0
    assert left_over(tmp_path) == ["out.mp4"]


def test_pipes_and_y4m_can_not_be_resumed(film: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="only a file that is made from files"):
        upscale(film, tmp_path / "out.y4m", model=IdentityModel(), resume=True)


def test_folders_skip_what_is_done_and_continue_the_rest(
    tiny: BlockModel, film: Path, tmp_path: Path
) -> None:
    folder, out = tmp_path / "films", tmp_path / "out"
    folder.mkdir()
    out.mkdir()
    for name in ("a.mkv", "b.mkv", "c.mkv"):
        (folder / name).write_bytes(film.read_bytes())
    upscale(folder / "a.mkv", out / "a.mkv", model=tiny, **OPTIONS)
    break_off(tiny, folder / "b.mkv", out / "b.mkv")
    report = upscale_many(folder, out, model=tiny, resume=True, **OPTIONS)
    assert [r.status for r in report.files] == [FileStatus.SKIPPED, FileStatus.DONE, FileStatus.DONE]
    resumed = [r.report.resumed_at for r in report.files if isinstance(r.report, UpscaleReport)]
    assert resumed[0] > 0
    assert resumed[1] == 0
    assert left_over(out) == ["a.mkv", "b.mkv", "c.mkv"]
    assert same_file(out / "a.mkv", out / "b.mkv")


def test_only_files_open_for_writing_are_brought_to_the_disk(
    film: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows refuses others."""
    monkeypatch.setattr(
        os, "fsync", lambda handle: stat.S_ISDIR(os.fstat(handle).st_mode) or os.write(handle, b"")
    )
    for name in ("out.mp4", "out"):
        upscale(film, tmp_path / name, model=IdentityModel(), scale=1)


# -- the process is killed, or the disk is full --------------------------------------------------------

RUN = """
import sys
from recavsr.errors import InputError
from recavsr.stream import pipeline, resume
from recavsr.stream.engine import upscale
pipeline.MARK_FRAMES, resume.CHECKPOINT_SECONDS = 24, 0.0
def tell(state):
    print(state.stage, state.frames, flush=True)
try:
    upscale(sys.argv[1], sys.argv[2], model="identity", scale=4, progress=tell, resume=True, device="cpu")
except InputError as error:
    sys.exit(str(error))
"""


def start(*arguments: Path, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", RUN, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **pipes, **options)


@pytest.mark.parametrize("after", [2, 9])
def test_a_killed_process_is_continued(film: Path, tmp_path: Path, after: int) -> None:
    out = tmp_path / "out.mp4"
    upscale(film, tmp_path / "whole.mp4", model="identity", scale=4, device="cpu")
    process = start(film, out)
    assert process.stdout
    for _ in range(after):
        assert process.stdout.readline()
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not out.exists()
    process = start(film, out)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    assert same_file(out, tmp_path / "whole.mp4")
    assert left_over(tmp_path) == ["out.mp4"]


def test_two_runs_of_one_output_do_not_meet(film: Path, tmp_path: Path) -> None:
    def second(state: Progress) -> None:
        if state.stage == "upscaling" and not errors:
            process = start(film, tmp_path / "out.mp4")
            errors.append(process.communicate()[1])

    errors: list[str] = []
    upscale(film, tmp_path / "out.mp4", model="identity", scale=4, device="cpu", progress=second)
    assert "another run is writing it just now" in errors[0]
    assert len(times(tmp_path / "out.mp4")) == 153


def test_a_full_disk_is_continued(film: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.mp4"
    upscale(film, tmp_path / "whole.mp4", model="identity", scale=4, device="cpu")
    half = (tmp_path / "whole.mp4").stat().st_size * 6 // 10

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (half, half))

    process = start(film, out, preexec_fn=limit)
    said, errors = process.communicate()
    assert process.returncode == 1
    assert "too large for this disk" in errors
    assert errors.count("\n") == 1
    assert "kept" in said
    assert left_over(tmp_path) == [".out.mp4.recavsr"]
    process = start(film, out)
    process.communicate()
    assert process.returncode == 0
    assert same_file(out, tmp_path / "whole.mp4")
