"""One process with one model, a Ray actor: what runs on the machines of a cluster."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

import torch

from recavsr import __version__
from recavsr.cluster.tasks import Means, Task
from recavsr.errors import InputError
from recavsr.stream.batch import failure
from recavsr.stream.load import load
from recavsr.stream.step import BlockModel


@dataclass(frozen=True)
class Setup:
    """What every worker of a batch is made with."""

    version: str
    folder: str  # the driver's working folder: names are relative to it
    sources: tuple[str, ...]
    seal: str  # a file that the driver made in the output folder
    threads: int
    model: str
    device: str
    precision: str
    memory: int | str | None


@dataclass(frozen=True)
class Place:
    """Where a worker lives."""

    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class Interrupted(Exception):
    """The driver wants the task to end."""


class Worker:
    """Does one task after another; `stop` and `frames` are called while one runs."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._model: BlockModel | None = None
        self._frames = 0
        self._stopped = False

    def prepare(self) -> Place:
        """Check that this machine can do the work, and load the model; InputError says what is wrong."""
        setup, host = self._setup, socket.gethostname()
        if setup.version != __version__:
            raise InputError(f"{host} has recavsr {__version__}, this machine {setup.version}")
        with contextlib.suppress(OSError):
            os.chdir(setup.folder)
        for name in (*setup.sources, setup.seal):
            if not os.path.exists(name):
                what = os.path.dirname(name) if name == setup.seal else name
                raise InputError(
                    f"{host} does not see {what or '.'}: inputs and outputs must lie on storage that all "
                    "machines of the cluster share, under the same names"
                )
        if not os.access(Path(setup.seal).parent, os.W_OK | os.X_OK):
            raise InputError(f"{host} has no permission to write into {Path(setup.seal).parent}")
        torch.set_num_threads(setup.threads)
        self._loaded()
        return Place(host, os.getpid())

    def do(self, task: Task) -> object:
        """Do a task; what it raises becomes a FileResult: only a lost worker raises at the driver."""
        self._frames = 0
        try:
            return task.do(Means(self._loaded(), self._heard))
        except Exception as error:
            return failure(task.job, error)

    def frames(self) -> int:
        """Return how many frames of the task are made."""
        return self._frames

    def stop(self) -> None:
        """End the task at its next block."""
        self._stopped = True

    def _heard(self, frames: int) -> None:
        self._frames = frames
        if self._stopped:
            raise Interrupted

    def _loaded(self) -> BlockModel:
        if self._model is None:
            setup = self._setup
            self._model = load(
                setup.model, device=setup.device, precision=setup.precision, memory=setup.memory
            )
        return self._model
