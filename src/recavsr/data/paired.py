"""Paired LR-HQ folders: ready-made pairs as a source for training and evaluation.

Entries of the two folders that have the same name (endings apart) are a pair: two video files, two folders of
numbered pictures, or two pictures. `recavsr degrade --pairs` writes such folders; most benchmarks come so.

T frames, h w rows and columns of LR frames, H W of HQ frames, S side of an HQ crop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from recavsr.data.pool import upsample_lr
from recavsr.errors import InputError
from recavsr.video.clips import read_clip
from recavsr.video.frames import Frame
from recavsr.video.reader import Trim, open_reader
from recavsr.video.source import VIDEO_SUFFIXES, is_picture, natural_order

_CACHED_BYTES = 2**31  # of decoded video files


class _Entry:
    """Frames of a video file, a folder of pictures or a picture, by number."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pictures: list[Path] | None = None
        if path.is_dir():
            self.pictures = sorted(filter(is_picture, path.iterdir()), key=natural_order)
        elif is_picture(path):
            self.pictures = [path]
        if self.pictures is None:
            with open_reader(path) as reader:
                self.size = reader.info.size
                self.frames = sum(isinstance(item, Frame) for item in reader)
        else:
            self.size = _first(self.pictures[0]).shape[:2]
            self.frames = len(self.pictures)

    def read(self, numbers: Sequence[int], cache: _Cache) -> np.ndarray:
        """Frames by number, uint8 [T, rows, columns, 3]."""
        if self.pictures is None:
            return cache.video(self.path)[list(numbers)]
        each = {n: _first(self.pictures[n]) for n in set(numbers)}
        if any(frame.shape[:2] != self.size for frame in each.values()):
            raise InputError(f"{self.path}: its pictures differ in size")
        return np.stack([each[n] for n in numbers])


def _first(path: Path) -> np.ndarray:
    with open_reader(path, Trim(frames=1)) as reader:
        return _8bit(next(item.pixels for item in reader if isinstance(item, Frame)))


