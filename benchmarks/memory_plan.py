"""Plans like `--memory 8GB` on one card, under a hard cap: what they take, how fast, are pixels the same?

    PYTHONPATH=src python benchmarks/memory_plan.py --budgets 8GB,12GB --output memory_plan.json

The 5B model with random weights at 1088 x 1920. First it runs with all layers on the card, as without a
plan. Then for each budget the process may take no more of the card than that (the allocator's cap, which
counts what it reserves, free pieces included, but not CUDA's own context), the model is made anew within its
plan, and a few blocks must come out as before, bit for bit. A budget that is not kept to ends with an
out-of-memory error here.

Reported are the counted peak, those measured (allocated and reserved) of the model alone and of a session
from LR frames to pictures, and frames a second with what travels over the bus.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recavsr.evaluation.environment import environment
from recavsr.evaluation.speed import PROMPT_TOKENS, RANDOM_5B, measure_stream, whole
from recavsr.models.offload import StreamedLayers
from recavsr.models.presets import recavsr_5b, recavsr_5b_decoder
from recavsr.stream.blocks import prepare_lr_frames, to_picture
from recavsr.stream.drift import color_difference
from recavsr.stream.load import load, random_model
from recavsr.stream.memory import parse_memory
from recavsr.stream.step import ReCaVSR

BEGAN = time.perf_counter()
BLOCKS = 4


def open_model(name: str, precision: str, size: tuple[int, int], memory: str | None, device: str) -> Any:
    """Make the model, the same weights each time; return it and what its plan said."""
    said: list[str] = []
    settings: dict[str, Any] = {
        "device": device, "precision": precision, "memory": memory, "out_size": size, "tell": said.append,
    }  # fmt: skip
    torch.manual_seed(0)
    if name == RANDOM_5B:
        return random_model(name, recavsr_5b(), recavsr_5b_decoder(), PROMPT_TOKENS, **settings), said
    return load(name, **settings), said


def frames_of(model: ReCaVSR, size: tuple[int, int]) -> list[Tensor]:
    """Return the first blocks' frames of a random clip, in main memory."""
    state, made, random = model.start(*size), [], torch.Generator().manual_seed(0)
    for index in range(BLOCKS):
        shape = (1, 3, model.blocks.frames(index), *size)
        levels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random)
        lr_frames = levels.to(model.device).to(model.dtype) / 127.5 - 1
        state, frames = model.step(state, lr_frames)
        made.append(frames.cpu())
    return made


def peaks(device: torch.device) -> dict[str, float]:
    """Return GB at most allocated and reserved since this was last asked."""
    if device.type != "cuda":
        return {}
    found = {
        "allocated_gb": round(torch.cuda.max_memory_allocated(device) / 1e9, 3),
        "reserved_gb": round(torch.cuda.max_memory_reserved(device) / 1e9, 3),
    }
    torch.cuda.reset_peak_memory_stats(device)
    return found


def measured(model: ReCaVSR, size: tuple[int, int]) -> dict[str, Any]:
    """Return speed and memory of the model alone, and memory of a whole session."""
    row = measure_stream(model, whole(model), size, 45)[0]  # not the state: it would lie beside the session's
    result = {"steady_fps": row["steady_fps"], "block_ms": row["block_ms"], "model": peaks(model.device)}
    small = (size[0] // 4, size[1] // 4)
    state = model.start(*size)
    for index in range(3):  # what a session does, which would need PyAV beside it
        clip = np.random.default_rng(index).integers(
            0, 256, (model.blocks.frames(index), *small, 3), np.uint8
        )
        lr_frames = prepare_lr_frames(clip, size, model.size_multiple, model.device).to(model.dtype)
        state, frames = model.step(state, lr_frames)
        color_difference(frames, clip)
        assert to_picture(frames, size, clip.dtype).shape == (len(clip), *size, 3)
        del frames, lr_frames
    return {**result, "session": peaks(model.device)}


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--model", default=RANDOM_5B, help=f"{RANDOM_5B} (random weights), nano, a model folder"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--size", default="1088x1920", help="HEIGHTxWIDTH, multiples of 32")
    parser.add_argument("--budgets", default="8GB,12GB")
    parser.add_argument("--seconds", type=float, default=85, help="no part begins later")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    height, width = (int(side) for side in given.size.split("x"))
    size, device = (height, width), torch.device(given.device)
    rows: dict[str, Any] = {"size": list(size), "precision": given.precision}
    wanted: list[Tensor] = []

    def part(budget: str | None) -> dict[str, Any]:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            whole_card = torch.cuda.get_device_properties(device).total_memory
            share = 1.0 if budget is None else parse_memory(budget) / whole_card
            torch.cuda.set_per_process_memory_fraction(share, 0)
            torch.cuda.reset_peak_memory_stats(device)
        began = time.perf_counter()
        model, said = open_model(given.model, given.precision, size, budget, given.device)
        result: dict[str, Any] = {"opened_s": round(time.perf_counter() - began, 1), "plan": said}
        result["opening"] = peaks(device)
        blocks = model.generator.blocks
        result["staying"] = sum(blocks.resident) if isinstance(blocks, StreamedLayers) else len(blocks)
        frames = frames_of(model, size)
        if budget is None:
            wanted.extend(frames)
        elif wanted:
            result["same pixels"] = [torch.equal(*pair) for pair in zip(frames, wanted, strict=True)]
        return {**result, **measured(model, size)}

    for budget in (None, *given.budgets.split(",")):
        name = budget or "all on the card"
        if time.perf_counter() - BEGAN > given.seconds:
            print(f"{name}: no time left", flush=True)
            continue
        try:
            rows[name] = part(budget)
        except Exception as error:
            traceback.print_exc()
            rows[name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
        print(f"{name}: {json.dumps(rows[name])} ({time.perf_counter() - BEGAN:.1f} s)", flush=True)
        if given.output:
            about = environment(given.device)
            given.output.write_text(json.dumps({**rows, "environment": about}, indent=1) + "\n")


if __name__ == "__main__":
    main()
