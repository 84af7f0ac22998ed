"""The main job of a cluster: `run_batch` upscales many files, and shares out the shots of long ones."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recavsr import __version__
from recavsr.cluster.connection import connected, room_of
from recavsr.cluster.dispatch import Dispatcher, Note
from recavsr.cluster.tasks import FindShots, JoinShots, SomeShots, WholeFile
from recavsr.cluster.worker import Setup
from recavsr.stream.batch import BatchReport, FileResult, FileStatus, Job, failure, find_jobs, skipped
from recavsr.stream.engine import Options, UpscaleReport, checked, open_run
from recavsr.stream.resume import RUN, SHOTS, work_folder
from recavsr.stream.shots import Shots, can_share
from recavsr.video.output import write_error

RUNS_A_WORKER = 3
"""Runs of shots for each worker: they are of unequal length, and the last ones should end together."""

LEAST_FRAMES = 240
"""A run of shots is about so long at least: each one reads its file from the beginning."""


@dataclass(frozen=True)
class Shared:
    """A long file's shots were found and are shared out."""

    job: Job
    shots: Shots


BatchNote = Note | Shared


def run_batch(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    address: str | None = None,
    workers: int | None = None,
    threads: int | None = None,
    model: str | os.PathLike[str] = "nano",
    device: str = "auto",
    precision: str = "auto",
    memory: int | str | None = None,
    overwrite: bool = False,
    resume: bool = False,
    least_frames: int = LEAST_FRAMES,
    on_file: Callable[[FileResult], None] = lambda result: None,
    on_note: Callable[[BatchNote], None] = lambda note: None,
    on_frames: Callable[[int, int], None] = lambda frames, total: None,
    **options: Any,
) -> BatchReport:
    """Upscale files, folders and patterns into the folder `output` on a Ray cluster, as `upscale_many` would.

    address: of a running cluster ("auto": the one that this machine belongs to); None: this machine alone.
        All machines see inputs and output under the same names.
    workers: at most so many; threads: CPU threads of each. By default one worker a GPU where there are any,
        else one for every few CPU cores.
    on_file, on_note, on_frames: told of files that ended, of what happens meanwhile, and about twice a second
        of the frames made so far and in all.
    `options` are those of `upscale`. A file that has more than its share of all frames is made in runs of
    shots of at least `least_frames`. The files are those that `upscale` makes, whoever makes them.

    Raises InputError if the cluster, a machine in it, the inputs, the output or the options can't be used at
    all; PartialError if no worker is left.
    """
    wanted = Options(**options)
    checked(wanted)
    jobs = find_jobs(inputs, output)
    ends: dict[Job, FileResult] = {}

    def end(result: FileResult) -> None:
        ends[Job(result.source, result.output)] = result
        on_file(result)

    todo: dict[Job, _Look] = {}
    for job in jobs:
        result = None if overwrite else skipped(job)
        look = _look(job, wanted) if result is None else result
        if isinstance(look, FileResult):
            end(look)
        else:
            todo[job] = look
    if todo:
        total = sum(look.frames for look in todo.values())
        with connected(address, workers, threads) as ray, _seal(Path(output)) as seal:
            room = room_of(ray, device, workers, threads)
            spread = _spread(todo, room.workers, least_frames, resume=resume, overwrite=overwrite)
            if not spread:
                room = replace(room, workers=min(room.workers, len(todo)))
            setup = Setup(
                version=__version__,
                folder=os.getcwd(),
                sources=tuple(job.source for job in todo if os.path.exists(job.source)),
                seal=str(seal),
                threads=room.threads,
                model=os.fspath(model),
                device=device if device not in ("auto", "cuda") else "cuda" if room.gpu else "cpu",
                precision=precision,
                memory=memory,
            )
            dispatcher = Dispatcher(ray, room, setup, on_note, lambda frames: on_frames(frames, total))
            try:
                for job, look in todo.items():
                    common = (job, wanted, overwrite, resume)
                    if job in spread:
                        dispatcher.add(FindShots(*common, pieces=spread[job]))
                    else:
                        dispatcher.add(WholeFile(*common, look.frames, resumable=look.resumable))
                for result in _results(dispatcher, on_note):
                    end(result)
            finally:
                dispatcher.end()
    return BatchReport(tuple(ends[job] for job in jobs))


@dataclass(frozen=True)
class _Look:
    """What a first look at a file says."""

    frames: int  # 0 where it does not say
    resumable: bool
    can_share: bool


def _look(job: Job, options: Options) -> _Look | FileResult:
    try:
        with open_run(job.source, job.output, options) as run:
            return _Look(run.plan.frames or 0, run.plan.resumable, can_share(run.plan, options))
    except Exception as error:
        return failure(job, error)


def _spread(
    todo: dict[Job, _Look], workers: int, least_frames: int, *, resume: bool, overwrite: bool
) -> dict[Job, int]:
    """Return the files that several workers make, and into how many pieces they go.

    They are those that are longer than a worker's share of all frames, and those that were begun so. A file
    that one worker has begun is finished by one.
    """
    share = sum(look.frames for look in todo.values()) / workers
    pieces = {}
    for job, look in todo.items():
        folder = work_folder(Path(job.output))
        afresh = overwrite and not resume
        begun = not afresh and (folder / SHOTS).exists()
        if not look.can_share or (not afresh and (folder / RUN).exists()):
            continue
        if begun or (look.frames > share and look.frames >= 2 * least_frames):
            pieces[job] = max(2, min(RUNS_A_WORKER * workers, look.frames // least_frames))
    return pieces


def _results(dispatcher: Dispatcher, on_note: Callable[[BatchNote], None]) -> Iterator[FileResult]:
    """Give out the steps of shared files as they become possible; yield each file that has ended."""
    missing: dict[Job, int] = {}
    began: dict[Job, float] = {}
    for task, given in dispatcher.results():
        job = task.job
        if isinstance(given, FileResult):
            if isinstance(task, SomeShots):
                if missing.pop(job, None) is None:
                    continue  # another run of its shots has failed before
                dispatcher.drop(job)
            yield given
        elif isinstance(task, FindShots):
            assert isinstance(given, Shots)
            began[job] = time.perf_counter()
            if len(given.runs) < 2:
                common = (job, task.options, task.overwrite, task.resume)
                dispatcher.add(WholeFile(*common, given.frames, resumable=True))
                continue
            on_note(Shared(job, given))
            missing[job] = len(given.runs)
            for number, (first, last) in enumerate(given.runs):
                each = (job, task.options, task.overwrite, True, last - first)
                dispatcher.add(SomeShots(*each, shots=given, number=number))
        elif isinstance(task, SomeShots) and job in missing:
            missing[job] -= 1
            if not missing[job]:
                dispatcher.add(JoinShots(job, task.options, task.overwrite, True, shots=task.shots))
        elif isinstance(task, JoinShots):
            assert isinstance(given, UpscaleReport)
            report = replace(given, resumed_at=0, seconds=time.perf_counter() - began[job])
            status = FileStatus.PARTIAL if report.truncated else FileStatus.DONE
            yield FileResult(job.source, job.output, status, report.cut_short, report)


@contextmanager
def _seal(folder: Path) -> Iterator[Path]:
    """Lay a file into a folder, by which others know that they see the same one."""
    seal = folder / f".recavsr-{os.getpid()}-{secrets.token_hex(4)}.part"
    try:
        seal.touch()
    except OSError as error:
        raise write_error(folder, error) from None
    try:
        yield seal
    finally:
        seal.unlink(missing_ok=True)
