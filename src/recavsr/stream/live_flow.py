"""Parts of a live run that need no source: its clock, what waits for the model, latencies, backoff."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

from recavsr.video.frames import Stamp
from recavsr.video.info import VideoInfo
from recavsr.video.live_sink import TIME_BASE
from recavsr.video.live_source import LiveFrame, SoundPacket, SoundTrack

Late = Literal["drop", "wait", "lower"]
"""What happens where the model is slower than the source."""

_CLOCK_JUMP = Fraction(10)  # seconds that the source's clock may run ahead of what was waited
_CLOCK_REPAIR = Fraction(1, 2)  # seconds that a picture may come too early without meaning a new clock
_REPLAYED = Fraction(30)  # seconds that a playlist may give once more to who comes back to it
_POLL_SECONDS = 0.1


class LatencyHistogram:
    """Counts latencies in steps of 2 %: percentiles of any number of frames in a fixed amount of memory."""

    _STEP, _SMALLEST = math.log(1.02), 1e-4

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.count, self.largest = 0, 0.0

    def add(self, seconds: float) -> None:
        """Count one frame."""
        step = math.ceil(math.log(max(seconds, self._SMALLEST) / self._SMALLEST) / self._STEP)
        self._counts[step] = self._counts.get(step, 0) + 1
        self.count, self.largest = self.count + 1, max(self.largest, seconds)

    def percentile(self, percent: float) -> float:
        """Return the latency in seconds that `percent` % of the frames do not exceed (0 without frames)."""
        wanted, seen = percent / 100 * self.count, 0
        for step in sorted(self._counts):
            seen += self._counts[step]
            if seen >= wanted:
                return min(self.largest, self._SMALLEST * math.exp(step * self._STEP))
        return self.largest

    def facts(self) -> dict[str, float]:
        """Return p50, p95 and max in milliseconds."""
        p50, p95 = (round(1000 * self.percentile(percent), 1) for percent in (50, 95))
        return {"p50_ms": p50, "p95_ms": p95, "max_ms": round(1000 * self.largest, 1)}


class Backoff:
    """Waits between attempts: twice as long each time, up to a cap, until `limit` seconds have passed."""

    FIRST, LONGEST = 0.25, 8.0

    def __init__(self, limit: float) -> None:
        self._limit, self._began = limit, time.monotonic()
        self.attempts = 0

    @property
    def left(self) -> float:
        """Return the seconds that are left for attempts."""
        return max(0.0, self._limit - (time.monotonic() - self._began))

    def next_wait(self) -> float:
        """Count an attempt; return the seconds to wait before it."""
        wait = min(self.LONGEST, self.FIRST * 2**self.attempts)
        self.attempts += 1
        return min(wait, self.left)


class Timeline:
    """Places the source's times on the output's clock.

    More than `patience` seconds without a picture are a drop-out: by the source's clock, or where it has no
    clock of its own (y4m in a pipe) by ours.
    """

    def __init__(self, patience: float, *, own_clock: bool = True) -> None:
        self._patience, self._own_clock = patience, own_clock
        self.offset: Fraction | None = None
        """What is added to the source's times; None while the connection has shown no picture yet."""
        self.began = Fraction(0)
        """When the first picture of the connection is shown in the output."""
        self._last: LiveFrame | None = None  # at the source's time
        self._begin = Fraction(0)  # when it is shown in the output
        self._arrived = 0.0

    @property
    def now(self) -> float:
        """Return the time in the output of the last picture, in seconds."""
        return float(self._begin)

    def lose(self) -> None:
        """Note that the connection is lost: its successor has a clock of its own."""
        self.offset = None

    def replays(self, frame: LiveFrame) -> bool:
        """Say whether a frame lies in the stretch that was shown last, by the source's own clock."""
        return self._last is not None and 0 <= self._last.stamp.time - frame.stamp.time < _REPLAYED

    def place(self, frame: LiveFrame, arrived: float) -> tuple[LiveFrame, float]:
        """Return the frame at its time in the output, and the seconds of the drop-out before it (0: none).

        A frame with a new clock, of a new connection or of a source that began anew, is placed as late after
        its predecessor as it came (`arrived`, in seconds of any clock that does not jump).
        """
        here, length = frame.stamp.time, frame.stamp.duration * frame.stamp.time_base
        gap = 0.0
        if self._last is None:
            self.offset, begin = -here, Fraction(0)
        else:
            passed = here - self._last.stamp.time
            if self._own_clock and arrived - self._arrived > self._patience / 2 > passed >= 0:
                # a demuxer holds the last picture back until the connection is given up
                arrived = self._arrived + float(passed)
            waited = Fraction(max(0.0, arrived - self._arrived)).limit_denominator(90_000)
            tick = self._begin + TIME_BASE
            if self.offset is None or passed <= -_CLOCK_REPAIR or passed > waited + _CLOCK_JUMP:
                begin = self._begin + max(length, waited)
                self.offset, self.began, gap = begin - here, begin, float(waited)
            else:
                begin = max(tick, here + self.offset)
                silent = float(passed if self._own_clock else max(passed, waited))
                gap = silent if silent > self._patience else 0.0
        self._last, self._begin, self._arrived = frame, begin, arrived
        pts, duration = round(begin / TIME_BASE), max(1, round(length / TIME_BASE))
        return replace(frame, stamp=Stamp(pts, duration, TIME_BASE)), gap


