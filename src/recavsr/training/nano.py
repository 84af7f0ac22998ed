"""nano's networks and the stages of its short form: autoencoder, generator, teacher, joint, polish.

Shapes: B batch, T latents, F = 4 T - 3 frames, S crop side.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from recavsr.cache_policy import Schedule
from recavsr.errors import InputError
from recavsr.geometry import PLAN, BlockPlan
from recavsr.models.autoencoder import Encoder
from recavsr.models.decoder import DecoderConfig, FlashDecoder
from recavsr.models.generator import Generator, GeneratorConfig, teacher_forced_recycled
from recavsr.models.presets import NANO_PROMPT_TOKENS, nano, nano_decoder, nano_encoder
from recavsr.models.weights import ModelFolder, load_strictly, read_tensors, save_model_folder
from recavsr.training.decoder_stage import with_hard_share, with_noise
from recavsr.training.losses import (
    FrameLosses,
    PerceptualDistance,
    PixelLoss,
    charbonnier,
    latent_statistics_penalty,
    psnr,
    temporal_difference,
)
from recavsr.training.objective import Batch, BatchSettings, Losses, OptimizerSettings, Player
from recavsr.training.rollout import decode_blocks, roll_out

LossFunction = Callable[[Tensor, Tensor], Losses]
"""Of (HQ frames, LR frames), both [B, 3, F, H, W] in [-1, 1]."""


class NanoTraining(nn.Module):
    """Everything that is trained: encoder, decoder, generator and its prompt."""

    latents_mean: Tensor
    latents_std: Tensor

    def __init__(
        self, generator: GeneratorConfig | None = None, decoder: DecoderConfig | None = None
    ) -> None:
        """Make fresh weights, by default under the presets' configs (nano's sizes throughout)."""
        super().__init__()
        sizes = nano() if generator is None else generator
        self.encoder = Encoder(nano_encoder(sizes))
        self.decoder = FlashDecoder(nano_decoder() if decoder is None else decoder)
        self.generator = Generator(sizes)
        self.prompt = nn.Parameter(torch.randn(1, NANO_PROMPT_TOKENS, sizes.text_width))
        # Statistics of the encoder's latents, measured once after its training.
        self.register_buffer("latents_mean", torch.zeros(1, sizes.latent_channels, 1, 1, 1))
        self.register_buffer("latents_std", torch.ones(1, sizes.latent_channels, 1, 1, 1))

    @classmethod
    def starting_from(cls, path: Path | None) -> NanoTraining:
        """Read what `save` or `export` wrote, under the configs of then; None: fresh weights."""
        if path is None:
            return cls()
        model = cls(*_saved_configs(path))
        model.load(path)
        return model

    @classmethod
    def on_autoencoder_of(
        cls, path: Path, generator: GeneratorConfig | None = None, decoder: DecoderConfig | None = None
    ) -> NanoTraining:
        """Read what `save` or `export` wrote, but with a fresh network for each config given."""
        saved = cls.starting_from(path)
        model = cls(generator or saved.generator.config, decoder or saved.decoder.config)
        model.encoder = saved.encoder
        if decoder is None:
            model.decoder = saved.decoder
        if generator is None:
            model.generator, model.prompt = saved.generator, saved.prompt
        model.set_statistics(saved.latents_mean.flatten(), saved.latents_std.flatten())
        return model

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
        """Write all weights, in float32, with the configs of generator and decoder beside them."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        tensors = {k: v.detach().cpu().contiguous() for k, v in self.state_dict().items()}
        configs = {
            "schedule": schedule_text(self.generator),
            "latent_stride": json.dumps(self.generator.config.latent_stride),
            "generator": json.dumps(self.generator.config.to_released()),
            "decoder": json.dumps(self.decoder.config.to_released()),
        }
        save_file(tensors, str(partial), metadata=configs)
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Read weights that `save` wrote, or a model folder that `export` wrote, to train on.

        Raises InputError where they do not fit, or were trained under another schedule.
        """
        if path.is_dir():
            self._load_folder(ModelFolder.open(path))
            return
        with _readable(path):
            with safe_open(str(path), framework="pt") as file:
                saved = (file.metadata() or {}).get("schedule")
            self._check_schedule(saved, path)
            self.load_state_dict(load_file(str(path)), strict=True)
        self.set_statistics(self.latents_mean.flatten(), self.latents_std.flatten())

    def _load_folder(self, folder: ModelFolder) -> None:
        generator = folder.load_generator()
        self._check_schedule(schedule_text(generator), folder.path)
        self.generator.load_state_dict(generator.state_dict())
        self.decoder.load_state_dict(folder.load_decoder().state_dict())
        self.prompt.data.copy_(folder.load_prompt())
        name = folder.path / "vae.safetensors"
        load_strictly(self.encoder, read_tensors(name, "cpu", torch.float32), name, str)
        mean, std = (torch.tensor(x) for x in (folder.decoder.latents_mean, folder.decoder.latents_std))
        self.set_statistics(mean, std)

    def _check_schedule(self, saved: str | None, path: Path) -> None:
        wanted = schedule_text(self.generator)
        if saved not in (None, wanted):
            raise InputError(f"{path} was trained under the schedule {saved}; this stage has {wanted}")

    def export(self, path: Path) -> None:
        """Write a model folder that `recavsr upscale --model` takes, in float16."""
        vae = {
            "scale_factor_spatial": self.generator.config.latent_stride,
            "scale_factor_temporal": 4,
            "z_dim": self.generator.config.latent_channels,
            "latents_mean": [round(float(x), 6) for x in self.latents_mean.flatten()],
            "latents_std": [round(float(x), 6) for x in self.latents_std.flatten()],
        }
        save_model_folder(path, self.generator, self.decoder, self.prompt, vae)
        encoder = {k: v.detach().to("cpu", torch.float16) for k, v in self.encoder.state_dict().items()}
        save_file(encoder, str(path / "vae.safetensors"))  # not needed to upscale, but to train on


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Turn what goes wrong while `path` is read into one line."""
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{path} can not be read as weights to start from: {reason}") from error


