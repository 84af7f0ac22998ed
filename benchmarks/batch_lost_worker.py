"""A batch on three workers, one of which is killed in the middle: the files are those of one process.

    python benchmarks/batch_lost_worker.py [--model nano] [-o benchmarks/results/batch_lost_worker.json]

Six clips: a long one, whose shots are shared out, and five short ones. The worker that makes the second run
of shots gets SIGKILL when it is some seconds into it. One process makes the same clips, with as many threads
as one worker has, and the files are compared byte for byte and frame by frame.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recavsr.cluster.batch import BatchNote, Shared, run_batch
from recavsr.cluster.dispatch import Retried, Started
from recavsr.cluster.tasks import SomeShots
from recavsr.evaluation.environment import environment
from recavsr.stream.batch import upscale_many
from recavsr.stream.resume import work_folder
from recavsr.video.clips import read_clip, write_clip

LONG, SHORT = (0, 120, 240, 360), (0, 20)
FRAMES = {"long.mp4": (480, LONG), **{f"short_{number}.mp4": (40, SHORT) for number in range(1, 6)}}
KILLED_AFTER_SECONDS = 2.0


def pictures(frames: int, starts: tuple[int, ...], seed: int) -> Iterator[np.ndarray]:
    """Yield frames [48, 64, 3] of textures that move, in shots that begin at `starts`."""
    rng = np.random.default_rng(seed)
    for first, last in zip(starts, (*starts[1:], frames)):
        texture = rng.integers(0, 256, (16, 64, 3), np.uint8).repeat(3, 0).repeat(3, 1)
        for number in range(last - first):
            yield np.ascontiguousarray(texture[:, number : number + 64])


def main() -> None:
    """Make the clips twice, compare, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="nano")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("benchmarks/results/batch_lost_worker.json")
    )
    arguments = parser.parse_args()
    options: dict[str, Any] = {"model": arguments.model, "device": "cpu", "scale": 2}
    notes: list[BatchNote] = []

    def told(said: BatchNote) -> None:
        notes.append(said)
        lost = any(isinstance(earlier, Retried) for earlier in notes)
        if lost or not (isinstance(said, Started) and isinstance(said.task, SomeShots)):
            return
        if said.task.number == 1:
            while not list(work_folder(Path(said.task.job.output)).glob(".recavsr-*.part")):
                time.sleep(0.01)
            time.sleep(KILLED_AFTER_SECONDS)
            os.kill(said.place.pid, signal.SIGKILL)

    with tempfile.TemporaryDirectory() as folder:
        source, alone, shared = (Path(folder) / name for name in ("in", "alone", "shared"))
        source.mkdir()
        for seed, (name, (frames, starts)) in enumerate(FRAMES.items()):
            write_clip(source / name, pictures(frames, starts, seed), 25)
        torch.set_num_threads(1)
        assert upscale_many(source, alone, **options).exit_code == 0
        batch = run_batch(source, shared, workers=3, threads=1, least_frames=120, on_note=told, **options)
        files = [
            {
                "file": name,
                "frames": frames,
                "identical_frames": bool(np.array_equal(read_clip(alone / name), read_clip(shared / name))),
                "identical_bytes": (alone / name).read_bytes() == (shared / name).read_bytes(),
            }
            for name, (frames, _) in FRAMES.items()
        ]
        left = sorted(path.name for path in shared.iterdir() if path.name not in FRAMES)
    result = {
        "model": arguments.model,
        "workers": 3,
        "threads_a_worker": 1,
        "exit_code": batch.exit_code,
        "shared_out": [
            {"file": Path(said.job.source).name, "starts": said.shots.starts, "runs": said.shots.runs}
            for said in notes
            if isinstance(said, Shared)
        ],
        "workers_killed": sum(isinstance(said, Retried) for said in notes),
        "retried": [
            {"task": str(said.task).replace(str(source), "in"), "attempt": said.attempt}
            for said in notes
            if isinstance(said, Retried)
        ],
        "cores": os.cpu_count(),
        "left_in_the_folder": left,
        "files": files,
        "environment": environment(),
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
