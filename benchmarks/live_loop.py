"""A live loop on loopback, with drop-outs, through `recavsr live`: do sound and picture stay together?

    python benchmarks/live_loop.py [--seconds 300] [--model identity] [-o benchmarks/results/live_loop.json]

An ffmpeg executable draws a white flash and sounds a tone in the first 80 ms of every second, and sends
both by one of the routes. The time counts from when the output is open. The source is killed at each of the
drop-outs and started again. `recavsr live` sends what it makes as MPEG-TS, over TCP or SRT, to a second
ffmpeg, which records it, or writes a playlist. In the recording each flash is compared with the beep nearest
to it. The command is a process of its own: its memory and its processor time are sampled, its events are its
JSON lines. It is ended by an interrupt. The row goes into the result file in place of one with the same
settings.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import av
import numpy as np

from recavsr.evaluation.environment import environment

PULSE_SECONDS = 0.08
_AWAY_SECONDS = (4.0, 8.0)
_START_SECONDS = 60.0
_WARM_SECONDS = 30.0  # memory is compared from here on


def free_port() -> int:
    """Return a TCP port of the loopback address that nothing uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder over HTTP; the value is its address."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def send_pulses(
    url: str,
    size: tuple[int, int],
    rate: int,
    form: str,
    seconds: float = 3600,
    options: Sequence[str] = (),
) -> subprocess.Popen:
    """Start an ffmpeg that sends flashes and beeps in real time; size is (width, height)."""
    width, height = size
    pulse = f"lt(mod(t,1),{PULSE_SECONDS})"
    flash = f"drawbox=color=white:t=fill:enable='{pulse}'"
    picture = f"testsrc=size={width}x{height}:rate={rate},lutyuv=y=val/2,{flash}"
    tone = f"aevalsrc='if({pulse},0.8*sin(2*PI*1000*t),0)':s=48000"
    inputs = [option for graph in (picture, tone) for option in ("-re", "-f", "lavfi", "-i", graph)]
    video = ["-c:v", "libx264", "-preset", "ultrafast", "-tune", "zerolatency", "-g", str(rate)]
    coding = [*video, "-pix_fmt", "yuv420p", "-c:a", "aac"]
    command = [
        "ffmpeg",
        "-v",
        "error",
        "-nostdin",
        "-y",
        *inputs,
        "-t",
        str(seconds),
        *coding,
        "-f",
        form,
        *options,
        url,
    ]
    return subprocess.Popen(command, stderr=subprocess.DEVNULL)


def record(url: str, path: Path) -> subprocess.Popen:
    """Start an ffmpeg that waits at `url` for MPEG-TS and records it as it is."""
    source = ["-i", f"{url}?mode=listener"] if url.startswith("srt:") else ["-listen", "1", "-i", url]
    command = ["ffmpeg", "-v", "error", "-nostdin", "-y", "-f", "mpegts", *source]
    return subprocess.Popen([*command, "-map", "0", "-c", "copy", str(path)], stderr=subprocess.DEVNULL)


def pulses(path: Path, rate: float = 25) -> tuple[list[float], list[float], int]:
    """Return when flashes and beeps begin in a recording, in seconds, and its number of frames.

    A flash whose first frame may have been dropped (the frame before it is missing) is left out, and so is a
    beep with which the sound comes back after a gap: its beginning may lie there.
    """
    flashes, beeps, frames = [], [], 0
    lit, before = False, None
    sounding_until, heard_until, back_at = -1.0, None, -1.0
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            frames += 1
            bright = float(frame.to_ndarray(format="gray")[::4, ::4].mean()) > 190
            whole = before is None or frame.time - before < 1.5 / rate
            if bright and not lit and whole:
                flashes.append(frame.time)
            lit, before = bright, frame.time
    with av.open(str(path)) as container:
        for frame in container.decode(audio=0):
            length = frame.samples / frame.sample_rate
            if heard_until is not None and frame.time > heard_until + length / 2:
                back_at = frame.time
            heard_until = frame.time + length
            loud = np.abs(frame.to_ndarray().astype(np.float32)).max(0) > 0.15
            for at in np.flatnonzero(loud):
                moment = frame.time + at / frame.sample_rate
                if moment > sounding_until + 0.2 and moment > back_at + 0.05:
                    beeps.append(moment)
                sounding_until = moment
    return flashes, beeps, frames


