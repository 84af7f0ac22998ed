"""Forms of the window attention kernel on one card: each checked against float32, then timed.

    PYTHONPATH=src python benchmarks/attention_variants.py --seconds 100

Each kind runs in a process of its own, which is ended when it takes too long: a kernel that waits for ever
costs nothing else. `useful` TFLOP/s count the keys inside the queries' own windows only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from recavsr.attention import SpatialWindow, _tiled, plan_window
from recavsr.evaluation.floor import attention_work
from recavsr.evaluation.speed import milliseconds
from recavsr.geometry import Grid
from recavsr.kernels.window import Launch, window_attention

ROUTE = {2: 10, 3: 2, 4: 8, 6: 6, 7: 4}
"""Latents that a layer of the paper's route sees in a steady block, and how many layers see so many."""

GENERATOR = (SpatialWindow(22, 40), 24, 2, 1, 128)  # window, groups, latents, heads of a group, channels
FIRST = (SpatialWindow(22, 40), 24, 6, 1, 128)
BACKBONE = (SpatialWindow(24, 24, border="cut"), 2, 1, 4, 64)
REFINEMENT = (SpatialWindow(24, 24, border="cut"), 2, 4, 4, 64)
TIMED = {
    "34x60": (Grid(34, 60), GENERATOR, 2),
    "68x120": (Grid(68, 120), GENERATOR, 2),
    "backbone": (Grid(68, 120), BACKBONE, 1),
    "refinement": (Grid(68, 120), REFINEMENT, 4),
}
CHECKED = {
    "steady": (Grid(34, 60), GENERATOR, 5),
    "no history": (Grid(34, 60), GENERATOR, 0),
    "first block": (Grid(34, 60), FIRST, 0),
    "odd grid": (Grid(37, 53), GENERATOR, 1),
    "narrow grid": (Grid(23, 41), GENERATOR, 2),
    "backbone": (Grid(68, 120), BACKBONE, 1),
    "refinement": (Grid(68, 120), REFINEMENT, 4),
    "odd backbone": (Grid(45, 37), BACKBONE, 1),
}
Pieces = list[tuple[Tensor, Tensor]]
Attend = Callable[[Tensor, Pieces, Grid, SpatialWindow], Tensor]


def forms(kind: str) -> dict[str, Attend]:
    """Return the forms of one kind by name."""
    if kind == "more":
        cuts = {
            "128, 4 x 8": Launch(),
            "128, 1 x 8": Launch(block=(1, 8)),
            "128, 2 x 16": Launch(block=(2, 16)),
            "128, cap, 3 stages": Launch(block=(2, 8), stages=3),
            "128, 4 warps": Launch(block=(2, 8), warps=4, registers=None),
            "128, 32 keys, cap, 3 stages": Launch(keys=32, block=(2, 8), stages=3),
            "64, cap of 168, 3 stages": Launch(queries=64, warps=4, stages=3, block=(2, 8), registers=168),
            "64, cap of 128, 3 stages": Launch(queries=64, warps=4, stages=3, block=(2, 8), registers=128),
            "64, 4 x 8": Launch(queries=64, warps=4, registers=None),
        }
        return {name: partial(window_attention, launch=launch) for name, launch in cuts.items()}
    cuts = {
        "triton 128": Launch(block=(2, 8)),
        "triton 128, no cap": Launch(block=(2, 8), registers=None),
        "triton 128, no cap, 3 stages": Launch(block=(2, 8), stages=3, registers=None),
        "triton 64": Launch(queries=64, warps=4, block=(2, 8), registers=None),
        "triton 64, 3 stages": Launch(queries=64, warps=4, stages=3, block=(2, 8), registers=None),
        "triton 64, 32 keys": Launch(queries=64, keys=32, warps=4, stages=3, block=(2, 8), registers=None),
    }
    return {name: partial(window_attention, launch=launch) for name, launch in cuts.items()}


def inputs(grid: Grid, kind: tuple[Any, ...], past: int) -> tuple[Tensor, Pieces]:
    """Return a query, and keys and values of history and block, in the memory order that the model gives."""
    _, groups, latents, repeats, width = kind
    make = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    query = make(1, grid.cells, latents, groups, repeats, width).permute(0, 3, 1, 2, 4, 5)
    now = make(2, 1, grid.cells, latents, groups, width).permute(0, 1, 4, 2, 3, 5)
    slots = max(past, 6)  # some of them not in use
    before = make(2, 1, groups, grid.cells, slots, width)[..., :past, :]
    return query, [tuple(before), tuple(now)] if past else [tuple(now)]  # type: ignore[list-item]


