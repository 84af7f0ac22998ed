"""Which two CPUs are fastest together in products of matrices: where to measure on a shared host.

    taskset -c "$(python benchmarks/fastest_pair.py)" python benchmarks/session_cost.py

Virtual CPUs share cores with one another, and with those of other machines on the same host: at one time
their speeds differ by a factor of two. Each CPU computes alone for a quarter of a second, in the type that
models would compute in there; the next sixteen then beside the fastest one, and the best four of them once
more. Prints the pair; all rates (TFLOP/s) go to the error stream as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence

import torch

from recavsr.stream.load import resolve_precision

SIDE, SECONDS = 1536, 0.25
DTYPE = resolve_precision("auto", torch.device("cpu"))


def rate(cpus: Sequence[int]) -> float:
    """Return what the CPUs, one thread on each, make together in TFLOP/s."""
    ends = 0.0
    made: list[float] = []

    def begin() -> None:
        nonlocal ends
        ends = time.perf_counter() + SECONDS

    start = threading.Barrier(len(cpus), action=begin)

    def work(cpu: int) -> None:
        os.sched_setaffinity(0, {cpu})  # of this thread
        torch.set_num_threads(1)
        a, b = (torch.randn(SIDE, SIDE, dtype=DTYPE) for _ in range(2))
        a @ b
        start.wait()
        count, began = 0, time.perf_counter()
        while time.perf_counter() < ends:
            a @ b
            count += 1
        made.append(2e-12 * SIDE**3 * count / (time.perf_counter() - began))

    threads = [threading.Thread(target=work, args=(cpu,)) for cpu in cpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return round(sum(made), 3)


def main() -> int:
    """Measure, and print the pair."""
    if not hasattr(os, "sched_setaffinity"):
        print("only Linux can say which CPU computes", file=sys.stderr)
        return 2
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        print("there is only one CPU", file=sys.stderr)
        return 2
    rate(cpus[:1])  # the library finds its kernels
    alone = {cpu: rate([cpu]) for cpu in cpus}
    first, *others = sorted(alone, key=alone.__getitem__, reverse=True)[:17]
    together = {cpu: rate([first, cpu]) for cpu in others}
    again = {cpu: rate([first, cpu]) for cpu in sorted(together, key=together.__getitem__)[-4:]}
    print(json.dumps({"alone": alone, f"with {first}": together, "once more": again}), file=sys.stderr)
    print(f"{first},{max(again, key=again.__getitem__)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
