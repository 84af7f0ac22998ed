"""One player's optimiser: AdamW with its learning-rate schedule, clipping and weight averages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recavsr.training.objective import OptimizerSettings, Player


def learning_rate(settings: OptimizerSettings, step: int, progress: float) -> float:
    """Return the rate of step `step` (from 0): linear warm-up, constant, then half a cosine to zero.

    The warm-up counts from the player's `first_step`; `progress` in [0, 1] is the stage's.
    """
    warm = min(1.0, (step - settings.first_step + 1) / max(settings.warm_up_steps, 1))
    left = min(1.0, (1 - progress) / settings.cool_down) if settings.cool_down else 1.0
    return settings.learning_rate * warm * 0.5 * (1 - math.cos(math.pi * left))


def local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds: all of it unless FSDP shards it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Averages:
    """Exponential moving averages of parameters, updated in place."""

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        self.parameters = list(parameters)
        self.decay = decay
        self.values = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the parameters."""
        torch._foreach_lerp_(_locals(self.values), _locals(self.parameters), 1 - self.decay)

    @torch.no_grad()
    def copy_to_parameters(self) -> None:
        """Put the averages into the parameters, as at the end of a stage."""
        torch._foreach_copy_(_locals(self.parameters), _locals(self.values))

    @contextmanager
    def in_place_of_parameters(self) -> Iterator[None]:
        """Let the parameters be the averages inside a `with` block."""
        trained = [p.detach().clone() for p in self.parameters]
        self.copy_to_parameters()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(_locals(self.parameters), _locals(trained))


class PlayerOptimizer:
    """AdamW of one player, with every tensor of its state made at once.

    `capturable`: the rate is a tensor on the card, so that a CUDA graph can hold `step`.
    """

    def __init__(self, player: Player, *, capturable: bool) -> None:
        self.name, self.settings = player.name, player.optimizer
        self.parameters = list(player.parameters)
        if not self.parameters:
            raise ValueError(f"{player.name} has no parameters")
        self._device = self.parameters[0].device
        self._rate = torch.zeros((), device=self._device) if capturable else None
        # The fused update takes whole or sharded parameters, not both in one call.
        kinds = [[p for p in self.parameters if isinstance(p, DTensor) == kind] for kind in (False, True)]
        self._optimizer = torch.optim.AdamW(
            [{"params": parameters} for parameters in kinds if parameters],
            lr=0.0 if self._rate is None else self._rate,
            betas=self.settings.betas,
            weight_decay=self.settings.weight_decay,
            fused=True,
            capturable=capturable,
        )
        for parameter in self.parameters:
            self._optimizer.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        decay = self.settings.average_decay
        self.averages = None if decay is None else Averages(self.parameters, decay)

    def rests(self, step: int) -> bool:
        """Whether the player is not trained yet at a step (from 0)."""
        return step < self.settings.first_step

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the steps to come."""
        if self._rate is not None:
            self._rate.fill_(rate)
        else:
            for group in self._optimizer.param_groups:
                group["lr"] = rate

    def step(self) -> Tensor:
        """Clip the gradients, update the parameters and their averages; return the norm before clipping."""
        norm = self._clip()
        self._optimizer.step()
        if self.averages is not None:
            self.averages.update()
        return norm

    @torch.no_grad()
    def _clip(self) -> Tensor:
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norms = []
        for sharded in (False, True):
            some = [g for g in gradients if isinstance(g, DTensor) == sharded]
            if not some:  # the norm of nothing would be a tensor on the CPU
                continue
            norm = torch.nn.utils.get_total_norm(some, foreach=True)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        norm = torch.linalg.vector_norm(torch.stack([n.to(self._device) for n in norms]))
        scale = (self.settings.clip_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(_locals(gradients), scale)
        return norm

    def state(self) -> dict[str, dict[int, Tensor]]:
        """Return the optimiser's tensors and the averages by parameter number: the tensors themselves."""
        result: dict[str, dict[int, Tensor]] = {
            key: {i: self._optimizer.state[p][key] for i, p in enumerate(self.parameters)}
            for key in ("step", "exp_avg", "exp_avg_sq")
        }
        if self.averages is not None:
            result["average"] = dict(enumerate(self.averages.values))
        return result


def _locals(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [local(tensor.detach()) for tensor in tensors]
