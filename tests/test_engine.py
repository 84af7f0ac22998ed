"""The engine: sizes, plans, progress, errors in any stage, interrupts, and every line of bad input."""

from __future__ import annotations

import _thread
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from media import bar_numbers, ffmpeg, make_clip, pixels, run_identity, times, video_stream
from recavsr.errors import InputError
from recavsr.stream import engine
from recavsr.stream.batch import FileStatus, is_video_folder, upscale_many
from recavsr.stream.engine import Progress, upscale
from recavsr.stream.pipeline import Channel, Hooks, Stopped, Timing, run_pipeline
from recavsr.stream.plan import OutputKind, SizeRequest
from recavsr.stream.session import Session
from recavsr.stream.step import IdentityModel
from recavsr.video.frames import Frame, Stamp


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a clip of 30 frames, 64x36."""
    return make_clip(tmp_path_factory.mktemp("clip") / "in.mp4", 30)


# -- sizes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "lr_size", "expected"),
    [
        ({}, (36, 64), (144, 256)),
        ({"scale": 1.5}, (181, 321), (272, 482)),
        ({"scale": 0.5}, (181, 321), (91, 161)),
        ({"scale": 3}, (20, 36), (60, 108)),
        ({"size": (1920, 1080)}, (480, 854), (1080, 1920)),
        ({"size": "1920x1080"}, (36, 64), (1080, 1920)),
        ({"height": 1080}, (480, 854), (1080, 1922)),
        ({"width": 1280}, (240, 426), (721, 1280)),
        ({"fit": (1920, 1080)}, (240, 426), (1080, 1917)),
        ({"fit": "1920x1080"}, (360, 480), (1080, 1440)),
        ({"fit": "1920x1080"}, (640, 360), (1080, 608)),
        ({"height": 720}, (180, 320), (720, 1280)),
    ],
)
def test_output_sizes(options: dict[str, Any], lr_size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert SizeRequest(**options).resolve(lr_size) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0},
        {"scale": -1},
        {"scale": float("nan")},
        {"scale": float("inf")},
        {"scale": 1e-9},
        {"scale": 1e9},
        {"size": (0, 720)},
        {"size": "0x0"},
        {"size": "720p"},
        {"size": (99999, 99999)},
        {"fit": "1080p"},
        {"fit": (0, 720)},
        {"fit": "64x64", "height": 64},
        {"height": 0},
        {"height": -5},
        {"width": 0},
        {"width": 1_000_000},
        {"height": 10, "width": 10},
        {"scale": 2, "size": (64, 64)},
    ],
)
def test_senseless_sizes_are_refused(clip: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        upscale(clip, tmp_path / "out.mp4", model=IdentityModel(), **options)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


# -- the run -------------------------------------------------------------------------------------------


def test_report_plan_and_progress(clip: Path, tmp_path: Path) -> None:
    events: list[Progress] = []
    report = run_identity(clip, tmp_path / "out.mp4", progress=events.append)
    assert (report.frames, report.lr_size, report.out_size) == (30, (36, 64), (72, 128))
    assert report.model == "identity"
    assert (report.truncated, report.exit_code, report.warnings) == (False, 0, ())
    assert report.seconds > 0
    assert min(report.decode_seconds, report.model_seconds, report.encode_seconds) > 0
    assert report.fps == pytest.approx(30 / report.seconds)
    assert [e.stage for e in events] == ["loading", "upscaling", "upscaling", "upscaling", "done"][
        : len(events)
    ]
    assert events[-1] == Progress("done", 30, 30, events[-1].rate, 0.0)
    assert all(e.total == 30 for e in events)


def test_a_dry_run_writes_nothing(clip: Path, tmp_path: Path) -> None:
    report = upscale(clip, tmp_path / "out.mkv", model="identity", dry_run=True)
    assert report.dry_run
    assert (report.frames, report.plan.frames, report.plan.out_size) == (0, 30, (144, 256))
    assert report.plan.kind is OutputKind.VIDEO
    assert any("h264, yuv420p" in line for line in report.plan.lines())
    assert list(tmp_path.iterdir()) == []


def test_the_output_has_a_name_of_its_own(tmp_path: Path) -> None:
    source = make_clip(tmp_path / "in.mp4", 2)
    report = upscale(source, model=IdentityModel(), scale=2)
    assert report.output == str(tmp_path / "in_128x72.mp4")
    assert len(times(Path(report.output))) == 2


def test_a_broken_source_ends_well_and_is_reported(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.mp4", tmp_path / "cut.mp4"
    ffmpeg("-i", make_clip(whole, 100), "-c", "copy", "-movflags", "faststart", cut)
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size * 6 // 10])
    report = run_identity(cut, tmp_path / "out.mp4")
    assert report.truncated
    assert report.exit_code == 1
    assert 20 <= report.frames < 100
    assert times(tmp_path / "out.mp4") == [Fraction(n, 25) for n in range(report.frames)]
    same = pixels(tmp_path / "out.mp4")[5].astype(int)
    run_identity(whole, tmp_path / "whole_out.mp4")
    assert np.array_equal(same, pixels(tmp_path / "whole_out.mp4")[5])


def test_a_picture_size_that_changes_ends_the_output(tmp_path: Path) -> None:
    for name, size in (("a", (36, 64)), ("b", (96, 64))):
        source = make_clip(tmp_path / f"{name}.mp4", 30, size)
        ffmpeg("-i", source, "-c", "copy", "-bsf:v", "h264_mp4toannexb", tmp_path / f"{name}.h264")
    both = tmp_path / "both.h264"
    both.write_bytes((tmp_path / "a.h264").read_bytes() + (tmp_path / "b.h264").read_bytes())
    report = run_identity(both, tmp_path / "out.mp4")
    assert report.exit_code == 1
    assert report.cut_short is not None
    assert "size changes from 64x36 to 64x96 at 1.2" in report.cut_short
    assert len(times(tmp_path / "out.mp4")) == report.frames == 30
    with pytest.raises(InputError, match=r"size changes.*split it"):
        run_identity(both, tmp_path / "rest.mp4", start=1.5)
    assert {path.suffix for path in tmp_path.iterdir()} == {".mp4", ".h264"}


class Failing(IdentityModel):
    """Fails, or is interrupted, in its second block."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def step(
        self, state: Any, lr_frames: torch.Tensor, wanted: int | None = None
    ) -> tuple[Any, torch.Tensor]:
        if state.block == 1:
            raise self.error
        return super().step(state, lr_frames, wanted)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), KeyboardInterrupt()])
