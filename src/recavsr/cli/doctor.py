"""`recavsr doctor`: what this machine can do, and whether a model is complete."""

from __future__ import annotations

import json
import math
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

import recavsr
from recavsr.cli.models import registry_path, resolve

_ENCODERS = ("libx264", "libx265", "libsvtav1", "libvpx-vp9", "prores_ks", "ffv1", "png")
_DECODERS = ("h264", "hevc", "av1", "libdav1d", "vp9", "mpeg4", "mpeg2video", "prores", "ffv1", "mjpeg")
_GIGABYTE = 1e9


def command(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Say also whether this model is complete."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what this machine can do, and with --model whether a model is complete."""
    facts = list(machine())
    if model is not None:
        facts += list(model_facts(resolve(model)))
    if as_json:
        print(json.dumps(dict(facts)))
        return
    width = max(len(name) for name, _ in facts)
    for name, fact in facts:
        print(f"{name:<{width}}  {fact}")


def machine() -> Iterator[tuple[str, str]]:
    """Yield (name, fact) pairs about this machine."""
    import torch

    from recavsr.stream.load import has_fast_bfloat16
    from recavsr.video import capabilities

    cpu_bf16 = has_fast_bfloat16(torch.device("cpu"))
    yield "recavsr", recavsr.__version__
    yield "Python", f"{platform.python_version()} at {sys.executable}"
    yield "system", platform.platform()
    threads = torch.get_num_threads()
    yield "PyTorch", f"{torch.__version__}, {threads} thread{'s' if threads > 1 else ''}"
    kind = torch.backends.cpu.get_cpu_capability()
    yield "CPU", f"{os.cpu_count()} cores, {kind}, computes in {'bf16' if cpu_bf16 else 'fp32'}"
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        bf16 = "bf16" if card.major >= 8 else "no bf16"
        yield f"cuda:{index}", f"{card.name}, {card.total_memory / _GIGABYTE:.1f} GB, {bf16}"
    if torch.backends.mps.is_available():
        yield "Apple GPU", "not used: positions need float64, which it lacks"
    memory = _memory_gigabytes()
    if memory:
        yield "memory", f"{memory[0]:.1f} GB, {memory[1]:.1f} GB of it free"
    yield "video", ", ".join(f"{name} {version}" for name, version in capabilities.versions().items())
    yield "encoders", _present(_ENCODERS, capabilities.encoders(_ENCODERS))
    yield "decoders", _present(_DECODERS, capabilities.decoders(_DECODERS))
    yield "ffmpeg", shutil.which("ffmpeg") or "no executable on the path (only some inputs by pipe need one)"
    yield "model names", str(registry_path())


def model_facts(model: str) -> Iterator[tuple[str, str]]:
    """Yield (name, fact) pairs; raise InputError where the model's folder is incomplete or does not fit."""
    if model == "identity":
        yield "model", "identity: in the package, has no weights"
        return
    from recavsr.models.weights import ModelFolder, read_shapes
    from recavsr.stream.load import model_folder

    folder = ModelFolder.open(model_folder(model))
    folder.check()
    schedule, generator = folder.generator.schedule, folder.generator
    yield "model", f"{model} is complete and agrees with its configs"
    yield "folder", str(folder.path)
    total = 0
    for part, file in (("generator", "transformer.safetensors"), ("decoder", "flashdecoder.safetensors")):
        parameters = sum(math.prod(shape) for shape in read_shapes(folder.path / file).values())
        size = (folder.path / file).stat().st_size
        total += parameters
        yield part, f"{parameters:,} parameters, {size / _GIGABYTE:.2f} GB on disk"
    yield (
        "layers",
        f"{generator.layers} of width {generator.width}, a token is {generator.token_stride} pixels",
    )
    yield "cache route", f"{schedule.slots} slots, {schedule.mean_slots:.1f} a layer"
    need = f"{2 * total / _GIGABYTE:.2f} GB in bf16, {4 * total / _GIGABYTE:.2f} GB in fp32"
    yield "weights in memory", need


def _present(wanted: tuple[str, ...], found: list[str]) -> str:
    missing = [name for name in wanted if name not in found]
    return ", ".join(found) + (f"; not in this build: {', '.join(missing)}" if missing else "")


def _memory_gigabytes() -> tuple[float, float] | None:
    """Return total and free memory where the system says so."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_AVPHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
    return total * page / _GIGABYTE, free * page / _GIGABYTE
