"""Checkpoint names: how the released tensor names map to ours, and strict loading.

The released files keep diffusers' names for the backbone. A released name becomes ours by the
first rule that matches; the reverse is used to save. No tensor is reshaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from recavsr.errors import InputError

# (released, ours): prefixes or infixes, delimited by dots; both directions are unambiguous.
_GENERATOR_RULES = (
    ("condition_embedder.time_embedder.linear_1.", "embedding.time_in."),
    ("condition_embedder.time_embedder.linear_2.", "embedding.time_out."),
    ("condition_embedder.time_proj.", "embedding.time_projection."),
    ("condition_embedder.text_embedder.linear_1.", "embedding.text_in."),
    ("condition_embedder.text_embedder.linear_2.", "embedding.text_out."),
    ("lq_proj.", "lr_projector."),
    ("sr_proj.", "recycle_projection."),
    ("proj_out.", "head."),
    (".attn1.", ".self_attention."),
    (".attn2.", ".cross_attention."),
    (".to_out.0.", ".to_out."),
    (".norm2.", ".cross_norm."),
    (".ffn.net.0.proj.", ".ffn.up."),
    (".ffn.net.2.", ".ffn.down."),
    ("scale_shift_table", "modulation"),
)
_DECODER_RULES = (
    ("backbone.blocks.", "backbone."),
    ("temporal_refinement.blocks.", "refinement."),
    ("spatial_projection.0.", "head.inner."),
    ("spatial_projection.2.", "head.outer."),
)


def _rename(name: str, rules: Iterable[tuple[str, str]]) -> str:
    for old, new in rules:
        if old.startswith("."):
            # `.norm2.` belongs to a block; `lq_proj.norm2.` keeps its name.
            if name.startswith("blocks."):
                name = name.replace(old, new)
        elif name.startswith(old):
            name = new + name[len(old) :]
        elif old == "scale_shift_table" or new == "scale_shift_table":
            name = re.sub(rf"\b{old}$", new, name)
    return name


def generator_name(released: str) -> str:
    """Return our name of a tensor of a released `transformer.safetensors`."""
    return _rename(released, _GENERATOR_RULES)


def released_generator_name(ours: str) -> str:
    """Return the released name of one of the generator's tensors."""
    return _rename(ours, [(new, old) for old, new in _GENERATOR_RULES])


def decoder_name(released: str) -> str:
    """Return our name of a tensor of a released `flashdecoder.safetensors`."""
    return _rename(released, _DECODER_RULES)


def released_decoder_name(ours: str) -> str:
    """Return the released name of one of the decoder's tensors."""
    return _rename(ours, [(new, old) for old, new in _DECODER_RULES])
