"""Recipes: named functions that return what to train, and nano's stages one by one.

`recavsr train NAME --data FOLDER --out RUN` runs a whole recipe, with `--stage` some of its stages. Each
reads the weights that the stage before left in RUN and writes its own there. The data alone rebuilds
everything (docs/training-log.md says what ran).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import cast

from recavsr.data.pool import PairSettings
from recavsr.errors import InputError
from recavsr.models import presets
from recavsr.training.adjust import Adjustable
from recavsr.training.batches import BatchSource
from recavsr.training.decoder_stage import DecoderSettings
from recavsr.training.discriminator import NANO_MSQ, MSQConfig
from recavsr.training.distributed import World
from recavsr.training.growth import grown
from recavsr.training.loop import RunSettings
from recavsr.training.nano import (
    STAGES,
    NanoObjective,
    NanoTraining,
    Stage,
    compile_parts,
    measure_statistics,
)
from recavsr.training.nano_stages import (
    NanoDecoder,
    NanoStage1,
    NanoStage2,
    Stage1Sizes,
    decoder_settings,
    stage2_settings,
)
from recavsr.training.objective import BatchSettings, Objective, OptimizerSettings
from recavsr.training.paper import (
    paper_5b_decoder,
    paper_5b_stage1,
    paper_5b_stage2,
    paper_debug,
)
from recavsr.training.runner import Recipe, RecipeStage, Setup, about
from recavsr.training.saturation import saturation_remark
from recavsr.training.stage1 import FixedScope, RouteLearning
from recavsr.training.stage2 import Stage2Settings

SECONDS = {
    "autoencoder": 300.0,
    "generator": 180.0,
    "teacher": 150.0,
    "joint": 420.0,
    "polish": 240.0,
    "control": 540.0,
    "control_polish": 240.0,
}
"""Time of each stage of nano's short form on one large card."""
SHORT_FORM = ("autoencoder", "generator", "teacher", "joint", "polish")


NANO_PAIRS = PairSettings(
    frames=53,
    still_fraction=0.5,
    variety=0.5,
    scales={4: 1.0},
    presets={"clean": 0.08, "mild": 0.24, "medium": 0.58, "heavy": 0.1},
)
"""Clips of 14 latents: 6 + 4 x 2. Of those from photos half stand still: where pulses and flicker show.
Half of all are drawn freely, or the photos are soon known by heart. Some are clean, so that detail of good
input is not taken for noise."""

OpenNano = Callable[[Setup], NanoTraining]
"""Makes the networks that a stage trains, on any device."""


# ---------------------------------------------------------------- nano's short form


def open_nano(setup: Setup) -> NanoTraining:
    """Return the networks that a stage starts from."""
    return NanoTraining.starting_from(setup.start)


def nano_stage(
    name: str, run: RunSettings | None = None, stage: Stage | None = None, opens: OpenNano = open_nano
) -> RecipeStage:
    """Return a stage of nano's short form, by default as long and as large as one large card allows."""
    stage = STAGES[name]() if stage is None else stage
    run = RunSettings(seconds=SECONDS[name], precision="bf16", sample_every=1000) if run is None else run
    return RecipeStage(
        name,
        run,
        partial(_build_nano, name, stage, opens),
        _finish_nano,
        asdict(stage),
        perceptual=stage.perceptual_weight > 0,
        adjustable=Adjustable(stage, lambda changed: nano_stage(name, run, changed, opens)),
        remark=lambda objective: _saturation(cast(NanoTraining, objective.model)),
    )


def _build_nano(name: str, stage: Stage, opens: OpenNano, setup: Setup) -> Objective:
    model = _on_device(opens, setup)
    distance = setup.distance(stage.perceptual_weight)
    return NanoObjective(name, model, stage, distance, compiled=setup.compiled)


def _on_device(opens: OpenNano, setup: Setup) -> NanoTraining:
    model = opens(setup).to(setup.world.device)
    if setup.compiled:
        compile_parts(model)
    return model


def _finish_nano(objective: Objective, source: BatchSource, result: Path, world: World) -> None:
    if not world.leads:
        return
    model = cast(NanoTraining, objective.model)
    if objective.name == "autoencoder":
        measure_statistics(model, iter(lambda: source.batch(objective.batches), None), 8)
    model.save(result)
    if objective.name not in ("autoencoder", "generator", "teacher"):
        model.export(result.with_name(f"{objective.name}_model"))


