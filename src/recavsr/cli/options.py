"""Options that several commands share, and how their text is read."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[
    str, typer.Option("--model", "-m", help="nano, identity, a registered name, a model folder or a hub id.")
]
Device = Annotated[
    str, typer.Option(help="auto, cpu, cuda, cuda:1; several for each stream: cuda:0,cuda:1.")
]
Precision = Annotated[str, typer.Option(help="auto, fp32, bf16, fp8 (on Ada and Hopper cards).")]
JsonLines = Annotated[bool, typer.Option("--json", help="Say everything as JSON lines.")]
