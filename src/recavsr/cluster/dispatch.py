"""Tasks to whichever worker is free; a task whose worker is lost goes to another one.

Ray places the workers, notices when one is gone, with its process or its machine, and starts it again where
there is room. What is left to do here is to know which task was lost, and to count.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from recavsr.cluster.connection import Room
from recavsr.cluster.tasks import Task
from recavsr.cluster.worker import Place, Setup, Worker
from recavsr.errors import InputError, PartialError
from recavsr.stream.batch import Job, failure

ATTEMPTS = 3
"""A task that has cost so many workers is given up."""

_POLL_SECONDS = 0.5
_PATIENCE_SECONDS = 20.0  # to end at the next block


@dataclass(frozen=True)
class Started:
    """A worker begins a task."""

    task: Task
    place: Place


@dataclass(frozen=True)
class Retried:
    """A task lost its worker and waits for another one."""

    task: Task
    place: Place
    attempt: int


Note = Started | Retried


class Dispatcher:
    """The workers of a batch, and the tasks that wait for them."""

    def __init__(
        self,
        ray: ModuleType,
        room: Room,
        setup: Setup,
        on_note: Callable[[Note], None],
        on_frames: Callable[[int], None],
    ) -> None:
        self._ray, self._on_note, self._on_frames = ray, on_note, on_frames
        self._waiting: deque[Task] = deque()
        self._lost: Counter[Task] = Counter()
        self._places: dict[Any, Place] = {}
        self._running: dict[Any, tuple[Any, Task | None]] = {}  # what a reference waits for; no task: a start
        self._free: deque[Any] = deque()
        self._frames_done = 0
        actor = ray.remote(
            num_cpus=room.threads,
            num_gpus=int(room.gpu),
            max_restarts=-1,
            max_task_retries=ATTEMPTS - 1,  # of a start: Ray waits for the process and asks it again
            scheduling_strategy="SPREAD",
            concurrency_groups={"watch": 1},
        )(Worker)
        self._workers = [actor.remote(setup) for _ in range(room.workers)]
        for worker in self._workers:
            self._start(worker)

    def add(self, task: Task) -> None:
        """Let a task wait for a worker."""
        self._waiting.append(task)

    def drop(self, job: Job) -> None:
        """Forget the tasks of a file that still wait."""
        self._waiting = deque(task for task in self._waiting if task.job != job)

    def results(self) -> Iterator[tuple[Task, Any]]:
        """Yield each task with what it gave, or a FileResult where it failed, until none is left.

        Tasks may be added meanwhile. Raises InputError if a machine can't do the work, PartialError if no
        worker is left.
        """
        while self._waiting or any(task is not None for _, task in self._running.values()):
            while self._waiting and self._free:
                self._hand_out(self._free.popleft(), self._waiting.popleft())
            if not self._running:
                raise PartialError("no worker can be started any more; --resume continues what is left")
            ready, _ = self._ray.wait(list(self._running), timeout=_POLL_SECONDS)
            for reference in ready:
                yield from self._take(reference)
            self._on_frames(self._frames_done + self._frames_underway())

    def end(self) -> None:
        """Let what runs end at its next block, then end the workers."""
        busy = [reference for reference, (_, task) in self._running.items() if task is not None]
        with contextlib.suppress(self._ray.exceptions.RayError):
            for worker in self._busy():
                worker.stop.options(concurrency_group="watch").remote()
            deadline = time.monotonic() + _PATIENCE_SECONDS
            while busy and time.monotonic() < deadline:
                _, busy = self._ray.wait(busy, timeout=_POLL_SECONDS)
        for worker in self._workers:
            self._ray.kill(worker)

    def _start(self, worker: Any) -> None:
        self._running[worker.prepare.remote()] = (worker, None)

    def _hand_out(self, worker: Any, task: Task) -> None:
        reference = worker.do.options(max_task_retries=0).remote(task)  # a lost task goes to another worker
        self._running[reference] = (worker, task)
        self._on_note(Started(task, self._places[worker]))

    def _take(self, reference: Any) -> Iterator[tuple[Task, Any]]:
        worker, task = self._running.pop(reference)
        try:
            result = self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            if task is not None:
                raise
            cause = error.cause
            raise cause if isinstance(cause, InputError) else InputError(_one_line(cause)) from None
        except self._ray.exceptions.RayError:
            if task is not None:  # else it can't be started: one worker less
                self._start(worker)
                yield from self._again(task, self._places[worker])
            return
        if task is None:
            self._places[worker] = result
        else:
            self._frames_done += task.frames
            yield task, result
        self._free.append(worker)

    def _again(self, task: Task, place: Place) -> Iterator[tuple[Task, Any]]:
        again = task.again()
        self._lost[again] += 1
        if self._lost[again] >= ATTEMPTS:
            reason = f"{task.job.source}: {ATTEMPTS} workers were lost at it, one after the other"
            yield task, failure(task.job, InputError(reason))
            return
        self._waiting.appendleft(again)
        self._on_note(Retried(task, place, self._lost[again] + 1))

    def _busy(self) -> list[Any]:
        return [worker for worker, task in self._running.values() if task is not None]

    def _frames_underway(self) -> int:
        asked = [worker.frames.options(concurrency_group="watch").remote() for worker in self._busy()]
        if not asked:
            return 0
        answered, _ = self._ray.wait(asked, num_returns=len(asked), timeout=_POLL_SECONDS)
        frames = 0
        for reference in answered:
            with contextlib.suppress(self._ray.exceptions.RayError):
                frames += self._ray.get(reference)
        return frames


def _one_line(error: BaseException) -> str:
    return " ".join(f"a worker could not start: {type(error).__name__}: {error}".split())[:300]
