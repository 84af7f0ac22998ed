"""Training clips of sets of any size, each decoded from its own file when it is drawn, by worker processes.

`data.clips.ClipSource` decodes a set whole before training; a `ClipStream` decodes only the frames of each
clip, from the nearest keyframe before it, and converts only the pixels of its crop. What a process keeps
does not depend on the set: the index lies in arrays on disk that all processes map (`ClipStream.open`
writes them once), and the order of a pass over the set is computed item by item (`shuffled`).

T frames, H W rows and columns of the clip, h w rows and columns of its LR version.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import shutil
import tempfile
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from recavsr.data.clips import (
    STILL_FRACTION,
    CropSize,
    StoredClips,
    StoredShot,
    coloured,
    default_cache,
    detail_of,
    detailed_place,
    frame_numbers,
    lay_out_photo,
    making,
    mirrored,
    planes_to_rgb,
    rows_and_columns,
    store_photo,
    to_bytes,
)
from recavsr.data.degradation import DegradationRecord, apply_degradation, usm_sharpen
from recavsr.data.pack import PackIndex
from recavsr.data.pool import WORKER_ENVIRONMENT, PairSettings, WorkerError, draw_degradation, environment
from recavsr.data.processes import become_worker
from recavsr.errors import InputError
from recavsr.video.memory_codec import Planes, decode_planes, decode_planes_from

_FORMAT = 1  # raise it when the arrays of `ClipStream.open` change
_ATTEMPTS = 8  # items tried for one clip before it is given up
_PHOTO_WINDOW = 2.5  # sides of the part of a photo that a camera may roam, in sides of the clip

Kind = Literal["video", "photo"]

_ITEM = np.dtype(
    [
        ("name", np.int64),  # where its file's name ends in `names`
        ("keyframe", np.int64),  # where its keyframes end in `keyframes`
        ("frames", np.int32),
        ("rows", np.int32),
        ("columns", np.int32),
        ("used_rows", np.int32),
        ("used_columns", np.int32),
    ]
)
_SHOT = np.dtype([("video", np.int32), ("first", np.int32), ("frames", np.int32)])


class DamagedFile(Exception):
    """A file that the index lists can't be used: its name, and why."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(file, reason)
        self.file, self.reason = file, reason


# ---------------------------------------------------------------- order


