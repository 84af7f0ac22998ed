"""A pool of training pairs on the GPU, fed by worker processes.

Workers draw clips, render them on the CPU, degrade them and send (spec, LR): the HQ side never
travels, it is rendered again on the trainer's device from the spec. The pool is a ring: new records
replace the oldest, batches are random windows of random records. All device work happens in the
caller's thread, inside `fill` and `batch`.

B batch, T frames of a window, H W rows and columns of an HQ clip, h w of an LR one.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from recavsr.data.clips import (
    STILL_FRACTION,
    ClipSource,
    ClipSpec,
    ClipTable,
    CropSize,
    Selection,
    StoredClips,
    render_table,
    rows_and_columns,
)
from recavsr.data.degradation import (
    SCALE_MIX,
    TRAINING_MIX,
    DegradationRecord,
    apply_degradation,
    lr_size,
    sample_degradation,
    usm_sharpen,
    with_noise_bursts,
)
from recavsr.data.processes import become_worker
from recavsr.errors import InputError


class WorkerError(RuntimeError):
    """A worker process failed; the message carries its traceback or exit code."""


@dataclass(frozen=True)
class PairSettings:
    """What pairs are made of.

    `size`: rows and columns of HQ clips, or their side; `video_fraction`: share of clips from videos, the
    others being photos under a moving camera; `still_fraction`: share of these whose camera stands still;
    `variety`: share of clips in other colours, photos at any angle and at more scales as well;
    `image_video_fraction`: share from videos among single images that are drawn as such (not out of a pool),
    None: like clips; `presets` and `scales`: shares of degradation presets and scale factors;
    `degradations`: how many LR versions are made of each rendered clip; `sharpen`: weight of the target's
    unsharp mask (0: none), which the LR is made from too; `bursts`: share of pairs with noise that comes and
    goes (`with_noise_bursts`), where the frames before know more than the present one.
    """

    frames: int = 37
    size: CropSize = 256
    video_fraction: float = 0.5
    still_fraction: float = STILL_FRACTION
    variety: float = 0.0
    image_video_fraction: float | None = None
    presets: dict[str, float] = field(default_factory=lambda: dict(TRAINING_MIX))
    scales: dict[int, float] = field(default_factory=lambda: dict(SCALE_MIX))
    degradations: int = 2
    sharpen: float = 0.0
    bursts: float = 0.0

    def __post_init__(self) -> None:
        if min(self.frames, self.degradations, *rows_and_columns(self.size)) < 1:
            raise InputError(
                f"pairs need frames, a size and degradations, not {self.frames} frames of {self.size} pixels "
                f"in {self.degradations} versions"
            )
        for name, shares in (("presets", self.presets), ("scales", self.scales)):
            if min(shares.values(), default=0) < 0 or not sum(shares.values()) > 0:
                raise InputError(f"the shares of {name} must add up to more than 0, not {shares}")
        for name in ("video_fraction", "still_fraction", "variety", "bursts"):
            if not 0 <= getattr(self, name) <= 1:
                raise InputError(f"{name} is a share from 0 to 1, not {getattr(self, name)}")


@dataclass(frozen=True)
class Pair:
    """One record: hq is float32 [T, 3, H, W] in [0, 1], lr uint8 [T, 3, h, w].

    Spec and degradation rebuild it.
    """

    spec: ClipSpec
    degradation: DegradationRecord
    hq: Tensor
    lr: Tensor


def make_pairs(source: StoredClips, settings: PairSettings, seed: int, index: int) -> list[Pair]:
    """The pairs of clip number `index`: a pure function of its arguments (on one kind of machine)."""
    rng = np.random.default_rng((seed, index))
    spec = source.sample(
        rng,
        frames=settings.frames,
        size=settings.size,
        video_fraction=settings.video_fraction,
        still_fraction=settings.still_fraction,
        variety=settings.variety,
    )
    clip = source.render(spec, settings.frames, settings.size)
    if settings.sharpen:
        clip = usm_sharpen(clip, settings.sharpen)
    drawn = (draw_degradation(rng, settings) for _ in range(settings.degradations))
    return [Pair(spec, record, clip, apply_degradation(clip, record)) for record in drawn]


def draw_degradation(rng: np.random.Generator, settings: PairSettings) -> DegradationRecord:
    """Draw preset, scale and everything else of one degradation."""
    preset = str(rng.choice(list(settings.presets), p=_shares(settings.presets)))
    scale = int(rng.choice(list(settings.scales), p=_shares(settings.scales)))
    record = sample_degradation(rng, preset, settings.frames, scale)
    if settings.bursts and rng.random() < settings.bursts:
        record = with_noise_bursts(record, rng)
    return record


def _shares(mix: dict[Any, float]) -> np.ndarray:
    values = np.array(list(mix.values()), np.float64)
    return values / values.sum()


def _work(
    connection: Connection, source_arguments: tuple, settings: PairSettings, seed: int, first: int, step: int
) -> None:
    """A worker's life: clips first, first + step, ... until the other end of the pipe closes."""
    become_worker()
    try:
        source = ClipSource(*source_arguments)
        index = first
        while True:
            for pair in make_pairs(source, settings, seed, index):
                header = pickle.dumps((pair.spec, pair.degradation.scale, tuple(pair.lr.shape)))
                connection.send_bytes(header)
                connection.send_bytes(pair.lr.flatten().numpy().data)
            index += step
    except (BrokenPipeError, ConnectionResetError):
        return
    except BaseException:
        connection.send_bytes(pickle.dumps(traceback.format_exc()))


