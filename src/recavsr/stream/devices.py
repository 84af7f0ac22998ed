"""One stream over several devices: each computes a band of the picture's rows, in a process of its own.

The caller's process has the first device and hands out LR frames; workers have the others, are told what to
do line by line in JSON, and hand back their rows (see `models.row_parallel`). What a worker remembers of a
stream stays with it, under a number.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recavsr.errors import InputError
from recavsr.models.row_parallel import Band
from recavsr.state import State
from recavsr.stream.step import ReCaVSR, StreamState

_GRACE_SECONDS = 3.0
"""How long a process may take to end by itself when it is no longer wanted, or to say why it failed."""

_POLL_SECONDS, _WATCH_SECONDS = 2e-4, 0.1
_PATIENCE = timedelta(minutes=5)


@dataclass(frozen=True)
class SharedState(State):
    """The state of a stream over several devices: of this process, and the number of the workers' own."""

    own: StreamState
    others: _Kept | None
    """None before the first block: then all are alike."""

    def clone(self) -> SharedState:
        """Return a copy; every worker makes its own."""
        return SharedState(self.own.clone(), None if self.others is None else self.others.clone())

    def gathered(self) -> GatheredState:
        """Return the same state with the workers' parts in this process, in main memory, to be saved."""
        parts = [] if self.others is None else self.others.fetch()
        return GatheredState((self.own.to("cpu"), *parts))


@dataclass(frozen=True)
class GatheredState(State):
    """What every process remembers, in one place; one part where all are alike."""

    parts: tuple[StreamState, ...]


class _Kept:
    """What the workers keep under one number, until nothing here refers to it any more."""

    def __init__(self, model: SharedModel, number: int) -> None:
        self.model, self.number, self.spent = model, number, False
        weakref.finalize(self, model._unwanted.append, number)

    def clone(self) -> _Kept:
        copy = _Kept(self.model, next(self.model._numbers))
        self.model._tell({"do": "copy", "from": self.number, "to": copy.number})
        return copy

    def fetch(self) -> list[StreamState]:
        return self.model._fetch(self.number)