def _8bit(pixels: np.ndarray) -> np.ndarray:
    return pixels if pixels.dtype == np.uint8 else ((pixels.astype(np.uint32) + 128) // 257).astype(np.uint8)


class _Cache:
    """Video files decoded last, within a limit of bytes."""

    def __init__(self) -> None:
        self._clips: OrderedDict[Path, np.ndarray] = OrderedDict()

    def video(self, path: Path) -> np.ndarray:
        if path not in self._clips:
            self._clips[path] = _8bit(read_clip(path))
            while len(self._clips) > 1 and sum(c.nbytes for c in self._clips.values()) > _CACHED_BYTES:
                self._clips.popitem(last=False)
        self._clips.move_to_end(path)
        return self._clips[path]


@dataclass(frozen=True)
class PairInfo:
    """A pair: its name, frames, LR rows and columns."""

    name: str
    frames: int
    lr_size: tuple[int, int]


class PairedFolder:
    """The pairs of two folders. `scale`: how many times larger HQ is, the same for all pairs."""

    def __init__(self, lr: Path, hq: Path) -> None:
        """Match the folders' entries. Raises InputError if they do not make pairs, or none."""
        sides = [_entries(folder) for folder in (lr, hq)]
        for have, lack, folder in ((sides[0], sides[1], hq), (sides[1], sides[0], lr)):
            if missing := sorted(set(have) - set(lack)):
                raise InputError(f"{folder}: has no counterpart of {missing[0]} ({len(missing)} missing)")
        self._cache = _Cache()
        self._lr, self._hq = ([_Entry(side[name]) for name in sides[0]] for side in sides)
        self.scale = _scale(self._lr[0], self._hq[0])
        for low, high in zip(self._lr, self._hq):
            if low.frames != high.frames:
                raise InputError(f"{low.path}: {low.frames} frames, {high.path}: {high.frames}")
            if _scale(low, high) != self.scale:
                raise InputError(f"{high.path}: not {self.scale} times its LR, as the first pair is")
        self.pairs = [PairInfo(n, e.frames, e.size) for n, e in zip(sides[0], self._lr)]
        """All pairs, in natural order of their names."""

    @staticmethod
    def open(folder: Path) -> PairedFolder:
        """Open what `recavsr degrade --pairs` writes: a folder with LR and HQ in it."""
        return PairedFolder(folder / "LR", folder / "HQ")

    def read(self, index: int, numbers: Sequence[int] | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Frames of a pair (all, or by number): uint8 [T, h, w, 3] and [T, H, W, 3]."""
        wanted = range(self.pairs[index].frames) if numbers is None else numbers
        return self._lr[index].read(wanted, self._cache), self._hq[index].read(wanted, self._cache)

    def clips(self) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Name, LR and HQ frames of every pair: what an evaluation goes through."""
        for index, pair in enumerate(self.pairs):
            yield pair.name, *self.read(index)


def _entries(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise InputError(f"{folder}: not a folder")
    found: dict[str, Path] = {}
    for path in sorted(folder.iterdir(), key=natural_order):
        clip = path.is_dir() and any(is_picture(inner) for inner in path.iterdir())
        if path.name.startswith(".") or not (
            clip or is_picture(path) or path.suffix.lower() in VIDEO_SUFFIXES
        ):
            continue
        name = path.name if clip else path.stem
        if name in found:
            raise InputError(f"{path}: {found[name].name} has the same name")
        found[name] = path
    if not found:
        raise InputError(f"{folder}: there are no videos and no pictures in it")
    return found


def _scale(low: _Entry, high: _Entry) -> int:
    scale = high.size[0] // low.size[0]
    if scale < 1 or high.size != (low.size[0] * scale, low.size[1] * scale):
        (h, w), (height, width) = low.size, high.size
        raise InputError(f"{high.path}: {width}x{height} is no whole multiple of its LR's {w}x{h}")
    return scale


class PairedBatches:
    """Random batches from a `PairedFolder`, with the contract of `data.pool.TrainingPool.batch`.

    size: S, a multiple of the scale. Clips shorter than a batch's windows run back and forth; a picture
    stands still. seed: the batches are a function of it and of their number.
    """

    def __init__(
        self, folder: PairedFolder, device: torch.device | str = "cpu", *, size: int = 256, seed: int = 0
    ) -> None:
        if size % folder.scale:
            raise InputError(
                f"crops of {size} pixels don't fit pairs of scale {folder.scale}: take a multiple"
            )
        small = [p for p in folder.pairs if min(p.lr_size) * folder.scale < size]
        if small:
            raise InputError(f"{small[0].name}: smaller than the crops of {size} pixels")
        self.folder, self.device, self.size = folder, torch.device(device), size
        self._rng = np.random.default_rng(seed)
        weights = np.array([pair.frames**0.5 for pair in folder.pairs])
        self._odds = weights / weights.sum()

    def sample(self, frames: int) -> tuple[Tensor, Tensor]:
        """A random crop, flipped at random: HQ uint8 [T, 3, S, S] and LR uint8 [T, 3, s, s]."""
        rng, scale = self._rng, self.folder.scale
        index = int(rng.choice(len(self._odds), p=self._odds))
        pair = self.folder.pairs[index]
        first = int(rng.integers(max(pair.frames - frames, 0) + 1))
        period = max(2 * (pair.frames - 1), 1)
        numbers = (pair.frames - 1) - np.abs((first + np.arange(frames)) % period - (pair.frames - 1))
        numbers = numbers % pair.frames  # a picture has period 1
        side = self.size // scale
        y, x = (int(rng.integers(have - side + 1)) for have in pair.lr_size)
        flips = tuple(axis for axis in (1, 2) if rng.random() < 0.5)
        crops = []
        for pixels, factor in zip(self.folder.read(index, numbers.tolist()), (1, scale)):
            top, left, extent = y * factor, x * factor, side * factor
            crop = pixels[:, top : top + extent, left : left + extent]
            crops.append(torch.from_numpy(np.flip(crop, flips).copy()).permute(0, 3, 1, 2))
        return crops[1], crops[0]

    def batch(
        self, batch_size: int, frames: int, *, scale: int | None = None, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """A random batch: (hq, lr_up), both [B, 3, T, S, S] in [-1, 1] on the device.

        lr_up is the LR enlarged by `data.pool.upsample_lr`. scale: None or the folder's own.
        """
        if scale not in (None, self.folder.scale):
            raise InputError(f"these pairs have scale {self.folder.scale}, not {scale}")
        hq, lr = (
            torch.stack(side).to(self.device)
            for side in zip(*(self.sample(frames) for _ in range(batch_size)))
        )
        high = hq.float().div_(127.5).sub_(1).transpose(1, 2)
        return high.to(dtype), upsample_lr(lr, self.size).transpose(1, 2).to(dtype)