class _Feed:
    """Worker processes, and a thread that takes records out of their pipes into a bounded queue."""

    def __init__(
        self, source: ClipSource, settings: PairSettings, workers: int, seed: int, first: int
    ) -> None:
        self._arrived: deque[tuple[ClipSpec, int, np.ndarray]] = deque()
        self._room = 256  # records that may wait; beyond it the pipes fill up and workers pause
        self._failure: str | None = None
        self._stop = threading.Event()
        context = multiprocessing.get_context("spawn")
        self._connections: list[Connection] = []
        self._processes = []
        with environment(WORKER_ENVIRONMENT):
            for number in range(workers):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_work,
                    args=(theirs, source.arguments(), settings, seed, first + number, workers),
                    daemon=True,
                    name=f"pairs-{number}",
                )
                process.start()
                theirs.close()
                self._connections.append(ours)
                self._processes.append(process)
        self._thread = threading.Thread(target=self._receive, daemon=True, name="pairs")
        self._thread.start()

    def _receive(self) -> None:
        owners = dict(zip(self._connections, self._processes))
        try:
            while not self._stop.is_set():
                if len(self._arrived) >= self._room:
                    self._stop.wait(0.005)
                    continue
                for connection in wait(list(owners), timeout=0.2):
                    assert isinstance(connection, Connection)
                    message = pickle.loads(connection.recv_bytes())
                    if isinstance(message, str):
                        raise WorkerError(f"{owners[connection].name} failed:\n{message}")
                    spec, scale, shape = message
                    pixels = np.frombuffer(connection.recv_bytes(), np.uint8).reshape(shape)
                    self._arrived.append((spec, scale, pixels))
        except WorkerError as error:
            self._failure = str(error)
        except (EOFError, OSError):
            if not self._stop.is_set():
                time.sleep(0.2)  # let the process's exit code arrive
                codes = {
                    process.name: process.exitcode
                    for process in self._processes
                    if process.exitcode is not None
                }
                self._failure = (
                    f"a worker process ended without a word (exit codes {codes}; -9: out of memory?)"
                )
        except BaseException:
            self._failure = traceback.format_exc()

    def take(self, most: int) -> list[tuple[ClipSpec, int, np.ndarray]]:
        """Up to `most` records that have arrived. Raises WorkerError if a worker has failed."""
        if self._failure is not None:
            raise WorkerError(self._failure)
        taken: list[tuple[ClipSpec, int, np.ndarray]] = []
        while self._arrived and len(taken) < most:
            taken.append(self._arrived.popleft())
        return taken

    def close(self) -> None:
        self._stop.set()
        for process in self._processes:
            process.terminate()
        self._thread.join(timeout=5)
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
        for connection in self._connections:
            connection.close()


# One thread each (numerical libraries read this when they are imported), and a heap that keeps freed
# clips instead of giving their pages back to the system and faulting them in again.
WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
    "MALLOC_TRIM_THRESHOLD_": str(2**32),
}


