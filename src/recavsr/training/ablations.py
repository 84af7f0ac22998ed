"""The paper's ablations at a micro scale: nano's stages for minutes, each variant on the same autoencoder.

Variants run one after another on one pool of data (`recavsr ablate run`). Each is trained from a nano model
folder, whose encoder rests, and measured as the folder that it exports, on the pack's held-back items. A
finished one is a line in OUT/results.jsonl and is not run again, so an interrupted call can be repeated.
docs/training.md says what is varied.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch

from recavsr.cache_policy import CacheAction, Schedule, account, visible_after_blocks
from recavsr.data.clips import ClipSource
from recavsr.data.pool import PairSettings, TrainingPool
from recavsr.errors import InputError
from recavsr.evaluation.ablations import Ablated
from recavsr.evaluation.lpips import LPIPS
from recavsr.evaluation.peers import Upscaler
from recavsr.evaluation.protocol import QUICK, environment, evaluate, held_out_clips, session_upscaler
from recavsr.evaluation.validation import (
    ValidationPair,
    frames_to_tensor,
    tensor_to_frames,
    validate,
    validation_pairs,
)
from recavsr.geometry import PLAN, BlockPlan, Grid
from recavsr.models.decoder import FlashDecoder
from recavsr.models.generator import GeneratorConfig
from recavsr.models.presets import NANO_SCHEDULE, nano, nano_decoder
from recavsr.stream.load import load
from recavsr.stream.step import ReCaVSR
from recavsr.training.ablation_report import read_results
from recavsr.training.batches import BatchSource, PoolSource
from recavsr.training.discriminator import NANO_MSQ, Scope
from recavsr.training.distributed import World
from recavsr.training.loop import RunSettings
from recavsr.training.losses import FrameLosses
from recavsr.training.nano import NanoTraining, Stage, generator_stage, joint_stage
from recavsr.training.nano_stages import ROUTE, Stage1Sizes, decoder_settings, stage2_settings
from recavsr.training.objective import BatchSettings
from recavsr.training.recipes import (
    NANO_PAIRS,
    decoder_stage,
    nano_stage,
    stage1_stage,
    stage2_stage,
)
from recavsr.training.rollout import decode_blocks, split_blocks
from recavsr.training.runner import Recipe, RecipeStage, RunOptions, Setup, train_stages
from recavsr.training.stage1 import FixedScope

RESULTS = "results.jsonl"


@dataclass(frozen=True)
class Micro:
    """Size of a run: by default two minutes on one large card."""

    seconds: float = 120.0
    steps: int | None = None
    """Steps of each stage, in place of the time."""
    pairs: PairSettings = NANO_PAIRS
    latents: int = 14
    clips: int = 8  # of a rollout; Stage 1 takes twice as many
    perceptual_weight: float = 0.06  # of LPIPS-VGG; 0 where its weights are not given
    evaluated_frames: int = 37
    evaluated_photos: int = 4

    def run(self, share: float) -> RunSettings:
        """Return the length of a stage that has a share of the time."""
        if self.steps is not None:
            return RunSettings(steps=self.steps, log_every=1, save_every=10**9)
        return RunSettings(seconds=share * self.seconds, precision="bf16", save_every=10**9)

    def joint(self, **changes: Any) -> Stage:
        """Return nano's joint stage at this size."""
        stage = replace(
            joint_stage(), latents=self.latents, batch=self.clips, perceptual_weight=self.perceptual_weight
        )
        return replace(stage, **changes)

    @property
    def stage1(self) -> Stage1Sizes:
        """Return the sizes of Stage 1."""
        return Stage1Sizes(BatchSettings(2 * self.clips, 4 * self.latents - 3))


@dataclass(frozen=True)
class Variant:
    """One row of a table: a recipe, and what its model is measured by."""

    name: str
    group: str
    about: str
    stages: Callable[[Micro, Schedule | None], tuple[RecipeStage, ...]]
    """Of the size, and the schedule that `routed` learned under the same seed where `after_routed`."""
    after_routed: bool = False
    bursts: float = 0.0
    reconstructs: bool = False
    """Measure the decoder on true latents too, and its speed."""
    forgets: tuple[str, ...] = ()
    """Variants of `evaluation.ablations` that the model is measured with too: what memory is worth."""


