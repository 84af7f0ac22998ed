"""The benchmark of a 5B training step runs, at tiny sizes, on one process and sharded over two."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import REPOSITORY
from tiny import one_thread

for module in ("discriminator", "distributed", "flow_matching", "recompute"):
    pytest.importorskip(f"recavsr.training.{module}")

SCRIPT = REPOSITORY / "benchmarks" / "train_step_5b.py"
KEYS = {"stage", "layers", "gpus", "step_s", "forward_s", "backward_s", "optimizer_s", "peak_gb", "plan_gb"}


@pytest.mark.parametrize("extra", [[], ["--no-recompute"]])
def test_one_process(extra: list[str], tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("train_step_5b", SCRIPT)
    benchmark = importlib.util.module_from_spec(spec)
    sys.modules["train_step_5b"] = benchmark
    spec.loader.exec_module(benchmark)
    path = tmp_path / "result.json"
    with one_thread():
        benchmark.main(["--preset", "tiny", "--repeats", "1", "--device", "cpu", "-o", str(path), *extra])
    rows = json.loads(path.read_text())["rows"]
    assert [row["stage"] for row in rows] == [1, 2]
    for row in rows:
        assert row.keys() >= KEYS
        assert row["step_s"] > 0
        assert row["plan_gb"] >= 0
        assert "inputs of all layers" in row["plan"] or extra


def test_two_processes(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(SCRIPT), "--preset", "tiny", "--repeats", "1", "--device", "cpu", "-o", str(path)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads(path.read_text())["rows"]
    assert [row["gpus"] for row in rows] == [2, 2]
    assert all("gathered: two layers and the rest, bf16" in row["plan"] for row in rows)