class environment:
    """Sets environment variables for the length of a with block."""

    def __init__(self, values: dict[str, str]) -> None:
        self._values, self._before = values, {name: os.environ.get(name) for name in values}

    def __enter__(self) -> None:
        os.environ.update(self._values)

    def __exit__(self, *_: object) -> None:
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _Ring:
    """Records of one scale: their LR pixels and the numbers that render their HQ, on the device."""

    def __init__(self, capacity: int, settings: PairSettings, scale: int, device: torch.device) -> None:
        height, width = lr_size(*rows_and_columns(settings.size), scale)
        self.capacity, self.count, self._next = capacity, 0, 0
        self.lr = torch.zeros((capacity, settings.frames, 3, height, width), dtype=torch.uint8, device=device)
        self.table = ClipTable.empty(capacity, settings.frames, device)
        self.is_video = np.zeros(capacity, bool)
        self.has_cutout = np.zeros(capacity, bool)
        self.is_coloured = np.zeros(capacity, bool)

    def add(
        self, source: ClipSource, settings: PairSettings, items: list[tuple[ClipSpec, np.ndarray]]
    ) -> None:
        """Put records in place of the oldest ones."""
        items = items[-self.capacity :]
        device = self.lr.device
        rows = (self._next + np.arange(len(items))) % self.capacity
        part = ClipTable.empty(len(items), settings.frames)
        pixels = _staging((len(items), *self.lr.shape[1:]), device)
        for i, (spec, lr) in enumerate(items):
            part.set(i, source, spec, settings.size)
            pixels[i].numpy()[:] = lr
            self.is_video[rows[i]], self.has_cutout[rows[i]] = spec.kind == "video", spec.cutout is not None
            self.is_coloured[rows[i]] = spec.is_coloured
        where = torch.from_numpy(rows).to(device)
        self.lr.index_copy_(0, where, pixels.to(device, non_blocking=True))
        for whole, new in zip(self.table.tensors(), part.tensors()):
            whole.index_copy_(0, where, new.to(device))
        self._next = int((self._next + len(items)) % self.capacity)
        self.count = min(self.count + len(items), self.capacity)


def _staging(shape: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, pin_memory=device.type == "cuda")


