"""The paper's training of the 5B model, recipe by recipe: adaptation, route learning, Stage 2, decoder.

Each stage starts from a model folder of `recavsr convert wan2.2`, or from the adapters that the stage
before left, which name their folder. It leaves RUN/NAME.safetensors (what it trained, float32) and
RUN/NAME_model, a model folder in the released layout. The numbers are those of the paper's appendix
"Training Details"; what it leaves open is marked. docs/training-5b.md is the manual.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from recavsr.attention import SpatialWindow
from recavsr.cache_policy import CacheAction, Schedule
from recavsr.data.pool import PairSettings
from recavsr.errors import InputError
from recavsr.geometry import PLAN, BlockPlan
from recavsr.models.decoder import DecoderConfig, FlashDecoder
from recavsr.models.dit_block import LayerCondition
from recavsr.models.generator import Condition, Generator, GeneratorConfig
from recavsr.models.lora import RANK, attach, load_adapters, merge_into_folder, read_header, save_adapters
from recavsr.models.wan_vae import WanVAE
from recavsr.models.weights import ModelFolder, decoder_names, save_model_folder
from recavsr.training.adjust import Adjustable
from recavsr.training.batches import BatchSource
from recavsr.training.decoder_stage import DecoderObjective, DecoderSettings
from recavsr.training.discriminator import MSQConfig, MSQDiscriminator
from recavsr.training.distributed import World, mesh, shard, whole_trained
from recavsr.training.loop import RunSettings
from recavsr.training.losses import FrameLosses, PerceptualDistance
from recavsr.training.objective import Batch, BatchSettings, Objective, OptimizerSettings
from recavsr.training.recompute import recompute_layers, recompute_steps, recompute_vae_blocks
from recavsr.training.runner import Recipe, RecipeStage, Setup, about
from recavsr.training.stage1 import (
    FixedScope,
    RouteLearning,
    Stage1Model,
    Stage1Objective,
    Stage1Settings,
)
from recavsr.training.stage2 import Stage2Model, Stage2Objective, Stage2Settings, trained_parameters
from recavsr.training.vae_losses import frame_losses_by_latent

STAGE1 = Stage1Settings(
    batches=BatchSettings(clips=32, frames=85, images=32, image_fraction=0.25),
    plan=PLAN,
    # The warm-up (100 steps) and the clipping (norm 1) are not from the paper, which has no average here.
    optimizer=OptimizerSettings(2e-5, (0.9, 0.99), weight_decay=1e-4, average_decay=None),
    phase=FixedScope(CacheAction(recent=6)),
)
"""Adaptation; route learning differs in its phase alone."""

PAIRS = PairSettings(
    frames=85,
    size=(704, 1280),
    video_fraction=1.0,
    image_video_fraction=0.0,
    presets={"realbasicvsr": 1.0},
    scales={4: 1.0},
    degradations=1,
)
"""Clips from videos, images from photos (the other kind where there are none), by RealBasicVSR's pipeline."""


# ---------------------------------------------------------------- what a stage starts from and leaves


@dataclass(frozen=True)
class Start:
    """A model folder, and perhaps the adapters that an earlier stage trained on it."""

    folder: ModelFolder
    adapters: Path | None = None
    schedule: Schedule | None = None  # the adapters' own

    @staticmethod
    def open(path: Path | None) -> Start:
        """Open a folder or a file of adapters; raise InputError where it is neither."""
        if path is None:
            raise InputError(
                "the 5B model is trained from given weights: make a folder by `recavsr convert wan2.2` "
                "and name it by --start; later stages start from RUN/STAGE.safetensors"
            )
        if path.is_dir():
            return Start(ModelFolder.open(path))
        if not path.is_file():
            raise InputError(f"--start {path} does not exist: name a model folder or a file of adapters")
        header = read_header(path)
        if header.base is None or not header.base.is_dir():
            raise InputError(
                f"{path} belongs to the model folder {header.base}, which is not there any more; start from "
                f"{merged_folder(path)}, with fresh adapters"
            )
        return Start(ModelFolder.open(header.base), path, header.schedule)

    def generator(self, device: torch.device, rank: int, schedule: Schedule | None = None) -> Generator:
        """Load the generator with its adapters (fresh ones of `rank` if there are none) under a schedule.

        By default the schedule is the adapters', or the folder's.
        """
        generator = self.folder.load_generator(device, compute_dtype(device))
        if self.adapters is None:
            attach(generator, rank, float(rank))
        else:
            load_adapters(generator, self.adapters)
        schedule = schedule or self.schedule
        return generator if schedule is None else generator.with_schedule(schedule)

    def leave(self, generator: Generator, schedule: Schedule, result: Path, world: World) -> None:
        """Write what was trained to `result`, and the folder with it merged beside. Every rank calls it."""
        tensors = whole_trained(generator, world)
        if not world.leads:
            return
        save_adapters(generator, result, tensors=tensors, schedule=schedule, base=self.folder.path)
        merged = merged_folder(result)
        shutil.rmtree(merged, ignore_errors=True)
        merge_into_folder(self.folder.path, result, merged, compute_dtype(world.device))


