"""A Ray cluster to work on: one of this machine alone, or one that is running; and what room it has."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from recavsr.errors import InputError

THREADS = 4
"""Of a worker on a CPU, where no number is given: a model scales well up to about so many."""

_ANSWER_SECONDS = 10.0
_STARTS = 3  # Ray gives its own processes half a minute, which a busy machine exceeds
_OBJECT_STORE_BYTES = 100_000_000  # little more than names travels through Ray


@dataclass(frozen=True)
class Room:
    """How many workers there are, and what each one gets."""

    workers: int
    threads: int
    gpu: bool


def ray_module() -> ModuleType:
    """Return Ray, or raise InputError with the command that installs it."""
    try:
        import ray
    except ImportError:
        raise InputError(
            "recavsr batch works on Ray, which is not installed: pip install 'recavsr[cluster]'"
        ) from None
    return ray


@contextlib.contextmanager
def connected(address: str | None, workers: int | None, threads: int | None) -> Iterator[ModuleType]:
    """Connect to the cluster at `address`; without one, start a cluster of this machine, and end it again.

    Where the process is connected already, that connection is used. InputError says why there is no cluster.
    """
    ray = ray_module()
    # Ray's threads tell of lost workers in their own way, on standard output; the batch says it in one line.
    with contextlib.redirect_stdout(_OutputOfThisThread()):
        if ray.is_initialized():
            yield ray
            return
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere unasked
        where: dict[str, Any] = {"address": address}
        if address is not None:
            check_answers(address)
        else:
            where = {
                "address": "local",
                "num_cpus": max(usable_cores(), (workers or 1) * (threads or 1)),
                "include_dashboard": False,
                "object_store_memory": _OBJECT_STORE_BYTES,
            }
        try:
            _init(ray, where, attempts=_STARTS if address is None else 1)
            yield ray
        finally:
            ray.shutdown()


class _OutputOfThisThread(io.TextIOBase):
    """Standard output as it is, for the thread that makes this; what others write is dropped."""

    def __init__(self) -> None:
        self._output, self._thread = sys.stdout, threading.get_ident()

    def write(self, text: str) -> int:
        """Write a text, or drop it."""
        return self._output.write(text) if threading.get_ident() == self._thread else len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        self._output.flush()


def check_answers(address: str) -> None:
    """Raise InputError where nothing listens at HOST:PORT; Ray would try for minutes, and print meanwhile."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not port.isdecimal():
        return  # "auto" and the like
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"Ray: no cluster answers at {address} ({error})") from None


def _init(ray: ModuleType, where: dict[str, Any], attempts: int) -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**where, log_to_driver=False, logging_level=logging.CRITICAL)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray has put its own there
    except (
        Exception
    ) as error:  # ConnectionError, ValueError, RuntimeError or Exception: Ray has no class for it
        ray.shutdown()
        if attempts > 1:
            _init(ray, where, attempts - 1)
            return
        what = {"local": "no cluster could be started here"}.get(
            where["address"], f"no cluster answers at {where['address']}"
        )
        raise InputError(f"Ray: {what} ({' '.join(str(error).split())[:300]})") from None


def room_of(ray: ModuleType, device: str, workers: int | None, threads: int | None) -> Room:
    """Return how many workers the cluster has room for: one a GPU, or one for so many CPU threads.

    Results on a CPU depend on the threads of a worker, in the last bit, but not on the number of workers; so
    the first does not follow from the second unless the cluster is too small for both.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus = [int(node.get("CPU", 0)) for node in nodes]
    gpus = [int(node.get("GPU", 0)) for node in nodes]
    if device.startswith("cuda") and (device != "cuda" or not any(gpus)):
        raise InputError(
            "recavsr batch has one worker on each GPU; CUDA_VISIBLE_DEVICES says which: use --device cuda"
            if any(gpus)
            else "no GPU is in the cluster; use --device cpu"
        )
    gpu = any(gpus) and device in ("auto", "cuda")
    if gpu:
        share = min(cpu // cards for cpu, cards in zip(cpus, gpus) if cards)
        threads = threads or max(1, min(2 * THREADS, share))
        room = sum(min(cards, cpu // threads) for cpu, cards in zip(cpus, gpus))
    else:
        fair = THREADS if workers is None else max(1, sum(cpus) // workers)
        threads = threads or max(1, min(THREADS, fair, *(cpu for cpu in cpus if cpu)))
        room = sum(cpu // threads for cpu in cpus)
    if room < (workers or 1):
        raise InputError(
            f"the cluster has room for {room} workers of {threads} threads, not for {workers or 1}"
        )
    return Room(workers or room, threads, gpu)


def usable_cores() -> int:
    """Return how many cores this process may use; a batch system may give it few of the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