def _saved_configs(path: Path) -> tuple[GeneratorConfig, DecoderConfig]:
    """Return the configs of a weights file or a model folder; the presets' where it does not say."""
    if path.is_dir():
        folder = ModelFolder.open(path)
        return folder.generator, folder.decoder
    with _readable(path), safe_open(str(path), framework="pt") as file:
        found = {name: json.loads(text) for name, text in (file.metadata() or {}).items()}
    generator, decoder = nano(), nano_decoder()
    if "schedule" in found:  # files of earlier versions say no more
        generator = replace(generator, schedule=Schedule.from_config(found["schedule"]))
    if "generator" in found:
        stride = found.get("latent_stride", generator.latent_stride)
        generator = replace(GeneratorConfig.from_released(found["generator"]), latent_stride=stride)
    if "decoder" in found:
        channels = generator.latent_channels
        latents = {
            "latents_mean": (0.0,) * channels,  # the true ones are read later, into buffers
            "latents_std": (1.0,) * channels,
            "scale_factor_spatial": generator.latent_stride,
        }
        decoder = DecoderConfig.from_released(found["decoder"], latents)
    return generator, decoder


def schedule_text(generator: Generator) -> str:
    """Return a generator's schedule as one line, to compare."""
    return json.dumps(generator.config.schedule.to_config())


