"""Calls spread over worker processes: their order, their errors, and the end of an interrupted run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recavsr.data.processes import spread_over

INTERRUPTED = """
import signal, sys, time
from recavsr.data.processes import spread_over

def interrupt(number, frame):
    raise KeyboardInterrupt

def slow(number):
    print("working", flush=True)
    time.sleep(60)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    try:
        with spread_over(2) as spread:
            spread(slow, range(40))
    except KeyboardInterrupt:
        sys.exit("interrupted")
"""


def square(number: int) -> int:
    """Something to call, which can fail."""
    if number < 0:
        raise ValueError(f"{number} is negative")
    return number**2


@pytest.mark.parametrize("processes", [0, 2])
def test_results_come_in_order(processes: int) -> None:
    """Results lie as the items do, also of a second call."""
    with spread_over(processes) as spread:
        assert spread(square, range(20)) == [n**2 for n in range(20)]
        assert spread(square, [3]) == [9]


@pytest.mark.parametrize("processes", [0, 2])
def test_errors_arrive(processes: int) -> None:
    """What a call raises is raised here, and ends the block."""
    with pytest.raises(ValueError, match="-1 is negative"), spread_over(processes) as spread:
        spread(square, [1, -1, 2])


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signals to groups of processes")
def test_a_whole_group_is_told_to_end(tmp_path: Path) -> None:
    """Main process and workers get SIGTERM at once, as from a scheduler: no traceback, nobody left."""
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    run = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert run.stdout is not None
    assert [run.stdout.readline() for _ in range(2)] == ["working\n", "working\n"]
    os.killpg(run.pid, signal.SIGTERM)
    _, said = run.communicate(timeout=60)
    assert (run.returncode, said) == (1, "interrupted\n")
    for _ in range(100):
        try:
            os.killpg(run.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("a worker is left")