def error_of(attend: Attend, grid: Grid, kind: tuple[Any, ...], past: int) -> tuple[float, float]:
    """Return the relative error against float32, and that of the plain form in bfloat16."""
    query, pieces = inputs(grid, kind, past)
    key, value = (torch.cat(pair, dim=3) for pair in zip(*pieces))
    plan, scale = plan_window(grid, kind[0], query.device).tiling, kind[-1] ** -0.5
    assert plan is not None
    wanted = _tiled(query.float(), key.float(), value.float(), plan, scale)
    plain = _tiled(query, key, value, plan, scale)
    poison = torch.full_like(query, float("nan"))
    del poison  # the next allocation of this size gets its memory
    ours = attend(query, pieces, grid, kind[0])
    return tuple(((x.float() - wanted).norm() / wanted.norm()).item() for x in (ours, plain))  # type: ignore[return-value]


@torch.inference_mode()
def measure(kind: str) -> None:
    """Check and time the forms of a kind; a line of JSON for each result."""
    began = time.perf_counter()

    def say(**facts: Any) -> None:
        print(json.dumps({**facts, "at": round(time.perf_counter() - began, 1)}), flush=True)

    if kind == "dense":
        for name, (grid, shape, past) in TIMED.items():
            query, pieces = inputs(grid, shape, past)
            key, value = (torch.cat(pair, dim=3) for pair in zip(*pieces))
            call = partial(F.scaled_dot_product_attention, *(x.flatten(2, -2) for x in (query, key, value)))
            say(form=kind, shape=name, ms=round(milliseconds(call, query.device, 5), 4))
        return
    jobs = [(kind, form, name) for form in forms(kind) for name in (*TIMED, *checked(form))]
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, *zip(*jobs)))
    say(compiled=len(jobs))
    for form, attend in forms(kind).items():
        try:
            errors = {name: error_of(attend, *CHECKED[name]) for name in checked(form)}
            wrong = {name: pair for name, pair in errors.items() if not pair[0] < 1.2 * pair[1]}
            say(form=form, checked=len(errors), worst=max(pair[0] for pair in errors.values()), wrong=wrong)
            for name, (grid, shape, past) in TIMED.items():
                query, pieces = inputs(grid, shape, past)
                window, groups, latents, repeats, width = shape
                seen, channels = past + latents, groups * repeats * width
                work = attention_work(window, grid, latents, seen, seen, channels, groups * width, 2)
                took = milliseconds(partial(attend, query, pieces, grid, window), query.device, 15)
                say(form=form, shape=name, ms=round(took, 4), useful=round(work.operations / took / 1e9))
            for grid in (Grid(34, 60), Grid(68, 120)):
                total = 0.0
                for seen, layers in ROUTE.items():
                    query, pieces = inputs(grid, GENERATOR, seen - 2)
                    call = partial(attend, query, pieces, grid, GENERATOR[0])
                    total += layers * milliseconds(call, query.device, 7)
                say(form=form, route=f"{grid.height}x{grid.width}", ms=round(total, 3))
        except Exception:
            say(form=form, failed=traceback.format_exc()[-700:])


def checked(form: str) -> list[str]:
    """Return the shapes that a form is checked at: all of them for the first of each kind."""
    return list(CHECKED) if form == "triton 128" else ["steady", "no history"]


@torch.inference_mode()
def compile_one(kind: str, form: str, name: str) -> None:
    """Run a form once at one shape, to fill the kernel cache from a process of its own."""
    grid, shape, past = CHECKED[name] if name in CHECKED and name not in TIMED else TIMED[name]
    query, pieces = inputs(grid, shape, past)
    try:
        forms(kind)[form](query, pieces, grid, shape[0])
        torch.cuda.synchronize()
    except Exception as error:  # said in full by the process that measures
        print(f"{form} {name}: {str(error)[-200:]}", flush=True)


def main() -> int:
    """Run every kind in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kinds", default="triton,more,dense")
    parser.add_argument("--seconds", type=float, default=120, help="for all of them")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        measure(given.child)
        return 0
    deadline, lines = time.perf_counter() + given.seconds, []
    for kind in given.kinds.split(","):
        command = [sys.executable, __file__, "--child", kind]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        left = max(10.0, min(90.0, deadline - time.perf_counter()))
        try:
            text, _ = process.communicate(timeout=left)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with those that it started
            text = process.communicate()[0] + f"{kind}: ended after {left:.0f} s\n"
        print(text, end="", flush=True)
        lines += text.splitlines()
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "attention_variants.jsonl").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