# ---------------------------------------------------------------- recycling and cache allocation


def _fresh_generator(config: GeneratorConfig, setup: Setup) -> NanoTraining:
    return NanoTraining.on_autoencoder_of(_start(setup), generator=config)


def _fresh_decoder(lr_conditioning: bool, setup: Setup) -> NanoTraining:
    decoder = replace(nano_decoder(), lr_conditioning=lr_conditioning)
    return NanoTraining.on_autoencoder_of(_start(setup), decoder=decoder)


def _start(setup: Setup) -> Path:
    if setup.start is None:
        raise InputError("ablations need trained weights to start from: --start MODEL")
    return setup.start


def _joint(micro: Micro) -> RecipeStage:
    """The rollout that ends every cache variant: the generator through the frozen decoder."""
    return nano_stage("joint", micro.run(7 / 15), micro.joint(train_decoder=False))


def _uniform(recent: int, micro: Micro, route: Schedule | None) -> tuple[RecipeStage, ...]:
    schedule = Schedule.uniform(nano().layers, CacheAction(recent), NANO_SCHEDULE.anchor_rule)
    opens = partial(_fresh_generator, replace(nano(), schedule=schedule))
    own = FixedScope(None)
    return stage1_stage("adaptation", micro.run(8 / 15), micro.stage1, opens, own), _joint(micro)


def _routed(micro: Micro, route: Schedule | None) -> tuple[RecipeStage, ...]:
    return (
        stage1_stage("adaptation", micro.run(5 / 15), micro.stage1, partial(_fresh_generator, nano())),
        stage1_stage("routing", micro.run(3 / 15), micro.stage1),
        _joint(micro),
    )


def _without_recycling(micro: Micro, route: Schedule | None) -> tuple[RecipeStage, ...]:
    assert route is not None
    opens = partial(_fresh_generator, replace(nano(), schedule=route, recycling=False))
    own = FixedScope(None)
    return (
        stage1_stage("adaptation", micro.run(5 / 15), micro.stage1, opens),
        stage1_stage("own_route", micro.run(3 / 15), micro.stage1, scope=own),
        _joint(micro),
    )


# ---------------------------------------------------------------- query scopes, decoder, history


def _frame_losses(losses: FrameLosses, micro: Micro) -> FrameLosses:
    """Return nano's losses with an L1: what all rows of the table were made with."""
    return replace(
        losses,
        pixel="charbonnier",
        pixel_weight=1.0,
        perceptual_weight=micro.perceptual_weight,
        structure_weight=0.8,
        border_weight=2.0,
    )


def _scoped(scopes: tuple[Scope, ...], micro: Micro, route: Schedule | None) -> tuple[RecipeStage, ...]:
    made = stage2_settings()
    settings = replace(
        made,
        batches=BatchSettings(micro.clips, 4 * micro.latents - 3),
        frames=_frame_losses(made.frames, micro),
        train_decoder=False,
        hard_lr_share=0.0,
    )
    return (stage2_stage(micro.run(1), settings, msq=replace(NANO_MSQ, scopes=scopes)),)


def _decoder(lr_conditioning: bool, micro: Micro, route: Schedule | None) -> tuple[RecipeStage, ...]:
    made = decoder_settings()
    settings = replace(
        made,
        batches=BatchSettings(2 * micro.clips, min(17, micro.pairs.frames)),
        frames=_frame_losses(made.frames, micro),
    )
    return (decoder_stage(micro.run(1), settings, partial(_fresh_decoder, lr_conditioning)),)


