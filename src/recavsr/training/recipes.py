"""nano's training as named stages: autoencoder, generator, teacher, joint, polish.

    python -m recavsr.training.recipes autoencoder --pack PACK --out RUN --seconds 300

Each stage reads the weights that the stage before left in RUN and writes its own there, so stages
can run in separate calls. The data alone rebuilds everything (docs/training-log.md says what ran).

Shapes: B batch, T latents, F = 4 T - 3 frames, S crop side.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from recavsr.data.pool import PairSettings, TrainingPool
from recavsr.errors import InputError
from recavsr.geometry import BlockPlan
from recavsr.models.autoencoder import Encoder
from recavsr.models.decoder import FlashDecoder
from recavsr.models.generator import Generator, schedule_visibility, teacher_forced_recycled
from recavsr.models.presets import NANO_PROMPT_TOKENS, nano, nano_decoder, nano_encoder
from recavsr.models.weights import ModelFolder, load_strictly, read_tensors, save_model_folder
from recavsr.training.decoder_stage import with_hard_share, with_noise
from recavsr.training.loop import LossFunction, RunSettings, train
from recavsr.training.losses import (
    PerceptualDistance,
    charbonnier,
    latent_statistics_penalty,
    perceptual,
    psnr,
    temporal_difference,
)
from recavsr.training.rollout import decode_blocks, roll_out

PLAN = BlockPlan()


class NanoTraining(nn.Module):
    """Everything that is trained: encoder, decoder, generator and its prompt."""

    latents_mean: Tensor
    latents_std: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder(nano_encoder())
        self.decoder = FlashDecoder(nano_decoder())
        self.generator = Generator(nano())
        self.prompt = nn.Parameter(torch.randn(1, NANO_PROMPT_TOKENS, nano().text_width))
        # Statistics of the encoder's latents, measured once after its training.
        self.register_buffer("latents_mean", torch.zeros(1, nano().latent_channels, 1, 1, 1))
        self.register_buffer("latents_std", torch.ones(1, nano().latent_channels, 1, 1, 1))

    def encode(self, frames: Tensor) -> Tensor:
        """Encode HQ frames to normalised latents."""
        return (self.encoder(frames).float() - self.latents_mean) / self.latents_std

    def set_statistics(self, mean: Tensor, std: Tensor) -> None:
        """Make `mean` and `std` [C] the normalisation of encoder and decoder alike."""
        shape = self.latents_mean.shape
        for target, value in ((self.latents_mean, mean), (self.latents_std, std)):
            target.copy_(value.view(shape))
        self.decoder.latents_mean.copy_(self.latents_mean)
        self.decoder.latents_std.copy_(self.latents_std)

    def save(self, path: Path) -> None:
        """Write all weights, in float32."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        save_file({k: v.detach().cpu().contiguous() for k, v in self.state_dict().items()}, str(partial))
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Read weights that `save` wrote, or a model folder that `export` wrote, to train on."""
        if path.is_dir():
            folder = ModelFolder.open(path)
            self.generator.load_state_dict(folder.load_generator().state_dict())
            self.decoder.load_state_dict(folder.load_decoder().state_dict())
            self.prompt.data.copy_(folder.load_prompt())
            name = path / "vae.safetensors"
            load_strictly(self.encoder, read_tensors(name, "cpu", torch.float32), name, str)
            mean, std = (torch.tensor(x) for x in (folder.decoder.latents_mean, folder.decoder.latents_std))
            self.set_statistics(mean, std)
            return
        self.load_state_dict(load_file(str(path)), strict=True)
        self.set_statistics(self.latents_mean.flatten(), self.latents_std.flatten())

    def export(self, path: Path) -> None:
        """Write a model folder that `recavsr upscale --model` takes, in float16."""
        vae = {
            "scale_factor_spatial": nano().latent_stride,
            "scale_factor_temporal": 4,
            "z_dim": nano().latent_channels,
            "latents_mean": [round(float(x), 6) for x in self.latents_mean.flatten()],
            "latents_std": [round(float(x), 6) for x in self.latents_std.flatten()],
        }
        save_model_folder(path, self.generator, self.decoder, self.prompt, vae)
        encoder = {k: v.detach().to("cpu", torch.float16) for k, v in self.encoder.state_dict().items()}
        save_file(encoder, str(path / "vae.safetensors"))  # not needed to upscale, but to train on


@dataclass(frozen=True)
class Stage:
    """One stage: how its batches look, what it trains, and its loss."""

    latents: int
    batch: int
    run: RunSettings
    latent_weight: float = 0.1
    difference_weight: float = 0.5
    still_weight: float = 0.0  # of still pixels in the difference term, beyond the others'
    perceptual_weight: float = 0.0
    hard_lr_share: float = 0.4  # autoencoder: samples whose LR is blurred away, so that latents matter
    latent_noise: float = 0.3  # autoencoder: deviation of noise on the latents of half of the samples

    @property
    def frames(self) -> int:
        """Return F."""
        return 4 * self.latents - 3


def autoencoder_stage() -> Stage:
    """Encoder and LR-conditioned decoder on true latents; 9-frame clips."""
    return Stage(latents=3, batch=32, run=RunSettings(seconds=300, learning_rate=6e-4))


def generator_stage() -> Stage:
    """Generator alone: predict the encoder's latents by self-rollout over 6 + 2 + 2 latents."""
    return Stage(latents=10, batch=16, run=RunSettings(seconds=180, learning_rate=5e-4))