@dataclass(frozen=True)
class Connection:
    """The source is there: what it shows and what sounds in it."""

    info: VideoInfo
    tracks: tuple[SoundTrack, ...]


@dataclass(frozen=True)
class Gap:
    """Here the stream was interrupted."""


Item = Connection | Gap | LiveFrame | SoundPacket


class Inbox:
    """What has arrived and waits for the model: a bounded number of frames, and the sound between them.

    Where the model is late, `wait` lets the source wait. `drop` takes only as many frames as the model can do
    (`pace`, seconds a frame), evenly in time; where more wait than the model works off in a second, the
    oldest are left out. A model that waits for a frame gets the next one, whatever its pace was: one slow
    block says nothing of those after it. `lower` takes every frame as long as there is room.
    """

    LARGEST = 48  # frames

    def __init__(self, late: Late, block: int, stop: threading.Event) -> None:
        self._late, self._block, self._stop = late, block, stop
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._due = -math.inf
        self._closed = self._idle = False
        self.pace = 0.0
        self.frames = self.dropped = 0

    @property
    def capacity(self) -> int:
        """Return how many frames may wait."""
        if self._late == "wait":
            return 2 * self._block
        if self._late == "lower" or self.pace * self.LARGEST <= 1:
            return self.LARGEST
        return max(self._block, int(1 / self.pace))

    @property
    def backlog(self) -> int:
        """Return how many frames wait beyond two blocks."""
        return max(0, self.frames - 2 * self._block)

    @property
    def ended(self) -> bool:
        """Return whether everything was taken and nothing more comes."""
        return self._closed and not self._items

    def put(self, item: Item) -> None:
        """Hand over an item; with `wait` it may take a while."""
        with self._changed:
            if isinstance(item, LiveFrame):
                while self._late == "wait" and self.frames >= self.capacity and not self._stop.is_set():
                    self._changed.wait(_POLL_SECONDS)
                if self._late == "drop" and not self._in_time(item.stamp):
                    self.dropped += 1
                    return
                while self.frames >= self.capacity:
                    self._drop_oldest()
                self.frames += 1
            self._items.append(item)
            self._changed.notify_all()

    def close(self) -> None:
        """Say that nothing more comes."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take(self) -> Item | None:
        """Return the next item; None if there is none for a moment, or at the end."""
        with self._changed:
            if not self._items and not self._closed:
                self._idle = True
                self._changed.wait(_POLL_SECONDS)
            if not self._items:
                return None
            item = self._items.popleft()
            self.frames -= isinstance(item, LiveFrame)
            self._changed.notify_all()
            return item

    def _in_time(self, stamp: Stamp) -> bool:
        """Say whether the model has time for a frame of this moment."""
        moment, length = float(stamp.time), stamp.duration * float(stamp.time_base)
        if self._idle or self._due == -math.inf:
            self._idle, self._due = False, moment + self.pace
            return True
        if moment < self._due - 1e-3:
            return False
        self._due = max(self._due, moment - length) + self.pace
        return True

    def _drop_oldest(self) -> None:
        oldest = next(at for at, item in enumerate(self._items) if isinstance(item, LiveFrame))
        del self._items[oldest]
        self.frames -= 1
        self.dropped += 1


class Ladder:
    """How much work the model gets: level 0 the asked size, 1 half of that it works at, 2 plain resizing.

    It goes down where frames pile up and their number does not fall, and up after a calm time, which doubles
    with every attempt that brought it down again at once.
    """

    NAMES = ("full size", "half size", "plain resizing")
    CALM, LONGEST_CALM = 10.0, 160.0

    def __init__(self) -> None:
        self.level = self._backlog = 0
        self._calm = self.CALM
        self._since = self._raised_at = -math.inf

    def after_block(self, backlog: int, now: float) -> bool:
        """Take note of the frames that wait beyond what is usual; return whether the level changed."""
        grows, self._backlog = 0 < backlog >= self._backlog, backlog
        if backlog:
            self._since = now
        if grows and self.level < len(self.NAMES) - 1:
            relapse = now - self._raised_at < self.CALM
            self._calm = min(self.LONGEST_CALM, 2 * self._calm) if relapse else self.CALM
            self.level += 1
            return True
        if self.level and now - self._since >= self._calm:
            self.level -= 1
            self._since = self._raised_at = now
            return True
        return False
