"""Stage 2: one-step adversarial training by self-rollout (paper, Sec. 3.2, Appendix B.3).

A clip is generated block by block under the exported schedule; the MSQ discriminator compares it with
the HQ latents, and latents and decoded frames are compared with the truth.

Shapes: B batch, T latents, F = 4 T - 3 frames.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recavsr.errors import InputError
from recavsr.geometry import PLAN, BlockPlan
from recavsr.models.generator import Generator
from recavsr.training.adversarial import (
    GradientBalance,
    SharedNoise,
    discriminator_loss,
    feature_r1,
    generator_loss,
)
from recavsr.training.decoder_stage import with_hard_share
from recavsr.training.discriminator import MSQDiscriminator, Supports, frozen
from recavsr.training.losses import FrameLosses, PerceptualDistance
from recavsr.training.objective import Batch, BatchSettings, Losses, OptimizerSettings, Player
from recavsr.training.rollout import Decode, Encode, fitted_plan, roll_out, split_blocks


@dataclass(frozen=True)
class Stage2Settings:
    """Weights and sizes of Stage 2; the defaults are the paper's, but for what is marked."""

    batches: BatchSettings = BatchSettings(clips=16, frames=85, images=64, image_fraction=0.2)  # noqa: RUF009
    generator: OptimizerSettings = OptimizerSettings(  # noqa: RUF009
        learning_rate=1e-5,
        betas=(0.5, 0.99),
        clip_norm=2.0,  # not from the paper
        warm_up_steps=0,
        average_decay=0.999,
        first_step=20,
    )
    discriminator: OptimizerSettings = OptimizerSettings(  # noqa: RUF009
        learning_rate=1e-5,
        betas=(0.0, 0.99),
        clip_norm=5.0,  # not from the paper
        warm_up_steps=20,
        average_decay=None,
    )
    plan: BlockPlan = PLAN
    latent_weight: float = 1.0
    adversarial_weight: float = 0.1
    frames: FrameLosses = FrameLosses("mse", perceptual_weight=2.0)  # noqa: RUF009
    r1_weight: float = 1000.0
    adversarial_cap: float | None = None
    """Most that the adversarial gradient may have of the reconstruction's (not in the paper)."""
    train_decoder: bool = False
    """Train the decoder along with the generator (the paper's is frozen)."""
    hard_lr_share: float = 0.0
    """Clips whose LR is blurred away before a trained decoder, so that latents matter (not in the paper)."""
    checkpoint: bool = False
    """Recompute blocks and perceptual features in the backward pass: less memory, more time."""

    def __post_init__(self) -> None:
        frames, plan = self.batches.frames, self.plan
        count = plan.block_count(frames)
        if plan.first_frame(count) != frames:
            raise InputError(
                f"clips of {frames} frames do not end at a block's end: "
                f"take {plan.first_frame(count)}, or another block plan"
            )


def nano_stage2() -> Stage2Settings:
    """Return nano's Stage 2: small weights for the new losses, a trained decoder, a cap on the GAN.

    Starting values after the probes that pixel-space GANs ran away in; not tuned yet.
    """
    rate = 1e-4
    return Stage2Settings(
        batches=BatchSettings(clips=16, frames=37),
        generator=OptimizerSettings(rate, betas=(0.5, 0.99), warm_up_steps=100, cool_down=0.3, first_step=20),
        discriminator=OptimizerSettings(rate, betas=(0.0, 0.99), warm_up_steps=20, average_decay=None),
        latent_weight=0.1,
        adversarial_weight=0.01,
        frames=FrameLosses("charbonnier", 0.04, difference_weight=0.5, perceptual_frames=3),
        adversarial_cap=0.3,
        train_decoder=True,
    )