def merged_folder(result: Path) -> Path:
    """Return where the model folder of a stage lies whose trained weights are in `result`."""
    return result.with_name(f"{result.stem}_model")


def compute_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of frozen weights and of the merged ones: bfloat16 on a card."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def spread(world: World, network: nn.Module, layers: nn.ModuleList) -> None:
    """Shard a network over the GPUs where there are several; before its players are made."""
    if world.size > 1:
        shard(
            network,
            list(layers),
            mesh(world),
            methods=("forward", "condition", "step"),
            outputs=(Condition, LayerCondition),
            precision=torch.bfloat16 if world.device.type == "cuda" else None,
        )


def keep_little(generator: Generator) -> None:
    """Let layers and LR projector compute again in the backward pass what they would keep."""
    recompute_layers(generator.blocks)
    recompute_steps(generator.lr_projector)


# ---------------------------------------------------------------- objectives


class PaperObjective(Objective, Protocol):
    """An objective that knows what it leaves."""

    def leave(self, result: Path, world: World) -> None:
        """Write the stage's result; every rank calls it."""
        ...


class PaperStage1(Stage1Objective):
    """A phase of Stage 1: adapters, LR and recycle projections, and in route learning the router."""

    def __init__(self, setup: Setup, settings: Stage1Settings, rank: int = RANK) -> None:
        device = setup.world.device
        self.start = start = Start.open(setup.start)
        vae = WanVAE.load(start.folder.path, device, compute_dtype(device), decoder=False)
        scope = None
        if isinstance(settings.phase, FixedScope):
            scope = settings.phase.schedule(start.folder.generator.schedule)
        generator = start.generator(device, rank, scope)
        prompt = start.folder.load_prompt(device, compute_dtype(device))
        model = Stage1Model(generator, prompt).to(device)
        keep_little(generator)
        spread(setup.world, generator, generator.blocks)
        super().__init__(model, vae.encode, trained_parameters(generator), settings)

    def leave(self, result: Path, world: World) -> None:
        """Write adapters and merged folder; after route learning also the router and its schedule."""
        learned = isinstance(self.settings.phase, RouteLearning)
        schedule = self.export_schedule() if learned else self.model.generator.config.schedule
        self.start.leave(self.model.generator, schedule, result, world)
        if learned and world.leads:
            text = json.dumps(schedule.to_config(), indent=1) + "\n"
            result.with_name("schedule.json").write_text(text, encoding="utf-8")
            router = {name: value.cpu() for name, value in self.model.router.state_dict().items()}
            save_file(router, str(merged_folder(result) / "router.safetensors"))


