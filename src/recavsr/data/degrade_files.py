"""Degrading files: a video or picture to its LR version, beside it the JSON record that makes it again.

A file's record is drawn from the seed and the file's name, so it is the same alone and in a folder. Sides are
cropped (centred) to multiples of twice the scale: an LR pixel then covers exactly scale x scale HQ pixels.
Long videos are degraded in pieces that fit into memory; a codec starts anew with each piece.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from recavsr.data.degradation import (
    PRESETS,
    DegradationRecord,
    apply_degradation,
    fixed_degradation,
    sample_degradation,
    usm_sharpen,
)
from recavsr.errors import InputError
from recavsr.stream.plan import SizeRequest, make_plan
from recavsr.video.formats import CONTAINERS
from recavsr.video.frames import Frame
from recavsr.video.reader import Trim, open_reader
from recavsr.video.source import VIDEO_SUFFIXES, is_picture, natural_order

TEST_PRESETS = ("test_mild", "test_heavy")
"""The fixed degradations of the result tables."""
_PIECE_PIXELS = 2**26  # HQ pixels of a piece: about 3 GB with what is made of them
_NEAR_LOSSLESS = 8  # quality of H.264 and HEVC outputs: the record's damage is to be what one sees


@dataclass(frozen=True)
class FileRecord:
    """How one file was degraded: all that is needed to do it again, given the file.

    size: rows and columns of the HQ crop; piece: frames degraded at a time; sharpen: weight of the unsharp
    mask that the HQ side got first.
    """

    source: str
    seed: int
    size: tuple[int, int]
    piece: int
    sharpen: float
    degradation: DegradationRecord

    def to_json(self) -> str:
        """One JSON object; `from_json` gives an equal record."""
        return json.dumps({**asdict(self), "degradation": json.loads(self.degradation.to_json())})

    @staticmethod
    def from_json(text: str) -> FileRecord:
        """Rebuild a record. Raises InputError for anything that is not one."""
        try:
            data = json.loads(text)
            degradation = DegradationRecord.from_json(json.dumps(data.pop("degradation")))
            height, width = data.pop("size")
            return FileRecord(**data, size=(height, width), degradation=degradation)
        except (ValueError, KeyError, TypeError, AttributeError, InputError) as error:
            raise InputError(
                f"not a record of a degraded file ({error}); `recavsr degrade` writes them"
            ) from error

    @staticmethod
    def load(path: Path) -> FileRecord:
        """Read a record's file. Raises InputError naming the file."""
        try:
            return FileRecord.from_json(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: can't be read ({error})") from None
        except InputError as error:
            raise InputError(f"{path}: {error}") from None


@dataclass(frozen=True)
class DegradeSettings:
    """What is drawn for a file: a preset of `data.degradation`, "test_mild" or "test_heavy"; scale; seed;
    and the weight of the HQ side's unsharp mask (0: none)."""

    preset: str = "medium"
    scale: int = 4
    seed: int = 0
    sharpen: float = 0.0

    def __post_init__(self) -> None:
        known = (*PRESETS, *TEST_PRESETS)
        if self.preset not in known:
            raise InputError(f"unknown degradation preset {self.preset!r}; choose one of {', '.join(known)}")
        if self.scale < 1 or self.sharpen < 0:
            raise InputError("the scale must be at least 1, the sharpening not negative")

    def draw(self, name: str, frames: int, size: tuple[int, int]) -> FileRecord:
        """The record of a file of this name with `frames` frames of `size` (rows, columns)."""
        step = 2 * self.scale
        height, width = (side // step * step for side in size)
        if not height or not width:
            raise InputError(f"{name}: {size[1]}x{size[0]} is too small to shrink by {self.scale}")
        key = (self.seed, zlib.crc32(name.encode()))
        if self.preset in TEST_PRESETS:
            record = fixed_degradation(self.preset.removeprefix("test_"), frames, self.scale, self.seed)
        else:
            record = sample_degradation(np.random.default_rng(key), self.preset, frames, self.scale)
        piece = max(_PIECE_PIXELS // (height * width), 8)
        return FileRecord(name, self.seed, (height, width), min(piece, frames), self.sharpen, record)


def degrade_file(
    source: Path,
    output: Path,
    what: DegradeSettings | FileRecord,
    *,
    hq_output: Path | None = None,
    frames: int | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FileRecord:
    """Degrade a video, a picture, or a folder or pattern of numbered pictures; returns the record.

    output: by its ending a video or a picture, or a folder of PNGs for a video. what: a record repeats it,
    bit for bit. hq_output: also write the HQ side, cropped as the LR side was. frames: at most so many.
    progress(done, total) is called after each piece. Raises InputError; nothing is left half done.
    """
    trim = Trim.parse(frames=frames)
    total = _count(source, trim)
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(open_reader(source, trim))
        if isinstance(what, DegradeSettings):
            record = what.draw(source.name, total, reader.info.size)
        else:
            record = what
            _check_fit(source, record, total, reader.info.size)
        height, width = record.size
        scale = record.degradation.scale
        sizes = {output: (height // scale, width // scale)}
        if hq_output is not None:
            sizes[hq_output] = record.size
        writers = []
        for target, (rows, columns) in sizes.items():
            near = CONTAINERS.get(target.suffix.lower())
            quality = _NEAR_LOSSLESS if near is not None and near.codecs[0] == "h264" else None
            request = SizeRequest(size=(columns, rows))
            plan = make_plan(reader, target, request, trim, quality=quality)
            writers.append(stack.enter_context(plan.writer(reader, overwrite=overwrite)))
        done = 0
        for piece in _pieces(reader, record.piece):
            if isinstance(piece, list):
                for lr, hq, frame in _degraded(piece, record, done):
                    for writer, pixels in zip(writers, (lr, hq)):
                        writer.write(Frame(pixels, frame.stamp, frame.name))
                done += len(piece)
                progress(done, total)
            else:
                for writer in writers:
                    writer.copy(piece)
        for writer in writers:
            writer.finish()
    return record


def _count(source: Path, trim: Trim) -> int:
    with open_reader(source, trim) as reader:
        return sum(isinstance(item, Frame) for item in reader)


def _check_fit(source: Path, record: FileRecord, frames: int, size: tuple[int, int]) -> None:
    if record.degradation.frames != frames:
        raise InputError(
            f"{source}: has {frames} frames, its record is of {record.degradation.frames}; use --frames"
        )
    step = 2 * record.degradation.scale
    if record.size != tuple(side // step * step for side in size):
        height, width = record.size
        raise InputError(f"{source}: is {size[1]}x{size[0]}, its record is of {width}x{height}")


def _pieces(reader, length: int) -> Iterator:  # type: ignore[no-untyped-def]
    """Lists of `length` frames; packets of other streams one by one, where they come."""
    frames: list[Frame] = []
    for item in reader:
        if not isinstance(item, Frame):
            yield item
            continue
        frames.append(item)
        if len(frames) == length:
            yield frames
            frames = []
    if frames:
        yield frames


def _degraded(
    piece: list[Frame], record: FileRecord, first: int
) -> Iterator[tuple[np.ndarray, np.ndarray, Frame]]:
    """LR and HQ pixels, uint8, of each frame of a piece that begins at frame `first`."""
    pixels = np.stack([_cropped_8bit(frame.pixels, record.size) for frame in piece])
    clip = torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div_(255)
    if record.sharpen:
        # The HQ side is 8 bits too: LR is made of what is written.
        clip = usm_sharpen(clip, record.sharpen).mul_(255).round_().div_(255)
        pixels = clip.mul(255).round_().byte().permute(0, 2, 3, 1).contiguous().numpy()
    lr = apply_degradation(clip, record.degradation.part(first, len(piece)))
    yield from zip(lr.permute(0, 2, 3, 1).contiguous().numpy(), pixels, piece)


def _cropped_8bit(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    top, left = ((have - want) // 2 for have, want in zip(pixels.shape[:2], size))
    crop = pixels[top : top + size[0], left : left + size[1]]
    return crop if crop.dtype == np.uint8 else ((crop.astype(np.uint32) + 128) // 257).astype(np.uint8)


# ---------------------------------------------------------------- folders


@dataclass(frozen=True)
class Targets:
    """Where the results for one source go; `hq` only for pairs."""

    source: Path
    lr: Path
    record: Path
    hq: Path | None = None


def sources_in(folder: Path) -> list[Path]:
    """The videos, pictures and subfolders of numbered pictures in a folder, in natural order."""

    def usable(path: Path) -> bool:
        if path.name.startswith("."):
            return False
        if path.is_dir():
            return any(is_picture(inner) for inner in path.iterdir())
        return is_picture(path) or path.suffix.lower() in VIDEO_SUFFIXES

    found = sorted((path for path in folder.iterdir() if usable(path)), key=natural_order)
    if not found:
        raise InputError(f"{folder}: there are no videos and no pictures in it")
    names = [_name(path) for path in found]
    for path, name in zip(found, names):
        if names.count(name) > 1:
            raise InputError(f"{path}: another source is called {name} too; rename one of them")
    return found


def _name(path: Path) -> str:
    return path.name if path.is_dir() else path.stem


def folder_targets(folder: Path, output: Path, *, pairs: bool) -> list[Targets]:
    """Where each source of a folder goes.

    Without pairs: pictures become PNGs, videos keep their container (or become .mp4), numbered pictures a
    folder of PNGs; the record lies beside, NAME.json. Pairs are lossless: `LR/NAME` and `HQ/NAME`, PNGs (a
    folder of them for a clip), and `records/NAME.json`.
    """
    return [source_targets(source, output, pairs=pairs) for source in sources_in(folder)]


def source_targets(source: Path, output: Path, *, pairs: bool) -> Targets:
    """Where one source goes inside the folder `output`; see `folder_targets`."""
    name = _name(source)
    still = not source.is_dir() and is_picture(source)
    if pairs:
        leaf = f"{name}.png" if still else name
        return Targets(
            source, output / "LR" / leaf, output / "records" / f"{name}.json", output / "HQ" / leaf
        )
    suffix = source.suffix.lower()
    video = "" if source.is_dir() else suffix if suffix in CONTAINERS else ".mp4"
    return Targets(source, output / f"{name}{'.png' if still else video}", output / f"{name}.json")
