"""HQ training clips, drawn as small specs and rendered on demand on CPU or GPU.

A `ClipSource` holds all decoded pixels of a pack (`data.pack`) in one flat uint8 buffer, a file in
memory that worker processes share and that a trainer copies to its GPU. A `ClipSpec` says how one
clip comes out of it: a crop of a shot, mirrored in time and space, or a photo seen by a moving
camera, at times with another photo cut out in front. `ClipSource.render` makes the clip on the CPU;
`render_table` makes batches of windows of clips on any device, from the same numbers.

Photos are stored at twice their size, every other sample being the photo's own: linear sampling of
that grid is sharp at any sub-pixel position. Level 0 is the photo, level 1 its half.

T frames, H W rows and columns of the clip, h w rows and columns of a stored plane.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor
from torch.nn import functional as F

from recavsr.data.pack import PackedPhoto, PackedVideo, PackIndex
from recavsr.data.processes import spread_over
from recavsr.errors import InputError
from recavsr.video.memory_codec import Planes, decode_planes

_CELL = 32  # pixels a side of the cells in which detail is measured
_LEVELS = 2
_CACHE_FORMAT = 1  # raise it when the same pack is to be decoded into other pixels


STILL_FRACTION = 0.12
"""Share of photo clips whose camera stands still."""

_FREE_SCALE = (0.7, 1.2)
"""Photo pixels per clip pixel of clips that are drawn freely: softer than the photo, to hardly aliased."""

CropSize = int | tuple[int, int]
"""Rows and columns of a crop, or the side of a square one. Only square crops are ever transposed."""


def rows_and_columns(size: CropSize) -> tuple[int, int]:
    """The rows and columns of a crop."""
    return (size, size) if isinstance(size, int) else size


# ---------------------------------------------------------------- specs


@dataclass(frozen=True)
class CameraMotion:
    """Where a camera looks at frame t, in pixels of a photo's level.

    centre = (x, y) + velocity * time(t) + shake, scale * exp(zoom t) photo pixels per clip pixel,
    rotation angle + spin t. `pause` (first, last): the pan runs only between these frames, with soft
    starts. shake: (amplitude x, amplitude y, amplitude of rotation, cycles a frame, phase) each.
    """

    level: int
    x: float
    y: float
    velocity_x: float = 0.0
    velocity_y: float = 0.0
    pause: tuple[float, float] | None = None
    scale: float = 1.0
    zoom: float = 0.0
    angle: float = 0.0
    spin: float = 0.0
    shake: tuple[tuple[float, float, float, float, float], ...] = ()

    def matrices(self, frames: int, size: CropSize, mirror: tuple[bool, bool, bool]) -> np.ndarray:
        """Maps from clip pixel (column, row, 1) to photo pixel (x, y): float64 [T, 2, 3].

        mirror: flip left-right, flip up-down, transpose (the flips act on the transposed clip).
        """
        t = np.arange(frames, dtype=np.float64)
        time = t
        if self.pause is not None:
            first, last = self.pause
            share = np.clip((t - first) / (last - first), 0, 1)
            time = (last - first) * share**2 * (3 - 2 * share)
        x, y, angle = (
            self.x + self.velocity_x * time,
            self.y + self.velocity_y * time,
            self.angle + self.spin * t,
        )
        for amplitude_x, amplitude_y, amplitude_angle, rate, phase in self.shake:
            wave = np.sin(2 * np.pi * (rate * t + phase))
            x, y = x + amplitude_x * wave, y + amplitude_y * np.sin(2 * np.pi * (rate * 1.31 * t + 2 * phase))
            angle = angle + amplitude_angle * wave
        scale = self.scale * np.exp(self.zoom * t)
        cos, sin = scale * np.cos(angle), scale * np.sin(angle)
        result = np.empty((frames, 2, 3))
        result[:, 0, 0], result[:, 0, 1] = cos, -sin
        result[:, 1, 0], result[:, 1, 1] = sin, cos
        flip_x, flip_y, transpose = mirror
        if transpose:
            result[:, :, :2] = result[:, :, [1, 0]]
        if flip_x:
            result[:, :, 0] *= -1
        if flip_y:
            result[:, :, 1] *= -1
        rows, columns = rows_and_columns(size)
        middle, more = (rows - 1) / 2, (columns - rows) / 2  # of a row, and what a column's is beyond
        result[:, 0, 2] = x - (middle * result[:, 0, :2].sum(1) + more * result[:, 0, 0])
        result[:, 1, 2] = y - (middle * result[:, 1, :2].sum(1) + more * result[:, 1, 0])
        return result


@dataclass(frozen=True)
class Cutout:
    """A piece of another photo in front: its camera, and a wobbly ellipse in that photo's pixels.

    The ellipse has centre (x, y), radii, tilt, a wave (amplitude, rate, phase) on its outline and an edge
    `softness` pixels wide; it moves with its photo.
    """

    photo: int
    motion: CameraMotion
    x: float
    y: float
    radius_x: float
    radius_y: float
    tilt: float
    wave: tuple[float, float, float]
    softness: float


@dataclass(frozen=True)
class ClipSpec:
    """One HQ clip. kind "video": shot number `source`, frames first, first + stride, ..., running back and
    forth where the shot is too short, cropped at (y, x). kind "photo": photo number `source` under `motion`,
    perhaps with a cutout. Both: backwards in time, flipped, transposed, in other colours: value `lift` +
    `gain` * that of the source's channel `channels[i]`."""

    kind: str
    source: int
    flip_x: bool = False
    flip_y: bool = False
    transpose: bool = False
    backwards: bool = False
    first: int = 0
    stride: int = 1
    y: int = 0
    x: int = 0
    motion: CameraMotion | None = None
    cutout: Cutout | None = None
    channels: tuple[int, int, int] = (0, 1, 2)
    gain: float = 1.0
    lift: float = 0.0

    @property
    def mirror(self) -> tuple[bool, bool, bool]:
        """flip_x, flip_y, transpose."""
        return self.flip_x, self.flip_y, self.transpose

    @property
    def is_coloured(self) -> bool:
        """Whether the clip has other colours than its source."""
        return (self.channels, self.gain, self.lift) != ((0, 1, 2), 1.0, 0.0)