class TrainingPool:
    """Batches of (HQ, upsampled LR) from a ring of records on a device.

    pack: a folder made by tools/pack_training_data.py. workers: processes that make records; with 0 they are
    made in `fill` and `batch` themselves (tests, debugging). capacity: records kept, divided among
    the scales by their shares. Use it as a context manager, or call `close`. Scripts that use workers need
    the usual `if __name__ == "__main__"`.
    """

    def __init__(
        self,
        pack: Path | str,
        device: torch.device | str,
        workers: int = 14,
        capacity: int = 8192,
        *,
        settings: PairSettings | None = None,
        seed: int = 0,
        first: int = 0,
        cache: Path | None = None,
        split: str = "train",
    ) -> None:
        self.settings = PairSettings() if settings is None else settings
        self.device = torch.device(device)
        self.source = ClipSource.open(pack, cache=cache, processes=workers, split=split)
        self.made = 0
        """Records received so far."""
        self._seed, self._index = seed, first
        self._rng = np.random.default_rng((seed, 2**31))
        shares = _shares(self.settings.scales)
        self._rings = {
            scale: _Ring(max(int(capacity * share), 1), self.settings, scale, self.device)
            for scale, share in zip(self.settings.scales, shares)
        }
        self._feed = _Feed(self.source, self.settings, workers, seed, first) if workers else None
        self._pixels = _to_device(self.source.pixels, self.device)

    def __enter__(self) -> TrainingPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers. Batches from what is in the pool are no longer possible with workers."""
        if self._feed is not None:
            self._feed.close()

    @property
    def count(self) -> int:
        """Records in the pool."""
        return sum(ring.count for ring in self._rings.values())

    def state_dict(self) -> dict[str, Any]:
        """The position: the random state of the drawing, and how many records were received."""
        return {"random": self._rng.bit_generator.state, "made": self.made}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on drawing from a position. What the pool holds stays: it depends on the workers' speed."""
        self._rng.bit_generator.state = state["random"]

    def fill(self, minimum: int, *, patience_s: float = 180.0) -> None:
        """Wait until the pool holds `minimum` records and some of every scale.

        Raises WorkerError if a worker fails or nothing arrives for `patience_s` seconds, InputError
        if the pool is too small.
        """
        if minimum > sum(ring.capacity for ring in self._rings.values()):
            raise InputError(f"a pool can't be filled to {minimum} records; raise its capacity")
        last = time.monotonic()
        while self.count < minimum or any(ring.count == 0 for ring in self._rings.values()):
            if self._take(64):
                last = time.monotonic()
            elif time.monotonic() - last > patience_s:
                raise WorkerError(f"no record arrived for {patience_s:.0f} s")
            else:
                time.sleep(0.01)

    def _take(self, most: int) -> int:
        """Move up to `most` waiting records into the rings; returns how many there were."""
        if self._feed is None:
            pairs = make_pairs(self.source, self.settings, self._seed, self._index)
            self._index += 1
            items = [(pair.spec, pair.degradation.scale, pair.lr.numpy()) for pair in pairs]
        else:
            items = self._feed.take(most)
        for scale, ring in self._rings.items():
            own = [(spec, lr) for spec, own_scale, lr in items if own_scale == scale]
            if own:
                ring.add(self.source, self.settings, own)
        self.made += len(items)
        return len(items)

    def batch(
        self, batch_size: int, frames: int, *, scale: int | None = None, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """A random batch: (hq, lr_up), both [B, 3, T, H, W] in [-1, 1] on the pool's device.

        Windows of `frames` frames start anywhere in their clips. scale: only records of that factor;
        default all, by their shares. lr_up is the LR enlarged to that size by `upsample_lr`. Takes in new
        records first (workers=0: only `fill` makes any).
        """
        if self._feed is not None:
            self._take(32)
        if frames > self.settings.frames:
            raise InputError(f"windows of {frames} frames don't fit clips of {self.settings.frames}")
        scales = list(self._rings) if scale is None else [scale]
        if any(name not in self._rings or self._rings[name].count == 0 for name in scales):
            raise InputError("the pool is empty for a wanted scale; call fill first")
        shares = _shares({name: self.settings.scales[name] for name in scales})
        chosen = self._rng.choice(scales, batch_size, p=shares)
        size = rows_and_columns(self.settings.size)
        hq = torch.empty((batch_size, 3, frames, *size), device=self.device, dtype=dtype)
        lr_up = torch.empty_like(hq)
        for name in np.unique(chosen):
            places = torch.from_numpy(np.flatnonzero(chosen == name)).to(self.device)
            high, low = self._windows(self._rings[int(name)], len(places), frames)
            if len(places) == batch_size:
                hq.copy_(high)
                lr_up.copy_(low)
            else:
                hq.index_copy_(0, places, high.to(dtype))
                lr_up.index_copy_(0, places, low.to(dtype))
        return hq, lr_up

    def _windows(self, ring: _Ring, count: int, frames: int) -> tuple[Tensor, Tensor]:
        """`count` random windows of a ring: HQ and upsampled LR, float32 [count, 3, T, H, W] in [-1, 1]."""
        size = self.settings.size
        rows = self._rng.integers(ring.count, size=count)
        starts = self._rng.integers(self.settings.frames - frames + 1, size=count)
        places = np.arange(count)
        is_video, has_cutout, is_coloured = (
            kind[rows] for kind in (ring.is_video, ring.has_cutout, ring.is_coloured)
        )
        groups = (is_video, ~is_video, has_cutout, is_coloured)
        # One small copy to the device for all indices.
        packed = np.concatenate(
            [np.stack((rows, places, starts))[:, group] for group in (*groups, slice(None))], 1
        )
        numbers = torch.from_numpy(packed).to(self.device)
        ends = np.cumsum([int(group.sum()) for group in groups])
        *kinds, everything = numbers.tensor_split(ends.tolist(), dim=1)
        selection = Selection(*(tuple(part) for part in kinds))  # type: ignore[arg-type]
        hq = render_table(self._pixels, ring.table, selection, count, frames, size)
        if self.settings.sharpen:
            hq = usm_sharpen(hq, self.settings.sharpen)
        window = everything[2][:, None] + torch.arange(frames, device=self.device)
        lr = ring.lr[everything[0][:, None], window]
        return hq.transpose(1, 2).mul(2).sub_(1), upsample_lr(lr, size).transpose(1, 2)


def upsample_lr(lr: Tensor, size: CropSize) -> Tensor:
    """uint8 [..., 3, h, w] -> float32 [..., 3, H, W] in [-1, 1].

    `F.interpolate(mode="bilinear", align_corners=False)` of the 8-bit values, rounded to 8 bits: what the
    models get in inference.
    """
    size = rows_and_columns(size)
    flat = F.interpolate(lr.flatten(0, -4).float(), size=size, mode="bilinear", align_corners=False)
    return flat.round_().div_(127.5).sub_(1).view(*lr.shape[:-2], *size)


def _to_device(pixels: np.ndarray, device: torch.device) -> Tensor:
    """The flat pixel buffer on a device; on the CPU the mapped file itself."""
    if device.type == "cpu":
        return torch.from_numpy(pixels)
    result = torch.empty(len(pixels), dtype=torch.uint8, device=device)
    step = 2**28
    for start in range(0, len(pixels), step):
        result[start : start + step] = torch.from_numpy(np.array(pixels[start : start + step])).to(device)
    return result
