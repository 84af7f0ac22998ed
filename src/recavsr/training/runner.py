"""Runs a recipe: its data, its stages in order, what each leaves for the next.

A run is a folder. Stage NAME keeps `NAME/` (settings.json, log.csv, checkpoints/, samples/,
tensorboard/) and leaves `NAME.safetensors`, from which the next stage starts.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from recavsr.data.clips import ClipSource, rows_and_columns
from recavsr.data.pack import build_pack
from recavsr.data.pool import PairSettings, TrainingPool
from recavsr.data.stream import ClipStream
from recavsr.errors import InputError
from recavsr.models.generator import Generator
from recavsr.training.adjust import Adjustable
from recavsr.training.batches import BatchSource, PairSource, PoolSource, StreamSource
from recavsr.training.checkpoints import complete, read_run
from recavsr.training.distributed import World, join
from recavsr.training.loop import RunSettings, train
from recavsr.training.losses import PerceptualDistance
from recavsr.training.nano import NanoTraining, schedule_text
from recavsr.training.objective import Batch, Objective

TOKEN = 32
"""Pixels of a token's side, in all models that recipes train: crops are multiples of it."""

DataSource = Literal["pool", "exact", "stream"]
"""Where batches come from: a pool for throughput; exactly repeatable batches of a set that was decoded whole;
exactly repeatable ones of a set of any size, each clip decoded from its file."""


@dataclass(frozen=True)
class Setup:
    """What a stage is built from."""

    world: World
    start: Path | None  # what the stage before left, or a model folder; None: fresh weights
    lpips: Path | None = None  # LPIPS weights (file or folder); None: the cache folder
    compiled: bool = False

    def distance(self, weight: float) -> PerceptualDistance | None:
        """Return LPIPS on VGG16; None where its weight in a stage's loss is 0."""
        if not weight:
            return None
        from recavsr.evaluation.lpips import LPIPS

        distance = LPIPS(net="vgg", weights=self.lpips).to(self.world.device)
        return torch.compile(distance, fullgraph=True, dynamic=False) if self.compiled else distance


@dataclass(frozen=True)
class RecipeStage:
    """A stage of a recipe.

    `build` makes the objective, its networks on the world's device. `finish` (every rank calls it)
    writes what the next stage starts from to the path given, and whatever else the stage is for.
    `remark` (the leading rank calls it, after that) says what a user should know of the trained weights.
    """

    name: str
    run: RunSettings
    build: Callable[[Setup], Objective]
    finish: Callable[[Objective, BatchSource, Path, World], None]
    settings: Mapping[str, Any] = field(default_factory=dict)  # for settings.json
    perceptual: bool = False  # wants LPIPS weights, which are looked for before the run begins
    adjustable: Adjustable | None = None
    remark: Callable[[Objective], str | None] | None = None


@dataclass(frozen=True)
class Recipe:
    """Stages in order, and the data that they share."""

    about: str
    stages: tuple[RecipeStage, ...]
    pairs: PairSettings = field(default_factory=PairSettings)
    data: DataSource = "pool"
    sample_of_data: tuple[int, int] | None = None  # use only so many videos and photos (small runs)
    read_start: Callable[[Path], object] = NanoTraining.starting_from  # InputError where it can't be read
    make_start: Callable[[Path], None] | None = None  # writes what to start from where a user names nothing
    needs_start: bool = False  # there is nothing that it could begin from by itself
    checks: int = 0  # batches, fixed and not trained on, whose loss is said before and after each stage
    whole: tuple[str, ...] = ()  # names of all stages, where `stages` are only some of them

    def number(self, stage: RecipeStage) -> int:
        """Return a stage's place (from 0) in the whole recipe: its data is drawn by it."""
        return (self.whole or tuple(s.name for s in self.stages)).index(stage.name)

    @property
    def after(self) -> str | None:
        """The stage that the first of `stages` goes on from: its weights lie in the run's folder."""
        number = self.number(self.stages[0])
        return self.whole[number - 1] if number else None


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
    compiled: frozenset[str] = frozenset()  # stages whose layers are compiled first
    degrade_on_device: bool = False  # of streamed data: by `data.degradation_batch`, not by the workers
    batch_times: int = 1  # batches of so many times the recipe's size
    cache: Path | None = None  # folder of what is decoded before; None: `data.clips.default_cache`


def with_stages(recipe: Recipe, names: Collection[str]) -> Recipe:
    """Return the recipe with the named stages alone, in its own order.

    The first one goes on from what the stage before it left in the run's folder, if nothing else is named to
    start from. Raises InputError for a name that no stage has.
    """
    known = tuple(stage.name for stage in recipe.stages)
    for name in names:
        if name not in known:
            raise InputError(f"the recipe has no stage {name!r}; its stages: {', '.join(known)}")
    chosen = tuple(stage for stage in recipe.stages if stage.name in names)
    return replace(recipe, stages=chosen, whole=known)


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


def with_rate(recipe: Recipe, rate: float) -> Recipe:
    """Return the recipe with all learning rates multiplied by `rate`."""
    stages = (replace(stage, run=replace(stage.run, rate=rate)) for stage in recipe.stages)
    return replace(recipe, stages=tuple(stages))


