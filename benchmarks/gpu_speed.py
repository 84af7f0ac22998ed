"""What the kernels and a steady 1080p block of the 5B model do on one card: checks, times, a profile.

    PYTHONPATH=src python benchmarks/gpu_speed.py --seconds 240           # by importance

Parts: `tune` (how the Triton window kernel is cut), for each precision `block` (a stream of random 5B weights
with graphs and without: times, parts, floor, peak memory), `pictures` (a session from pictures to pictures),
`profile` (one steady block, kernel by kernel), `4k` (a stream at 2176 x 3840, and where its memory peaks);
then `check` (kernels against plain forms at real shapes), `rows` (passes over tokens: kernels against
torch.compile). A part that fails prints its traceback, and the next one begins. Results also go to $OUT.
`recavsr bench` measures whole streams, `attention_variants.py` forms of the window kernel.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from copy import copy
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from recavsr.attention import SpatialWindow, _tiled, plan_window
from recavsr.evaluation.environment import environment
from recavsr.evaluation.floor import attention_work
from recavsr.evaluation.speed import (
    RANDOM_5B,
    Options,
    generator_alone,
    measure_ceilings,
    measure_floor,
    measure_parts,
    measure_stream,
    milliseconds,
    open_model,
    random_frames,
    short_first_block,
    whole,
)
from recavsr.fp8 import Float8Rows, FP8Linear, quantize_rows
from recavsr.fused import add_norm, gelu_float8, gelu_linear, norm_rotate, rms_norm
from recavsr.geometry import Grid
from recavsr.kernels.window import Launch, window_attention
from recavsr.models import decoder as decoder_module
from recavsr.rope import AxisSplit, rotate, rotation_table
from recavsr.stream.blocks import prepare_lr_frames, to_picture
from recavsr.stream.session import Session

CARD = torch.device("cuda")
BEGAN = time.perf_counter()
SIZE = (1088, 1920)
ROUTE = {2: 10, 3: 2, 4: 8, 6: 6, 7: 4}
"""Latents that a layer of the paper's route sees in a steady block, and how many layers see so many."""

GENERATOR = (SpatialWindow(22, 40), 24, 2, 1, 128)  # window, groups, latents, heads of a group, channels
BACKBONE = (SpatialWindow(24, 24, border="cut"), 2, 1, 4, 64)
REFINEMENT = (SpatialWindow(24, 24, border="cut"), 2, 4, 4, 64)
# Name: grid, kind, latents of history, launches (queries, keys, warps, stages, block of keys, registers).
CASES = {
    "generator 34x60": (
        Grid(34, 60),
        GENERATOR,
        2,
        "128,64,8,2,4,8,128 128,32,8,3,4,8,128 256,64,16,2,4,8,128 256,32,16,3,4,8,128 "
        "64,64,4,2,4,8,0 64,32,4,3,4,8,0 128,64,8,3,4,8,0 128,128,8,2,4,8,0 128,64,8,2,2,8,128",
    ),
    "generator 68x120": (
        Grid(68, 120),
        GENERATOR,
        2,
        "128,64,8,2,4,8,128 256,64,16,2,4,8,128 64,64,4,2,4,8,0 128,128,8,2,4,8,0",
    ),
    "decoder backbone 68x120": (
        Grid(68, 120),
        BACKBONE,
        1,
        "128,64,8,2,4,8,128 128,64,8,3,4,8,128 64,64,4,3,4,8,0 64,64,4,3,4,8,128 64,64,4,3,2,8,0 "
        "128,64,4,2,4,8,0 64,128,4,2,4,8,0 64,32,4,3,4,8,0",
    ),
    "decoder refinement 68x120": (
        Grid(68, 120),
        REFINEMENT,
        4,
        "128,64,8,2,4,8,128 64,64,4,3,4,8,0 64,64,4,3,4,8,128 128,64,4,2,4,8,0",
    ),
}


def say(*words: object) -> None:
    """Print at once."""
    print(*words, flush=True)


KEPT: dict[str, Any] = {}


