"""Checkpoints of a stage: everything that a resumed run needs to go on as if never interrupted.

A checkpoint is a folder `step_00001000` written by torch.distributed.checkpoint, sharded or not, and
by any number of ranks; beside the tensors `run.pt` holds step, time, random states and the place in
the data. What is frozen is left out: a stage has it from its start. A checkpoint appears under its name
only when it is complete.
"""

from __future__ import annotations

import pickle
import random
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from recavsr.errors import InputError
from recavsr.training.distributed import World
from recavsr.training.optimizer import PlayerOptimizer

_FORMAT = 1


@dataclass(frozen=True)
class Position:
    """Where a run stands: steps done, seconds trained, and the place in the data."""

    step: int
    seconds: float
    data: dict[str, Any]


class Checkpoints:
    """The checkpoints in a folder, of which the last `keep` stay.

    `facts`: what must be the same when a run is resumed, such as the name of the stage and the
    schedule of its generator.
    """

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        players: Mapping[str, PlayerOptimizer],
        world: World,
        *,
        facts: Mapping[str, str],
        keep: int = 2,
    ) -> None:
        self.folder, self.world, self.keep = folder, world, keep
        self._model, self._players, self._facts = model, players, dict(facts)

    def latest(self) -> Path | None:
        """Return the newest complete checkpoint."""
        found = complete(self.folder)
        return found[-1] if found else None

    def save(self, position: Position) -> Path:
        """Write a checkpoint, then remove those beyond the last `keep`.

        Raises InputError where it can't be written; the checkpoints before it stay.
        """
        path = self.folder / f"step_{position.step:08d}"
        partial = path.with_suffix(".part")
        ranks = self.world.gather({"random": _random_state(self.world.device), "data": position.data})
        run = {
            "format": _FORMAT,
            "facts": self._facts,
            "step": position.step,
            "seconds": position.seconds,
            "ranks": ranks,
        }
        with _writable(partial):
            if self.world.leads:
                for left in self.folder.glob("*.part"):  # by a run that was killed
                    shutil.rmtree(left, ignore_errors=True)
                partial.mkdir(parents=True)
                torch.save(run, partial / "run.pt")
            self.world.barrier()
            with _quiet():
                dcp.save(self._tensors(), checkpoint_id=partial, no_dist=self.world.size == 1)
        self.world.barrier()
        if self.world.leads:
            if path.exists():
                shutil.rmtree(path)
            partial.rename(path)
            for old in complete(self.folder)[: -self.keep]:
                shutil.rmtree(old)
        self.world.barrier()
        return path

    def load(self, path: Path) -> Position:
        """Load a checkpoint into model, players and random states; return where the run stood.

        With another number of ranks than it was saved by, random numbers and a racing data source go
        on differently. Raises InputError where the checkpoint is of another stage or schedule.
        """
        run = read_run(path)
        for name, value in self._facts.items():
            saved = run["facts"].get(name, value)  # checkpoints of earlier versions may not say
            if saved != value:
                raise InputError(
                    f"{path}: its {name} is {saved}, this run's is {value}; resume with the same recipe and "
                    "options, or train into another folder"
                )
        try:
            with _quiet():
                dcp.load(self._tensors(), checkpoint_id=path, no_dist=self.world.size == 1)
        except (dcp.api.CheckpointException, ValueError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:300]
            raise InputError(f"{path} does not fit this recipe ({reason})") from error
        ranks = run["ranks"]
        own = ranks[self.world.rank if len(ranks) == self.world.size else 0]
        if len(ranks) == self.world.size:
            _set_random_state(own["random"], self.world.device)
        return Position(run["step"], run["seconds"], own["data"])

    def _tensors(self) -> dict[str, Any]:
        return {
            "model": _not_frozen(self._model),
            "players": {
                name: {key: {str(i): x for i, x in values.items()} for key, values in player.state().items()}
                for name, player in self._players.items()
            },
        }


@contextmanager
def _writable(path: Path) -> Iterator[None]:
    """Turn what goes wrong while `path` is written into one line."""
    try:
        yield
    except dcp.api.CheckpointException as error:  # no Exception: nothing else would catch it
        reason = "; ".join(sorted({str(failure) for failure, _ in error.failures.values()}))
        raise InputError(f"{path} can't be written ({reason}); see to that, then --resume") from error
    except (OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"{path} can't be written ({reason}); see to that, then --resume") from error


def _not_frozen(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the trained parameters and all buffers; what is frozen comes from the stage's start again."""
    tensors = model.state_dict(keep_vars=True).items()
    return {
        name: tensor.detach()
        for name, tensor in tensors
        if tensor.requires_grad or not isinstance(tensor, nn.Parameter)
    }


def complete(folder: Path) -> list[Path]:
    """Return the complete checkpoints in a folder, oldest first."""
    return sorted(path for path in folder.glob("step_*") if re.fullmatch(r"step_\d{8}", path.name))


def read_run(path: Path) -> dict[str, Any]:
    """Read what a checkpoint says about its run; raises InputError where it is damaged."""
    try:
        run = torch.load(path / "run.pt", weights_only=True)
        if run["format"] != _FORMAT:
            raise InputError(f"{path} has format {run['format']}, this version reads {_FORMAT}")
    except (OSError, RuntimeError, KeyError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise InputError(f"{path} can not be read as a checkpoint ({type(error).__name__})") from error
    return run


def _random_state(device: torch.device) -> dict[str, Any]:
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
    }


def _set_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))


class _quiet(warnings.catch_warnings):
    """Silences what torch says about checkpoints of a single process."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")
