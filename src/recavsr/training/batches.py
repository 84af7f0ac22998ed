"""Where training batches come from: sources whose position can be saved, and drawing one batch ahead.

H W rows and columns of a clip, F frames.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from recavsr.data.clips import ClipSource
from recavsr.data.degradation_batch import degrade_batch
from recavsr.data.pool import PairSettings, TrainingPool, make_pairs, upsample_lr
from recavsr.data.stream import ClipStream, PairLoader, StreamedPair, StreamedPairs
from recavsr.errors import InputError
from recavsr.training.distributed import World
from recavsr.training.objective import Batch, BatchSettings


class BatchSource(Protocol):
    """An endless sequence of batches with a position in it."""

    def batch(self, settings: BatchSettings) -> Batch:
        """Return this process's share of the next batch, on the training device."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position: plain values and tensors."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position that `state_dict` returned."""
        ...

    def describe(self, number: int) -> str:
        """Say what rebuilds batch `number` (from 0), for messages."""
        ...


def size_of_batch(settings: BatchSettings, seed: int, number: int) -> tuple[int, int]:
    """Return (clips, frames) of batch `number`: still images for a share of the numbers, else video.

    A pure function of its arguments, so that all ranks draw the same kind.
    """
    draws = settings.images > 0 and settings.image_fraction > 0
    if draws and np.random.default_rng((seed, number, 7)).random() < settings.image_fraction:
        return settings.images, 1
    return settings.clips, settings.frames


def _share_of(world: World, first: int, count: int) -> range:
    """Return the numbers of this process's clips in a batch of clips `first` to `first + count`."""
    share = world.share(count, "clips of a batch")
    return range(first + world.rank * share, first + (world.rank + 1) * share)