def keep(name: str, value: Any) -> None:
    """Print a result, and write all of them so far into the folder OUT."""
    if isinstance(value, dict):
        value = {key: round(v, 3) if isinstance(v, float) else v for key, v in value.items()}
    elif isinstance(value, float):
        value = round(value, 4)
    KEPT[name] = value
    say(f"  {name}: {value}", _elapsed())
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "gpu_speed.json").write_text(json.dumps(KEPT, indent=1, default=str))


def inputs(
    grid: Grid, kind: tuple[Any, ...], past: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Any, ...]:
    """Return a query, and keys and values of history and block, in the memory order that the model gives."""
    _, groups, latents, repeats, width = kind
    query = torch.randn(1, grid.cells, latents, groups, repeats, width, device=CARD, dtype=dtype)
    now = torch.randn(2, 1, grid.cells, latents, groups, width, device=CARD, dtype=dtype)
    before = torch.randn(2, 1, groups, grid.cells, past, width, device=CARD, dtype=dtype)
    return query.permute(0, 3, 1, 2, 4, 5), now.permute(0, 1, 4, 2, 3, 5), before


# ---------------------------------------------------------------------------------------------------- parts


@torch.inference_mode()
def check() -> None:
    """Compare the kernels with plain forms in float32."""
    cases = [
        ("generator, steady", Grid(34, 60), GENERATOR, 4),
        ("generator, no history", Grid(34, 60), GENERATOR, 0),
        ("generator, first block", Grid(34, 60), (*GENERATOR[:2], 6, *GENERATOR[3:]), 0),
        ("generator, odd grid", Grid(37, 53), GENERATOR, 1),
        ("decoder backbone", Grid(68, 120), BACKBONE, 1),
        ("decoder refinement", Grid(68, 120), REFINEMENT, 4),
    ]
    for name, grid, kind, past in cases:
        query, now, before = inputs(grid, kind, past)
        pieces = [tuple(now)] if past == 0 else [tuple(before), tuple(now)]
        got = window_attention(query, pieces, grid, kind[0])
        key, value = (torch.cat(pair, dim=3) for pair in zip(*pieces))
        plan = plan_window(grid, kind[0], CARD).tiling
        scale = kind[-1] ** -0.5
        wanted = _tiled(query.float(), key.float(), value.float(), plan, scale)
        plain = _tiled(query, key, value, plan, scale)
        error, usual = ((x.float() - wanted).norm() / wanted.norm() for x in (got, plain))
        worst = (got.float() - wanted).abs().max()
        say(f"  {name}: error {error:.2e} (plain bf16 {usual:.2e}), largest {worst:.3f}")

    x, update = torch.randn(2, 1, 2040, 2, 3072, device=CARD, dtype=torch.bfloat16)
    weight = torch.randn(3072, device=CARD, dtype=torch.bfloat16)
    both = x + update
    total, normal = add_norm(x.clone(), update, 1e-6, False)
    wanted = F.layer_norm(both.float(), (3072,), eps=1e-6)
    say(f"  add_norm: sum equal {torch.equal(total, both)}, norm {_error(normal, wanted):.2e}")
    _, rounded = add_norm(x.clone(), update, 1e-6, True)
    plain = quantize_rows(wanted.to(torch.bfloat16).flatten(0, -2))
    ours, theirs = (
        _error(r[0].float() * r[1], wanted.flatten(0, -2)) for r in ((rounded.values, rounded.scale), plain)
    )
    say(f"  add_norm, float8: {ours:.2e} (plain {theirs:.2e})")
    wide = torch.randn(1, 2040, 2, 14336, device=CARD, dtype=torch.bfloat16)
    rounded, wanted = gelu_float8(wide), F.gelu(wide.float(), approximate="tanh")
    plain = quantize_rows(wanted.to(torch.bfloat16).flatten(0, -2))
    ours, theirs = (
        _error(r[0].float() * r[1], wanted.flatten(0, -2)) for r in ((rounded.values, rounded.scale), plain)
    )
    say(f"  gelu_float8: {ours:.2e} (plain {theirs:.2e})")
    wanted = F.rms_norm(x.float(), (3072,), weight.float(), 1e-6)
    say(f"  rms_norm: {_error(rms_norm(x, weight, 1e-6), wanted):.2e}")
    qkv = torch.randn(1, 2040, 2, 9216, device=CARD, dtype=torch.bfloat16)
    table = rotation_table((7, 8), Grid(34, 60), AxisSplit.wan(128), CARD)
    query, key = norm_rotate(qkv, weight, weight, 1e-6, table, 24)
    for name, got, part in (("queries", query, 0), ("keys", key, 1)):
        plain = F.rms_norm(qkv.chunk(3, -1)[part].float(), (3072,), weight.float(), 1e-6)
        say(f"  norm_rotate, {name}: {_error(got, rotate(plain.unflatten(-1, (24, -1)), table)):.2e}")
    up = torch.randn(14336, 3072, device=CARD, dtype=torch.bfloat16) / 55
    bias = torch.randn(14336, device=CARD, dtype=torch.bfloat16)
    wanted = F.gelu(F.linear(x.float(), up.float(), bias.float()), approximate="tanh")
    say(f"  gelu_linear: {_error(gelu_linear(x, up, bias), wanted):.2e}")