def run_recipe(recipe: Recipe, options: RunOptions, say: Callable[[str], None] = print) -> None:
    """Train the stages of a recipe in order.

    With `options.resume` finished stages are skipped and the unfinished one goes on from its last
    checkpoint; otherwise what the stages left in the folder before is replaced. Raises InputError where
    something is missing, before anything long begins.
    """
    _check(recipe, options)
    with join(options.device) as world:
        if world.device.type == "cuda":
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.benchmark = True
        tell = say if world.leads else _silent
        with _open_data(recipe, options, world, say) as source_of:
            options.out.mkdir(parents=True, exist_ok=True)  # not before the data is known to be usable
            train_stages(recipe, options, world, source_of, tell)


def _check(recipe: Recipe, options: RunOptions) -> None:
    """Raise InputError where what the stages to come need is not there: found at once, not after hours."""
    if options.degrade_on_device and recipe.data != "stream":
        raise InputError("only streamed data is degraded on the device: add --stream")
    if any(side % TOKEN for side in rows_and_columns(recipe.pairs.size)):
        raise InputError(f"pairs.size is a multiple of {TOKEN}, the side of a token, not {recipe.pairs.size}")
    if options.start is not None and not options.start.exists():
        raise InputError(f"--start {options.start} does not exist: name weights of a run, or a model folder")
    waiting = [s for s in recipe.stages if not (options.resume and is_finished(options.out, s.name))]
    begins = recipe.stages[0] in waiting
    if begins and options.start is not None:
        recipe.read_start(options.start)
    if begins and options.start is None and recipe.needs_start:
        raise InputError(
            "this recipe goes on from trained weights: name a run's, or a model folder, by --start"
        )
    needed = recipe.after if begins and options.start is None else None
    if needed is not None and not is_finished(options.out, needed):
        raise InputError(
            f"{recipe.stages[0].name} goes on from what {needed} leaves, and {options.out} holds no finished "
            f"{needed}: train that first, or name weights by --start"
        )
    if any(stage.perceptual for stage in waiting):
        from recavsr.evaluation.lpips import load_backbone_weights

        load_backbone_weights("vgg", options.lpips)


def train_stages(
    recipe: Recipe,
    options: RunOptions,
    world: World,
    source_of: Callable[[int], BatchSource],
    say: Callable[[str], None] = print,
) -> Path:
    """Train the stages of a recipe, each on a source of its own; return where the last weights are."""
    start = _start(recipe, options, world)
    for stage in recipe.stages:
        _run_stage(stage, source_of(recipe.number(stage)), recipe, options, world, start, say)
        start = result_of(options.out, stage.name)
    if start is None:
        raise ValueError("a recipe has at least one stage")
    return start


def _start(recipe: Recipe, options: RunOptions, world: World) -> Path | None:
    if options.start is not None:
        return options.start
    if recipe.after is not None:
        return result_of(options.out, recipe.after)
    if recipe.make_start is None:
        return None
    start = options.out / "start"
    if world.leads and not start.exists():
        part = start.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        recipe.make_start(part)
        part.rename(start)
    world.barrier()
    return start


def about(recipe: Callable[[], Recipe]) -> str:
    """Return what a recipe's function says of it."""
    return (recipe.__doc__ or "").strip()


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
    recipe: Recipe,
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
    objective = stage.build(Setup(world, start, options.lpips, stage.name in options.compiled))
    _set_seeds(options.seed, world.rank)  # other noise on every rank
    asked = objective.batches.shared_by(1, options.batch_times)
    objective.batches = asked.shared_by(world.size)
    if objective.batches != asked:
        say(
            f"{stage.name}: {objective.batches.clips} clips a batch, not {asked.clips}: {world.size} share it"
        )
    if world.leads:
        folder.mkdir(parents=True, exist_ok=True)
        settings = _settings(stage, objective, options)
        (folder / "settings.json").write_text(json.dumps(settings, indent=1, default=str) + "\n")
    checks = _check_batches(source, recipe.checks, objective)
    objective.advance(0.0)  # for both measurements: what changes over the stage changes the loss too
    before = fixed_losses(objective, checks, world)
    steps = train(
        objective,
        source,
        stage.run,
        folder,
        world,
        resume=options.resume,
        sample=getattr(objective, "sample", None),
        facts={**facts_of(objective), "data": _data_of(recipe, options), "seed": str(options.seed)},
        say=say,
    )
    objective.advance(0.0)
    after = fixed_losses(objective, checks, world)
    objective.advance(1.0)
    stage.finish(objective, source, result, world)
    world.barrier()
    if world.leads:
        outcome = {"steps": steps, "loss_before": before, "loss_after": after}
        (folder / "finished.json").write_text(json.dumps(outcome, indent=1) + "\n")
        falls = [f"loss of {name} {before[name]:.4g} -> {after[name]:.4g}" for name in before]
        say(", ".join([f"{stage.name}: {steps} steps", *falls, f"weights in {result}"]))
        if stage.remark is not None and (remark := stage.remark(objective)):
            say(f"{stage.name}: {remark}")
    world.barrier()


