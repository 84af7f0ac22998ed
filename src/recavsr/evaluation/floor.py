"""Counted work of one block, part by part, and the least time that it takes at given ceilings.

A part's floor is the larger of its operations over the rate of products and its bytes over the rate of
copies; parts follow one another. Counted are what the mathematics needs: exact windows, each weight and
activation once for each product that reads or writes it, norms and residuals fused into one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recavsr.attention import SpatialWindow
from recavsr.geometry import FRAMES_PER_LATENT, Grid
from recavsr.models.decoder import DecoderConfig
from recavsr.models.generator import GeneratorConfig

_TAPS = 4 * 3 * 3  # of each convolution of the LR projector


@dataclass(frozen=True)
class Work:
    """Floating-point operations (a multiply-add is two) and bytes of memory traffic."""

    operations: float
    bytes: float

    def __add__(self, other: Work) -> Work:
        return Work(self.operations + other.operations, self.bytes + other.bytes)

    def seconds(self, operations_per_second: float, bytes_per_second: float) -> float:
        """Return the least time at these ceilings."""
        return max(self.operations / operations_per_second, self.bytes / bytes_per_second)


def product(rows: float, terms: float, columns: float, value: int, weight: int | None = None) -> Work:
    """Return the work of [rows, terms] x [terms, columns]; `value` and `weight` are bytes of a number."""
    weight = value if weight is None else weight
    traffic = value * rows * (terms + columns) + weight * terms * columns
    return Work(2 * rows * terms * columns, traffic)


def generator_work(
    config: GeneratorConfig,
    grid: Grid,
    latents: int,
    visible: Sequence[int],
    prompt_tokens: int,
    value: int = 2,
    weight: int = 2,
) -> dict[str, Work]:
    """Count one block of the generator.

    `grid` is of tokens; `visible` says for each layer how many latents its queries see, those of the
    block included; `value` and `weight` are bytes of an activation and of a weight in the layers.
    """
    tokens, width = grid.cells * latents, config.width
    cells = grid.cells * config.patch**2
    first, second = config.lr_hidden
    pixels = 3 * config.lr_cell**2
    frames = FRAMES_PER_LATENT * latents
    projector = [
        _convolution(cells * frames // 2, pixels, first, cells * (frames + 3), value),
        _convolution(tokens, first, second, cells * (frames // 2 + 3), value),
        product(tokens, second, width, value),
    ]
    shapes = [(width, 3 * width), *[(width, width)] * 3, (width, config.ffn_width), (config.ffn_width, width)]
    products = [product(tokens, terms, columns, value, weight) for terms, columns in shapes]
    attention = [
        attention_work(config.window, grid, latents, seen, seen, width, width, value) for seen in visible
    ]
    cross = Work(4.0 * tokens * prompt_tokens * width, value * 2 * (tokens + prompt_tokens) * width)
    # Three times: read x and the update, write x and its norm. Then q and k are read and written once.
    passes = Work(0, value * tokens * width * (3 * 4 + 4))
    patch = config.latent_channels * config.patch**2
    ends = [product(tokens, 2 * patch, width, value), product(tokens, width, patch, value)]
    return {
        "lr_projector": _sum(projector),
        "products": _times(_sum(products), config.layers),
        "attention": _sum(attention),
        "cross_attention": _times(cross, config.layers),
        "norms_and_residuals": _times(passes, config.layers),
        "ends": _sum(ends),
    }


def decoder_work(config: DecoderConfig, grid: Grid, latents: int, value: int = 2) -> dict[str, Work]:
    """Count one block of the decoder on a grid of latent cells."""
    width, cells = config.width, grid.cells
    narrow = width // config.heads * config.groups
    hidden = int(width * config.ffn_ratio)
    shapes = [(width, width), (width, 2 * narrow), (width, width), (width, 2 * hidden), (hidden, width)]
    kinds = [(config.depth, latents, 1), (config.refinement_depth, FRAMES_PER_LATENT * latents, 4)]
    products, attention = Work(0, 0), Work(0, 0)
    for depth, pictures, size in kinds:
        for terms, columns in shapes:
            products += _times(product(cells * pictures, terms, columns, value), depth)
        seen = config.window_latents * size
        stored = pictures + (config.window_latents - 1) * size
        layer = attention_work(config.window, grid, pictures, seen, stored, width, narrow, value)
        attention += _times(layer, depth)
    frames, pixels = FRAMES_PER_LATENT * latents, 3 * config.latent_stride**2
    read = 3 * config.lr_cell**2
    ends = [
        product(cells * latents, config.latent_channels, width, value),
        product(cells * frames, read, config.lr_channels, value),
        product(cells * latents, FRAMES_PER_LATENT * config.lr_channels, width, value),
        product(cells * frames, config.lr_channels, width, value),
        product(cells * latents, width, FRAMES_PER_LATENT * width, value),
    ]
    if config.head == "linear":
        head = [product(cells * frames, width, hidden, value), product(cells * frames, hidden, pixels, value)]
    else:
        opened, channels = (config.latent_stride // 4) ** 2, config.head_channels
        head = [product(cells * frames, width, channels * opened, value)]
        for terms, columns in ((read // opened, channels), *[(channels, channels)] * 2, (channels, 48)):
            places = cells * frames * opened
            head.append(_convolution(places, terms, columns, places, value, taps=9))
    return {
        "decoder_products": products,
        "decoder_attention": attention,
        "decoder_ends": _sum([*ends, *head]),
    }


def attention_work(
    window: SpatialWindow,
    grid: Grid,
    queries: int,
    seen: int,
    stored: int,
    width: int,
    narrow: int,
    value: int,
) -> Work:
    """Count attention of `queries` pictures, each query seeing its window in `seen` pictures.

    `width` are the channels of queries, `narrow` those of keys; `stored` pictures are read once.
    """
    down = sum(map(len, window.rows(grid))) / grid.height
    across = sum(map(len, window.columns(grid))) / grid.width
    keys = down * across * seen
    traffic = 2 * value * grid.cells * (queries * width + stored * narrow)
    return Work(4.0 * grid.cells * queries * keys * width, traffic)


def _convolution(
    rows: float, channels: int, columns: int, read: float, value: int, taps: int = _TAPS
) -> Work:
    """Count a convolution: its product, but each of the `read` input cells only once."""
    traffic = value * (read * channels + taps * channels * columns + rows * columns)
    return Work(2.0 * rows * taps * channels * columns, traffic)


def _times(work: Work, count: int) -> Work:
    return Work(work.operations * count, work.bytes * count)


def _sum(works: Sequence[Work]) -> Work:
    return sum(works, Work(0, 0))
