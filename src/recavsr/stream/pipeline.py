"""Three stages at once: reading, the model, writing. Bounded queues keep memory flat for any length.

The model runs in the caller's thread. An error or an interrupt in any stage stops the others and is
raised once, in the caller.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

import numpy as np

from recavsr.stream.session import Session
from recavsr.video.frames import Frame, Packet, Passed, Stamp
from recavsr.video.writer import Writer

Item = TypeVar("Item")

_DECODED_AHEAD = 16
_ENCODE_BEHIND = 8
_POLL_SECONDS = 0.1
MARK_FRAMES = 120
"""Inside a shot, a run can be continued about every so many frames; it costs a key frame each time."""
_READER_PATIENCE_SECONDS = 2.0
ENCODER_NICENESS = 5
"""How much an encoder gives way to a model on the same processor: a quarter of a core that both want is its.

At 19 it had 1.4 %: beside two programs that used both cores, a run took three times as long as at 0.
"""


Read = Frame | Passed | Packet


class Upscaler(Protocol):
    """What the pipeline needs of a session: frames in, finished blocks out ([N, H, W, 3] arrays)."""

    cuts: list[int]
    pushed: int

    def push(self, frames: np.ndarray, /) -> list[np.ndarray]:
        """Take LR frames, return the finished blocks."""
        ...

    def cut(self) -> list[np.ndarray]:
        """End the shot, return what is left of it."""
        ...

    def flush(self) -> list[np.ndarray]:
        """End the stream, return what is left."""
        ...

    def fork(self) -> Session:
        """Return a session that stays as this one is now."""
        ...

    def at_cut(self, cut: int, /) -> Session:
        """Return a session that stands at one of the cuts so far."""
        ...


@dataclass(frozen=True)
class Mark:
    """A place between two blocks where a run can be continued, or taken up by another: the session there, if
    it was wanted, and the frames so far. Marks lie at every cut, and in a shot at block ends `MARK_FRAMES`
    apart: where they lie in a shot depends on that shot alone.
    """

    session: Session | None
    frames: int


class Stopped(Exception):
    """Another stage failed; this one just ends."""


class Channel(Generic[Item]):
    """A bounded queue between two threads that ends, and wakes up when the pipeline stops."""

    def __init__(self, capacity: int, stop: threading.Event) -> None:
        self._queue: queue.Queue[tuple[bool, Item | None]] = queue.Queue(capacity)
        self._stop = stop

    def put(self, item: Item) -> None:
        """Hand over an item, waiting for room."""
        self._put((True, item))

    def close(self) -> None:
        """Say that nothing more comes."""
        self._put((False, None))

    def drain(self) -> None:
        """Wait until the other thread is done with all items so far."""
        with self._queue.all_tasks_done:
            while self._queue.unfinished_tasks:
                if self._stop.is_set():
                    raise Stopped
                self._queue.all_tasks_done.wait(_POLL_SECONDS)

    def _put(self, entry: tuple[bool, Item | None]) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(entry, timeout=_POLL_SECONDS)
                return
            except queue.Full:
                continue
        raise Stopped

    def __iter__(self) -> Iterator[Item]:
        while True:
            if self._stop.is_set():
                raise Stopped
            try:
                more, item = self._queue.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if not more:
                return
            yield item  # type: ignore[misc]
            self._queue.task_done()


@dataclass(frozen=True)
class Hooks:
    """What a run wants to be asked or told."""

    on_frames: Callable[[Timing], None] | None = None
    """Told after every block, in the caller's thread."""
    starts_shot: Callable[[Stamp], bool] | None = None
    """Asked once for each frame, in order: is the session cut before it?"""
    on_mark: Callable[[Mark], None] | None = None
    """Told of every mark, in the writing thread, when the writer holds all frames up to there."""
    wants_session: Callable[[], bool] = lambda: False
    """Asked at every mark, in the caller's thread: is its session wanted, with a copy of the whole state?"""
    writing_gives_way: bool = False
    """Encode in time that the model leaves: for one that computes on the same processor."""
    writes_between_blocks: bool = False
    """Begin a block when the one before is written: for a model on few cores, which then encode together."""


@dataclass
class Timing:
    """Seconds that each stage worked (they overlap); frames that were passed over, read, written.

    `waited_for_input` and `waited_for_output` are seconds in which the model stood still: nothing was decoded
    yet, or nothing could be handed over. `model_span` is all of its time, from the start to its last frame.
    """

    decode: float = 0.0
    model: float = 0.0
    encode: float = 0.0
    waited_for_input: float = 0.0
    waited_for_output: float = 0.0
    model_span: float = 0.0
    frames_passed: int = 0
    frames_read: int = 0
    frames_written: int = 0

    @property
    def starved(self) -> float:
        """Return the share of the model's time in which it waited for input or output, 0 to 1."""
        waited = self.waited_for_input + self.waited_for_output
        return waited / self.model_span if self.model_span > 0 else 0.0


@dataclass
class _Shared:
    stop: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        if self.error is None and not isinstance(error, Stopped):
            self.error = error
        self.stop.set()