def _error(got: Tensor, wanted: Tensor) -> float:
    return ((got.float() - wanted).norm() / wanted.norm()).item()


def _launches(text: str) -> list[Launch]:
    numbers = [tuple(map(int, launch.split(","))) for launch in text.split()]
    return [Launch(*cut[:4], block=cut[4:6], registers=cut[6] or None) for cut in numbers]


def _compile(case: str, launch: Launch) -> None:
    """Run one launch once, to fill the kernel cache from a process of its own."""
    grid, kind, past, _ = CASES[case]
    query, now, before = inputs(grid, kind, past)
    with torch.inference_mode():
        window_attention(query, [tuple(before), tuple(now)], grid, kind[0], launch)
    torch.cuda.synchronize()


@torch.inference_mode()
def tune() -> None:
    """Time the window kernel in several cuts, and dense attention over the same latents."""
    jobs = [(name, launch) for name, case in CASES.items() for launch in _launches(case[3])]
    with ProcessPoolExecutor(8, mp_context=get_context("spawn")) as pool:
        made = [pool.submit(_compile, *job) for job in jobs]
        failed = {job: future.exception() for job, future in zip(jobs, made) if future.exception()}
    say(f"  compiled {len(jobs)} launches, {len(failed)} failed", _elapsed())
    for name, (grid, kind, past, launches) in CASES.items():
        query, now, before = inputs(grid, kind, past)
        window, groups, latents, repeats, width = kind
        channels, seen = groups * repeats * width, past + latents
        work = attention_work(window, grid, latents, seen, seen, channels, groups * width, 2).operations
        best: tuple[float, Launch] | None = None
        for launch in _launches(launches):
            if (name, launch) in failed:
                say(f"  {name} {launch}: {str(failed[name, launch])[:150]!r}")
                continue
            call = partial(window_attention, query, [tuple(before), tuple(now)], grid, window, launch)
            took = milliseconds(call, CARD, 9)
            best = min(best or (took, launch), (took, launch), key=lambda pair: pair[0])
            say(f"  {name} {launch}: {took:.3f} ms, {work / took / 1e9:.0f} useful TFLOP/s")
        key, value = (torch.cat(pair, dim=3) for pair in zip(before, now))
        flat = [x.flatten(2, -2) for x in (query, key, value)]
        say(f"  {name} dense: {milliseconds(lambda: F.scaled_dot_product_attention(*flat), CARD, 5):.3f} ms")  # noqa: B023
        if best is None:
            continue
        if kind is not GENERATOR:
            continue
        total, dense = 0.0, 0.0
        for seen, layers in ROUTE.items():
            query, now, before = inputs(grid, kind, seen - latents)
            pieces = [tuple(now)] if seen == latents else [tuple(before), tuple(now)]
            total += layers * milliseconds(
                partial(window_attention, query, pieces, grid, window, best[1]), CARD, 5
            )
            key, value = (torch.cat(pair, dim=3) for pair in zip(before, now))
            flat = [x.flatten(2, -2) for x in (query, key, value)]
            if grid.height < 60:
                dense += layers * milliseconds(lambda: F.scaled_dot_product_attention(*flat), CARD, 3)  # noqa: B023
        say(f"  {name}, 30 layers with the paper's route, {best[1]}: {total:.2f} ms; dense {dense:.2f} ms")


