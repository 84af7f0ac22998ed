"""One stream over several cards against one, in the same run: speed, memory, agreement, time in exchanges.

    PYTHONPATH=src python benchmarks/multi_gpu.py --precision bf16 --output multi_gpu.json

The 5B model with random weights (speed is that of the released ones) at 4K and 1080p: `recavsr.load` with
`device="cuda:0,cuda:1"` does the same. Every part that fails prints its traceback, and the next one begins;
results are printed and written as they come, and no part begins after `--seconds`.

Parts: `links` (what a copy between two cards reaches), `agreement` (a few small blocks on all cards against
one, beside what a rounding of the LR frames changes), then for each size `one`, `all`, `exchange` (of a block
on the first card: all calls of `Band._exchange`, their copies and the wait for the other side included),
`lost` (with `--kill`: a worker is killed in the middle of a stream, and one line must say so).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import time
import traceback
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recavsr.errors import InputError
from recavsr.evaluation.environment import environment
from recavsr.evaluation.speed import (
    PROMPT_TOKENS,
    RANDOM_5B,
    measure_stream,
    milliseconds,
    random_frames,
    whole,
)
from recavsr.models.presets import recavsr_5b, recavsr_5b_decoder
from recavsr.models.row_parallel import Band
from recavsr.stream.devices import SharedModel, open_shared
from recavsr.stream.graphs import BlockGraphs, CudaCapture
from recavsr.stream.load import load, random_model
from recavsr.stream.step import ReCaVSR

SIZES = {
    "4k": (2176, 3840), "1440p": (1440, 2560), "1080p": (1088, 1920),
    "check": (832, 1344),  # the smallest at which windows do not cover the grid
    "small": (192, 320),
}  # fmt: skip
FRAMES = {"4k": 69, "1440p": 69, "1080p": 101, "small": 45}
BEGAN = time.perf_counter()


def open_part(model: str, precision: str, graphs: bool, device: str, share: tuple[int, int]) -> ReCaVSR:
    """Open one process's part; random weights are the same on every card."""
    if model == RANDOM_5B:
        torch.manual_seed(0)
        sizes = (recavsr_5b(), recavsr_5b_decoder(), PROMPT_TOKENS)
        part = random_model(model, *sizes, device=device, precision=precision, share=share)
    else:
        loaded = load(model, device=device, precision=precision, share=share)
        assert isinstance(loaded, ReCaVSR)
        part = loaded
    if graphs:
        part.graphs = BlockGraphs(part.generator, CudaCapture(part.device))
    return part


def one_card(model: SharedModel) -> ReCaVSR:
    """Return the first card's part as a model of its own, with the same weights."""
    alone = copy(model._local)
    alone.rank, alone.ranks = 0, 1
    if model.device.type == "cuda":  # as a card alone has them, always
        alone.graphs = BlockGraphs(alone.generator, CudaCapture(alone.device))
    return alone


def links(model: SharedModel) -> dict[str, float]:
    """Time a copy of 256 MB from the first card to the second."""
    source = torch.empty(1 << 28, dtype=torch.uint8, device=model.device)
    target = torch.empty_like(source, device="cuda:1")
    took = milliseconds(lambda: target.copy_(source), model.device)
    return {"copy_gb_s": round(source.numel() / took / 1e6, 1)}


def agreement(model: SharedModel, size: tuple[int, int]) -> dict[str, list[float]]:
    """Return the relative error of four blocks' frames, and what one rounding of the input changes."""
    alone, errors, usual = one_card(model), [], []
    states: list[Any] = [alone.start(*size), alone.start(*size), model.start(*size)]
    for index in range(4):
        lr_frames = random_frames(model.blocks.frames(index), size, model.device, model.dtype)
        other = (lr_frames.float() * (1 + 2.0**-9 * torch.randn_like(lr_frames.float()))).to(model.dtype)
        steps: list[tuple[Any, Tensor]] = [(alone, lr_frames), (alone, other), (model, lr_frames)]
        frames = []
        for number, (who, given) in enumerate(steps):
            states[number], made = who.step(states[number], given)
            frames.append(made)
        wanted, rounded, shared = frames
        usual.append(round(((rounded - wanted).norm() / wanted.norm()).item(), 6))
        errors.append(round(((shared - wanted).norm() / wanted.norm()).item(), 6))
    return {"error": errors, "of a rounded input": usual}