def _saturation(nano: NanoTraining) -> str | None:
    """Say where a decoder that the stage has trained is saturated."""
    trained = any(parameter.requires_grad for parameter in nano.decoder.parameters())
    return saturation_remark(nano.decoder) if trained else None


# ---------------------------------------------------------------- nano, the paper's stages


def stage1_stage(
    name: str,
    run: RunSettings,
    sizes: Stage1Sizes | None = None,
    opens: OpenNano = open_nano,
    scope: FixedScope | None = None,
) -> RecipeStage:
    """Return nano's `routing` (the route is learned), or by another name an adaptation: `scope`, or W_6."""
    sizes = Stage1Sizes() if sizes is None else sizes

    def build(setup: Setup) -> Objective:
        nano = _on_device(opens, setup)
        return NanoStage1(nano, sizes, routing=name == "routing", scope=scope or FixedScope())

    adjustable = Adjustable(sizes, lambda changed: stage1_stage(name, run, changed, opens, scope))
    return RecipeStage(name, run, build, _finish_stage1, {"sizes": asdict(sizes)}, adjustable=adjustable)


def _finish_stage1(objective: Objective, source: BatchSource, result: Path, world: World) -> None:
    stage = cast(NanoStage1, objective)
    if not world.leads:
        return
    if isinstance(stage.settings.phase, RouteLearning):
        stage.apply_route()
        schedule = stage.nano.generator.config.schedule.to_config()
        result.with_name("schedule.json").write_text(json.dumps(schedule, indent=1) + "\n")
    stage.nano.save(result)


def stage2_stage(
    run: RunSettings,
    settings: Stage2Settings | None = None,
    opens: OpenNano = open_nano,
    msq: MSQConfig = NANO_MSQ,
) -> RecipeStage:
    """Return nano's Stage 2: self-rollout under the learned route, with the MSQ discriminator."""
    settings = stage2_settings() if settings is None else settings

    def build(setup: Setup) -> Objective:
        distance = setup.distance(settings.frames.perceptual_weight)
        return NanoStage2(_on_device(opens, setup), distance, settings, msq, compiled=setup.compiled)

    facts = {"settings": asdict(settings), "msq": asdict(msq)}
    return RecipeStage(
        "stage2",
        run,
        build,
        _finish_whole,
        facts,
        perceptual=settings.frames.perceptual_weight > 0,
        adjustable=Adjustable(settings, lambda changed: stage2_stage(run, changed, opens, msq)),
        remark=lambda objective: _saturation(cast(NanoStage2, objective).nano),
    )


def decoder_stage(
    run: RunSettings, settings: DecoderSettings | None = None, opens: OpenNano = open_nano
) -> RecipeStage:
    """Return the training of nano's decoder on the latents of its frozen encoder."""
    settings = decoder_settings() if settings is None else settings

    def build(setup: Setup) -> Objective:
        distance = setup.distance(settings.frames.perceptual_weight)
        return NanoDecoder(_on_device(opens, setup), distance, settings, compiled=setup.compiled)

    facts = {"settings": asdict(settings)}
    return RecipeStage(
        "decoder",
        run,
        build,
        _finish_whole,
        facts,
        perceptual=settings.frames.perceptual_weight > 0,
        adjustable=Adjustable(settings, lambda changed: decoder_stage(run, changed, opens)),
        remark=lambda objective: _saturation(cast(NanoDecoder, objective).nano),
    )


def _finish_whole(objective: Objective, source: BatchSource, result: Path, world: World) -> None:
    if world.leads:
        nano = cast(NanoStage2 | NanoDecoder, objective).nano
        nano.save(result)
        nano.export(result.with_name(f"{objective.name}_model"))


def _timed(seconds: float) -> RunSettings:
    return RunSettings(seconds=seconds, precision="bf16", sample_every=1000)


def _through_history(name: str) -> Stage:
    """Return a stage of the short form in which gradients flow into the blocks before."""
    return replace(STAGES[name](), through_history=True)


def nano_full() -> Recipe:
    """nano: a decoder alone, latents added to it, then the paper's stages. 44 minutes on one large card."""
    stages = (
        nano_stage("control", _timed(430)),
        nano_stage("control_polish", _timed(170)),
        nano_stage("autoencoder", _timed(120)),
        stage1_stage("adaptation", _timed(120)),
        stage1_stage("routing", _timed(100)),
        nano_stage("joint", _timed(520), _through_history("joint")),
        nano_stage("polish", _timed(830), _through_history("polish")),
        stage2_stage(_timed(350)),
    )
    return Recipe(about(nano_full), stages, NANO_PAIRS)