def _sized(layers: int, heads: int, micro: Micro, route: Schedule | None) -> tuple[RecipeStage, ...]:
    """A fresh generator: latents by their squared error, then frames through the frozen decoder."""
    made = nano()
    config = replace(
        made,
        layers=layers,
        heads=heads,
        ffn_width=made.ffn_width * heads // made.heads,
        lr_hidden=(made.lr_hidden[0], heads * made.head_width),
        schedule=Schedule.uniform(layers, CacheAction(_R), NANO_SCHEDULE.anchor_rule),
    )
    opens = partial(_fresh_generator, config)
    latents = replace(generator_stage(), latents=micro.latents, batch=2 * micro.clips)
    return nano_stage("generator", micro.run(8 / 15), latents, opens), _joint(micro)


def _rollout(changes: dict[str, Any], micro: Micro, route: Schedule | None) -> tuple[RecipeStage, ...]:
    return (nano_stage("joint", micro.run(1), micro.joint(**changes)),)


_SHORT: dict[str, Any] = {"plan": BlockPlan(2, 2)}
_LATER: dict[str, Any] = {"later_weight": 2.0}
_THROUGH: dict[str, Any] = {"through_history": True}
_R = round(ROUTE.capacity)


def _history(name: str, about: str, *changes: dict[str, Any], bursts: float = 0.0) -> Variant:
    merged = {key: value for change in changes for key, value in change.items()}
    forgets = ("blocks-alone", "stateless")
    return Variant(name, "history", about, partial(_rollout, merged), bursts=bursts, forgets=forgets)


VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for variant in (
        Variant("uniform-3r", "cache", f"W{3 * _R} in every layer", partial(_uniform, 3 * _R)),
        Variant("uniform-r", "cache", f"W{_R} in every layer: the route's budget", partial(_uniform, _R)),
        Variant("routed", "cache", "the route is learned", _routed, forgets=("blocks-alone", "stateless")),
        Variant("no-recycling", "cache", "the learned route, recycled latents always zeros",
                _without_recycling, after_routed=True),
        Variant("scope-global", "scopes", "12 global queries a depth", partial(_scoped, ("global",))),
        Variant("scope-spatial", "scopes", "global and spatial queries",
                partial(_scoped, ("global", "spatial"))),
        Variant("scope-temporal", "scopes", "global and temporal queries",
                partial(_scoped, ("global", "temporal"))),
        Variant("scope-all", "scopes", "all three", partial(_scoped, ("global", "spatial", "temporal"))),
        Variant("decoder", "decoder", "LR frames given", partial(_decoder, True), reconstructs=True),
        Variant("decoder-no-lr", "decoder", "LR frames zeros", partial(_decoder, False), reconstructs=True),
        Variant("generator", "generator", "6 layers of 256 channels, as nano", partial(_sized, 6, 4)),
        Variant("generator-wide", "generator", "6 layers of 384 channels", partial(_sized, 6, 6)),
        Variant("generator-deep", "generator", "12 layers of 256 channels", partial(_sized, 12, 4)),
        _history("as-nano", "rollouts as in nano's joint stage"),
        _history("short-first", "rollouts of 2 + 2 + ... latents", _SHORT),
        _history("later-weight", "a second loss of the blocks after the first, weight 2", _LATER),
        _history("through", "gradients flow into the blocks before", _THROUGH),
        _history("bursts", "half of the clips with bursts of noise", bursts=0.5),
        _history("all-four", "the four together", _SHORT, _LATER, _THROUGH, bursts=0.5),
    )
}  # fmt: skip
"""Every variant by its name; those of a group are compared with one another."""

GROUPS = tuple(dict.fromkeys(variant.group for variant in VARIANTS.values()))


def ablation(name: str, micro: Micro, route: Schedule | None = None) -> Recipe:
    """Return the recipe of a variant; raise InputError where it lacks the route it needs."""
    variant = VARIANTS[name]
    if variant.after_routed and route is None:
        raise InputError(f"{name} keeps the route that `routed` learns under the same seed: run that first")
    pairs = replace(micro.pairs, bursts=variant.bursts)
    return Recipe(variant.about, variant.stages(micro, route), pairs)


# ---------------------------------------------------------------- running


@dataclass(frozen=True)
class Job:
    """A variant to train under a seed."""

    variant: Variant
    seed: int

    @property
    def name(self) -> str:
        """Return the name of its folder."""
        return f"{self.variant.name}-{self.seed}"