def test_a_failing_model_and_an_interrupt_leave_nothing(
    clip: Path, tmp_path: Path, error: BaseException
) -> None:
    before = threading.active_count()
    with pytest.raises(type(error)):
        upscale(clip, tmp_path / "out.mp4", model=Failing(error), scale=2)
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() == before


def test_an_interrupt_from_outside_leaves_nothing(tmp_path: Path) -> None:
    source = make_clip(tmp_path / "in.mp4", 60)

    def interrupt(event: Progress) -> None:
        if event.stage == "upscaling":
            _thread.interrupt_main()

    with pytest.raises(KeyboardInterrupt):
        upscale(source, tmp_path / "out.mp4", model=IdentityModel(), scale=2, progress=interrupt)
    assert [p.name for p in tmp_path.iterdir()] == ["in.mp4"]


class Sink:
    """A writer that fails after some frames, or just counts."""

    def __init__(self, fail_after: int | None = None) -> None:
        self.frames: list[Frame] = []
        self.fail_after = fail_after
        self.finished = False
        self.warnings: list[str] = []

    def write(self, frame: Frame) -> None:
        if len(self.frames) == self.fail_after:
            raise InputError("the disk is full")
        self.frames.append(frame)

    def copy(self, packet: object) -> None:
        raise AssertionError("there are no packets")

    def finish(self) -> None:
        self.finished = True

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def numbered(count: int, fail_at: int | None = None, seen: list[int] | None = None) -> Iterator[Frame]:
    """Yield frames whose grey value is their number."""
    for number in range(count):
        if number == fail_at:
            raise InputError("the source is broken")
        if seen is not None:
            seen.append(number)
        yield Frame(np.full((4, 4, 3), number % 256, np.uint8), Stamp(number, 1, Fraction(1, 25)))


def test_pipeline_keeps_frames_and_times_together() -> None:
    sink = Sink()
    timing = run_pipeline(numbered(45), Session(IdentityModel(), (4, 4), (8, 8)), sink)
    assert [(int(f.pixels[0, 0, 0]), f.stamp.pts) for f in sink.frames] == [(n, n) for n in range(45)]
    assert (timing.frames_read, timing.frames_written, sink.finished) == (45, 45, True)


def test_pipeline_errors_of_reader_and_writer_reach_the_caller() -> None:
    session = Session(IdentityModel(), (4, 4), (8, 8))
    sink = Sink()
    with pytest.raises(InputError, match="source is broken"):
        run_pipeline(numbered(100, fail_at=50), session, sink)
    assert not sink.finished
    session.reset()
    sink = Sink(fail_after=10)
    with pytest.raises(InputError, match="disk is full"):
        run_pipeline(numbered(10_000), session, sink)
    assert not sink.finished


