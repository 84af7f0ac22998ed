"""Give saturated attention its gradient back: `python tools/soften_attention.py FOLDER -o OUT`.

Where queries have grown beyond all measure a softmax is one-hot, and nothing that queries and keys could
learn reaches them any more; Adam, which divides noise by noise, makes them grow on. Of decoder layers whose
query weights are more than `SATURATED` times those of the middle layer, these are brought to the size of
that layer's, and the gain of the keys' norm to 1. What a query looks at most stays what it was; how firmly
is to be learned anew (`recavsr train nano_full --stage polish --start OUT`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from recavsr.errors import InputError, run_module
from recavsr.models.decoder import FlashDecoder, GroupedAttention
from recavsr.training.nano import NanoTraining

SATURATED = 10.0


@torch.no_grad()
def soften(decoder: FlashDecoder) -> list[str]:
    """Soften a decoder's saturated layers; return their names."""
    layers: dict[str, GroupedAttention] = {
        f"{part} layer {number}": layer.attention  # type: ignore[union-attr,misc]
        for part in ("backbone", "refinement")
        for number, layer in enumerate(getattr(decoder, part), 1)
    }
    sizes = {name: layer.query.weight.square().mean().sqrt() for name, layer in layers.items()}
    usual = sorted(sizes.values())[len(sizes) // 2]
    found = [name for name, size in sizes.items() if size > SATURATED * usual]
    for name in found:
        for values in layers[name].query.parameters():
            values.mul_(usual / sizes[name])
        layers[name].key_norm.weight.div_(layers[name].key_norm.weight.abs().mean())
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="a model folder with its encoder")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to create")
    options = parser.parse_args()
    if options.output.exists():
        raise InputError(f"{options.output} exists: choose another name")
    model = NanoTraining.starting_from(options.folder)
    found = soften(model.decoder)
    if not found:
        raise InputError("no layer's attention is saturated")
    model.export(options.output)
    print(f"softened: {', '.join(found)}")


if __name__ == "__main__":
    run_module(main, before="")
