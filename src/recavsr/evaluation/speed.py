"""Speed and memory by the paper's protocol, the counted floor, and a baseline in the same run.

    python -m recavsr.evaluation.speed --model recavsr-5b --size 1080p,4k --precision bf16,fp8

The protocol: 201 frames in blocks of 21, 8, 8, ...; warm-up first; CUDA events around the model (a clock on a
CPU), reading, enlarging and writing excluded; peak allocated memory in decimal GB; medians. `recavsr-5b` is
the 5B model with random weights, made on the device in their final form: speed does not depend on them.

Beside the whole model: the generator alone; every part alone, at the shapes of a steady block; the floor that
`evaluation.floor` counts, at ceilings measured in this run; what else the card or the CPU could run (the
diffusion transformer of diffusers, or bicubic and a small network); a file upscaled from end to end, for a
named model by the command in a process of its own, start and loading included.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recavsr.attention import plan_window, windowed_attention
from recavsr.causal_conv import Method
from recavsr.errors import InputError, run_module
from recavsr.evaluation.environment import environment
from recavsr.evaluation.floor import decoder_work, generator_work
from recavsr.fp8 import FP8Linear, quantize_rows, scaled_product, why_no_fp8
from recavsr.geometry import BlockPlan, Grid, padded_size
from recavsr.models.decoder import FlashDecoder
from recavsr.models.generator import Generator, GeneratorConfig
from recavsr.models.presets import recavsr_5b, recavsr_5b_decoder
from recavsr.models.weights import ModelFolder
from recavsr.stream.blocks import prepare_lr_frames, to_picture
from recavsr.stream.load import load, model_folder, random_model, resolve_device, resolve_precision
from recavsr.stream.step import ReCaVSR, StreamState

SIZES = {"720p": (1280, 720), "1080p": (1920, 1080), "1440p": (2560, 1440), "4k": (3840, 2160)}
RANDOM_5B = "recavsr-5b"
PROMPT_TOKENS = 512
SCALE = 4
WARM_UP_BLOCKS = 3
GRAPH_BLOCKS = 17
"""Blocks after which every pattern of the paper's route has its CUDA graph."""
_HEAD_START = 2_000_000  # clock cycles of a card
REPEATS = 5


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches in plain products and copies, measured in the same run."""

    copy_bytes: float  # a second, read and written
    products: dict[str, float]  # operations a second, by precision

    def rounded(self) -> dict[str, float]:
        """Return TB/s and TFLOP/s."""
        rates = {f"{name}_tflops": round(rate / 1e12, 3) for name, rate in self.products.items()}
        return {"copy_tb_s": round(self.copy_bytes / 1e12, 3), **rates}


def milliseconds(call: Callable[[], Any], device: torch.device, repeats: int = REPEATS) -> float:
    """Return the median time of a call after a warm-up, by CUDA events on a card."""
    call()
    times = []
    for _ in range(repeats):
        watch = Stopwatch(device, head_start=True)
        call()
        times.append(watch.stop())
    return statistics.median(times)


class Stopwatch:
    """Milliseconds from its making to `stop`: CUDA events on a card, the clock elsewhere.

    With a `head_start` a card first waits about a millisecond, so that short work is in its queue by then:
    otherwise the time to issue one kernel, up to 0.15 ms, would be counted.
    """

    def __init__(self, device: torch.device, head_start: bool = False) -> None:
        self.on_cuda = device.type == "cuda"
        if self.on_cuda:
            torch.cuda.synchronize(device)
            if head_start:
                torch.cuda._sleep(_HEAD_START)
            self.start, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.start.record()
        else:
            self.began = time.perf_counter()

    def stop(self) -> float:
        """Wait for the device and return the time."""
        if not self.on_cuda:
            return 1000 * (time.perf_counter() - self.began)
        self.end.record()
        self.end.synchronize()
        return self.start.elapsed_time(self.end)


def measure_ceilings(device: torch.device, precisions: Sequence[str], size: int | None = None) -> Ceilings:
    """Measure a device copy, and square products of side `size` in each precision and in bfloat16."""
    on_cuda = device.type == "cuda"
    size = size or (8192 if on_cuda else 1024)
    values = torch.empty(4 * size * size, dtype=torch.uint8, device=device)
    other = torch.empty_like(values)
    copied = 2 * values.numel() / milliseconds(lambda: other.copy_(values), device)
    rates = {}
    for name in dict.fromkeys([*precisions, "bf16"]):
        dtype = torch.float32 if name == "fp32" else torch.bfloat16
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        call: Callable[[], Any] = partial(F.linear, a, b)
        if name == "fp8":
            (x, scale), (weight, row) = quantize_rows(a), quantize_rows(b)
            column, bias = row.t().contiguous(), torch.zeros(size, device=device, dtype=torch.bfloat16)
            call = partial(scaled_product, x, scale, weight, column, bias)
        rates[name] = 2 * size**3 / milliseconds(call, device, 4 * REPEATS) * 1000
    return Ceilings(1000 * copied, rates)


# ------------------------------------------------------------------------------------------- the protocol


def stream_times(
    model: ReCaVSR, part: Callable[[StreamState, Tensor], StreamState], size: tuple[int, int], blocks: int
) -> tuple[list[float], StreamState]:
    """Run `part`, one block after the other from a fresh state; return its times and the last state.

    Every block gets random frames, made before its time starts.
    """
    state, times = model.start(*size), []
    for index in range(blocks):
        lr_frames = random_frames(model.blocks.frames(index), size, model.device, model.dtype)
        watch = Stopwatch(model.device)
        state = part(state, lr_frames)
        times.append(watch.stop())
    return times, state


def random_frames(
    count: int, size: tuple[int, int], device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return frames [1, 3, count, H, W] in [-1, 1], as a session gives them to a model of that `dtype`.

    They are made in their own memory: copies would be what a peak shows.
    """
    return torch.rand(1, 3, count, *size, device=device, dtype=dtype).mul_(2).sub_(1)


