"""Activation checkpointing: keep the inputs of a part, compute its inside again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from recavsr.models.lr_projector import LRProjector


def recompute(function: Callable[..., Any], *inputs: Any) -> Any:
    """Call `function(*inputs)`, keep only the inputs, and compute again in the backward pass.

    Inputs may be states: they are values, so the second computation sees what the first one saw.
    `function` must not draw random numbers.
    """
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def recompute_steps(part: LRProjector) -> None:
    """Let a streaming part compute each `step` again in the backward pass."""
    part.step = partial(recompute, part.step)  # type: ignore[method-assign]


def recompute_layers(layers: nn.ModuleList) -> None:
    """Let every layer compute again in the backward pass: memory for one layer's inside at a time.

    Finer than `roll_out(..., checkpoint=True)`, which holds the insides of one whole block.
    """
    for layer in layers:
        layer.forward = partial(recompute, layer.forward)


def recompute_vae_blocks(decoder: nn.Module) -> None:
    """The same for the residual blocks of diffusers' Wan decoder, whose `forward` rewrites lists."""
    from diffusers.models.autoencoders.autoencoder_kl_wan import WanResidualBlock

    for block in decoder.modules():
        if isinstance(block, WanResidualBlock):
            block.forward = partial(_with_lists, block.forward)  # type: ignore[method-assign]


def _with_lists(forward: Callable[..., Any], x: Any, feat_cache: list[Any], feat_idx: list[int]) -> Any:
    features, first = tuple(feat_cache), feat_idx[0]

    def of_values(x: Any) -> Any:
        cache, place = list(features), [first]
        return forward(x, feat_cache=cache, feat_idx=place), cache, place

    out, feat_cache[:], feat_idx[:] = recompute(of_values, x)
    return out
