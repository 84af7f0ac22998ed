"""Quality of HQ training material: is it sharp, well exposed, free of compression blocks?

Three measures of a few frames, and a report that names the files which miss a limit. They judge pixels, not
content: soft art, night scenes and flat graphics are flagged too, so a person looks at what is flagged.

    blur       0 (sharp) to 1: how little a 9-tap box blur changes neighbour differences (Crete et al. 2007),
               of the sharpest tenth of 64 x 64 tiles with any contrast: a soft background is no fault
    exposure   mean luma, and the shares of luma at or beyond the ends of its range
    blocks     how much larger luma steps are across the lines of an 8-pixel grid than off it: as a ratio
               (`blockiness`, 1: no grid) and in grey levels (`block_step`). Fine JPEGs have a grid that
               nobody sees, and detailed pictures large steps: only both together are flagged. The grid may
               lie anywhere, but a rescaled video hides it, and H.264 smooths it
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from recavsr.data.folders import photo_files, video_files
from recavsr.errors import InputError
from recavsr.video.memory_codec import Planes, decode_planes

_TILE = 64
_LEAST_CONTRAST = 4.0  # deviation of a tile's luma, in grey levels; flatter tiles tell nothing of sharpness


@dataclass(frozen=True)
class Limits:
    """What is flagged: blur above; blockiness and block_step (grey levels) both above; a side (pixels) below;
    mean luma (0 to 1) outside; shares of black or of white pixels above."""

    blur: float = 0.38
    blockiness: float = 1.25
    block_step: float = 2.0
    darkest: float = 0.06
    brightest: float = 0.92
    clipped: float = 0.35
    side: int = 256


@dataclass(frozen=True)
class Quality:
    """Measures of one file, from so many of its frames; see the head of this module. `flags` names the limits
    that it misses."""

    file: str
    width: int
    height: int
    frames: int
    blur: float
    blockiness: float
    block_step: float
    mean: float
    black: float
    white: float
    flags: tuple[str, ...] = ()


def blur(luma: np.ndarray) -> float:
    """Blur of a frame's sharpest parts, 0 (sharp) to 1; luma [H, W] in 0..255. 1 if nothing has contrast."""
    picture = luma.astype(np.float32)
    worst = np.zeros_like(picture), np.zeros_like(picture)
    kept = np.zeros_like(picture), np.zeros_like(picture)
    for axis in (0, 1):
        smooth = _box(picture, axis)
        before = np.abs(np.diff(picture, axis=axis, append=picture.take([-1], axis)))
        after = np.abs(np.diff(smooth, axis=axis, append=smooth.take([-1], axis)))
        worst[axis][:], kept[axis][:] = before, np.maximum(before - after, 0)
    tall, wide = (side // _TILE * _TILE for side in luma.shape)
    if not tall or not wide:
        tiles = [(slice(None), slice(None))]
    else:
        tiles = [
            (slice(y, y + _TILE), slice(x, x + _TILE))
            for y in range(0, tall, _TILE)
            for x in range(0, wide, _TILE)
        ]
    found = []
    for tile in tiles:
        if picture[tile].std() < _LEAST_CONTRAST:
            continue
        # The more of the differences a blur removes, the sharper; the blurrier direction counts.
        lost = [kept[axis][tile].sum() / max(float(worst[axis][tile].sum()), 1e-6) for axis in (0, 1)]
        found.append(1 - min(lost))
    return float(np.quantile(found, 0.1)) if found else 1.0


def _box(picture: np.ndarray, axis: int) -> np.ndarray:
    padded = np.pad(picture, [(5, 4) if a == axis else (0, 0) for a in (0, 1)], mode="edge")
    total = padded.cumsum(axis, dtype=np.float64)
    count = picture.shape[axis]
    ends = total.take(range(9, count + 9), axis), total.take(range(count), axis)
    return ((ends[0] - ends[1]) / 9).astype(np.float32)


def blocks(luma: np.ndarray) -> tuple[float, float]:
    """How much steps on an 8-pixel grid exceed those off it, as a ratio and in grey levels; (1, 0): no grid.

    Of rows and columns, those with the larger steps.
    """
    found = [(1.0, 0.0)]
    for axis in (0, 1):
        # Second differences: a ramp has none. A grid line makes two, one on either side.
        steps = np.abs(np.diff(luma.astype(np.float32), 2, axis=axis)).mean(1 - axis)
        if len(steps) < 32:
            continue
        pairs = (steps[:-1] + steps[1:]) / 2
        by_place = np.array([np.median(pairs[place::8]) for place in range(8)])
        grid = int(by_place.argmax())
        off_grid = by_place[[(grid + k) % 8 for k in (2, 3, 4, 5, 6)]].mean()
        excess = float(by_place[grid] - off_grid)
        found.append((1 + excess / (float(off_grid) + 0.1), excess))
    return max(found, key=lambda pair: pair[1])


def measure(frames: Iterable[Planes]) -> Quality:
    """Measures of a file's frames: medians over the frames for blur and blocks, means for exposure."""
    rows, size, count = [], (0, 0), 0
    for planes in frames:
        luma, count, size = planes.luma, count + 1, planes.luma.shape
        low, high = (0, 255) if planes.full_range else (16, 235)
        black, white = ((luma <= low + 2).mean(), (luma >= high - 2).mean())
        mean = (luma.mean() - low) / (high - low)
        rows.append((blur(luma), *blocks(luma), mean, black, white))
    if not rows:
        raise InputError("there is no picture in it")
    table = np.array(rows)
    medians, means = np.median(table[:, :3], 0), table[:, 3:].mean(0)
    values: list[Any] = [round(float(value), 4) for value in (*medians, *means)]
    return Quality("", size[1], size[0], count, *values)


def flags(quality: Quality, limits: Limits) -> tuple[str, ...]:
    """The names of what misses its limit: small, blurred, blocky, dark, bright, clipped."""
    found = {
        "small": min(quality.width, quality.height) < limits.side,
        "blurred": quality.blur > limits.blur,
        "blocky": quality.blockiness > limits.blockiness and quality.block_step > limits.block_step,
        "dark": quality.mean < limits.darkest,
        "bright": quality.mean > limits.brightest,
        "clipped": max(quality.black, quality.white) > limits.clipped,
    }
    return tuple(name for name, missed in found.items() if missed)


@dataclass(frozen=True)
class QualityReport:
    """What was measured of a folder, by which limits, and what could not be read (file, reason)."""

    limits: Limits
    files: tuple[Quality, ...]
    unreadable: tuple[tuple[str, str], ...] = ()

    @property
    def flagged(self) -> tuple[Quality, ...]:
        """Files that miss a limit."""
        return tuple(quality for quality in self.files if quality.flags)

    @property
    def rejected(self) -> frozenset[Path]:
        """Flagged and unreadable files, as `data.folders.index_folders(leave_out=...)` takes them."""
        return frozenset(Path(q.file) for q in self.flagged) | {Path(file) for file, _ in self.unreadable}

    def to_json(self) -> str:
        """One JSON object; `from_json` gives an equal report."""
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> QualityReport:
        """Rebuild a report. Raises InputError for anything that is not one."""
        try:
            data = json.loads(text)
            files = (Quality(**{**item, "flags": tuple(item["flags"])}) for item in data["files"])
            unreadable = tuple((file, reason) for file, reason in data["unreadable"])
            return QualityReport(Limits(**data["limits"]), tuple(files), unreadable)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"not a quality report ({error}); `recavsr data check` writes them") from error


