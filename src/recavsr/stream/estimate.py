"""Estimates before a run: bytes of the output, time, memory. Each says how it was made; none is a promise."""

from __future__ import annotations

import math
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from recavsr.geometry import PLAN, BlockPlan, Strip, native_size, padded_size, strips_of, working_size
from recavsr.kernels.available import kernels_on
from recavsr.models.weights import ModelFolder
from recavsr.stream.load import PACKAGED, load, model_folder, resolve_device, resolve_precision
from recavsr.stream.memory import parse_memory, plan_memory
from recavsr.stream.plan import OutputKind, Plan
from recavsr.stream.session import Session
from recavsr.stream.step import BlockModel
from recavsr.video.encoders import DEFAULT_QUALITY, LOSSLESS, WORST_QUALITY
from recavsr.video.info import VideoInfo

LARGEST_TO_LOAD = 500_000_000
"""Bytes of weights up to which a model is loaded and timed; of larger ones the files are checked."""

_TRIAL_SIDE = 192  # output pixels of the picture on which a model is timed
_QUALITIES = (12, 17, 22, 27, 32)
# Bits a pixel of natural video at these qualities: the curves of benchmarks/results/quality_scale.json.
_BITS = {
    "h264": (0.571, 0.333, 0.181, 0.098, 0.053),
    "hevc": (0.529, 0.295, 0.155, 0.081, 0.042),
    "av1": (0.512, 0.258, 0.131, 0.066, 0.031),
    "vp9": (0.578, 0.314, 0.158, 0.079, 0.037),
}
_UPSCALED = 0.54  # nano's frames take this share of what natural ones take (h264, quality 12 to 27)
_LOSSLESS_BITS = 3.0  # 8 bits, FFV1 4:2:0 of nano's frames
_PICTURE_BITS = {
    ".png": 8.5,
    ".jpg": 1.5,
    ".jpeg": 1.5,
    ".webp": 1.5,
    ".exr": 24.0,
    ".bmp": 24.0,
    ".tif": 24.0,
    ".tiff": 24.0,
}
_PRORES_BITS = {"proxy": 1.18, "lt": 2.83, "standard": 4.07, "hq": 5.98, "4444": 8.0}
_TYPICAL = "{:.2g} bits a pixel, as test videos took; quiet films take a third, grainy ones three times that"
_SOUND_BITS_A_SECOND = 128_000  # where a stream does not say
_LIBRARIES = 300_000_000  # of main memory: Python, PyTorch, FFmpeg


@dataclass(frozen=True)
class Estimate:
    """What a run will take; None where nothing sensible can be said. `how` has a line for each figure."""

    output_bytes: int | None
    seconds: float | None
    main_memory_bytes: int
    device_memory_bytes: int | None  # of a card
    work_size: tuple[int, int] | None  # (height, width) at which the model makes the frames
    detour: str | None  # a line where that is not the size of the output, or should not be
    how: dict[str, str]


def estimate(
    plan: Plan,
    info: VideoInfo,
    model: str | os.PathLike[str] | BlockModel,
    *,
    quality: int | str | None = None,
    device: str = "auto",
    precision: str = "auto",
    memory: int | str | None = None,
    direct: bool = False,
) -> tuple[Estimate, BlockModel | None]:
    """Estimate a planned run; also return the model, where it was loaded.

    `direct` is the option of `upscale`. Raises InputError where the run would be refused for its model,
    device, precision or memory.
    """
    how: dict[str, str] = {}
    look = _look_at(model, plan, device=device, precision=precision, memory=memory, direct=direct)
    loaded, needed, on_card, native_scale = look
    work_size = said = None
    if native_scale is not None:
        work_size = working_size(plan.lr_size, plan.out_size, native_scale, direct=direct)
        said = detour(plan.lr_size, plan.out_size, native_scale, direct=direct)
    seconds = None
    if loaded is None:
        how["time"] = "unknown: this model is too large to be loaded for an estimate, or not fetched yet"
    elif plan.frames is None:
        how["time"] = "unknown: the source does not say how long it is"
    else:
        seconds = _model_seconds(
            loaded, plan, strips_of(plan.lr_size, plan.out_size, loaded.native_scale, direct=direct)
        )
        how["time"] = (
            "the model alone, timed just now on a small picture; decoding and encoding run beside it"
        )
    pictures = _pictures_in_memory(plan, info)
    how["memory"] = (
        "counted: weights, the model's largest moment, pictures between the stages; libraries 0.3 GB"
    )
    size, how["size"] = _output_bytes(plan, info, quality)
    made = Estimate(
        output_bytes=size,
        seconds=seconds,
        main_memory_bytes=_LIBRARIES + pictures + (0 if on_card else needed),
        device_memory_bytes=needed if on_card else None,
        work_size=work_size,
        detour=said,
        how=how,
    )
    return made, loaded