def _data_of(recipe: Recipe, options: RunOptions) -> str:
    """Say what a run and its checkpoints must share: the kind of data."""
    return f"{recipe.data}, degraded on the device" if options.degrade_on_device else recipe.data


def facts_of(objective: Objective) -> dict[str, str]:
    """Return what a resumed stage must share with its checkpoints: the schedule of its generator."""
    generators = [part for part in objective.model.modules() if isinstance(part, Generator)]
    return {"schedule": schedule_text(generators[0])} if generators else {}


def _check_batches(source: BatchSource, count: int, objective: Objective) -> list[Batch]:
    """Draw batches from far beyond any that training reaches."""
    if not count:
        return []
    position = source.state_dict()
    source.load_state_dict(dict.fromkeys(position, 2**40))
    batches = [source.batch(objective.batches) for _ in range(count)]
    source.load_state_dict(position)
    return batches


def fixed_losses(objective: Objective, batches: Sequence[Batch], world: World) -> dict[str, float]:
    """Return each player's mean loss over batches, under the same noise at every call; nothing is trained."""
    found: dict[str, list[float]] = {}
    with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
        torch.manual_seed(0)
        for batch in batches:
            for player, losses in objective.updates(batch):
                found.setdefault(player, []).append(float(losses["loss"].detach()))
    return {player: sum(values) / len(values) for player, values in found.items()}


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

_MADE_FROM = "made_from.txt"  # in a run's own pack: the data folder that it was made from


@contextmanager
def _open_data(
    recipe: Recipe, options: RunOptions, world: World, say: Callable[[str], None]
) -> Iterator[Callable[[int], BatchSource]]:
    """Yield what makes each stage's source of batches, by the stage's number.

    Every stage has its own, so that it does not matter where the stage before left off.
    """
    tell = say if world.leads else _silent
    if world.leads:
        pack = _pack(recipe, options, tell)
    pack = world.agree(pack if world.leads else None)
    cache = options.cache
    if cache is None and recipe.sample_of_data:
        cache = options.out / "data" / "decoded"
    make: Callable[..., StreamSource | PairSource] | None = None
    if recipe.data == "stream":
        stream = ClipStream.open(pack, cache=cache, say=tell)
        make = partial(StreamSource, stream, degrade_on_device=options.degrade_on_device, say=say)
    else:
        clips = ClipSource.open(pack, cache=cache, processes=options.workers, say=say)
        if recipe.data == "exact":
            make = partial(PairSource, clips)
    if make is not None:
        with ExitStack() as stack:

            def source(stage: int) -> BatchSource:
                stack.pop_all().close()  # the workers of the stage before
                seed = options.seed + 1000 * stage
                made = make(recipe.pairs, world, seed=seed, workers=options.workers)
                return stack.enter_context(closing(made))

            yield source
        return
    # Each rank has workers of its own, and none makes a clip again that the run had before.
    seed, made = options.seed + 1_000_003 * world.rank, _records_made(recipe, options)
    with TrainingPool(
        pack,
        world.device,
        workers=options.workers,
        settings=recipe.pairs,
        seed=seed,
        first=made,
        cache=cache,
    ) as pool:
        pool.fill(options.fill)
        tell(f"pool: {pool.count} records")
        yield lambda stage: PoolSource(pool, world, seed=options.seed, made_before=made)
        tell(f"pool: {pool.made} records made")


def _pack(recipe: Recipe, options: RunOptions, say: Callable[[str], None]) -> Path:
    """Return the pack to train on: the folder given, or one made from its files."""
    data = options.data
    if (data / "index.json").is_file():
        return data
    if not (data / "manifest.tsv").is_file():
        raise InputError(
            f"{data} holds no training data: neither an index or pack (index.json, made by `recavsr data "
            "index`) nor a data folder (manifest.tsv, train_video/, photos/)"
        )
    pack, given = options.out / "data" / "pack", str(data.resolve())
    if (pack / "index.json").is_file():
        origin = pack / _MADE_FROM
        made_from = origin.read_text(encoding="utf-8").strip() if origin.is_file() else given
        if made_from != given:
            raise InputError(
                f"{options.out} trains on a pack of {made_from}, not of {data}: name that, the pack itself "
                f"(--data {pack}), or another --out"
            )
        return pack
    say(f"packing {data}")
    part = pack.with_suffix(".part")
    for left in (pack, part):
        shutil.rmtree(left, ignore_errors=True)
    part.mkdir(parents=True)
    held = {"validation_videos": 4, "validation_photos": 8}
    if recipe.sample_of_data is not None:
        data = _small_copy(data, options.out / "data" / "sample", *recipe.sample_of_data)
        held = dict.fromkeys(held, 0)
    index = build_pack(data, part, part_bytes=10**12, **held)
    if not index.videos and not index.photos:
        raise InputError(f"{options.data / 'manifest.tsv'} lists no usable training data")
    (part / _MADE_FROM).write_text(given + "\n", encoding="utf-8")
    part.rename(pack)
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
    target.mkdir(parents=True)
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