def offsets(flashes: list[float], beeps: list[float]) -> list[float]:
    """Return for each flash how much later (s) than its beep it comes; those without a beep are left out."""
    found = []
    for flash in flashes:
        nearest = min(beeps, key=lambda beep: abs(beep - flash), default=None)
        if nearest is not None and abs(nearest - flash) < 0.5:
            found.append(flash - nearest)
    return found


class Usage(threading.Thread):
    """Samples the resident memory of a process, in MB, and its processor time, about once a second."""

    def __init__(self, process: int) -> None:
        super().__init__(daemon=True)
        self._process = process
        self.samples: list[tuple[float, float]] = []
        self.cpu_seconds: list[float] = []

    def run(self) -> None:
        """Sample until the process is gone."""
        began = time.monotonic()
        while True:
            try:
                status = Path(f"/proc/{self._process}/status").read_text()
                ticks = Path(f"/proc/{self._process}/stat").read_text().rpartition(")")[2].split()[11:13]
            except OSError:
                return
            lines = [line for line in status.splitlines() if line.startswith("VmRSS")]
            if not lines:
                return
            self.samples.append((time.monotonic() - began, int(lines[0].split()[1]) / 1024))
            self.cpu_seconds.append(sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"))
            time.sleep(1)

    def cpu_ms(self, frames: int) -> float:
        """Return the processor milliseconds, all threads together, for each of so many frames."""
        return 1000 * (self.cpu_seconds[-1] - self.cpu_seconds[0]) / frames

    def facts(self) -> dict[str, float]:
        """Return the medians of the beginning (after warming up) and of the end, and the peak."""
        warm = [mb for at, mb in self.samples if at >= min(_WARM_SECONDS, self.samples[-1][0] / 3)]
        tenth = max(3, len(warm) // 10)
        first, last = statistics.median(warm[:tenth]), statistics.median(warm[-tenth:])
        return {"begin_mb": round(first, 1), "end_mb": round(last, 1), "peak_mb": round(max(warm), 1)}


class Live:
    """`recavsr live` as a process, and the events that it says."""

    def __init__(self, arguments: list[str]) -> None:
        command = [sys.executable, "-m", "recavsr", "live", *arguments, "--json"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.events: list[dict[str, Any]] = []
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.events.append(json.loads(line))

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of a kind so far."""
        return [event for event in list(self.events) if event["event"] == kind]

    def wait_for(self, kind: str, count: int = 1, text: str = "", seconds: float = _START_SECONDS) -> None:
        """Wait for the count-th event of a kind that contains a text."""
        end = time.monotonic() + seconds
        while sum(text in json.dumps(event) for event in self.of(kind)) < count:
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError(f"no {kind} {text!r}: {self.events[-3:]}")
            time.sleep(0.05)

    def end(self) -> int:
        """Interrupt it as Ctrl-C does; return its exit code."""
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(30)
        self._reading.join(5)
        return code


def run(
    folder: Path,
    *,
    seconds: float,
    away: tuple[float, ...],
    size: tuple[int, int],
    rate: int,
    route: str,
    arguments: list[str],
    to: str = "tcp",
) -> dict[str, Any]:
    """Run the loop once and return what came out of it."""
    here, listen = f"127.0.0.1:{free_port()}", ["--listen"] if route not in ("udp", "hls") else []
    url, form, options = {
        "rtmp": (f"rtmp://{here}/live/loop", "flv", []),
        "rtsp": (f"rtsp://{here}/live", "rtsp", ["-rtsp_transport", "tcp"]),
        "tcp": (f"tcp://{here}", "mpegts", []),
        "srt": (f"srt://{here}", "mpegts", []),
        "udp": (f"udp://{here}", "mpegts", []),
        "hls": (str(folder / "live.m3u8"), "hls", ["-hls_time", "1", "-hls_flags", "delete_segments"]),
    }[route]
    send = partial(send_pulses, url, size, rate, form, options=options)
    if to == "hls":
        sink = recording = folder / "out.m3u8"
        arguments, recorder = [*arguments, "--output-option", "hls_list_size=0"], None
    else:
        sink, recording = f"{to}://127.0.0.1:{free_port()}", folder / "recording.ts"
        recorder = record(sink, recording)
    with served(folder) as web:
        source = f"{web}/live.m3u8" if route == "hls" else url
        live = Live([source, str(sink), *listen, "--timeout", "2", *arguments])
        usage = Usage(live.process.pid)
        sender = None
        try:
            if listen:
                live.wait_for("message", text="waiting for")
                time.sleep(0.5)
            sender = send()
            live.wait_for("connected", text='"source"')
            live.wait_for("connected", text='"output"')  # until it is open, frames may be dropped
            usage.start()
            stretch = seconds / (len(away) + 1)
            for number, pause in enumerate(away, 1):
                time.sleep(stretch)
                sender.kill()
                sender.wait()
                live.wait_for("dropout", number, seconds=20)
                time.sleep(pause)
                sender = send()
                live.wait_for("reconnected", number, seconds=30)
            time.sleep(stretch)
            code = live.end()
        finally:
            for process in (sender, live.process):
                if process is not None and process.poll() is None:
                    process.kill()
            if recorder is not None:
                try:
                    recorder.wait(10)
                except subprocess.TimeoutExpired:
                    recorder.kill()
    flashes, beeps, frames = pulses(recording, rate)
    apart = [1000 * offset for offset in offsets(flashes, beeps)]
    result = live.of("result")[-1]
    return {
        "exit_code": code,
        "seconds": seconds,
        "source_away_s": list(away),
        "dropouts_reported": len(live.of("dropout")),
        "reconnections_reported": len(live.of("reconnected")),
        "gaps_s": [event["gap_s"] for event in live.of("reconnected")],
        "frames_recorded": frames,
        "frames_dropped": result["dropped"],
        "level_changes": [event["name"] for event in live.of("level")],
        "flashes": len(flashes),
        "beeps": len(beeps),
        "pairs": len(apart),
        "picture_after_sound_ms": {
            "median": round(statistics.median(apart), 1),
            "min": round(min(apart), 1),
            "max": round(max(apart), 1),
        },
        "latency_ms": {key: result[f"{key}_ms"] for key in ("p50", "p95", "max")},
        "cpu_ms_a_frame": round(usage.cpu_ms(frames + result["dropped"]), 2),
        "rss": usage.facts(),
    }


def source_alone(folder: Path, size: tuple[int, int], rate: int) -> dict[str, float]:
    """Return the same measure for the source itself, recorded without us: what the others compare with."""
    path = folder / "source.ts"
    send_pulses(str(path), size, rate, "mpegts", 6).wait()
    apart = [1000 * offset for offset in offsets(*pulses(path, rate)[:2])]
    return {"min": round(min(apart), 1), "max": round(max(apart), 1)}


def main(given: list[str] | None = None) -> None:
    """Parse the command line, run, print and store the row."""
    # A shell's background jobs ignore interrupts, and what they start would, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300, help="of source, drop-outs apart")
    parser.add_argument("--away", type=float, nargs="*", default=list(_AWAY_SECONDS), help="drop-outs, in s")
    parser.add_argument("--model", default="identity")
    parser.add_argument("--size", default="320x180", help="of the source")
    parser.add_argument("--rate", type=int, default=25)
    parser.add_argument("--scale", default="2")
    parser.add_argument("--route", choices=("rtmp", "rtsp", "tcp", "srt", "udp", "hls"), default="rtmp")
    parser.add_argument("--to", choices=("tcp", "srt", "hls"), default="tcp")
    parser.add_argument("--late", default="drop")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args(given)
    width, height = map(int, options.size.split("x"))
    settings = {
        key: getattr(options, key) for key in ("model", "size", "rate", "scale", "route", "to", "late")
    }
    arguments = ["--model", options.model, "--scale", options.scale, "--late", options.late]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        alone = source_alone(folder, (width, height), options.rate)
        measured = run(
            folder,
            seconds=options.seconds,
            away=tuple(options.away),
            size=(width, height),
            rate=options.rate,
            route=options.route,
            to=options.to,
            arguments=arguments,
        )
    row = {**settings, **measured, "source_alone_ms": alone, "load_average": round(os.getloadavg()[0], 1)}
    print(json.dumps(row, indent=1))
    if options.output is not None:
        stored = json.loads(options.output.read_text()) if options.output.exists() else {"rows": []}
        rows = [old for old in stored["rows"] if any(old.get(key) != row[key] for key in settings)]
        text = json.dumps({"environment": environment("cpu"), "rows": [*rows, row]}, indent=1)
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