class PairSource:
    """Batches that are a pure function of (seed, number): exact resume, the same for any number of ranks.

    Every clip is rendered and degraded for one use, on `workers` threads that work a batch ahead.
    """

    def __init__(
        self, clips: ClipSource, pairs: PairSettings, world: World, *, seed: int = 0, workers: int = 0
    ) -> None:
        if not clips.shots and not clips.photos:
            raise InputError(f"{clips.folder} holds no training data: neither videos nor photos")
        self._clips, self._pairs, self._world, self._seed = clips, pairs, world, seed
        self._number = 0
        self._first = 0  # number of the first clip of the next batch
        self._threads = ThreadPoolExecutor(workers, "pairs") if workers else None
        self._ahead: tuple[BatchSettings, list[Future[tuple[Tensor, Tensor]]]] | None = None

    def batch(self, settings: BatchSettings) -> Batch:
        """Return this rank's clips of the next batch: [B, 3, F, H, W]."""
        count, frames = size_of_batch(settings, self._seed, self._number)
        if self._threads is None:
            made = [self._make(index, frames) for index in _share_of(self._world, self._first, count)]
        else:
            if self._ahead is None or self._ahead[0] != settings:
                self._ahead = settings, self._submit(settings, self._number, self._first)
            made = [future.result() for future in self._ahead[1]]
            self._ahead = settings, self._submit(settings, self._number + 1, self._first + count)
        self._number, self._first = self._number + 1, self._first + count
        hq, lr = (torch.stack(parts).to(self._world.device, non_blocking=True) for parts in zip(*made))
        return Batch(hq, lr)

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of the next batch and its first clip."""
        return {"number": self._number, "first": self._first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a batch."""
        self._number, self._first = state["number"], state["first"]
        self._ahead = None

    def describe(self, number: int) -> str:
        """Name seed and batch."""
        return f"batch seed ({self._seed}, {number})"

    def close(self) -> None:
        """Stop the threads; what they work ahead on is dropped."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

    def _submit(
        self, settings: BatchSettings, number: int, first: int
    ) -> list[Future[tuple[Tensor, Tensor]]]:
        assert self._threads is not None
        count, frames = size_of_batch(settings, self._seed, number)
        return [
            self._threads.submit(self._make, index, frames) for index in _share_of(self._world, first, count)
        ]

    def _make(self, index: int, frames: int) -> tuple[Tensor, Tensor]:
        """Make clip `index`: HQ and enlarged LR, [3, F, H, W] in [-1, 1]."""
        settings = replace(self._pairs, frames=frames, degradations=1)
        if frames == 1 and settings.image_video_fraction is not None:
            settings = replace(settings, video_fraction=settings.image_video_fraction)
        (pair,) = make_pairs(self._clips, settings, self._seed, index)
        lr = upsample_lr(pair.lr, settings.size)
        return pair.hq.transpose(0, 1).mul(2).sub_(1), lr.transpose(0, 1).contiguous()


class StreamSource:
    """Batches of a `ClipStream`: a pure function of (seed, number) for sets of any size, made by processes.

    The same for any number of ranks and of workers. Clips and images have an order each, so that every shot
    comes once in a pass. A damaged file is passed over, with a line to `say` when it is first met; raises
    InputError where more than `tolerated` of this rank's draws, or eight in a row, met one.

    `degrade_on_device` leaves the degradation to the training device: the same records, other noise, video
    codecs by their stand-in (`data.degradation_batch`). Workers then only decode and crop.
    """

    def __init__(
        self,
        stream: ClipStream,
        pairs: PairSettings,
        world: World,
        *,
        seed: int = 0,
        workers: int = 0,
        degrade_on_device: bool = False,
        tolerated: float = 0.02,
        say: Callable[[str], None] = print,
    ) -> None:
        self._pairs = StreamedPairs(stream, pairs, seed, degrade=not degrade_on_device)
        self._loader = PairLoader(self._pairs, workers, pinned=world.device.type == "cuda")
        self._world, self._seed, self._tolerated, self._say = world, seed, tolerated, say
        self._number = 0
        self._drawn = {"clips": 0, "images": 0}  # of all ranks, before the next batch
        self._ahead: tuple[BatchSettings, Iterator[StreamedPair]] | None = None
        self._made = 0
        self._damaged: Counter[str] = Counter()

    def batch(self, settings: BatchSettings) -> Batch:
        """Return this rank's clips of the next batch: [B, 3, F, H, W]."""
        if self._ahead is None or self._ahead[0] != settings:
            self._pairs.draw(0, settings.frames)  # says here, not in a worker, that nothing is large enough
            self._ahead = settings, self._loader.pairs(self._keys(settings))
        count, frames = size_of_batch(settings, self._seed, self._number)
        numbers = _share_of(self._world, self._drawn[_order_of(frames)], count)
        pairs = [self._checked(next(self._ahead[1])) for _ in numbers]
        self._number += 1
        self._drawn[_order_of(frames)] += count
        hq = torch.stack([self._on_device(pair.hq) for pair in pairs])
        if self._pairs.degrade:
            small = [self._on_device(pair.lr) for pair in pairs]
        else:
            small = [self._degraded(clip, number) for clip, number in zip(hq, numbers)]
        lr = torch.stack([upsample_lr(clip, self._pairs.settings.size) for clip in small])
        return Batch(hq.transpose(1, 2).float().div_(127.5).sub_(1), lr.transpose(1, 2).contiguous())

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of the next batch, its first clip and its first image."""
        return {"number": self._number, **self._drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a batch."""
        self._number = state["number"]
        self._drawn = {name: state[name] for name in self._drawn}
        self._ahead = None

    def describe(self, number: int) -> str:
        """Name seed and batch."""
        return f"batch seed ({self._seed}, {number})"

    def close(self) -> None:
        """Stop the workers."""
        self._ahead = None
        self._loader.close()

    def _keys(self, settings: BatchSettings) -> Iterator[tuple[int, int]]:
        """Yield (number, frames) of this rank's clips, from the next batch on without end."""
        drawn = dict(self._drawn)
        for number in itertools.count(self._number):
            count, frames = size_of_batch(settings, self._seed, number)
            for index in _share_of(self._world, drawn[_order_of(frames)], count):
                yield index, frames
            drawn[_order_of(frames)] += count

    def _degraded(self, clip: Tensor, number: int) -> Tensor:
        """The LR frames of HQ clip `number` [F, 3, H, W], uint8 alike: a function of seed, number and F."""
        frames = len(clip)
        state = np.random.SeedSequence((self._seed, number, frames, 8)).generate_state(2, np.uint32)
        noise = torch.Generator(clip.device).manual_seed(int(state[0]) << 32 | int(state[1]))
        return degrade_batch(clip.float().div_(255)[None], [self._pairs.record(number, frames)], noise)[0]

    def _on_device(self, clip: Tensor) -> Tensor:
        return clip.to(self._world.device, non_blocking=True)

    def _checked(self, pair: StreamedPair) -> StreamedPair:
        self._made += 1
        for file, reason in pair.damaged:
            if file not in self._damaged:
                self._say(f"passed over: {file}: {reason}")
            self._damaged[file] += 1
        met = self._damaged.total()
        if not pair.hq.numel() or met > max(8, self._tolerated * self._made):
            file, reason = pair.damaged[-1]
            raise InputError(
                f"{met} of {self._made} draws met damaged files, {len(self._damaged)} different ones, the "
                f"last {file} ({reason}): is the set complete, and its index new?"
            )
        return pair