def check_folder(
    folder: Path,
    *,
    limits: Limits | None = None,
    frames: int = 5,
    on_file: Callable[[Quality], None] = lambda quality: None,
) -> QualityReport:
    """Measure every video file and every picture below a folder.

    frames: measured of each video, spread over it. on_file hears of each file. Raises InputError if there is
    nothing to measure.
    """
    limits = limits or Limits()
    files = [path for path in video_files(folder) if path.is_file()] + photo_files(folder)
    if not files:
        raise InputError(f"{folder}: there are no videos and no pictures in it")
    measured, unreadable = [], []
    for path in files:
        try:
            quality = measure(_spread_frames(path, frames))
        except InputError as error:
            unreadable.append((str(path.resolve()), str(error).removeprefix(f"{path}: ")))
            continue
        named = Quality(**{**asdict(quality), "file": str(path.resolve()), "flags": flags(quality, limits)})
        measured.append(named)
        on_file(named)
    return QualityReport(limits, tuple(measured), tuple(unreadable))


def _spread_frames(path: Path, frames: int) -> Iterable[Planes]:
    """Frames spread evenly over a video, in one pass that keeps twice as many as wanted at most."""
    kept: list[Planes] = []
    stride = 1
    for number, planes in enumerate(decode_planes(path)):
        if number % stride == 0:
            kept.append(planes)
            if len(kept) >= 2 * frames:
                kept, stride = kept[::2], 2 * stride
    return (
        islice(kept, frames)
        if len(kept) <= frames
        else [kept[i * len(kept) // frames] for i in range(frames)]
    )
