"""One training step of the 5B recipe at full width on this machine: time and peak memory beside the plan.

Stage 1: all blocks of a clip at once, every layer with a history of 6 latents, flow matching, LoRA, AdamW.
Stage 2: self-rollout block by block, latent loss, the MSQ discriminator with feature R1, both players'
updates and the moving average. Weights and clips are random: neither changes what a step costs. The
autoencoder's encoding and decoding, and LPIPS, are left out, of the plan beside it too.

    python benchmarks/train_step_5b.py                      # as many layers as this GPU holds
    torchrun --nproc-per-node 2 benchmarks/train_step_5b.py # two GPUs, sharded by FSDP2
    python benchmarks/train_step_5b.py --preset tiny        # seconds on a CPU: shows that it runs
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recavsr.attention import SpatialWindow
from recavsr.cache_policy import PAPER_SCHEDULE, CacheAction, Schedule
from recavsr.evaluation.environment import environment
from recavsr.models.generator import Generator, GeneratorConfig, teacher_forced_recycled
from recavsr.models.lora import attach
from recavsr.models.presets import recavsr_5b
from recavsr.training.adversarial import SharedNoise, discriminator_loss, feature_r1, generator_loss
from recavsr.training.discriminator import MSQConfig, MSQDiscriminator, frozen
from recavsr.training.distributed import World, join
from recavsr.training.flow_matching import TIMESTEPS, flow_matching_loss, logit_normal_times, noised
from recavsr.training.memory_plan import MemoryPlan, TrainingSetup, msq_layers, plan_stage1, plan_stage2
from recavsr.training.paper import keep_little, spread
from recavsr.training.recompute import recompute_layers
from recavsr.training.rollout import roll_out
from recavsr.training.stage2 import trained_parameters

STAGE1_SCOPE = CacheAction(6)
ROOM = 0.88  # share of a card that the counted plan may fill, where the number of layers is chosen


def config_of(preset: str, layers: int) -> GeneratorConfig:
    """Return the 5B generator, or a tiny one of the same form, with this many layers of the paper's route."""
    route = Schedule(PAPER_SCHEDULE.actions[:layers])
    if preset == "full":
        return replace(recavsr_5b(), layers=layers, schedule=route)
    return GeneratorConfig(
        layers=layers,
        heads=2,
        head_width=24,
        ffn_width=96,
        text_width=16,
        lr_hidden=(16, 24),
        schedule=route,
        window=SpatialWindow(22, 40),
    )


