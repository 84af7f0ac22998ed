"""Runs a recipe: its data, its stages in order, what each leaves for the next.

A run is a folder. Stage NAME keeps `NAME/` (settings.json, log.csv, checkpoints/, samples/,
tensorboard/) and leaves `NAME.safetensors`, from which the next stage starts.
"""

from __future__ import annotations

import csv
import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from recavsr.data.clips import ClipSource
from recavsr.data.pack import build_pack
from recavsr.data.pool import PairSettings, TrainingPool
from recavsr.errors import InputError
from recavsr.models.generator import Generator
from recavsr.training.batches import BatchSource, PairSource, PoolSource
from recavsr.training.checkpoints import complete, read_run
from recavsr.training.distributed import World, join
from recavsr.training.loop import RunSettings, train
from recavsr.training.nano import schedule_text
from recavsr.training.objective import Objective


@dataclass(frozen=True)
class Setup:
    """What a stage is built from."""

    world: World
    start: Path | None  # what the stage before left, or a model folder; None: fresh weights
    lpips: Path | None = None  # LPIPS weights (file or folder); None: the cache folder
    compiled: bool = False


@dataclass(frozen=True)
class RecipeStage:
    """A stage of a recipe.

    `build` makes the objective, its networks on the world's device. `finish` (every rank calls it)
    writes what the next stage starts from to the path given, and whatever else the stage is for.
    """

    name: str
    run: RunSettings
    build: Callable[[Setup], Objective]
    finish: Callable[[Objective, BatchSource, Path, World], None]
    settings: Mapping[str, Any] = field(default_factory=dict)  # for settings.json


@dataclass(frozen=True)
class Recipe:
    """Stages in order, and the data that they share."""

    about: str
    stages: tuple[RecipeStage, ...]
    pairs: PairSettings = field(default_factory=PairSettings)
    data: Literal["pool", "exact"] = "pool"  # a pool for throughput, or exactly repeatable batches
    sample_of_data: tuple[int, int] | None = None  # use only so many videos and photos (small runs)


@dataclass(frozen=True)
class RunOptions:
    """What a user chooses about one run of a recipe."""

    out: Path
    data: Path
    device: torch.device
    resume: bool = False
    seed: int = 0
    start: Path | None = None  # what the first stage starts from
    workers: int = 14
    fill: int = 512  # records that a pool holds before training begins
    lpips: Path | None = None
    compiled: bool = False


def with_budget(recipe: Recipe, *, seconds: float | None = None, steps: int | None = None) -> Recipe:
    """Return the recipe with other lengths: `steps` of each stage, `seconds` of the whole recipe.

    The seconds are shared among the stages as their own are, equally where they have none.
    """
    shares = [stage.run.seconds or 1.0 for stage in recipe.stages]
    stages = []
    for stage, share in zip(recipe.stages, shares):
        run = stage.run
        if seconds is not None:
            run = replace(run, seconds=seconds * share / sum(shares), steps=None)
        if steps is not None:
            run = replace(run, steps=steps, seconds=run.seconds if seconds is not None else None)
        stages.append(replace(stage, run=run))
    return replace(recipe, stages=tuple(stages))


def run_recipe(recipe: Recipe, options: RunOptions, say: Callable[[str], None] = print) -> None:
    """Train the stages of a recipe in order.

    With `options.resume` finished stages are skipped and the unfinished one goes on from its last
    checkpoint; otherwise what the stages left in the folder before is replaced.
    """
    with join(options.device) as world:
        if world.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.benchmark = True
        tell = say if world.leads else _silent
        options.out.mkdir(parents=True, exist_ok=True)
        with _open_source(recipe, options, world, tell) as source:
            start = options.start
            for stage in recipe.stages:
                _run_stage(stage, source, options, world, start, tell)
                start = result_of(options.out, stage.name)


def result_of(out: Path, name: str) -> Path:
    """Return where a stage leaves its weights."""
    return out / f"{name}.safetensors"


def is_finished(out: Path, name: str) -> bool:
    """Whether a stage of a run was trained to its end."""
    return (out / name / "finished.json").is_file()


def holds_a_run(out: Path, recipe: Recipe) -> bool:
    """Whether a folder holds a run of a recipe, finished or not."""
    return any((out / stage.name / "settings.json").exists() for stage in recipe.stages)


def _run_stage(
    stage: RecipeStage,
    source: BatchSource,
    options: RunOptions,
    world: World,
    start: Path | None,
    say: Callable[[str], None],
) -> None:
    folder, result = options.out / stage.name, result_of(options.out, stage.name)
    if options.resume and is_finished(options.out, stage.name):
        say(f"{stage.name}: finished before, skipped")
        return
    if world.leads and not options.resume:
        shutil.rmtree(folder, ignore_errors=True)
    world.barrier()
    _set_seeds(options.seed, 0)  # the same weights on every rank
    objective = stage.build(Setup(world, start, options.lpips, options.compiled))
    _set_seeds(options.seed, world.rank)  # other noise on every rank
    if world.leads:
        folder.mkdir(parents=True, exist_ok=True)
        settings = _settings(stage, objective, options)
        (folder / "settings.json").write_text(json.dumps(settings, indent=1, default=str) + "\n")
    steps = train(
        objective,
        source,
        stage.run,
        folder,
        world,
        resume=options.resume,
        sample=getattr(objective, "sample", None),
        facts=facts_of(objective),
        say=say,
    )
    stage.finish(objective, source, result, world)
    world.barrier()
    if world.leads:
        first, last = loss_ends(folder / "log.csv")
        (folder / "finished.json").write_text(json.dumps({"steps": steps, "loss": [first, last]}) + "\n")
        say(f"{stage.name}: {steps} steps, loss {first:.4g} -> {last:.4g}, weights in {result}")
    world.barrier()


