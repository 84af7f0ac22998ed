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
from itertools import pairwise
from pathlib import Path
from unittest import mock

os.environ.setdefault("GOMP_SPINCOUNT", "20000")  # read when torch is imported

import torch

from recavsr.evaluation.environment import environment
from recavsr.evaluation.speed import moving_clip, random_frames, whole
from recavsr.stream import pipeline
from recavsr.stream.engine import Progress, upscale
from recavsr.stream.load import load
from recavsr.stream.session import Session
from recavsr.stream.step import ReCaVSR
from recavsr.video.clips import write_clip

LR_SIZE, OUT_SIZE, PADDED = (180, 320), (720, 1280), (736, 1280)
FIRST, LATER = 21, 8
WARM_BLOCKS = 2


class Watch:
    """Notes both clocks after every block."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []

    def __call__(self, *_: object) -> None:
        """Note a block's end."""
        self.times.append((time.perf_counter(), time.process_time()))

    def blocks(self) -> list[tuple[float, float]]:
        """Return seconds and processor's seconds of each block after the first ones."""
        kept = self.times[WARM_BLOCKS - 1 :]
        return [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(kept)]


def model_alone(model: ReCaVSR, clip: Path, blocks: int, watch: Watch) -> None:
    """Give random blocks to the model."""
    step, state = whole(model), model.start(*PADDED)
    for index in range(blocks):
        frames = random_frames(FIRST if index == 0 else LATER, PADDED, model.device, model.dtype)
        state = step(state, frames)
        watch()


def session_alone(model: ReCaVSR, clip: Path, blocks: int, watch: Watch) -> None:
    """Give frames to a session."""
    session = Session(model, LR_SIZE, OUT_SIZE, detect_cuts=True)
    frames = moving_clip(FIRST + LATER * (blocks - 1), *LR_SIZE)
    for frame in frames:
        if session.push(frame[None]):
            watch()


def file_to_file(model: ReCaVSR, clip: Path, blocks: int, watch: Watch) -> None:
    """Upscale a file."""

    def told(progress: Progress) -> None:
        if progress.stage == "upscaling":
            watch()

    upscale(clip, clip.with_name("out.mp4"), model=model, size=OUT_SIZE[::-1], progress=told, overwrite=True)


def without_priority(model: ReCaVSR, clip: Path, blocks: int, watch: Watch) -> None:
    """Upscale a file, the encoder at the model's priority."""
    with mock.patch.object(pipeline, "_give_way"):
        file_to_file(model, clip, blocks, watch)


WAYS: dict[str, Callable[[ReCaVSR, Path, int, Watch], None]] = {
    "model": model_alone,
    "session": session_alone,
    "file to file": file_to_file,
    "file to file, encoder at the model's priority": without_priority,
}


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
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        clip = Path(folder) / "clip.mp4"
        write_clip(clip, moving_clip(FIRST + LATER * (arguments.blocks - 1), *LR_SIZE), 25)
        for number in range(arguments.rounds):
            for name, way in WAYS.items():
                watch = Watch()
                way(model, clip, arguments.blocks, watch)
                found[name] += watch.blocks()
                medians = [round(1000 * statistics.median(values)) for values in zip(*watch.blocks())]
                print(
                    f"round {number + 1}, {name}: {medians[0]} ms, {medians[1]} ms of processors", flush=True
                )
    rows = {
        name: {
            "block_ms": round(1000 * statistics.median(seconds for seconds, _ in blocks)),
            "processor_ms": round(1000 * statistics.median(processor for _, processor in blocks)),
        }
        for name, blocks in found.items()
    }
    result = {
        "environment": environment("cpu"),
        "model": arguments.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "GOMP_SPINCOUNT": os.environ["GOMP_SPINCOUNT"],
        "rows": rows,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.output:
        arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
