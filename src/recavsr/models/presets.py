"""The two models as configs of the same classes: the released 5B and our nano."""

from __future__ import annotations

from dataclasses import replace

from recavsr.attention import SpatialWindow
from recavsr.cache_policy import PAPER_SCHEDULE, CacheAction, Schedule
from recavsr.models.autoencoder import EncoderConfig
from recavsr.models.decoder import DecoderConfig
from recavsr.models.generator import GeneratorConfig


def recavsr_5b() -> GeneratorConfig:
    """Return the released generator: Wan2.2-TI2V-5B's sizes with the paper's route and window."""
    return GeneratorConfig(
        layers=30,
        heads=24,
        head_width=128,
        ffn_width=14336,
        text_width=4096,
        lr_hidden=(2048, 3072),
        schedule=PAPER_SCHEDULE,
        window=SpatialWindow(22, 40),
    )


def recavsr_5b_decoder() -> DecoderConfig:
    """Return the released decoder, variant S (latent statistics come from vae_config.json)."""
    return DecoderConfig()


NANO_SCHEDULE = Schedule(
    tuple(
        CacheAction.parse(name)
        for name in ("none", "recent_2", "recent_2", "recent_2_anchor", "recent_4", "none")
    )
)
"""nano's route, chosen by hand at the paper's budget of 2.0 slots a layer (not learned yet)."""


def nano() -> GeneratorConfig:
    """Return nano's generator: tokens of 32 pixels as the 5B's, windows shared by 4 x 4 tokens."""
    return GeneratorConfig(
        layers=6,
        heads=4,
        head_width=64,
        ffn_width=768,
        text_width=32,
        lr_hidden=(48, 256),
        schedule=NANO_SCHEDULE,
        window=SpatialWindow(8, 8, stride=4),
        native_scale=4.0,
        lr_halved=True,
    )


def nano_decoder() -> DecoderConfig:
    """Return nano's decoder: width 256, 4 + 2 layers, convolutional head over the LR frames."""
    return DecoderConfig(
        width=256,
        depth=4,
        heads=4,
        groups=1,
        refinement_depth=2,
        ffn_ratio=2.0,
        window=SpatialWindow(6, 6, stride=4),
        head="convolutional",
        head_channels=48,
        lr_halved=True,
    )


def nano_encoder(generator: GeneratorConfig) -> EncoderConfig:
    """Return the encoder of nano's latents, or of those of another generator of its kind."""
    return EncoderConfig((128, 256), generator.latent_channels, generator.latent_stride)


def nano_fine() -> GeneratorConfig:
    """Return nano's generator with latents of 8 pixels instead of 16, of 12 channels instead of 48.

    A token takes 4 x 4 of them: its pixels, its numbers and the generator's cost are nano's.
    """
    return replace(nano(), latent_channels=12, latent_stride=8, patch=4)


def nano_fine_decoder() -> DecoderConfig:
    """Return the decoder for latents of 8 pixels: four times the cells of half the width.

    Products cost what nano's do; attention, in windows of as many cells, twice as much.
    """
    return replace(
        nano_decoder(),
        width=128,
        latent_channels=12,
        latent_stride=8,
        latents_mean=(0.0,) * 12,
        latents_std=(1.0,) * 12,
    )


NANO_PROMPT_TOKENS = 4
"""nano's prompt is a few learned vectors of `text_width` channels."""
