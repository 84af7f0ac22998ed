"""Average model folders of one run: `python tools/average_weights.py A=0.5 B=0.5 -o OUT`.

Weights trained on from the same start often lie in one valley, where a mean keeps what each learned.
Shares must add up to 1; configs and the encoder come from the first folder and must agree.

A decoder that was trained on from another one may be drawn back towards it, all else kept as it is:
`average_weights.py NEW=0.25 OLD=0.75 --decoder-only -o OUT`. What reads the latents is then kept too: the
older decoder may never have seen any.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from recavsr.errors import InputError, run_module
from recavsr.models.weights import ModelFolder

DECODER = "flashdecoder.safetensors"
AVERAGED = ("transformer.safetensors", DECODER, "prompt.safetensors")


def average(parts: list[tuple[Path, float]], output: Path, *, decoder_only: bool = False) -> None:
    """Write the weighted mean of model folders. Raises InputError where they do not fit together."""
    folders = [ModelFolder.open(path) for path, _ in parts]

    def configs(folder: ModelFolder) -> object:
        if decoder_only:
            return folder.decoder.to_released()
        return folder.generator, folder.decoder, folder.vae

    if any(configs(folder) != configs(folders[0]) for folder in folders):
        raise InputError("the folders hold models of different configs; average weights of one model only")
    if abs(sum(share for _, share in parts) - 1) > 1e-6:
        raise InputError("the shares must add up to 1")
    if output.exists():
        raise InputError(f"{output} exists: choose another name")
    shutil.copytree(parts[0][0], output)
    for name in (DECODER,) if decoder_only else AVERAGED:
        tensors = [(load_file(str(path / name)), share) for path, share in parts]
        first = tensors[0][0]
        mean = {
            key: sum(share * t[key].double() for t, share in tensors).to(first[key].dtype) for key in first
        }
        if decoder_only:
            mean["latent_projection.weight"] = first["latent_projection.weight"]
        save_file({key: value.contiguous() for key, value in mean.items()}, str(output / name))


def _part(text: str) -> tuple[Path, float]:
    path, _, share = text.rpartition("=")
    return Path(path), float(share)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="+", type=_part, metavar="FOLDER=SHARE")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to create")
    parser.add_argument("--decoder-only", action="store_true", help="all else is the first folder's")
    options = parser.parse_args()
    average(options.parts, options.output, decoder_only=options.decoder_only)


if __name__ == "__main__":
    run_module(main, before="")