class SharedModel:
    """A block model over several devices: see `open_shared`."""

    def __init__(self, local: ReCaVSR, workers: Sequence[_Worker]) -> None:
        """Take this process's part, and workers that are ready and connected."""
        self._local, self._workers = local, list(workers)
        self.ranks = 1 + len(workers)
        self.name, self.blocks = local.name, local.blocks
        self.size_multiple, self.native_scale = local.size_multiple, local.native_scale
        self.device, self.dtype, self.graphs = local.device, local.dtype, local.graphs
        self.fingerprint = f"{local.fingerprint} in {self.ranks} bands"
        self._numbers, self._unwanted = count(), deque[int]()
        self._lock = threading.RLock()  # another thread may save a state meanwhile
        self._ended: str | None = None
        closing = threading.Event()
        if self.device.type == "cuda":
            watch = threading.Thread(target=_watch, args=(self._workers, closing), daemon=True)
            watch.start()
        self._finalizer = weakref.finalize(self, _end, self._workers, closing)

    def start(self, height: int, width: int, *, seed: int = 42, shot: int = 0) -> SharedState:
        """Return the state before the first block of a shot; sizes are padded output pixels."""
        return SharedState(self._local.start(height, width, seed=seed, shot=shot), None)

    @torch.inference_mode()
    def step(
        self, state: SharedState | GatheredState, lr_frames: Tensor, wanted: int | None = None
    ) -> tuple[SharedState, Tensor]:
        """Make the next block as `ReCaVSR.step` does; the state given is spent.

        Raises InputError where a worker was lost: the model can not be used any more.
        """
        self._check()
        lr_frames = lr_frames.to(self.dtype)
        if isinstance(state, GatheredState):
            state = self._spread(state)
        own, before = state.own, None
        if state.others is not None:
            if state.others.spent:
                raise ValueError("this state is spent: a block was made of it")
            before, state.others.spent = state.others.number, True
        with self._lock, self._on_failure_end(), _current(self.device):
            after = _Kept(self, next(self._numbers))
            fresh = [own.height, own.width, own.seed, own.shot]
            order = {"do": "step", "from": before, "fresh": fresh, "to": after.number}
            self._tell({**order, "frames": lr_frames.shape[2], "wanted": wanted})
            bands = self._local.bands(own.height)
            pieces = [self._rows(lr_frames, band.lr_rows) for band in bands]
            transfer([dist.P2POp(dist.isend, piece, rank) for rank, piece in enumerate(pieces) if rank])
            made, frames = self._local.step(own, pieces[0], wanted)
            result = self._collect(frames, bands)
            self._wait()
        return SharedState(made, after), result

    def peak_memory(self) -> list[int]:
        """Return the most bytes allocated on each card since this was last asked."""
        with self._lock, self._on_failure_end():
            self._tell({"do": "memory"})
            return [_peak(self.device), *(worker.receive("memory") for worker in self._workers)]

    def close(self) -> None:
        """End the workers. The model can not be used any more."""
        self._ended = self._ended or "this model was closed"
        self._finalizer()

    def _rows(self, frames: Tensor, rows: range) -> Tensor:
        side = self.size_multiple
        return frames[:, :, :, rows.start * side : rows.stop * side].contiguous()

    def _collect(self, frames: Tensor, bands: Sequence[Band]) -> Tensor:
        """Put the bands' frames together."""
        side, first = self.size_multiple, bands[0].own
        shape = (*frames.shape[:3], bands[0].bounds[-1] * side, frames.shape[4])
        result = frames.new_empty(shape)
        result[:, :, :, first.start * side : first.stop * side] = frames
        for rank, band in enumerate(bands[1:], start=1):
            piece = frames.new_empty(*frames.shape[:3], len(band.own) * side, frames.shape[4])
            transfer([dist.P2POp(dist.irecv, piece, rank)])
            result[:, :, :, band.own.start * side : band.own.stop * side] = piece
        return result

    def _wait(self) -> None:
        """Wait until this device is done; a lost worker would let it wait for ever."""
        if self.device.type != "cuda":
            return
        done = torch.cuda.current_stream().record_event()
        while not done.query():
            if any(worker.process.poll() is not None for worker in self._workers):
                raise _LostError
            time.sleep(_POLL_SECONDS)

    def _tell(self, order: dict[str, Any]) -> None:
        """Send one order to all workers, and which numbers they may forget before it."""
        with self._lock, self._on_failure_end():
            forgotten = []
            while self._unwanted:
                forgotten.append(self._unwanted.popleft())
            for worker in self._workers:
                worker.send({**order, "forget": forgotten})

    def _fetch(self, number: int) -> list[StreamState]:
        """Return the workers' parts of a state, through files: nothing else may be under way meanwhile."""
        with self._lock, self._on_failure_end(), tempfile.TemporaryDirectory() as folder:
            self._tell({"do": "save", "from": number, "folder": folder})
            for worker in self._workers:
                worker.receive("saved")
            files = [_part(folder, rank) for rank in range(1, self.ranks)]
            return [StreamState.load(file)[0] for file in files]

    def _spread(self, state: GatheredState) -> SharedState:
        own = state.parts[0].to(self.device)
        if own.block == 0:
            return SharedState(own, None)
        if len(state.parts) != self.ranks:
            raise InputError(
                f"this state was saved on {len(state.parts)} devices; it can not go on with {self.ranks}"
            )
        kept = _Kept(self, next(self._numbers))
        with self._lock, self._on_failure_end(), tempfile.TemporaryDirectory() as folder:
            for rank, part in enumerate(state.parts[1:], start=1):
                part.save(_part(folder, rank))
            self._tell({"do": "load", "to": kept.number, "folder": folder})
            for worker in self._workers:
                worker.receive("loaded")
        return SharedState(own, kept)

    def _check(self) -> None:
        if self._ended is not None:
            raise InputError(self._ended)

    def _on_failure_end(self) -> _OnFailure:
        self._check()
        return _OnFailure(self)


class _LostError(Exception):
    """A worker has ended."""


class _OnFailure:
    """Whatever goes wrong inside ends the model; that a worker was the cause is said in one line."""

    def __init__(self, model: SharedModel) -> None:
        self.model = model

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        model = self.model
        if error is None or model._ended is not None:
            return
        cause = None
        if isinstance(error, Exception) and not isinstance(error, InputError):
            due = isinstance(error, (_LostError, RuntimeError))  # then a worker may just be ending
            cause = _who_failed(model._workers, _GRACE_SECONDS if due else 0.0)
        model._ended = cause or f"the devices' work was broken off ({type(error).__name__}: {error})"
        model._finalizer()
        if cause is not None:
            raise InputError(cause) from error


# ------------------------------------------------------------------------------------------------- opening