@dataclass(frozen=True)
class Bench:
    """Where a list of jobs runs, and what they share."""

    pack: Path
    start: Path
    out: Path
    device: torch.device
    micro: Micro = field(default_factory=Micro)
    lpips: Path | None = None
    """Folder of LPIPS weights; None: neither a loss nor a metric."""
    workers: int = 14
    fill: int = 512
    held_out: Path | None = None  # folder of the protocol's clips, to be measured too
    cache: Path | None = None  # of decoded pixels; None: the usual place

    @cached_property
    def weights(self) -> str:
        """Return what tells the weights to start from from others: the folder's name and a digest."""
        found = hashlib.sha256()
        for path in sorted(self.start.glob("*.safetensors")):
            found.update(path.name.encode() + path.read_bytes())
        return f"{self.start.name} {found.hexdigest()[:8]}"


def chosen_jobs(names: Iterable[str], seeds: Iterable[int]) -> list[Job]:
    """Return the jobs of variants or groups; seeds outermost, so that half a run is a whole table."""
    wanted = list(names)
    unknown = [name for name in wanted if name not in VARIANTS and name not in GROUPS]
    if unknown:
        raise InputError(f"no ablation {unknown[0]!r}; choose of {', '.join([*GROUPS, *VARIANTS])}")
    variants = [v for v in VARIANTS.values() if v.name in wanted or v.group in wanted]
    return [Job(variant, seed) for seed in seeds for variant in variants]


def run_jobs(
    jobs: Sequence[Job], bench: Bench, budget: float | None = None, say: Callable[[str], None] = print
) -> None:
    """Train and measure jobs on one device; each finished one becomes a line of the results.

    Those in the results already are left out. With a `budget` in seconds no job is begun that would,
    by the longest one so far, end after it. Raises InputError where the results are of other weights.
    """
    began, longest = time.monotonic(), 1.4 * bench.micro.seconds
    results = bench.out / RESULTS
    before = read_results([results])
    if others := {row.get("start", bench.weights) for row in before} - {bench.weights}:
        raise InputError(
            f"{results} was made from {', '.join(sorted(others))}, not {bench.weights}: take another --out"
        )
    done = {(row["variant"], row["seed"]) for row in before}
    waiting = [job for job in jobs if (job.variant.name, job.seed) not in done]
    world = World(bench.device)
    if bench.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
    waiting.sort(key=lambda job: job.variant.bursts)  # stable: one pool for all pairs of a kind
    pairs = metric = None
    for bursts, group in groupby(waiting, key=lambda job: job.variant.bursts):
        settings = replace(bench.micro.pairs, bursts=bursts)
        with TrainingPool(
            bench.pack, bench.device, workers=bench.workers, settings=settings, cache=bench.cache
        ) as pool:
            pool.fill(bench.fill)
            for job in group:
                if budget is not None and time.monotonic() - began + longest > budget:
                    say(f"{job.name}: left out, the time is up")
                    continue
                if job.variant.after_routed and _route(job, bench) is None:
                    say(f"{job.name}: left out, `routed` must run first under this seed")
                    continue
                if pairs is None:
                    pairs, metric = _validation(bench), _metric(bench)
                started = time.monotonic()
                row = _train(job, bench, world, pool, say) | _measure(job, bench, pairs, metric)
                with results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                longest = max(longest, time.monotonic() - started)
                say(f"{job.name}: done in {time.monotonic() - started:.0f} s")
                gc.collect()  # captured graphs hold a card's memory as long as anything points to them
                if bench.device.type == "cuda":
                    torch.cuda.empty_cache()


