"""What a stream needs of a device's memory, counted before anything is loaded, and what is left out to fit.

Sizes are bytes. Counted are weights, the state, which is written over in place, and the largest moment of the
first block, which is the longest, or of a later one. What a library needs for itself is a flat allowance.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from recavsr import attention
from recavsr.attention import SpatialWindow, plan_window
from recavsr.errors import InputError
from recavsr.geometry import BlockPlan, Grid
from recavsr.models import folded
from recavsr.models.decoder import CARD_PIECE_LATENTS, PIECE_LATENTS, PIECE_ROWS, DecoderConfig, FlashDecoder
from recavsr.models.generator import GeneratorConfig
from recavsr.models.lr_projector import PIECE_FRAMES
from recavsr.models.offload import SLOTS

ALLOWANCE = 1_400_000_000
"""On a card, for the libraries' work spaces and for memory that is free but in pieces.

0.6 to 1.0 GB lay in pieces in the plans of 8 GB that were measured on a card (docs/memory-plans.md)."""

_UNITS = {"GB": 10**9, "MB": 10**6, "GIB": 2**30, "MIB": 2**20}


def parse_memory(text: str | int) -> int:
    """Read "8GB", "7.5 GB", "800MB", "8GiB" or a number of bytes."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise InputError(f"memory {text!r} is no size; write it like 8GB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


@dataclass(frozen=True)
class MemoryPlan:
    """Which layers stay on the device, and what that makes."""

    budget: int
    held: dict[str, int]  # all the time
    moments: dict[str, int]  # not at the same time: the largest counts
    layer: int
    resident: tuple[bool, ...]

    @property
    def counted(self) -> int:
        """Return the peak of what is counted."""
        staying = sum(self.resident)
        travelling = min(SLOTS, len(self.resident) - staying)
        layers = (staying + travelling) * self.layer
        return sum(self.held.values()) + max(self.moments.values()) + layers

    @property
    def peak(self) -> int:
        """Return the peak to reckon with on a card."""
        return self.counted + ALLOWANCE

    @property
    def all_stay(self) -> bool:
        """Return whether nothing has to travel."""
        return all(self.resident)

    def lines(self) -> list[str]:
        """Return the plan for people."""
        moment = max(self.moments, key=lambda name: self.moments[name])
        staying, layers = sum(self.resident), len(self.resident)
        parts = [f"{name} {_gb(size)}" for name, size in self.held.items()]
        parts += [f"largest moment ({moment}) {_gb(self.moments[moment])}"]
        travel = (layers - staying) * self.layer
        where = (
            "all layers stay on the device"
            if self.all_stay
            else (
                f"{staying} of {layers} layers stay on the device, {layers - staying} travel "
                f"from main memory at every block ({_gb(travel)})"
            )
        )
        return [
            f"memory plan: {_gb(self.peak)} of {_gb(self.budget)}; {where}",
            f"memory: {', '.join(parts)}",
        ]