def open_shared(
    opener: str,
    devices: Sequence[torch.device],
    arguments: dict[str, Any],
    here: dict[str, Any] | None = None,
) -> SharedModel:
    """Open a model on several devices, the first of them in this process.

    `opener` ("module:function") is called in every process with `arguments` (plain JSON values), in this one
    also with those in `here`, with its `device` and its `share` (rank, ranks), and returns a ReCaVSR. Raises
    InputError where it does so anywhere, where the devices can not work together, or where a worker is lost.
    """
    if dist.is_initialized():
        raise InputError("several devices for one stream: this process already works with others")
    _check_devices(devices)
    workers: list[_Worker] = []
    try:
        for rank, device in enumerate(devices[1:], start=1):
            workers.append(_Worker(device, rank))
            workers[-1].send({"opener": opener, "arguments": arguments, "device": str(device),
                              "share": [rank, len(devices)]})  # fmt: skip
        local = _opened(opener, {**arguments, **(here or {})}, devices[0], (0, len(devices)))
        for worker in workers:
            worker.receive("ready")
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE)
        for worker in workers:
            worker.send({"port": store.port})
        _join(store, local.device, 0, len(devices))
        for worker in workers:
            worker.receive("connected")
    except BaseException as error:
        due = isinstance(error, (_LostError, RuntimeError))
        cause = _who_failed(workers, _GRACE_SECONDS) if due else None
        _end(workers, threading.Event())
        if cause is not None:
            raise InputError(cause) from error
        raise
    return SharedModel(local, workers)


def _check_devices(devices: Sequence[torch.device]) -> None:
    kinds, names = {device.type for device in devices}, ",".join(map(str, devices))
    if len(kinds) > 1:
        raise InputError(f"devices of one kind work together, not {names}")
    if kinds == {"cuda"}:
        cards, there = [device.index for device in devices], torch.cuda.device_count()
        if None in cards or len(set(cards)) < len(cards) or max(cards) >= there:
            raise InputError(f"{names}: name each card once, of cuda:0 to cuda:{there - 1}")


def _opened(opener: str, arguments: dict[str, Any], device: torch.device, share: tuple[int, int]) -> ReCaVSR:
    module, _, name = opener.partition(":")
    with _current(device):
        model = getattr(import_module(module), name)(**arguments, device=str(device), share=share)
    if not isinstance(model, ReCaVSR):
        raise InputError(f"{model.name} computes nothing that several devices could share")
    return model


def _join(store: dist.Store, device: torch.device, rank: int, ranks: int) -> None:
    """Connect this process with the others, and see that they are there."""
    on_card = device.type == "cuda"
    if on_card:  # a lost peer is ours to report: the library would end this process
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    with _current(device):
        dist.init_process_group(
            "nccl" if on_card else "gloo",
            store=store,
            rank=rank,
            world_size=ranks,
            timeout=_PATIENCE,
            device_id=device if on_card else None,
        )
        dist.all_reduce(torch.zeros(1, device=device))


def transfer(operations: list[dist.P2POp]) -> None:
    """Send and receive; on a card what follows on its stream waits, not the caller."""
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _peak(device: torch.device) -> int:
    """Return the most bytes allocated since this was last asked."""
    if device.type != "cuda":
        return 0
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return peak