class PaperStage2(Stage2Objective):
    """Stage 2 under the learned route; frames are compared one latent at a time."""

    def __init__(
        self,
        setup: Setup,
        settings: Stage2Settings,
        distance: PerceptualDistance | None,
        msq: MSQConfig,
        rank: int = RANK,
    ) -> None:
        world, device = setup.world, setup.world.device
        self.start = start = Start.open(setup.start)
        self.vae = vae = WanVAE.load(start.folder.path, device, compute_dtype(device))
        recompute_vae_blocks(vae.model.decoder)
        generator = start.generator(device, rank)
        prompt = start.folder.load_prompt(device, compute_dtype(device))
        # FSDP2 can't have one parameter in two networks.
        discriminator = MSQDiscriminator.of(generator, prompt, msq, share=world.size == 1)
        keep_little(generator)
        recompute_layers(discriminator.backbone.blocks)
        spread(world, generator, generator.blocks)
        spread(world, discriminator.backbone, discriminator.backbone.blocks)
        model = Stage2Model(generator, prompt, discriminator)
        super().__init__(
            model, vae.encode, lambda blocks, *_: vae.decode(torch.cat(blocks, 2)), distance, settings
        )

    def compare_frames(
        self, batch: Batch, latents: Tensor, plan: BlockPlan
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the losses of the frames that the frozen decoder gives, with their gradient."""
        return frame_losses_by_latent(self.vae, latents, batch, self.settings.frames, self.distance)

    def leave(self, result: Path, world: World) -> None:
        """Write adapters (the moving average) and the folder with them merged."""
        generator = self.model.generator
        self.start.leave(generator, generator.config.schedule, result, world)


class PaperDecoder(DecoderObjective):
    """The LR-conditioned decoder on the frozen encoder's latents."""

    def __init__(self, setup: Setup, settings: DecoderSettings, distance: PerceptualDistance | None) -> None:
        device = setup.world.device
        start = Start.open(setup.start)
        self.folder = start.folder
        if start.adapters is not None:
            self.folder = ModelFolder.open(merged_folder(start.adapters))
        decoder = self.folder.load_decoder(device).requires_grad_(True)
        vae = WanVAE.load(self.folder.path, device, compute_dtype(device), decoder=False)
        super().__init__(decoder, vae.encode, distance, settings)

    def leave(self, result: Path, world: World) -> None:
        """Write the decoder, and the folder that it started from with it in place."""
        if not world.leads:
            return
        _, released = decoder_names(self.model.config)
        tensors = {released(n): t.detach().cpu().contiguous() for n, t in self.model.state_dict().items()}
        save_file(tensors, str(result))
        folder = merged_folder(result)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder.path, folder)
        shutil.copyfile(result, folder / "flashdecoder.safetensors")


# ---------------------------------------------------------------- stages


def _leave(objective: Objective, source: BatchSource, result: Path, world: World) -> None:
    cast(PaperObjective, objective).leave(result, world)


def stage1_stage(name: str, run: RunSettings, settings: Stage1Settings, rank: int = RANK) -> RecipeStage:
    """Return adaptation or routing, as `settings.phase` says."""
    return RecipeStage(
        name,
        run,
        lambda setup: PaperStage1(setup, settings, rank),
        _leave,
        _facts(settings, rank=rank),
        adjustable=Adjustable(settings, lambda changed: stage1_stage(name, run, changed, rank)),
    )


def stage2_stage(
    run: RunSettings, settings: Stage2Settings, msq: MSQConfig | None = None, rank: int = RANK
) -> RecipeStage:
    """Return Stage 2."""
    msq = MSQConfig() if msq is None else msq

    def build(setup: Setup) -> Objective:
        return PaperStage2(setup, settings, setup.distance(settings.frames.perceptual_weight), msq, rank)

    return RecipeStage(
        "stage2",
        run,
        build,
        _leave,
        _facts(settings, rank=rank, discriminator=asdict(msq)),
        perceptual=settings.frames.perceptual_weight > 0,
        adjustable=Adjustable(settings, lambda changed: stage2_stage(run, changed, msq, rank)),
    )


def decoder_stage(run: RunSettings, settings: DecoderSettings) -> RecipeStage:
    """Return the training of the LR-conditioned decoder."""

    def build(setup: Setup) -> Objective:
        return PaperDecoder(setup, settings, setup.distance(settings.frames.perceptual_weight))

    return RecipeStage(
        "decoder",
        run,
        build,
        _leave,
        _facts(settings),
        perceptual=settings.frames.perceptual_weight > 0,
        adjustable=Adjustable(settings, lambda changed: decoder_stage(run, changed)),
    )


def _facts(settings: Any, **more: Any) -> dict[str, Any]:
    return {"settings": asdict(settings), **more}


def _long(steps: int) -> RunSettings:
    """Return a run as long as the paper's, one clip at a time on each GPU."""
    return RunSettings(steps=steps, precision="bf16", clips_a_pass=1, save_every=500, sample_every=500)


