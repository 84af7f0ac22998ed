"""What a training stage is: the batches it wants, who is trained, and the losses of one step.

The loop (`training.loop`) knows nothing of networks: it draws batches, runs an objective's
`updates` and steps one optimiser for each player.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from recavsr.errors import InputError

Losses = Mapping[str, Tensor]
"""Named scalars of an update; `loss` is what its player minimises, the others are only logged."""


class Batch(NamedTuple):
    """Paired clips, both [B, 3, F, H, W] in [-1, 1]: HQ frames, and LR frames enlarged to their size."""

    hq: Tensor
    lr: Tensor


@dataclass(frozen=True)
class BatchSettings:
    """Sizes of a stage's batches.

    A share `image_fraction` of the steps gets `images` single frames (F = 1), the others get
    `clips` clips of `frames` frames.
    """

    clips: int
    frames: int
    images: int = 0
    image_fraction: float = 0.0

    def __post_init__(self) -> None:
        if min(self.clips, self.frames) < 1:
            raise InputError(f"a batch holds clips of frames, not {self.clips} clips of {self.frames} frames")
        if not 0 <= self.image_fraction <= 1:
            raise InputError(f"image_fraction is a share from 0 to 1, not {self.image_fraction}")

    def shared_by(self, processes: int, times: int = 1) -> BatchSettings:
        """Return batches `times` as large, rounded up to what so many processes can share."""
        clips, images = (
            math.ceil(count * times / processes) * processes for count in (self.clips, self.images)
        )
        return replace(self, clips=clips, images=images)


@dataclass(frozen=True)
class OptimizerSettings:
    """AdamW of one player. Before step `first_step` the player's parameters and averages rest."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 1e-4
    clip_norm: float = 1.0
    warm_up_steps: int = 100
    cool_down: float = 0.0  # last share of the stage over which the rate falls to zero (half a cosine)
    average_decay: float | None = 0.999  # exponential moving average of the weights; None: none
    first_step: int = 0


@dataclass(frozen=True)
class Player:
    """A set of parameters with an optimiser of its own, such as the generator or the discriminator."""

    name: str
    parameters: tuple[nn.Parameter, ...]
    optimizer: OptimizerSettings


class Objective(Protocol):
    """A training stage."""

    name: str
    batches: BatchSettings

    @property
    def model(self) -> nn.Module:
        """Everything that a checkpoint of the stage holds."""
        ...

    @property
    def players(self) -> tuple[Player, ...]:
        """Who is trained."""
        ...

    def advance(self, progress: float) -> None:
        """Set what changes over the stage, such as a temperature (`progress` in [0, 1]).

        Called before every step and outside of captured graphs: write into tensors, in place.
        """
        ...

    def updates(self, batch: Batch) -> Iterator[tuple[str, Losses]]:
        """Yield (player, losses) for each update of a step, in order.

        The loop calls `backward` on `losses["loss"]` and steps that player's optimiser before it
        asks for the next update, so a generator's loss can follow an updated discriminator and
        share the rollout with it.
        """
        ...
