"""One long film through the whole path, file to file: is memory flat, and the time a frame?

    python benchmarks/long_run.py [--model identity] [--frames 100000] [--scale 4]
                                  [-o benchmarks/results/long_run.json]

The film has 64x36 pixels and a sound track, and moves alike all the time: the work a frame stays the same.
Compared are the resident memory after 3,000 frames and at the end (also the largest in between), and the
time a frame in the second and in the last fifth.

What else runs on a machine changes even a process's own processor time a frame, by more than the 5 % that
are to be seen. So time is measured against a neighbour: in both fifths the long run stands still after every
120 frames while a fresh run of the same film makes as many. The ratio of the two times a frame has the load
of the machine in both its terms. The interval of the change is a bootstrap over these pairs. Results are kept
by model in one file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import signal
import statistics
import tempfile
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from multiprocessing.connection import Connection
from pathlib import Path

import av
import numpy as np

from recavsr.evaluation.environment import environment
from recavsr.stream.engine import Progress, upscale
from recavsr.stream.load import load
from recavsr.stream.step import BlockModel

WARM_FRAMES = 3000
SAMPLE_FRAMES = 120  # five blocks, and one mark of the encoder
FRESH_WARM_FRAMES, FRESH_FRAMES = 1000, 5000
FIFTHS = {"second_fifth": (0.2, 0.4), "last_fifth": (0.8, 1.0)}
HEIGHT, WIDTH, RATE, SOUND_RATE = 36, 64, 25, 8000


@dataclass(frozen=True)
class Sample:
    """What the process held and had used when `frames` were done."""

    frames: int
    resident_mb: float
    cpu_s: float
    wall_s: float


def make_source(path: Path, frames: int) -> None:
    """Write a texture that moves in a circle of 100 frames, and a tone."""
    texture = np.random.default_rng(0).integers(0, 256, (12, 40, 3), np.uint8).repeat(6, 0).repeat(6, 1)
    with av.open(str(path), "w") as container:
        video = container.add_stream("libx264", rate=RATE, options={"preset": "ultrafast", "crf": "23"})
        video.width, video.height, video.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        sound = container.add_stream("aac", rate=SOUND_RATE)
        each = SOUND_RATE // RATE
        for number in range(frames):
            angle = 2 * np.pi * (number % 100) / 100
            y, x = (round(16 + 16 * np.sin(angle)), round(80 + 80 * np.cos(angle)))
            picture = np.ascontiguousarray(texture[y : y + HEIGHT, x : x + WIDTH])
            container.mux(video.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            tone = np.sin((np.arange(each) + number * each) * 0.3).astype(np.float32)[None]
            samples = av.AudioFrame.from_ndarray(tone, format="fltp", layout="mono")
            samples.sample_rate, samples.pts = SOUND_RATE, each * number
            samples.time_base = Fraction(1, SOUND_RATE)
            container.mux(sound.encode(samples))
        for stream in (video, sound):
            container.mux(stream.encode(None))


def resident_mb() -> float:
    """Return the resident memory of this process in units of 10^6 bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 1e6


class Run:
    """A run in a process of its own, which stands still after each sample until the next one is asked for."""

    def __init__(self, source: Path, target: Path, model: BlockModel, scale: float) -> None:
        fork = multiprocessing.get_context("fork")  # the model is loaded once
        self._samples, there = fork.Pipe(duplex=False)
        self._process = fork.Process(target=self._work, args=(there, source, target, model, scale))
        self._process.start()
        there.close()

    @staticmethod
    def _work(samples: Connection, source: Path, target: Path, model: BlockModel, scale: float) -> None:
        began, due = time.monotonic(), 1

        def look(state: Progress) -> None:
            nonlocal due
            if state.stage == "done" or (state.stage == "upscaling" and state.frames >= due):
                due = state.frames + SAMPLE_FRAMES
                wall = time.monotonic() - began
                samples.send(Sample(state.frames, resident_mb(), time.process_time(), wall))
                os.kill(os.getpid(), signal.SIGSTOP)

        upscale(source, target, model=model, scale=scale, preset="ultrafast", overwrite=True, progress=look)

    def __iter__(self) -> Iterator[Sample]:
        while True:
            try:
                yield self._samples.recv()
            except EOFError:
                self._process.join()
                assert self._process.exitcode == 0
                return
            os.waitpid(self._process.pid, os.WUNTRACED)
            os.kill(self._process.pid, signal.SIGCONT)

    def end(self) -> None:
        """Leave the run unfinished."""
        self._process.kill()
        self._process.join()