def detour(
    lr_size: tuple[int, int], out_size: tuple[int, int], native_scale: float, *, direct: bool
) -> str | None:
    """Say that frames are made by way of the native scale, or should be; None where neither is so."""
    best = native_size(lr_size, out_size, native_scale)
    if direct or best == out_size:
        return None
    strips = strips_of(lr_size, out_size, native_scale)
    if strips[0].work_size == out_size:
        return (
            f"at the model's own scale frames would be {best[1]}x{best[0]}, too large to be made smaller: "
            "they are made at their own size, which for clean sources is no better than bicubic"
        )
    times = len(strips) * math.prod(strips[0].work_size) / math.prod(out_size)
    parts = "" if len(strips) == 1 else f", in {len(strips)} strips"
    return (
        f"frames are made at {best[1]}x{best[0]}, the model's own scale{parts}, and then made smaller; "
        f"--direct is about {times:.2g} times faster, and worse"
    )


# -- the model -------------------------------------------------------------------------------------------


def _look_at(
    model: str | os.PathLike[str] | BlockModel,
    plan: Plan,
    *,
    device: str,
    precision: str,
    memory: int | str | None,
    direct: bool,
) -> tuple[BlockModel | None, int, bool, float | None]:
    """Return the model (if it is small), the bytes it needs, whether they are a card's, its native scale."""
    if not isinstance(model, (str, os.PathLike)):
        strips = strips_of(plan.lr_size, plan.out_size, model.native_scale, direct=direct)
        needed = _frames_of_a_block(model.blocks, strips[0].work_size) + _joined(plan, strips)
        return model, needed, model.device.type != "cpu", model.native_scale
    target = resolve_device(device.split(",")[0])
    dtype = resolve_precision(precision, target)
    name, on_card = os.fspath(model), target.type != "cpu"
    settings = {"device": device, "precision": precision, "memory": memory}
    if name == "identity":
        identity = load(name, **settings)  # type: ignore[arg-type]
        return identity, _frames_of_a_block(identity.blocks, plan.out_size), on_card, 0.0
    here = (PACKAGED / name).is_dir() or Path(name).expanduser().exists()
    if not here and re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return None, 0, on_card, None  # on the hub: to be fetched when the run begins
    folder = ModelFolder.open(model_folder(name))
    folder.check()
    native_scale = folder.generator.native_scale
    strips = strips_of(plan.lr_size, plan.out_size, native_scale, direct=direct)
    weight = 1 if precision == "fp8" else dtype.itemsize
    budget = 2**62 if memory is None else parse_memory(memory)
    prompt_tokens = folder.load_prompt().shape[1]
    count = plan_memory(
        folder.generator,
        folder.decoder,
        padded_size(*strips[0].work_size, folder.generator.token_stride),
        PLAN,
        budget,
        prompt_tokens,
        dtype.itemsize,
        weight,
        kernels_on(target, dtype),
        len(strips),
    )
    needed = (count.peak if on_card else count.counted) + _joined(plan, strips)
    bytes_of_weights = sum(path.stat().st_size for path in folder.path.glob("*.safetensors"))
    if bytes_of_weights > LARGEST_TO_LOAD:
        return None, needed, on_card, native_scale
    loaded = load(name, **plan.sizes(direct=direct), **settings)  # type: ignore[arg-type]
    return loaded, needed, on_card, native_scale


def _frames_of_a_block(blocks: BlockPlan, size: tuple[int, int]) -> int:
    """Return the float32 frames that go in and come out."""
    return 2 * 4 * 3 * blocks.frames(0) * size[0] * size[1]


