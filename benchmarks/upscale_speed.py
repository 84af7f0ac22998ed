"""Speed and memory of `recavsr upscale` on this machine: `make bench`.

Two measurements of each model, on one drawn clip:

- the whole command in a process of its own, start, loading, reading and writing included: frames a second and
  peak resident memory;
- the model alone in a session, after a few warm-up blocks: the time of the first block, the median of the
  steady ones, and on CUDA the peak of allocated memory (timed with CUDA events around each block).

`identity`, which only resizes, runs beside it: what it takes is the cost of everything but the model.

    python benchmarks/upscale_speed.py --model nano --size 320x180 --frames 201
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import recavsr
from recavsr.cli.demo_scene import Street
from recavsr.evaluation.protocol import environment
from recavsr.stream.load import resolve_device, resolve_precision
from recavsr.video.clips import write_clip

SCALE = 4
RESULTS = Path(__file__).resolve().parent / "results"


def moving_clip(frames: int, height: int, width: int) -> np.ndarray:
    """Return a pan over one frame of the demo's street, uint8 [N, height, width, 3]."""
    street = Street().frame(0)
    repeats = (-(-height // street.shape[0]) + 1, -(-width // street.shape[1]) + 1, 1)
    canvas = np.tile(street, repeats)
    span_y, span_x = canvas.shape[0] - height, canvas.shape[1] - width
    offsets = [(i // 3 % (span_y + 1), i % (span_x + 1)) for i in range(frames)]
    return np.stack([canvas[y : y + height, x : x + width] for y, x in offsets])


def whole_command(source: Path, output: Path, model: str, device: str, precision: str) -> dict[str, Any]:
    """Run `recavsr upscale` and return its frames a second and peak resident memory."""
    command = [
        sys.executable,
        "-m",
        "recavsr",
        "upscale",
        str(source),
        "-o",
        str(output),
        "--overwrite",
        "--json",
    ]
    command += ["--model", model, "--device", device, "--precision", precision, "--scale", str(SCALE)]
    started = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    last = process.stderr.read().splitlines()[-1]
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    if status:
        raise SystemExit(f"the command failed: {last}")
    facts = json.loads(last)
    kilobyte = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS
    return {
        "fps": round(facts["frames"] / seconds, 2),
        "seconds": round(seconds, 2),
        "decode_s": facts["decode_seconds"],
        "model_s": facts["model_seconds"],
        "encode_s": facts["encode_seconds"],
        "peak_rss_gb": round(usage.ru_maxrss * kilobyte / 1e9, 3),
    }


def model_alone(frames: np.ndarray, model: str, device: str, precision: str) -> dict[str, Any]:
    """Return first-block and steady-block times of a warm session, input and output excluded."""
    network = recavsr.load(model, device=device, precision=precision)
    height, width = frames.shape[1:3]
    session = recavsr.Session(network, (height, width), (height * SCALE, width * SCALE))
    on_cuda = network.device.type == "cuda"

    def block(index: int) -> float:
        first = network.blocks.first_frame(index)
        piece = frames[first : first + network.blocks.frames(index)]
        if on_cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            session.push(piece)
            end.record()
            torch.cuda.synchronize()
            return start.elapsed_time(end)
        started = time.perf_counter()
        session.push(piece)
        return 1000 * (time.perf_counter() - started)

    whole = network.blocks.block_count(len(frames)) - 1
    for index in range(min(3, whole)):
        block(index)
    session.reset()
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    times = [block(index) for index in range(whole)]
    steady = statistics.median(times[1:])
    return {
        "model_fps": round(1000 * network.blocks.frames(1) / steady, 2),
        "first_output_s": round(times[0] / 1000, 3),
        "block_ms": round(steady, 1),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 3) if on_cuda else None,
    }


def driver() -> str | None:
    """Return the NVIDIA driver's version, where there is one."""
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None


def main() -> None:
    """Measure, print a line a model, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="nano", help="nano, a model folder or a hub id")
    parser.add_argument(
        "--size", default="320x180", help="input size, WIDTHxHEIGHT; the output is four times that"
    )
    parser.add_argument("--frames", type=int, default=201)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("-o", "--output", type=Path, help="result file (default: benchmarks/results/...)")
    options = parser.parse_args()
    width, height = map(int, options.size.split("x"))
    device = resolve_device(options.device)
    precision = {torch.bfloat16: "bf16", torch.float32: "fp32"}[resolve_precision(options.precision, device)]
    name = Path(options.model).name

    clip = moving_clip(options.frames, height, width)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "clip.mp4"
        write_clip(source, clip, 25)
        models = dict.fromkeys((options.model, "identity"))
        # All commands run before any model does here: Linux counts this process's size as the least peak of
        # the ones it starts.
        commands = {
            model: whole_command(source, Path(folder) / "out.mp4", model, str(device), options.precision)
            for model in models
        }
    for model in models:
        row: dict[str, Any] = {"model": Path(model).name, "size": f"{height * SCALE}x{width * SCALE}"}
        row["precision"] = precision if model != "identity" else "fp32"
        row |= commands[model] | model_alone(clip, model, str(device), options.precision)
        row["card"] = torch.cuda.get_device_name() if device.type == "cuda" else None
        rows.append(row)
        print(json.dumps(row), flush=True)
    result = {
        "frames": options.frames,
        "input": options.size,
        "environment": {**environment(str(device)), "driver": driver(), "system": platform.platform()},
        "cores": os.cpu_count(),
        "rows": rows,
    }
    place = "cuda" if device.type == "cuda" else "cpu"
    output = (
        options.output
        or RESULTS / f"upscale_{name}_{width * SCALE}x{height * SCALE}_{precision}_{place}.json"
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