def neighbours(source: Path, target: Path, model: BlockModel, scale: float) -> Generator[float, None, None]:
    """Yield processor milliseconds a frame of runs that have just begun, a sample each."""
    while True:
        run = Run(source, target, model, scale)
        before = None
        try:
            for sample in run:
                if before is not None and before.frames >= FRESH_WARM_FRAMES:
                    yield milliseconds(before, sample)
                before = sample
                if sample.frames >= FRESH_FRAMES:
                    break
        finally:
            run.end()


def milliseconds(before: Sample, after: Sample) -> float:
    """Return the processor milliseconds a frame between two samples."""
    return 1000 * (after.cpu_s - before.cpu_s) / (after.frames - before.frames)


def change_of(before: np.ndarray, after: np.ndarray) -> tuple[float, list[float]]:
    """Return how much larger the median of `after` is than that of `before`, and the 95 % interval."""
    random = np.random.default_rng(0)
    drawn = [np.median(random.choice(a, (2000, len(a))), axis=1) for a in (before, after)]
    low, high = np.percentile(drawn[1] / drawn[0] - 1, [2.5, 97.5])
    return float(np.median(after) / np.median(before) - 1), [float(low), float(high)]


def main() -> None:
    """Make the film, upscale it, print a sample now and then, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="identity")
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--scale", type=float, default=4)
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/long_run.json"))
    arguments = parser.parse_args()
    model = load(arguments.model, device="cpu")
    samples: list[Sample] = []
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in FIFTHS}
    with tempfile.TemporaryDirectory() as folder:
        source, target, other = (Path(folder) / name for name in ("in.mp4", "out.mp4", "fresh.mp4"))
        make_source(source, arguments.frames)
        fresh = neighbours(source, other, model, arguments.scale)
        for sample in Run(source, target, model, arguments.scale):
            samples.append(sample)
            if len(samples) % 40 == 0:
                print(sample, flush=True)
            for name, (first, last) in FIFTHS.items():
                if first < sample.frames / arguments.frames <= last:
                    pairs[name].append((milliseconds(samples[-2], sample), next(fresh)))
        fresh.close()
        with av.open(str(target)) as container:
            size = container.streams.video[0]
            output_size = f"{size.width}x{size.height}"
            last_time = max(p.pts * p.time_base for p in container.demux(video=0) if p.pts is not None)
    assert samples[-1].frames == arguments.frames
    assert last_time == Fraction(arguments.frames - 1, RATE)
    later = [sample.resident_mb for sample in samples if sample.frames >= WARM_FRAMES]
    ratios = {name: np.array([long / new for long, new in found]) for name, found in pairs.items()}
    change, interval = change_of(ratios["second_fifth"], ratios["last_fifth"])
    result = {
        "frames": samples[-1].frames,
        "input_size": f"{WIDTH}x{HEIGHT}",
        "output_size": output_size,
        "resident_mb": {"after_3000_frames": later[0], "end": later[-1], "largest": max(later)},
        "memory_flat": max(later) <= 1.03 * later[0] + 50,
        "cpu_ms_a_frame": {
            name: statistics.median(long for long, _ in found) for name, found in pairs.items()
        },
        "fresh_cpu_ms_a_frame": {
            name: statistics.median(new for _, new in found) for name, found in pairs.items()
        },
        "ratio_to_fresh": {name: float(np.median(found)) for name, found in ratios.items()},
        "pairs": {name: len(found) for name, found in pairs.items()},
        "time_change": change,
        "time_change_95_percent": interval,
        "time_flat": abs(change) <= 0.05,
        "environment": environment(),
        "samples": [asdict(sample) for sample in samples[::40]],
    }
    known = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    known[arguments.model] = _rounded(result)
    arguments.output.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