def exchange(model: SharedModel, size: tuple[int, int]) -> dict[str, float]:
    """Return the ms that a steady block spends in exchanges on the first card, and their number."""
    if model.device.type != "cuda" or model.graphs is not None:  # a replay calls nothing
        return {}
    plain: Callable[..., Any] = Band._exchange
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def timed(self: Band, *arguments: Any) -> Any:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        made = plain(self, *arguments)
        end.record()
        marks.append((begin, end))
        return made

    state, found = model.start(*size), []
    for index in range(6):
        lr_frames = random_frames(model.blocks.frames(index), size, model.device, model.dtype)
        marks.clear()
        Band._exchange = timed  # type: ignore[method-assign]
        try:
            state, _ = model.step(state, lr_frames)
        finally:
            Band._exchange = plain  # type: ignore[method-assign]
        torch.cuda.synchronize()
        found.append(sum(begin.elapsed_time(end) for begin, end in marks))
    return {"exchange_ms": round(statistics.median(found[2:]), 2), "exchanges": len(marks)}


def lost(model: SharedModel) -> dict[str, Any]:
    """Kill a worker in the middle of a block; return what is said, and after how long."""
    size, state = SIZES["small"], model.start(*SIZES["small"])
    state, _ = model.step(state, random_frames(21, size, model.device))
    os.kill(model._workers[-1].process.pid, signal.SIGKILL)
    began = time.perf_counter()
    try:
        model.step(state, random_frames(8, size, model.device))
    except InputError as error:
        return {"said": str(error), "after_s": round(time.perf_counter() - began, 2)}
    return {"said": None}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--model", default=RANDOM_5B, help=f"{RANDOM_5B} (random weights), nano, a model folder"
    )
    parser.add_argument("--devices", default="cuda:0,cuda:1")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--size", default="4k,1080p", help="of " + ", ".join(SIZES))
    parser.add_argument("--check", default="check", choices=SIZES, help="size at which frames are compared")
    parser.add_argument("--seconds", type=float, default=90)
    parser.add_argument("--graphs", action="store_true", help="also of the blocks that several cards share")
    parser.add_argument("--kill", action="store_true", help="at the end, see what a lost worker does")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    devices = [torch.device(name) for name in given.devices.split(",")]
    rows: dict[str, Any] = {
        "devices": given.devices,
        "precision": given.precision,
        "graphs": given.graphs,
    }

    def part(name: str, call: Callable[[], Any]) -> Any:
        if time.perf_counter() - BEGAN > given.seconds:
            print(f"{name}: no time left", flush=True)
            return None
        try:
            rows[name] = call()
        except Exception:
            traceback.print_exc()
            rows[name] = {"failed": traceback.format_exc().strip().splitlines()[-1]}
        rows[f"{name} ended at s"] = round(time.perf_counter() - BEGAN, 1)
        print(f"{name}: {json.dumps(rows[name])} ({rows[f'{name} ended at s']} s)", flush=True)
        if given.output:
            given.output.write_text(json.dumps({**rows, "environment": about}, indent=1) + "\n")
        return rows[name]

    about = environment(str(devices[0]))
    options = {"model": given.model, "precision": given.precision, "graphs": given.graphs}
    model = open_shared("multi_gpu:open_part", devices, options)
    print(f"opened after {time.perf_counter() - BEGAN:.1f} s", flush=True)
    if model.device.type == "cuda":
        part("links", lambda: links(model))
    part("agreement", lambda: agreement(model, SIZES[given.check]))
    for name in given.size.split(","):
        size, frames = SIZES[name], FRAMES[name]
        alone = one_card(model)
        one = part(f"{name}, one", lambda: measure_stream(alone, whole(alone), size, frames)[0])  # noqa: B023

        def on_all(size: tuple[int, int] = size, frames: int = frames) -> dict[str, Any]:
            model.peak_memory()
            row, _ = measure_stream(model, whole(model), size, frames)  # type: ignore[arg-type]
            peaks = [round(peak / 1e9, 2) for peak in model.peak_memory()]
            return {**row, "peak_gb": peaks}

        everywhere = part(f"{name}, all", on_all)
        if one and everywhere and "steady_fps" in one and "steady_fps" in everywhere:
            rows[f"{name}, ratio"] = round(everywhere["steady_fps"] / one["steady_fps"], 3)
            print(f"{name}, ratio: {rows[f'{name}, ratio']}", flush=True)
        part(f"{name}, exchange", lambda: exchange(model, size))  # noqa: B023
    if given.kill:
        part("lost", lambda: lost(model))
    model.close()
    print(f"all after {time.perf_counter() - BEGAN:.1f} s", flush=True)


if __name__ == "__main__":
    main()
