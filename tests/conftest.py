"""What every test file shares: where the shared folder is, what may skip, how many threads a worker gets."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[1]


def pytest_configure(config: pytest.Config) -> None:
    """Give each xdist worker its fair share of the cores, and let interrupts through.

    A shell starts what it runs in the background with interrupts ignored; tests that interrupt need
    them here and in what they start. Without a card Triton interprets kernels; it decides that when it is
    first imported.
    """
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA card."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA card"))


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder with parity fixtures, test clips and odd-input cases (RECAVSR_SHARED, default `../shared`)."""
    folder = Path(os.environ.get("RECAVSR_SHARED", REPOSITORY.parent / "shared")).resolve()
    if not folder.is_dir():
        pytest.skip(f"no shared folder at {folder}: set RECAVSR_SHARED")
    return folder


@pytest.fixture(scope="session")
def ffmpeg() -> str:
    """Path of the ffmpeg executable. Without one the test skips, and under CI=true it fails."""
    path = shutil.which("ffmpeg")
    if path is None:
        if os.environ.get("CI") == "true":
            pytest.fail("ffmpeg is missing: CI must install it")
        pytest.skip("no ffmpeg executable")
    return path
