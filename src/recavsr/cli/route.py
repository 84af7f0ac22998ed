"""`recavsr route`: what each layer of a model remembers, and what that costs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recavsr.cache_policy import account, route_table
from recavsr.cli.console import Console
from recavsr.cli.models import resolve
from recavsr.errors import InputError
from recavsr.geometry import Grid, padded_size

if TYPE_CHECKING:
    from recavsr.models.generator import GeneratorConfig

FIVE_BILLION = "recavsr-5b"

app = typer.Typer(help="Show, export or count a model's cache route.")

RouteModel = Annotated[
    str, typer.Option("--model", "-m", help="recavsr-5b, nano, a registered name or a model folder.")
]
Facts = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def generator_config(model: str) -> GeneratorConfig:
    """Return the generator's sizes and schedule; no weights are read, so recavsr-5b needs none."""
    from recavsr.models.presets import recavsr_5b
    from recavsr.models.weights import ModelFolder
    from recavsr.stream.load import model_folder

    if model == FIVE_BILLION:
        return recavsr_5b()
    if model == "identity":
        raise InputError("identity only resizes: it keeps no history and has no route")
    return ModelFolder.open(model_folder(resolve(model))).generator


@app.command("show")
def show(
    model: RouteModel = "nano",
    by_action: Annotated[bool, typer.Option("--by-action", help="A row an action, as in the paper.")] = False,
    as_json: Facts = False,
) -> None:
    """Print the schedule: one action a layer."""
    schedule = generator_config(model).schedule
    if as_json:
        print(schedule.to_json())
        return
    rule = schedule.anchor_rule
    if by_action:
        print(route_table(schedule))
    else:
        print("layer  action  slots")
        for layer, action in enumerate(schedule.actions, start=1):
            print(f"{layer:>5}  {action.symbol:<6}  {action.capacity(rule):>5}")
    print(f"{schedule.slots} slots, {schedule.mean_slots:.1f} a layer")
    print(f"anchors: {rule.first} + {rule.stride}m, the latest {rule.capacity}")


@app.command("export")
def export(
    model: RouteModel = "nano",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File; stdout if left out.")] = None,
) -> None:
    """Write the schedule as JSON, in the form model_config.json holds it."""
    text = generator_config(model).schedule.to_json()
    if output is None:
        print(text)
        return
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"{output} can not be written: {error.strerror}") from error
    Console(json_lines=False).say(f"wrote {output}")


@app.command("account")
def count(
    height: Annotated[int, typer.Option(min=1, help="Output height in pixels.")] = 704,
    width: Annotated[int, typer.Option(min=1, help="Output width in pixels.")] = 1280,
    model: RouteModel = "nano",
    as_json: Facts = False,
) -> None:
    """Count the reserved history: slots, bytes a slot (bf16 keys and values), bytes in all."""
    config = generator_config(model)
    stride = config.token_stride
    padded = padded_size(height, width, stride)
    grid = Grid(padded[0] // stride, padded[1] // stride)
    cost = account(config.schedule, grid.cells, config.width)
    if as_json:
        facts = {
            "model": model,
            "height": height,
            "width": width,
            "layers": cost.layers,
            "tokens_per_latent": cost.tokens_per_latent,
            "slots": cost.slots,
            "slots_per_layer": cost.mean_slots,
            "uniform_w4_slots": cost.uniform_slots,
            "saving": cost.saving,
            "bytes_per_slot": cost.bytes_per_slot,
            "bytes": cost.bytes,
            "uniform_w4_bytes": cost.uniform_bytes,
        }
        print(json.dumps(facts))
        return
    rows = {
        "model": f"{model}, {cost.layers} layers of width {config.width}",
        "size": f"{height}x{width}, {grid.height}x{grid.width} = {grid.cells} tokens a latent",
        "reserved slots": f"{cost.slots}, {cost.mean_slots:.1f} a layer",
        "uniform W4": f"{cost.uniform_slots} slots; this route reserves {100 * cost.saving:.0f} % less",
        "one slot": f"{_mib(cost.bytes_per_slot)} (keys and values, bf16)",
        "history": f"{_mib(cost.bytes)}",
        "uniform W4 history": f"{_mib(cost.uniform_bytes)}",
    }
    for name, fact in rows.items():
        print(f"{name:<19}{fact}")


def _mib(size: int) -> str:
    """Return bytes as MiB with two digits, halves rounded up as the paper does (680.625 is 680.63)."""
    return f"{math.floor(size / 2**20 * 100 + 0.5) / 100:.2f} MiB"
