"""How many training pairs a second the streamed data makes on this machine, with and without degradation.

    python benchmarks/data_rate.py --workers 2 -o benchmarks/results/data_rate.json
    python benchmarks/data_rate.py --data SET            # your own set, as `recavsr data index` lists it
    python benchmarks/data_rate.py --device cuda         # degraded on a card: its seconds and memory a clip

Without --data two videos of 1920x1080 (H.264, a keyframe every 60 frames) and two photos of 12 megapixels
are drawn first. Each row is one size of clip: CPU seconds a clip in one process, where other programs on the
machine count little, and clips a second by the clock with worker processes, where they count in full.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from recavsr.data.degradation_batch import degrade_batch
from recavsr.data.folders import index_folders
from recavsr.data.pool import PairSettings
from recavsr.data.stream import ClipStream, PairLoader, StreamedPairs
from recavsr.evaluation.environment import environment
from recavsr.training.paper import PAIRS, paper_5b_decoder
from recavsr.training.recipes import NANO_PAIRS
from recavsr.video.clips import write_clip

CASES: dict[str, tuple[PairSettings, int]] = {
    "paper_5b, clip": (PAIRS, 85),
    "paper_5b, image": (PAIRS, 1),
    "paper_5b_decoder, clip": (paper_5b_decoder().pairs, 17),
    "nano, clip of a video": (replace(NANO_PAIRS, video_fraction=1.0), 53),
    "nano, clip of photos": (replace(NANO_PAIRS, video_fraction=0.0), 53),
}
"""What is drawn (the settings of a recipe) and how many frames of it."""


def draw_files(folder: Path) -> None:
    """Write videos that pan over drawn textures, and photos of them."""
    rng = np.random.default_rng(0)
    (folder / "videos").mkdir()
    (folder / "photos").mkdir()
    for number in range(2):
        picture = np.zeros((3000, 4000, 3), np.float32)
        for octave in range(7):  # detail at all scales, as in pictures of nature
            noise = rng.standard_normal((3000 >> octave, 4000 >> octave, 3), np.float32)
            picture += 1.5**octave * cv2.resize(noise, (4000, 3000), interpolation=cv2.INTER_LINEAR)
        picture = (128 + 45 * picture / picture.std()).clip(0, 255).astype(np.uint8)
        cv2.imwrite(str(folder / "photos" / f"{number}.jpg"), picture, [cv2.IMWRITE_JPEG_QUALITY, 92])
        frames = (np.ascontiguousarray(picture[t : t + 1080, 5 * t : 5 * t + 1920]) for t in range(180))
        write_clip(folder / "videos" / f"{number}.mp4", frames, rate=25, crf=20, keyint=60)


def one_process(pairs: StreamedPairs, frames: int, seconds: float) -> tuple[float, int]:
    """Return CPU seconds a pair, and over how many, for about so many seconds."""
    pairs.stream.clip(pairs.draw(0, frames))  # fills caches of files and tables
    started, made = time.process_time(), 0
    while made == 0 or time.process_time() - started < seconds:
        made += 1
        pairs[made, frames]
    return (time.process_time() - started) / made, made


def with_workers(pairs: StreamedPairs, frames: int, count: int, workers: int) -> float:
    """Return pairs a second by the clock, after one a worker has come."""
    loader = PairLoader(pairs, workers, ahead=1)
    made = loader.pairs((number, frames) for number in itertools.count())
    for _ in range(workers):
        next(made)
    started = time.monotonic()
    for _ in range(count):
        next(made)
    rate = count / (time.monotonic() - started)
    del made
    loader.close()
    return rate


def on_processor(pairs: StreamedPairs, frames: int, seconds: float, workers: int) -> dict[str, Any]:
    """Return core seconds a clip, and clips a second by worker processes."""
    cpu, count = one_process(pairs, frames, seconds)
    rate = with_workers(pairs, frames, max(count, workers), workers)
    return {
        "degraded": pairs.degrade,
        "cpu_s_a_clip": round(cpu, 3),
        "clips_measured": count,
        "workers": workers,
        "clips_a_second": round(rate, 3),
        "load_of_the_machine": round(os.getloadavg()[0], 1),
    }


def on_device(pairs: StreamedPairs, frames: int, device: torch.device, count: int = 4) -> dict[str, Any]:
    """Return seconds a clip that a device takes to degrade clips that lie on it, and its peak memory."""
    clips = [pairs[number, frames].hq.to(device) for number in range(count)]
    records = [pairs.record(number, frames) for number in range(count)]
    took = []
    for turn in range(2):  # the first loads kernels
        for clip, record in zip(clips, records):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            degrade_batch(clip.float().div_(255)[None], [record], torch.Generator(device).manual_seed(0))
            torch.cuda.synchronize()
            if turn:
                took.append(time.perf_counter() - began)
    rounded = [round(seconds, 3) for seconds in took]
    peak = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    return {"device_s_a_clip": rounded, "device_peak_gb": peak}


def main() -> None:
    """Measure, print a JSON line a row, and write the result file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="an indexed set; drawn files if left out")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=20.0, help="about so long for each number")
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--device", help="a card: measure degradation there, and nothing else")
    parser.add_argument("-o", "--output", type=Path, help="result file (JSON)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as work:
        data = options.data
        if data is None:
            data = Path(work)
            draw_files(data)
            index_folders(data / "videos", data / "photos", shots="builtin").save(data)
        stream = ClipStream.open(data, cache=Path(work))
        by_workers = (False, True) if options.device is None else (False,)  # degraded by them or not
        for case, degrade in itertools.product(options.cases, by_workers):
            settings, frames = CASES[case]
            pairs = StreamedPairs(stream, settings, seed=0, degrade=degrade)
            if options.device is None:
                found = on_processor(pairs, frames, options.seconds, options.workers)
            else:
                found = on_device(pairs, frames, torch.device(options.device))
            size = "x".join(map(str, (frames, *np.broadcast_to(settings.size, 2).tolist())))
            rows.append({"case": case, "size": size, **found})
            write(rows, options.output, options.device or "cpu")


def write(rows: list[dict[str, Any]], output: Path | None, device: str) -> None:
    """Print the newest row, and write all of them into the result file if one is named."""
    print(json.dumps(rows[-1]), flush=True)
    if output is not None:
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
        result = {"environment": environment(device), "largest_worker_mb": round(peak), "rows": rows}
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
