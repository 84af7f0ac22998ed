"""The paper's stages at nano's size: adaptation, route learning, adversarial self-rollout.

Each wraps a stage of `training.stage1` or `training.stage2` around nano's networks, which it hands on
whole: the routing stage leaves them under the schedule that it learned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from recavsr.geometry import BlockPlan
from recavsr.training.decoder_stage import DecoderObjective, DecoderSettings
from recavsr.training.discriminator import NANO_MSQ, MSQConfig, MSQDiscriminator
from recavsr.training.losses import FrameLosses, PerceptualDistance
from recavsr.training.nano import PLAN, NanoTraining, polish_stage
from recavsr.training.objective import BatchSettings, OptimizerSettings
from recavsr.training.rollout import decode_blocks
from recavsr.training.stage1 import (
    FixedScope,
    RouteLearning,
    Stage1Model,
    Stage1Objective,
    Stage1Settings,
)
from recavsr.training.stage2 import Stage2Model, Stage2Objective, Stage2Settings, nano_stage2

ROUTE = RouteLearning(budget_weight=4.0, entropy_rise=(0.5, 1.0))
"""nano's route learning: the paper's target; the entropy waits until the loss has spoken.

One latent more or less in six layers is 8 % of the budget: at the paper's weight of .5 it costs .014, less
than a layer's history is worth to the loss here, and the route ended over budget.
"""


@dataclass(frozen=True)
class Stage1Sizes:
    """What differs from run to run of nano's Stage 1."""

    batches: BatchSettings = BatchSettings(clips=16, frames=53, images=64, image_fraction=0.1)  # noqa: RUF009
    optimizer: OptimizerSettings = OptimizerSettings(5e-4, cool_down=0.4)  # noqa: RUF009
    route: RouteLearning = ROUTE
    one_step_share: float = 0.5
    """Clips at time 1, where nano is used: with minutes of training the rest must not take all of them."""
    plan: BlockPlan = PLAN

    def settings(self, phase: FixedScope | RouteLearning) -> Stage1Settings:
        """Return the settings of one phase."""
        return Stage1Settings(self.batches, self.plan, self.optimizer, phase, self.one_step_share)


class NanoStage1(Stage1Objective):
    """A phase of Stage 1 that trains nano's generator and prompt on its own encoder's latents."""

    def __init__(
        self,
        nano: NanoTraining,
        sizes: Stage1Sizes,
        *,
        routing: bool,
        scope: FixedScope = FixedScope(),  # noqa: B008
    ) -> None:
        phase = sizes.route if routing else scope
        model = Stage1Model(nano.generator, nano.prompt).to(nano.prompt.device)
        trained = [*nano.generator.parameters(), nano.prompt]
        super().__init__(model, nano.encode, trained, sizes.settings(phase))
        self.nano = nano
        nano.encoder.requires_grad_(False)

    def apply_route(self) -> None:
        """Put nano's generator under the schedule that the router would export now."""
        self.nano.generator = self.model.export_generator()


class NanoStage2(Stage2Objective):
    """Stage 2 of nano: generator and decoder against a discriminator on the generator's own features."""

    def __init__(
        self,
        nano: NanoTraining,
        distance: PerceptualDistance | None,
        settings: Stage2Settings,
        msq: MSQConfig = NANO_MSQ,
        *,
        compiled: bool = False,
    ) -> None:
        nano.requires_grad_(False)
        nano.generator.requires_grad_(True)
        nano.prompt.requires_grad_(True)
        discriminator = MSQDiscriminator.of(nano.generator, nano.prompt, msq)
        model = Stage2Model(nano.generator, nano.prompt, discriminator, nano.decoder)
        # Generated latents are cut from their history, the decoder's own is not: it learns what to keep.
        decode = partial(decode_blocks, nano.decoder, through_history=True)
        super().__init__(model, nano.encode, decode, distance, settings, compiled=compiled)
        self.nano = nano


class NanoDecoder(DecoderObjective):
    """Decoder training (Appendix B.4): nano's decoder on the latents of its own encoder, which rests."""

    def __init__(
        self,
        nano: NanoTraining,
        distance: PerceptualDistance | None,
        settings: DecoderSettings,
        *,
        compiled: bool = False,
    ) -> None:
        nano.requires_grad_(False)
        nano.decoder.requires_grad_(True)
        super().__init__(nano.decoder, nano.encode, distance, settings, compiled=compiled)
        self.nano = nano


def _frame_losses() -> FrameLosses:
    """Return polish's losses for longer clips: LPIPS looks at three frames of each."""
    return replace(polish_stage(), perceptual_frames=3).frame_losses


def decoder_settings() -> DecoderSettings:
    """Return the settings of nano's decoder training."""
    return DecoderSettings(
        batches=BatchSettings(clips=16, frames=17),
        optimizer=OptimizerSettings(6e-4, cool_down=0.4),
        frames=_frame_losses(),
    )


def stage2_settings() -> Stage2Settings:
    """Return the settings of nano's Stage 2: clips of 14 latents, frame losses as in the short form."""
    return replace(
        nano_stage2(),
        batches=BatchSettings(clips=11, frames=53),
        frames=_frame_losses(),
        hard_lr_share=0.1,
    )
