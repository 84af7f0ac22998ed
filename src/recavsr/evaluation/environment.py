"""What a reader needs to repeat a measurement: versions, processor or card, driver, commit."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def environment(device: str = "cpu") -> dict[str, Any]:
    """What a reader needs to repeat the run: versions, processor, threads, commit."""
    versions = {}
    for package in ("recavsr", "torch", "numpy", "av", "opencv-python-headless", "ncnn"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "versions": versions,
        "processor": _processor(),
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else "cpu",
        "driver": _driver() if device.startswith("cuda") else None,
        "threads": torch.get_num_threads(),
        "commit": _commit(),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the source tree, with `+` when its files differ from it; None outside a checkout."""

    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True)

    folder = Path(__file__).resolve().parent.parent
    try:
        # An installed package may lie inside somebody else's repository.
        if git("ls-files", "--error-unmatch", "evaluation/environment.py").returncode:
            return None
        head = git("rev-parse", "--short=12", "HEAD").stdout.strip()
        return head + ("+" if git("diff", "--quiet", "HEAD", "--", ".").returncode else "")
    except OSError:
        return None


def _driver() -> str | None:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None
