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