def nano_short() -> Recipe:
    """nano's short form, from encoder to polish. 22 minutes on one large card."""
    return Recipe(about(nano_short), tuple(nano_stage(name) for name in SHORT_FORM), NANO_PAIRS)


def nano_control() -> Recipe:
    """The control of nano: the decoder alone on the same data. 13 minutes on one large card."""
    stages = (nano_stage("control"), nano_stage("control_polish"))
    return Recipe(about(nano_control), stages, NANO_PAIRS)


def nano_fine() -> Recipe:
    """nano with latents of 8 pixels instead of 16, from the data alone. 35 minutes on one large card."""
    stages = (
        nano_stage("control", _timed(430), opens=_open_fine),
        nano_stage("autoencoder", _timed(290), opens=_open_fine),
        nano_stage("joint", _timed(520), _through_history("joint"), _open_fine),
        nano_stage("polish", _timed(830), _through_history("polish"), _open_fine),
    )
    return Recipe(about(nano_fine), stages, NANO_PAIRS, read_start=_read_fine)


def _open_fine(setup: Setup) -> NanoTraining:
    if setup.start is None:
        return NanoTraining(presets.nano_fine(), presets.nano_fine_decoder())
    return _read_fine(setup.start)


def _read_fine(path: Path) -> NanoTraining:
    model = NanoTraining.starting_from(path)
    stride, wanted = model.generator.config.latent_stride, presets.nano_fine().latent_stride
    if stride != wanted:
        raise InputError(
            f"{path} has latents of {stride} pixels, nano_fine of {wanted}; "
            "start it from weights of its own, or from none"
        )
    return model


def nano_teacher() -> Recipe:
    """A slow teacher: nano with twice the layers and a wider head, polished on from trained weights."""
    stages = (nano_stage("polish", _timed(1200), _through_history("polish"), _open_grown),)
    return Recipe(about(nano_teacher), stages, NANO_PAIRS, needs_start=True)


def _open_grown(setup: Setup) -> NanoTraining:
    assert setup.start is not None
    return grown(NanoTraining.starting_from(setup.start))


def nano_debug() -> Recipe:
    """All stages of nano on a CPU in minutes, from a small part of the data. Shows that training works."""
    small = PairSettings(size=64, degradations=1)
    lengths = {  # steps, latents, batch, learning rate
        "autoencoder": (40, 3, 4, 2e-3),
        "adaptation": (16, 8, 2, 1e-3),
        "routing": (16, 8, 2, 1e-3),
        "generator": (16, 8, 2, 1e-3),
        "joint": (16, 8, 2, 5e-4),
        "stage2": (8, 8, 2, 2e-4),
    }
    stages = []
    for name, (steps, latents, batch, rate) in lengths.items():
        optimizer = OptimizerSettings(rate, warm_up_steps=5, cool_down=0.4, average_decay=0.8)
        run = RunSettings(steps=steps, log_every=1, save_every=10, sample_every=steps)
        batches = BatchSettings(batch, 4 * latents - 3)
        if name in STAGES:
            stage = replace(STAGES[name](), latents=latents, batch=batch, optimizer=optimizer)
            stages.append(nano_stage(name, run, stage))
        elif name == "stage2":
            # LPIPS needs weights that are not in the package: the last stage is done without.
            made = stage2_settings()
            generator = replace(made.generator, learning_rate=rate, first_step=2, average_decay=0.8)
            frames = replace(made.frames, perceptual_weight=0.0)
            settings = replace(made, batches=batches, generator=generator, frames=frames)
            stages.append(stage2_stage(run, settings))
        else:
            images = replace(batches, images=4, image_fraction=0.25)
            stages.append(stage1_stage(name, run, Stage1Sizes(images, optimizer)))
    return Recipe(about(nano_debug), tuple(stages), small, data="exact", sample_of_data=(2, 8), checks=2)


# ---------------------------------------------------------------- the registry


RECIPES: dict[str, Callable[[], Recipe]] = {
    recipe.__name__: recipe
    for recipe in (
        nano_full,
        nano_short,
        nano_control,
        nano_fine,
        nano_teacher,
        nano_debug,
        paper_5b_stage1,
        paper_5b_stage2,
        paper_5b_decoder,
        paper_debug,
    )
}
"""What `recavsr train NAME` knows."""
