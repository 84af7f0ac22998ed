"""One long video as runs of shots: found first, made apart, joined without encoding anything twice.

    .film.mp4.recavsr/                  beside film.mp4, gone when film.mp4 is complete
        shots.json                      what was asked for, where the shots begin, and how they are shared out
        shots-000000000-000001200       the encoded picture of one run of shots

A shot comes out as it would alone, from the model (`Session`) and from the encoder (`pipeline.Mark`). So the
joined file is the one that `upscale` makes in one piece, however many have made it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from recavsr.errors import InputError
from recavsr.stream.engine import Options, UpscaleReport, open_run, upscale
from recavsr.stream.pipeline import Hooks, Read, Timing, run_pipeline
from recavsr.stream.plan import OutputKind, Plan
from recavsr.stream.resume import SHOTS, Work, work_folder
from recavsr.stream.session import Session
from recavsr.stream.step import BlockModel, IdentityModel
from recavsr.video.frames import Frame, Packet
from recavsr.video.reader import Reader


@dataclass(frozen=True)
class Shots:
    """Where a video's shots begin, as frames of the output, and the runs of shots that are made apart."""

    frames: int
    starts: tuple[int, ...]  # the first is 0
    runs: tuple[tuple[int, int], ...]  # first frame, and the one behind the last


def can_share(plan: Plan, options: Options) -> bool:
    """Return whether a video's shots can be made apart: in a file that can be resumed, and with cuts."""
    return plan.kind is OutputKind.VIDEO and plan.resumable and options.cuts != "off"


def share_out(starts: Sequence[int], frames: int, pieces: int) -> tuple[tuple[int, int], ...]:
    """Return runs of whole shots, about `pieces` of about the same length."""
    least = -(-frames // max(1, pieces))
    bounds = [0]
    for end in [*starts[1:], frames]:
        if end - bounds[-1] >= least:
            bounds.append(end)
    if bounds[-1] != frames:
        bounds.append(frames)
    return tuple(itertools.pairwise(bounds))


def find_shots(
    source: str,
    output: str,
    *,
    model: BlockModel,
    options: Options,
    pieces: int,
    resume: bool = False,
    overwrite: bool = False,
    heard: Callable[[int], None] = lambda frames: None,
) -> Shots:
    """Find the shots of a video where `upscale` finds them, in one pass that makes no frames.

    Where there is more than one run of shots they are noted beside the output, for `make_shots`; what is
    noted there already is taken up with `resume`, and refused (InputError) without. `heard` is called with
    the count of frames as it grows.
    """
    with open_run(source, output, options) as run, _SharedWork(Path(run.plan.output)) as work:
        work.begin(run.facts(model), resume=resume, overwrite=overwrite)
        if work.shots is not None:
            return work.shots
        finder = _ShotFinder(
            IdentityModel("cpu", model.blocks),
            lr_size=run.plan.lr_size,
            out_size=run.plan.lr_size,
            detect_cuts=options.cuts == "auto",
        )
        for item in run.reader:
            if isinstance(item, Frame):
                if run.starts_shot(item.stamp):
                    finder.cut()
                finder.push(item.pixels[None])
                heard(finder.pushed)
        finder.flush()
        starts = (0, *finder.cuts)
        shots = Shots(finder.pushed, starts, share_out(starts, finder.pushed, pieces))
        if len(shots.runs) > 1:
            work.note(shots)
        return shots


def make_shots(
    source: str,
    output: str,
    *,
    model: BlockModel,
    options: Options,
    shots: Shots,
    number: int,
    heard: Callable[[int], None] = lambda frames: None,
) -> None:
    """Make one of the runs of shots, unless it is there; `heard` is called with the count of its frames."""
    first, last = shots.runs[number]
    path = _log_path(Path(output), (first, last))
    if path.exists():
        return
    starts, numbers = frozenset(shots.starts), itertools.count()

    def told(timing: Timing) -> None:
        heard(timing.frames_written)

    # The cuts are known; a session that looked for them would miss the frames behind its last shot.
    with open_run(source, output, replace(options, cuts="off")) as run:
        run.reader.passed = first
        gives_way = model.device.type == "cpu"
        hooks = Hooks(
            told, lambda stamp: next(numbers) in starts, lambda mark: None, writing_gives_way=gives_way
        )
        with run.plan.shots_writer(run.reader, path) as writer:
            items = _frames_before(run.reader, last)
            timing = run_pipeline(items, run.session(model), writer, hooks)
    if timing.frames_written != last - first:
        path.unlink()
        raise InputError(f"{source}: has changed while it was read")


def join_shots(
    source: str, output: str, *, model: BlockModel, options: Options, shots: Shots, overwrite: bool = False
) -> UpscaleReport:
    """Complete the output from its runs of shots: as a run that is resumed when all frames are made."""
    with open_run(source, output, options) as run, Work(Path(run.plan.output)) as work:
        session = run.session(model)
        session.cuts += shots.starts[1:]
        logs = [_log_path(Path(run.plan.output), frames) for frames in shots.runs]
        work.join(run.facts(model), session, shots.frames, logs)
    return upscale(source, output, model=model, resume=True, overwrite=overwrite, **asdict(options))


class _ShotFinder(Session):
    """A session that finds the cuts of its frames and makes nothing of them."""

    def _run_block(self, frames: np.ndarray, wanted: int) -> np.ndarray:
        self._block += 1
        return np.empty((len(frames), 0, 0, 3), frames.dtype)


class _SharedWork(Work):
    """The folder in which the runs of shots lie."""

    _record = SHOTS

    def __init__(self, output: Path) -> None:
        super().__init__(output)
        self._place = output
        self.shots: Shots | None = None

    def note(self, shots: Shots) -> None:
        """Note the shots: from now on there is something to continue."""
        self._write(shots=asdict(shots))
        self.kept = 0

    def _take_up(self, known: dict[str, Any]) -> None:
        self.shots = _shots_of(known)

    def _frames_of(self, known: dict[str, Any]) -> int:
        runs = _shots_of(known).runs
        return sum(last - first for first, last in runs if _log_path(self._place, (first, last)).exists())


def _shots_of(known: dict[str, Any]) -> Shots:
    noted = known["shots"]
    return Shots(noted["frames"], tuple(noted["starts"]), tuple((a, b) for a, b in noted["runs"]))


def _log_path(output: Path, run: tuple[int, int]) -> Path:
    return work_folder(output) / f"shots-{run[0]:09d}-{run[1]:09d}"


def _frames_before(reader: Reader, last: int) -> Iterator[Read]:
    """Yield the frames of a source up to one."""
    count = 0
    for item in reader:
        if isinstance(item, Packet):
            continue
        yield item
        count += 1
        if count == last:
            return


__all__ = ["Shots", "can_share", "find_shots", "join_shots", "make_shots", "share_out"]
