"""Colour drift is measured as it is, block by block; the model's waiting is measured as it is."""

from __future__ import annotations

import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from media import make_clip, run_identity
from recavsr.stream.drift import Drift, color_difference
from recavsr.stream.engine import upscale
from recavsr.stream.pipeline import Timing, run_pipeline
from recavsr.stream.session import Session
from recavsr.stream.step import IdentityModel
from recavsr.video.frames import Frame, Stamp
from test_engine import Sink


class Tinting(IdentityModel):
    """Makes red lighter by 4 levels, and in the second block blue darker by 10."""

    def step(
        self, state: Any, lr_frames: torch.Tensor, wanted: int | None = None
    ) -> tuple[Any, torch.Tensor]:
        state, frames = super().step(state, lr_frames)
        tint = torch.tensor([4.0, 0.0, -10.0 * (state.block == 2)]) / 127.5
        return state, frames + tint.view(1, 3, 1, 1, 1)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16])
def test_a_tint_is_measured_in_levels(kind: type) -> None:
    frames = np.full((35, 8, 12, 3), 100 if kind is np.uint8 else 100 * 257, kind)
    session = Session(Tinting(), (8, 12), (17, 25))
    session.push(frames)
    whole = session.fork()
    session.flush()  # 21, 8, and 6 frames of the third block
    assert session.drift.blocks == 3
    assert session.drift.mean == pytest.approx((4 + 10 + 4) / 3, abs=0.01)
    assert session.drift.largest == pytest.approx(10, abs=0.01)
    assert whole.drift.blocks == 2


def test_the_color_fix_takes_the_drift_away(tmp_path: Path) -> None:
    source = make_clip(tmp_path / "in.mp4", 30)
    drifts = {}
    for fix in ("none", "wavelet", "adain"):
        report = upscale(source, tmp_path / f"{fix}.mkv", model=Tinting(), scale=2, color_fix=fix)
        drifts[fix] = report.drift
    assert drifts["none"].largest > 9
    assert drifts["wavelet"].largest < 1
    assert drifts["adain"].largest < 1


def test_the_identity_model_has_hardly_any(tmp_path: Path) -> None:
    report = run_identity(make_clip(tmp_path / "in.mp4", 30), tmp_path / "out.mkv", scale=3)
    assert report.drift.blocks == 3
    assert report.drift.largest < 0.5


def test_drift_goes_on_after_a_resume(tmp_path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (40, 8, 12, 3), dtype=np.uint8)
    whole = Session(Tinting(), (8, 12), (16, 24))
    whole.push(frames)
    half = Session(Tinting(), (8, 12), (16, 24))
    half.push(frames[:25])
    half.save(tmp_path / "state")
    second = Session.load(tmp_path / "state", Tinting())
    second.push(frames[25:])
    assert second.drift == whole.drift


def test_color_difference_against_numpy() -> None:
    rng = np.random.default_rng(1)
    sr_frames = torch.from_numpy(rng.uniform(-1.2, 1.2, (1, 3, 4, 6, 5)).astype(np.float32))
    lr_frames = rng.integers(0, 256, (4, 3, 2, 3), dtype=np.uint8)
    levels = (np.clip(sr_frames.numpy()[0], -1, 1) + 1) * 127.5
    wanted = levels.mean(axis=(1, 2, 3)) - lr_frames.reshape(-1, 3).mean(axis=0)
    assert np.allclose(color_difference(sr_frames, lr_frames), wanted, atol=1e-3)
    assert Drift().mean == 0


# -- waiting -----------------------------------------------------------------------------------------------


def frames_every(seconds: float, count: int) -> Iterator[Frame]:
    for number in range(count):
        time.sleep(seconds)
        yield Frame(np.zeros((4, 4, 3), np.uint8), Stamp(number, 1, Fraction(1, 25)))


class Sleeping(IdentityModel):
    """Takes its time for a block, as a card does: the processor is free meanwhile."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def step(
        self, state: Any, lr_frames: torch.Tensor, wanted: int | None = None
    ) -> tuple[Any, torch.Tensor]:
        time.sleep(self.seconds)
        return super().step(state, lr_frames)


class SlowSink(Sink):
    """Takes its time for a frame."""

    def write(self, frame: Frame) -> None:
        time.sleep(0.01)
        super().write(frame)


def timing_of(model: IdentityModel, every: float, sink: Sink, count: int = 61) -> Timing:
    return run_pipeline(frames_every(every, count), Session(model, (4, 4), (8, 8)), sink)


def test_waiting_is_told_from_working() -> None:
    """A slow source, a slow sink and a slow model: each time it shows which of them the run waited for."""
    slow_source = timing_of(Sleeping(0.0), 0.01, Sink())
    assert slow_source.waited_for_input > 0.5 > 0.1 > slow_source.waited_for_output
    assert slow_source.starved > 0.7
    slow_sink = timing_of(Sleeping(0.0), 0.0, SlowSink())
    assert slow_sink.waited_for_output > 0.3 > 0.1 > slow_sink.waited_for_input
    slow_model = timing_of(Sleeping(0.15), 0.0005, SlowSink())
    assert slow_model.model > 0.9
    assert slow_model.starved < 0.2
