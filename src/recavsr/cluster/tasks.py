"""What a worker can be asked to do: a whole file, or one of the steps that share out a long one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from recavsr.stream.batch import Job, upscale_job
from recavsr.stream.engine import Options, Progress
from recavsr.stream.shots import Shots, find_shots, join_shots, make_shots
from recavsr.stream.step import BlockModel


@dataclass(frozen=True)
class Means:
    """What a worker brings: its model, and whom to tell how many frames are made."""

    model: BlockModel
    heard: Callable[[int], None]


@dataclass(frozen=True)
class Task:
    """Something to do for one file; done twice it gives the same, so that it can be done again elsewhere."""

    job: Job
    options: Options
    overwrite: bool
    resume: bool  # take up what is kept: the user wants it, or this batch has begun it
    frames: int = 0  # that it makes, as far as that is known

    def do(self, means: Means) -> Any:
        """Do it; any exception means that the file failed."""
        raise NotImplementedError

    def again(self) -> Task:
        """Return the task as it is done when a worker was lost at it."""
        return replace(self, resume=True)

    def __str__(self) -> str:
        return self.job.source


@dataclass(frozen=True, kw_only=True)
class WholeFile(Task):
    """Upscale a file; gives a FileResult."""

    resumable: bool

    def do(self, means: Means) -> Any:
        """Upscale it."""

        def told(progress: Progress) -> None:
            if progress.stage == "upscaling":
                means.heard(progress.frames)

        return upscale_job(
            self.job,
            model=means.model,
            overwrite=self.overwrite,
            resume=self.resume,
            progress=told,
            **vars(self.options),
        )

    def again(self) -> Task:
        """Return the task; what can't be resumed is begun again."""
        return replace(self, resume=self.resume or self.resumable)


@dataclass(frozen=True, kw_only=True)
class FindShots(Task):
    """Look for the shots of a long video; gives Shots."""

    pieces: int

    def do(self, means: Means) -> Shots:
        """Find them."""
        return find_shots(
            self.job.source,
            self.job.output,
            model=means.model,
            options=self.options,
            pieces=self.pieces,
            resume=self.resume,
            overwrite=self.overwrite,
            heard=lambda frames: means.heard(0),
        )

    def __str__(self) -> str:
        return f"{self.job.source}, looking for its shots"


@dataclass(frozen=True, kw_only=True)
class SomeShots(Task):
    """Make one run of shots."""

    shots: Shots
    number: int

    def do(self, means: Means) -> None:
        """Make them."""
        make_shots(
            self.job.source,
            self.job.output,
            model=means.model,
            options=self.options,
            shots=self.shots,
            number=self.number,
            heard=means.heard,
        )

    def __str__(self) -> str:
        first, last = self.shots.runs[self.number]
        return f"{self.job.source}, frames {first} to {last - 1}"


@dataclass(frozen=True, kw_only=True)
class JoinShots(Task):
    """Join the runs of shots; gives an UpscaleReport."""

    shots: Shots

    def do(self, means: Means) -> Any:
        """Join them."""
        return join_shots(
            self.job.source,
            self.job.output,
            model=means.model,
            options=self.options,
            shots=self.shots,
            overwrite=self.overwrite,
        )

    def __str__(self) -> str:
        return f"{self.job.source}, joining its shots"