class Stage2Model(nn.Module):
    """Everything that a checkpoint of Stage 2 holds.

    `requires_grad` says what is trained of the generator (all of it, or LoRA and projections), and
    whether the prompt [1, L, text] is. A decoder needs to be given only where it is trained along.
    """

    def __init__(
        self,
        generator: Generator,
        prompt: Tensor,
        discriminator: MSQDiscriminator,
        decoder: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.generator, self.discriminator, self.decoder = generator, discriminator, decoder
        self.prompt = prompt if isinstance(prompt, nn.Parameter) else nn.Parameter(prompt, False)
        self.balance = GradientBalance().to(prompt.device)


class Stage2Objective:
    """Two players in turn: the discriminator, then the generator against the updated discriminator.

    Both share one rollout, one noise and one choice of supports; with a frozen backbone also the
    features, so that a step costs one pass over the real clip and one over the generated one.
    """

    name = "stage2"

    def __init__(
        self,
        model: Stage2Model,
        encode: Encode,
        decode: Decode,
        distance: PerceptualDistance | None,
        settings: Stage2Settings,
        *,
        compiled: bool = False,
    ) -> None:
        """Set up the players; `distance` (LPIPS) may be None where its weight is 0.

        `compiled`: the losses are.
        `decode` may be the frozen VAE decoder or `partial(decode_blocks, decoder)`. A decoder in the
        model is frozen here unless `settings.train_decoder`. Raises InputError where something is missing.
        """
        settings.frames.check(distance)
        if settings.train_decoder and model.decoder is None:
            raise InputError("Stage 2 is to train the decoder along, but is given none")
        if settings.hard_lr_share and not settings.train_decoder:
            raise InputError("hard_lr_share is for a decoder that is trained along: set train_decoder, or 0")
        self.model, self.settings, self.batches = model, settings, settings.batches
        self.encode, self.decode, self.distance, self.compiled = encode, decode, distance, compiled
        generator = trained_parameters(model.generator, model.prompt)
        if model.decoder is not None:
            model.decoder.requires_grad_(settings.train_decoder)
            generator += trained_parameters(model.decoder)
        self.players = (
            Player("discriminator", trained_parameters(model.discriminator), settings.discriminator),
            Player("generator", generator, settings.generator),
        )

    def advance(self, progress: float) -> None:
        """Nothing changes over the stage."""

    def updates(self, batch: Batch) -> Iterator[tuple[str, Losses]]:
        """Roll out once; yield the discriminator's losses, then the generator's (Eq. 5)."""
        model, settings = self.model, self.settings
        discriminator = model.discriminator
        with torch.no_grad():
            real = self.encode(batch.hq).float()
        plan = fitted_plan(settings.plan, real.shape[2])
        condition = model.generator.condition(model.prompt)
        noise = torch.randn_like(real)
        blocks = roll_out(model.generator, condition, noise, batch.lr, plan, checkpoint=settings.checkpoint)
        fake = torch.cat(blocks, dim=2)
        judged, rebuilt = model.balance.split(fake, settings.adversarial_cap)

        shared, supports = SharedNoise.draw(real), discriminator.draw_supports(real)

        def features(latents: Tensor) -> tuple[Tensor, ...]:
            return discriminator.backbone(shared.add_to(latents), shared.timestep)

        if discriminator.config.train_backbone:
            seen = features(real), features(fake.detach())
            yield "discriminator", self._discriminator_losses(*seen, supports)
            with frozen(discriminator):
                of_real, of_fake = features(real), features(judged)
        else:
            of_real, of_fake = features(real), features(judged)
            yield (
                "discriminator",
                self._discriminator_losses(of_real, [x.detach() for x in of_fake], supports),
            )
        with frozen(discriminator):
            real_logit, fake_logit = (
                discriminator.scope_logits(x, supports).mean(1) for x in (of_real, of_fake)
            )
        adversarial = generator_loss(real_logit, fake_logit)
        reconstruction, terms = self._reconstruction(batch, real, rebuilt, plan)
        yield (
            "generator",
            {
                "loss": reconstruction + settings.adversarial_weight * adversarial,
                "adversarial": adversarial,
                "adversarial_share": model.balance.share(),
                **terms,
            },
        )
        model.balance.agree()

    def sample(self, batch: Batch) -> Tensor:
        """Return the frames [B, 3, F, s H, s W] of a rollout, for pictures; of clips and of images."""
        model = self.model
        noise = torch.randn_like(self.encode(batch.hq))
        plan = fitted_plan(self.settings.plan, noise.shape[2])
        blocks = roll_out(model.generator, model.generator.condition(model.prompt), noise, batch.lr, plan)
        return self.decode(blocks, batch.lr, plan)

    def _discriminator_losses(
        self, of_real: Sequence[Tensor], of_fake: Sequence[Tensor], supports: Supports
    ) -> Losses:
        """Return RSGAN and feature R1 from the features of both clips, and the margin of each scope."""
        discriminator, weight = self.model.discriminator, self.settings.r1_weight
        real, fake = (discriminator.scope_logits(x, supports) for x in (of_real, of_fake))
        adversarial = discriminator_loss(real.mean(1), fake.mean(1))
        r1 = feature_r1(lambda x: discriminator.scope_logits(x, supports).mean(1), of_real)
        margins = (real - fake).mean(0)
        return {
            "loss": adversarial + weight * r1,
            "adversarial": adversarial,
            "r1": r1,
            **{f"margin_{scope}": m for scope, m in zip(discriminator.config.scopes, margins)},
        }

    def _reconstruction(
        self, batch: Batch, real: Tensor, fake: Tensor, plan: BlockPlan
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted sum of all losses against the truth, and each of them."""
        total, terms = self.compare_frames(batch, fake, plan)
        latent = F.mse_loss(fake, real)
        return total + self.settings.latent_weight * latent, {"latent": latent, **terms}

    def compare_frames(
        self, batch: Batch, latents: Tensor, plan: BlockPlan
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted sum of the losses of decoded frames, and each of them.

        This decodes a whole clip at once; see `vae_losses` for a decoder too large for that.
        """
        settings = self.settings
        lr, _ = with_hard_share(batch.lr, settings.hard_lr_share)
        frames = self.decode(split_blocks(latents, plan), lr, plan)
        return settings.frames(
            frames,
            batch.hq,
            batch.lr,
            self.distance,
            checkpoint=settings.checkpoint,
            compiled=self.compiled,
        )


def trained_parameters(*parts: nn.Module | nn.Parameter) -> tuple[nn.Parameter, ...]:
    """Return the parameters that require gradients, in order."""
    found = [p for part in parts for p in ([part] if isinstance(part, nn.Parameter) else part.parameters())]
    return tuple(p for p in found if p.requires_grad)