# ---------------------------------------------------------------- stored pixels


@dataclass(frozen=True)
class StoredShot:
    """Frames [T, 3, h, w] from `offset` on in the pixel buffer."""

    name: str
    offset: int
    frames: int
    height: int
    width: int
    weight: float
    split: str


@dataclass(frozen=True)
class StoredPhoto:
    """Levels 0 and 1: (offset, rows, columns) of planes [3, 2h-1, 2w-1]."""

    name: str
    levels: tuple[tuple[int, int, int], ...]
    split: str

    def size(self, level: int) -> tuple[int, int]:
        """Rows and columns of a level, in its own pixels."""
        _, rows, columns = self.levels[level]
        return (rows + 1) // 2, (columns + 1) // 2

    def holds(self, rows: float, columns: float, level: int = 0) -> bool:
        """Whether a level has so many rows and columns."""
        have_rows, have_columns = self.size(level)
        return have_rows >= rows and have_columns >= columns


def _layout(index: PackIndex) -> tuple[list[StoredShot], list[StoredPhoto], int]:
    shots, photos, offset = [], [], 0
    for video in index.videos:
        height, width = video.used_size
        total = sum(count for _, count in video.shots)
        for _, count in video.shots:
            shots.append(
                StoredShot(
                    video.name, offset, count, height, width, video.weight * count / total, video.split
                )
            )
            offset += count * 3 * height * width
    for photo in index.photos:
        stored, offset = lay_out_photo(photo.name, photo.size, offset, photo.split)
        photos.append(stored)
    return shots, photos, offset


def lay_out_photo(name: str, size: tuple[int, int], offset: int, split: str) -> tuple[StoredPhoto, int]:
    """Where the levels of a photo go in a buffer, from `offset` on, and where the next item does."""
    levels = []
    for level in range(_LEVELS):
        rows, columns = (2 * (side >> level) - 1 for side in size)
        levels.append((offset, rows, columns))
        offset += 3 * rows * columns
    return StoredPhoto(name, tuple(levels), split), offset


def planes_to_rgb(planes: Planes, size: tuple[int, int] | None = None) -> Tensor:
    """Decoded planes -> float32 [3, H, W] in 0..255, chroma by linear interpolation (centre sited).

    size: rows and columns to reduce to (antialiased bicubic, before the conversion, which is linear).
    """
    luma = torch.from_numpy(planes.luma)[None, None].float()
    chroma = torch.from_numpy(np.stack((planes.blue, planes.red)))[None].float()
    height, width = luma.shape[-2:]
    if size is None or size == (height, width):
        size = (height, width)
        double = chroma
        if chroma.shape[-2:] != luma.shape[-2:]:
            double = F.interpolate(chroma, scale_factor=2, mode="bilinear", align_corners=False)
        chroma = double[..., :height, :width]
    else:
        luma = F.interpolate(luma, size=size, mode="bicubic", antialias=True, align_corners=False)
        chroma = F.interpolate(chroma, size=size, mode="bicubic", antialias=True, align_corners=False)
    chroma = chroma[0] - 128
    y = luma[0, 0]
    if not planes.full_range:
        y, chroma = (y - 16) * (255 / 219), chroma * (255 / 224)
    red, blue = (0.2126, 0.0722) if planes.matrix == "bt709" else (0.299, 0.114)
    green = 1 - red - blue
    cb, cr = chroma
    rgb = torch.empty((3, *size))
    rgb[0] = y + 2 * (1 - red) * cr
    rgb[2] = y + 2 * (1 - blue) * cb
    rgb[1] = y - (2 * (1 - red) * red / green) * cr - (2 * (1 - blue) * blue / green) * cb
    return rgb.clamp_(0, 255)


def _doubled(rgb: Tensor) -> Tensor:
    """[3, h, w] -> [3, 2h-1, 2w-1]: own samples at even places, 8-tap Lanczos between them."""
    at = torch.arange(0.5, 4, 1.0)
    taps = torch.sinc(at) * torch.sinc(at / 4)
    near, *far = (taps / (2 * taps.sum())).tolist()
    for axis in (1, 2):
        count = rgb.shape[axis]
        shape = list(rgb.shape)
        shape[axis] = 2 * count - 1
        woven = rgb.new_empty(shape)
        own, between = (woven[:, i::2] if axis == 1 else woven[:, :, i::2] for i in (0, 1))
        padding = (0, 0, 3, 3) if axis == 1 else (3, 3, 0, 0)
        padded = F.pad(rgb, padding, mode="replicate")
        middle = torch.add(padded.narrow(axis, 3, count - 1), padded.narrow(axis, 4, count - 1)).mul_(near)
        for i, tap in enumerate(far, 1):
            middle.add_(padded.narrow(axis, 3 - i, count - 1), alpha=tap)
            middle.add_(padded.narrow(axis, 4 + i, count - 1), alpha=tap)
        own.copy_(rgb)
        between.copy_(middle)
        rgb = woven
    return rgb.clamp_(0, 255)


def detail_of(rgb: Tensor) -> np.ndarray:
    """Mean absolute gradient in cells of 32 x 32 pixels, float32 [rows, columns] (at least one cell)."""
    grey = rgb.mean(0)
    slope = F.pad((grey[1:, 1:] - grey[:-1, :-1]).abs() + (grey[1:, :-1] - grey[:-1, 1:]).abs(), (0, 1, 0, 1))
    cell = min(_CELL, *slope.shape)
    return F.avg_pool2d(slope[None], cell, ceil_mode=False)[0].numpy()