def test_a_model_on_the_processor_waits_until_its_last_block_is_written() -> None:
    sink = Sink()
    made: list[int] = []
    written_before: list[int] = []

    class Watching(Session):
        def push(self, frames: np.ndarray) -> list[np.ndarray]:
            written_before.append(len(sink.frames))
            blocks = super().push(frames)
            made.append(sum(map(len, blocks)))
            return blocks

    session = Watching(IdentityModel(), (4, 4), (8, 8))
    run_pipeline(numbered(45), session, sink, Hooks(writes_between_blocks=True))
    assert written_before == [sum(made[:n]) for n in range(len(made))]


@pytest.mark.parametrize(
    ("output", "threads", "waits"), [("out.mp4", 2, True), ("out.mp4", 16, False), ("%05d.png", 2, False)]
)
def test_few_threads_wait_for_an_encoder_that_has_several(
    clip: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, threads: int, waits: bool
) -> None:
    seen: list[bool] = []

    def watching(reader: Any, session: Any, writer: Any, hooks: Hooks) -> Timing:
        seen.append(hooks.writes_between_blocks)
        return run_pipeline(reader, session, writer, hooks)

    monkeypatch.setattr(engine, "run_pipeline", watching)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    upscale(clip, tmp_path / output, model=IdentityModel(), scale=2)
    assert seen == [waits]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own here")
@pytest.mark.parametrize("gives_way", [False, True])
def test_writing_gives_way_to_a_model_on_the_processor_where_asked(gives_way: bool) -> None:
    priorities: set[int] = set()

    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    class Watching(Sink):
        def write(self, frame: Frame) -> None:
            priorities.add(priority())
            started = threading.Thread(target=lambda: priorities.add(priority()))  # as an encoder's
            started.start()
            started.join()

    before = priority()
    session = Session(IdentityModel(), (4, 4), (8, 8))
    run_pipeline(numbered(3), session, Watching(), Hooks(writing_gives_way=gives_way))
    assert priorities == {min(19, before + 5) if gives_way else before}
    assert priority() == before


def test_a_slow_model_stops_the_reader_from_running_ahead() -> None:
    """Bounded memory: the reader is never more than the queue and a block ahead of the writer."""
    seen: list[int] = []
    ahead: list[int] = []

    class Watching(Sink):
        def write(self, frame: Frame) -> None:
            ahead.append(len(seen) - frame.stamp.pts)
            super().write(frame)

    run_pipeline(numbered(2000, seen=seen), Session(IdentityModel(), (4, 4), (8, 8)), Watching())
    assert max(ahead) <= 16 + 2 * 21 + 8 + 2


def test_a_channel_wakes_up_when_the_pipeline_stops() -> None:
    stop = threading.Event()
    channel: Channel[int] = Channel(1, stop)
    channel.put(1)
    stop.set()
    with pytest.raises(Stopped):
        channel.put(2)
    with pytest.raises(Stopped):
        next(iter(channel))


# -- pipes ---------------------------------------------------------------------------------------------

PIPE = """
import sys
from recavsr.errors import InputError
from recavsr.stream.engine import upscale
from recavsr.stream.step import IdentityModel
try:
    report = upscale("-", sys.argv[1], model=IdentityModel(), scale=2)
except InputError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
print(report.cut_short, file=sys.stderr)
sys.exit(report.exit_code)
"""


def pipe(data: bytes, output: object, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Upscale y4m from standard input in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", PIPE, str(output)], input=data, capture_output=True, check=False, **options
    )


