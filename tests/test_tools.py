"""The scripts under tools/, run as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from recavsr.models.decoder import ConvolutionalHead, DecoderLayer
from recavsr.models.presets import nano, nano_decoder
from recavsr.models.weights import save_model_folder
from recavsr.training.nano import NanoTraining
from tiny import CHANNELS, DECODER, STRIDE, lively, tiny_decoder, tiny_generator, tiny_prompt

TOOLS = Path(__file__).resolve().parents[1] / "tools"
VAE = {
    "scale_factor_spatial": STRIDE,
    "scale_factor_temporal": 4,
    "z_dim": CHANNELS,
    "latents_mean": list(DECODER.latents_mean),
    "latents_std": list(DECODER.latents_std),
}


def run_tool(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(TOOLS / name), *arguments], capture_output=True, text=True)


def average(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_tool("average_weights.py", *arguments)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    for seed in (1, 2):
        made = (tiny_generator(seed=seed), tiny_decoder(seed=seed), tiny_prompt() * seed)
        save_model_folder(tmp_path / str(seed), *made, VAE, torch.float32)
    return [tmp_path / "1", tmp_path / "2"]


def test_the_mean_of_weights_is_shared_out_as_asked(folders: list[Path], tmp_path: Path) -> None:
    one, two = folders
    done = average(f"{one}=0.25", f"{two}=0.75", "-o", str(tmp_path / "mean"))
    assert done.returncode == 0, done.stderr
    for name in ("transformer", "flashdecoder", "prompt"):
        first, second, mean = (
            load_file(str(folder / f"{name}.safetensors")) for folder in (one, two, tmp_path / "mean")
        )
        assert first.keys() == mean.keys()
        for key, value in mean.items():
            torch.testing.assert_close(value, 0.25 * first[key] + 0.75 * second[key])


def test_only_the_decoder_may_be_drawn_back(folders: list[Path], tmp_path: Path) -> None:
    one, two = folders
    config = json.loads((two / "model_config.json").read_text())
    (two / "model_config.json").write_text(json.dumps({**config, "eps": 1e-3}))  # another generator
    done = average(f"{one}=0.25", f"{two}=0.75", "--decoder-only", "-o", str(tmp_path / "mean"))
    assert done.returncode == 0, done.stderr
    for name in ("model_config.json", "transformer.safetensors", "prompt.safetensors"):
        assert (tmp_path / "mean" / name).read_bytes() == (one / name).read_bytes()
    first, second, mean = (
        load_file(str(folder / "flashdecoder.safetensors")) for folder in (one, two, tmp_path / "mean")
    )
    for key, value in mean.items():
        kept = key == "latent_projection.weight"
        torch.testing.assert_close(value, first[key] if kept else 0.25 * first[key] + 0.75 * second[key])


def test_what_does_not_fit_together_is_refused(folders: list[Path], tmp_path: Path) -> None:
    one, two = folders
    output = tmp_path / "mean"
    done = average(f"{one}=0.5", f"{two}=0.6", "-o", str(output))
    assert (done.returncode, done.stderr) == (2, "the shares must add up to 1\n")
    config = json.loads((two / "model_config.json").read_text())
    (two / "model_config.json").write_text(json.dumps({**config, "eps": 1e-3}))
    done = average(f"{one}=0.5", f"{two}=0.5", "-o", str(output))
    assert done.returncode == 2
    assert "different configs" in done.stderr
    assert not output.exists()


def test_a_model_is_made_to_read_its_lr_frames_at_half_their_size(tmp_path: Path) -> None:
    """On enlarged frames what read pixels gives the same from their means, but at the picture's border."""
    full, half = tmp_path / "full", tmp_path / "half"
    model = NanoTraining(replace(nano(), lr_halved=False), replace(nano_decoder(), lr_halved=False))
    lively(model)
    model.export(full)
    done = run_tool("halve_lr.py", str(full), "-o", str(half), "--window", "4")
    assert done.returncode == 0, done.stderr
    old, new = (NanoTraining.starting_from(folder) for folder in (full, half))
    assert (new.generator.config.lr_halved, new.decoder.config.lr_halved) == (True, True)
    assert new.decoder.config.window == replace(old.decoder.config.window, height=4, width=4)

    torch.manual_seed(0)
    small = torch.randn(2, 3, 40, 40).cumsum(2).cumsum(3).clamp(-8, 8)
    frames = F.interpolate(small, scale_factor=4, mode="bilinear")[:, :, 16:-16, 16:-16]

    def read(model: NanoTraining) -> list[Tensor]:
        given = F.avg_pool2d(frames, 2) if model.decoder.config.lr_halved else frames
        opened = F.pixel_unshuffle(given, model.generator.lr_projector.cell)
        first = model.generator.lr_projector.conv1.weight.sum(2)  # of a clip that stands still
        head = cast(ConvolutionalHead, model.decoder.head)
        return [
            F.conv2d(opened, first),
            F.conv2d(opened, model.decoder.lr_stem.weight[..., None, None]),
            F.conv2d(F.pixel_unshuffle(given, head.lr_factor), head.stem.weight),
        ]

    with torch.no_grad():
        for wanted, made in zip(read(old), read(new)):
            assert (made - wanted).std() < 0.02 * wanted.std()

    for window in ("0", "-2"):
        done = run_tool("halve_lr.py", str(full), "-o", str(tmp_path / "again"), "--window", window)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert done.stderr.startswith(f"a window of {window} cells won't do: ")
    done = run_tool("halve_lr.py", str(half), "-o", str(tmp_path / "again"))
    assert (done.returncode, done.stderr) == (
        2,
        "this model reads its LR frames at half their size already\n",
    )


def test_saturated_attention_gets_its_gradient_back(tmp_path: Path) -> None:
    """A layer's queries return to the size of the others'; what each looks at most stays."""
    hard, soft = tmp_path / "hard", tmp_path / "soft"
    model = NanoTraining()
    lively(model)
    layers = cast(Sequence[DecoderLayer], model.decoder.refinement)
    with torch.no_grad():
        for values in layers[0].attention.query.parameters():
            values.mul_(300)
        layers[0].attention.key_norm.weight.mul_(12)
    model.export(hard)
    done = run_tool("soften_attention.py", str(hard), "-o", str(soft))
    assert (done.returncode, done.stdout) == (0, "softened: refinement layer 1\n"), done.stderr

    old, new = (NanoTraining.starting_from(folder).decoder for folder in (hard, soft))
    before, after = (cast(Sequence[DecoderLayer], decoder.refinement)[0].attention for decoder in (old, new))
    query = after.query.weight
    other = cast(Sequence[DecoderLayer], new.refinement)[1].attention.query.weight
    assert 0.5 < query.std() / other.std() < 2
    torch.testing.assert_close(after.key_norm.weight.abs().mean().item(), 1.0, rtol=0.01, atol=0)
    for name, value in before.state_dict().items():  # scaled as a whole, or as it was
        ratio = after.state_dict()[name] / value
        torch.testing.assert_close(ratio, ratio.flatten()[0].expand_as(ratio), rtol=0.05, atol=0)

    done = run_tool("soften_attention.py", str(soft), "-o", str(tmp_path / "again"))
    assert (done.returncode, done.stderr) == (2, "no layer's attention is saturated\n")
