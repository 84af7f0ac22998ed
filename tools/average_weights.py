"""Average model folders of one run: `python tools/average_weights.py A=0.5 B=0.5 -o OUT`.

Weights trained on from the same start often lie in one valley, where a mean keeps what each learned.
Shares must add up to 1; configs and the encoder come from the first folder and must agree.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from recavsr.errors import InputError
from recavsr.models.weights import ModelFolder

AVERAGED = ("transformer.safetensors", "flashdecoder.safetensors", "prompt.safetensors")


def average(parts: list[tuple[Path, float]], output: Path) -> None:
    """Write the weighted mean of model folders. Raises InputError where they do not fit together."""
    folders = [ModelFolder.open(path) for path, _ in parts]
    if any(
        (f.generator, f.decoder, f.vae) != (folders[0].generator, folders[0].decoder, folders[0].vae)
        for f in folders
    ):
        raise InputError("the folders hold models of different configs; average weights of one model only")
    if abs(sum(share for _, share in parts) - 1) > 1e-6:
        raise InputError("the shares must add up to 1")
    if output.exists():
        raise InputError(f"{output} exists: choose another name")
    shutil.copytree(parts[0][0], output)
    for name in AVERAGED:
        tensors = [(load_file(str(path / name)), share) for path, share in parts]
        first = tensors[0][0]
        mean = {
            key: sum(share * t[key].double() for t, share in tensors).to(first[key].dtype) for key in first
        }
        save_file({key: value.contiguous() for key, value in mean.items()}, str(output / name))


def _part(text: str) -> tuple[Path, float]:
    path, _, share = text.rpartition("=")
    return Path(path), float(share)


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("parts", nargs="+", type=_part, metavar="FOLDER=SHARE")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to create")
    options = parser.parse_args()
    try:
        average(options.parts, options.output)
    except InputError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
