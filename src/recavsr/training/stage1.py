"""Stage 1: the generator learns super-resolution, then the router learns its cache route.

Paper, Sec. 3.1 and Appendix B.2. All blocks of a clip are computed at once, each given the clean
latents of the block before it. In the first phase, adaptation, every layer sees the same fixed
history. In the second, route learning, a router's soft prior weighs all candidate histories, and a
budget and an entropy term lead it to one action a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recavsr.cache_policy import CacheAction, Schedule
from recavsr.geometry import BlockPlan
from recavsr.models.generator import Generator, teacher_forced_recycled
from recavsr.models.visibility import Visibility, schedule_visibility
from recavsr.training.flow_matching import TIMESTEPS, flow_matching_loss, logit_normal_times, noised
from recavsr.training.objective import Batch, BatchSettings, Losses, OptimizerSettings, Player
from recavsr.training.rollout import Encode
from recavsr.training.router import CacheRouter, entropy


class Stage1Model(nn.Module):
    """What a checkpoint of Stage 1 holds: generator, prompt and router, all of both phases."""

    prompt: Tensor
    entropy_weight: Tensor

    def __init__(self, generator: Generator, prompt: Tensor, router: CacheRouter | None = None) -> None:
        """Take a generator, its prompt [1, tokens, text width] (trained if a parameter) and a router."""
        super().__init__()
        config = generator.config
        self.generator = generator
        self.router = router or CacheRouter(config.layers, config.schedule.anchor_rule)
        if isinstance(prompt, nn.Parameter):
            self.prompt = prompt
        else:
            self.register_buffer("prompt", prompt)
        # Here, where it follows the model to its device, for captured graphs to read.
        self.register_buffer("entropy_weight", torch.tensor(0.0), persistent=False)

    def export_generator(self) -> Generator:
        """Return the generator under the router's exported schedule; weights are shared."""
        return self.generator.with_schedule(self.router.export())


@dataclass(frozen=True)
class FixedScope:
    """Adaptation: the same history for every layer; the paper's is W_6, which is no router action.

    None: each layer's own, by the generator's schedule.
    """

    action: CacheAction | None = CacheAction(recent=6)  # noqa: RUF009

    def schedule(self, own: Schedule) -> Schedule:
        """Return the schedule of this phase for a generator whose own is `own`."""
        if self.action is None:
            return own
        return Schedule.uniform(len(own.actions), self.action, own.anchor_rule)


@dataclass(frozen=True)
class RouteLearning:
    """Route learning: weights of the terms of Eq. 3, and the temperature from first to last."""

    capacity: float = 2.0  # wanted mean of the layers' expected capacities, in latents
    budget_weight: float = 0.5
    entropy_weight: float = 0.5
    entropy_rise: tuple[float, float] = (0.0, 0.0)
    """Progress from which and until which the entropy's weight grows from zero to its full value.

    The paper's is full from the start. Where one layer's history has a small effect on the flow-matching
    loss, each layer then becomes certain of what its random start preferred: see
    docs/decisions/0007-stage-1-attends-by-block.md.
    """
    temperatures: tuple[float, float] = (2.0, 0.3)

    def weight_of_entropy(self, progress: float) -> float:
        """Return the entropy's weight at `progress` in [0, 1]."""
        start, end = self.entropy_rise
        if progress >= end:
            return self.entropy_weight
        return self.entropy_weight * max(0.0, (progress - start) / (end - start))

    def temperature(self, progress: float) -> float:
        """Return the temperature at `progress` in [0, 1]: each step sharpens by the same factor."""
        first, last = self.temperatures
        return first * (last / first) ** progress


@dataclass(frozen=True)
class Stage1Settings:
    """Batches, block plan, optimiser and phase of a run of Stage 1."""

    batches: BatchSettings
    plan: BlockPlan
    optimizer: OptimizerSettings
    phase: FixedScope | RouteLearning
    one_step_share: float = 0.0  # of the clips at time 1 (see `logit_normal_times`)


class Stage1Objective:
    """One phase of Stage 1, as the training loop runs it."""

    def __init__(
        self,
        model: Stage1Model,
        encode: Encode,
        trained: Sequence[nn.Parameter],
        settings: Stage1Settings,
    ) -> None:
        """Train `trained` (the generator's, or its adapters and projections; a prompt), all else rests.

        Route learning trains the router too.
        """
        self.model, self.encode, self.settings = model, encode, settings
        self.batches = settings.batches
        parameters = list(trained)
        if isinstance(settings.phase, RouteLearning):
            self.name = "stage1_routing"
            parameters += model.router.parameters()
        else:
            self.name = "stage1_adaptation"
        model.requires_grad_(False)
        for parameter in parameters:
            parameter.requires_grad_(True)
        self.players = (Player("generator", tuple(parameters), settings.optimizer),)

    def advance(self, progress: float) -> None:
        """Set the router's temperature and the weight of its entropy."""
        phase = self.settings.phase
        if isinstance(phase, RouteLearning):
            self.model.router.temperature.fill_(phase.temperature(progress))
            self.model.entropy_weight.fill_(phase.weight_of_entropy(progress))

    def updates(self, batch: Batch) -> Iterator[tuple[str, Losses]]:
        """Yield the one update of a step: flow matching and, in route learning, budget and entropy."""
        with torch.no_grad():
            latents = self.encode(batch.hq).float()
        blocks = self.settings.plan.cut(latents.shape[2])
        phase = self.settings.phase
        if isinstance(phase, FixedScope):
            schedule = phase.schedule(self.model.generator.config.schedule)
            loss = self._flow_matching(batch.lr, latents, schedule_visibility(schedule, blocks))
            yield "generator", {"loss": loss, "flow_matching": loss}
            return
        router = self.model.router
        log_probabilities = router.log_probabilities()
        flow_matching = self._flow_matching(batch.lr, latents, router.visibility(log_probabilities, blocks))
        capacities = router.expected_capacity(log_probabilities)
        budget = (capacities.mean() - phase.capacity).square()
        sharpness = entropy(log_probabilities).mean()
        exported = router.exported_capacity(log_probabilities).mean()
        yield (
            "generator",
            {
                "loss": flow_matching + phase.budget_weight * budget + self.model.entropy_weight * sharpness,
                "flow_matching": flow_matching,
                "budget": budget,
                "entropy": sharpness,
                "capacity": capacities.mean(),
                "exported_capacity": exported,
                "export_gap": exported - capacities.mean(),
                "temperature": router.temperature,
                **{f"capacity_{layer}": value for layer, value in enumerate(capacities, start=1)},
            },
        )

    def export_schedule(self) -> Schedule:
        """Return the schedule of the router as it is: one action a layer, for Stage 2 and inference."""
        return self.model.router.export()

    def _flow_matching(self, lr_frames: Tensor, latents: Tensor, visibility: Sequence[Visibility]) -> Tensor:
        """Return the flow-matching loss of clips, each at a time of its own."""
        generator, plan = self.model.generator, self.settings.plan
        times = logit_normal_times(latents.shape[0], latents.device, self.settings.one_step_share)
        noise = torch.randn_like(latents)
        prediction = generator(
            generator.condition(self.model.prompt, TIMESTEPS * times),
            noised(latents, noise, times),
            lr_frames,
            teacher_forced_recycled(latents, plan),
            plan,
            visibility,
        )
        return flow_matching_loss(prediction, latents, noise)
