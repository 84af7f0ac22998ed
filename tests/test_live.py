"""Live: one clock across drop-outs, sound with its picture, a model that is late, sources that come back."""

from __future__ import annotations

import _thread
import gc
import importlib.util
import itertools
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest

from conftest import REPOSITORY
from media import tell_times, times
from recavsr.cli.main import run
from recavsr.errors import InputError, PartialError
from recavsr.geometry import BlockPlan
from recavsr.stream.live import LiveEvent, LiveReport, live
from recavsr.stream.live_flow import Backoff, Inbox, Ladder, LatencyHistogram, Timeline
from recavsr.stream.step import IdentityModel, IdentityState
from recavsr.video.frames import Stamp
from recavsr.video.live_sink import LiveWriter, SinkLost, choose_picture, resolve_destination
from recavsr.video.live_source import LiveFrame, LiveReader, SoundPacket, resolve_live
from recavsr.video.relay import Relay
from recavsr.video.source import shown_name

RATE = 25
PULSE_FRAMES = 2  # of every second are white, and as long does the tone sound


@pytest.fixture(scope="module")
def loop() -> ModuleType:
    """Load the benchmark of the live loop, whose measure the tests share."""
    path = REPOSITORY / "benchmarks" / "live_loop.py"
    spec = importlib.util.spec_from_file_location("live_loop", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["live_loop"] = module
    spec.loader.exec_module(module)
    return module


def make_pulses(path: Path, seconds: float, sound: str = "aac") -> Path:
    """Write a clip with a flash and a tone at the beginning of every second."""
    rate = 48000
    moments = np.arange(int(seconds * rate)) / rate
    tone = 0.8 * np.sin(2 * np.pi * 1000 * moments) * (moments % 1 < PULSE_FRAMES / RATE)
    with av.open(str(path), "w") as container:
        video = container.add_stream("libx264", rate=RATE, options={"tune": "zerolatency", "g": "25"})
        video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
        audio = container.add_stream(sound, rate=rate, layout="mono")
        chunk = audio.codec_context.frame_size or 1024
        pictures = [
            np.full((48, 64, 3), 235 if n % RATE < PULSE_FRAMES else 40, np.uint8) for n in range(RATE)
        ]
        for number in range(int(seconds * RATE)):
            image = av.VideoFrame.from_ndarray(pictures[number % RATE], format="rgb24")
            container.mux(video.encode(image))
            for start in range(0, len(tone), chunk):
                if number == int(start / rate * RATE) and start + chunk <= len(tone):
                    samples = tone[start : start + chunk].astype(np.float32)[None]
                    piece = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
                    piece.sample_rate, piece.pts, piece.time_base = rate, start, Fraction(1, rate)
                    form = audio.codec_context.format
                    resampler = av.AudioResampler(form, "mono", rate)
                    for ready in resampler.resample(piece):
                        container.mux(audio.encode(ready))
        for stream in (video, audio):
            container.mux(stream.encode(None))
    return path


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 frames with sound, 64x48; flashes at 0 and 1 s."""
    return make_pulses(tmp_path_factory.mktemp("live") / "in.mp4", 1.2)


def run_identity(source: Path | str, output: Path | str, **options: Any) -> LiveReport:
    """Run live with the model that only resizes, x2 unless told otherwise."""
    settings: dict[str, Any] = {"model": IdentityModel(blocks=BlockPlan(first=2)), "scale": 2}
    return live(source, output, **(settings | options))


class SlowModel(IdentityModel):
    """Resizes, and takes its time for every frame."""

    def __init__(self, seconds: float, height: int = 0) -> None:
        super().__init__(blocks=BlockPlan(first=2))
        self._seconds, self._height = seconds, height

    def step(self, state: IdentityState, lr_frames: Any, wanted: int | None = None) -> Any:
        """Sleep (below a certain height not), then resize."""
        if lr_frames.shape[-2] >= self._height:
            time.sleep(self._seconds * lr_frames.shape[2])
        return super().step(state, lr_frames, wanted)


def frame(number: int, arrived: float = 0.0, rate: int = RATE) -> LiveFrame:
    return LiveFrame(np.zeros((2, 2, 3), np.uint8), Stamp(number, 1, Fraction(1, rate)), arrived=arrived)


# -- one clock -----------------------------------------------------------------------------------------


def test_the_clock_starts_at_zero_and_keeps_the_sources_times() -> None:
    timeline = Timeline(patience=5)
    starts = [timeline.place(frame(n), n / RATE)[0].stamp.time for n in (1000, 1001, 1003, 1004)]
    assert starts == [Fraction(n, RATE) for n in (0, 1, 3, 4)]


def test_a_new_connection_goes_on_as_late_as_it_came() -> None:
    timeline = Timeline(patience=5)
    for n in range(10):
        timeline.place(frame(n), n / RATE)
    timeline.lose()
    assert timeline.offset is None
    placed, gap = timeline.place(frame(777), 9 / RATE + 3.5)
    assert placed.stamp.time == Fraction(9, RATE) + Fraction(7, 2)
    assert gap == 3.5
    assert timeline.offset == placed.stamp.time - Fraction(777, RATE)  # sound moves by the same
    after, gap = timeline.place(frame(778), 9 / RATE + 3.54)
    assert (after.stamp.time - placed.stamp.time, gap) == (Fraction(1, RATE), 0)


def test_a_clock_that_jumps_is_a_new_one() -> None:
    for jump in (-500, 100_000):
        timeline = Timeline(patience=5)
        timeline.place(frame(600), 0.0)
        placed, gap = timeline.place(frame(600 + jump), 0.08)
        assert placed.stamp.time == Fraction(2, RATE)
        assert gap > 0


def test_small_steps_back_are_repaired_and_silence_is_a_gap() -> None:
    timeline = Timeline(patience=5)
    first, _ = timeline.place(frame(10), 0.0)
    second, gap = timeline.place(frame(9), 0.04)
    assert first.stamp.pts < second.stamp.pts
    assert gap == 0
    _, gap = timeline.place(frame(10 + 6 * RATE), 6.04)  # its clock ran on
    assert gap == pytest.approx(6, abs=0.1)


def test_a_picture_held_back_until_the_connection_is_given_up_is_no_drop_out() -> None:
    timeline = Timeline(patience=2)
    timeline.place(frame(0), 0.0)
    assert timeline.place(frame(1), 2.1)[1] == 0
    timeline.lose()
    placed, gap = timeline.place(frame(0), 5.0)
    assert gap == pytest.approx(4.96)
    assert float(placed.stamp.time) == pytest.approx(5.0)
    pipe = Timeline(patience=2, own_clock=False)
    pipe.place(frame(0), 0.0)
    assert pipe.place(frame(1), 2.1)[1] == pytest.approx(2.1)


# -- what waits for the model --------------------------------------------------------------------------


def numbers(inbox: Inbox) -> list[int]:
    """Take all that waits; return the frames' numbers."""
    found = []
    while inbox.frames:
        item = inbox.take()
        found += [item.stamp.pts] if isinstance(item, LiveFrame) else []
    return found


def test_the_newest_frames_win() -> None:
    inbox = Inbox("drop", 8, threading.Event())
    inbox.pace = 0.1  # ten frames a second are worked off
    inbox._due = -1e9
    for n in range(40):
        inbox.put(frame(n, rate=5))  # slower than the model, so that none is left out beforehand
    assert numbers(inbox) == list(range(30, 40))
    assert inbox.dropped == 30


def test_frames_are_left_out_evenly() -> None:
    inbox = Inbox("drop", 8, threading.Event())
    inbox.pace = 3 / RATE
    taken = []
    for n in range(60):
        inbox.put(frame(n))
        taken += numbers(inbox)
    assert set(np.diff(taken)) == {3}
    assert len(taken) + inbox.dropped == 60


def test_a_model_that_waits_gets_every_frame_however_slow_it_was() -> None:
    inbox = Inbox("drop", 8, threading.Event())
    inbox.pace = 10 / RATE  # two blocks were held up
    taken = []
    for n in range(8):
        assert inbox.take() is None
        inbox.put(frame(n))
        taken += numbers(inbox)
    assert taken == list(range(8))
    for n in range(8, 30):  # now it works
        inbox.put(frame(n))
    assert numbers(inbox) == [17, 27]


def test_waiting_holds_the_source_up_and_loses_nothing() -> None:
    inbox = Inbox("wait", 4, threading.Event())

    def fill() -> None:
        for n in range(50):
            inbox.put(frame(n))
        inbox.close()

    filling = threading.Thread(target=fill)
    filling.start()
    taken = []
    while not inbox.ended:
        assert inbox.frames <= 8
        item = inbox.take()
        taken += [item.stamp.pts] if isinstance(item, LiveFrame) else []
    filling.join()
    assert taken == list(range(50))


def test_sound_is_never_dropped() -> None:
    inbox = Inbox("drop", 2, threading.Event())
    inbox.pace = 1.0
    for n in range(20):
        inbox.put(SoundPacket(0, av.Packet(b"."), Fraction(n)))
        inbox.put(frame(n, rate=1))
    inbox.close()
    kinds = [type(item) for item in iter(inbox.take, None)]
    assert kinds.count(SoundPacket) == 20
    assert kinds.count(LiveFrame) == 2


def test_the_ladder_goes_down_where_frames_pile_up_and_up_after_calm() -> None:
    ladder = Ladder()
    assert ladder.after_block(5, 0.0)
    assert not ladder.after_block(4, 0.1)  # it works them off
    assert ladder.after_block(4, 0.2)
    assert not ladder.after_block(9, 0.3)
    assert ladder.level == 2
    assert not ladder.after_block(0, 10.2)
    assert ladder.after_block(0, 10.4)
    assert ladder.level == 1
    assert ladder.after_block(1, 11.0)  # it was too early: the next attempt waits longer
    assert not ladder.after_block(0, 30.9)
    assert ladder.after_block(0, 31.1)


def test_latency_percentiles_are_within_two_percent() -> None:
    seconds = np.random.default_rng(0).lognormal(-2, 1, 5000)
    histogram = LatencyHistogram()
    for value in seconds:
        histogram.add(value)
    for percent in (50, 95, 99):
        expected = np.percentile(seconds, percent, method="inverted_cdf")
        assert histogram.percentile(percent) == pytest.approx(expected, rel=0.021)
    assert histogram.percentile(100) == histogram.largest == seconds.max()
    assert len(histogram._counts) < 1000


def test_backoff_doubles_up_to_a_cap_and_ends() -> None:
    backoff = Backoff(1e6)
    waits = [backoff.next_wait() for _ in range(8)]
    assert waits == [0.25, 0.5, 1, 2, 4, 8, 8, 8]
    assert Backoff(0).left == 0
    assert Backoff(0.1).next_wait() <= 0.1


# -- names ---------------------------------------------------------------------------------------------


def test_secrets_are_not_shown() -> None:
    assert shown_name("rtmp://live.example/app/secret?token=1") == "rtmp://live.example/app/..."
    assert shown_name("rtsp://me:word@10.0.0.1:554/cam") == "rtsp://10.0.0.1:554/cam"
    assert shown_name("srt://host:1?passphrase=word") == "srt://host:1"


@pytest.mark.parametrize(
    ("source", "output", "options", "said"),
    [
        ("gopher://host/x", "out.mkv", [], "gopher:// is not known"),
        ("missing.mp4", "out.mkv", [], "no such file"),
        ("/dev/video63", "out.mkv", [], "no such camera"),
        ("camera:63", "out.mkv", [], "no such camera"),
        ("IN", "gopher://host/x", [], "no output that can be streamed to"),
        ("IN", "srt://", [], "lacks a host"),
        ("IN", "out.avi", [], "can't write .avi"),
        ("IN", "nowhere/out.mkv", [], "does not exist"),
        ("IN", "IN", [], "exists already"),
        ("IN", "out.mkv", ["--late", "soon"], "late is one of drop, wait, lower"),
        ("IN", "out.mkv", ["--sound", "loud"], "sound is one of"),
        ("IN", "out.mkv", ["--first-block", "7"], "1 to 6 latents"),
        ("IN", "out.mkv", ["--bitrate", "fast"], "--bitrate"),
        ("IN", "out.mkv", ["--input-option", "x"], "KEY=VALUE"),
        ("IN", "out.webm", ["--codec", "h264"], "does not go into .webm"),
        ("udp://127.0.0.1:9", "out.mkv", ["--listen"], "--listen is for"),
        ("rtmp://127.0.0.1:9/app/key", "out.mkv", ["--reconnect", "0"], "refused"),
        ("tcp://127.0.0.1:9", "out.mkv", ["--reconnect", "0"], "refused"),
        ("IN", "tcp://127.0.0.1:9", ["--reconnect", "0"], "refused"),
        ("IN", "tcp://127.0.0.1:9", ["--reconnect", "30"], "refused"),  # the source ends first
        ("IN", "rtmp://127.0.0.1:9/app/key", ["--reconnect", "0"], "refused"),
    ],
)
def test_what_can_not_be_is_one_line(
    source: str,
    output: str,
    options: list[str],
    said: str,
    clip: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    named = [str(clip) if name == "IN" else name for name in (source, output)]
    assert run(["live", *named, "--model", "identity", *options]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert said in lines[-1]
    assert not any("Traceback" in line for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_a_pause_is_no_sign_of_a_connection(clip: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection is made by a thread of libav; that it was refused comes back with a later frame."""
    written: list[LiveFrame] = []

    def write(writer: LiveWriter, frame: LiveFrame) -> list[float]:
        if len(written) == 3:
            raise SinkLost("connection refused")
        time.sleep(0.6)  # as if the machine were busy with other work
        written.append(frame)
        return []

    monkeypatch.setattr(LiveWriter, "write", write)
    events: list[LiveEvent] = []
    with pytest.raises(InputError, match="can't be opened"):
        run_identity(clip, "tcp://127.0.0.1:9", reconnect=0.0, on_event=events.append)
    assert not any(event.facts.get("side") == "output" for event in events)


def test_srt_needs_an_ffmpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    for resolve in (resolve_live, resolve_destination):
        with pytest.raises(InputError, match="srt needs an ffmpeg executable"):
            resolve("srt://127.0.0.1:9000")


# -- files in real time --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["out.mkv", "out.mp4", "out.ts", "out.flv", "out.m3u8"])
def test_every_frame_and_the_sound_in_every_container(
    name: str, clip: Path, tmp_path: Path, loop: ModuleType
) -> None:
    events: list[LiveEvent] = []
    output = tmp_path / name
    began = time.monotonic()
    report = run_identity(clip, output, on_event=events.append)
    assert time.monotonic() - began > 1.1  # in real time
    assert (report.frames, report.dropped, report.exit_code) == (30, 0, 0)
    assert report.out_size == (96, 128)
    shown = times(output)
    steps = {round(float(b - a), 3) for a, b in itertools.pairwise(shown)}
    assert len(shown) == 30
    assert steps <= {0.039, 0.04, 0.041}
    offsets = loop.offsets(*loop.pulses(output)[:2])
    assert len(offsets) == 2
    assert max(map(abs, offsets)) < 0.040
    assert 0 < report.latency.percentile(50) <= report.latency.percentile(95) <= report.latency.largest
    assert report.latency.largest > 7 / RATE  # a block has to be complete
    assert [event.facts["side"] for event in events if event.kind == "connected"] == ["source", "output"]


def test_sound_that_the_output_can_not_carry_is_encoded(tmp_path: Path, loop: ModuleType) -> None:
    source = make_pulses(tmp_path / "in.mov", 1.2, "pcm_s16le")
    run_identity(source, tmp_path / "out.flv")
    with av.open(str(tmp_path / "out.flv")) as container:
        assert container.streams.audio[0].codec_context.name == "aac"
    assert max(map(abs, loop.offsets(*loop.pulses(tmp_path / "out.flv")[:2]))) < 0.040


def test_sound_may_be_left_out(clip: Path, tmp_path: Path) -> None:
    run_identity(clip, tmp_path / "out.mkv", sound="none", scale=1)
    with av.open(str(tmp_path / "out.mkv")) as container:
        assert [stream.type for stream in container.streams] == ["video"]


def feed_pipe(
    pipe: Path, frames: int, before: Callable[[int], None] = lambda number: None
) -> threading.Thread:
    """Make a named pipe and start a thread that writes y4m into it; `before` is called for every frame."""
    os.mkfifo(pipe)

    def feed() -> None:
        with pipe.open("wb", buffering=0) as opened:
            opened.write(f"YUV4MPEG2 W64 H48 F{RATE}:1 C420jpeg\n".encode())
            for number in range(frames):
                before(number)
                opened.write(b"FRAME\n" + bytes([5 * number]) * (64 * 48 * 3 // 2))

    feeding = threading.Thread(target=feed)
    feeding.start()
    return feeding


def test_a_pipe_waits_for_the_model(tmp_path: Path) -> None:
    feeding = feed_pipe(pipe := tmp_path / "pipe.y4m", 40)
    report = run_identity(pipe, tmp_path / "out.mkv", model=SlowModel(0.01))
    feeding.join()
    gc.collect()
    assert str(pipe) not in [os.path.realpath(handle) for handle in Path("/proc/self/fd").glob("*")]
    assert (report.frames, report.dropped, report.exit_code) == (40, 0, 0)
    assert len(times(tmp_path / "out.mkv")) == 40


@pytest.mark.parametrize("count", [1, 7])
def test_what_has_come_is_shown_where_the_source_falls_silent(tmp_path: Path, count: int) -> None:
    shown, in_time = threading.Event(), []

    def before(number: int) -> None:
        if number == count:  # the first block takes five: one or two are in the session
            in_time.append(shown.wait(20))

    def note(event: LiveEvent) -> None:
        if event.kind == "latency" and event.facts["frames"] == count:
            shown.set()

    feeding = feed_pipe(pipe := tmp_path / "pipe.y4m", 12, before)
    report = run_identity(pipe, tmp_path / "out.mkv", report_every=0.1, on_event=note)
    feeding.join()
    assert in_time == [True]
    assert (report.frames, report.dropouts) == (12, 0)


def test_y4m_repeats_a_frame_until_the_next_ones_time(clip: Path, tmp_path: Path) -> None:
    destination = resolve_destination(str(tmp_path / "out.y4m"))
    with LiveReader(resolve_live(str(clip))) as reader:
        picture = choose_picture(reader.info, destination, (96, 128), Fraction(1))
    writer = LiveWriter(destination, picture, ())
    for number in (0, 1, 5, 5, 6):
        pixels = np.full((96, 128, 3), 40 * number, np.uint8)
        stamp = Stamp(number, 1, Fraction(1, RATE))
        writer.write(LiveFrame(pixels, stamp, arrived=time.monotonic()))
    writer.close()
    with av.open(str(tmp_path / "out.y4m")) as container:
        levels = [image.to_ndarray(format="rgb24")[0, 0, 0] for image in container.decode(video=0)]
    assert [round(level / 40) for level in levels] == [0, 1, 1, 1, 1, 5, 6]


# -- a model that is too slow --------------------------------------------------------------------------


def test_dropping_keeps_up_and_counts_what_it_drops(tmp_path: Path) -> None:
    clip = make_pulses(tmp_path / "in.mp4", 2.0)
    report = run_identity(clip, tmp_path / "out.mkv", model=SlowModel(2.5 / RATE), late="drop")
    assert report.frames + report.dropped == 50
    assert report.frames >= 5
    assert report.dropped > 0
    shown = times(tmp_path / "out.mkv")
    assert len(shown) == report.frames
    assert shown[-1] > 1.5  # to the end


@pytest.mark.parametrize("native_scale", [0.0, 4.0])
def test_lowering_keeps_every_frame(tmp_path: Path, native_scale: float) -> None:
    clip = make_pulses(tmp_path / "in.mp4", 2.0)
    levels: list[int] = []

    def note(event: LiveEvent) -> None:
        levels.extend([event.facts["level"]] if event.kind == "level" else [])

    # Too slow at the size that it works at, x2 or by way of x4, fast at half of that.
    model = SlowModel(1.6 / RATE, height=192 if native_scale else 96)
    model.native_scale = native_scale
    report = run_identity(clip, tmp_path / "out.mkv", model=model, late="lower", on_event=note)
    assert levels[0] == 1  # and perhaps lower still, on a busy machine
    assert report.frames + report.dropped == 50
    assert report.frames >= 40  # a machine that stands still for two seconds drops some all the same
    with av.open(str(tmp_path / "out.mkv")) as container:
        sizes = {(image.width, image.height) for image in container.decode(video=0)}
    assert sizes == {(128, 96)}


# -- interrupts and drop-outs --------------------------------------------------------------------------


@contextmanager
def interrupted_when(something: Callable[[], bool], seconds: float) -> Iterator[None]:
    """Interrupt the main thread inside a `with` block when something is true, or after some seconds."""
    over = threading.Event()

    def watch() -> None:
        end = time.monotonic() + seconds
        while not something() and time.monotonic() < end:
            if over.wait(0.05):
                return
        _thread.interrupt_main()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def test_an_interrupt_leaves_a_valid_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    clip = make_pulses(tmp_path / "in.mp4", 20.0)
    output = tmp_path / "out.mp4"
    arguments = ["live", str(clip), str(output), "--model", "identity", "--scale", "2", "--json"]
    with interrupted_when(lambda: any(p.stat().st_size > 4000 for p in tmp_path.glob(".recavsr*")), 10):
        code = run(arguments)
    assert code == 130
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    (result,) = [event for event in said if event["event"] == "result"]
    assert 0 < result["frames"] == len(times(output)) < 500
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.mp4", "out.mp4"]


class Director(threading.Thread):
    """Plays the source of a live run in a thread, and interrupts the run at the end."""

    def __init__(self, play: Callable[[Director], None]) -> None:
        super().__init__(daemon=True)
        self.events: list[LiveEvent] = []
        self._play = play
        self.over = threading.Event()  # the run has ended by itself
        self.error: BaseException | None = None

    def run(self) -> None:
        """Play, whatever happens interrupt."""
        try:
            self._play(self)
        except BaseException as error:
            self.error = error
        finally:
            if not self.over.is_set():
                _thread.interrupt_main()

    def of(self, kind: str) -> list[LiveEvent]:
        """Return the events of a kind so far."""
        return [event for event in list(self.events) if event.kind == kind]

    def wait_for(self, kind: str, count: int = 1) -> None:
        """Wait for the count-th event of a kind."""
        end = time.monotonic() + 20
        while len(self.of(kind)) < count:
            assert time.monotonic() < end, f"no {kind}: {self.events}"
            time.sleep(0.02)


def mpegts(path: Path, clip: Path) -> bytes:
    """Return a clip as MPEG-TS."""
    with av.open(str(clip)) as source, av.open(str(path), "w", format="mpegts") as target:
        copies = {s.index: target.add_stream_from_template(s, opaque=True) for s in source.streams}
        for packet in source.demux():
            if packet.dts is not None:
                packet.stream = copies[packet.stream_index]
                target.mux(packet)
    return path.read_bytes()


def send(port: int, data: bytes, seconds: float) -> None:
    """Send a stream over TCP at an even pace, then break the connection."""
    for _ in range(100):
        try:
            connection = socket.create_connection(("127.0.0.1", port), timeout=5)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    with connection:
        pieces = max(1, int(seconds / 0.02))
        size = -(-len(data) // pieces)
        for start in range(0, len(data), size):
            connection.sendall(data[start : start + size])
            time.sleep(0.02)


def test_drop_outs_are_survived_and_reported(tmp_path: Path, loop: ModuleType) -> None:
    data = mpegts(tmp_path / "in.ts", make_pulses(tmp_path / "in.mp4", 1.5))
    port = loop.free_port()

    def play(director: Director) -> None:
        for number in range(3):
            director.wait_for("message" if not number else "dropout", max(number, 1))
            send(port, data, 1.2)
        director.wait_for("dropout", 3)
        time.sleep(0.6)

    director = Director(play)
    director.start()
    output = tmp_path / "out.mkv"
    url = f"tcp://127.0.0.1:{port}"
    try:
        report = run_identity(url, output, listen=True, late="wait", on_event=director.events.append)
    finally:
        director.over.set()
    director.join()
    assert director.error is None
    assert (report.interrupted, report.dropouts) == (True, 3)
    assert [event.facts["side"] for event in director.of("dropout")] == ["source"] * 3
    back = [event.facts["gap_s"] for event in director.of("reconnected")]
    assert len(back) == 2
    flashes, beeps, frames = loop.pulses(output)
    assert frames == report.frames >= 75
    offsets = loop.offsets(flashes, beeps)
    assert len(offsets) >= 3
    assert max(map(abs, offsets)) < 0.040
    shown = times(output)
    jumps = [float(b - a) for a, b in itertools.pairwise(shown) if b - a > Fraction(1, 10)]
    assert jumps == pytest.approx(back, abs=0.05)


class Receiver(threading.Thread):
    """Takes connections one after the other, as many as there are events; hangs up when an event is set."""

    def __init__(self, port: int, hang_ups: list[threading.Event]) -> None:
        super().__init__(daemon=True)
        self._server = socket.create_server(("127.0.0.1", port))
        self._hang_ups = hang_ups
        self.received: list[bytes] = []

    def run(self) -> None:
        """Receive."""
        for hang_up in self._hang_ups:
            connection, _ = self._server.accept()
            data = b""
            with connection:
                while not hang_up.is_set() and (piece := connection.recv(65536)):
                    data += piece
            self.received.append(data)
        self._server.close()


def is_open(event: LiveEvent) -> bool:
    """Say whether a run tells that its output is open: before, who hangs up counts as not there yet."""
    return event.kind == "connected" and event.facts["side"] == "output"


def test_an_output_that_hangs_up_is_opened_again(tmp_path: Path, loop: ModuleType) -> None:
    clip = make_pulses(tmp_path / "in.mp4", 5.0)
    port = loop.free_port()
    hang_up, never = threading.Event(), threading.Event()
    receiver = Receiver(port, [hang_up, never])
    receiver.start()
    events: list[LiveEvent] = []

    def note(event: LiveEvent) -> None:
        events.append(event)
        if is_open(event):
            hang_up.set()

    report = run_identity(
        clip, f"tcp://127.0.0.1:{port}", scale=1, output_options={"muxrate": "400000"}, on_event=note
    )
    receiver.join(10)
    told = [event.kind for event in events if event.facts.get("side") == "output"]
    assert told == ["connected", "dropout", "reconnected"]
    assert report.undelivered > 0
    assert report.frames + report.undelivered == 125
    (tmp_path / "second.ts").write_bytes(receiver.received[1])
    assert len(times(tmp_path / "second.ts")) > 20


def test_an_output_that_stays_away_ends_the_run(tmp_path: Path, loop: ModuleType) -> None:
    clip = make_pulses(tmp_path / "in.mp4", 8.0)
    port = loop.free_port()
    hang_up = threading.Event()
    receiver = Receiver(port, [hang_up])
    receiver.start()
    with pytest.raises(PartialError, match="not back in 1 s"):
        run_identity(
            clip,
            f"tcp://127.0.0.1:{port}",
            scale=1,
            reconnect=1.0,
            output_options={"muxrate": "400000"},
            on_event=lambda event: hang_up.set() if is_open(event) else None,
        )


def test_a_source_that_does_not_come_back_ends_the_run(tmp_path: Path, loop: ModuleType) -> None:
    data = mpegts(tmp_path / "in.ts", make_pulses(tmp_path / "in.mp4", 1.0))
    port = loop.free_port()
    sending = threading.Thread(target=send, args=(port, data, 0.5))
    sending.start()
    url = f"tcp://127.0.0.1:{port}"
    report = run_identity(url, tmp_path / "out.mkv", listen=True, late="wait", reconnect=0.5)
    sending.join()
    assert report.exit_code == 0  # it said that this is the end
    assert report.frames == len(times(tmp_path / "out.mkv")) >= 24


# -- an ffmpeg beside us --------------------------------------------------------------------------------


def coded(path: Path) -> dict[str, list[bytes]]:
    """Return the packets of a file by codec."""
    found: dict[str, list[bytes]] = {}
    with av.open(str(path)) as container:
        for packet in container.demux():
            if packet.size:
                found.setdefault(packet.stream.codec_context.name, []).append(bytes(packet))
    return found


def test_the_relay_carries_packets_as_they_are(clip: Path, tmp_path: Path, ffmpeg: str) -> None:
    source, sent, received = (tmp_path / name for name in ("in.ts", "sent.ts", "received.ts"))
    data = mpegts(source, clip)
    sender = Relay(f"file:{sent}", sending=True)
    sender.write(data)
    sender.close()
    receiver = Relay(f"file:{source}", sending=False, patience=30, connect_seconds=30)
    received.write_bytes(b"".join(iter(partial(receiver.read, 65536), b"")))
    receiver.close()
    assert set(coded(source)) == {"h264", "aac"}
    assert coded(sent) == coded(received) == coded(source)


def test_silence_of_the_relay_is_told_once(tmp_path: Path, loop: ModuleType, ffmpeg: str) -> None:
    relay = Relay(f"tcp://127.0.0.1:{loop.free_port()}?listen=1", sending=False, connect_seconds=0.3)
    assert relay.read(100) == b""
    began = time.monotonic()
    assert relay.read(100) == b""
    assert time.monotonic() - began < 0.2
    assert relay.why_ended() == "no data for 0.3 s"
    relay.close()


def test_a_relay_that_hears_nothing_ends_and_keeps_nothing_back(
    tmp_path: Path, clip: Path, loop: ModuleType, ffmpeg: str
) -> None:
    data, over = mpegts(tmp_path / "in.ts", clip), threading.Event()
    address = ("127.0.0.1", loop.free_port())

    def send_and_stay() -> None:
        for _ in range(200):
            with (
                suppress(ConnectionRefusedError),
                socket.create_connection(address) as connection,
            ):
                connection.sendall(data)
                over.wait(20)
                return
            time.sleep(0.05)

    sending = threading.Thread(target=send_and_stay)
    sending.start()
    relay = Relay(f"tcp://127.0.0.1:{address[1]}?listen=1", sending=False, patience=0.5, connect_seconds=30)
    received = tmp_path / "received.ts"
    received.write_bytes(b"".join(iter(partial(relay.read, 65536), b"")))
    over.set()
    sending.join()
    relay.close()
    assert coded(received) == coded(tmp_path / "in.ts")
    assert relay.why_ended() == "no data for 0.5 s"


def test_a_relay_tells_no_secrets(ffmpeg: str, loop: ModuleType) -> None:
    url = f"tcp://127.0.0.1:{loop.free_port()}?passphrase=secret"
    relay = Relay(url, sending=False)
    assert relay.read(1) == b""
    relay.close()
    reason = relay.why_ended()
    assert reason is not None
    assert "refused" in reason
    assert "secret" not in reason


# -- playlists -----------------------------------------------------------------------------------------


@pytest.fixture
def web(tmp_path: Path, loop: ModuleType) -> Iterator[str]:
    """Serve `tmp_path` over HTTP; the value is its address."""
    with loop.served(tmp_path) as address:
        yield address


def publish(playlist: Path, clip: Path, *, ends: bool, pause: float = 0.0) -> None:
    """Write a clip as HLS of 1 s segments, with a pause before its last second."""
    flags = "temp_file" if ends else "temp_file+omit_endlist"
    options = {"hls_time": "1", "hls_list_size": "0", "hls_flags": flags}
    with av.open(str(clip)) as source, av.open(str(playlist), "w", format="hls", options=options) as target:
        copies = {s.index: target.add_stream_from_template(s, opaque=True) for s in source.streams}
        late = float(source.duration / av.time_base) - 1
        for packet in source.demux():
            if packet.dts is None:
                continue
            if pause and packet.dts * packet.time_base > late:
                time.sleep(pause)
                pause = 0.0
            packet.stream = copies[packet.stream_index]
            target.mux(packet)


def test_a_playlist_plays_in_real_time_and_says_when_it_ends(
    tmp_path: Path, web: str, loop: ModuleType
) -> None:
    clip = make_pulses(tmp_path / "in.mp4", 4.0)
    playlist = tmp_path / "live.m3u8"
    publishing = threading.Thread(target=publish, args=(playlist, clip), kwargs={"ends": True, "pause": 2.0})
    publishing.start()
    while not playlist.exists() or playlist.read_text().count(".ts") < 2:
        time.sleep(0.01)
    began = time.monotonic()
    report = run_identity(f"{web}/live.m3u8", tmp_path / "out.mkv", late="wait")
    publishing.join()
    assert time.monotonic() - began > 3.5  # though the first segments come at once
    assert (report.frames, report.exit_code, report.dropouts) == (100, 0, 0)
    offsets = loop.offsets(*loop.pulses(tmp_path / "out.mkv")[:2])
    assert len(offsets) >= 3
    assert max(map(abs, offsets)) < 0.040


def test_what_a_playlist_gives_again_is_not_shown_again(tmp_path: Path, web: str) -> None:
    publish(tmp_path / "live.m3u8", make_pulses(tmp_path / "in.mp4", 2.0), ends=False)
    events: list[LiveEvent] = []
    report = run_identity(
        f"{web}/live.m3u8", tmp_path / "out.mkv", timeout=1.0, reconnect=1.0, on_event=events.append
    )
    assert (report.frames + report.dropped, report.dropouts, report.exit_code) == (50, 1, 1)
    assert not any(event.kind == "reconnected" for event in events)


def test_a_beep_whose_beginning_was_lost_is_no_pair(tmp_path: Path, loop: ModuleType) -> None:
    made = tmp_path / "lost.mkv"
    with av.open(str(make_pulses(tmp_path / "in.mp4", 3.0))) as source, av.open(str(made), "w") as target:
        copies = {s.index: target.add_stream_from_template(s, opaque=True) for s in source.streams}
        for packet in source.demux():
            lost = packet.stream.type == "audio" and packet.pts is not None
            if packet.dts is None or (lost and 0.9 < packet.pts * packet.time_base < 1.06):
                continue
            packet.stream = copies[packet.stream_index]
            target.mux(packet)
    flashes, beeps, _ = loop.pulses(made)
    assert len(flashes) == 3
    offsets = loop.offsets(flashes, beeps)
    assert len(offsets) == 2
    assert max(map(abs, offsets)) < 0.040


@pytest.mark.parametrize(
    ("told", "times"),
    [
        ([None, 3, 7, 11], [-1, 3, 7, 11]),  # as RTSP begins
        ([None, None, 3, 7], [-5, -1, 3, 7]),
        ([3, 7, None, 15], [3, 7, 11, 15]),
        ([None, None, None, None], [0, 4, 8, 12]),
        ([None], [0]),
    ],
)
def test_frames_that_tell_no_time(
    told: list[int | None], times: list[int], clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for the first one that does, and the sound with them; each is as old as it is."""
    with av.open(str(clip)) as container:
        sounds = [packet.pts for packet in container.demux(audio=0) if packet.size]
    left = tell_times(monkeypatch, told)
    clock = SimpleNamespace(monotonic=lambda: len(told) - len(left) - 1)  # goes on with every frame
    monkeypatch.setattr("recavsr.video.live_source.time", clock)
    with LiveReader(resolve_live(str(clip))) as reader:
        items = list(reader._arriving())
    shown = [item for item in items if isinstance(item, LiveFrame)]
    assert [item.stamp.time * 100 for item in shown] == times
    assert [item.stamp.end - item.stamp.time for item in shown] == [Fraction(1, 25)] * len(told)
    assert [item.arrived for item in shown] == list(range(len(told)))
    assert items[0] is shown[0]
    assert [item.packet.pts for item in items if isinstance(item, SoundPacket)] == sounds


@pytest.mark.slow
@pytest.mark.parametrize(("route", "to"), [("rtmp", "tcp"), ("rtsp", "tcp"), ("udp", "hls"), ("srt", "srt")])
def test_the_loop(route: str, to: str, tmp_path: Path, ffmpeg: str, loop: ModuleType) -> None:
    row = loop.run(
        tmp_path,
        seconds=12,
        away=(1.0, 2.0),
        size=(160, 90),
        rate=RATE,
        route=route,
        to=to,
        arguments=["--model", "identity", "--scale", "2"],
    )
    assert row["exit_code"] == 130
    assert (row["dropouts_reported"], row["reconnections_reported"]) == (2, 2)
    assert row["pairs"] >= 8
    apart = row["picture_after_sound_ms"]
    assert max(abs(apart["min"]), abs(apart["max"])) <= 40