def facts_of(objective: Objective) -> dict[str, str]:
    """Return what a resumed stage must share with its checkpoints: the schedule of its generator."""
    generators = [part for part in objective.model.modules() if isinstance(part, Generator)]
    return {"schedule": schedule_text(generators[0])} if generators else {}


def loss_ends(log: Path) -> tuple[float, float]:
    """Return the mean loss over the first and over the last third of a log's rows (nan: no rows)."""
    with log.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in (rows[0] if rows else {}) if name == "loss" or name.endswith("_loss")]
    losses = [float(row[names[-1]]) for row in rows if names and row[names[-1]]]
    part = max(1, len(losses) // 3)
    return float(np.mean(losses[:part] or np.nan)), float(np.mean(losses[-part:] or np.nan))


def _settings(stage: RecipeStage, objective: Objective, options: RunOptions) -> dict[str, Any]:
    return {
        "stage": stage.name,
        "seed": options.seed,
        "run": asdict(stage.run),
        "batches": asdict(objective.batches),
        "players": {player.name: asdict(player.optimizer) for player in objective.players},
        **stage.settings,
        **facts_of(objective),
    }


def _set_seeds(seed: int, rank: int) -> None:
    own = seed + 1_000_003 * rank
    torch.manual_seed(own)
    random.seed(own)
    np.random.seed(own % 2**32)


# ---------------------------------------------------------------- data


@contextmanager
def _open_source(
    recipe: Recipe, options: RunOptions, world: World, say: Callable[[str], None]
) -> Iterator[BatchSource]:
    if world.leads:
        pack = _pack(recipe, options, say)
    pack = world.agree(pack if world.leads else None)
    # One process decodes; the others find the pixels in the cache.
    for turn in (True, False):
        if world.leads == turn:
            cache = pack.parent / "decoded" if recipe.sample_of_data else None
            clips = ClipSource.open(pack, cache=cache, processes=options.workers)
        world.barrier()
    if recipe.data == "exact":
        yield PairSource(clips, recipe.pairs, world, seed=options.seed, workers=options.workers)
        return
    # Each rank has workers of its own, and none makes a clip again that the run had before.
    seed, made = options.seed + 1_000_003 * world.rank, _records_made(recipe, options)
    with TrainingPool(
        pack, world.device, workers=options.workers, settings=recipe.pairs, seed=seed, first=made
    ) as pool:
        pool.fill(options.fill)
        say(f"pool: {pool.count} records")
        yield PoolSource(pool, world, seed=options.seed)
        say(f"pool: {pool.made} records made")


def _pack(recipe: Recipe, options: RunOptions, say: Callable[[str], None]) -> Path:
    """Return the pack to train on: the folder given, or one made from its files."""
    data = options.data
    if (data / "index.json").is_file():
        return data
    if not (data / "manifest.tsv").is_file():
        raise InputError(
            f"{data} holds no training data: neither a pack (index.json) nor a data folder "
            "(manifest.tsv, train_video/, photos/)"
        )
    pack = options.out / "data" / "pack"
    if (pack / "index.json").is_file():
        return pack
    say(f"packing {data}")
    shutil.rmtree(pack, ignore_errors=True)
    held = {"validation_videos": 4, "validation_photos": 8}
    if recipe.sample_of_data is not None:
        data = _small_copy(data, options.out / "data" / "sample", *recipe.sample_of_data)
        held = dict.fromkeys(held, 0)
    index = build_pack(data, pack, part_bytes=10**12, **held)
    if not index.videos and not index.photos:
        raise InputError(f"{options.data / 'manifest.tsv'} lists no usable training data")
    return pack


def _small_copy(data: Path, target: Path, videos: int, photos: int) -> Path:
    """Make a data folder with the smallest files of another: links, and their lines of the manifest."""
    header, *lines = (data / "manifest.tsv").read_text(encoding="utf-8").splitlines()
    chosen = []
    for folder, count in (("train_video", videos), ("photos", photos)):
        own = [line for line in lines if line.startswith(f"{folder}/")]
        own = [line for line in own if folder == "photos" or "split train" in line]
        own.sort(key=lambda line: (data / line.split("\t")[0]).stat().st_size)
        chosen += own[:count]
    shutil.rmtree(target, ignore_errors=True)
    for line in chosen:
        name = line.split("\t")[0]
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).symlink_to((data / name).resolve())
    (target / "manifest.tsv").write_text("\n".join([header, *chosen]) + "\n", encoding="utf-8")
    return target


def _records_made(recipe: Recipe, options: RunOptions) -> int:
    """Return how many records the pool of an interrupted run had made at its last checkpoint."""
    made = 0
    for stage in recipe.stages if options.resume else ():
        for path in complete(options.out / stage.name / "checkpoints")[-1:]:
            made = max([made, *(rank["data"].get("made", 0) for rank in read_run(path)["ranks"])])
    return made


def _silent(text: str) -> None:
    pass
