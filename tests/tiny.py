"""Tiny random models for tests: all mechanisms of the full ones, in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from recavsr.attention import SpatialWindow
from recavsr.cache_policy import CacheAction, Schedule
from recavsr.geometry import BlockPlan
from recavsr.models.decoder import DecoderConfig, FlashDecoder
from recavsr.models.generator import Generator, GeneratorConfig
from recavsr.stream.step import ReCaVSR

CHANNELS = 6
STRIDE = 8

GENERATOR = GeneratorConfig(
    layers=4,
    heads=2,
    head_width=12,
    ffn_width=32,
    text_width=10,
    lr_hidden=(6, 8),
    schedule=Schedule(
        tuple(CacheAction.parse(name) for name in ("none", "recent_2", "anchor", "recent_4_anchor"))
    ),
    window=SpatialWindow(2, 3),
    time_frequencies=16,
    latent_channels=CHANNELS,
    patch=1,
    latent_stride=STRIDE,
)
"""Four layers that forget, remember two latents, keep anchors, and do both."""

DECODER = DecoderConfig(
    width=32,
    depth=2,
    heads=2,
    groups=1,
    refinement_depth=1,
    ffn_ratio=2.0,
    window=SpatialWindow(4, 4, border="cut"),
    latent_channels=CHANNELS,
    latent_stride=STRIDE,
    head_channels=6,
    latents_mean=(0.1, -0.2, 0.3, 0.0, 0.5, -0.4),
    latents_std=(1.0, 0.5, 1.5, 0.8, 1.2, 0.9),
)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: on a busy machine, two that wait for each other made tiny models 50 x slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def lively(model: nn.Module) -> None:
    """Give every parameter a value that matters: zeros and ones at the start would hide mistakes."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1 or not parameter.any():
                parameter.add_(0.2 * torch.randn_like(parameter))


def tiny_generator(config: GeneratorConfig = GENERATOR, seed: int = 0) -> Generator:
    torch.manual_seed(seed)
    model = Generator(config)
    lively(model)
    return model.eval()


def tiny_decoder(config: DecoderConfig = DECODER, seed: int = 0, **changes: object) -> FlashDecoder:
    torch.manual_seed(seed)
    model = FlashDecoder(replace(config, **changes))  # type: ignore[arg-type]
    lively(model)
    return model.eval()


def tiny_prompt() -> Tensor:
    return torch.randn(1, 3, GENERATOR.text_width, generator=torch.Generator().manual_seed(5))


def tiny_model(blocks: BlockPlan = BlockPlan()) -> ReCaVSR:  # noqa: B008
    generator, decoder = tiny_generator(), tiny_decoder()
    return ReCaVSR(
        "tiny", generator.requires_grad_(False), decoder.requires_grad_(False), tiny_prompt(), blocks
    )
