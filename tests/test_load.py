"""Finding models by name, and what is refused before any weights are read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from recavsr.errors import InputError
from recavsr.fp8 import FP8Linear
from recavsr.stream.engine import upscale
from recavsr.stream.load import load, model_folder, resolve_device
from recavsr.stream.step import ReCaVSR
from recavsr.video.clips import write_clip


@pytest.mark.parametrize("name", ["identity", "nano"])
def test_an_unknown_precision_is_refused_for_every_model(name: str) -> None:
    with pytest.raises(InputError, match="fp3"):
        load(name, device="cpu", precision="fp3")


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(InputError, match="choose auto, cpu, cuda"):
        load("identity", device="abacus")


@pytest.mark.parametrize("device", ["mps", "xpu", "meta"])
def test_a_device_that_can_not_be_used_is_refused(device: str) -> None:
    if device != "meta" and getattr(torch, device).is_available():
        pytest.skip(f"there is {device}")
    with pytest.raises(InputError, match=f"device {device} can't be used: .*; use --device cpu"):
        load("nano", device=device)


def test_a_card_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(InputError, match="there is no cuda:2: the cards here are cuda:0 to cuda:1"):
        load("nano", device="cuda:2")


@pytest.mark.parametrize("name", ["no-such-model", "./missing/folder/of/weights"])
def test_an_unknown_name_is_refused_without_asking_the_hub(name: str) -> None:
    with pytest.raises(InputError, match="no folder, no hub id"):
        load(name, device="cpu")


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=str(tmp_path)):
        load(tmp_path, device="cpu")


def test_nano_comes_with_the_package() -> None:
    model = load("nano", device="cpu", precision="bf16", first_block_latents=2)
    assert (model.name, model.device.type, model.blocks.frames(0)) == ("nano", "cpu", 5)
    weights = sum(file.stat().st_size for file in model_folder("nano").iterdir())
    assert weights < 40e6
    _, frames = model.step(model.start(64, 96), torch.zeros(1, 3, 5, 64, 96))
    assert frames.shape == (1, 3, 5, 64, 96)
    assert frames.dtype == torch.float32
    assert frames.isfinite().all()


def test_fp8_rounds_the_large_layers_of_the_generator() -> None:
    model = load("nano", device="cpu", precision="fp8")
    assert isinstance(model, ReCaVSR)
    kinds = [type(layer) for layer in model.generator.modules()]
    assert kinds.count(FP8Linear) == 6 * model.generator.config.layers
    assert not any(isinstance(layer, FP8Linear) for layer in model.decoder.modules())


def test_fp8_where_there_is_none_is_bf16_and_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("recavsr.stream.load.why_no_fp8", lambda device: "Old Card has no float8 products")
    with pytest.warns(UserWarning, match="bf16 used: Old Card"):
        model = load("nano", device="cpu", precision="fp8")
    assert isinstance(model, ReCaVSR)
    assert not any(isinstance(layer, FP8Linear) for layer in model.generator.modules())
    write_clip(tmp_path / "in.mp4", np.zeros((1, 16, 16, 3), np.uint8), 25)
    report = upscale(tmp_path / "in.mp4", tmp_path / "out.mp4", device="cpu", precision="fp8")
    assert any("Old Card" in warning for warning in report.warnings)
