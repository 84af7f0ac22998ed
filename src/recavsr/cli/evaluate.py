"""`recavsr evaluate`: the held-out table, peers and bicubic in the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recavsr.cli import options
from recavsr.cli.models import resolve


def command(
    data: Annotated[Path, typer.Option("--data", help="Folder with the held-out clips.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Result file (JSON).")],
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="What to compare, by commas: bicubic, animevideov3, span, models."
        ),
    ] = "bicubic,nano",
    degradation: Annotated[str, typer.Option(help="By commas: mild, heavy.")] = "mild,heavy",
    clips: Annotated[str | None, typer.Option(help="Only these clips, by commas.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few frames, small crops, no NIQE.")] = False,
    no_lpips: Annotated[bool, typer.Option("--no-lpips", help="Leave LPIPS (and its weights) out.")] = False,
    device: options.OneDevice = "auto",
    precision: options.Precision = "auto",
) -> int:
    """Measure models on the held-out clips, degraded mildly and heavily; print the table."""
    from recavsr.evaluation import protocol, report

    arguments = ["--data", str(data), "--output", str(output), "--degradation", degradation]
    arguments += ["--model", ",".join(resolve(name) for name in model.split(","))]
    arguments += ["--clips", clips] if clips else []
    arguments += ["--quick"] if quick else []
    arguments += ["--no-lpips"] if no_lpips else []
    protocol.main([*arguments, "--device", device, "--precision", precision])
    print(report.render(report.load_rows([output])))
    return 0
