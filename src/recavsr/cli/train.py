"""`recavsr train`: runs a recipe, on one device or under torchrun on many."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recavsr.cli import options
from recavsr.cli.console import Console
from recavsr.errors import InputError


def command(
    recipe: Annotated[str | None, typer.Argument(help="Name of the recipe; see --list.")] = None,
    data: Annotated[Path | None, typer.Option("--data", help="Data folder or pack.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder of the run.")] = None,
    list_recipes: Annotated[
        bool, typer.Option("--list", help="List recipes and stages; of RECIPE its settings.")
    ] = False,
    stages: Annotated[
        list[str] | None,
        typer.Option(
            "--stage", help="Only this stage, from what the one before left in --out; may be repeated."
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    seconds: Annotated[float | None, typer.Option(min=1, help="Time of the whole recipe.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of each stage.")] = None,
    rate: Annotated[float, typer.Option(help="Times all learning rates of the recipe.")] = 1.0,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE: another setting; RECIPE --list names them. May be repeated."),
    ] = None,
    start: Annotated[
        Path | None, typer.Option(help="What the first stage starts from: weights, or a model folder.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes (or threads) that make data; default: by cores.")
    ] = None,
    stream: Annotated[
        bool,
        typer.Option("--stream", help="Decode each clip from its file, for sets too large to decode whole."),
    ] = False,
    degrade_on_device: Annotated[
        bool,
        typer.Option("--degrade-on-device", help="Streamed data: degrade clips on the GPU, not by workers."),
    ] = False,
    batch_times: Annotated[
        int, typer.Option(min=1, help="Batches so many times as large, for example on so many GPUs.")
    ] = 1,
    cache: Annotated[
        Path | None,
        typer.Option(help="Folder of decoded clips; default: shared memory if large, else temporary files."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, noise and data.")] = 0,
    lpips: Annotated[Path | None, typer.Option(help="LPIPS weights, file or folder.")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile layers and losses first.")] = False,
    device: options.OneDevice = "auto",
    json_lines: options.JsonLines = False,
) -> None:
    """Train a model by a named recipe. Several GPUs: torchrun --nproc-per-node N -m recavsr train ..."""
    import os
    from dataclasses import replace

    from recavsr.cluster.connection import usable_cores
    from recavsr.stream.load import resolve_device
    from recavsr.training.adjust import settings_of, settings_of_data, with_settings
    from recavsr.training.recipes import RECIPES
    from recavsr.training.runner import (
        RunOptions,
        holds_a_run,
        run_recipe,
        with_budget,
        with_rate,
        with_stages,
    )

    known = ", ".join(RECIPES)
    if recipe is not None and recipe not in RECIPES:
        raise InputError(f"no recipe {recipe!r}; {known}")
    if list_recipes:
        for name in RECIPES if recipe is None else [recipe]:
            made = RECIPES[name]()
            print(f"{name}\n    {made.about}\n    stages: {', '.join(s.name for s in made.stages)}")
            if recipe is not None:
                print("    data:", *(f"{n}={value}" for n, value in settings_of_data(made).items()))
                for stage in made.stages:
                    print(f"    {stage.name}:", *(f"{n}={value}" for n, value in settings_of(stage).items()))
        return
    if recipe is None:
        raise InputError(f"name a recipe: {known}")
    if data is None or out is None:
        raise InputError("training needs --data (a data folder or pack) and --out (a folder for the run)")
    if not 0 < rate < float("inf"):
        raise InputError(f"--rate is above 0 (1: the recipe's own learning rates), not {rate}")
    chosen = RECIPES[recipe]()
    if stages:
        chosen = with_stages(chosen, stages)
    if changes:
        chosen = with_settings(chosen, changes)
    if stream:
        chosen = replace(chosen, data="stream")
    if not resume and holds_a_run(out, chosen):
        raise InputError(f"{out} holds a run of {recipe} already: add --resume, or choose another --out")
    console = Console(json_lines)
    if workers is None:  # each process of torchrun has its own
        together = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        workers = max(1, (usable_cores() - 2) // together)
    run_recipe(
        with_rate(with_budget(chosen, seconds=seconds, steps=steps), rate),
        RunOptions(
            out,
            data,
            resolve_device(device),
            resume=resume,
            seed=seed,
            start=start,
            workers=workers,
            lpips=lpips,
            compiled=frozenset(stage.name for stage in chosen.stages if compiled),
            degrade_on_device=degrade_on_device,
            cache=cache,
            batch_times=batch_times,
        ),
        console.say,
    )
