"""Saturated attention of a decoder: layers whose queries have grown until a softmax is one-hot.

Nothing that queries and keys could learn reaches them then; Adam, which divides noise by noise, makes them
grow on. A generator norms its queries (`norm_q`), so the size of their weights does not matter there.
"""

from __future__ import annotations

import torch

from recavsr.models.decoder import FlashDecoder, GroupedAttention

SATURATED = 10.0
"""Query weights of more than so many times the root mean square of the middle layer's."""


def attention_layers(decoder: FlashDecoder) -> dict[str, GroupedAttention]:
    """Return a decoder's attention by the names of its layers, numbered from 1."""
    return {
        f"{part} layer {number}": layer.attention  # type: ignore[union-attr,misc]
        for part in ("backbone", "refinement")
        for number, layer in enumerate(getattr(decoder, part), 1)
    }


@torch.no_grad()
def saturated_layers(decoder: FlashDecoder) -> dict[str, float]:
    """Return the saturated layers of a whole (not sharded) decoder: name, times the usual size."""
    sizes = {
        name: layer.query.weight.square().mean().sqrt() for name, layer in attention_layers(decoder).items()
    }
    usual = sorted(sizes.values())[len(sizes) // 2]
    return {name: float(size / usual) for name, size in sizes.items() if size > SATURATED * usual}


def saturation_remark(decoder: FlashDecoder) -> str | None:
    """Say in one line which layers are saturated; None where none is."""
    found = saturated_layers(decoder)
    if not found:
        return None
    listed = ", ".join(f"{name} (queries {times:.0f} times the usual size)" for name, times in found.items())
    return (
        f"attention is saturated in {listed}: queries and keys hardly learn there any more; "
        "tools/soften_attention.py gives them their gradient back"
    )