def shuffled(place: int, count: int, seed: tuple[int, ...]) -> int:
    """Which of `count` items stands at a place of the shuffled order of a seed; no list is made.

    A Feistel network permutes the smallest power of four that holds `count`; places that fall outside
    are permuted again until they fall inside.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    keys = [int(key) for key in np.random.SeedSequence(seed).generate_state(4, np.uint64)]
    while True:
        left, right = place >> half, place & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        place = left << half | right
        if place < count:
            return place


def _mixed(value: int) -> int:
    """Return 64 bits that all depend on all bits of `value` (SplitMix64's last steps)."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return value ^ value >> 31


def split_places(number: int, video_fraction: float) -> tuple[Kind, int]:
    """The kind of clip `number`, and its number among those of its kind.

    Videos are spread evenly, so that any run of clips holds its share of them to within one.
    """
    share = Fraction(video_fraction).limit_denominator(1000)
    before, after = (n * share.numerator // share.denominator for n in (number, number + 1))
    return ("video", before) if after > before else ("photo", number - before)


# ---------------------------------------------------------------- the set


@dataclass(frozen=True)
class _Tables:
    """One split of an index as arrays: videos, then photos; shots; file names; (number, pts) of keyframes."""

    items: np.ndarray
    shots: np.ndarray
    names: np.ndarray
    keyframes: np.ndarray

    @staticmethod
    def of(index: PackIndex, split: str) -> _Tables:
        """Lay out an index."""
        videos = [video for video in index.videos if video.split == split]
        photos = [photo for photo in index.photos if photo.split == split]
        names = [v.file.encode() for v in videos] + [p.file.encode() for p in photos]
        sizes = [(*v.size, *v.used_size) for v in videos] + [(*p.size, *p.size) for p in photos]
        items = np.zeros(len(names), _ITEM)
        items["name"] = np.cumsum([len(name) for name in names])
        items["keyframe"] = np.cumsum([len(v.keyframes) for v in videos] + [0] * len(photos))
        items["frames"][: len(videos)] = [video.frames for video in videos]
        for column, values in zip(("rows", "columns", "used_rows", "used_columns"), zip(*sizes)):
            items[column] = values
        shots = [(n, first, count) for n, video in enumerate(videos) for first, count in video.shots]
        keyframes = [mark for video in videos for mark in video.keyframes]
        return _Tables(
            items,
            np.array(shots, _SHOT),
            np.frombuffer(b"".join(names), np.uint8),
            np.array(keyframes, np.int64).reshape(-1, 2),
        )

    def save(self, folder: Path) -> None:
        """Write an array a file."""
        for name, array in vars(self).items():
            np.save(folder / f"{name}.npy", array)

    @staticmethod
    def load(folder: Path) -> _Tables:
        """Map the arrays; nothing is read yet."""
        return _Tables(**{field.name: _mapped(folder / f"{field.name}.npy") for field in fields(_Tables)})

    def part(self, values: np.ndarray, column: str, item: int) -> np.ndarray:
        """An item's part of `names` or `keyframes`."""
        ends = self.items[column]
        return values[int(ends[item - 1]) if item else 0 : int(ends[item])]


def _write_tables(folder: Path, split: str, place: Path) -> None:
    tables = _Tables.of(PackIndex.load(folder), split)
    if not len(tables.items):
        raise InputError(f"{folder} holds no training data: neither videos nor photos")
    for left in place.parent.glob(f"{place.name}-*"):  # by processes that were killed
        shutil.rmtree(left, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{place.name}-", dir=place.parent))
    try:
        tables.save(work)
        work.rename(place)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise


def _mapped(path: Path) -> np.ndarray:
    array = np.load(path, mmap_mode="r") if path.stat().st_size > 4096 else np.load(path)
    return array.view(np.ndarray)


@dataclass(frozen=True)
class Draw:
    """One clip: place `place` in the endless shuffled order of a kind; what it is to look like."""

    kind: Kind
    place: int
    frames: int
    size: CropSize
    seed: int
    still_fraction: float = STILL_FRACTION
    variety: float = 0.0
    attempt: int = 0  # each tries another item, where the one before is damaged


class ClipStream:
    """Clips of one split of an indexed set, decoded when they are drawn.

    Every shot, and every photo, comes once in each pass over the set, in an order that is a function of seed
    and pass: the weights of an index are not used. Where and when a clip lies in its shot is drawn anew.
    """

    def __init__(self, folder: Path, tables: Path, split: str) -> None:
        self.folder, self.split = folder, split
        self._place, self._tables = tables, _Tables.load(tables)
        self._videos = int((self._tables.items["frames"] > 0).sum())
        self._fitting: dict[tuple[Kind, CropSize, int], np.ndarray] = {}

    def __reduce__(self) -> tuple[type[ClipStream], tuple[Path, Path, str]]:
        return ClipStream, (self.folder, self._place, self.split)

    @staticmethod
    def open(
        folder: Path | str,
        *,
        cache: Path | None = None,
        split: str = "train",
        say: Callable[[str], None] = lambda text: None,
    ) -> ClipStream:
        """Open the index of a folder; its arrays are written to `cache` the first time, by one process.

        say: is told before it waits for another one. Raises InputError if there is no index, nothing of the
        split in it, or no room for its arrays.
        """
        folder = Path(folder).resolve()
        path = folder / "index.json"
        identity = hashlib.sha256(f"{folder} {split} {_FORMAT}".encode())
        if path.is_file():
            with path.open("rb") as file:
                while piece := file.read(2**20):
                    identity.update(piece)
        place = (default_cache() if cache is None else cache) / f"stream-{identity.hexdigest()[:16]}"
        if not place.is_dir():
            with making(place, say):
                if not place.is_dir():
                    _write_tables(folder, split, place)
        return ClipStream(folder, place, split)

    def fitting(self, kind: Kind, size: CropSize, frames: int = 1) -> np.ndarray:
        """Numbers of the shots, or photos, from which clips can be drawn; mapped, made at the first call.

        Those as large as the crop; of shots the ones of at least half as many frames, which run back and
        forth once at most, or all if there are none.
        """
        key = (kind, size, frames)
        if key not in self._fitting:
            rows, columns = rows_and_columns(size)
            path = self._place / f"{kind}-{rows}x{columns}x{frames}.npy"
            if not path.is_file():
                with tempfile.NamedTemporaryFile(dir=self._place, suffix=".npy", delete=False) as part:
                    np.save(part, self._find_fitting(kind, rows, columns, frames))
                Path(part.name).replace(path)
            self._fitting[key] = _mapped(path)
        return self._fitting[key]

    def _find_fitting(self, kind: Kind, rows: int, columns: int, frames: int) -> np.ndarray:
        items, shots = self._tables.items, self._tables.shots
        large = (items["used_rows"] >= rows) & (items["used_columns"] >= columns)
        if kind == "photo":
            return self._videos + np.flatnonzero(large[self._videos :])
        large = large[shots["video"]]
        long = large & (2 * shots["frames"] >= frames)
        return np.flatnonzero(long if long.any() else large)

    def draw(self, number: int, frames: int, size: CropSize, video_fraction: float, seed: int) -> Draw:
        """Clip `number` of those of so many frames: a share of them from videos, the others from photos.

        Where there are none of one kind, the other stands in. Raises InputError where there are neither.
        """
        kinds = [k for k in ("video", "photo") if len(self.fitting(k, size, frames if k == "video" else 1))]
        if not kinds:
            rows, columns = rows_and_columns(size)
            raise InputError(f"{self.folder}: no {self.split} items of {columns}x{rows} pixels or more")
        if len(kinds) == 1:
            video_fraction = float(kinds == ["video"])
        kind, place = split_places(number, video_fraction)
        return Draw(kind, place, frames, size, seed)

    def clip(self, draw: Draw) -> Tensor:
        """The clip of a draw: uint8 [T, 3, H, W]. Raises DamagedFile where its file can't be used."""
        rng = np.random.default_rng((draw.seed, draw.frames, draw.place, draw.attempt, draw.kind == "video"))
        return self._video(draw, rng) if draw.kind == "video" else self._photo(draw, rng)

    def _chosen(self, draw: Draw, rng: np.random.Generator) -> int:
        """The item of a draw; after a damaged one, any other."""
        fitting = self.fitting(draw.kind, draw.size, draw.frames if draw.kind == "video" else 1)
        if draw.attempt:
            return int(rng.choice(fitting))
        turn, place = divmod(draw.place, len(fitting))
        return int(fitting[shuffled(place, len(fitting), (draw.seed, draw.frames, turn))])

    def _path(self, item: int) -> Path:
        return self.folder / self._tables.part(self._tables.names, "name", item).tobytes().decode()

    # ------------------------------------------------------------ videos

    def _video(self, draw: Draw, rng: np.random.Generator) -> Tensor:
        shot = self._tables.shots[self._chosen(draw, rng)]
        item = self._tables.items[shot["video"]]
        height, width = int(item["used_rows"]), int(item["used_columns"])
        resized = (height, width) if (height, width) != (item["rows"], item["columns"]) else None
        stored = StoredShot("", 0, int(shot["frames"]), height, width, 1.0, self.split)
        # The place in time comes from here; the place in the frame waits for a frame to measure.
        flat = np.ones((max(height // 32, 1), max(width // 32, 1)), np.float32)
        one = StoredClips("", [stored], [], np.empty(0, np.uint8), [flat], [], self.split)
        spec = one.sample(rng, frames=draw.frames, size=draw.size, video_fraction=1.0, variety=draw.variety)
        numbers = int(shot["first"]) + frame_numbers(spec, stored.frames, draw.frames)
        crops: dict[int, Tensor] = {}
        for number, planes in self._decode(int(shot["video"]), set(numbers.tolist())):
            if planes.luma.shape != (item["rows"], item["columns"]):
                raise DamagedFile(str(self._path(int(shot["video"]))), "its size is not the index's")
            if not crops:
                detail = detail_of(planes_to_rgb(planes, resized))
                y, x = detailed_place(rng, detail, height, width, draw.size)
                spec = replace(spec, y=y, x=x)
            crops[number] = _cropped(planes, resized, spec.y, spec.x, draw.size)
        clip = mirrored(torch.stack([crops[number] for number in numbers.tolist()]), spec)
        return coloured(clip.float(), spec, 255).round_().byte() if spec.is_coloured else clip

    def _decode(self, video: int, wanted: set[int]) -> Iterator[tuple[int, Planes]]:
        """Frames of a video by number, in order; decoding begins at the last keyframe before them."""
        path, first, last = self._path(video), min(wanted), max(wanted)
        keyframes = self._tables.part(self._tables.keyframes, "keyframe", video)
        before = int(np.searchsorted(keyframes[:, 0], first, "right"))
        keyframe = (int(keyframes[before - 1, 0]), int(keyframes[before - 1, 1])) if before else None
        number = first - 1
        try:
            for number, planes in enumerate(decode_planes_from(path, first, keyframe), first):
                if number in wanted:
                    yield number, planes
                if number == last:
                    return
        except InputError as error:
            raise DamagedFile(str(path), str(error).removeprefix(f"{path}: ")) from error
        raise DamagedFile(str(path), f"it ends at frame {number + 1}, before the index's end")

    # ------------------------------------------------------------ photos

    def _photo(self, draw: Draw, rng: np.random.Generator) -> Tensor:
        items = [self._chosen(draw, rng)]
        if draw.frames > 1:  # another one, of which a piece may be cut out in front
            items.append(int(rng.choice(self.fitting("photo", draw.size))))
        windows = [self._photo_window(item, draw.size, rng) for item in items]
        photos, total = [], 0
        for planes in windows:
            stored, total = lay_out_photo("", planes.luma.shape[:2], total, self.split)  # type: ignore[arg-type]
            photos.append(stored)
        pixels = np.empty(total, np.uint8)
        details = [store_photo(planes, pixels, stored) for planes, stored in zip(windows, photos)]
        clips = StoredClips("", [], photos, pixels, [], details, self.split)
        spec = clips.sample(
            rng,
            frames=draw.frames,
            size=draw.size,
            video_fraction=0.0,
            still_fraction=draw.still_fraction,
            variety=draw.variety,
        )
        clip = clips.render(spec, draw.frames, draw.size)
        return clip.mul_(255).round_().byte()

    def _photo_window(self, item: int, size: CropSize, rng: np.random.Generator) -> Planes:
        """A part of a photo, at random: all that a camera can see of it, and no more in memory."""
        path = self._path(item)
        try:
            planes = next(decode_planes(path))
        except InputError as error:
            raise DamagedFile(str(path), str(error).removeprefix(f"{path}: ")) from error
        row = self._tables.items[item]
        if planes.luma.shape != (row["rows"], row["columns"]):
            raise DamagedFile(str(path), "its size is not the index's")
        sides = [min(n, int(_PHOTO_WINDOW * s)) for n, s in zip(planes.luma.shape, rows_and_columns(size))]
        y, x = (2 * int(rng.integers((have - side) // 2 + 1)) for have, side in zip(planes.luma.shape, sides))
        return planes.crop(y, x, *sides)


def _cropped(planes: Planes, resized: tuple[int, int] | None, y: int, x: int, size: CropSize) -> Tensor:
    """A crop of a frame at its used size, uint8 [3, H, W]."""
    rows, columns = rows_and_columns(size)
    if resized is not None:
        rgb = planes_to_rgb(planes, resized)
    else:
        # Chroma is interpolated between neighbours: one more chroma sample all round.
        top, left = max(y - y % 2 - 2, 0), max(x - x % 2 - 2, 0)
        planes = planes.crop(top, left, y + rows + 3 - top, x + columns + 3 - left)
        rgb, y, x = planes_to_rgb(planes), y - top, x - left
    return torch.from_numpy(to_bytes(rgb[:, y : y + rows, x : x + columns].contiguous()))


# ---------------------------------------------------------------- pairs from workers


class StreamedPair(NamedTuple):
    """HQ uint8 [T, 3, H, W], LR uint8 [T, 3, h, w], and the files (name, reason) that had to be passed over.

    Both are empty where too many in a row were damaged.
    """

    hq: Tensor
    lr: Tensor
    damaged: list[tuple[str, str]]


class StreamedPairs:
    """Pairs of a stream by (number, frames): a pure function of these and the seed. The LR side is empty
    with `degrade=False`."""

    def __init__(
        self, stream: ClipStream, settings: PairSettings, seed: int, *, degrade: bool = True
    ) -> None:
        self.stream, self.settings, self.seed, self.degrade = stream, settings, seed, degrade

    def draw(self, number: int, frames: int) -> Draw:
        """What pair `number` of so many frames is drawn from."""
        settings = self.settings
        fraction = settings.video_fraction
        if frames == 1 and settings.image_video_fraction is not None:
            fraction = settings.image_video_fraction
        draw = self.stream.draw(number, frames, settings.size, fraction, self.seed)
        return replace(draw, still_fraction=settings.still_fraction, variety=settings.variety)

    def record(self, number: int, frames: int) -> DegradationRecord:
        """How pair `number` of so many frames is degraded."""
        rng = np.random.default_rng((self.seed, number, frames))
        return draw_degradation(rng, replace(self.settings, frames=frames))

    def __getitem__(self, key: tuple[int, int]) -> StreamedPair:
        number, frames = key
        draw = self.draw(number, frames)
        damaged = []
        for attempt in range(_ATTEMPTS):
            try:
                hq = self.stream.clip(replace(draw, attempt=attempt))
                break
            except DamagedFile as error:
                damaged.append((error.file, error.reason))
        else:
            nothing = torch.empty(0, dtype=torch.uint8)
            return StreamedPair(nothing, nothing, damaged)
        if self.settings.sharpen:
            hq = usm_sharpen(hq.float().div_(255), self.settings.sharpen).mul_(255).round_().byte()
        lr = torch.empty(0, dtype=torch.uint8)
        if self.degrade:
            lr = apply_degradation(hq.float().div_(255), self.record(number, frames))
        return StreamedPair(hq, lr, damaged)


class PairLoader:
    """Pairs in the order of their keys, made ahead by worker processes (0: in this one).

    A worker has at most `ahead` pairs waiting or in the making. `pinned` pairs copy faster to a GPU. Scripts
    that use workers need the usual `if __name__ == "__main__"`.
    """

    def __init__(self, pairs: StreamedPairs, workers: int, *, ahead: int = 2, pinned: bool = False) -> None:
        self._pairs, self._ahead, self._turn = pairs, ahead, 0
        self._workers = [_Worker(pairs, number, pinned) for number in range(workers)]

    def pairs(self, keys: Iterator[tuple[int, int]]) -> Iterator[StreamedPair]:
        """The pairs of keys, which may have no end; drops what was made ahead of an earlier call.

        Raises WorkerError if a worker fails.
        """
        self._turn += 1
        return self._made_ahead(keys, self._turn) if self._workers else map(self._pairs.__getitem__, keys)

    def _made_ahead(self, keys: Iterator[tuple[int, int]], turn: int) -> Iterator[StreamedPair]:
        at_work: deque[_Worker] = deque()
        free = self._ahead * self._workers
        while True:
            for worker, key in zip(free, keys):
                worker.ask(turn, key)
                at_work.append(worker)
            if not at_work:
                return
            free = [at_work.popleft()]
            yield free[0].take(turn)

    def close(self) -> None:
        """Stop the workers."""
        for worker in self._workers:
            worker.close()
        self._workers = []


class _Worker:
    """A process that makes pairs in the order they are asked for, and a thread that empties its pipe."""

    def __init__(self, pairs: StreamedPairs, number: int, pinned: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_work, args=(theirs, pairs), daemon=True, name=f"pairs-{number}"
        )
        with environment(WORKER_ENVIRONMENT):
            self._process.start()
        theirs.close()
        self._pinned = pinned
        self._made: SimpleQueue[tuple[int, StreamedPair] | str] = SimpleQueue()
        self._thread = threading.Thread(target=self._receive, daemon=True, name=self._process.name)
        self._thread.start()

    def ask(self, turn: int, key: tuple[int, int]) -> None:
        """Ask for one more pair."""
        with suppress(OSError):  # it has ended: `take` says why
            self._connection.send((turn, key))

    def take(self, turn: int) -> StreamedPair:
        """The next pair that was asked for in this turn."""
        while True:
            made = self._made.get()
            if isinstance(made, str):
                self._made.put(made)
                raise WorkerError(f"{self._process.name} {made}")
            if made[0] == turn:
                return made[1]

    def _receive(self) -> None:
        try:
            while True:
                message = self._connection.recv()
                if isinstance(message, str):
                    self._made.put(f"failed:\n{message}")
                    return
                turn, shapes, damaged = message
                hq, lr = (self._tensor(self._connection.recv_bytes(), shape) for shape in shapes)
                self._made.put((turn, StreamedPair(hq, lr, damaged)))
        except (EOFError, OSError):
            self._process.join(timeout=1)
            self._made.put(f"ended without a word (exit code {self._process.exitcode}; -9: out of memory?)")

    def _tensor(self, data: bytes, shape: tuple[int, ...]) -> Tensor:
        result = torch.empty(shape, dtype=torch.uint8, pin_memory=self._pinned)
        result.numpy()[:] = np.frombuffer(data, np.uint8).reshape(shape)
        return result

    def close(self) -> None:
        """End process and thread."""
        self._process.terminate()
        self._process.join()
        self._thread.join()
        self._connection.close()


def _work(connection: Connection, pairs: StreamedPairs) -> None:
    """A worker's life: makes what it is asked for until the other end of the pipe closes."""
    become_worker()
    try:
        while True:
            turn, key = connection.recv()
            pair = pairs[key]
            connection.send((turn, (tuple(pair.hq.shape), tuple(pair.lr.shape)), pair.damaged))
            for tensor in (pair.hq, pair.lr):
                connection.send_bytes(tensor.flatten().numpy().data)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except BaseException:
        connection.send(traceback.format_exc())
