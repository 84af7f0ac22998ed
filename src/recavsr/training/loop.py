"""The training loop: one captured step repeated, with a time budget, averages, logs and checkpoints.

On a CUDA card a whole step (losses, gradients, optimiser, weight averages) is one CUDA graph; on a
CPU the same code runs plainly. Shapes are static.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

Losses = Mapping[str, Tensor]
"""Named scalars of a step; `loss` is what is minimised."""

LossFunction = Callable[[Tensor, Tensor], Losses]
"""Of (HQ frames, LR frames), both [B, 3, F, H, W] in [-1, 1]."""


@dataclass(frozen=True)
class RunSettings:
    """How long and how fast a stage trains. A stage ends at `seconds` or `steps`, whichever is first."""

    seconds: float
    steps: int = 1_000_000
    learning_rate: float = 3e-4
    warm_up_steps: int = 100
    cool_down: float = 0.4  # last share of the stage over which the rate falls to zero
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 1e-4
    clip_norm: float = 1.0
    average_decay: float = 0.999
    log_every: int = 50


class Averages:
    """Exponential moving averages of parameters, updated in place."""

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        self.parameters = list(parameters)
        self.decay = decay
        self.values = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the parameters."""
        torch._foreach_lerp_(self.values, [p.detach() for p in self.parameters], 1 - self.decay)

    @torch.no_grad()
    def copy_to_parameters(self) -> None:
        """Put the averages into the parameters, as at the end of a stage."""
        torch._foreach_copy_([p.detach() for p in self.parameters], self.values)


class TrainingStep:
    """One optimiser step on a batch, captured as a CUDA graph where there is a card."""

    def __init__(
        self,
        loss_function: LossFunction,
        parameters: list[nn.Parameter],
        settings: RunSettings,
        batch: tuple[Tensor, Tensor],
    ) -> None:
        self.loss_function, self.parameters, self.settings = loss_function, parameters, settings
        self.inputs = tuple(x.clone() for x in batch)
        device = batch[0].device
        self.rate = torch.zeros((), device=device)
        self.optimizer = torch.optim.AdamW(
            parameters,
            lr=self.rate if device.type == "cuda" else 0.0,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
            capturable=device.type == "cuda",
        )
        self.averages = Averages(parameters, settings.average_decay)
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._capture()

    def _capture(self) -> None:
        # Warm-up runs compile, tune and allocate; their rate is zero, so nothing is learned yet.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.losses = self._step()

    def _step(self) -> dict[str, Tensor]:
        self.optimizer.zero_grad(set_to_none=True)
        losses = self.loss_function(*self.inputs)
        losses["loss"].backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.settings.clip_norm, foreach=True)
        self.optimizer.step()
        self.averages.update()
        return {**{name: value.detach() for name, value in losses.items()}, "grad_norm": norm}

    def __call__(self, batch: tuple[Tensor, Tensor], rate: float) -> dict[str, Tensor]:
        """Train on a batch; the losses returned are overwritten by the next call."""
        for static, fresh in zip(self.inputs, batch):
            static.copy_(fresh, non_blocking=True)
        self.rate.fill_(rate)
        if self.graph is None:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.losses = self._step()
        else:
            self.graph.replay()
        return self.losses


class Prefetcher:
    """Draws the next batch while a step runs: on a card on a stream of its own.

    `take` returns the batch that the last `prepare` (or the construction) drew.
    """

    def __init__(self, next_batch: Callable[[], tuple[Tensor, Tensor]], device: torch.device) -> None:
        self.next_batch = next_batch
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.prepare()

    def prepare(self) -> None:
        """Draw the next batch."""
        with torch.cuda.stream(self.stream):
            self.batch = self.next_batch()

    def take(self) -> tuple[Tensor, Tensor]:
        """Return the batch, ready for the current stream."""
        if self.stream is not None:
            current = torch.cuda.current_stream(self.batch[0].device)
            current.wait_stream(self.stream)
            for tensor in self.batch:
                tensor.record_stream(current)
        return self.batch


def learning_rate(settings: RunSettings, step: int, progress: float) -> float:
    """Return the rate: linear warm-up, constant, then a half cosine to zero over the cool-down."""
    warm = min(1.0, (step + 1) / settings.warm_up_steps)
    left = min(1.0, (1 - progress) / settings.cool_down) if settings.cool_down else 1.0
    return settings.learning_rate * warm * 0.5 * (1 - math.cos(math.pi * left))


def train(
    loss_function: LossFunction,
    parameters: list[nn.Parameter],
    next_batch: Callable[[], tuple[Tensor, Tensor]],
    settings: RunSettings,
    log_path: Path,
    checkpoint: Callable[[], None] | None = None,
) -> int:
    """Train one stage and leave the averaged weights in the parameters. Returns the steps done.

    Logs a CSV row every `log_every` steps. Raises RuntimeError where the loss stops being finite;
    parameters and averages are then spoilt, and the last checkpoint is what there is to go on from.
    """
    batches = Prefetcher(next_batch, parameters[0].device)
    step_function = TrainingStep(loss_function, parameters, settings, batches.take())
    log_path.parent.mkdir(parents=True, exist_ok=True)
    started, step, last_save = time.monotonic(), 0, time.monotonic()
    with log_path.open("w", newline="") as file:
        writer = None
        while step < settings.steps:
            elapsed = time.monotonic() - started
            progress = max(elapsed / settings.seconds, step / settings.steps)
            if progress >= 1:
                break
            rate = learning_rate(settings, step, progress)
            losses = step_function(batches.take(), rate)
            batches.prepare()  # while the card works on the step
            step += 1
            if step % settings.log_every == 0 or step == settings.steps:
                values = {name: float(value) for name, value in losses.items()}
                if not math.isfinite(values["loss"]):
                    raise RuntimeError(f"the loss is {values['loss']} at step {step}: see {log_path}")
                row = {"step": step, "seconds": round(time.monotonic() - started, 2), "rate": f"{rate:.3g}"}
                row |= {name: f"{value:.5g}" for name, value in values.items()}
                if writer is None:
                    writer = csv.DictWriter(file, list(row))
                    writer.writeheader()
                writer.writerow(row)
                file.flush()
                if checkpoint is not None and time.monotonic() - last_save > 60:
                    checkpoint()
                    last_save = time.monotonic()
    step_function.averages.copy_to_parameters()
    return step
