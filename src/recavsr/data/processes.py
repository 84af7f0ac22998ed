"""Worker processes for reading data, and what happens to them when a run is interrupted."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


class Spread(Protocol):
    """What `spread_over` gives."""

    def __call__(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Call `function` with each item; return the results in the items' order."""
        ...


def become_worker() -> None:
    """Make this process one of many that make training data: one thread, and deaf to Ctrl-C.

    A terminal sends that to all of them; the trainer, which may want a last batch, ends its workers itself.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


@contextmanager
def spread_over(processes: int) -> Iterator[Spread]:
    """Open `processes` worker processes and give a function that spreads calls over them.

    With 0 the calls are made in this process. An error, in a call or in the block, ends the block once the
    running calls have ended; those that wait are dropped. Scripts that use processes need the usual
    `if __name__ == "__main__"`.
    """
    if not processes:
        yield lambda function, items: [function(item) for item in items]
        return

    def spread(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        # Not `map` of the executor: it cancels waiting calls by itself, and where the workers were told to
        # end as well, Python 3.11's executor fails over that in a thread of its own.
        waiting = [executor.submit(function, item) for item in items]
        return [future.result() for future in waiting]

    executor = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    try:
        yield spread
    except BaseException:
        executor.shutdown(cancel_futures=True)
        raise
    executor.shutdown()