def run_pipeline(
    items: Iterable[Read],
    session: Upscaler,
    writer: Writer,
    hooks: Hooks = Hooks(),
) -> Timing:
    """Read `items`, upscale the frames, write them with their times, and finish the writer.

    Returns the timing. Raises what any stage raised, after the others have ended.
    """
    shared, timing = _Shared(), Timing()
    decoded: Channel[Read] = Channel(_DECODED_AHEAD, shared.stop)
    upscaled: Channel[Read | Mark] = Channel(_ENCODE_BEHIND, shared.stop)
    reading = threading.Thread(
        target=_guarded, args=(shared, _read, items, decoded, timing), name="recavsr-read", daemon=True
    )
    writing = threading.Thread(
        target=_guarded,
        args=(shared, _write, writer, upscaled, timing, hooks),
        name="recavsr-write",
        daemon=True,
    )
    reading.start()
    writing.start()
    try:
        _upscale(session, decoded, upscaled, timing, hooks)
        writing.join()
    except BaseException as error:
        shared.fail(error)
    finally:
        shared.stop.set()
        writing.join()
        reading.join(_READER_PATIENCE_SECONDS)  # it may hang in a pipe that sends nothing
    if shared.error is not None:
        raise shared.error
    return timing


def _guarded(shared: _Shared, stage: Callable[..., None], *arguments: object) -> None:
    try:
        stage(*arguments)
    except BaseException as error:
        shared.fail(error)


def _read(items: Iterable[Read], decoded: Channel[Read], timing: Timing) -> None:
    iterator = iter(items)
    while True:
        began = time.perf_counter()
        item = next(iterator, None)
        timing.decode += time.perf_counter() - began
        if item is None:
            break
        timing.frames_read += isinstance(item, Frame)
        decoded.put(item)
    decoded.close()


def _upscale(
    session: Upscaler,
    decoded: Channel[Read],
    upscaled: Channel[Read | Mark],
    timing: Timing,
    hooks: Hooks,
) -> None:
    started = time.perf_counter()
    waiting: deque[Frame] = deque()  # frames inside the session, without their pixels
    made = marked = 0
    begun = session.pushed

    def mark() -> None:
        nonlocal marked
        if hooks.on_mark is None or made == marked:
            return
        at_cut = begun + made in session.cuts
        if not at_cut and (made - marked < MARK_FRAMES or waiting):
            return
        here = None
        if hooks.wants_session():
            here = session.at_cut(begun + made) if at_cut else session.fork()
        marked = made
        upscaled.put(Mark(here, timing.frames_passed + made))

    def hand_over(item: Read | Mark) -> None:
        began = time.perf_counter()
        upscaled.put(item)
        timing.waited_for_output += time.perf_counter() - began

    def next_item() -> Read | None:
        began = time.perf_counter()
        item = next(items, None)
        timing.waited_for_input += time.perf_counter() - began
        return item

    items = iter(decoded)

    def emit(make_blocks: Callable[[], list[np.ndarray]]) -> None:
        nonlocal made
        began = time.perf_counter()
        blocks = make_blocks()
        timing.model += time.perf_counter() - began
        for block in blocks:
            for pixels in block:
                origin = waiting.popleft()
                hand_over(replace(origin, pixels=pixels))
            made += len(block)
            mark()
            if hooks.on_frames is not None:
                hooks.on_frames(timing)
        mark()  # a cut can show only now that the block before it was the last of its shot
        if blocks and hooks.writes_between_blocks:
            # Otherwise a thread that shares its core with the encoder holds up all the model's threads.
            began = time.perf_counter()
            upscaled.drain()
            timing.waited_for_output += time.perf_counter() - began

    while (item := next_item()) is not None:
        if isinstance(item, Packet):
            hand_over(item)
            continue
        if hooks.starts_shot is not None and hooks.starts_shot(item.stamp) and isinstance(item, Frame):
            emit(session.cut)
        if isinstance(item, Passed):
            timing.frames_passed += 1
            hand_over(item)
            continue
        waiting.append(replace(item, pixels=_NO_PIXELS))
        emit(partial(session.push, item.pixels[None]))
    emit(session.flush)
    timing.model_span = time.perf_counter() - started
    assert not waiting, f"{len(waiting)} frames went in and did not come out"
    upscaled.close()


_NO_PIXELS = np.empty((0, 0, 3), np.uint8)


def _give_way() -> None:
    """Let other threads go before this one and those that it starts, where a thread has a priority.

    A product ends when the slowest of the model's threads is done: an encoder that takes one core for a while
    makes the others wait.
    """
    if sys.platform == "linux":  # elsewhere it would be the whole process
        this = (os.PRIO_PROCESS, threading.get_native_id())
        with suppress(OSError):
            os.setpriority(*this, os.getpriority(*this) + ENCODER_NICENESS)


def _write(writer: Writer, upscaled: Channel[Read | Mark], timing: Timing, hooks: Hooks) -> None:
    if hooks.writing_gives_way:
        _give_way()
    for item in upscaled:
        began = time.perf_counter()
        if isinstance(item, Frame):
            writer.write(item)
            timing.frames_written += 1
        elif isinstance(item, Passed):
            writer.pass_over(item.stamp)
        elif isinstance(item, Mark):
            writer.mark()
            if hooks.on_mark is not None:
                hooks.on_mark(item)
        else:
            writer.copy(item)
        timing.encode += time.perf_counter() - began
    began = time.perf_counter()
    writer.finish()
    timing.encode += time.perf_counter() - began
