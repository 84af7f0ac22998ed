"""Scene cuts: found in the frames by a causal detector, or named by an edit list.

A cut is where a frame can't be explained by the one before it: not by motion, not by a change of brightness.
Small pictures are compared block by block. For each block the best match of the other picture within a
search range is taken, with a gain and an offset of its own; the part of the deviation that no match explains
says how new the picture is (0 the same, 1 unrelated). A picture that is new, far off in colour, and newer
than its neighbours in time (fast action makes every picture new) is a cut.

Flashes are no cuts: the picture returns within `FLASH_FRAMES`. Cross-fades are none: no step of theirs is
large. The detector sees the frames of one block of the stream and what it remembers of the shot, nothing
later: in the last frames of a block, where it can't see whether the picture returns, a flash counts as a cut.
"""

from __future__ import annotations

import itertools
import os
import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recavsr.errors import InputError
from recavsr.state import State
from recavsr.stream.blocks import full_scale
from recavsr.video.frames import Stamp
from recavsr.video.reader import parse_time

THRESHOLD = 3.5
"""`change` from which on a picture may be a cut; benchmarks/results/scene_cuts.json says what that gives."""

PROMINENCE = 1.3
"""A cut's change is so many times that of its neighbours: the largest of 3 before, the mean of 2 after."""

FLASH_FRAMES = 2
"""A picture that is back after at most so many frames was interrupted by a flash, not by a shot."""

_BEFORE, _AFTER = 3, 2
_SIDE = 48  # pixels of the longer side of a thumbnail, about
_BLOCK = 8
_REACH = 5  # pixels: a tenth of the picture from one frame to the next
_GAINS = (0.5, 2.0)
_NOISE = 4.0  # variance that means nothing
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)

Thumbnail = np.ndarray