def measure_stream(
    model: ReCaVSR, part: Callable[[StreamState, Tensor], StreamState], size: tuple[int, int], frames: int
) -> tuple[dict[str, Any], StreamState]:
    """Measure a part of the model over a clip of `frames` frames; also return the state at its end."""
    blocks = model.blocks.block_count(frames)
    on_cuda = model.device.type == "cuda"
    warm_up = WARM_UP_BLOCKS if model.graphs is None else GRAPH_BLOCKS
    stream_times(model, part, size, min(warm_up, blocks))
    if on_cuda:
        torch.cuda.reset_peak_memory_stats(model.device)
    times, state = stream_times(model, part, size, blocks)
    steady = statistics.median(times[1:] or times)
    row = {
        "fps": _round(1000 * frames / sum(times)),
        "steady_fps": _round(1000 * model.blocks.frames(1) / steady),
        "first_output_s": _round(times[0] / 1000, 4),
        "block_ms": _round(steady),
        "peak_gb": _round(torch.cuda.max_memory_allocated(model.device) / 1e9) if on_cuda else None,
    }
    return row, state


def whole(model: ReCaVSR) -> Callable[[StreamState, Tensor], StreamState]:
    """Return one step of generator and decoder."""
    return lambda state, lr_frames: model.step(state, lr_frames)[0]


def generator_alone(model: ReCaVSR) -> Callable[[StreamState, Tensor], StreamState]:
    """Return one step of the generator."""

    def step(state: StreamState, lr_frames: Tensor) -> StreamState:
        with torch.inference_mode():
            generator, _ = model.generate(state, lr_frames.to(model.dtype))
        return StreamState(
            generator, state.decoder, state.height, state.width, state.seed, state.shot, state.block + 1
        )

    return step


