"""Is the model ever kept waiting? A 1080p film through the whole path, with a model that only sleeps.

    python benchmarks/starvation.py [--frames 400] [--fps 4 8 16] [-o benchmarks/results/starvation.json]

The stand-in takes as long for a block of 8 frames as a card of so many frames a second and leaves the
processor free meanwhile; its output are the frames that it was given (1920x1080, 8 bits). Reader and
writer are those of `recavsr upscale` with its defaults (H.264 in, H.264 out). What counts is the share
of the model's time in which it waited for a frame, or for room to hand one over; the start, before the
first block is read, is part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import NoReturn

import av
import numpy as np

from recavsr.evaluation.environment import environment
from recavsr.geometry import BlockPlan
from recavsr.stream.pipeline import run_pipeline
from recavsr.stream.plan import SizeRequest, make_plan
from recavsr.video.reader import Trim, open_reader

HEIGHT, WIDTH = 1080, 1920


class SleepingModel:
    """Gives every frame back after the time that a card takes for its block."""

    def __init__(self, fps: float) -> None:
        self._fps = fps
        self._plan = BlockPlan()
        self._block = 0
        self._waiting: list[np.ndarray] = []

    def push(self, frames: np.ndarray) -> list[np.ndarray]:
        """Take one frame; at the end of a block, sleep and return it."""
        self._waiting.append(frames)
        if len(self._waiting) < self._plan.frames(self._block):
            return []
        self._block += 1
        return self.flush()

    def flush(self) -> list[np.ndarray]:
        """Sleep for the frames that wait and return them."""
        frames, self._waiting = self._waiting, []
        time.sleep(len(frames) / self._fps)
        return frames

    def cut(self) -> list[np.ndarray]:
        """End the shot."""
        return self.flush()

    def fork(self) -> NoReturn:
        """There is nothing to continue from."""
        raise NotImplementedError


def make_source(path: Path, frames: int) -> None:
    """Write a photograph-like texture that moves, with H.264."""
    noise = np.random.default_rng(0).normal(0, 1, (HEIGHT // 4, WIDTH // 4, 3))
    smooth = sum(np.roll(noise, (dy, dx), (0, 1)) for dy in range(3) for dx in range(3)) / 3
    texture = np.clip(128 + 60 * smooth, 0, 255).astype(np.uint8).repeat(4, 0).repeat(4, 1)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25, options={"preset": "veryfast", "crf": "23"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for number in range(frames):
            picture = np.roll(texture, 3 * number, axis=1)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))


def measure(source: Path, target: Path, fps: float) -> dict[str, float]:
    """Run the path once and return where the model's time went."""
    processor = time.process_time()
    with open_reader(source) as reader:
        plan = make_plan(reader, target, SizeRequest(scale=1), Trim())
        with plan.writer(reader, overwrite=True) as writer:
            timing = run_pipeline(reader, SleepingModel(fps), writer)
    return {
        "model_fps": fps,
        "frames": timing.frames_written,
        "model_span_s": timing.model_span,
        "waited_for_input_s": timing.waited_for_input,
        "waited_for_output_s": timing.waited_for_output,
        "starved_percent": 100 * timing.starved,
        "decode_s": timing.decode,
        "encode_s": timing.encode,
        "processor_s": time.process_time() - processor,
    }


def main() -> None:
    """Make the film, measure at each speed, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--frames", type=int, default=400)
    parser.add_argument("--fps", type=float, nargs="+", default=[4, 8, 16])
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/starvation.json"))
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "in.mp4", Path(folder) / "out.mp4"
        make_source(source, arguments.frames)
        for fps in arguments.fps:
            before = os.getloadavg()[0]
            rows.append(measure(source, target, fps) | {"load_before": before})
            print(rows[-1], flush=True)
    rounded = [{key: round(value, 3) for key, value in row.items()} for row in rows]
    result = {
        "source": f"{WIDTH}x{HEIGHT} H.264",
        "output": f"{WIDTH}x{HEIGHT} H.264, default quality and preset",
        "note": "load_before: the machine's load when a run began; above its cores, others took their share",
        "cores": os.cpu_count(),
        "runs": rounded,
        "environment": environment(),
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
