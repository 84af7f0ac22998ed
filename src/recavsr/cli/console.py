"""What the command says, on stderr: one line a fact, or JSON lines with `--json`. Only data goes to stdout.

JSON lines carry an `event`: `message` (text), `progress` (frames, total, fps, remaining_s), `file` (one of
many: source, output, status, reason), `plan` (of a dry run), `result` (what was done) and `error` (text,
exit_code).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_SPARSE_SECONDS = 10.0
_JSON_SECONDS = 0.5


def plain_seconds(seconds: float) -> str:
    """Return a duration as people write it: 4.2 s, 3 min 05 s, 2 h 07 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def plain_bytes(count: int) -> str:
    """Return an amount of bytes as people write it: 850 kB, 1.24 GB (decimal)."""
    size = float(count)
    units = ["bytes", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        del units[0]
    return f"{size:.3g} {units[0]}"


class Console:
    """Says things on stderr in the form the user asked for."""

    def __init__(self, json_lines: bool) -> None:
        self.json_lines = json_lines

    def say(self, text: str) -> None:
        """Say one fact."""
        self.event(text, event="message", text=text)

    def error(self, text: str, exit_code: int) -> None:
        """Say in one line why the command ends with a code other than 0."""
        text = " ".join(text.split())
        self.event(f"recavsr: {text}", event="error", text=text, exit_code=exit_code)

    def result(self, text: str, **facts: Any) -> None:
        """Say what was done; with `--json` as the facts themselves."""
        self.event(text, event="result", **facts)

    def progress(self, total: int | None) -> FrameProgress:
        """Return a context manager that shows how far a job of `total` frames has come."""
        if self.json_lines:
            return FrameProgress(self, total, _JSON_SECONDS)
        if sys.stderr.isatty():
            return TerminalProgress(self, total)
        return FrameProgress(self, total, _SPARSE_SECONDS)

    def event(self, plain: str, **facts: Any) -> None:
        """Say something: `plain`, or with `--json` the facts, which name their `event`."""
        line = json.dumps(facts) if self.json_lines else plain.replace("\n", " ")  # names may hold one
        print(line, file=sys.stderr, flush=True)

    def progress_line(self, facts: Mapping[str, Any]) -> None:
        """Say how far a job has come."""
        of_total = f"/{facts['total']}" if facts["total"] else ""
        left = f", {plain_seconds(facts['remaining_s'])} left" if facts["remaining_s"] is not None else ""
        self.event(
            f"{facts['frames']}{of_total} frames, {facts['fps']:.1f} fps{left}", event="progress", **facts
        )


class FrameProgress:
    """Counts frames and says so now and then; the first and the last count above 0 are always said."""

    def __init__(self, console: Console, total: int | None, interval: float) -> None:
        self.total = total
        self.frames = 0
        self._console = console
        self._interval = interval
        self._fps: float | None = None
        self._started = time.monotonic()
        self._said_at = -float("inf")
        self._said_frames = 0

    def __enter__(self) -> FrameProgress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, frames: int, total: int | None = None, fps: float | None = None) -> None:
        """Note that `frames` are done, of `total` where that is known, at `fps` where that is measured."""
        self.frames = frames
        self.total = total or self.total
        self._fps = fps
        now = time.monotonic()
        if frames and now - self._said_at >= self._interval:
            self._said_at = now
            self._show()

    def close(self) -> None:
        """Say the last count where it was not said yet."""
        if self.frames != self._said_frames:
            self._show()

    def facts(self) -> dict[str, Any]:
        """Return frames, total, fps and the seconds that remain (None where the total is not known)."""
        fps = self._fps
        if fps is None:
            fps = self.frames / max(time.monotonic() - self._started, 1e-6)
        remaining = round(max(0, self.total - self.frames) / fps, 1) if self.total and fps else None
        return {"frames": self.frames, "total": self.total, "fps": round(fps, 2), "remaining_s": remaining}

    def _show(self) -> None:
        self._said_frames = self.frames
        self._console.progress_line(self.facts())


class TerminalProgress(FrameProgress):
    """A progress bar with rate and time left, for a person at a terminal."""

    def __init__(self, console: Console, total: int | None) -> None:
        super().__init__(console, total, interval=0.1)
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def close(self) -> None:
        """Leave the finished bar on the screen."""
        super().close()
        if self._bar is not None:
            self._bar.stop()

    def _show(self) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, Progress, TextColumn

        self._said_frames = self.frames
        facts = self.facts()
        if self._bar is None:
            columns = (BarColumn(), TextColumn("{task.fields[counts]}"), TextColumn("{task.fields[pace]}"))
            self._bar = Progress(*columns, console=RichConsole(stderr=True))
            self._task = self._bar.add_task("frames", total=self.total, counts="", pace="")
            self._bar.start()
        left = "" if facts["remaining_s"] is None else f", {plain_seconds(facts['remaining_s'])} left"
        assert self._task is not None
        self._bar.update(
            self._task,
            completed=self.frames,
            total=self.total,
            counts=f"{self.frames}/{self.total or '?'} frames",
            pace=f"{facts['fps']:.1f} fps{left}",
        )