def _train(
    job: Job, bench: Bench, world: World, pool: TrainingPool, say: Callable[[str], None]
) -> dict[str, Any]:
    recipe = ablation(job.variant.name, bench.micro, _route(job, bench))
    options = RunOptions(
        bench.out / job.name, bench.pack, bench.device, seed=job.seed, start=bench.start, lpips=bench.lpips
    )

    def source(stage: int) -> BatchSource:
        return PoolSource(pool, world, seed=1000 * job.seed + stage)

    started = time.monotonic()
    train_stages(recipe, options, world, source, say)
    finished = [(options.out / stage.name / "finished.json").read_text() for stage in recipe.stages]
    return {
        "variant": job.variant.name,
        "group": job.variant.group,
        "seed": job.seed,
        "seconds": round(time.monotonic() - started, 1),
        "budget": bench.micro.seconds if bench.micro.steps is None else None,
        "start": bench.weights,
        "steps": {stage.name: json.loads(text)["steps"] for stage, text in zip(recipe.stages, finished)},
        "environment": environment(str(bench.device)),
    }


def _route(job: Job, bench: Bench) -> Schedule | None:
    """Return what `routed` learned under the job's seed, if the job is to keep it and it is there."""
    path = bench.out / f"routed-{job.seed}" / "schedule.json"
    if not job.variant.after_routed or not path.is_file():
        return None
    return Schedule.from_json(path.read_text())


# ---------------------------------------------------------------- measuring


def _validation(bench: Bench) -> list[ValidationPair]:
    micro = bench.micro
    source = ClipSource.open(bench.pack, cache=bench.cache, processes=bench.workers, split="validation")
    return validation_pairs(
        source, frames=micro.evaluated_frames, size=micro.pairs.size, photos=micro.evaluated_photos
    )


def _metric(bench: Bench) -> LPIPS | None:
    return None if bench.lpips is None else LPIPS("alex", bench.lpips).to(bench.device)


def _measure(job: Job, bench: Bench, pairs: Sequence[ValidationPair], lpips: LPIPS | None) -> dict[str, Any]:
    """Measure the exported folder: all rows, the route's cost, and of a decoder its speed."""
    variant = job.variant
    last = variant.stages(bench.micro, NANO_SCHEDULE)[-1].name
    folder = bench.out / job.name / f"{last}_model"
    model = cast(ReCaVSR, load(folder, device=bench.device))
    models = {"whole": model, **{name: Ablated(model, name) for name in variant.forgets}}
    upscalers = [session_upscaler(part, name) for name, part in models.items()]
    rows = validate(upscalers, pairs, lpips=lpips, niqe_every=12)
    if bench.held_out is not None:
        clips, cache = held_out_clips(bench.held_out), bench.out / "held_out"
        for row in evaluate(upscalers[:1], clips, QUICK, lpips=lpips, cache=cache):
            rows.append(row | {"degradation": f"held-out {row['degradation']}"})
    config = model.generator.config
    found: dict[str, Any] = {"schedule": config.schedule.to_config(), **cost(config)}
    found["generator_parameters"] = sum(parameter.numel() for parameter in model.generator.parameters())
    if variant.reconstructs:
        nano_training = NanoTraining.starting_from(folder).to(bench.device).requires_grad_(False)
        rows += _reconstruct(nano_training, pairs, lpips)
        small = bench.device.type == "cpu"  # a matter of minutes there
        found |= decoder_speed(model.decoder, *((64, 64) if small else (1088, 1920)))
    return found | {"rows": rows}


def _reconstruct(
    model: NanoTraining, pairs: Sequence[ValidationPair], lpips: LPIPS | None
) -> list[dict[str, Any]]:
    """Return the rows of truth's own latents decoded: what the decoder alone is worth (the paper's table)."""
    device = model.prompt.device
    known = {pair.lr_frames.tobytes(): pair.truth for both in pairs for pair in (both.moving, both.still)}

    @torch.inference_mode()
    def run(lr_frames: Any) -> Any:
        truth = frames_to_tensor(known[lr_frames.tobytes()], device)
        lr = frames_to_tensor(lr_frames, device)[0].transpose(0, 1)
        lr = torch.nn.functional.interpolate(lr, size=truth.shape[3:], mode="bilinear", align_corners=False)
        blocks = split_blocks(model.encode(truth), PLAN)
        return tensor_to_frames(decode_blocks(model.decoder, blocks, lr.transpose(0, 1)[None], PLAN))

    return validate([Upscaler("reconstruction", run, per_frame=False)], pairs, lpips=lpips)