@torch.inference_mode()
def block(model: Any, precision: str, ceilings: Any) -> None:
    """Measure a stream with graphs and without, its parts and its floor."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    model.step(model.start(*SIZE), random_frames(21, SIZE, CARD))
    torch.cuda.synchronize()
    say(f"  {precision} very first block: {time.perf_counter() - began:.2f} s, kernels compiled or loaded")
    row, state = measure_stream(model, whole(model), SIZE, 201)
    keep(f"{precision} whole", row)
    keep(f"{precision} floor", measure_floor(model, state, SIZE, precision, ceilings))
    floor = KEPT[f"{precision} floor"]["total"]
    say(f"  {precision} share of the floor: {floor / row['block_ms']:.3f}")
    keep(f"{precision} without waiting", unbroken(model, state))
    keep(f"{precision} graphs", graph_facts(model))
    del state
    eager = copy(model)
    eager.graphs = None
    row, state = measure_stream(eager, whole(eager), SIZE, 85)
    keep(f"{precision} whole, no graphs", row)
    keep(f"{precision} without waiting, no graphs", unbroken(eager, state))
    keep(f"{precision} first output of one latent s", short_first_block(model, SIZE))
    keep(f"{precision} parts", measure_parts(model, state, SIZE))
    del state
    keep(f"{precision} generator", measure_stream(eager, generator_alone(eager), SIZE, 85)[0])
    model.graphs._places.clear()
    first_pieces(eager, precision)
    peaks(eager, precision, SIZE)


def unbroken(model: Any, state: Any) -> dict[str, float]:
    """Run twelve blocks without waiting in between: ms of each, and ms to issue it."""
    frames = random_frames(8, SIZE, CARD, model.dtype)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(12):
        state, _ = model.step(state, frames)
    issued = time.perf_counter() - began
    torch.cuda.synchronize()
    return {"block_ms": (time.perf_counter() - began) / 0.012, "issue_ms": issued / 0.012}


def graph_facts(model: Any) -> dict[str, Any]:
    """Return how many graphs there are and what memory is reserved in all."""
    if model.graphs is None:
        return {"graphs": None}
    return {
        "graphs": [len(place.graphs) for place in model.graphs._places],
        "reserved_gb": torch.cuda.memory_reserved() / 1e9,
        "allocated_gb": torch.cuda.memory_allocated() / 1e9,
        "free_gb": torch.cuda.mem_get_info()[0] / 1e9,
    }


@torch.inference_mode()
def pictures(model: Any) -> None:
    """Time a session from pictures to pictures, and the copy of the results alone."""
    session = Session(model, (270, 480), (1080, 1920))
    random = np.random.default_rng(0)
    clip = random.integers(0, 256, (21 + 8 * 30, 270, 480, 3), np.uint8)
    session.push(clip[:165])
    began = time.perf_counter()
    session.push(clip[165:])
    keep("session, pictures to pictures, FPS", len(clip[165:]) / (time.perf_counter() - began))
    frames = random_frames(8, SIZE, CARD, model.dtype)
    keep(
        "to pictures ms", milliseconds(lambda: to_picture(frames, (1080, 1920), np.dtype(np.uint8)), CARD, 9)
    )
    keep("enlarging ms", milliseconds(lambda: prepare_lr_frames(clip[:8], (1080, 1920), 32, CARD), CARD, 9))


def large(model: Any, precision: str) -> None:
    """Measure a stream at 4K, and where its memory peaks."""
    keep(f"{precision} 2176x3840 whole", measure_stream(model, whole(model), (2176, 3840), 201)[0])
    keep(f"{precision} 2176x3840 graphs", graph_facts(model))
    model.graphs._places.clear()
    peaks(model, precision, (2176, 3840))


def first_pieces(model: Any, precision: str) -> None:
    """Measure a first block of 21 frames with one and with two latents decoded at once."""
    kept = decoder_module.CARD_PIECE_LATENTS
    for latents in (1, 2, 1, 2):
        decoder_module.CARD_PIECE_LATENTS = latents
        took = []
        for _ in range(4):
            state, frames = model.start(*SIZE), random_frames(21, SIZE, CARD, model.dtype)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            model.step(state, frames)
            torch.cuda.synchronize()
            took.append(round(time.perf_counter() - began, 4))
        peak = torch.cuda.max_memory_allocated() / 1e9
        keep(f"{precision} first block, {latents} latents at once: s, peak GB", [min(took[1:]), peak])
    decoder_module.CARD_PIECE_LATENTS = kept


def peaks(model: Any, precision: str, size: tuple[int, int]) -> None:
    """Print where the memory of a stream's first three blocks peaks."""
    gc.collect()
    torch.cuda.empty_cache()
    peaks = []
    state = model.start(*size)
    for index in range(3):
        frames = random_frames(model.blocks.frames(index), size, CARD, model.dtype)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / 1e9
        with torch.inference_mode():
            latents = model.generate(state, frames)
            peaks.append((round(before, 2), round(torch.cuda.max_memory_allocated() / 1e9, 2)))
            torch.cuda.reset_peak_memory_stats()
            decoder, made = model.decoder.step(state.decoder, latents[1], frames, None, in_place=True)
        peaks.append((round(torch.cuda.max_memory_allocated() / 1e9, 2), tuple(made.shape)))
        state = replace(state, generator=latents[0], decoder=decoder, block=index + 1)
        del latents, decoder, made, frames
    keep(f"{precision} {size[0]}x{size[1]} peaks: before, generator; decoder", peaks)


