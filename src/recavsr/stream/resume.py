"""Resume: what a run keeps beside its output, so that `--resume` goes on where a crash ended it.

    .film.mp4.recavsr/          beside film.mp4, gone when film.mp4 is complete
        run.json                what the run was asked for, and how far it had come at the last checkpoint
        state-1200.safetensors  the session after 1200 frames
        packets                 the encoded picture up to there (or `pictures/`)
        output                  the file in the making

At every cut, and in a shot every `MARK_FRAMES` frames, the encoder closes its group of pictures, in every
run, so that a continued run gives the same frames as one in one piece; a checkpoint is saved there unless the
last one is younger than `CHECKPOINT_SECONDS`. A continued run decodes its source from the beginning again,
without using the model, muxes the packets that are there, and goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from recavsr.errors import InputError
from recavsr.stream.session import Session
from recavsr.stream.step import BlockModel
from recavsr.video.output import sync, write_error
from recavsr.video.source import Source
from recavsr.video.writer import Writer

CHECKPOINT_SECONDS = 20.0

_EDGE_BYTES = 1 << 20
_LONGEST_NAME = 255  # bytes, on nearly every file system


RUN, SHOTS = "run.json", "shots.json"
"""What a folder's work is: that of one run, or of runs of shots made by many (`stream.shots`)."""


