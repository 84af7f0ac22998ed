"""The Wan2.2 autoencoder (4 x 16 x 16, 48 channels): an adapter over diffusers' class.

Needed to train against the released latents and as the reference decoder; streaming inference uses
`FlashDecoder`. Install the extra `wan`. Weights are `vae.safetensors` and `vae_config.json` of a
model folder, in diffusers' names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recavsr.errors import InputError
from recavsr.models.weights import load_strictly, read_tensors
from recavsr.state import State

# fmt: off
WAN22_VAE: dict[str, Any] = {
    "base_dim": 160,
    "decoder_base_dim": 256,
    "z_dim": 48,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "dropout": 0.0,
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
    "clip_output": False,
    "latents_mean": [
        -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557, -0.1382, 0.0542, 0.2813,
        0.0891, 0.157, -0.0098, 0.0375, -0.1825, -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108,
        -0.2158, 0.2502, -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.123, -0.0313,
        -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.052, 0.3748, 0.0152, 0.1957, 0.1433, -0.2944,
        0.3573, -0.0548, -0.1681, -0.0667,
    ],
    "latents_std": [
        0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.499, 0.4818, 0.5013, 0.8158, 1.0344, 0.5894, 1.0901,
        0.6885, 0.6165, 0.8454, 0.4978, 0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
        0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093, 0.5709, 0.6065, 0.6415, 0.4944,
        0.5726, 1.2042, 0.5458, 1.6887, 0.3971, 1.06, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
    ],
}
# fmt: on
"""The `vae_config.json` of Wan2.2-TI2V-5B, which its official checkpoints keep in code."""


@dataclass(frozen=True)
class WanDecoderState(State):
    """The last features that each causal convolution of the decoder has seen; none at the start."""

    features: tuple[Tensor | str | None, ...] | None = None  # text: a mark of diffusers' own


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
            # On the CPU also where the network is built without values.
            mean, std = (torch.tensor(fields[n], device="cpu") for n in ("latents_mean", "latents_std"))
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"vae_config.json does not describe a Wan autoencoder: {error}") from error
        self.register_buffer("latents_mean", mean.view(1, -1, 1, 1, 1), persistent=False)
        self.register_buffer("latents_std", std.view(1, -1, 1, 1, 1), persistent=False)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        decoder: bool = True,
    ) -> WanVAE:
        """Load `vae.safetensors` strictly, frozen; without its decoder if only `encode` is wanted.

        Raises InputError where the folder lacks the file, or it does not fit.
        """
        weights, config = Path(folder) / "vae.safetensors", Path(folder) / "vae_config.json"
        if not weights.is_file() or not config.is_file():
            raise InputError(f"{folder} holds no vae.safetensors with a vae_config.json")
        try:
            fields = json.loads(config.read_text(encoding="utf-8"))
        except ValueError as error:
            raise InputError(f"{config} can not be read as JSON: {error}") from error
        with torch.device("meta"):
            vae = cls(fields)
        load_strictly(vae.model, read_tensors(weights, device, dtype), weights, str)
        if not decoder:
            vae.model.decoder = vae.model.post_quant_conv = None
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

    def start(self) -> WanDecoderState:
        """Return the decoder's state before the first latent of a clip."""
        return WanDecoderState()

    def step(self, state: WanDecoderState, latents: Tensor) -> tuple[WanDecoderState, Tensor]:
        """Decode the next latents [B, 48, T, H, W] of a clip, normalised.

        Returns their frames [B, 3, F, 16 H, 16 W] in float32, not clamped: F = 4 T, or 4 T - 3 at the start.
        """
        from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

        latents = latents.float() * self.latents_std + self.latents_mean
        x = self.model.post_quant_conv(latents.to(self.model.dtype))
        features, pieces = state.features, []
        for latent in x.split(1, dim=2):
            first = features is None
            if features is None:
                self.model.clear_cache()
                features = (None,) * len(self.model._feat_map)
            cache = list(features)  # the decoder replaces what is in it
            pieces.append(self.model.decoder(latent, feat_cache=cache, feat_idx=[0], first_chunk=first))
            features = tuple(cache)
        frames = unpatchify(torch.cat(pieces, dim=2), patch_size=self.model.config.patch_size)
        return WanDecoderState(features), frames.float()
