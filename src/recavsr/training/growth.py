"""A larger nano that begins as the trained one: the slow teacher.

Layers are doubled by copies that add nothing yet, the head's new channels are not read yet (as in Net2Net,
Chen et al. 2016): the larger network computes what the trained one does, and goes on from there.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import torch
from torch import nn

from recavsr.cache_policy import Schedule
from recavsr.models.decoder import ConvolutionalHead, DecoderLayer, FlashDecoder
from recavsr.models.dit_block import DiTBlock
from recavsr.models.generator import Generator
from recavsr.training.nano import NanoTraining


def grown(model: NanoTraining, head_channels: int = 96) -> NanoTraining:
    """Return a network of twice the layers that computes what `model` does; it takes over its encoder.

    The decoder's head gets `head_channels`, as many as it has or more (ValueError otherwise; only a
    convolutional head can grow). Each new layer follows the one that it copies, under the same cache action.
    """
    generator, decoder = model.generator.config, model.decoder.config
    if decoder.head != "convolutional" or head_channels < decoder.head_channels:
        raise ValueError(f"a {decoder.head} head of {decoder.head_channels} can't grow to {head_channels}")
    schedule = generator.schedule
    twice = Schedule(tuple(chain(*zip(schedule.actions, schedule.actions))), schedule.anchor_rule)
    result = NanoTraining(
        replace(generator, layers=2 * generator.layers, schedule=twice),
        replace(
            decoder,
            depth=2 * decoder.depth,
            refinement_depth=2 * decoder.refinement_depth,
            head_channels=head_channels,
        ),
    )
    result.encoder, result.prompt = model.encoder, model.prompt
    result.set_statistics(model.latents_mean.flatten(), model.latents_std.flatten())
    _grow_generator(model.generator, result.generator)
    _grow_decoder(model.decoder, result.decoder)
    return result


def _grow_generator(old: Generator, new: Generator) -> None:
    _copy_all_but(old, new, "blocks.")
    _double(old.blocks, new.blocks)


def _grow_decoder(old: FlashDecoder, new: FlashDecoder) -> None:
    _copy_all_but(old, new, "backbone.", "refinement.", "head.")
    _double(old.backbone, new.backbone)
    _double(old.refinement, new.refinement)
    assert isinstance(old.head, ConvolutionalHead)
    assert isinstance(new.head, ConvolutionalHead)
    _widen(old.head, new.head)


def _copy_all_but(old: nn.Module, new: nn.Module, *prefixes: str) -> None:
    kept = {name: value for name, value in old.state_dict().items() if not name.startswith(prefixes)}
    new.load_state_dict(kept, strict=False)


def _double(old: nn.ModuleList, new: nn.ModuleList) -> None:
    """Fill `new` with each of the old layers, then its copy, which adds zero to the residual stream."""
    for number, layer in enumerate(old):
        for copy in new[2 * number : 2 * number + 2]:
            copy.load_state_dict(layer.state_dict())
        for last in _last_steps(new[2 * number + 1]):
            nn.init.zeros_(last.weight)
            nn.init.zeros_(last.bias)


def _last_steps(layer: nn.Module) -> tuple[nn.Linear, ...]:
    """Return the linear maps by which a layer adds to the residual stream."""
    if isinstance(layer, DecoderLayer):
        return layer.attention.output, layer.feed_forward.down
    assert isinstance(layer, DiTBlock)
    return layer.self_attention.to_out, layer.cross_attention.to_out, layer.ffn.down


@torch.no_grad()
def _widen(old: ConvolutionalHead, new: ConvolutionalHead) -> None:
    """Give the old channels their weights; they, and the pixels, do not read the new ones yet."""
    had, positions = old.stem.out_channels, old.opening**2
    targets = new.state_dict()  # the parameters' own memory
    for name, value in old.state_dict().items():
        target = targets[name]
        if name.startswith("inner."):  # rows are the channels of each of a cell's positions
            target.unflatten(0, (positions, -1))[:, :had] = value.unflatten(0, (positions, -1))
            continue
        rows = target[: len(value)]
        rows.zero_()
        if value.dim() == 1 or name.startswith("stem."):
            rows.copy_(value)
        else:
            rows[:, :had] = value
