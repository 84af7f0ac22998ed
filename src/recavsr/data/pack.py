"""A training set as a few folders that travel: original files, cut at shots, described by one index.

`build_pack` copies clips and photos unchanged (no second compression) into `part0`, `part1`, ... and
writes `index.json` beside them; `data.clips.ClipSource` decodes it.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from recavsr.errors import InputError
from recavsr.video.memory_codec import Planes, decode_planes

SHORTEST_SHOT = 10
"""Shots of fewer frames are left out."""
_LARGE_ROWS = 700  # web video of this many rows is soft: it is used at 2/3 of its size
_SMALLEST_SIDE = 256


@dataclass(frozen=True)
class PackedVideo:
    """One clip: its file in the pack, its size, the size it is used at, its shots (first frame, frames).

    `keyframes`: (number, pts) of frames where decoding can begin, for those who read a part of it.
    """

    name: str
    file: str
    licence: str
    frames: int
    size: tuple[int, int]
    used_size: tuple[int, int]
    weight: float
    split: str
    shots: tuple[tuple[int, int], ...]
    keyframes: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class PackedPhoto:
    """One photo: its file in the pack and its size (rows, columns)."""

    name: str
    file: str
    licence: str
    size: tuple[int, int]
    split: str


@dataclass(frozen=True)
class PackIndex:
    """What a pack holds; `split` of an item is "train" or "validation"."""

    videos: tuple[PackedVideo, ...]
    photos: tuple[PackedPhoto, ...]

    def to_json(self) -> str:
        """Return the text of an `index.json`, an item a line."""
        lists = (
            f'"{name}": [\n' + ",\n".join(json.dumps(asdict(item)) for item in items) + "\n]"
            for name, items in (("videos", self.videos), ("photos", self.photos))
        )
        return "{" + ",\n".join(lists) + "}\n"

    @property
    def files(self) -> tuple[str, ...]:
        """All files: of a pack relative to its folder, of listed folders absolute."""
        return (*(video.file for video in self.videos), *(photo.file for photo in self.photos))

    def save(self, folder: Path) -> None:
        """Write `index.json`."""
        (folder / "index.json").write_text(self.to_json())

    @staticmethod
    def load(folder: Path) -> PackIndex:
        """Read `index.json`. Raises InputError if it is missing or is not an index."""
        path = folder / "index.json"
        if not path.is_file():
            raise InputError(
                f"{path}: not found; make it with `recavsr data index` or tools/pack_training_data.py"
            )
        try:
            data = json.loads(path.read_text())
            videos = tuple(
                PackedVideo(
                    **{
                        **video,
                        "size": tuple(video["size"]),
                        "used_size": tuple(video["used_size"]),
                        "shots": tuple((first, count) for first, count in video["shots"]),
                        "keyframes": tuple((number, pts) for number, pts in video.get("keyframes", ())),
                    }
                )
                for video in data["videos"]
            )
            photos = tuple(PackedPhoto(**{**photo, "size": tuple(photo["size"])}) for photo in data["photos"])
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: not a pack index ({error}); make the pack again") from error
        return PackIndex(videos, photos)


# ---------------------------------------------------------------- shots


def thumbnail(planes: Planes) -> np.ndarray:
    """A frame's Y, Cb, Cr planes as block means, float32 [3, 36, 64]: what cut detection looks at."""
    return np.stack([_block_means(plane) for plane in (planes.luma, planes.blue, planes.red)])


def _block_means(plane: np.ndarray) -> np.ndarray:
    rows = np.linspace(0, plane.shape[0], 37).astype(int)
    columns = np.linspace(0, plane.shape[1], 65).astype(int)
    sums = np.add.reduceat(np.add.reduceat(plane.astype(np.float32), rows[:-1], 0), columns[:-1], 1)
    # Planes of fewer samples than cells: a cell then holds one sample.
    return sums / np.maximum(np.diff(rows)[:, None] * np.diff(columns), 1)


def _histogram(thumb: np.ndarray) -> np.ndarray:
    luma = np.histogram(thumb[0], 32, (0, 256))[0]
    chroma = [np.histogram(plane, 64, (0, 256))[0] for plane in thumb[1:]]
    return np.concatenate((luma, *chroma)) / thumb[0].size


def find_cuts(thumbnails: Sequence[np.ndarray]) -> list[int]:
    """First frames of new shots (never 0), from thumbnails [3, 36, 64] of consecutive frames.

    A frame begins a shot if its luma differs from the frame before by more than 18 grey levels and
    its colours (histograms) too, or if the difference stands out among the neighbours within 3
    frames (motion lasts, a cut doesn't) and, as flashes also stand out, persists two frames on.
    """
    frames = np.stack(thumbnails)
    luma = frames[:, 0]
    if len(frames) < 2:
        return []
    jump = np.abs(np.diff(luma, axis=0)).mean((1, 2))  # jump[i]: from frame i to i + 1
    colours = np.abs(np.diff([_histogram(frame) for frame in frames], axis=0)).sum(1) / 3
    cuts = []
    for i, value in enumerate(jump):
        near = np.concatenate((jump[max(i - 3, 0) : i], jump[i + 1 : i + 4]))
        across = np.abs(luma[min(i + 2, len(luma) - 1)] - luma[max(i - 1, 0)]).mean()
        alone = value > 10 and value > 2.5 * near.max(initial=0) + 4 and across > 0.6 * value
        if alone or (value > 18 and colours[i] > 0.4):
            cuts.append(i + 1)
    return cuts