@dataclass(frozen=True)
class Stage:
    """One stage: how its batches look, what it trains, how fast, and its loss."""

    latents: int
    batch: int
    optimizer: OptimizerSettings
    latent_weight: float = 0.1
    pixel: PixelLoss = "charbonnier"
    pixel_weight: float = 1.0
    difference_weight: float = 0.5
    still_weight: float = 0.0  # of still pixels in the difference term, beyond the others'
    still_softness: float = 1e-3  # below this their part is quadratic
    border_weight: float = 0.0  # of differences across latent borders, beyond the others'
    structure_weight: float = 0.0  # of 1 - SSIM
    perceptual_weight: float = 0.0
    perceptual_frames: int = 3  # of each clip, drawn anew every step
    hard_lr_share: float = 0.0  # samples whose LR is blurred away before the decoder, so that latents matter
    latent_noise: float = 0.3  # autoencoder: deviation of noise on the latents of half of the samples
    no_latent_share: float = 0.0  # autoencoder: of the samples with good LR, those decoded without latents
    plan: BlockPlan = PLAN  # of rollouts: a short first block leaves fewer latents without history
    later_weight: float = 0.0  # joint: of a second loss, that of the blocks after the first alone
    through_history: bool = False  # joint: gradients flow from a block into those before it
    train_decoder: bool = True  # joint

    def __post_init__(self) -> None:
        if min(self.latents, self.batch) < 1:
            raise InputError(f"a batch holds clips of latents, not {self.batch} clips of {self.latents}")

    @property
    def frames(self) -> int:
        """Return F."""
        return 4 * self.latents - 3

    @property
    def frame_losses(self) -> FrameLosses:
        """Return the losses of decoded frames."""
        return FrameLosses(
            self.pixel,
            self.perceptual_weight,
            self.pixel_weight,
            difference_weight=self.difference_weight,
            still_weight=self.still_weight,
            border_weight=self.border_weight,
            still_softness=self.still_softness,
            structure_weight=self.structure_weight,
            perceptual_frames=self.perceptual_frames,
        )


def _rate(learning_rate: float) -> OptimizerSettings:
    return OptimizerSettings(learning_rate, cool_down=0.4)


def _steady(stage: Stage) -> Stage:
    """Return the stage with weights against flicker of still pixels and a pulse at latent borders.

    Both blur a little; the weight of structure is there to hold against it.
    """
    return replace(stage, still_weight=10.0, still_softness=0.02, border_weight=2.0, structure_weight=0.8)


def autoencoder_stage() -> Stage:
    """Encoder and LR-conditioned decoder on true latents; 9-frame clips."""
    return Stage(latents=3, batch=32, optimizer=_rate(6e-4), hard_lr_share=0.4, no_latent_share=0.4)


def generator_stage() -> Stage:
    """Generator alone: predict the encoder's latents by self-rollout over 6 + 2 + 2 latents."""
    return Stage(latents=10, batch=16, optimizer=_rate(5e-4))


def teacher_stage() -> Stage:
    """Generator alone, all blocks at once, given the true latents of the block before (Appendix B.2).

    With truth to look back on, looking back pays at once; self-rollout then has a reason to go on.
    """
    return Stage(latents=14, batch=16, optimizer=_rate(5e-4))


def joint_stage() -> Stage:
    """Generator and decoder together by RGB losses through self-rollout over 6 + 4 x 2 latents."""
    return _steady(Stage(latents=14, batch=11, optimizer=_rate(3e-4), hard_lr_share=0.6))


def _polished(stage: Stage) -> Stage:
    """Return the stage with the losses it ends by: PSNR itself, structure, and a little of LPIPS.

    1 dB weighs as much as .0045 of SSIM and .50 of LPIPS. More weight of LPIPS costs SSIM and PSNR in heavy
    degradation (docs/training-log.md, v0.11). Border weights of 3 and more make latent borders quieter than
    the rest, none makes them louder (v0.15).
    """
    return replace(
        stage,
        pixel="log_rms",
        pixel_weight=0.07,
        perceptual_weight=0.016,
        structure_weight=1.8,
        border_weight=1.5,
    )


def polish_stage() -> Stage:
    """The joint stage with PSNR and a perceptual loss, over 6 + 2 latents: more clips, more steps."""
    stage = replace(joint_stage(), latents=8, batch=16, hard_lr_share=0.1, perceptual_frames=2)
    return _polished(stage)


def control_stage() -> Stage:
    """The control: the decoder alone on LR frames, its latents zero; same data and protocol."""
    return _steady(Stage(latents=3, batch=32, optimizer=_rate(6e-4)))


def control_polish_stage() -> Stage:
    """The control with the polish stage's rate and losses, of as many pictures a step."""
    return _polished(replace(control_stage(), optimizer=_rate(3e-4), perceptual_frames=1))


def autoencoder_loss(model: NanoTraining, stage: Stage) -> LossFunction:
    """Return the loss of encoder and decoder: pixels, frame differences, latent statistics."""

    def loss(hq: Tensor, lr: Tensor) -> dict[str, Tensor]:
        latents = model.encode(hq)
        given, hard = with_hard_share(lr, stage.hard_lr_share)
        noisy = with_noise(latents, stage.latent_noise)
        dropped = ~hard & (torch.rand_like(hard, dtype=torch.float32) < stage.no_latent_share)
        _, frames = model.decoder.step(model.decoder.start(), torch.where(dropped, 0, noisy), given)
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


