"""Words and arithmetic of a stream: blocks in time, grids in space. No torch here.

A stream of video frames becomes *latents* (one latent frame covers 4 video frames, the first of a
stream covers 1) and is generated in *blocks* of latents (6 first, then 2 at a time; paper, Appendix
B.3). In space a *grid* is the token rows and columns of one latent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

FRAMES_PER_LATENT = 4


def frames_of_latents(first: int, count: int) -> int:
    """Return how many video frames the latents `first .. first + count - 1` of a stream cover."""
    frames = FRAMES_PER_LATENT * count
    return frames - (FRAMES_PER_LATENT - 1) if first == 0 and count > 0 else frames


@dataclass(frozen=True)
class Block:
    """One generation step: which latents it makes and which frames they cover."""

    index: int
    first_latent: int
    latents: int
    first_frame: int
    frames: int
    valid_frames: int
    """Frames that exist; the last block of a clip repeats its last frame up to `frames`."""


@dataclass(frozen=True)
class BlockPlan:
    """How a stream is cut into blocks: `first` latents in block 0, `rest` in every later one.

    The paper's plan is 6 then 2 latents, that is 21 then 8 frames. A smaller `first` gives a lower
    latency for the first output.
    """

    first: int = 6
    rest: int = 2

    def __post_init__(self) -> None:
        if self.first < 1 or self.rest < 1:
            raise ValueError(f"a block needs at least one latent, got first={self.first}, rest={self.rest}")

    def latents(self, index: int) -> int:
        """Return the number of latents of block `index`."""
        return self.first if index == 0 else self.rest

    def first_latent(self, index: int) -> int:
        """Return the absolute position of the first latent of block `index`."""
        return 0 if index == 0 else self.first + (index - 1) * self.rest

    def frames(self, index: int) -> int:
        """Return the number of video frames of block `index` (21 or 8 in the paper's plan)."""
        return frames_of_latents(self.first_latent(index), self.latents(index))

    def cut(self, latents: int) -> tuple[tuple[int, ...], ...]:
        """Return the positions of a clip's latents, block by block; the last block may be short."""
        starts = [0, *range(self.first, latents, self.rest)] if latents > 0 else []
        return tuple(tuple(range(a, min(b, latents))) for a, b in zip(starts, [*starts[1:], latents]))

    def first_frame(self, index: int) -> int:
        """Return the absolute index of the first video frame of block `index`."""
        return frames_of_latents(0, self.first_latent(index))

    def block_count(self, frame_count: int) -> int:
        """Return how many blocks a clip of `frame_count` frames needs."""
        if frame_count <= 0:
            return 0
        head = self.frames(0)
        return 1 + max(0, math.ceil((frame_count - head) / (FRAMES_PER_LATENT * self.rest)))

    def blocks(self, frame_count: int) -> Iterator[Block]:
        """Yield the blocks of a clip of `frame_count` frames (any count; the last one may be padded)."""
        for index in range(self.block_count(frame_count)):
            start, frames = self.first_frame(index), self.frames(index)
            yield Block(
                index=index,
                first_latent=self.first_latent(index),
                latents=self.latents(index),
                first_frame=start,
                frames=frames,
                valid_frames=min(frames, frame_count - start),
            )


PLAN = BlockPlan()
"""The paper's plan."""


@dataclass(frozen=True)
class Grid:
    """Rows and columns of something laid over a picture: latents or tokens."""

    height: int
    width: int

    def __post_init__(self) -> None:
        if self.height < 1 or self.width < 1:
            raise ValueError(f"a grid needs at least one row and one column, got {self.height}x{self.width}")

    @property
    def cells(self) -> int:
        """Return rows times columns."""
        return self.height * self.width


def scaled_size(height: int, width: int, scale: float) -> tuple[int, int]:
    """Return the output size: floor(side x scale + 0.5) for each side."""
    return math.floor(height * scale + 0.5), math.floor(width * scale + 0.5)


NATIVE_ENOUGH = 7 / 8
"""Outputs of at least this share of what a model was trained to make are made at their own size."""


LARGEST_DETOUR = 4_500_000
"""Pixels of the largest frames that are made at once only to be made smaller: beyond, strip by strip."""

STRIP_OVERLAP = 16
"""Rows of LR frames that neighbouring strips share at least."""


def native_size(lr_size: tuple[int, int], out_size: tuple[int, int], native_scale: float) -> tuple[int, int]:
    """Return the size (height, width) at which a model of that native scale would make an output best.

    It is the output's; but where a side of the output is clearly smaller than the LR frames' times the native
    scale, it is these. A native scale of 0 has no such limit.
    """
    native = scaled_size(*lr_size, native_scale)
    if all(out >= NATIVE_ENOUGH * side for out, side in zip(out_size, native)):
        return out_size
    return max(out_size[0], native[0]), max(out_size[1], native[1])


@dataclass(frozen=True)
class Strip:
    """Rows of a stream that a model makes as a stream of their own: all of them, or some."""

    rows: range  # of the LR frames
    out_rows: range  # of the output, all that these rows show
    work_size: tuple[int, int]  # (height, width) at which the model makes them


def strips_of(
    lr_size: tuple[int, int], out_size: tuple[int, int], native_scale: float, *, direct: bool = False
) -> tuple[Strip, ...]:
    """Return how a model makes an output: at `native_size`, if that is too large in strips that overlap.

    Strips are of one size, and begin where a row of the output begins. Where no such places are, and with
    `direct`, the whole is made at the output's size.
    """
    size = out_size if direct else native_size(lr_size, out_size, native_scale)
    if size != out_size and size[0] * size[1] > LARGEST_DETOUR:
        ratio = Fraction(out_size[0], lr_size[0])
        # Of a strip's rows; one row of the size is kept for rounding.
        longest = (LARGEST_DETOUR // size[1] - 1) * lr_size[0] // size[0]
        if rows := _overlapping(lr_size[0], longest, ratio.denominator):
            shown = [range(int(r.start * ratio), int(r.stop * ratio)) for r in rows]
            size = native_size((len(rows[0]), lr_size[1]), (len(shown[0]), out_size[1]), native_scale)
            return tuple(Strip(*pair, size) for pair in zip(rows, shown))
        size = out_size
    return (Strip(range(lr_size[0]), range(out_size[0]), size),)


def _overlapping(extent: int, longest: int, step: int) -> list[range]:
    """Return ranges of one length, at most `longest`, that cover `extent`, all in multiples of `step`.

    Neighbours share `STRIP_OVERLAP` at least, and others nothing. There are none where that can't be done.
    """
    overlap, longest = _rounded_up(STRIP_OVERLAP, step), longest // step * step
    if longest < 4 * overlap:
        return []
    count = -(-(extent - overlap) // (longest - overlap))
    length = _rounded_up(-(-(extent - overlap) // count) + overlap, step)
    starts = [min(index * (length - overlap), extent - length) for index in range(count)]
    if starts[-1] - starts[-2] < length // 2:
        return []
    return [range(start, start + length) for start in starts]


def working_size(
    lr_size: tuple[int, int], out_size: tuple[int, int], native_scale: float, *, direct: bool = False
) -> tuple[int, int]:
    """Return the size (height, width) at which a model makes frames, all `strips_of` them together."""
    strips = strips_of(lr_size, out_size, native_scale, direct=direct)
    return strips[0].work_size if len(strips) == 1 else native_size(lr_size, out_size, native_scale)


def padded_size(height: int, width: int, multiple: int) -> tuple[int, int]:
    """Return the size padded at the bottom and right to a multiple of `multiple` pixels."""
    return _rounded_up(height, multiple), _rounded_up(width, multiple)


def _rounded_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
