"""One long film through the whole path, file to file: is memory flat, and the time a frame?

    python benchmarks/long_run.py [--model identity] [--frames 100000] [--scale 4]
                                  [-o benchmarks/results/long_run.json]

The film has 64x36 pixels and a sound track, and moves alike all the time: the work a frame stays the same.
Compared are the resident memory after 3,000 frames and at the end (also the largest in between), and the
time a frame in the second and in the last fifth. Time is the processor time of the process, all threads
together: wall time would measure what else runs on the machine. Results are kept by model in one file.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from recavsr.evaluation.environment import environment
from recavsr.stream.engine import Progress, upscale
from recavsr.stream.load import load

WARM_FRAMES = 3000
SAMPLE_FRAMES = 500
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


class Sampler:
    """Takes a sample every so many frames."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._began = time.monotonic()

    def __call__(self, state: Progress) -> None:
        """Look at the process; `upscale` calls this after every block."""
        due = self.samples[-1].frames + SAMPLE_FRAMES if self.samples else 1
        if state.stage == "done" or (state.stage == "upscaling" and state.frames >= due):
            wall = time.monotonic() - self._began
            self.samples.append(Sample(state.frames, resident_mb(), time.process_time(), wall))
            if state.frames % 5000 < SAMPLE_FRAMES:
                print(self.samples[-1], flush=True)

    def milliseconds(self, first: float, last: float) -> tuple[float, float]:
        """Return processor and wall milliseconds a frame between two shares of the run."""
        whole = self.samples[-1].frames
        begin = next(s for s in self.samples if s.frames >= first * whole)
        end = next(s for s in self.samples if s.frames >= last * whole)
        count = (end.frames - begin.frames) / 1000
        return (end.cpu_s - begin.cpu_s) / count, (end.wall_s - begin.wall_s) / count


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
    sampler, model = Sampler(), load(arguments.model, device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.mp4"
        make_source(source, arguments.frames)
        report = upscale(
            source,
            Path(folder) / "out.mp4",
            model=model,
            scale=arguments.scale,
            preset="ultrafast",
            progress=sampler,
        )
        with av.open(str(Path(folder) / "out.mp4")) as container:
            last = max(p.pts * p.time_base for p in container.demux(video=0) if p.pts is not None)
    assert report.frames == arguments.frames
    assert last == Fraction(arguments.frames - 1, RATE)
    warm = next(s.resident_mb for s in sampler.samples if s.frames >= WARM_FRAMES)
    later = [s.resident_mb for s in sampler.samples if s.frames >= WARM_FRAMES]
    (second_cpu, second_wall), (fifth_cpu, fifth_wall) = (
        sampler.milliseconds(first, last) for first, last in ((0.2, 0.4), (0.8, 1.0))
    )
    result = {
        "frames": report.frames,
        "input_size": f"{WIDTH}x{HEIGHT}",
        "output_size": f"{report.out_size[1]}x{report.out_size[0]}",
        "resident_mb": {"after_3000_frames": warm, "end": later[-1], "largest": max(later)},
        "memory_flat": max(later) <= 1.03 * warm + 50,
        "cpu_ms_a_frame": {"second_fifth": second_cpu, "last_fifth": fifth_cpu},
        "wall_ms_a_frame": {"second_fifth": second_wall, "last_fifth": fifth_wall},
        "cpu_time_change": fifth_cpu / second_cpu - 1,
        "time_flat": abs(fifth_cpu / second_cpu - 1) <= 0.05,
        "judged_by": "processor time: other work ran on the machine at the same time",
        "environment": environment(),
        "samples": [asdict(s) for s in sampler.samples if s.frames % 5000 < SAMPLE_FRAMES],
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
