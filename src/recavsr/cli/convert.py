"""`recavsr convert`: other checkpoints become model folders."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recavsr.cli import options
from recavsr.cli.console import Console
from recavsr.cli.models import resolve
from recavsr.errors import InputError

if TYPE_CHECKING:
    import torch

    from recavsr.cache_policy import Schedule

FilePrecision = Annotated[str, typer.Option(help="Of the generator's file: bf16 or fp32.")]

app = typer.Typer(help="Turn other checkpoints into model folders.")


@app.command("wan2.2")
def wan22(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="Wan2.2-TI2V-5B, official or diffusers.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The model folder to make.")],
    route: Annotated[
        str, typer.Option(help="What layers remember: paper, none, or a file of `recavsr route export`.")
    ] = "paper",
    precision: FilePrecision = "bf16",
    prompt: Annotated[
        Path | None, typer.Option(help="A prompt.safetensors; one zero vector if left out.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of what Wan does not have.")] = 0,
    json_lines: options.JsonLines = False,
) -> None:
    """Make a folder to start training from: Wan's weights, fresh projections, an untrained decoder."""
    from recavsr.models.convert import StartOptions, convert_wan

    console = Console(json_lines)
    settings = StartOptions(_schedule(route), _dtype(precision), prompt, seed=seed)
    made = convert_wan(source, output, settings)
    console.say(
        f"{made.layout} checkpoint: " + ", ".join(f"{n} tensors to {f}" for f, n in made.used.items())
    )
    console.say(
        f"made new: {len(made.fresh)} tensors of the LR and recycle projections; an untrained decoder"
    )
    if made.unused:
        console.say(f"not needed, left out: {', '.join(made.unused)}")
    console.result(
        f"wrote {output}: a start for training, not a model to upscale with",
        output=str(output),
        layout=made.layout,
        used=made.used,
        fresh=list(made.fresh),
        unused=list(made.unused),
    )


@app.command("lora")
def lora(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model folder the adapters belong to.")],
    adapters: Annotated[Path, typer.Argument(help="A file of trained adapters.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The model folder to make.")],
    precision: FilePrecision = "bf16",
    json_lines: options.JsonLines = False,
) -> None:
    """Merge trained adapters into their model: a folder that `upscale --model` takes."""
    from recavsr.models.lora import merge_into_folder
    from recavsr.stream.load import model_folder

    layers = merge_into_folder(model_folder(resolve(model)), adapters, output, _dtype(precision))
    text = f"merged the adapters of {layers} layers, wrote {output}"
    Console(json_lines).result(text, output=str(output), layers=layers)


def _dtype(precision: str) -> torch.dtype:
    import torch

    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    if precision not in dtypes:
        raise InputError(f"--precision {precision}: choose bf16 or fp32")
    return dtypes[precision]


def _schedule(route: str) -> Schedule:
    from recavsr.cache_policy import NO_HISTORY, PAPER_SCHEDULE, Schedule

    if route == "paper":
        return PAPER_SCHEDULE
    if route == "none":
        return Schedule.uniform(len(PAPER_SCHEDULE.actions), NO_HISTORY)
    try:
        return Schedule.from_json(Path(route).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--route {route}: choose paper, none or a readable file ({error})") from error
