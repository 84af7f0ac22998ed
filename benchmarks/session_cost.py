"""What pictures, reading and encoding add to a model that computes on the same cores.

    taskset -c 0,1 python benchmarks/session_cost.py [--precision bf16] [--rounds 3] [--clip FILE]
        [--beside 2] [-o FILE.json]

The same model in one process, five ways in turn, at 320 x 180 to 1280 x 720: blocks given to the model;
frames given to a session; what `recavsr upscale` does from file to file, with x264 at niceness 5, as there,
at 0 and at 19. Of each the median time of a block of 8 frames, after the first two blocks, the processor's
time in it (where that is less than the cores' share of the time, they waited), and all of the seconds.
OpenMP spins as long as in the command (GOMP_SPINCOUNT), unless the environment says otherwise. A clip of
one's own costs x264 what real pictures do. With `--beside`, so many other processes use the same cores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from recavsr.video.clips import read_clip, write_clip

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


def at_niceness(niceness: int) -> Callable[[Task, Watch], None]:
    """Return `file_to_file` with the encoder at a niceness."""

    def way(task: Task, watch: Watch) -> None:
        with mock.patch.object(pipeline, "ENCODER_NICENESS", niceness):
            file_to_file(task, watch)

    return way


WAYS: dict[str, Callable[[Task, Watch], None]] = {
    "model": model_alone,
    "session": session_alone,
    "file to file": file_to_file,
    "file to file, encoder at niceness 0": at_niceness(0),
    "file to file, encoder at niceness 19": at_niceness(19),
}


def spin() -> None:
    """Use a core until the process ends."""
    while True:
        pass


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Let so many processes use the same cores."""
    others = [multiprocessing.Process(target=spin, daemon=True) for _ in range(processes)]
    for other in others:
        other.start()
    try:
        yield
    finally:
        for other in others:
            other.terminate()


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
    parser.add_argument("--clip", type=Path, help="320 x 180, instead of a drawn one; as long as BLOCKS says")
    parser.add_argument("--beside", type=int, default=0, help="busy processes on the same cores")
    parser.add_argument("-o", "--output", type=Path)
    arguments = parser.parse_args()
    model = load(arguments.model, device="cpu", precision=arguments.precision)
    count = model.blocks.first_frame(arguments.blocks)
    frames = read_clip(arguments.clip, count) if arguments.clip else moving_clip(count, *LR_SIZE)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder, busy(arguments.beside), torch.inference_mode():
        task = Task(model, frames, Path(folder) / "clip.mp4")
        write_clip(task.clip, frames, 25)
        for number in range(1, arguments.rounds + 1):
            for name, way in WAYS.items():
                watch, began = Watch(), time.perf_counter()
                way(task, watch)
                seconds[name].append(round(time.perf_counter() - began, 1))
                found[name] += watch.blocks()
                told = {**medians(watch.blocks()), "seconds": seconds[name][-1]}
                print(f"round {number}, {name}: {json.dumps(told)}", flush=True)
    result = {
        "environment": environment("cpu"),
        "model": arguments.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "GOMP_SPINCOUNT": os.environ["GOMP_SPINCOUNT"],
        "frames": len(frames),
        "clip": arguments.clip.name if arguments.clip else "drawn",
        "busy processes beside": arguments.beside,
        "rows": {name: {**medians(found[name]), "seconds": seconds[name]} for name in WAYS},
    }
    print(json.dumps(result, indent=1))
    if arguments.output:
        save(result, arguments.output)


if __name__ == "__main__":
    main()