def to_bytes(rgb: Tensor) -> np.ndarray:
    """Float pixels in 0..255 as uint8."""
    return rgb.round().byte().numpy()


def _decode_video(
    folder: Path, pixels: np.ndarray, video: PackedVideo, shots: Sequence[StoredShot]
) -> list[np.ndarray]:
    targets = {}
    for (first, count), shot in zip(video.shots, shots):
        size = count * 3 * shot.height * shot.width
        view = pixels[shot.offset : shot.offset + size].reshape(count, 3, shot.height, shot.width)
        targets.update({first + i: view[i] for i in range(count)})
    middles = {first + count // 2: number for number, (first, count) in enumerate(video.shots)}
    details: list[np.ndarray] = [np.zeros((1, 1), np.float32)] * len(shots)
    frames = 0
    for number, planes in enumerate(decode_planes(folder / video.file)):
        frames += 1
        if number not in targets:
            continue
        rgb = planes_to_rgb(planes, video.used_size)
        targets[number][:] = to_bytes(rgb)
        if number in middles:
            details[middles[number]] = detail_of(rgb)
    if frames != video.frames:
        raise InputError(
            f"{folder / video.file}: {frames} frames instead of {video.frames}; copy the pack again"
        )
    return details


def _decode_photo(
    folder: Path, pixels: np.ndarray, photo: PackedPhoto, stored: StoredPhoto
) -> list[np.ndarray]:
    return store_photo(next(iter(decode_planes(folder / photo.file))), pixels, stored)


def store_photo(planes: Planes, pixels: np.ndarray, stored: StoredPhoto) -> list[np.ndarray]:
    """Write the levels of a photo into a pixel buffer; returns each level's detail."""
    details = []
    for offset, rows, columns in stored.levels:
        picture = planes_to_rgb(planes, ((rows + 1) // 2, (columns + 1) // 2))
        pixels[offset : offset + 3 * rows * columns] = to_bytes(_doubled(picture)).reshape(-1)
        details.append(detail_of(picture))
    return details


def _decode_item(job: tuple) -> list[np.ndarray]:
    torch.set_num_threads(1)
    folder, path, item, stored = job
    pixels = np.memmap(path, np.uint8, "r+")
    if isinstance(item, PackedVideo):
        return _decode_video(folder, pixels, item, stored)
    return _decode_photo(folder, pixels, item, stored)


def default_cache() -> Path:
    """Where decoded pixels go: shared memory where that is large, else the temporary folder."""
    memory = Path("/dev/shm")
    roomy = memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 24 * 2**30
    user = f"-{os.getuid()}" if hasattr(os, "getuid") else ""  # elsewhere that folder is the user's own
    return (memory if roomy else Path(tempfile.gettempdir())) / f"recavsr{user}"


@contextmanager
def making(place: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a folder in a cache, so that one process makes it and the others find it made.

    Waits, and says so, while another process holds it; a killed one holds nothing. Raises InputError where
    the cache can't be written.
    """
    lock = FileLock(f"{place}.lock")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            say(f"waiting for another process, which makes {place}")
            lock.acquire(poll_interval=0.5)
    except OSError as error:
        raise InputError(
            f"{place.parent}: can't be written ({error.strerror}); choose another cache"
        ) from None
    try:
        yield
    finally:
        lock.release()


# ---------------------------------------------------------------- the source


class StoredClips:
    """Shots and photos in one pixel buffer: draws clips of one split, and renders them.

    shot_detail: detail (`detail_of`) of a frame of each shot; photo_detail: of the levels of each photo.
    """

    def __init__(
        self,
        name: str,
        shots: Sequence[StoredShot],
        photos: Sequence[StoredPhoto],
        pixels: np.ndarray,
        shot_detail: Sequence[np.ndarray],
        photo_detail: Sequence[Sequence[np.ndarray]],
        split: str,
    ) -> None:
        self.name, self.shots, self.photos, self.pixels, self.split = name, shots, photos, pixels, split
        self._shot_detail, self._photo_detail = shot_detail, photo_detail
        self._fitting: dict[CropSize, tuple[list[int], np.ndarray, list[int]]] = {}

    # ------------------------------------------------------------ drawing

    def sample(
        self,
        rng: np.random.Generator,
        *,
        frames: int = 37,
        size: CropSize = 256,
        video_fraction: float = 0.5,
        still_fraction: float = STILL_FRACTION,
        variety: float = 0.0,
    ) -> ClipSpec:
        """Draw a clip: a video crop with probability `video_fraction`, else a photo under camera motion.

        A photo stands still with probability `still_fraction`. With probability `variety` a clip is drawn
        freely: in other colours, a photo also at any angle and at more scales, so that few items look like
        more. Raises InputError where no item is as large as the crop.
        """
        free = variety > 0 and rng.random() < variety
        shots, _, photos = self._large_enough(size)
        if shots and (not photos or rng.random() < video_fraction):
            spec = self._sample_video(rng, frames, size)
        elif photos:
            spec = self._sample_photo(rng, frames, size, still_fraction, free)
        else:
            rows, columns = rows_and_columns(size)
            raise InputError(
                f"{self.name}: no {self.split} items of {columns}x{rows} pixels or more; pack other data"
            )
        return _recoloured(spec, rng) if free else spec

    def _large_enough(self, size: CropSize) -> tuple[list[int], np.ndarray, list[int]]:
        """The split's shots that hold a crop, their odds, and the photos that do."""
        if size not in self._fitting:
            rows, columns = rows_and_columns(size)
            shots = [
                i
                for i, shot in enumerate(self.shots)
                if shot.split == self.split and shot.height >= rows and shot.width >= columns
            ]
            photos = [
                i
                for i, photo in enumerate(self.photos)
                if photo.split == self.split and photo.holds(rows, columns)
            ]
            weights = np.array([self.shots[i].weight for i in shots])
            self._fitting[size] = shots, weights / weights.sum() if shots else weights, photos
        return self._fitting[size]

    def _sample_video(self, rng: np.random.Generator, frames: int, size: CropSize) -> ClipSpec:
        shots, odds, _ = self._large_enough(size)
        source = int(rng.choice(shots, p=odds))
        shot = self.shots[source]
        stride = 2 if rng.random() < 0.2 and shot.frames >= 2 * frames else 1
        latest = max(shot.frames - stride * (frames - 1) - 1, 0)
        y, x = detailed_place(rng, self._shot_detail[source], shot.height, shot.width, size)
        flips = rng.random(3) < 0.5
        return ClipSpec(
            "video",
            source,
            flip_x=bool(flips[0]),
            flip_y=bool(flips[1] and rng.random() < 0.5),
            transpose=bool(flips[2] and rng.random() < 0.5) and _is_square(size),
            backwards=bool(rng.random() < 0.3),
            first=int(rng.integers(latest + 1)),
            stride=stride,
            y=y,
            x=x,
        )

    def _sample_photo(
        self, rng: np.random.Generator, frames: int, size: CropSize, still_fraction: float, free: bool
    ) -> ClipSpec:
        rows, columns = rows_and_columns(size)
        source = int(rng.choice(self._large_enough(size)[2]))
        flips = rng.random(3) < 0.5
        flip_x, flip_y, transpose = (bool(flip) for flip in flips)
        transpose = transpose and _is_square(size)
        level = int(rng.random() < 0.4 and self.photos[source].holds(1.2 * rows, 1.2 * columns, level=1))
        if rng.random() < still_fraction:
            if free:
                motion = self._fitted(
                    rng, _freely_turned(CameraMotion(level, 0.0, 0.0), rng), source, 1, size
                )
                return ClipSpec("photo", source, flip_x, flip_y, transpose, motion=motion)
            height, width = self.photos[source].size(level)
            y, x = detailed_place(rng, self._photo_detail[source][level], height, width, size)
            motion = CameraMotion(level, x + (columns - 1) / 2, y + (rows - 1) / 2)
            return ClipSpec("photo", source, flip_x, flip_y, transpose, motion=motion)
        motion = self._sample_motion(rng, source, level, frames, size, free=free)
        cutout = self._sample_cutout(rng, frames, size) if rng.random() < 0.25 else None
        return ClipSpec("photo", source, flip_x, flip_y, transpose, motion=motion, cutout=cutout)

    def _sample_motion(
        self,
        rng: np.random.Generator,
        source: int,
        level: int,
        frames: int,
        size: CropSize,
        fastest: float = 8.0,
        free: bool = False,
    ) -> CameraMotion:
        speed = math.exp(rng.uniform(math.log(0.1), math.log(fastest))) if rng.random() < 0.9 else 0.0
        heading = rng.uniform(0, 2 * math.pi)
        pause = None
        if rng.random() < 0.25:
            first = rng.uniform(-frames / 2, frames / 2)
            pause = (round(first, 3), round(first + rng.uniform(8, max(frames, 8)), 3))
        shake: list[tuple[float, float, float, float, float]] = []
        if rng.random() < 0.5:
            strength = math.exp(rng.uniform(math.log(0.1), math.log(2.5)))
            for _ in range(2):
                x, y, turn = rng.normal(0, 1, 3) * (strength, strength, 0.0015 * strength)
                shake.append(
                    (float(x), float(y), float(turn), float(rng.uniform(0.02, 0.3)), float(rng.random()))
                )
        zooms, turns = rng.random() < 0.5, rng.random() < 0.35
        motion = CameraMotion(
            level,
            0.0,
            0.0,
            velocity_x=speed * math.cos(heading),
            velocity_y=speed * math.sin(heading),
            pause=pause,
            scale=float(rng.uniform(0.85, 1.2)),
            zoom=float(rng.uniform(-1, 1)) * 0.25 / frames if zooms else 0.0,
            angle=float(rng.normal(0, 0.06)) if turns else 0.0,
            spin=float(rng.normal(0, 0.05)) / frames if turns else 0.0,
            shake=tuple(shake),
        )
        if free:
            motion = _freely_turned(motion, rng)
        return self._fitted(rng, motion, source, frames, size)

    def _fitted(
        self, rng: np.random.Generator, motion: CameraMotion, source: int, frames: int, size: CropSize
    ) -> CameraMotion:
        """The motion, calmed until its path fits the photo, then placed where the photo has detail."""
        height, width = self.photos[source].size(motion.level)
        while True:
            low, high = _footprint(motion, frames, size)
            room_x, room_y = (width - 1) - (high[0] - low[0]), (height - 1) - (high[1] - low[1])
            if room_x >= 0 and room_y >= 0:
                break
            motion = _calmed(motion)
        detail = self._photo_detail[source][motion.level]
        places, odds = [], []
        for _ in range(3):
            x, y = rng.uniform(0, room_x), rng.uniform(0, room_y)
            down, right = _cells(size)
            seen = detail[int(y) // _CELL :, int(x) // _CELL :][:down, :right]
            places.append((x - low[0], y - low[1]))
            odds.append(seen.mean() + 0.3 * detail.mean() + 1e-3 if seen.size else 1e-3)
        x, y = places[rng.choice(3, p=np.array(odds) / sum(odds))]
        return _moved(motion, float(x), float(y))

    def _sample_cutout(self, rng: np.random.Generator, frames: int, size: CropSize) -> Cutout:
        rows, columns = rows_and_columns(size)
        side = min(rows, columns)
        source = int(rng.choice(self._large_enough(size)[2]))
        motion = self._sample_motion(rng, source, 0, frames, size, fastest=12.0)
        # The cutout is in the picture at a random moment; its outline is fixed to its photo.
        matrix = motion.matrices(frames, size, (False, False, False))[int(rng.integers(frames))]
        x, y = matrix @ (rng.uniform(0.2 * columns, 0.8 * columns), rng.uniform(0.2 * rows, 0.8 * rows), 1.0)
        return Cutout(
            source,
            motion,
            float(x),
            float(y),
            radius_x=float(rng.uniform(0.12, 0.45)) * side,
            radius_y=float(rng.uniform(0.12, 0.45)) * side,
            tilt=float(rng.uniform(0, math.pi)),
            wave=(float(rng.uniform(0, 0.25)), float(rng.uniform(2, 7)), float(rng.uniform(0, 2 * math.pi))),
            softness=float(rng.uniform(0.8, 1.6) if rng.random() < 0.8 else rng.uniform(2, 8)),
        )

    # ------------------------------------------------------------ rendering

    def render(self, spec: ClipSpec, frames: int = 37, size: CropSize = 256) -> Tensor:
        """The clip on the CPU: float32 [T, 3, H, W] in [0, 1]."""
        return coloured(self._render_plain(spec, frames, size), spec)

    def _render_plain(self, spec: ClipSpec, frames: int, size: CropSize) -> Tensor:
        """The clip in the source's own colours."""
        if spec.kind == "video":
            return self._render_video(spec, frames, size)
        if spec.motion is None:
            raise InputError("a photo clip needs a camera motion")
        clip = self._sample_plane(spec.source, spec.motion, spec, frames, size)
        if spec.cutout is not None:
            front = self._sample_plane(spec.cutout.photo, spec.cutout.motion, spec, frames, size)
            matrices = torch.from_numpy(_doubled_matrices(spec.cutout.motion, frames, size, spec.mirror))
            mask = _cutout_mask(_points(matrices, size), torch.from_numpy(_cutout_row(spec.cutout)))
            clip = torch.lerp(clip, front, mask[:, None])
        return clip

    def _render_video(self, spec: ClipSpec, frames: int, size: CropSize) -> Tensor:
        rows, columns = rows_and_columns(size)
        shot = self.shots[spec.source]
        plane = 3 * shot.height * shot.width
        stored = self.pixels[shot.offset : shot.offset + shot.frames * plane]
        stored = stored.reshape(shot.frames, 3, shot.height, shot.width)
        crop = np.stack(
            [
                stored[i, :, spec.y : spec.y + rows, spec.x : spec.x + columns]
                for i in frame_numbers(spec, shot.frames, frames)
            ]
        )
        return mirrored(torch.from_numpy(crop), spec).float().div_(255)

    def _sample_plane(
        self, photo: int, motion: CameraMotion, spec: ClipSpec, frames: int, size: CropSize
    ) -> Tensor:
        """A photo under a motion: [T, 3, H, W] in [0, 1]."""
        offset, rows, columns = self.photos[photo].levels[motion.level]
        matrices = _doubled_matrices(motion, frames, size, spec.mirror).astype(np.float64)
        corners = matrices @ _corners(size).T
        low, high = np.floor(corners.min((0, 2))).astype(int), np.ceil(corners.max((0, 2))).astype(int) + 1
        x0, y0 = min(max(low[0], 0), columns - 2), min(max(low[1], 0), rows - 2)
        x1, y1 = min(max(high[0], x0 + 2), columns), min(max(high[1], y0 + 2), rows)
        stored = self.pixels[offset : offset + 3 * rows * columns].reshape(3, rows, columns)
        window = torch.from_numpy(np.array(stored[:, y0:y1, x0:x1]))[None].float().div_(255)
        # grid_sample's coordinates: -1 and 1 are the window's first and last samples.
        matrices[:, :, 2] -= (x0, y0)
        matrices *= np.array((2 / (x1 - x0 - 1), 2 / (y1 - y0 - 1)))[:, None]
        matrices[:, :, 2] -= 1
        grid = torch.stack(_points(torch.from_numpy(matrices.astype(np.float32)), size).unbind(1), -1)
        window = window.expand(frames, -1, -1, -1)
        return F.grid_sample(window, grid, mode="bilinear", padding_mode="border", align_corners=True)


class ClipSource(StoredClips):
    """All clips of a pack, decoded.

    `shots` and `photos` list what is stored, validation items included; specs are drawn from one split.
    """

    def __init__(self, folder: Path, cache: Path, split: str) -> None:
        index = PackIndex.load(folder)
        shots, photos, self.nbytes = _layout(index)
        self.folder, self.cache = folder, cache
        pixels = np.memmap(cache / "pixels.u8", np.uint8, "c")
        with np.load(cache / "detail.npz") as details:
            shot_detail = [details[f"shot{i}"] for i in range(len(shots))]
            photo_detail = [
                [details[f"photo{i}level{level}"] for level in range(_LEVELS)] for i in range(len(photos))
            ]
        super().__init__(str(folder), shots, photos, pixels, shot_detail, photo_detail, split)

    @staticmethod
    def open(
        folder: Path | str,
        *,
        cache: Path | None = None,
        processes: int = 16,
        split: str = "train",
        say: Callable[[str], None] | None = None,
    ) -> ClipSource:
        """Decode a pack (once: the result stays in `cache`) and open it.

        Of several processes one decodes, the others wait for it. processes: how many decode at the same time;
        0 decodes in this process. Scripts that call this with processes need the usual
        `if __name__ == "__main__"`. say: is told before it decodes or waits. Raises InputError if the pack is
        incomplete or damaged, or the cache can't hold it.
        """
        folder = Path(folder).resolve()
        index = PackIndex.load(folder)
        missing = [file for file in index.files if not (folder / file).exists()]
        if missing:
            raise InputError(
                f"{folder}: {len(missing)} files missing, such as {missing[0]}; copy all parts of the pack"
            )
        stats = ((folder / file).stat() for file in index.files)
        stamps = [(stat.st_size, stat.st_mtime_ns) for stat in stats]  # a file may be replaced by one like it
        identity = (folder / "index.json").read_bytes() + f"{folder} {_CACHE_FORMAT} {stamps}".encode()
        digest = hashlib.sha256(identity).hexdigest()[:16]
        place = (default_cache() if cache is None else cache) / digest
        complete, say = place / "complete", say or (lambda text: None)
        if not complete.is_file():
            with making(place, say):
                if not complete.is_file():
                    _fill_cache(folder, place, index, processes, say)
        return ClipSource(folder, place, split)

    def arguments(self) -> tuple[Path, Path, str]:
        """What another process passes to `ClipSource(...)` to open the same pixels."""
        return self.folder, self.cache, self.split


def _fill_cache(
    folder: Path, place: Path, index: PackIndex, processes: int, say: Callable[[str], None]
) -> None:
    shots, photos, total = _layout(index)
    for left in (place, *place.parent.glob(f"{place.name}-*")):  # by processes that were killed
        shutil.rmtree(left, ignore_errors=True)
    if shutil.disk_usage(place.parent).free < total + 2**28:
        raise InputError(
            f"{place.parent}: too little room for {total / 1e9:.1f} GB of decoded clips; choose another cache"
        )
    say(f"decoding {folder} into {place}: {total / 1e9:.1f} GB, kept for the next run (remove it when done)")
    work = Path(tempfile.mkdtemp(prefix=f"{place.name}-", dir=place.parent))
    try:
        path = work / "pixels.u8"
        with path.open("wb") as file:
            file.truncate(total)
        jobs: list[tuple] = []
        start = 0
        for video in index.videos:
            jobs.append((folder, path, video, shots[start : start + len(video.shots)]))
            start += len(video.shots)
        # Longest first, so that no process is left alone with a long clip at the end.
        order = sorted(range(len(jobs)), key=lambda i: -jobs[i][2].frames * math.prod(jobs[i][2].size))
        jobs += [(folder, path, photo, stored) for photo, stored in zip(index.photos, photos)]
        order += range(len(order), len(jobs))
        with spread_over(processes) as spread:
            results = spread(_decode_item, [jobs[i] for i in order])
        by_job = dict(zip(order, results))
        videos = len(index.videos)
        shot_details = [detail for i in range(videos) for detail in by_job[i]]
        arrays = {f"shot{i}": detail for i, detail in enumerate(shot_details)}
        for i in range(len(photos)):
            arrays |= {f"photo{i}level{level}": detail for level, detail in enumerate(by_job[videos + i])}
        np.savez(work / "detail.npz", **arrays)  # type: ignore[arg-type]
        (work / "complete").write_text(json.dumps({"bytes": total}))
        work.rename(place)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


# ---------------------------------------------------------------- geometry shared by both renderers


def detailed_place(
    rng: np.random.Generator, detail: np.ndarray, height: int, width: int, size: CropSize
) -> tuple[int, int]:
    """One of three random crops, the more likely the more detail it has (flat sky teaches little)."""
    rows, columns = rows_and_columns(size)
    places = [
        (int(rng.integers(height - rows + 1)), int(rng.integers(width - columns + 1))) for _ in range(3)
    ]
    down, right = _cells(size)
    inside = [detail[y // _CELL :, x // _CELL :][:down, :right].mean() for y, x in places]
    odds = np.array(inside) + 0.3 * detail.mean() + 1e-3
    return places[rng.choice(3, p=odds / odds.sum())]


def mirrored(clip: Tensor, spec: ClipSpec) -> Tensor:
    """A crop [T, 3, H, W] of a shot, transposed and flipped as the spec says; contiguous."""
    if spec.transpose:
        clip = clip.transpose(2, 3)
    axes = [axis for axis, flip in ((3, spec.flip_x), (2, spec.flip_y)) if flip]
    return clip.flip(axes) if axes else clip.contiguous()


def coloured(clip: Tensor, spec: ClipSpec, white: float = 1.0) -> Tensor:
    """A clip [T, 3, H, W] in [0, white] in the colours of the spec."""
    if not spec.is_coloured:
        return clip
    return clip[:, list(spec.channels)].mul_(spec.gain).add_(white * spec.lift)


def frame_numbers(spec: ClipSpec, shot_frames: int, frames: int) -> np.ndarray:
    """The shot's frames that a clip shows, int64 [T]: running back and forth where the shot is too short."""
    steps = spec.first + spec.stride * np.arange(frames)
    period = max(2 * (shot_frames - 1), 1)
    numbers = (shot_frames - 1) - np.abs(steps % period - (shot_frames - 1))
    return numbers[::-1].copy() if spec.backwards else numbers


def _is_square(size: CropSize) -> bool:
    rows, columns = rows_and_columns(size)
    return rows == columns


def _cells(size: CropSize) -> tuple[int, int]:
    """How many cells of measured detail a crop covers, down and right."""
    rows, columns = rows_and_columns(size)
    return max(rows // _CELL, 1), max(columns // _CELL, 1)


def _corners(size: CropSize) -> np.ndarray:
    """The four corner pixels of a clip as (column, row, 1): [4, 3]."""
    bottom, right = (side - 1 for side in rows_and_columns(size))
    return np.array([(0, 0, 1), (right, 0, 1), (0, bottom, 1), (right, bottom, 1)], np.float64)


def _footprint(motion: CameraMotion, frames: int, size: CropSize) -> tuple[np.ndarray, np.ndarray]:
    """Lowest and highest (x, y) that the camera sees in all frames."""
    seen = motion.matrices(frames, size, (False, False, False)) @ _corners(size).T
    return seen.min((0, 2)), seen.max((0, 2))


def _calmed(motion: CameraMotion) -> CameraMotion:
    shrink = 0.7
    return replace(
        motion,
        velocity_x=motion.velocity_x * shrink,
        velocity_y=motion.velocity_y * shrink,
        zoom=motion.zoom * shrink,
        angle=motion.angle * shrink,
        spin=motion.spin * shrink,
        scale=1 + (motion.scale - 1) * shrink if motion.scale > 1 else motion.scale,
        shake=tuple(
            (x * shrink, y * shrink, turn * shrink, rate, phase) for x, y, turn, rate, phase in motion.shake
        ),
    )


def _freely_turned(motion: CameraMotion, rng: np.random.Generator) -> CameraMotion:
    """The motion seen at any angle, and at more scales."""
    return replace(
        motion, angle=float(rng.uniform(-math.pi, math.pi)), scale=float(rng.uniform(*_FREE_SCALE))
    )


def _recoloured(spec: ClipSpec, rng: np.random.Generator) -> ClipSpec:
    """The clip with its channels in any order and less contrast, anywhere between black and white."""
    red, green, blue = (int(channel) for channel in rng.permutation(3))
    gain = float(rng.uniform(0.6, 1.0))
    lift = float(rng.uniform(0.0, 1.0 - gain))
    return replace(spec, channels=(red, green, blue), gain=gain, lift=lift)


def _moved(motion: CameraMotion, x: float, y: float) -> CameraMotion:
    return replace(motion, x=motion.x + x, y=motion.y + y)


def _doubled_matrices(
    motion: CameraMotion, frames: int, size: CropSize, mirror: tuple[bool, bool, bool]
) -> np.ndarray:
    """From clip pixels to places in the doubled plane, float32 [T, 2, 3]."""
    return (2 * motion.matrices(frames, size, mirror)).astype(np.float32)


def _points(matrices: Tensor, size: CropSize) -> Tensor:
    """[..., 2, 3] -> where each pixel looks, (x, y) on the third axis from the end: [..., 2, H, W]."""
    row, column = (
        torch.arange(side, device=matrices.device, dtype=matrices.dtype) for side in rows_and_columns(size)
    )
    linear = matrices[..., 0, None, None] * column + matrices[..., 1, None, None] * row[:, None]
    return linear + matrices[..., 2, None, None]


def _cutout_row(cutout: Cutout) -> np.ndarray:
    numbers = (
        cutout.x,
        cutout.y,
        cutout.radius_x,
        cutout.radius_y,
        math.cos(cutout.tilt),
        math.sin(cutout.tilt),
    )
    return np.array((*numbers, *cutout.wave, cutout.softness), np.float32)


def _cutout_mask(points: Tensor, row: Tensor) -> Tensor:
    """How opaque a cutout is at points of its doubled plane: [..., 2, H, W] -> [..., H, W]; row [..., 10]."""
    x, y, radius_x, radius_y, cos, sin, amplitude, rate, phase, softness = (
        v[..., None, None] for v in row.unbind(-1)
    )
    right, down = points[..., 0, :, :] / 2 - x, points[..., 1, :, :] / 2 - y
    along, across = (cos * right + sin * down) / radius_x, (cos * down - sin * right) / radius_y
    bent_along = along + amplitude * torch.sin(rate * across + phase)
    bent_across = across + amplitude * torch.sin(rate * along - phase)
    distance = torch.sqrt(bent_along**2 + bent_across**2)
    return (0.5 + (1 - distance) * torch.minimum(radius_x, radius_y) / softness).clamp(0, 1)


# ---------------------------------------------------------------- batches on any device


@dataclass
class ClipTable:
    """Specs as numbers, one row a clip, on one device: all that `render_table` needs.

    video [N, 5] int64: offset of the clip's pixel (0, 0) in a frame 0, values a frame and a channel apart,
    steps along rows and columns. numbers [N, T] int64: frames shown. planes [N, 2, 3] int64: offset, rows,
    columns of photo and cutout. matrices [N, 2, T, 2, 3] float32. outline [N, 10] float32. channels [N, 3]
    int64: those of the source that are shown. tone [N, 2] float32: gain and lift.
    """

    video: Tensor
    numbers: Tensor
    planes: Tensor
    matrices: Tensor
    outline: Tensor
    channels: Tensor
    tone: Tensor

    @staticmethod
    def empty(rows: int, frames: int, device: torch.device | str = "cpu") -> ClipTable:
        """Zeros for `rows` clips of `frames` frames."""
        return ClipTable(
            torch.zeros((rows, 5), dtype=torch.int64, device=device),
            torch.zeros((rows, frames), dtype=torch.int64, device=device),
            torch.zeros((rows, 2, 3), dtype=torch.int64, device=device),
            torch.zeros((rows, 2, frames, 2, 3), device=device),
            torch.zeros((rows, 10), device=device),
            torch.zeros((rows, 3), dtype=torch.int64, device=device),
            torch.zeros((rows, 2), device=device),
        )

    def set(self, row: int, source: ClipSource, spec: ClipSpec, size: CropSize) -> None:
        """Fill one row of a table in CPU memory."""
        frames = self.numbers.shape[1]
        self.channels[row] = torch.tensor(spec.channels)
        self.tone[row] = torch.tensor((spec.gain, spec.lift))
        if spec.kind == "video":
            shot = source.shots[spec.source]
            place, steps = _video_steps(spec, shot, size)
            values = (shot.offset + place, 3 * shot.height * shot.width, shot.height * shot.width, *steps)
            self.video[row] = torch.tensor(values)
            self.numbers[row] = torch.from_numpy(frame_numbers(spec, shot.frames, frames))
            return
        layers = [(spec.source, spec.motion)]
        if spec.cutout is not None:
            layers.append((spec.cutout.photo, spec.cutout.motion))
            self.outline[row] = torch.from_numpy(_cutout_row(spec.cutout))
        for layer, (photo, motion) in enumerate(layers):
            if motion is None:
                raise InputError("a photo clip needs a camera motion")
            self.planes[row, layer] = torch.tensor(source.photos[photo].levels[motion.level])
            self.matrices[row, layer] = torch.from_numpy(_doubled_matrices(motion, frames, size, spec.mirror))

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors, in the order of the fields."""
        return tuple(getattr(self, field.name) for field in fields(self))


def _video_steps(spec: ClipSpec, shot: StoredShot, size: CropSize) -> tuple[int, tuple[int, int]]:
    """Place of clip pixel (0, 0) in its plane, and the steps to the next clip row and column."""
    # Without transposition a clip row is a plane row; flips start at the far end and step back.
    row, column = (1, shot.width) if spec.transpose else (shot.width, 1)
    place = spec.y * shot.width + spec.x
    rows, columns = rows_and_columns(size)
    if spec.flip_y:
        place, row = place + (rows - 1) * row, -row
    if spec.flip_x:
        place, column = place + (columns - 1) * column, -column
    return place, (row, column)


@dataclass(frozen=True)
class Selection:
    """Which clips to render, by kind: (rows of the table, places in the batch, first frames of the windows).

    All int64 on the table's device. Rows with a cutout are listed under `photo` too, those in other colours
    under their kind.
    """

    video: tuple[Tensor, Tensor, Tensor]
    photo: tuple[Tensor, Tensor, Tensor]
    cutout: tuple[Tensor, Tensor, Tensor]
    coloured: tuple[Tensor, Tensor, Tensor]


def render_table(
    pixels: Tensor, table: ClipTable, selection: Selection, batch: int, frames: int, size: CropSize
) -> Tensor:
    """Windows of clips: float32 [B, T, 3, H, W] in [0, 1], on the device of `pixels` (flat) and `table`."""
    result = torch.empty((batch, frames, 3, *rows_and_columns(size)), device=pixels.device)
    rows, places, starts = selection.video
    if len(rows):
        result[places] = _gather_video(pixels, table, rows, starts, frames, size)
    rows, places, starts = selection.photo
    if len(rows):
        result[places] = _gather_photo(pixels, table, 0, rows, starts, frames, size)[0]
    rows, places, starts = selection.cutout
    if len(rows):
        front, points = _gather_photo(pixels, table, 1, rows, starts, frames, size)
        mask = _cutout_mask(points, table.outline[rows][:, None])[:, :, None]
        result[places] = torch.lerp(result[places], front, mask)
    rows, places, _ = selection.coloured
    if len(rows):
        index = table.channels[rows][:, None, :, None, None].expand(-1, *result.shape[1:])
        gain, lift = (value[:, None, None, None, None] for value in table.tone[rows].unbind(1))
        result[places] = result[places].gather(2, index) * gain + lift
    return result


def _window(starts: Tensor, frames: int) -> Tensor:
    return starts[:, None] + torch.arange(frames, device=starts.device)


def _gather_video(
    pixels: Tensor, table: ClipTable, rows: Tensor, starts: Tensor, frames: int, size: CropSize
) -> Tensor:
    offset, per_frame, per_channel, down, right = (v[:, None] for v in table.video[rows].unbind(1))
    numbers = table.numbers[rows[:, None], _window(starts, frames)]
    row, column = (torch.arange(side, device=pixels.device) for side in rows_and_columns(size))
    base = offset + numbers * per_frame  # [N, T]
    channel = per_channel * torch.arange(3, device=pixels.device)  # [N, 3]
    index = (base[:, :, None] + channel[:, None])[..., None, None] + (
        (down * row)[:, None, None, :, None] + (right * column)[:, None, None, None, :]
    )
    return torch.take(pixels, index).float().div_(255)


def _gather_photo(
    pixels: Tensor, table: ClipTable, layer: int, rows: Tensor, starts: Tensor, frames: int, size: CropSize
) -> tuple[Tensor, Tensor]:
    """Linear samples [N, T, 3, H, W] in [0, 1] of a layer's doubled plane, and the points [N, T, 2, H, W]."""
    offset, height, width = (v[:, None, None, None] for v in table.planes[rows, layer].unbind(1))
    points = _points(table.matrices[rows[:, None], layer, _window(starts, frames)], size)
    x = torch.minimum(points[:, :, 0].clamp_min(0), (width - 1).float())
    y = torch.minimum(points[:, :, 1].clamp_min(0), (height - 1).float())
    left, top = torch.minimum(x.floor().long(), width - 2), torch.minimum(y.floor().long(), height - 2)
    share_x, share_y = x - left, y - top
    corner = offset + top * width + left
    result = torch.empty((*points.shape[:2], 3, *rows_and_columns(size)), device=pixels.device)
    for channel in range(3):
        upper = torch.lerp(
            torch.take(pixels, corner).float(), torch.take(pixels, corner + 1).float(), share_x
        )
        corner += width
        lower = torch.lerp(
            torch.take(pixels, corner).float(), torch.take(pixels, corner + 1).float(), share_x
        )
        result[:, :, channel] = torch.lerp(upper, lower, share_y)
        corner += height * width - width
    return result.div_(255), points