def _current(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _part(folder: str, rank: int) -> Path:
    return Path(folder) / f"part-{rank}.safetensors"


# ------------------------------------------------------------------------------------------------- workers


class _Worker:
    """A worker process as the caller sees it."""

    def __init__(self, device: torch.device, rank: int) -> None:
        self.device, self.rank = device, rank
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        # It finds what this process finds. `-P`: modules are not taken from the folder that it starts in.
        paths = os.pathsep.join(path for path in sys.path if path)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", "from recavsr.stream.devices import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        self.failure: tuple[float, str] | None = None  # when, and what it said

    def send(self, order: dict[str, Any]) -> None:
        """Send an order; raise _LostError where nobody is there."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(order) + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise _LostError from error

    def receive(self, wanted: str) -> Any:
        """Wait for the answer of this name; raise InputError where it refused, _LostError where it ended."""
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            answer = json.loads(line)
            if wanted in answer:
                return answer[wanted]
            if "refused" in answer:
                raise InputError(answer["refused"])
            if "failed" in answer:
                self.failure = (answer["at"], answer["failed"])
        raise _LostError

    def reason(self) -> str:
        """Say, after its end, why it ended."""
        if self.failure is not None:
            return self.failure[1]
        code = self.process.returncode
        if code is not None and code < 0:
            return f"ended by signal {-code}"
        self.log.seek(0)
        said = [line.strip() for line in self.log if line.strip()]
        return said[-1] if said else f"ended with code {code}"


def _who_failed(workers: Sequence[_Worker], patience: float) -> str | None:
    """Return which worker ended and why, of several the first; None where all of them still work."""
    deadline = time.monotonic() + patience
    while all(worker.process.poll() is None for worker in workers):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.01)
    ended = [worker for worker in workers if worker.process.poll() is not None]
    for worker in ended:
        with suppress(_LostError, InputError):
            worker.receive("")  # no answer has this name: reads on to the end
    # One that was killed said nothing; what others say after it is only that it was gone.
    first = min(ended, key=lambda worker: worker.failure[0] if worker.failure else 0.0)
    return f"the worker on {first.device} was lost: {first.reason()}"


def _watch(workers: Sequence[_Worker], closing: threading.Event) -> None:
    """Where a worker is lost, let the card go on that waits for it.

    Otherwise its queue would fill up, and the thread that fills it never come to see what happened.
    """
    while not closing.wait(_WATCH_SECONDS):
        if any(worker.process.poll() is not None for worker in workers):
            _leave()
            return


def _end(workers: Sequence[_Worker], closing: threading.Event) -> None:
    """End workers and the connection with them."""
    closing.set()
    for worker in workers:
        with suppress(OSError):
            assert worker.process.stdin is not None
            worker.process.stdin.close()
    if dist.is_initialized():
        # In a thread: with a lost peer this may not come back. None can be started when the interpreter ends.
        leaving = threading.Thread(target=_leave, daemon=True)
        with suppress(RuntimeError):
            leaving.start()
            leaving.join(_GRACE_SECONDS)
    for worker in workers:
        try:
            worker.process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()
        assert worker.process.stdout is not None
        worker.process.stdout.close()
        worker.log.close()


def _leave() -> None:
    with suppress(Exception):
        if dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()


def serve() -> None:
    """Be a worker: orders come as lines on standard input, answers go to standard output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries may print: that goes to the log
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller is interrupted, and closes our input

    def answer(**message: Any) -> None:
        with suppress(OSError):
            answers.write(json.dumps(message) + "\n")
            answers.flush()

    try:
        _serve(answer)
    except InputError as error:
        answer(refused=str(error))
    except Exception as error:
        said = str(error).strip().splitlines()
        answer(failed=f"{type(error).__name__}: {said[0] if said else ''}", at=time.time())
        os._exit(1)
    os._exit(0)  # at once, whatever may still be under way on a card


@torch.inference_mode()
def _serve(answer: Callable[..., None]) -> None:
    orders = map(json.loads, iter(sys.stdin.readline, ""))
    task = next(orders)
    device = torch.device(task["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    rank, ranks = task["share"]
    model = _opened(task["opener"], task["arguments"], device, (rank, ranks))
    answer(ready=model.fingerprint)
    port = next(orders)["port"]
    _join(dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_PATIENCE), device, rank, ranks)
    answer(connected=rank)
    kept: dict[int, StreamState] = {}
    for order in orders:
        for number in order["forget"]:
            kept.pop(number, None)
        if order["do"] == "step":
            kept[order["to"]] = _step(model, kept, order)
        elif order["do"] == "copy":
            kept[order["to"]] = kept[order["from"]].clone()
        elif order["do"] == "save":
            kept[order["from"]].save(_part(order["folder"], rank))
            answer(saved=rank)
        elif order["do"] == "load":
            kept[order["to"]] = StreamState.load(_part(order["folder"], rank), device)[0]
            answer(loaded=rank)
        elif order["do"] == "memory":
            answer(memory=_peak(device))


def _step(model: ReCaVSR, kept: dict[int, StreamState], order: dict[str, Any]) -> StreamState:
    """Take the LR frames of this worker's band, make its frames, hand them over; return the state after."""
    if order["from"] is None:
        height, width, seed, shot = order["fresh"]
        state = model.start(height, width, seed=seed, shot=shot)
    else:
        state = kept.pop(order["from"])
    band = model.bands(state.height)[model.rank]
    shape = (1, 3, order["frames"], len(band.lr_rows) * model.size_multiple, state.width)
    lr_frames = torch.empty(shape, dtype=model.dtype, device=model.device)
    transfer([dist.P2POp(dist.irecv, lr_frames, 0)])
    state, frames = model.step(state, lr_frames, order["wanted"])
    transfer([dist.P2POp(dist.isend, frames.contiguous(), 0)])
    return state