def teacher_stage() -> Stage:
    """Generator alone, all blocks at once, given the true latents of the block before (Appendix C.2).

    With truth to look back on, looking back pays at once; self-rollout then has a reason to go on.
    """
    return Stage(latents=14, batch=16, run=RunSettings(seconds=150, learning_rate=5e-4))


def joint_stage() -> Stage:
    """Generator and decoder together by RGB losses through self-rollout over 6 + 4 x 2 latents."""
    return Stage(latents=14, batch=11, run=RunSettings(seconds=420, learning_rate=3e-4), still_weight=4.0)


def polish_stage() -> Stage:
    """The joint stage with a perceptual loss at a low rate."""
    return Stage(
        latents=14,
        batch=11,
        run=RunSettings(seconds=240, learning_rate=1.5e-4),
        still_weight=4.0,
        perceptual_weight=0.06,
    )


def control_stage() -> Stage:
    """The control: the decoder alone on LR frames, its latents zero; same data and protocol."""
    return Stage(latents=3, batch=32, run=RunSettings(seconds=540, learning_rate=6e-4), still_weight=4.0)


def control_polish_stage() -> Stage:
    """The control with the polish stage's perceptual loss."""
    return Stage(
        latents=3,
        batch=32,
        run=RunSettings(seconds=240, learning_rate=1.5e-4),
        still_weight=4.0,
        perceptual_weight=0.06,
    )


def autoencoder_loss(model: NanoTraining, stage: Stage) -> LossFunction:
    """Return the loss of encoder and decoder: pixels, frame differences, latent statistics."""

    def loss(hq: Tensor, lr: Tensor) -> dict[str, Tensor]:
        latents = model.encode(hq)
        given = with_hard_share(lr, stage.hard_lr_share)
        noisy = with_noise(latents, stage.latent_noise)
        _, frames = model.decoder.step(model.decoder.start(), noisy, given)
        pixel, difference = charbonnier(frames, hq), temporal_difference(frames, hq)
        statistics = latent_statistics_penalty(latents)
        return {
            "loss": pixel + stage.difference_weight * difference + 0.01 * statistics,
            "pixel": pixel,
            "difference": difference,
            "statistics": statistics,
            "gain_db": psnr(frames, hq) - psnr(given, hq),
        }

    return loss