@dataclass(frozen=True)
class Clip:
    """One clip's tensors: latents [1, C, T, H, W], LR frames [1, 3, F, s H, s W], a prompt [1, L, text]."""

    latents: Tensor
    lr_frames: Tensor
    prompt: Tensor

    @staticmethod
    def draw(setup: TrainingSetup, device: torch.device) -> Clip:
        """Draw a random clip."""
        config, count = setup.generator, sum(map(len, setup.blocks))
        side = (setup.height // config.latent_stride, setup.width // config.latent_stride)
        shape = (setup.clips, config.latent_channels, count, *side)
        frames = (setup.clips, 3, setup.frames, setup.height, setup.width)
        return Clip(
            torch.randn(shape, device=device),
            torch.rand(frames, device=device, dtype=torch.bfloat16) * 2 - 1,
            torch.randn(1, setup.prompt_tokens, config.text_width, device=device, dtype=torch.bfloat16),
        )


def build(setup: TrainingSetup, device: torch.device) -> Generator:
    """Return a random generator with adapters, its frozen weights in bfloat16."""
    torch.set_default_dtype(torch.bfloat16)  # no moment with all weights in float32
    try:
        with torch.device(device):
            generator = Generator(setup.generator)
    finally:
        torch.set_default_dtype(torch.float32)
    attach(generator, setup.rank)
    return generator


Update = Callable[[], Iterator[tuple[str, Tensor]]]
"""One training step: yields (player, loss); the loss is taken back before the next one is asked for."""


def stage1(
    setup: TrainingSetup, world: World
) -> tuple[Update, dict[str, torch.optim.Optimizer], list[Tensor]]:
    """Set up Stage 1; return its step, its optimiser and no moving average."""
    scope = Schedule.uniform(setup.generator.layers, STAGE1_SCOPE)
    generator = build(replace(setup, generator=replace(setup.generator, schedule=scope)), world.device)
    if setup.recompute:
        keep_little(generator)
    spread(world, generator, generator.blocks)
    clip = Clip.draw(setup, world.device)
    recycled = teacher_forced_recycled(clip.latents, setup.plan)

    def update() -> Iterator[tuple[str, Tensor]]:
        times = logit_normal_times(setup.clips, world.device)
        noise = torch.randn_like(clip.latents)
        condition = generator.condition(clip.prompt, TIMESTEPS * times)
        noisy = noised(clip.latents, noise, times)
        prediction = generator(condition, noisy, clip.lr_frames, recycled, setup.plan)
        yield "generator", flow_matching_loss(prediction, clip.latents, noise)

    return update, {"generator": adamw(generator, 2e-5, (0.9, 0.99))}, []


def stage2(
    setup: TrainingSetup, world: World
) -> tuple[Update, dict[str, torch.optim.Optimizer], list[Tensor]]:
    """Set up Stage 2; return its step, both optimisers and the generator's moving average."""
    generator = build(setup, world.device)
    clip = Clip.draw(setup, world.device)
    settings = MSQConfig(layers=msq_layers(setup.generator.layers))
    discriminator = MSQDiscriminator.of(generator, clip.prompt, settings, share=world.size == 1)
    if setup.recompute:
        keep_little(generator)
        recompute_layers(discriminator.backbone.blocks)
    spread(world, generator, generator.blocks)
    spread(world, discriminator.backbone, discriminator.backbone.blocks)
    optimizers = {
        "discriminator": adamw(discriminator, 1e-5, (0.0, 0.99)),
        "generator": adamw(generator, 1e-5, (0.5, 0.99)),
    }

    def update() -> Iterator[tuple[str, Tensor]]:
        real = clip.latents
        condition = generator.condition(clip.prompt)
        fake = torch.cat(
            roll_out(generator, condition, torch.randn_like(real), clip.lr_frames, setup.plan), dim=2
        )
        shared, supports = SharedNoise.draw(real), discriminator.draw_supports(real)
        with torch.no_grad():
            of_real = discriminator.backbone(shared.add_to(real), shared.timestep)
        of_fake = discriminator.backbone(shared.add_to(fake), shared.timestep)

        def logit(features: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
            return discriminator.scope_logits(features, supports).mean(1)

        judged = discriminator_loss(logit(of_real), logit([x.detach() for x in of_fake]))
        yield "discriminator", judged + 1000 * feature_r1(logit, of_real)
        with frozen(discriminator):
            adversarial = generator_loss(logit(of_real), logit(of_fake))
        yield "generator", F.mse_loss(fake, real) + 0.1 * adversarial

    return update, optimizers, [p.detach().clone() for p in trained_parameters(generator)]


def adamw(module: nn.Module, rate: float, betas: tuple[float, float]) -> torch.optim.Optimizer:
    """Return the paper's optimiser over what is trained of a module."""
    # Fused: the plain forms make temporary copies of all parameters.
    return torch.optim.AdamW(trained_parameters(module), rate, betas, weight_decay=1e-4, fused=True)


def measure(stage: int, setup: TrainingSetup, world: World, repeats: int) -> dict[str, Any]:
    """Run one warm-up step and `repeats` timed ones; return medians, peak memory and the plan."""
    device, on_cuda = world.device, world.device.type == "cuda"
    torch.manual_seed(world.rank)
    update, optimizers, average = (stage1 if stage == 1 else stage2)(setup, world)
    parameters = {name: [p for g in o.param_groups for p in g["params"]] for name, o in optimizers.items()}
    seconds: list[dict[str, float]] = []
    for repeat in range(repeats + 1):
        watch = Stopwatch(on_cuda)
        if on_cuda and repeat == min(1, repeats):
            torch.cuda.reset_peak_memory_stats(device)
        # Where FSDP2 gathers in bfloat16 the casts of autocast find nothing to do.
        with torch.autocast(device.type, torch.bfloat16):
            steps = update()
            for player, loss in watch.each("forward", steps):
                with watch("backward"), torch.autocast(device.type, enabled=False):
                    loss.backward()
                with watch("optimizer"):
                    world.average_gradients(parameters[player])
                    nn.utils.clip_grad_norm_(parameters[player], 1.0)
                    optimizers[player].step()
                    optimizers[player].zero_grad(set_to_none=True)
        if average:
            with watch("optimizer"), torch.no_grad():
                torch._foreach_lerp_(average, [p.detach() for p in parameters["generator"]], 0.001)
        if not torch.isfinite(loss.detach()):
            raise SystemExit(f"the loss of Stage {stage} is {loss.item()}")
        if repeat:
            seconds.append(watch.seconds)
    plan = (plan_stage1 if stage == 1 else plan_stage2)(setup)
    peak = torch.cuda.max_memory_allocated(device) if on_cuda else None
    return {
        "stage": stage,
        "layers": setup.generator.layers,
        "gpus": world.size,
        "size": f"{setup.height}x{setup.width}",
        "frames": setup.frames,
        "clips_a_gpu": setup.clips,
        "recompute": setup.recompute,
        "step_s": round(statistics.median(sum(s.values()) for s in seconds), 3),
        **{f"{part}_s": round(statistics.median(s[part] for s in seconds), 3) for part in seconds[0]},
        "peak_gb": None if peak is None else round(peak / 1e9, 2),
        "plan_gb": round(plan.peak / 1e9, 2),
        "plan": {k: round(v / 1e9, 3) for k, v in {**plan.held, **plan.moments}.items()},
    }


class Stopwatch:
    """Seconds spent in named parts; waits for the GPU at their borders."""

    def __init__(self, on_cuda: bool) -> None:
        self.on_cuda = on_cuda
        self.seconds: dict[str, float] = {}

    def _now(self) -> float:
        if self.on_cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """Time a `with` block."""
        start = self._now()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + self._now() - start

    def each(self, part: str, items: Iterator[Any]) -> Iterator[Any]:
        """Time what making each item takes."""
        nothing = object()
        while True:
            with self(part):
                item = next(items, nothing)
            if item is nothing:
                return
            yield item


def most_layers(setup: TrainingSetup, stage: int, world: World) -> int:
    """Return how many layers the card holds, by the counted plan."""
    if world.device.type != "cuda":
        return setup.generator.layers
    room = ROOM * torch.cuda.get_device_properties(world.device).total_memory
    layers = setup.generator.layers
    while layers > 3 and counted(replace(setup, generator=config_of("full", layers)), stage).peak > room:
        layers -= 1
    return layers


def counted(setup: TrainingSetup, stage: int) -> MemoryPlan:
    """Return the plan of a stage."""
    return plan_stage1(setup) if stage == 1 else plan_stage2(setup)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Measure, print a JSON line a stage, and write the result file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", choices=("full", "tiny"), default="full")
    parser.add_argument("--stage", choices=("1", "2", "both"), default="both")
    parser.add_argument(
        "--layers", default="auto", help="a number, or auto: as many as the GPU holds, 30 at most"
    )
    parser.add_argument("--frames", type=int, help="85 (tiny: 37); 21 + 8 n")
    parser.add_argument("--size", help="output size, HEIGHTxWIDTH: 704x1280 (tiny: 64x96)")
    parser.add_argument("--rank", type=int, help="of the adapters: 512 (tiny: 4)")
    parser.add_argument("--clips", type=int, default=1, help="clips of a pass on each GPU")
    parser.add_argument("--no-recompute", action="store_true", help="keep the insides of all layers")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("-o", "--output", type=Path, help="result file (JSON)")
    options = parser.parse_args(arguments)
    tiny = options.preset == "tiny"
    height, width = map(int, (options.size or ("64x96" if tiny else "704x1280")).split("x"))
    layers = (4 if tiny else 30) if options.layers == "auto" else int(options.layers)
    rows = []
    with join(torch.device(options.device)) as world:
        for stage in (1, 2) if options.stage == "both" else (int(options.stage),):
            setup = TrainingSetup(
                config_of(options.preset, layers),
                rank=options.rank or (4 if tiny else 512),
                gpus=world.size,
                frames=options.frames or (37 if tiny else 85),
                height=height,
                width=width,
                clips=options.clips,
                prompt_tokens=8 if tiny else 512,
                recompute=not options.no_recompute,
                autoencoder=False,
            )
            fit = layers
            if options.layers == "auto" and not tiny:
                fit = most_layers(setup, stage, world)
            row = None
            while row is None:
                setup = replace(setup, generator=config_of(options.preset, fit))
                try:
                    row = measure(stage, setup, world, options.repeats)
                except torch.OutOfMemoryError:
                    # Other processes would wait for this one for ever.
                    if options.layers != "auto" or world.size > 1 or fit <= 3:
                        raise
                if row is None:
                    print(f"{fit} layers do not fit, trying {fit - 3}", file=sys.stderr)
                    fit -= 3
                gc.collect()
                if world.device.type == "cuda":
                    torch.cuda.empty_cache()
            row["card"] = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else None
            rows.append(row)
            if world.leads:
                print(json.dumps(row), flush=True)
        if options.output is not None and world.leads:
            result = {"environment": environment(str(world.device)), "rows": rows}
            options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return rows


if __name__ == "__main__":
    main()
