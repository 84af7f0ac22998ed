"""What pictures, reading and encoding add to a model that computes on the same cores.

    taskset -c 0,1 python benchmarks/session_cost.py [--precision bf16] [--rounds 3] [-o FILE.json]

The same model in one process, four ways in turn, at 320 x 180 to 1280 x 720: blocks given to the model;
frames given to a session; `recavsr upscale` from file to file, with x264; the same, with the encoder at the
model's priority. Of each the median time of a block of 8 frames, after the first two blocks, and the
processor's time in it: where that is less than the cores' share of the time, they waited. OpenMP spins as
long as in the command (GOMP_SPINCOUNT), unless the environment says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np

from recavsr.cli.main import OPENMP_SPINS

os.environ.setdefault("GOMP_SPINCOUNT", OPENMP_SPINS)  # read when torch is imported

import torch
from torch import Tensor

from recavsr.evaluation.environment import environment
from recavsr.evaluation.speed import moving_clip, save, stream_times, whole
from recavsr.geometry import padded_size
from recavsr.stream import pipeline
from recavsr.stream.engine import Progress, upscale
from recavsr.stream.load import load
from recavsr.stream.session import Session
from recavsr.stream.step import ReCaVSR, StreamState
from recavsr.video.clips import write_clip

LR_SIZE, OUT_SIZE = (180, 320), (720, 1280)
WARM_BLOCKS = 2


@dataclass(frozen=True)
class Task:
    """What is to be upscaled: the same frames as an array and as a file."""

    model: ReCaVSR
    frames: np.ndarray
    clip: Path


class Watch:
    """Notes both clocks after every block."""

    def __init__(self) -> None:
        self._times: list[tuple[float, float]] = []

    def __call__(self) -> None:
        """Note a block's end."""
        self._times.append((time.perf_counter(), time.process_time()))

    def blocks(self) -> list[tuple[float, float]]:
        """Return seconds and processor's seconds of each block after the first ones."""
        return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(self._times[WARM_BLOCKS - 1 :])]


def model_alone(task: Task, watch: Watch) -> None:
    """Give random blocks to the model."""
    model, step = task.model, whole(task.model)

    def noted(state: StreamState, lr_frames: Tensor) -> StreamState:
        state = step(state, lr_frames)
        watch()
        return state

    size = padded_size(*OUT_SIZE, model.size_multiple)
    stream_times(model, noted, size, model.blocks.block_count(len(task.frames)))


def session_alone(task: Task, watch: Watch) -> None:
    """Give frames to a session."""
    session = Session(task.model, LR_SIZE, OUT_SIZE, detect_cuts=True)
    for frame in task.frames:
        if session.push(frame[None]):
            watch()


def file_to_file(task: Task, watch: Watch) -> None:
    """Upscale a file."""

    def told(progress: Progress) -> None:
        if progress.stage == "upscaling":
            watch()

    result = task.clip.with_name("out.mp4")
    upscale(task.clip, result, model=task.model, size=OUT_SIZE[::-1], progress=told, overwrite=True)


def without_priority(task: Task, watch: Watch) -> None:
    """Upscale a file, the encoder at the model's priority."""
    with mock.patch.object(pipeline, "_give_way"):
        file_to_file(task, watch)


WAYS: dict[str, Callable[[Task, Watch], None]] = {
    "model": model_alone,
    "session": session_alone,
    "file to file": file_to_file,
    "file to file, encoder at the model's priority": without_priority,
}


def medians(blocks: list[tuple[float, float]]) -> dict[str, int]:
    """Return the medians of both times of a block, in ms."""
    seconds, processor = (round(1000 * statistics.median(times)) for times in zip(*blocks))
    return {"block_ms": seconds, "processor_ms": processor}


def main() -> None:
    """Measure in turn, print medians, write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="nano")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    model = load(arguments.model, device="cpu", precision=arguments.precision)
    frames = moving_clip(model.blocks.first_frame(arguments.blocks), *LR_SIZE)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        task = Task(model, frames, Path(folder) / "clip.mp4")
        write_clip(task.clip, frames, 25)
        for number in range(1, arguments.rounds + 1):
            for name, way in WAYS.items():
                watch = Watch()
                way(task, watch)
                found[name] += watch.blocks()
                print(f"round {number}, {name}: {json.dumps(medians(watch.blocks()))}", flush=True)
    result = {
        "environment": environment("cpu"),
        "model": arguments.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "GOMP_SPINCOUNT": os.environ["GOMP_SPINCOUNT"],
        "rows": {name: medians(blocks) for name, blocks in found.items()},
    }
    print(json.dumps(result, indent=1))
    if arguments.output:
        save(result, arguments.output)


if __name__ == "__main__":
    main()
