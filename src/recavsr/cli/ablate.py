"""`recavsr ablate`: the paper's ablations at a micro scale, on one card or spread over several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recavsr.cli import options
from recavsr.errors import InputError

app = typer.Typer(help="Train and compare the paper's ablations at a micro scale.")


@app.command("list")
def list_variants() -> None:
    """List the variants: group, name, what is varied."""
    from recavsr.training.ablations import VARIANTS

    for variant in VARIANTS.values():
        print(f"{variant.group:8} {variant.name:15} {variant.about}")


@app.command("report")
def report(
    results: Annotated[
        list[Path], typer.Argument(metavar="OUT...", help="Folders of runs, or files like results.jsonl.")
    ],
) -> None:
    """Print the tables as Markdown, with the differences paired by seed."""
    from recavsr.training.ablation_report import read_results, render
    from recavsr.training.ablations import RESULTS

    found = read_results([path / RESULTS if path.is_dir() else path for path in results])
    if not found:
        named = ", ".join(map(str, results))
        raise InputError(f"no results in {named}: name folders of runs, or files like {RESULTS}")
    print(render(found))


@app.command("run")
def run(
    context: typer.Context,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Variants or groups of them.")],
    data: Annotated[Path, typer.Option("--data", help="Pack of training data with held-back items.")],
    start: Annotated[Path, typer.Option("--start", help="A nano model folder, with its encoder.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the runs and of results.jsonl.")],
    seeds: Annotated[str, typer.Option(help="By commas.")] = "0",
    seconds: Annotated[float, typer.Option(min=1, help="Training time of a variant.")] = 120.0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of each stage, in place of the time.")
    ] = None,
    clips: Annotated[int, typer.Option(min=1, help="Clips of a rollout; Stage 1 takes twice as many.")] = 8,
    budget: Annotated[float | None, typer.Option(help="Seconds after which no variant may end.")] = None,
    lpips: Annotated[
        Path | None, typer.Option(help="Folder of LPIPS weights; without it neither loss nor metric.")
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option(help="Folder of the protocol's held-out clips: measured too.")
    ] = None,
    cards: Annotated[int, typer.Option(min=1, help="GPUs to spread the variants over.")] = 1,
    workers: Annotated[int, typer.Option(min=0, help="Processes that make data, a card.")] = 14,
    fill: Annotated[int, typer.Option(min=1, help="Records to wait for before training.")] = 512,
    cache: Annotated[Path | None, typer.Option(help="Folder of decoded clips, as for train.")] = None,
    device: options.OneDevice = "auto",
    only: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> int:
    """Train and measure variants one after another; what is in OUT/results.jsonl is not run again."""
    from dataclasses import replace

    from recavsr.stream.load import resolve_device
    from recavsr.training.ablations import Bench, Micro, chosen_jobs, run_jobs, run_on_cards

    try:
        numbers = [int(seed) for seed in seeds.split(",")]
    except ValueError:
        raise InputError(f"--seeds takes whole numbers by commas, as 0,1, not {seeds!r}") from None
    micro = Micro(seconds, steps, clips=clips)
    if lpips is None:
        micro = replace(micro, perceptual_weight=0.0)
    bench = Bench(
        data, start, out, resolve_device(device), micro, lpips, workers, fill, held_out=held_out, cache=cache
    )
    jobs = chosen_jobs(names, numbers)
    if only is not None:
        jobs = [job for job in jobs if job.name in only.split(",")]
    if cards == 1:
        run_jobs(jobs, bench, budget, lambda text: print(text, flush=True))
        return 0
    arguments = ["ablate", "run", *names]
    for name, value in context.params.items():  # each card's process gets the same, for its own jobs
        if value is not None and name not in ("names", "cards", "only"):
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    return run_on_cards(jobs, cards, arguments, bench)