# ---------------------------------------------------------------- recipes


def paper_5b_stage1() -> Recipe:
    """Stage 1 of the paper: 70K updates with W_6 in every layer, then 30K of route learning. Eight GPUs."""
    stages = (
        stage1_stage("adaptation", _long(70_000), STAGE1),
        stage1_stage("routing", _long(30_000), replace(STAGE1, phase=RouteLearning())),
    )
    return Recipe(about(paper_5b_stage1), stages, PAIRS, data="stream", read_start=Start.open)


def paper_5b_stage2() -> Recipe:
    """Stage 2 of the paper: 10K updates of one-step adversarial training by self-rollout. Eight GPUs."""
    stage = stage2_stage(_long(10_000), Stage2Settings())
    return Recipe(about(paper_5b_stage2), (stage,), PAIRS, data="stream", read_start=Start.open)


def paper_5b_decoder() -> Recipe:
    """The paper's LR-conditioned FlashDecoder: up to 500K updates on 17-frame clips. Eight GPUs."""
    stage = decoder_stage(_long(500_000), DecoderSettings(checkpoint=True))
    pairs = replace(PAIRS, frames=17, size=(896, 1344))
    return Recipe(about(paper_5b_decoder), (stage,), pairs, data="stream", read_start=Start.open)


def paper_debug() -> Recipe:
    """The four stages of the 5B model with tiny random networks, on a CPU in a minute."""
    plan, frames = BlockPlan(2, 1), 13
    batches = BatchSettings(clips=2, frames=frames, images=4, image_fraction=0.3)
    fast = OptimizerSettings(1e-3, warm_up_steps=0, average_decay=None)
    # LPIPS needs weights that are not in the package: the last stages are done without.
    stage1 = Stage1Settings(batches, plan, fast, FixedScope(CacheAction(recent=6)))
    stage2 = Stage2Settings(
        batches=batches,
        generator=replace(fast, average_decay=0.5),
        discriminator=fast,
        plan=plan,
        frames=FrameLosses("mse", perceptual_weight=0.0),
    )
    decoder = DecoderSettings(batches, replace(fast, average_decay=0.5), frames=FrameLosses("l1", 0.0))
    msq = MSQConfig(layers=(1, 2, 3), queries=3, width=16, heads=2, window=(2, 2), tube_latents=2)
    run = RunSettings(steps=4, clips_a_pass=1, log_every=1, save_every=2, sample_every=4)
    stages = (
        stage1_stage("adaptation", run, stage1, rank=4),
        stage1_stage("routing", run, replace(stage1, phase=RouteLearning()), rank=4),
        stage2_stage(run, stage2, msq, rank=4),
        decoder_stage(run, decoder),
    )
    pairs = replace(PAIRS, frames=frames, size=(64, 96))
    return Recipe(
        about(paper_debug),
        stages,
        pairs,
        data="stream",
        sample_of_data=(2, 8),
        read_start=Start.open,
        make_start=tiny_start,
    )


# ---------------------------------------------------------------- the tiny start

TINY_VAE: dict[str, Any] = {
    "base_dim": 8,
    "decoder_base_dim": 8,
    "z_dim": 48,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
    "latents_mean": [0.0] * 48,
    "latents_std": [1.0] * 48,
}


def tiny_start(path: Path) -> None:
    """Write a model folder of tiny random networks, Wan autoencoder included, for `paper_debug`."""
    layers = 4
    generator = Generator(
        GeneratorConfig(
            layers=layers,
            heads=2,
            head_width=12,
            ffn_width=32,
            text_width=16,
            lr_hidden=(8, 12),
            schedule=Schedule.uniform(layers, CacheAction(recent=2)),
            window=SpatialWindow(2, 2),
            time_frequencies=16,
        )
    )
    decoder = FlashDecoder(
        DecoderConfig(width=32, depth=2, heads=2, groups=1, refinement_depth=1, ffn_ratio=2.0)
    )
    vae = WanVAE(TINY_VAE)
    save_model_folder(path, generator, decoder, torch.zeros(1, 1, 16), TINY_VAE, torch.float32)
    save_file({n: t.contiguous() for n, t in vae.model.state_dict().items()}, str(path / "vae.safetensors"))