def test_pipes_that_end_badly(tmp_path: Path) -> None:
    y4m = tmp_path / "in.y4m"
    ffmpeg("-f", "lavfi", "-i", "testsrc2=s=64x36:r=25:d=1", "-pix_fmt", "yuv420p", y4m)
    data = y4m.read_bytes()
    for bad in (b"", b"this is not y4m" * 100, data[:40]):
        done = pipe(bad, tmp_path / "out.mp4")
        assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
        assert not (tmp_path / "out.mp4").exists()
    done = pipe(data[: len(data) // 2], tmp_path / "out.mp4")
    assert done.returncode == 1
    assert b"breaks off inside frame 13" in done.stderr
    assert len(times(tmp_path / "out.mp4")) == 12
    done = pipe(data, "-")
    assert done.returncode == 0
    (tmp_path / "back.y4m").write_bytes(done.stdout)
    assert video_stream(tmp_path / "back.y4m")["width"] == 128
    assert len(times(tmp_path / "back.y4m")) == 25


def test_a_reader_of_the_pipe_that_goes_away_is_one_line(tmp_path: Path) -> None:
    y4m = tmp_path / "in.y4m"
    ffmpeg("-f", "lavfi", "-i", "testsrc2=s=320x180:r=25:d=2", "-pix_fmt", "yuv420p", y4m)
    with y4m.open("rb") as source:
        process = subprocess.Popen(
            [sys.executable, "-c", PIPE, "-"], stdin=source, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert process.stdout
        assert process.stderr
        process.stdout.read(100)
        process.stdout.close()
        errors = process.stderr.read().decode()
        assert process.wait() == 2
    assert "has stopped" in errors
    assert errors.count("\n") == 1


# -- folders -------------------------------------------------------------------------------------------


def test_folders_of_videos(tmp_path: Path) -> None:
    folder = tmp_path / "films"
    folder.mkdir()
    make_clip(folder / "a.mp4", 3)
    make_clip(folder / "a.avi", 3, codec="mpeg4")
    (folder / "notes.txt").write_text("words")
    (folder / ".hidden").write_text("words")
    assert is_video_folder(folder)
    assert not is_video_folder(tmp_path / "nowhere")
    with pytest.raises(InputError, match="a folder of videos"):
        run_identity(folder, tmp_path / "out")
    report = upscale_many(folder, tmp_path / "out", model=IdentityModel(), scale=2)
    assert [(Path(r.source).name, Path(r.output).name, r.status) for r in report.files] == [
        ("a.avi", "a.avi.mp4", FileStatus.DONE),
        ("a.mp4", "a.mp4", FileStatus.DONE),
        ("notes.txt", "notes.mp4", FileStatus.SKIPPED),
    ]
    with pytest.raises(InputError, match="is the source folder itself"):
        upscale_many(folder, folder, model=IdentityModel())


def test_an_unexpected_failure_does_not_end_a_batch(tmp_path: Path) -> None:
    folder = tmp_path / "films"
    folder.mkdir()
    make_clip(folder / "long.mp4", 30)
    make_clip(folder / "short.mp4", 3)
    report = upscale_many(folder, tmp_path / "out", model=Failing(RuntimeError("out of\nmemory")), scale=2)
    assert [result.status for result in report.files] == [FileStatus.FAILED, FileStatus.DONE]
    assert report.files[0].reason == f"{folder / 'long.mp4'}: unexpected RuntimeError: out of memory"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["short.mp4"]
    with pytest.raises(KeyboardInterrupt):
        upscale_many(folder, tmp_path / "two", model=Failing(KeyboardInterrupt()), scale=2)


# -- memory --------------------------------------------------------------------------------------------

PEAK = """
import resource, sys
from recavsr.stream.engine import upscale
from recavsr.stream.step import IdentityModel
report = upscale(sys.argv[1], sys.argv[2], model=IdentityModel(), scale=2, preset="ultrafast")
print(report.frames, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_length(tmp_path: Path) -> None:
    """Peak resident memory of 3600 frames within 3 % + 50 MB of that of 300, with sound to carry along."""
    peaks = {}
    for count in (300, 3600):
        source = tmp_path / f"in{count}.mp4"
        ffmpeg("-f", "lavfi", "-i", "testsrc2=s=128x72:r=25", "-f", "lavfi", "-i", "sine", "-frames:v", count,
               "-shortest", "-pix_fmt", "yuv420p", "-preset", "ultrafast", source)  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-c", PEAK, source, tmp_path / f"out{count}.mp4"],
            capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        frames, kilobytes = map(int, done.stdout.split())
        assert frames == count
        peaks[count] = kilobytes / 1024
    assert peaks[3600] <= 1.03 * peaks[300] + 50, peaks


def test_frame_numbers_survive_trims_and_scales(tmp_path: Path) -> None:
    source = tmp_path / "in.mp4"
    strip = "geq=lum='if(lt(Y,16),if(mod(floor(N/pow(2,floor(X/8))),2),235,16),128)':cb=128:cr=128"
    ffmpeg("-f", "lavfi", "-i", f"color=gray:s=128x72:r=25,{strip}", "-frames:v", 60, "-pix_fmt", "yuv420p",
           "-c:v", "libx264", "-qp", 0, source)  # fmt: skip
    run_identity(source, tmp_path / "out.mp4", scale=2.5, start=1, frames=30, quality=20)
    assert bar_numbers(tmp_path / "out.mp4", 2.5) == list(range(25, 55))