def cost(config: GeneratorConfig) -> dict[str, float]:
    """Return what a generator's schedule costs: slots, bytes at 1920 x 1088, and latents attended to.

    `history_latents` is how many earlier latents all layers together see in mid-stream, a block; the
    arithmetic of attention over history is in proportion to it.
    """
    schedule, grid = config.schedule, Grid(1088 // config.token_stride, 1920 // config.token_stride)
    blocks = PLAN.cut(PLAN.first + 60 * PLAN.rest)
    late = [
        len(history)
        for action in schedule.actions
        for history in visible_after_blocks(action, schedule.anchor_rule, blocks)[-30:]
    ]
    return {
        "slots": schedule.slots,
        "history_bytes": account(schedule, grid.cells, config.width).bytes,
        "history_latents": sum(late) / 30,
    }


@torch.inference_mode()
def decoder_speed(decoder: FlashDecoder, height: int, width: int, blocks: int = 6) -> dict[str, float | None]:
    """Return a decoder's frames a second in mid-stream, and its peak memory on a card, with random inputs."""
    weight, config = decoder.latent_projection.weight, decoder.config
    on_card = weight.device.type == "cuda"

    def inputs(block: int) -> tuple[torch.Tensor, torch.Tensor]:
        grid = (height // config.latent_stride, width // config.latent_stride)
        latents = torch.randn(1, config.latent_channels, PLAN.latents(block), *grid, device=weight.device)
        frames = torch.rand(1, 3, PLAN.frames(block), height, width, device=weight.device, dtype=weight.dtype)
        return latents.to(weight.dtype), frames

    # What else lies on the card (the pool of data) is not the decoder's.
    others = torch.cuda.memory_allocated() if on_card else 0
    others -= sum(parameter.nbytes for parameter in decoder.parameters())
    state, _ = decoder.step(decoder.start(), *inputs(0))
    state, _ = decoder.step(state, *inputs(1))
    if on_card:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    given = inputs(1)
    started = time.perf_counter()
    for _ in range(blocks):
        state, _ = decoder.step(state, *given)
    if on_card:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    return {
        "decoder_fps": blocks * PLAN.frames(1) / seconds,
        "decoder_peak_bytes": torch.cuda.max_memory_allocated() - others if on_card else None,
    }


# ---------------------------------------------------------------- several cards


def spread(jobs: Sequence[Job], cards: int) -> list[list[Job]]:
    """Share jobs out among cards; what needs a learned route follows `routed` of its seed."""
    loads: list[list[Job]] = [[] for _ in range(cards)]
    for job in jobs:
        together = [
            load for load in loads for other in load
            if job.variant.after_routed and (other.variant.name, other.seed) == ("routed", job.seed)
        ]  # fmt: skip
        (together[0] if together else min(loads, key=len)).append(job)
    return loads


def run_on_cards(jobs: Sequence[Job], cards: int, arguments: Sequence[str], bench: Bench) -> int:
    """Run `recavsr` with these arguments once a card, each with its share of the jobs; 1 where one failed.

    The data is decoded once, before.
    """
    ClipSource.open(bench.pack, cache=bench.cache, processes=4 * bench.workers)
    bench.out.mkdir(parents=True, exist_ok=True)
    processes = []
    for card, share in enumerate(spread(jobs, cards)):
        if not share:
            continue
        command = [sys.executable, "-m", "recavsr", *arguments, "--only", ",".join(job.name for job in share)]
        log = (bench.out / f"card{card}.log").open("w")
        environment_of_card = {**os.environ, "CUDA_VISIBLE_DEVICES": str(card)}
        processes.append(
            subprocess.Popen(command, env=environment_of_card, stdout=log, stderr=subprocess.STDOUT)
        )
    codes = [process.wait() for process in processes]
    for card, code in enumerate(codes):
        if code:
            print(f"card {card}: failed with {code}; see {bench.out / f'card{card}.log'}", file=sys.stderr)
    return int(any(codes))
