"""Find and load models by name: `nano` (in the package), `identity`, a folder, or a hub id."""

from __future__ import annotations

import ctypes
import math
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from recavsr.errors import InputError
from recavsr.fp8 import FP8Linear, why_no_fp8
from recavsr.fused import CPU_ROWS
from recavsr.geometry import PLAN, BlockPlan, padded_size, strips_of
from recavsr.kernels.available import kernels_on, tell_of_compilation
from recavsr.models.decoder import DecoderConfig, FlashDecoder
from recavsr.models.folded import MakeLinear, fold
from recavsr.models.folded_decoder import pack
from recavsr.models.generator import Generator, GeneratorConfig
from recavsr.models.weights import ModelFolder
from recavsr.onednn import cpu_flags, has_packed_products, pack_linears, takes_bfloat16
from recavsr.stream.devices import open_shared
from recavsr.stream.memory import parse_memory, plan_memory
from recavsr.stream.step import BlockModel, IdentityModel, ReCaVSR

Precision = Literal["auto", "fp32", "bf16", "fp8"]

PACKAGED = Path(__file__).resolve().parent.parent / "pretrained"
"""Where the package keeps its own model folders."""


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """Return the device to use: CUDA where there is a card, else the CPU.

    Raises InputError where there is no such device, or none that computes in float64, as positions need.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"device {device!r} is unknown; choose auto, cpu, cuda or cuda:N") from error
    if resolved.type == "cuda":
        if not torch.cuda.is_available():
            raise InputError("no CUDA card is available here; use --device cpu")
        if (resolved.index or 0) >= (cards := torch.cuda.device_count()):
            raise InputError(f"there is no {resolved}: the cards here are cuda:0 to cuda:{cards - 1}")
    elif resolved.type != "cpu":
        try:
            torch.zeros((), dtype=torch.float64, device=resolved).item()
        except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"device {resolved} can't be used: {reason}; use --device cpu") from error
    return resolved


def resolve_precision(precision: str, device: torch.device) -> torch.dtype:
    """Return the dtype of activations; `auto` takes bf16 where the device computes in it."""
    if precision == "auto":
        return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
    try:
        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}[precision]
    except KeyError:
        raise InputError(f"precision {precision!r} is unknown; choose auto, fp32, bf16 or fp8") from None


def linear_layers(precision: str, device: torch.device) -> MakeLinear | None:
    """Return how the generator's large linear layers are made, or None for plain ones.

    Where the device has no float8 products, fp8 becomes bf16 with a warning.
    """
    if precision != "fp8":
        return None
    reason = why_no_fp8(device)
    if reason is None:
        return FP8Linear
    warnings.warn(f"fp8 asked for, bf16 used: {reason}", stacklevel=3)
    return None


def has_fast_bfloat16(device: torch.device) -> bool:
    """Return whether the device has bfloat16 instructions."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    return takes_bfloat16() and "avx512_bf16" in cpu_flags()


def _keep_freed_memory() -> None:
    """Ask glibc to keep what is freed: a block's large buffers are the same sizes every time.

    By default it returns them to the system, and a third of the time on a CPU goes into new pages.
    """
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library
        return
    trim_threshold, mapping_threshold, mapped_blocks = -1, -3, -4
    if not mallopt(mapping_threshold, 2**30):  # older versions refuse so much, but not to map nothing
        mallopt(mapped_blocks, 0)
    mallopt(trim_threshold, 2**31 - 1)


def model_folder(name: str) -> Path:
    """Return the folder of a model: a packaged name, a path, or a hub id (asked only when named)."""
    if (PACKAGED / name / "model_config.json").is_file():
        return PACKAGED / name
    path = Path(name).expanduser()
    if path.exists():
        return path
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return _from_hub(name)
    raise InputError(f"model {name!r} is unknown: not in `recavsr models`, no folder, no hub id (OWNER/NAME)")