@torch.inference_mode()
def profile(model: Any, precision: str) -> None:
    """Print where one steady block spends its time, kernel by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    state = model.start(*SIZE)
    for index in range(5):
        state, _ = model.step(state, random_frames(model.blocks.frames(index), SIZE, CARD))
    frames = random_frames(8, SIZE, CARD)
    torch.cuda.synchronize()
    with record(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        model.step(state, frames)
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = {}
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spent.setdefault(event.name, []).append(event.device_time)
    total = sum(map(sum, spent.values()))
    say(f"  {precision}: {total / 1000:.2f} ms in {sum(map(len, spent.values()))} kernels")
    for name, times in sorted(spent.items(), key=lambda item: -sum(item[1]))[:40]:
        say(
            f"  {sum(times) / 1000:8.3f} ms {len(times):5d} x {sum(times) / len(times):8.1f} us  {name[:110]}"
        )


@torch.inference_mode()
def rows() -> None:
    """Time the passes over tokens, and what torch.compile makes of their plain forms."""
    x, update = torch.randn(2, 1, 2040, 2, 3072, device=CARD, dtype=torch.bfloat16)
    qkv = torch.randn(1, 2040, 2, 9216, device=CARD, dtype=torch.bfloat16)
    wide = torch.randn(1, 2040, 2, 14336, device=CARD, dtype=torch.bfloat16)
    weight = torch.randn(3072, device=CARD, dtype=torch.bfloat16)
    up = torch.randn(14336, 3072, device=CARD, dtype=torch.bfloat16) / 55
    bias = torch.randn(14336, device=CARD, dtype=torch.bfloat16)
    table = rotation_table((7, 8), Grid(34, 60), AxisSplit.wan(128), CARD)
    prompt = torch.randn(2, 1, 24, 512, 128, device=CARD, dtype=torch.bfloat16)
    query = x.flatten(1, 2).unflatten(-1, (24, -1)).transpose(1, 2)
    few = {
        "add_norm": lambda: add_norm(x, update, 1e-6, False),
        "add_norm to float8": lambda: add_norm(x, update, 1e-6, True),
        "rms_norm": lambda: rms_norm(x, weight, 1e-6),
        "norm_rotate": lambda: norm_rotate(qkv, weight, weight, 1e-6, table, 24),
        "gelu to float8": lambda: gelu_float8(wide),
        "to float8": lambda: Float8Rows.of(x),
        "gelu_linear": lambda: gelu_linear(x, up, bias),
        "linear": lambda: F.linear(x, up, bias),
        "linear, then gelu": lambda: F.gelu(F.linear(x, up, bias), approximate="tanh"),
        "attention to the prompt": lambda: F.scaled_dot_product_attention(query, *prompt),
        "sum of two": lambda: x + update,
    }
    for name, call in few.items():
        say(f"  {name}: {milliseconds(call, CARD, 9) * 1000:.1f} us")
    layer = FP8Linear(up, bias)
    rounded = Float8Rows.of(x)
    say(f"  float8 product 3072 -> 14336: {milliseconds(lambda: layer(rounded), CARD, 9) * 1000:.1f} us")

    def plain_norm(x: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        total = x + update
        return total, F.layer_norm(total, total.shape[-1:], eps=1e-6)

    def plain_rotate(qkv: Tensor) -> Tensor:
        parts = [F.rms_norm(y.float(), (3072,), weight.float(), 1e-6) for y in qkv[..., :6144].chunk(2, -1)]
        return torch.stack([rotate(y.unflatten(-1, (24, -1)), table).to(qkv.dtype) for y in parts])

    for name, function, given in (
        ("add_norm", plain_norm, (x, update)),
        ("norm_rotate", plain_rotate, (qkv,)),
    ):
        took = milliseconds(partial(torch.compile(function), *given), CARD, 9)
        say(f"  {name}, torch.compile: {took * 1000:.1f} us", _elapsed())


# -------------------------------------------------------------------------------------------------------- run


def _elapsed() -> str:
    return f"[{time.perf_counter() - BEGAN:.0f} s]"


def attempt(name: str, call: Callable[[], None]) -> None:
    """Run one part; whatever goes wrong in it is printed, and the run goes on."""
    say(f"== {name} {_elapsed()}")
    try:
        call()
    except Exception:
        say(traceback.format_exc())
    gc.collect()
    torch.cuda.empty_cache()


def main() -> int:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parts", default="block,pictures,4k,profile,check,rows")
    parser.add_argument("--precision", default="bf16,fp8")
    parser.add_argument("--seconds", type=float, default=225, help="begin no further part after so long")
    given = parser.parse_args()
    parts, precisions = given.parts.split(","), given.precision.split(",")
    say(environment("cuda"))
    ceilings = measure_ceilings(CARD, precisions)
    keep("ceilings", ceilings.rounded())
    keep("environment", environment("cuda"))

    def late() -> bool:
        return time.perf_counter() - BEGAN > given.seconds

    if "tune" in parts and not late():
        attempt("tune", tune)
    made: list[Any] = []
    for precision in precisions:
        if late() or not {"block", "pictures", "profile", "4k"} & set(parts):
            break
        made.clear()
        gc.collect()
        torch.cuda.empty_cache()
        options = Options(model=RANDOM_5B, sizes=((1920, 1080),), precisions=(precision,))
        attempt(f"model {precision}", lambda: made.append(open_model(options, CARD, precision)))  # noqa: B023
        if made and "block" in parts:
            attempt(f"block {precision}", partial(block, made[0], precision, ceilings))
        if made and "pictures" in parts and not late():
            attempt(f"pictures {precision}", partial(pictures, made[0]))
        if made and "profile" in parts and not late():
            attempt(f"profile {precision}", partial(profile, made[0], precision))
        if made and "4k" in parts and not late():
            attempt(f"4k {precision}", partial(large, made[0], precision))
    if "check" in parts and not late():
        attempt("check", check)
    if "rows" in parts and not late():
        attempt("rows", rows)
    say("done", _elapsed())
    return 0


if __name__ == "__main__":
    sys.exit(main())