def _shots(thumbnails: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    edges = [0, *find_cuts(thumbnails), len(thumbnails)]
    shots = []
    for first, end in pairwise(edges):
        middle = thumbnails[(first + end) // 2][0]
        dark_or_flat = middle.mean() < 20 or middle.std() < 5
        if end - first >= SHORTEST_SHOT and not dark_or_flat:
            shots.append((first, end - first))
    return shots


# ---------------------------------------------------------------- packing


def used_size(height: int, width: int) -> tuple[int, int]:
    """The size a video is used at: 2/3 from 700 rows up (web 720p is soft), else its own."""
    if min(height, width) < _LARGE_ROWS:
        return height, width
    return round(height * 2 / 3), round(width * 2 / 3)


def _manifest(data: Path) -> dict[str, dict[str, str]]:
    path = data / "manifest.tsv"
    if not path.is_file():
        raise InputError(f"{path}: not found; --data must name the folder with manifest.tsv")
    with path.open(newline="", encoding="utf-8") as file:
        table = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE, restval="")
        if missing := {"path", "licence", "note"} - set(table.fieldnames or ()):
            raise InputError(f"{path}: its first line names no column {min(missing)} (columns end at tabs)")
        return {row["path"]: row for row in table}


def _note(row: dict[str, str], key: str) -> str | None:
    """The value of `key value` in a manifest note such as "class A; sharp 0.62; split train"."""
    for field in row["note"].split(";"):
        name, _, value = field.strip().partition(" ")
        if name == key:
            return value
    return None


def _spread(items: Sequence[str], count: int) -> set[str]:
    """`count` items spread evenly over a list."""
    return {items[int((i + 0.5) * len(items) / count)] for i in range(min(count, len(items)))}


class _Parts:
    """Copies files into the first part that has room."""

    def __init__(self, folder: Path, part_bytes: int) -> None:
        self.folder, self.part_bytes, self.used = folder, part_bytes, [0]

    def add(self, source: Path) -> str:
        size = source.stat().st_size
        part = next((i for i, used in enumerate(self.used) if used + size <= self.part_bytes), len(self.used))
        if part == len(self.used):
            self.used.append(0)
        self.used[part] += size
        target = self.folder / f"part{part}" / source.name
        if target.exists():
            raise InputError(f"{source}: another file of the set is called {source.name} too; rename one")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        return f"part{part}/{source.name}"


def keyframes_of(marks: Iterable[tuple[int | None, bool]]) -> tuple[tuple[int, int], ...]:
    """(number, pts) of the keyframes among all frames of a video, given as (pts, is it a keyframe)."""
    return tuple((number, pts) for number, (pts, is_key) in enumerate(marks) if is_key and pts is not None)


def _read_video(path: Path) -> tuple[tuple[int, int], list[np.ndarray], tuple[tuple[int, int], ...]]:
    size, thumbnails, marks = (0, 0), [], []
    for planes in decode_planes(path):
        size = planes.luma.shape
        thumbnails.append(thumbnail(planes))
        marks.append((planes.pts, planes.is_keyframe))
    return (size[0], size[1]), thumbnails, keyframes_of(marks)


def build_pack(
    data: Path, output: Path, *, part_bytes: int, validation_videos: int = 4, validation_photos: int = 8
) -> PackIndex:
    """Pack `data/train_video` and `data/photos` (as listed by `data/manifest.tsv`) into `output`.

    Only files that the manifest gives to training are taken. A video is drawn more often the sharper the
    manifest says it is, and by the square root of its number of shots. Raises InputError if the data
    or the output folder don't fit.
    """
    manifest = _manifest(data)
    if output.exists() and any(output.iterdir()):
        raise InputError(f"{output}: not empty; remove it or choose another -o")
    names = sorted(path for path in manifest if path.startswith("train_video/"))
    names = [path for path in names if _note(manifest[path], "split") == "train"]
    photo_names = sorted(path for path in manifest if path.startswith("photos/"))
    held_videos, held_photos = _spread(names, validation_videos), _spread(photo_names, validation_photos)
    parts = _Parts(output, part_bytes)
    videos, photos = [], []
    for name in names:
        size, thumbnails, keyframes = _read_video(data / name)
        shots = _shots(thumbnails)
        if not shots or min(used_size(*size)) < _SMALLEST_SIDE:
            continue
        sharpness = float(_note(manifest[name], "sharp") or 0.65)
        weight = float(np.clip((sharpness - 0.5) / 0.15, 0.3, 1)) * len(shots) ** 0.5
        videos.append(
            PackedVideo(
                name=Path(name).stem,
                file=parts.add(data / name),
                licence=manifest[name]["licence"],
                frames=len(thumbnails),
                size=size,
                used_size=used_size(*size),
                weight=round(weight, 4),
                split="validation" if name in held_videos else "train",
                shots=tuple(shots),
                keyframes=keyframes,
            )
        )
    for name in photo_names:
        planes = _first(decode_planes(data / name))
        photos.append(
            PackedPhoto(
                name=Path(name).stem,
                file=parts.add(data / name),
                licence=manifest[name]["licence"],
                size=(planes.luma.shape[0], planes.luma.shape[1]),
                split="validation" if name in held_photos else "train",
            )
        )
    index = PackIndex(tuple(videos), tuple(photos))
    index.save(output)
    return index


def _first(frames: Iterable[Planes]) -> Planes:
    return next(iter(frames))
