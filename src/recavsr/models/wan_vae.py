"""The Wan2.2 autoencoder (4 x 16 x 16, 48 channels): an adapter over diffusers' class.

Needed to train against the released latents and as the reference decoder; streaming inference uses
`FlashDecoder`. Install the extra `wan`. Weights are `vae.safetensors` and `vae_config.json` of a
model folder, in diffusers' names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recavsr.errors import InputError
from recavsr.models.weights import load_strictly, read_tensors


class WanVAE(nn.Module):
    """Encodes frames to normalised latents and decodes them; deterministic (the posterior's mean)."""

    latents_mean: Tensor
    latents_std: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        """Build from the fields of a `vae_config.json`; raise InputError where they do not fit."""
        super().__init__()
        try:
            from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
        except ImportError as error:
            raise InputError("the Wan2.2 autoencoder needs diffusers: pip install 'recavsr[wan]'") from error
        # `clip_output` stands in the published configs, but the class always clips.
        ignored = ("clip_output",)
        fields = {k: v for k, v in config.items() if not k.startswith("_") and k not in ignored}
        try:
            self.model = AutoencoderKLWan(**fields)
            mean, std = (torch.tensor(fields[name]) for name in ("latents_mean", "latents_std"))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"vae_config.json does not describe a Wan autoencoder: {error}") from error
        self.register_buffer("latents_mean", mean.view(1, -1, 1, 1, 1), persistent=False)
        self.register_buffer("latents_std", std.view(1, -1, 1, 1, 1), persistent=False)

    @classmethod
    def load(
        cls, folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> WanVAE:
        """Load `vae.safetensors` strictly; raise InputError where the folder lacks it or it does not fit."""
        weights, config = Path(folder) / "vae.safetensors", Path(folder) / "vae_config.json"
        if not weights.is_file() or not config.is_file():
            raise InputError(f"{folder} holds no vae.safetensors with a vae_config.json")
        try:
            fields = json.loads(config.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{config} can not be read as JSON: {error}") from error
        vae = cls(fields)
        load_strictly(vae.model, read_tensors(weights, device, dtype), weights, str)
        return vae.to(device).eval().requires_grad_(False)

    def encode(self, frames: Tensor) -> Tensor:
        """Encode frames [B, 3, 4 T - 3, H, W] in [-1, 1] to normalised latents [B, 48, T, H/16, W/16].

        Raises ValueError for another count of frames.
        """
        if (frames.shape[2] - 1) % 4:
            raise ValueError(f"{frames.shape[2]} frames are not 4 T - 3")
        latents = self.model.encode(frames.to(self.model.dtype)).latent_dist.mode().float()
        return (latents - self.latents_mean) / self.latents_std

    def decode(self, latents: Tensor) -> Tensor:
        """Decode normalised latents [B, 48, T, H, W] to frames [B, 3, 4 T - 3, 16 H, 16 W] in [-1, 1]."""
        latents = latents.float() * self.latents_std + self.latents_mean
        return self.model.decode(latents.to(self.model.dtype)).sample.float().clamp(-1, 1)