def _order_of(frames: int) -> str:
    return "images" if frames == 1 else "clips"


class PoolSource:
    """Batches of a `TrainingPool`: throughput for a GPU.

    What the pool holds depends on how fast its workers are, so a resumed run sees other batches than
    an uninterrupted one (with workers=0 the same, if the pool is made and filled the same way).
    """

    def __init__(self, pool: TrainingPool, world: World, *, seed: int = 0, made_before: int = 0) -> None:
        self._pool, self._world, self._seed, self._made_before = pool, world, seed, made_before
        self._number = 0

    def batch(self, settings: BatchSettings) -> Batch:
        """Return random windows of random records."""
        count, frames = size_of_batch(settings, self._seed, self._number)
        self._number += 1
        return Batch(*self._pool.batch(self._world.share(count, "clips of a batch"), frames))

    def state_dict(self) -> dict[str, Any]:
        """Return the batch's number, the pool's position, and how many records the run had made."""
        pool = self._pool.state_dict()
        return {"number": self._number, **pool, "made": self._made_before + pool["made"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on drawing from a position."""
        self._number = state["number"]
        self._pool.load_state_dict(state)

    def describe(self, number: int) -> str:
        """Name seed and batch; a pool with workers can't draw it again."""
        return f"batch {number} of pool seed {self._seed}"


class Prefetch:
    """Draws the next batch while a step runs: on a card on a stream of its own."""

    def __init__(self, source: BatchSource, settings: BatchSettings, device: torch.device) -> None:
        self._source, self._settings = source, settings
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._position: dict[str, Any] = source.state_dict()
        self._waiting: Batch | None = None
        self._taken: torch.cuda.Event | None = None

    def prepare(self) -> None:
        """Draw the next batch now, if it is not waiting already."""
        if self._waiting is not None:
            return
        if self._taken is not None:
            # Wait for the step before the present one, or the batches of a host far ahead fill the card.
            self._taken.synchronize()
        self._position = self._source.state_dict()
        with torch.cuda.stream(self._stream):  # None: no change
            self._waiting = self._source.batch(self._settings)

    def peek(self) -> Batch:
        """Return the next batch and keep it."""
        self.prepare()
        assert self._waiting is not None
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_stream(self._stream)
            for tensor in self._waiting:
                tensor.record_stream(current)
        return self._waiting

    def take(self) -> Batch:
        """Return the next batch, in order for the current stream."""
        batch = self.peek()
        self._waiting = None
        if self._stream is not None:
            self._taken = torch.cuda.current_stream(self._stream.device).record_event()
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the batch that `take` returns next."""
        return self._position if self._waiting is not None else self._source.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position; a batch that waits is dropped."""
        self._source.load_state_dict(state)
        self._waiting = None
