"""Give saturated attention its gradient back: `python tools/soften_attention.py FOLDER -o OUT`.

The query weights of a decoder's saturated layers (`recavsr.training.saturation`, which a training stage
looks for at its end) are brought to the size of the middle layer's, and the gain of the keys' norm to 1.
What a query looks at most stays what it was; how firmly is to be learned anew (`recavsr train nano_full
--stage polish --start OUT`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from recavsr.errors import InputError, run_module
from recavsr.models.decoder import FlashDecoder
from recavsr.training.nano import NanoTraining
from recavsr.training.saturation import attention_layers, saturated_layers


@torch.no_grad()
def soften(decoder: FlashDecoder) -> list[str]:
    """Soften a decoder's saturated layers; return their names."""
    layers, found = attention_layers(decoder), saturated_layers(decoder)
    for name, times in found.items():
        for values in layers[name].query.parameters():
            values.div_(times)
        layers[name].key_norm.weight.div_(layers[name].key_norm.weight.abs().mean())
    return list(found)


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