def thumbnail(frame: np.ndarray) -> Thumbnail:
    """Return a frame [H, W, 3], uint8 or uint16, as a small picture [h, w, 3] in float32, 0 to 255."""
    factor = max(1, max(frame.shape[:2]) // _SIDE)
    # Four samples a side are enough for a mean; reading every pixel would cost more than all the rest.
    step = max(1, factor // 4)
    pool = max(1, factor // step)
    samples = frame[::step, ::step]
    pool = min(pool, *samples.shape[:2])
    height, width = (side // pool for side in samples.shape[:2])
    total = np.zeros((height, width, 3), np.float32)
    for y, x in np.ndindex(pool, pool):  # several times faster than a mean over a reshaped view
        total += samples[y : height * pool : pool, x : width * pool : pool]
    return total * np.float32(255 / (full_scale(frame.dtype) * pool * pool))


def change(before: Thumbnail, after: Thumbnail) -> float:
    """Return how new a picture is (0 to 1), times the square root of its mean difference in levels.

    A difference that can't reach the threshold counts as 0.
    """
    difference = float(np.abs(after - before).mean())
    if difference < THRESHOLD**2:  # most frames end here
        return 0.0
    old, new = before @ _LUMA, after @ _LUMA
    # A flat picture says nothing about structure; between two of them only the colour is left.
    told = [_unexplained(*pair) for pair in ((old, new), (new, old)) if pair[1].var() > _NOISE]
    newness = sum(told) / len(told) if told else 1.0
    return newness * difference**0.5


def _unexplained(reference: np.ndarray, picture: np.ndarray) -> float:
    """Return which part (0 to 1) of the picture's deviation no match in the reference explains."""
    height, width = picture.shape
    side_y, side_x = min(_BLOCK, height), min(_BLOCK, width)
    rows, columns = height // side_y, width // side_x
    area, shifts = side_y * side_x, 2 * _REACH + 1
    padded = np.pad(reference[: rows * side_y, : columns * side_x], _REACH, mode="edge")
    down, across = padded.strides
    matches = np.lib.stride_tricks.as_strided(
        padded,
        (rows, columns, shifts, shifts, side_y, side_x),
        (down * side_y, across * side_x, down, across, down, across),
        writeable=False,
    ).reshape(rows * columns, shifts * shifts, area)
    tiles = picture[: rows * side_y, : columns * side_x].reshape(rows, side_y, columns, side_x)
    tiles = tiles.transpose(0, 2, 1, 3)
    blocks = (tiles - tiles.mean((2, 3), keepdims=True)).reshape(rows * columns, area, 1)
    covariance = (matches @ blocks)[..., 0] / area
    variance = np.einsum("bsp,bsp->bs", matches, matches) / area - matches.mean(2) ** 2
    own = (blocks * blocks).mean((1, 2))
    gain = np.clip(covariance / np.maximum(variance, 1e-3), *_GAINS)
    left = own[:, None] - 2 * gain * covariance + gain * gain * variance
    return float(np.sqrt(left.min(1).clip(0).mean() / (own.mean() + _NOISE)))


@dataclass(frozen=True)
class ShotMemory(State):
    """What the detector remembers of the shot so far: its last picture and its latest changes."""

    last: Tensor | None = None  # [h, w, 3], a thumbnail
    changes: tuple[float, ...] = ()

    def after(self, pictures: Sequence[Thumbnail]) -> ShotMemory:
        """Return the memory after a block of pictures, all of this shot."""
        known = self._with(pictures)
        changes = [change(*pair) for pair in zip(known[-_BEFORE - 1 : -1], known[-_BEFORE:])]
        return ShotMemory(torch.from_numpy(known[-1]), (*self.changes, *changes)[-_BEFORE:])

    def first_cut(self, pictures: Sequence[Thumbnail]) -> int | None:
        """Return the index of the first of a block's pictures that starts a new shot, or None."""
        known = self._with(pictures)
        offset = len(known) - len(pictures)
        # changes[i] leads from known[i - 1] to known[i]; those of the memory come before index 1
        changes = [change(before, after) for before, after in itertools.pairwise(known)]
        earlier = [*self.changes, *changes]
        index = 1
        while index < len(known):
            here = changes[index - 1]
            if here >= THRESHOLD:
                back = _return_from_flash(known, index)
                if back is not None:
                    index = back + 1
                    continue
                place = len(self.changes) + index - 1
                before, after = earlier[max(0, place - _BEFORE) : place], earlier[place + 1 :][:_AFTER]
                rises = bool(after) and after[0] >= here  # the next picture is newer still: it decides
                around = max(max(before, default=0.0), sum(after) / max(1, len(after)))
                if not rises and here >= PROMINENCE * around:
                    return index - offset
            index += 1
        return None

    def _with(self, pictures: Sequence[Thumbnail]) -> list[Thumbnail]:
        return [*([] if self.last is None else [self.last.cpu().numpy()]), *pictures]


def _return_from_flash(pictures: Sequence[Thumbnail], index: int) -> int | None:
    """Return where the picture before `index` is back, within a flash's length, or None."""
    ahead = range(index + 1, min(index + 1 + FLASH_FRAMES, len(pictures)))
    return next((at for at in ahead if change(pictures[index - 1], pictures[at]) < THRESHOLD), None)


class EditList:
    """The cuts that a file names: one a line, as a frame number (from 0) or a time in the source.

    `74` is a frame number; a time has a colon or a point: `0:02.96`, `2.96`. Each is where a shot starts.
    Empty lines and what follows a `#` are left out. A time means the frame that starts nearest to it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not text"
            raise InputError(f"cuts: {path} can't be read ({reason}); give auto, off or a file") from None
        self.path = str(path)
        self.frames: set[int] = set()
        times: set[Fraction] = set()
        for number, line in enumerate(lines, 1):
            entry = line.split("#")[0].strip()
            if not entry:
                continue
            if re.fullmatch(r"\d+", entry):
                self.frames.add(int(entry))
                continue
            try:
                times.add(parse_time(entry, "a cut"))
            except InputError:
                raise InputError(
                    f"{path}, line {number}: {entry!r} is not a frame number like 74 or a time like 0:02.96"
                ) from None
        self.times = sorted(times)
        self._number, self._passed = 0, 0

    def entries(self) -> list[int | str]:
        """Return what the list holds, in order."""
        return [*sorted(self.frames), *map(str, self.times)]

    def beyond(self) -> int:
        """Return how many entries lie behind the last frame that was asked for."""
        return sum(frame >= self._number for frame in self.frames) + len(self.times) - self._passed

    def starts_shot(self, stamp: Stamp, shift: Fraction) -> bool:
        """Say whether the next frame of the source starts a shot; `shift` was added to its time."""
        named = self._number in self.frames
        self._number += 1
        middle = stamp.time - shift + stamp.duration * stamp.time_base / 2
        passed = bisect_left(self.times, middle)
        timed, self._passed = passed > self._passed, max(passed, self._passed)
        return named or timed
