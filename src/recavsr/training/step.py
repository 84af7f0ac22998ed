"""One training step: forward, backward and optimiser of every player, as one CUDA graph on a card."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from recavsr.training.distributed import World
from recavsr.training.objective import Batch, Losses, Objective
from recavsr.training.optimizer import PlayerOptimizer, learning_rate, local

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class StateBytes:
    """Bytes that this process holds for training before any activation, counted exactly."""

    parameters: int  # of all networks, frozen ones and buffers included
    gradients: int
    optimizer: int
    averages: int

    @property
    def total(self) -> int:
        """Return the sum."""
        return self.parameters + self.gradients + self.optimizer + self.averages


@dataclass(frozen=True)
class Rehearsal:
    """What one step costs on a card: seconds, and the peak of memory in bytes, state included."""

    seconds: float
    peak_bytes: int


class _Captured:
    """A step of one kind of batch and one set of active players, as a CUDA graph."""

    def __init__(self, inputs: Batch) -> None:
        self.inputs = Batch(*(x.clone() for x in inputs))
        self.graph = torch.cuda.CUDAGraph()
        self.losses: dict[str, Tensor] = {}


class TrainingStep:
    """Runs an objective's updates on a batch.

    A batch is split into `micro_batches`, whose gradients are averaged before a player steps; each
    update is done for all of them before the next one begins, so that a later player meets the
    updated earlier one. What an objective holds between two updates is held for every micro-batch;
    an objective with one update holds no more than one micro-batch's graph. With `graphs` each kind
    of batch and set of active players is captured once (shapes are static); capturing changes no
    weight and no state of optimiser or random numbers. `rate` multiplies the players' learning rates.
    """

    def __init__(
        self,
        objective: Objective,
        world: World,
        *,
        rate: float = 1.0,
        precision: Precision = "fp32",
        micro_batches: int = 1,
        graphs: bool = False,
    ) -> None:
        held = {id(parameter) for parameter in objective.model.parameters()}
        for player in objective.players:
            if not all(id(parameter) in held for parameter in player.parameters):
                raise ValueError(f"{objective.name}: the model lacks parameters of {player.name}")
        self.objective, self.world, self.rate = objective, world, rate
        self.precision, self.micro_batches, self.graphs = precision, micro_batches, graphs
        self.players = {
            player.name: PlayerOptimizer(player, capturable=graphs) for player in objective.players
        }
        device = world.device
        self._number = torch.zeros((), dtype=torch.int64, device=device)
        self._first_bad = torch.full((), -1, dtype=torch.int64, device=device)
        self._captured: dict[object, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle() if graphs else None

    def __call__(self, batch: Batch, step: int, progress: float) -> dict[str, Tensor]:
        """Do step `step` (from 0) on a batch; the losses returned are overwritten by later calls."""
        self.objective.advance(progress)
        self._number.fill_(step)
        for player in self.players.values():
            player.set_rate(self.rate * learning_rate(player.settings, step, progress))
        active = self._active(step)
        if not self.graphs:
            return self._run(batch, active)
        key = (batch.hq.shape, batch.lr.shape, active)
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = self._capture(batch, active)
        for static, fresh in zip(captured.inputs, batch):
            static.copy_(fresh, non_blocking=True)
        captured.graph.replay()
        return captured.losses

    def first_bad_step(self) -> int | None:
        """Return the first step (from 0) whose loss was not finite, on any rank; None: all were finite."""
        bad = self.world.largest(int(self._first_bad))
        return None if bad < 0 else bad

    def bytes(self) -> StateBytes:
        """Count what this process holds before any activation."""
        players = self.players.values()
        trained = {id(p): p for player in players for p in player.parameters}
        states = [player.state() for player in players]
        model = self.objective.model
        return StateBytes(
            parameters=_bytes([*model.parameters(), *model.buffers()]),
            gradients=_bytes(list(trained.values())),
            optimizer=sum(_bytes(list(s[k].values())) for s in states for k in s if k != "average"),
            averages=sum(_bytes(list(s["average"].values())) for s in states if "average" in s),
        )

    def rehearse(self, batch: Batch, step: int, progress: float) -> Rehearsal:
        """Run a step on a card twice without keeping what it changes; return what the second one costs."""
        device = self.world.device
        torch.cuda.reset_peak_memory_stats(device)
        with self._untouched(everything=self.graphs):
            for _ in range(2):
                torch.cuda.synchronize(device)
                started = time.perf_counter()
                if self.graphs:
                    self(batch, step, progress)
                else:
                    self.objective.advance(progress)
                    self._run(batch, self._active(step), learn=False)
            torch.cuda.synchronize(device)
            seconds = time.perf_counter() - started
        return Rehearsal(seconds, torch.cuda.max_memory_allocated(device))

    def autocast(self) -> torch.autocast:
        """Return the context in which networks compute in this step's precision."""
        # The cache of cast weights would outlive a captured graph.
        return torch.autocast(
            self.world.device.type,
            dtype=torch.bfloat16,
            enabled=self.precision == "bf16",
            cache_enabled=False,
        )

    def _active(self, step: int) -> frozenset[str]:
        return frozenset(name for name, player in self.players.items() if not player.rests(step))

    def _run(self, batch: Batch, active: frozenset[str], *, learn: bool = True) -> dict[str, Tensor]:
        logged: dict[str, Tensor] = {}
        pieces = [self.objective.updates(piece) for piece in self._split(batch)]
        while any(found := [self._accumulate(piece, active) for piece in pieces]):
            updates = [update for update in found if update is not None]
            name, first = updates[0]
            if {other for other, _ in updates} != {name} or len(updates) != len(pieces):
                raise ValueError("the micro-batches of a step must make the same updates in the same order")
            player, prefix = self.players[name], "" if len(self.players) == 1 else f"{name}_"
            mean = {key: torch.stack([losses[key] for _, losses in updates]).mean() for key in first}
            self._note(mean["loss"])
            logged |= {prefix + key: value for key, value in mean.items()}
            if name in active:
                self.world.average_gradients(player.parameters)
                if learn:
                    logged[f"{prefix}grad_norm"] = player.step()
            # A loss may reach other players too: gradients count only in their own player's update.
            for other in self.players.values():
                for parameter in other.parameters:
                    parameter.grad = None
        return logged

    def _accumulate(
        self, updates: Iterator[tuple[str, Losses]], active: frozenset[str]
    ) -> tuple[str, dict[str, Tensor]] | None:
        """Take a micro-batch's next update and add its gradients, so that its graph can go at once."""
        with self.autocast():
            update = next(updates, None)
        if update is None:
            return None
        name, losses = update
        if name in active:
            (losses["loss"] / self.micro_batches).backward()
        return name, {key: value.detach().float() for key, value in losses.items()}

    def _split(self, batch: Batch) -> list[Batch]:
        hq, lr = (x.chunk(self.micro_batches) for x in batch)
        return [Batch(*pair) for pair in zip(hq, lr)]

    def _note(self, loss: Tensor) -> None:
        """Remember the first step whose loss is not finite, without waiting for the card."""
        new = ~loss.isfinite() & (self._first_bad < 0)
        self._first_bad.copy_(torch.where(new, self._number, self._first_bad))

    def _capture(self, batch: Batch, active: frozenset[str]) -> _Captured:
        captured = _Captured(batch)
        with self._untouched():
            # Warm-up runs compile, tune and allocate.
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self._run(captured.inputs, active)
            torch.cuda.current_stream().wait_stream(stream)
            # Other threads (of NCCL, of the data) may call CUDA meanwhile.
            with torch.cuda.graph(captured.graph, pool=self._pool, capture_error_mode="thread_local"):
                captured.losses = self._run(captured.inputs, active)
        return captured

    @contextmanager
    def _untouched(self, *, everything: bool = True) -> Iterator[None]:
        """Put buffers and random numbers back as they were before a `with` block.

        `everything`: weights, optimisers and averages too.
        """
        changing = [*self.objective.model.buffers(), self._first_bad]
        if everything:
            for player in self.players.values():
                changing += player.parameters
                changing += [tensor for values in player.state().values() for tensor in values.values()]
        tensors = [local(x.detach()) for x in changing]
        before = [x.clone() for x in tensors]
        random = torch.get_rng_state()
        random_on_card = torch.cuda.get_rng_state() if self.world.device.type == "cuda" else None
        try:
            yield
        finally:
            for tensor, value in zip(tensors, before):
                tensor.copy_(value)
            torch.set_rng_state(random)
            if random_on_card is not None:
                torch.cuda.set_rng_state(random_on_card)


def _bytes(tensors: list[Tensor] | list[torch.nn.Parameter]) -> int:
    return sum(local(x.detach()).nbytes for x in tensors)