def short_first_block(model: ReCaVSR, size: tuple[int, int]) -> float:
    """Return the seconds to the first frame where the first block is one latent."""
    quick = copy(model)
    quick.blocks = BlockPlan(first=1)
    times = [stream_times(quick, whole(quick), size, 1)[0][0] for _ in range(3)]
    return times[-1] / 1000


# ------------------------------------------------------------------------------------------- part by part


@torch.inference_mode()
def measure_parts(model: ReCaVSR, state: StreamState, size: tuple[int, int]) -> dict[str, float]:
    """Time each part alone, in ms, at the shapes of the block after `state`."""
    device, generator, decoder = model.device, model.generator, model.decoder
    config, dtype = generator.config, generator.head.weight.dtype
    latents = model.blocks.rest
    frames = random_frames(4 * latents, size, device)
    lr_frames = frames.to(dtype)
    grid = Grid(size[0] // config.token_stride, size[1] // config.token_stride)

    def timed(call: Callable[[], Any]) -> float:
        return milliseconds(call, device)

    parts = {
        "lr_projector": timed(lambda: generator.lr_projector.step(state.generator.lr_projector, lr_frames)),
        "products": sum(
            count * timed(partial(layer, x))
            for layer, count, x in _products(generator, grid, latents, dtype, device)
        ),
        "attention": _time_attention(generator, state, grid, latents, dtype, device),
        "generator": timed(lambda: model.generate(state, lr_frames)),
    }
    sr_latents = model.generate(state, lr_frames)[1]
    parts["decoder"] = timed(lambda: decoder.step(state.decoder, sr_latents, lr_frames))
    parts["decoder_attention"] = _time_decoder_attention(decoder, size, latents, device)
    parts["generator_rest"] = parts["generator"] - sum(
        parts[name] for name in ("lr_projector", "products", "attention")
    )
    if device.type == "cuda":  # the forms of its convolutions, to choose by
        for method in get_args(Method):
            if method != "shifted":
                parts[f"lr_projector, {method}"] = _time_projector(model, state, lr_frames, method)
    small = np.zeros((4 * latents, size[0] // SCALE, size[1] // SCALE, 3), np.uint8)
    parts["enlarging (not in the model)"] = timed(
        lambda: prepare_lr_frames(small, size, model.size_multiple, device, model.dtype)
    )
    parts["to pictures (not in the model)"] = timed(lambda: to_picture(frames, size, np.dtype(np.uint8)))
    return {name: round(value, 3) for name, value in parts.items()}


def _time_projector(model: ReCaVSR, state: StreamState, lr_frames: Tensor, method: Method) -> float:
    projector, before = model.generator.lr_projector, state.generator.lr_projector
    convolutions = (projector.conv1, projector.conv2)
    for convolution in convolutions:
        convolution.method = method
    try:
        return milliseconds(lambda: projector.step(before, lr_frames), model.device)
    finally:
        for convolution in convolutions:
            convolution.method = None


def _products(
    generator: Generator, grid: Grid, latents: int, dtype: torch.dtype, device: torch.device
) -> list[tuple[nn.Module, int, Tensor]]:
    """Return (a linear layer of the DiT layers, how many of its shape a block runs, an input for it)."""
    found: dict[tuple[int, ...], nn.Module] = {}
    count: Counter[tuple[int, ...]] = Counter()
    for name, layer in generator.blocks.named_modules():
        of_prompt = name.endswith(("cross_attention.to_k", "cross_attention.to_v"))
        if isinstance(layer, (nn.Linear, FP8Linear)) and not of_prompt:
            shape = tuple(layer.weight.shape)
            found[shape] = layer
            count[shape] += 1
    rows = (1, grid.cells, latents)
    return [
        (layer, count[shape], torch.randn(*rows, shape[1], dtype=dtype, device=device))
        for shape, layer in found.items()
    ]


def visible_latents(state: StreamState, latents: int) -> list[int]:
    """Return how many latents each layer's queries see in the block after `state`."""
    return [latents + (len(history.positions) if history else 0) for history in state.generator.layers]


def _time_attention(
    generator: Generator,
    state: StreamState,
    grid: Grid,
    latents: int,
    dtype: torch.dtype,
    device: torch.device,
) -> float:
    config = generator.config
    plan = plan_window(grid, config.window, device)
    heads = (1, config.heads, grid.cells)
    query = torch.randn(*heads, latents, 1, config.head_width, dtype=dtype, device=device)
    total = 0.0
    for seen, layers in Counter(visible_latents(state, latents)).items():
        key, value = torch.randn(2, *heads, seen, config.head_width, dtype=dtype, device=device)
        total += layers * milliseconds(lambda: windowed_attention(query, key, value, plan), device)  # noqa: B023
    return total


def _time_decoder_attention(
    decoder: FlashDecoder, size: tuple[int, int], latents: int, device: torch.device
) -> float:
    config, dtype = decoder.config, decoder.latent_projection.weight.dtype
    grid = Grid(size[0] // config.latent_stride, size[1] // config.latent_stride)
    plan = plan_window(grid, config.window, device)
    width, repeats = config.width // config.heads, config.heads // config.groups
    total = 0.0
    for layers, group in ((config.depth, 1), (config.refinement_depth, 4)):
        heads = (1, config.groups, grid.cells)
        query = torch.randn(*heads, group, repeats, width, dtype=dtype, device=device)
        seen = config.window_latents * group
        key, value = torch.randn(2, *heads, seen, width, dtype=dtype, device=device)
        once = milliseconds(lambda: windowed_attention(query, key, value, plan), device)  # noqa: B023
        total += layers * latents * once
    return total


def measure_floor(
    model: ReCaVSR, state: StreamState, size: tuple[int, int], precision: str, ceilings: Ceilings
) -> dict[str, float]:
    """Return the counted floor of each part of the block after `state`, in ms, and their sum."""
    generator, decoder, latents = model.generator, model.decoder, model.blocks.rest
    config = generator.config
    grid = Grid(size[0] // config.token_stride, size[1] // config.token_stride)
    cells = Grid(size[0] // config.latent_stride, size[1] // config.latent_stride)
    value = generator.head.weight.element_size()
    prompt_tokens = model.condition.layers[0].cross_keys.shape[2]
    seen = visible_latents(state, latents)
    work = generator_work(
        config, grid, latents, seen, prompt_tokens, value, 1 if precision == "fp8" else value
    )
    work |= decoder_work(decoder.config, cells, latents, value)
    usual = ceilings.products["fp32" if precision == "fp32" else "bf16"]
    floor = {
        name: 1000
        * part.seconds(ceilings.products[precision] if name == "products" else usual, ceilings.copy_bytes)
        for name, part in work.items()
    }
    total = sum(floor.values())
    return {name: round(time, 3) for name, time in floor.items()} | {"total": round(total, 3)}


# --------------------------------------------------------------------------------------------- baselines


@torch.inference_mode()
def diffusers_baseline(config: GeneratorConfig, size: tuple[int, int], model: ReCaVSR) -> float | None:
    """Return the ms of diffusers' transformer, eager, at the shapes of a steady block without history.

    None where diffusers is not installed.
    """
    if importlib.util.find_spec("diffusers") is None:
        return None
    from diffusers import WanTransformer3DModel

    device, dtype = model.device, model.generator.head.weight.dtype
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            network = cast(Any, WanTransformer3DModel)(
                patch_size=(1, config.patch, config.patch),
                num_attention_heads=config.heads,
                attention_head_dim=config.head_width,
                in_channels=config.latent_channels,
                out_channels=config.latent_channels,
                text_dim=config.text_width,
                freq_dim=config.time_frequencies,
                ffn_dim=config.ffn_width,
                num_layers=config.layers,
                cross_attn_norm=True,
                qk_norm="rms_norm_across_heads",
                eps=config.eps,
            )
    finally:
        torch.set_default_dtype(torch.float32)
    stride = config.latent_stride
    shape = (1, config.latent_channels, model.blocks.rest, size[0] // stride, size[1] // stride)
    noise = torch.randn(shape, device=device, dtype=dtype)
    tokens = model.condition.layers[0].cross_keys.shape[2]
    prompt = torch.randn(1, tokens, config.text_width, device=device, dtype=dtype)
    times = torch.full((1,), 1000.0, device=device)
    return milliseconds(
        lambda: network(hidden_states=noise, timestep=times, encoder_hidden_states=prompt), device
    )


def peer_baselines(size: tuple[int, int], device: torch.device) -> dict[str, float]:
    """Return the ms a frame of bicubic and of the small networks at hand, from a quarter of `size`."""
    from recavsr.evaluation.peers import open_peer

    frames = np.random.default_rng(0).integers(0, 256, (1, size[0] // SCALE, size[1] // SCALE, 3), np.uint8)
    times = {}
    for name in ("bicubic", "animevideov3"):
        try:
            peer = open_peer(name, device=device)
        except InputError:
            continue
        times[name] = _round(milliseconds(lambda: peer.run(frames), device))  # noqa: B023
    return times


# ------------------------------------------------------------------------------------------- end to end


def in_this_process(model: ReCaVSR, out_size: tuple[int, int], frames: int) -> dict[str, Any]:
    """Upscale a video file by 4, decoding and encoding included; `out_size` is (width, height)."""
    from recavsr.stream.engine import upscale

    with tempfile.TemporaryDirectory() as folder:
        source = _write_source(Path(folder), out_size, frames)
        report = upscale(source, Path(folder) / "out.mp4", model=model, size=out_size)
    return {
        "fps": _round(report.fps),
        "decode_s": _round(report.decode_seconds),
        "model_s": _round(report.model_seconds),
        "encode_s": _round(report.encode_seconds),
    }


def whole_command(
    model: str, precision: str, out_size: tuple[int, int], frames: int, device: torch.device
) -> dict[str, Any]:
    """Run `recavsr upscale` in a process of its own: start, loading, reading and writing included.

    Linux counts the size of this process as the least peak of those that it starts: call this before any
    model is loaded here.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = _write_source(Path(folder), out_size, frames)
        command = [
            sys.executable,
            "-m",
            "recavsr",
            "upscale",
            str(source),
            "-o",
            f"{folder}/out.mp4",
            "--json",
        ]
        command += ["--model", model, "--device", str(device), "--precision", precision]
        command += ["--size", f"{out_size[0]}x{out_size[1]}"]
        began = time.perf_counter()
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        last = process.stderr.read().splitlines()[-1]
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - began
    if status:
        raise InputError(f"the command failed: {last}")
    facts = json.loads(last)
    kilobyte = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS
    return {
        "fps": _round(facts["frames"] / seconds),
        "seconds": _round(seconds),
        "decode_s": facts["decode_seconds"],
        "model_s": facts["model_seconds"],
        "encode_s": facts["encode_seconds"],
        "peak_rss_gb": round(usage.ru_maxrss * kilobyte / 1e9, 3),
    }


def _write_source(folder: Path, out_size: tuple[int, int], frames: int) -> Path:
    from recavsr.video.clips import write_clip

    width, height = (-(-side // SCALE) for side in out_size)
    write_clip(folder / "clip.mp4", moving_clip(frames, height, width), 25)
    return folder / "clip.mp4"


def moving_clip(frames: int, height: int, width: int) -> np.ndarray:
    """Return a pan over a texture with detail of every size, uint8 [N, height, width, 3]."""
    random = torch.Generator().manual_seed(0)
    canvas = (1, 3, height + frames // 4 + 1, width + frames)
    picture = torch.zeros(canvas)
    for octave in range(6):
        side = [max(2, extent >> octave) for extent in canvas[2:]]
        detail = torch.rand(1, 3, *side, generator=random)
        picture += F.interpolate(detail, canvas[2:], mode="bilinear", align_corners=False) * 2.0 ** (
            octave - 6
        )
    levels = (picture[0] * 255).clamp(0, 255).byte().permute(1, 2, 0).numpy()
    return np.stack([levels[i // 4 : i // 4 + height, i : i + width] for i in range(frames)])


# ------------------------------------------------------------------------------------------------- runs


@dataclass(frozen=True)
class Options:
    """What to measure."""

    model: str = "nano"
    sizes: tuple[tuple[int, int], ...] = (SIZES["720p"],)  # (width, height) of the output
    precisions: tuple[str, ...] = ("auto",)
    frames: int = 201
    device: str = "auto"
    baseline: bool = True
    files: bool = True  # also from file to file
    memory: str | None = None  # budget of the device's memory, for the first size
    ceiling_size: int | None = None


def open_model(options: Options, device: torch.device, precision: str) -> ReCaVSR:
    """Load the model, or make the 5B model with random weights."""
    width, height = options.sizes[0]
    settings: dict[str, Any] = {"device": device, "precision": precision}
    if options.memory is not None:
        settings |= {"memory": options.memory, "out_size": (height, width), "tell": print}
    if options.model == RANDOM_5B:
        sizes = (recavsr_5b(), recavsr_5b_decoder(), PROMPT_TOKENS)
        return random_model(options.model, *sizes, **settings)
    model = load(options.model, **settings)
    if not isinstance(model, ReCaVSR):
        raise InputError(f"{options.model} has no parts to measure; use nano, {RANDOM_5B} or a model folder")
    return model


def run(options: Options, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure; `say` gets a line of JSON for each row as soon as it is there."""
    device = resolve_device(options.device)
    if options.model not in (RANDOM_5B, "identity"):
        ModelFolder.open(model_folder(options.model)).check()  # before minutes of measuring
    precisions = [_named(precision, device) for precision in options.precisions]
    ceilings = measure_ceilings(device, precisions, options.ceiling_size)
    say(json.dumps(ceilings.rounded()))
    commands: dict[tuple[str, tuple[int, int]], dict[str, Any]] = {}
    if options.files and options.model != RANDOM_5B:
        for name in precisions:
            for out_size in options.sizes:
                shown = {
                    model: whole_command(model, name, out_size, options.frames, device)
                    for model in (options.model, "identity")
                }
                # What only resizing takes is the cost of everything but the model.
                commands[name, out_size] = {**shown[options.model], "identity": shown["identity"]}
                say(json.dumps(commands[name, out_size]))
    rows = []
    for precision in precisions:
        model = open_model(options, device, precision)
        for out_size in options.sizes:
            rows.append(_row(model, out_size, precision, ceilings, options))
            if options.files:
                command = commands.get((precision, out_size))
                rows[-1]["file_to_file"] = command or in_this_process(model, out_size, options.frames)
            say(json.dumps(rows[-1]))
        del model
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return {
        "protocol": {"frames": options.frames, "warm_up_blocks": WARM_UP_BLOCKS, "repeats": REPEATS},
        "environment": environment(str(device)),
        "ceilings": ceilings.rounded(),
        "rows": rows,
    }


def _row(
    model: ReCaVSR, out_size: tuple[int, int], precision: str, ceilings: Ceilings, options: Options
) -> dict[str, Any]:
    size = padded_size(out_size[1], out_size[0], model.size_multiple)
    device = model.device
    row: dict[str, Any] = {
        "model": Path(model.name).name,
        "size": f"{size[0]}x{size[1]}",
        "precision": precision,
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        **({"memory": options.memory} if options.memory else {}),
    }
    measured, state = measure_stream(model, whole(model), size, options.frames)
    row |= measured
    row["first_output_of_one_latent_s"] = _round(short_first_block(model, size), 4)
    row["generator"], _ = measure_stream(model, generator_alone(model), size, options.frames)
    row["parts_ms"] = measure_parts(model, state, size)
    row["floor_ms"] = measure_floor(model, state, size, precision, ceilings)
    row["share_of_floor"] = _round(row["floor_ms"]["total"] / row["block_ms"], 3)
    if options.baseline:
        row["baseline"] = _baselines(model, size, row)
    return row


def _baselines(model: ReCaVSR, size: tuple[int, int], row: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    a_frame = row["block_ms"] / model.blocks.frames(1)
    if model.device.type == "cuda":
        eager = diffusers_baseline(model.generator.config, size, model)
        if eager is not None:
            found["diffusers_transformer_block_ms"] = _round(eager)
            found["generator_over_it"] = _round(row["generator"]["block_ms"] / eager, 3)
    for name, time_of_frame in peer_baselines(size, model.device).items():
        found[f"{name}_frame_ms"] = time_of_frame
        found[f"frame_over_{name}"] = _round(a_frame / time_of_frame, 3)
    return found


def _named(precision: str, device: torch.device) -> str:
    """Return fp32, bf16 or fp8 for a precision's name; raise InputError where the device has none such."""
    if precision == "fp8":
        reason = why_no_fp8(device)
        if reason:
            raise InputError(f"fp8 can not be measured: {reason}")
        return precision
    names = {torch.bfloat16: "bf16", torch.float32: "fp32"}
    return names[resolve_precision(precision, device)]


def _round(value: float, digits: int = 2) -> float:
    """Round to `digits` decimals, and small values to as many significant ones."""
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, max(digits, digits - 1 - math.floor(math.log10(abs(value)))))


def parse_size(text: str) -> tuple[int, int]:
    """Read 720p, 1080p, 1440p, 4k or WIDTHxHEIGHT as (width, height)."""
    if text.lower() in SIZES:
        return SIZES[text.lower()]
    sides = text.lower().split("x")
    if len(sides) != 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise InputError(f"size {text!r} is unknown; choose {', '.join(SIZES)} or WIDTHxHEIGHT")
    return cast(tuple[int, int], tuple(map(int, sides)))


def result_path(options: Options, result: dict[str, Any], folder: Path) -> Path:
    """Return where a result goes by default: a name that says model and device."""
    device = result["environment"]["device"].replace(" ", "-")
    return folder / f"speed_{Path(options.model).name}_{device}.json"


def save(result: dict[str, Any], path: Path) -> None:
    """Write a result file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="nano", help=f"nano, {RANDOM_5B} (random weights), a model folder")
    parser.add_argument("--size", default="720p", help="output sizes by commas: 720p ... 4k, WIDTHxHEIGHT")
    parser.add_argument("--precision", default="auto", help="by commas: auto, fp32, bf16, fp8")
    parser.add_argument("--frames", type=int, default=201)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--memory", help="budget of the device's memory, as of `upscale`, e.g. 8GB")
    parser.add_argument("--no-baseline", action="store_true")
    parser.add_argument("--no-files", action="store_true", help="leave decoding and encoding out")
    parser.add_argument(
        "-o", "--output", type=Path, help="default: benchmarks/results/speed_MODEL_DEVICE.json"
    )
    given = parser.parse_args(argv)
    options = Options(
        model=RANDOM_5B if given.model == "recavsr_5b" else given.model,  # as it was called
        sizes=tuple(map(parse_size, given.size.split(","))),
        precisions=tuple(given.precision.split(",")),
        frames=given.frames,
        device=given.device,
        memory=given.memory,
        baseline=not given.no_baseline,
        files=not given.no_files,
    )
    result = run(options, lambda line: print(line, flush=True))
    output = given.output or result_path(options, result, Path("benchmarks") / "results")
    save(result, output)
    print(f"wrote {output}")
    return 0


if __name__ == "__main__":
    run_module(main)