def control_loss(
    model: NanoTraining, stage: Stage, distance: PerceptualDistance | None, *, compiled: bool = False
) -> LossFunction:
    """Return the loss of the decoder alone."""

    def loss(hq: Tensor, lr: Tensor) -> dict[str, Tensor]:
        config = model.decoder.config
        height, width = (side // config.latent_stride for side in hq.shape[3:])
        shape = (hq.shape[0], config.latent_channels, stage.latents, height, width)
        latents = torch.zeros(shape, device=hq.device)
        _, frames = model.decoder.step(model.decoder.start(), latents, lr)
        total, terms = stage.frame_losses(frames, hq, lr, distance, compiled=compiled)
        return {"loss": total, **terms}

    return loss


def generator_loss(model: NanoTraining, stage: Stage) -> LossFunction:
    """Return the squared error of one-step latents against the encoder's."""

    def loss(hq: Tensor, lr: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            target = model.encode(hq)
        condition = model.generator.condition(model.prompt)
        noise = torch.randn_like(target)
        latents = torch.cat(roll_out(model.generator, condition, noise, lr, stage.plan), dim=2)
        return {"loss": F.mse_loss(latents, target), "target_power": target.square().mean()}

    return loss


def teacher_loss(model: NanoTraining, stage: Stage) -> LossFunction:
    """Return the squared error of one-step latents, every block recycling the true block before it."""

    def loss(hq: Tensor, lr: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            target = model.encode(hq)
        condition = model.generator.condition(model.prompt)
        # Noise of a random strength a clip: what is recycled in inference is never quite true.
        strength = stage.latent_noise * torch.rand(hq.shape[0], 1, 1, 1, 1, device=hq.device)
        recycled = teacher_forced_recycled(target + strength * torch.randn_like(target), stage.plan)
        noise = torch.randn_like(target)
        latents = noise - model.generator(condition, noise, lr, recycled, stage.plan).float()
        first = stage.plan.latents(0)
        return {
            "loss": F.mse_loss(latents, target),
            "first_block": F.mse_loss(latents[:, :, :first], target[:, :, :first]),
            "later_blocks": F.mse_loss(latents[:, :, first:], target[:, :, first:]),
            "target_power": target.square().mean(),
        }

    return loss


def joint_loss(
    model: NanoTraining, stage: Stage, distance: PerceptualDistance | None, *, compiled: bool = False
) -> LossFunction:
    """Return pixels, frame differences, latents and (if wanted) a perceptual distance of a rollout."""
    plan, through = stage.plan, stage.through_history

    def loss(hq: Tensor, lr: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            target = model.encode(hq)
        condition = model.generator.condition(model.prompt)
        noise = torch.randn_like(target)
        blocks = roll_out(model.generator, condition, noise, lr, plan, through_history=through)
        # What the decoder does not see in its LR frames, the generator has to tell it.
        given, _ = with_hard_share(lr, stage.hard_lr_share)
        frames = decode_blocks(model.decoder, blocks, given, plan, through_history=through)
        latents = torch.cat(blocks, dim=2)

        def from_block(index: int, losses: FrameLosses) -> dict[str, Tensor]:
            """Return the losses of block `index` and those after it."""
            first, frame = plan.first_latent(index), plan.first_frame(index)
            latent = F.mse_loss(latents[:, :, first:], target[:, :, first:])
            made, true, given = (x[:, :, frame:] for x in (frames, hq, lr))
            total, terms = losses(made, true, given, distance, first_frame=frame, compiled=compiled)
            return {"loss": total + stage.latent_weight * latent, "latent": latent, **terms}

        losses = from_block(0, stage.frame_losses)
        if not stage.later_weight:
            return losses
        later = from_block(1, replace(stage.frame_losses, perceptual_weight=0.0))["loss"]
        return losses | {"loss": losses["loss"] + stage.later_weight * later, "later_blocks": later}

    return loss


def compile_parts(model: NanoTraining) -> None:
    """Compile the layers (not the rollout): the same few shapes serve every block."""
    # Layers share their code, and each layer, shape and kind of pass (training, a sample) is a variant of
    # it: more of them than the 8 after which Dynamo gives up.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
    for block in model.generator.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
    for layer in [*model.decoder.backbone, *model.decoder.refinement]:
        layer.step = torch.compile(layer.step, fullgraph=True, dynamic=False)
    for part in (model.decoder.head, model.encoder):
        part.forward = torch.compile(part.forward, fullgraph=True, dynamic=False)  # type: ignore[method-assign]


@torch.no_grad()
def measure_statistics(model: NanoTraining, batches: Iterator[tuple[Tensor, Tensor]], count: int) -> None:
    """Measure mean and deviation of the encoder's latents over some batches, and set them."""
    channels = torch.ones(model.generator.config.latent_channels, device=model.prompt.device)
    model.set_statistics(0 * channels, channels)
    latents = [model.encode(next(batches)[0]).transpose(0, 1).flatten(1) for _ in range(count)]
    values = torch.cat(latents, dim=1)
    model.set_statistics(values.mean(1), values.std(1))


class NanoObjective:
    """A stage of the short form as the loop sees it: one player, one update a step."""

    def __init__(
        self,
        name: str,
        model: NanoTraining,
        stage: Stage,
        distance: PerceptualDistance | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        """Set up the stage; `compiled`: its losses are compiled."""
        both: list[nn.Module] = [model.generator, *([model.decoder] if stage.train_decoder else [])]
        control = partial(control_loss, model, stage, distance, compiled=compiled)
        joint = partial(joint_loss, model, stage, distance, compiled=compiled)
        stages: dict[str, tuple[list[nn.Module], Callable[[], LossFunction]]] = {
            "autoencoder": ([model.encoder, model.decoder], lambda: autoencoder_loss(model, stage)),
            "control": ([model.decoder], control),
            "control_polish": ([model.decoder], control),
            "generator": ([model.generator], lambda: generator_loss(model, stage)),
            "teacher": ([model.generator], lambda: teacher_loss(model, stage)),
            "joint": (both, joint),
            "polish": (both, joint),
        }
        trained, loss_function = stages[name]
        self._loss = loss_function()
        self.name, self.stage, self._nano = name, stage, model
        self.model = model
        self.batches = BatchSettings(clips=stage.batch, frames=stage.frames)
        model.requires_grad_(False)
        for part in trained:
            part.requires_grad_(True)
        parameters = [p for part in trained for p in part.parameters()]
        if model.generator in trained:
            model.prompt.requires_grad_(True)
            parameters.append(model.prompt)
        self.players = (Player("nano", tuple(parameters), stage.optimizer),)

    def advance(self, progress: float) -> None:
        """Nothing changes over a stage."""

    def updates(self, batch: Batch) -> Iterator[tuple[str, Losses]]:
        """Yield the stage's one update."""
        hq, lr = batch
        kind = lr.device.type
        if torch.is_autocast_enabled(kind):
            lr = lr.to(torch.get_autocast_dtype(kind))
        yield "nano", self._loss(hq, lr)

    def sample(self, batch: Batch) -> Tensor:
        """Return frames as the stage makes them: from true latents, from none, or by a rollout."""
        hq, lr = batch
        model, decoder = self._nano, self._nano.decoder
        if self.name == "autoencoder":
            return decoder.step(decoder.start(), model.encode(hq), lr)[1]
        if self.name.startswith("control"):
            return decoder.step(decoder.start(), torch.zeros_like(model.encode(hq)), lr)[1]
        noise = torch.randn_like(model.encode(hq))
        plan = self.stage.plan
        blocks = roll_out(model.generator, model.generator.condition(model.prompt), noise, lr, plan)
        return decode_blocks(decoder, blocks, lr, plan)


STAGES: dict[str, Callable[[], Stage]] = {
    "autoencoder": autoencoder_stage,
    "generator": generator_stage,
    "teacher": teacher_stage,
    "joint": joint_stage,
    "polish": polish_stage,
    "control": control_stage,
    "control_polish": control_polish_stage,
}
