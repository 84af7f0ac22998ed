"""`recavsr bench`: speed and memory of a model on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recavsr.cli import options
from recavsr.cli.models import resolve


def command(
    model: Annotated[
        str,
        typer.Option("--model", "-m", help="nano, recavsr-5b (random weights), a registered name, a folder."),
    ] = "nano",
    size: Annotated[
        str, typer.Option(help="Output sizes by commas: 720p, 1080p, 1440p, 4k, WIDTHxHEIGHT.")
    ] = "720p",
    precision: Annotated[str, typer.Option(help="By commas: auto, fp32, bf16, fp8.")] = "auto",
    frames: Annotated[int, typer.Option(min=1, help="Length of the clip.")] = 201,
    device: options.OneDevice = "auto",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Default: benchmarks/results/speed_MODEL_DEVICE.json."),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="Budget of the device's memory, e.g. 8GB.")] = None,
    no_baseline: Annotated[bool, typer.Option("--no-baseline", help="Leave other models out.")] = False,
    no_files: Annotated[bool, typer.Option("--no-files", help="Leave decoding and encoding out.")] = False,
) -> int:
    """Measure speed and memory: whole, by part, against the counted floor and a baseline; write JSON."""
    from recavsr.evaluation import speed

    arguments = ["--model", resolve(model), "--size", size, "--precision", precision]
    arguments += ["--frames", str(frames), "--device", device]
    arguments += ["--output", str(output)] if output else []
    arguments += ["--memory", memory] if memory else []
    arguments += ["--no-baseline"] if no_baseline else []
    arguments += ["--no-files"] if no_files else []
    return speed.main(arguments)