def _from_hub(repository: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repository, allow_patterns=["*.safetensors", "*.json"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"model {repository} could not be fetched from the hub: {reason}") from error


def load(
    name: str | Path = "nano",
    *,
    device: str | torch.device = "auto",
    precision: str = "auto",
    first_block_latents: int | None = None,
    memory: int | str | None = None,
    out_size: tuple[int, int] = (1080, 1920),
    lr_size: tuple[int, int] | None = None,
    tell: Callable[[str], None] | None = None,
    share: tuple[int, int] = (0, 1),
) -> BlockModel:
    """Load a model.

    `name` is `nano`, `identity`, a model folder in the released layout, or a hub id. `precision` is
    auto, fp32, bf16 or fp8 (of the generator's large linear layers; a warning says where the device has
    none such). `first_block_latents` shortens the first block for a lower latency (default 6
    latents, 21 frames). `memory` ("8GB", or bytes) bounds what the device's memory has to hold at `out_size`
    (height, width), or at the size at which that is made of frames of `lr_size`: layers that do not fit wait
    in main memory; `tell` gets the plan, line by line, before the weights are read, and a line when kernels
    are compiled for the first time. Several devices, "cuda:0,cuda:1", share each stream by rows of the
    picture, for which processes are started; `share` is what each of them is given.
    Raises InputError where the model can not be found or does not fit.
    """
    devices = [resolve_device(part.strip()) for part in str(device).split(",")]
    memory = None if memory is None else parse_memory(memory)
    if first_block_latents is not None and first_block_latents < 1:
        raise InputError(f"the first block has at least 1 latent, not {first_block_latents}")
    if len(devices) > 1:
        return open_shared(
            "recavsr.stream.load:load",
            devices,
            {
                "name": str(name),
                "precision": precision,
                "first_block_latents": first_block_latents,
                "memory": memory,
                "out_size": out_size,
                "lr_size": lr_size,
            },
            {"tell": tell},
        )
    blocks = PLAN if first_block_latents is None else BlockPlan(first=first_block_latents)
    target = devices[0]
    dtype = resolve_precision(precision, target)
    if str(name) == "identity":
        return IdentityModel(target, blocks)
    folder = ModelFolder.open(model_folder(str(name)))
    if target.type == "cpu":
        _keep_freed_memory()
    elif tell is not None:
        tell_of_compilation(tell)
    prompt = folder.load_prompt(target)
    make = linear_layers(precision, target)
    resident = None
    if memory is not None:
        work_size, streams = out_size, 1
        if lr_size is not None:
            strips = strips_of(lr_size, out_size, folder.generator.native_scale)
            work_size, streams = strips[0].work_size, len(strips)
        sizes = (folder.generator, folder.decoder, work_size, blocks, memory, prompt.shape[1], target)
        resident = _resident_layers(*sizes, dtype, make, tell, streams)
    generator: Generator
    if dtype == torch.float32 and resident is None:  # the reference: the plain form
        generator = folder.load_generator(target)
    else:
        generator = folder.load_folded(prompt, dtype, make, resident)
    decoder = folder.load_decoder(target, dtype)
    return _assembled(str(name), generator, decoder, prompt, blocks, share, travels=resident is not None)


def _assembled(
    name: str,
    generator: Generator,
    decoder: FlashDecoder,
    prompt: Tensor,
    blocks: BlockPlan,
    share: tuple[int, int],
    *,
    travels: bool,
) -> ReCaVSR:
    """Put a model together, its layers in the form that the device computes best.

    On a CPU that is the one for products of bfloat16, unless the generator `travels` from main memory.
    """
    dtype = decoder.latent_projection.weight.dtype
    if prompt.is_cuda and dtype != torch.float32:
        decoder = pack(decoder)
    model = ReCaVSR(name, generator, decoder, prompt, blocks, share)
    in_bfloat16 = prompt.device.type == "cpu" and dtype == torch.bfloat16
    if in_bfloat16 and not travels and has_packed_products():
        pack_linears(generator, CPU_ROWS)
        pack_linears(decoder, CPU_ROWS)
    return model


def _resident_layers(
    config: GeneratorConfig,
    decoder: DecoderConfig,
    out_size: tuple[int, int],
    blocks: BlockPlan,
    budget: int,
    prompt_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
    make: MakeLinear | None,
    tell: Callable[[str], None] | None,
    streams: int = 1,
) -> tuple[bool, ...] | None:
    """Plan for a budget of memory, tell the plan, return which layers stay (None: all of them)."""
    size = padded_size(*out_size, config.token_stride)
    weight = dtype.itemsize if make is None else 1
    sizes = (config, decoder, size, blocks, budget, prompt_tokens, dtype.itemsize, weight)
    plan = plan_memory(*sizes, kernels=kernels_on(device, dtype), streams=streams)
    if tell is not None:
        for line in plan.lines():
            tell(line)
    return None if plan.all_stay else plan.resident


def random_model(
    name: str,
    config: GeneratorConfig,
    decoder_config: DecoderConfig,
    prompt_tokens: int,
    *,
    device: torch.device | str = "auto",
    precision: str = "auto",
    memory: int | str | None = None,
    out_size: tuple[int, int] = (1080, 1920),
    tell: Callable[[str], None] | None = None,
    share: tuple[int, int] = (0, 1),
) -> ReCaVSR:
    """Make a model of these sizes with random weights, on the device, in its final form: to measure speed.

    The options are those of `load`.
    """
    target = resolve_device(device)
    dtype = resolve_precision(precision, target)
    with torch.device("meta"):
        plain = Generator(config)
    shapes = {key: tensor.shape for key, tensor in plain.state_dict().items()}

    def source(key: str) -> Tensor:
        shape = shapes[key]
        if "norm" in key and key.endswith("weight"):
            return torch.ones(shape, device=target)
        fan_in = math.prod(shape[1:]) if len(shape) > 1 and "modulation" not in key else config.width
        return torch.randn(shape, device=target) / fan_in**0.5

    prompt = torch.randn(1, prompt_tokens, config.text_width, device=target)
    make, resident = linear_layers(precision, target), None
    if memory is not None:
        budget = parse_memory(memory)
        sizes = (config, decoder_config, out_size, PLAN, budget, prompt_tokens, target)
        resident = _resident_layers(*sizes, dtype, make, tell)
    generator: Generator
    if dtype == torch.float32 and resident is None:
        plain.load_state_dict({key: source(key) for key in shapes}, strict=True, assign=True)
        generator = plain.eval().requires_grad_(False)
    else:
        generator = fold(config, source, prompt, dtype, make, resident)
    decoder = FlashDecoder(decoder_config).to(target).eval().requires_grad_(False)
    for parameter in decoder.parameters():  # the latents' statistics stay float32
        parameter.data = parameter.data.to(dtype)
    return _assembled(name, generator, decoder, prompt, BlockPlan(), share, travels=resident is not None)