def control_loss(model: NanoTraining, stage: Stage, distance: PerceptualDistance | None) -> LossFunction:
    """Return the loss of the decoder alone."""

    def loss(hq: Tensor, lr: Tensor) -> dict[str, Tensor]:
        shape = (hq.shape[0], nano().latent_channels, stage.latents, hq.shape[3] // 16, hq.shape[4] // 16)
        latents = torch.zeros(shape, device=hq.device)
        _, frames = model.decoder.step(model.decoder.start(), latents, lr)
        return _picture_losses(frames, hq, lr, stage, distance)

    return loss


def _picture_losses(
    frames: Tensor, hq: Tensor, lr: Tensor, stage: Stage, distance: PerceptualDistance | None
) -> dict[str, Tensor]:
    """Return pixels, frame differences and (if wanted) a perceptual distance of three frames a clip."""
    pixel, difference = charbonnier(frames, hq), temporal_difference(frames, hq, stage.still_weight)
    total = pixel + stage.difference_weight * difference
    terms = {"pixel": pixel, "difference": difference}
    if distance is not None:
        picks = torch.randint(0, stage.frames, (3,), device=hq.device)
        terms["perceptual"] = perceptual(frames, hq, distance, picks)
        total = total + stage.perceptual_weight * terms["perceptual"]
    return {"loss": total, **terms, "gain_db": psnr(frames, hq) - psnr(lr, hq)}


def generator_loss(model: NanoTraining, stage: Stage) -> LossFunction:
    """Return the squared error of one-step latents against the encoder's."""

    def loss(hq: Tensor, lr: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            target = model.encode(hq)
        condition = model.generator.condition(model.prompt)
        noise = torch.randn_like(target)
        latents = torch.cat(roll_out(model.generator, condition, noise, lr, PLAN), dim=2)
        return {"loss": F.mse_loss(latents, target), "target_power": target.square().mean()}

    return loss


def teacher_loss(model: NanoTraining, stage: Stage) -> LossFunction:
    """Return the squared error of one-step latents, every block recycling the true block before it."""
    visibility = schedule_visibility(model.generator.config.schedule, PLAN, stage.latents)
    time_bias = tuple(bias.to(model.prompt.device) for bias in visibility)

    def loss(hq: Tensor, lr: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            target = model.encode(hq)
        condition = model.generator.condition(model.prompt)
        # Noise of a random strength a clip: what is recycled in inference is never quite true.
        strength = stage.latent_noise * torch.rand(hq.shape[0], 1, 1, 1, 1, device=hq.device)
        recycled = teacher_forced_recycled(target + strength * torch.randn_like(target), PLAN)
        noise = torch.randn_like(target)
        latents = noise - model.generator(condition, noise, lr, recycled, PLAN, time_bias).float()
        first = PLAN.latents(0)
        return {
            "loss": F.mse_loss(latents, target),
            "first_block": F.mse_loss(latents[:, :, :first], target[:, :, :first]),
            "later_blocks": F.mse_loss(latents[:, :, first:], target[:, :, first:]),
            "target_power": target.square().mean(),
        }

    return loss


def joint_loss(model: NanoTraining, stage: Stage, distance: PerceptualDistance | None) -> LossFunction:
    """Return pixels, frame differences, latents and (if wanted) a perceptual distance of a rollout."""

    def loss(hq: Tensor, lr: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            target = model.encode(hq)
        condition = model.generator.condition(model.prompt)
        blocks = roll_out(model.generator, condition, torch.randn_like(target), lr, PLAN)
        latent = F.mse_loss(torch.cat(blocks, dim=2), target)
        losses = _picture_losses(decode_blocks(model.decoder, blocks, lr, PLAN), hq, lr, stage, distance)
        return {**losses, "loss": losses["loss"] + stage.latent_weight * latent, "latent": latent}

    return loss


def _in_bfloat16(loss: LossFunction, device: torch.device) -> LossFunction:
    if device.type != "cuda":
        return loss

    def wrapped(hq: Tensor, lr: Tensor) -> dict[str, Tensor]:
        # The cache of cast weights would outlive a captured graph.
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            return dict(loss(hq, lr.to(torch.bfloat16)))

    return wrapped


def compile_parts(model: NanoTraining) -> None:
    """Compile the layers (not the rollout): the same few shapes serve every block."""
    for block in model.generator.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
    for layer in [*model.decoder.backbone, *model.decoder.refinement]:
        layer.step = torch.compile(layer.step, fullgraph=True, dynamic=False)
    for part in (model.decoder.head, model.encoder):
        part.forward = torch.compile(part.forward, fullgraph=True, dynamic=False)  # type: ignore[method-assign]


@torch.no_grad()
def measure_statistics(model: NanoTraining, batches: Iterator[tuple[Tensor, Tensor]], count: int) -> None:
    """Measure mean and deviation of the encoder's latents over some batches, and set them."""
    channels = torch.ones(nano().latent_channels, device=model.prompt.device)
    model.set_statistics(0 * channels, channels)
    latents = [model.encode(next(batches)[0]).transpose(0, 1).flatten(1) for _ in range(count)]
    values = torch.cat(latents, dim=1)
    model.set_statistics(values.mean(1), values.std(1))


STAGES: dict[str, Callable[[], Stage]] = {
    "autoencoder": autoencoder_stage,
    "generator": generator_stage,
    "teacher": teacher_stage,
    "joint": joint_stage,
    "polish": polish_stage,
    "control": control_stage,
    "control_polish": control_polish_stage,
}


def run_stage(
    name: str,
    pool: TrainingPool,
    out: Path,
    *,
    stage: Stage,
    device: torch.device,
    start_from: Path | None,
    lpips_weights: Path | None = None,
    compiled: bool = False,
    seed: int = 0,
) -> NanoTraining:
    """Train one stage and write `out/NAME.safetensors`, its log and its settings."""
    torch.manual_seed(seed)
    model = NanoTraining()
    if start_from is not None:
        model.load(start_from)
    model.to(device)
    if compiled:
        compile_parts(model)
    distance = None
    if stage.perceptual_weight:
        from recavsr.evaluation.lpips import LPIPS

        distance = LPIPS(net="vgg", weights=lpips_weights).to(device)
    loss = {
        "autoencoder": lambda: autoencoder_loss(model, stage),
        "control": lambda: control_loss(model, stage, distance),
        "control_polish": lambda: control_loss(model, stage, distance),
        "generator": lambda: generator_loss(model, stage),
        "teacher": lambda: teacher_loss(model, stage),
        "joint": lambda: joint_loss(model, stage, distance),
        "polish": lambda: joint_loss(model, stage, distance),
    }[name]()
    parts: dict[str, list[nn.Module]] = {
        "autoencoder": [model.encoder, model.decoder],
        "control": [model.decoder],
        "control_polish": [model.decoder],
        "generator": [model.generator],
        "teacher": [model.generator],
    }
    trained = parts.get(name, [model.generator, model.decoder])
    model.requires_grad_(False)
    for part in trained:
        part.requires_grad_(True)
    parameters = [p for part in trained for p in part.parameters()]
    if model.generator in trained:
        model.prompt.requires_grad_(True)
        parameters.append(model.prompt)

    def next_batch() -> tuple[Tensor, Tensor]:
        return pool.batch(stage.batch, stage.frames)

    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps({"seed": seed, **asdict(stage)}, indent=1) + "\n")
    steps = train(
        _in_bfloat16(loss, device),
        parameters,
        next_batch,
        stage.run,
        out / f"{name}.csv",
        checkpoint=lambda: model.save(out / f"{name}.safetensors"),
    )
    if name == "autoencoder":
        measure_statistics(model, iter(next_batch, None), 8)
    model.save(out / f"{name}.safetensors")
    if name not in ("autoencoder", "generator", "teacher"):
        model.export(out / f"{name}_model")
    print(f"{name}: {steps} steps, weights in {out / f'{name}.safetensors'}", flush=True)
    return model


def main(arguments: list[str] | None = None) -> None:
    """Run stages from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=list(STAGES), help="stages, in the order to run them")
    parser.add_argument("--pack", type=Path, required=True, help="packed training data")
    parser.add_argument("--out", type=Path, required=True, help="folder of the run")
    parser.add_argument("--seconds", type=float, nargs="*", help="time of each stage")
    parser.add_argument("--batch", type=int, help="clips a step")
    parser.add_argument("--steps", type=int, help="most steps a stage")
    parser.add_argument("--start", type=Path, help="weights to start the first stage from")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--fill", type=int, default=512, help="records to wait for before training")
    parser.add_argument("--lpips", type=Path, help="LPIPS weights (file or folder)")
    parser.add_argument("--compile", nargs="*", choices=list(STAGES), default=[], help="stages to compile")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    start = options.start
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(
            TrainingPool(
                options.pack,
                device,
                workers=options.workers,
                settings=PairSettings(frames=53),
                seed=options.seed,
            )
        )
        pool.fill(options.fill)
        print(f"pool: {pool.count} records", flush=True)
        for index, name in enumerate(options.stages):
            stage = STAGES[name]()
            run = stage.run
            if options.seconds:
                run = replace(run, seconds=options.seconds[index])
            if options.steps:
                run = replace(run, steps=options.steps)
            stage = replace(stage, run=run, batch=options.batch or stage.batch)
            run_stage(
                name,
                pool,
                options.out,
                stage=stage,
                device=device,
                start_from=start,
                lpips_weights=options.lpips,
                compiled=name in options.compile,
                seed=options.seed,
            )
            start = options.out / f"{name}.safetensors"
            print(f"pool: {pool.made} records made", flush=True)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"error: {error}")