class Work:
    """The folder in which a run keeps what it has; without an output nothing is kept."""

    _record = RUN

    def __init__(self, output: Path | None) -> None:
        self._output = output
        self.folder = None if output is None else work_folder(output)
        self.frames = 0
        """Frames that an earlier run finished."""
        self.log_size = 0
        self.kept: int | None = None
        """Frames that are safe, or None before the first checkpoint."""
        self._session: Path | None = None
        self._facts: dict[str, Any] = {}
        self._lock: FileLock | None = None
        self._saved_at = time.monotonic()

    def check(self, facts: dict[str, Any], *, resume: bool, overwrite: bool) -> None:
        """Raise what `begin` would raise, and leave everything as it is."""
        run = None if self.folder is None else self.folder / self._record
        if run is None or not run.exists() or (overwrite and not resume):
            return
        known = self._read(run)
        if not resume:
            raise InputError(self._kept_line(self._frames_of(known)))
        self._facts = json.loads(json.dumps(facts))
        self._refuse_changes({name: known["facts"].get(name) for name in self._facts})

    def _kept_line(self, frames: int) -> str:
        return (
            f"{self._output}: an interrupted run of {frames} frames is kept; "
            "continue it with --resume, or start afresh with --overwrite"
        )

    def begin(self, facts: dict[str, Any], *, resume: bool, overwrite: bool) -> None:
        """Make the folder, or take up the run that was kept in it.

        `facts` is all that decides what the output holds. Raises InputError where an earlier run was kept and
        is not to be continued, or can't be, because a fact has changed.
        """
        if self.folder is None:
            return
        self._facts = json.loads(json.dumps(facts))
        run = self.folder / self._record
        try:
            self.folder.mkdir(exist_ok=True)
            self._take_lock()
            fresh = overwrite and not resume
            other, command = (RUN, "upscale") if self._record == SHOTS else (SHOTS, "batch")
            if not run.exists() and (self.folder / other).exists() and not fresh:
                self.kept = 0
                raise InputError(
                    f"{self._output}: an interrupted run of recavsr {command} is kept; "
                    "continue it with that command and --resume, or start afresh with --overwrite"
                )
            if not run.exists() or fresh:
                self._clear()
                return
            self.kept = 0  # whatever is there now is not removed
            known = self._read(run)
        except OSError as error:
            raise write_error(self.folder, error) from None
        self.kept = self._frames_of(known)
        if not resume:
            raise InputError(self._kept_line(self.kept))
        self._refuse_changes(known["facts"])
        self._take_up(known)

    def _read(self, run: Path) -> dict[str, Any]:
        """Return what is known of the kept run."""
        try:
            known = json.loads(run.read_bytes())
            self._frames_of(known), known["facts"].get
        except (ValueError, KeyError, TypeError, AttributeError):
            raise self._damaged() from None
        return known

    def _damaged(self) -> InputError:
        return InputError(
            f"{self._output}: what an interrupted run kept is damaged; start afresh with --overwrite"
        )

    def _frames_of(self, known: dict[str, Any]) -> int:
        return known["frames"]

    def _take_up(self, known: dict[str, Any]) -> None:
        assert self.folder is not None
        try:
            self.frames, self.log_size = known["frames"], known["log_size"]
            self._session = self.folder / known["state"]
            packets, pictures = self.folder / "packets", self.folder / "pictures"
            if self.log_size:
                whole = packets.stat().st_size >= self.log_size
            else:
                whole = len(list(pictures.iterdir())) >= self.frames
        except (KeyError, TypeError, OSError):
            whole = False
        if not whole:
            raise self._damaged()

    def session(self, model: BlockModel) -> Session | None:
        """Return the session as it was at the checkpoint, or None at the beginning of a run."""
        if self._session is None:
            return None
        try:
            return Session.load(self._session, model)
        except (InputError, KeyError, ValueError):
            raise self._damaged() from None

    @property
    def due(self) -> bool:
        """Return whether the last checkpoint is so old that there should be a new one."""
        return self.folder is not None and time.monotonic() - self._saved_at >= CHECKPOINT_SECONDS

    def save(self, session: Session, frames: int, writer: Writer) -> None:
        """Save a checkpoint after `frames` frames, unless the last one is young."""
        if self.folder is None or not self.due:
            return
        state = self.folder / f"state-{frames}.safetensors"
        with _writing(state):
            log_size = writer.sync()
            session.save(state)
            sync(state)
            self._write(frames=frames, log_size=log_size, state=state.name)
            if self._session is not None and self._session != state:
                self._session.unlink(missing_ok=True)
        self._session, self.kept, self._saved_at = state, frames, time.monotonic()

    def join(self, facts: dict[str, Any], session: Session, frames: int, logs: Sequence[Path]) -> None:
        """Take packet logs of all frames, one behind the other, as what a run kept at its very end."""
        assert self.folder is not None
        self._facts = json.loads(json.dumps(facts))
        packets, state = self.folder / "packets", self.folder / f"state-{frames}.safetensors"
        with _writing(packets):
            self._take_lock()
            self.kept = frames  # whatever happens now: the logs are not removed
            try:
                with open(packets, "wb") as whole:
                    for log in logs:
                        with open(log, "rb") as part:
                            shutil.copyfileobj(part, whole)
                    log_size = whole.tell()
                session.save(state)
                for path in (packets, state):
                    sync(path)
                self._write(frames=frames, log_size=log_size, state=state.name)
            except BaseException:
                for path in (packets, state):  # the disk may be full
                    path.unlink(missing_ok=True)
                raise

    def _write(self, **known: Any) -> None:
        """Replace what is known of the run, at once."""
        assert self.folder is not None
        fresh = self.folder / f"{self._record}.new"
        fresh.write_text(json.dumps({"facts": self._facts, **known}), encoding="utf-8")
        sync(fresh)
        os.replace(fresh, self.folder / self._record)
        sync(self.folder)

    def finish(self) -> None:
        """Note that the output is complete: nothing is kept."""
        self.kept = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._lock is None:
            return
        assert self.folder is not None
        if self.kept is None:
            # First what says that there is something to continue: the process may be killed half-way.
            self._forget()
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            (self.folder / "output").unlink(
                missing_ok=True
            )  # made anew from the packets, and the disk may be full
        self._lock.release()

    def _take_lock(self) -> None:
        assert self.folder is not None
        lock = FileLock(self.folder / "lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            raise InputError(f"{self._output}: another run is writing it just now") from None
        self._lock = lock

    def _clear(self) -> None:
        """Remove what an earlier run left."""
        assert self.folder is not None
        self._forget()
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()

    def _forget(self) -> None:
        assert self.folder is not None
        for name in (RUN, SHOTS):
            (self.folder / name).unlink(missing_ok=True)

    def _refuse_changes(self, known: dict[str, Any]) -> None:
        for name in self._facts.keys() | known.keys():
            before, now = known.get(name), self._facts.get(name)
            if before != now:
                how = f"was {before} and is now {now}" if _short(before) and _short(now) else "has changed"
                raise InputError(
                    f"{self._output}: the kept run can't be continued, its {name} {how}; "
                    "use what it was begun with, or start afresh with --overwrite"
                )


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn the errors of writing a file into InputError."""
    try:
        yield
    except OSError as error:
        raise write_error(path, error) from None
    except SafetensorError as error:  # what it says of a full disk
        raise InputError(f"{path}: can't be written ({error})") from None


def work_folder(output: Path) -> Path:
    """Return where the work of an output is kept: hidden, beside it."""
    place = Path(os.path.abspath(output))
    name = f".{place.name}.recavsr"
    if len(os.fsencode(name)) > _LONGEST_NAME:
        name = f".{hashlib.sha256(os.fsencode(place.name)).hexdigest()[:32]}.recavsr"
    return place.with_name(name)


def input_identity(source: Source) -> str:
    """Return what shows that a source is another one: names, sizes, times, and the edges of a single file."""
    digest = hashlib.sha256()
    paths = source.pictures or (Path(source.name),)
    for path in paths:
        about = path.stat()
        digest.update(
            f"{path.name if source.pictures else ''}|{about.st_size}|{about.st_mtime_ns}\n".encode()
        )
    if not source.pictures:
        with open(paths[0], "rb") as file:
            digest.update(file.read(_EDGE_BYTES))
            file.seek(max(0, paths[0].stat().st_size - _EDGE_BYTES))
            digest.update(file.read(_EDGE_BYTES))
    return digest.hexdigest()


def _short(value: Any) -> bool:
    return isinstance(value, (str, int, float, type(None))) and len(str(value)) <= 40
