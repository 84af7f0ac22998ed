"""Options that several commands share, and how their text is read."""

from __future__ import annotations

from typing import Annotated

import typer

from recavsr.errors import InputError

Model = Annotated[
    str, typer.Option("--model", "-m", help="nano, identity, a registered name, a model folder or a hub id.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1; several share a stream: cuda:0,cuda:1.")]
OneDevice = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1.")]
Precision = Annotated[str, typer.Option(help="auto, fp32, bf16, fp8 (on Ada and Hopper cards).")]
Direct = Annotated[
    bool,
    typer.Option(
        "--direct", help="Make outputs smaller than the model's own scale at their size: faster, worse."
    ),
]
JsonLines = Annotated[bool, typer.Option("--json", help="Say everything as JSON lines.")]


def check_names(*names: str | None) -> None:
    """Refuse empty names, which come from shell variables without a value: they would mean this folder."""
    if "" in names:
        raise InputError("the name of an input or output is empty")