def _joined(plan: Plan, strips: tuple[Strip, ...]) -> int:
    """Return the whole frames of a block that strips are joined to."""
    return 0 if len(strips) == 1 else _frames_of_a_block(PLAN, plan.out_size) // 2


def _model_seconds(model: BlockModel, plan: Plan, strips: tuple[Strip, ...]) -> float:
    """Time one block on a small picture; scale it to the pixels of all `strips` and to full blocks."""
    assert plan.frames is not None
    size, shown = strips[0].work_size, (len(strips[0].rows), plan.lr_size[1])
    multiple = model.size_multiple
    side = max(multiple, _TRIAL_SIDE // multiple * multiple)
    out = [min(side, extent) for extent in size]
    lr_size = [max(1, round(o * lr / whole)) for o, lr, whole in zip(out, shown, size)]
    session = Session(model, (lr_size[0], lr_size[1]), (out[0], out[1]), direct=True)
    frames = np.random.default_rng(0).integers(0, 256, (64, *lr_size, 3), np.uint8)
    first = session.frames_wanted
    session.push(frames[:first])
    count = session.frames_wanted
    began = time.perf_counter()
    session.push(frames[:count])
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    a_frame = (time.perf_counter() - began) / count
    padded = first + -(-max(0, plan.frames - first) // count) * count
    area = np.prod(padded_size(*size, multiple)) / np.prod(padded_size(out[0], out[1], multiple))
    return float(a_frame * area * len(strips) * padded)


# -- memory ----------------------------------------------------------------------------------------------


def _pictures_in_memory(plan: Plan, info: VideoInfo) -> int:
    """Return the bytes of pictures between the stages: read ahead, in the block, made, and in the encoder."""
    value = 2 if info.deep else 1
    (height, width), (out_height, out_width) = plan.lr_size, plan.out_size
    read, made = 3 * value * height * width, 3 * value * out_height * out_width
    inside = 0
    if plan.encoding is not None and plan.encoding.codec in ("h264", "hevc", "av1", "vp9"):
        inside = 60 * made // 2  # look-ahead and references, in 4:2:0
    return (16 + 2 * 21) * read + (21 + 8) * made + inside


# -- bytes -----------------------------------------------------------------------------------------------


def _output_bytes(plan: Plan, info: VideoInfo, quality: int | str | None) -> tuple[int | None, str]:
    if plan.frames is None:
        return None, "unknown: the source does not say how long it is"
    pixels = plan.out_size[0] * plan.out_size[1] * plan.frames
    rate = max(float(plan.rate), 1e-6)
    beside = sum(
        int((stream.bit_rate or _SOUND_BITS_A_SECOND) / 8 * plan.frames / rate)
        for stream in info.streams
        if stream.kind == "audio" and plan.kind is OutputKind.VIDEO
    )
    bits, how = _bits_a_pixel(plan, quality, 2 if info.deep else 1)
    return int(pixels * bits / 8) + beside, how


def _bits_a_pixel(plan: Plan, quality: int | str | None, value: int) -> tuple[float, str]:
    encoding = plan.encoding
    if encoding is None:
        deep = value if plan.suffix in (".png", ".tif", ".tiff") else 1
        bits = _PICTURE_BITS[plan.suffix] * deep
        return bits, _TYPICAL.format(bits)
    if encoding.codec == "raw":
        samples = {"420": 1.5, "422": 2.0}.get(encoding.pixel_format[3:6], 3.0)
        return 8 * samples * (1 if encoding.pixel_format.endswith("p") else 2), "exact but for headers"
    if encoding.codec == "prores":
        bits = _PRORES_BITS[encoding.options["profile"]]
    elif quality == LOSSLESS or encoding.codec == "ffv1":
        bits = _LOSSLESS_BITS * value
    else:
        level = DEFAULT_QUALITY if quality is None else int(quality)
        bits = _UPSCALED * _interpolated(_BITS[encoding.codec], level)
    return bits, _TYPICAL.format(bits)


def _interpolated(bits: tuple[float, ...], quality: int) -> float:
    """Return bits a pixel: straight in their logarithm, and straight on beyond the measured qualities."""
    slope, offset = np.polyfit(_QUALITIES, np.log(bits), 1)
    return float(np.exp(offset + slope * min(quality, WORST_QUALITY)))