def plan_memory(
    config: GeneratorConfig,
    decoder: DecoderConfig,
    size: tuple[int, int],
    blocks: BlockPlan,
    budget: int,
    prompt_tokens: int,
    value: int,
    weight: int,
    kernels: bool = False,
    streams: int = 1,
) -> MemoryPlan:
    """Plan a stream of padded output `size` (height, width) within `budget` bytes, or several in turns.

    `value` is the bytes of an activation and of most weights, `weight` those of the layers' matrices. With
    `kernels` nothing is gathered, joined to the history or copied in float32 (see `kernels.available`).
    Raises InputError where even two layers at a time are too much.
    """
    width = config.width
    outputs = 7 * width + config.ffn_width
    layer = weight * (6 * width * width + 2 * width * config.ffn_width) + value * (outputs + 3 * width)
    layer += 4 * outputs if weight == 1 else 0  # float8 has a scale an output
    grid = Grid(size[0] // config.token_stride, size[1] // config.token_stride)
    cells = Grid(size[0] // config.latent_stride, size[1] // config.latent_stride)
    pixels, (first, second) = 3 * config.latent_stride**2, config.lr_hidden
    patch = config.latent_channels * config.patch**2
    projector = 36 * (pixels * first + first * second) + second * width
    with torch.device("meta"):
        decoding = sum(parameter.numel() for parameter in FlashDecoder(decoder).parameters())
    capacity = [action.capacity(config.schedule.anchor_rule) for action in config.schedule.actions]
    narrow = decoder.width // decoder.heads * decoder.groups
    reach = (decoder.window_latents - 1) * (decoder.depth + 4 * decoder.refinement_depth)
    held = {
        "projector, ends and decoder": value * (projector + 3 * patch * width + decoding),
        "prompt": value * 2 * config.layers * prompt_tokens * width,
    }
    convolutions = 3 * cells.cells * (pixels + first)
    history = (
        streams
        * value
        * (
            2 * (sum(capacity) * grid.cells * width + patch * grid.cells)
            + convolutions
            + 2 * reach * cells.cells * narrow
        )
    )

    def with_kernels(latents: int, frames: int) -> dict[str, int]:
        """Return the moments of one block on a card."""
        pixels_of_frames = 3 * size[0] * size[1] * frames
        beside = value * pixels_of_frames + history
        token = value * grid.cells * latents * width
        piece = min(PIECE_FRAMES, frames)
        halves, quarters, reach = -(-piece // 2), -(-piece // 4), 3
        # A long block is decoded piece by piece.
        cell = cells.cells * 4 * (CARD_PIECE_LATENTS if latents > PIECE_LATENTS else latents)
        hidden = int(decoder.width * decoder.ffn_ratio)
        made = pixels_of_frames * (value if decoder.head == "linear" else 4)
        wide = min(folded.PIECE_ROWS, grid.cells * latents) * config.ffn_width
        wide = wide * value + (wide if weight == 1 else 0)  # a copy in float8
        return {
            # As a session makes them, and rounded.
            "frames": beside + 4 * pixels_of_frames,
            # The second convolution: its input before and after the norm, joined to the history, taps side by
            # side, the next history. Or the first one.
            "projector": beside
            + value
            * cells.cells
            * max(
                first * (2 * halves + reach + halves + 4 * quarters + reach),
                pixels * (2 * piece + reach + 4 * halves + reach) + first * halves,
            ),
            # LR tokens, the input, its sum and norm, what attention gave, q k v, k; both sides of the GELU.
            "layers": beside + token * 10 + wide,
            # All frames, and of a piece: gates, their product, the stream and its norms; or the head.
            "decoder": beside
            + made
            + value
            * max(
                cell * 5 * decoder.width + min(cell, PIECE_ROWS) * 3 * hidden,
                cell * (2 * hidden + 3 * pixels),
            ),
            # As the decoder gave them, and in whole levels.
            "pictures": beside + made + pixels_of_frames,
        }

    def largest(latents: int, frames: int) -> dict[str, int]:
        """Return the moments of one block."""
        if kernels:
            return with_kernels(latents, frames)
        # Frames as a session gives them, and rounded.
        beside = 3 * size[0] * size[1] * frames * (4 + value) + history
        tokens, seen = grid.cells * latents, blocks.rest + max(capacity)
        piece, decoded = min(PIECE_FRAMES, frames), min(PIECE_LATENTS, latents)
        return {
            # Unshuffled, joined to the history; the norm works in two float32 copies; taps beside each other.
            "projector": beside
            + 3 * value * (piece + 3) * cells.cells * pixels
            + (value + 2 * 4) * -(-piece // 2) * cells.cells * first
            + 4 * value * -(-piece // 2) * cells.cells * pixels,
            # Results of products, their float32 norms and rotations, keys and values joined to the history.
            "attention": beside
            + tokens * width * (8 * value + 4 * 4)
            + value * 2 * seen * grid.cells * width
            + _gathered(config.window, grid, value * 2 * max(seen, latents) * width),
            "feed-forward": beside + value * tokens * (3 * width + 2 * config.ffn_width),
            "decoder": beside
            + 4 * 3 * size[0] * size[1] * (frames + 4 * decoded)
            + 4 * decoded * cells.cells * value * int(decoder.width * (4 + 3 * decoder.ffn_ratio))
            + _gathered(decoder.window, cells, value * 2 * 4 * decoder.window_latents * narrow),
        }

    first_block = largest(blocks.first, blocks.frames(0))
    later = largest(blocks.rest, blocks.frames(1))
    moments = {f"{name} of the first block": amount for name, amount in first_block.items()}
    moments |= {f"{name} of a later block": amount for name, amount in later.items()}
    plan = MemoryPlan(budget, held, moments, layer, (False,) * config.layers)
    if plan.peak > budget:
        raise InputError(
            f"memory {_gb(budget)} is too little at {size[1]}x{size[0]}: {_gb(plan.peak)} are needed "
            "at least; ask for a smaller output, or --precision fp8"
        )
    for staying in range(config.layers, 0, -1):
        tried = MemoryPlan(budget, held, moments, layer, _spread(staying, config.layers))
        if tried.peak <= budget:
            return tried
    return plan


def _gathered(window: SpatialWindow, grid: Grid, bytes_of_a_key: int) -> int:
    """Return what the tiles' own copies of keys and values take."""
    tiling = plan_window(grid, window, torch.device("cpu")).tiling
    if tiling is None:
        return 0
    return min(attention._GATHER_BYTES, tiling.key_cells.numel() * bytes_of_a_key)


def _spread(staying: int, layers: int) -> tuple[bool, ...]:
    """Return which layers stay, evenly among those that travel: copies then run beside their work."""
    return tuple((index + 1) * staying // layers > index * staying // layers for index in range(layers))


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"
