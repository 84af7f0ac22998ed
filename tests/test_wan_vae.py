"""The Wan2.2 autoencoder through diffusers, at tiny sizes, and the released key list."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from recavsr.errors import InputError
from recavsr.models.wan_vae import WanVAE
from recavsr.training.paper import TINY_VAE

pytest.importorskip("diffusers", reason="needs the extra wan")

TINY = {
    **TINY_VAE,
    "clip_output": False,
    "latents_mean": [0.1 * i for i in range(48)],
    "latents_std": [1.0 + 0.1 * i for i in range(48)],
}


@pytest.fixture
def tiny() -> WanVAE:
    torch.manual_seed(0)
    return WanVAE(TINY).eval()


@torch.no_grad()
def test_shapes_normalisation_and_causality(tiny: WanVAE) -> None:
    frames = torch.rand(1, 3, 9, 32, 48) * 2 - 1
    latents = tiny.encode(frames)
    assert latents.shape == (1, 48, 3, 2, 3)
    raw = tiny.model.encode(frames).latent_dist.mode()
    assert torch.allclose(latents * tiny.latents_std + tiny.latents_mean, raw, atol=1e-5)
    changed = frames.clone()
    changed[:, :, 5:] = 0
    assert torch.allclose(tiny.encode(changed)[:, :, :2], latents[:, :, :2], atol=1e-5)
    decoded = tiny.decode(latents)
    assert decoded.shape == frames.shape
    assert decoded.abs().max() <= 1


@torch.no_grad()
def test_pieces_of_a_clip_give_the_whole(tiny: WanVAE) -> None:
    latents = torch.randn(2, 48, 5, 2, 3)
    whole = tiny.decode(latents)
    for cut in ((1, 1, 1, 1, 1), (2, 3), (5,)):
        state, pieces = tiny.start(), []
        for piece in latents.split(cut, dim=2):
            state, frames = tiny.step(state, piece)
            pieces.append(frames)
        assert torch.allclose(torch.cat(pieces, dim=2).clamp(-1, 1), whole, atol=1e-5)
    assert tiny.start().detach() == tiny.start()


def test_other_frame_counts_are_refused(tiny: WanVAE) -> None:
    with pytest.raises(ValueError, match="4 T - 3"):
        tiny.encode(torch.zeros(1, 3, 8, 32, 32))


@torch.no_grad()
def test_loads_a_folder_strictly(tiny: WanVAE, tmp_path) -> None:
    (tmp_path / "vae_config.json").write_text(json.dumps({**TINY, "_class_name": "AutoencoderKLWan"}))
    with pytest.raises(InputError, match=r"no vae\.safetensors"):
        WanVAE.load(tmp_path)
    tensors = {name: value.clone() for name, value in tiny.model.state_dict().items()}
    save_file(tensors, str(tmp_path / "vae.safetensors"))
    frames = torch.rand(1, 3, 5, 32, 32) * 2 - 1
    assert torch.equal(WanVAE.load(tmp_path).encode(frames), tiny.encode(frames))
    half = WanVAE.load(tmp_path, decoder=False)
    assert torch.equal(half.encode(frames), tiny.encode(frames))
    assert not any("decoder" in name for name, _ in half.named_parameters())
    tensors.pop("quant_conv.bias")
    save_file(tensors, str(tmp_path / "vae.safetensors"))
    with pytest.raises(InputError, match=r"missing quant_conv\.bias"):
        WanVAE.load(tmp_path)


def test_full_size_names_and_shapes(shared) -> None:
    released = json.loads((shared / "parity" / "full_size_keys.json").read_text())["vae.safetensors"]
    norm = json.loads((shared / "parity" / "latent_norm.json").read_text())
    full = {
        **TINY,
        "base_dim": 160,
        "decoder_base_dim": 256,
        "dim_mult": [1, 2, 4, 4],
        "num_res_blocks": 2,
        "latents_mean": norm["latents_mean"],
        "latents_std": norm["latents_std"],
    }
    with torch.device("meta"):
        vae = WanVAE(full)
    ours = {name: list(value.shape) for name, value in vae.model.state_dict().items()}
    assert ours == released["tensors"]
    assert sum(p.numel() for p in vae.model.parameters()) == 704_688_668
