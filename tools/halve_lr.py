"""Make a model read its LR frames at half their size: `python tools/halve_lr.py FOLDER -o OUT`.

Frames that were enlarged by four say little between pixels that the means of 2 x 2 do not. The first
products of the LR projector, of the decoder's stem and of its head then take a quarter of the work. Each
weight becomes what it is for the best linear guess of the pixels by their means (`from_means`). A polish
lets the weights settle (`recavsr train nano_full --stage polish --start OUT`). `--window N` gives the
decoder windows of N x N cells as well: no weight depends on it.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from recavsr.errors import InputError, run_module
from recavsr.training.nano import NanoTraining

READERS = {
    "generator.lr_projector.conv1.weight": False,
    "decoder.lr_stem.weight": False,
    "decoder.head.stem.weight": True,
}
"""Weights [out, (channel, row, column), ...] that read the LR pixels of squares.

True: these are so small that a guess needs the squares beside each, which the kernel reads as well. At the
picture's border, where the kernel reads zeros, such weights are wrong until they are trained.
"""


def halve_lr(model: NanoTraining, window: int | None = None) -> NanoTraining:
    """Return a model that reads its LR frames at half their size, with windows of `window` decoder cells."""
    old, decoder = model.generator.config, model.decoder.config
    if old.lr_halved or decoder.lr_halved:
        raise InputError("this model reads its LR frames at half their size already")
    cells = decoder.window
    if window is not None:
        try:
            cells = replace(cells, height=window, width=window)
        except ValueError as error:
            raise InputError(f"a window of {window} cells won't do: {error}") from None
    result = NanoTraining(replace(old, lr_halved=True), replace(decoder, lr_halved=True, window=cells))
    values = model.state_dict()
    for name, across in READERS.items():
        values[name] = for_means(values[name], across)
    result.load_state_dict(values)
    result.set_statistics(model.latents_mean.flatten(), model.latents_std.flatten())
    return result


def for_means(weight: Tensor, across: bool) -> Tensor:
    """Return weights of squares of pixels [out, 3 n n, ...] as those of their 2 x 2 means.

    With `across` pixels are guessed from the means of all squares that a kernel [..., k, k] reads.
    """
    side = round((weight.shape[1] / 3) ** 0.5)
    squares = weight.unflatten(1, (3, side, side))
    if not across:
        guess = from_means(side).to(weight.dtype)
        return torch.einsum("ocyx...,yv,xu->ocvu...", squares, guess, guess).flatten(1, 3)
    kernel = weight.shape[-1]
    guess = from_means(kernel * side).to(weight.dtype).view(kernel, side, kernel, side // 2)
    return torch.einsum("ocyxkl,kyjv,lxiu->ocvuji", squares, guess, guess).flatten(1, 3)


def from_means(pixels: int, enlarged: int = 4, likeness: float = 0.9) -> Tensor:
    """Return the matrix [pixels, pixels / 2] that guesses a line of pixels best from the means of its pairs.

    The line is a piece of one that was enlarged by linear interpolation; of the small one's pixels
    neighbours correlate by `likeness`, others by its powers.
    """
    around = 8
    count = around + -(-pixels // enlarged) + around
    steps = torch.arange(count, dtype=torch.float64)
    small = likeness ** (steps[:, None] - steps).abs()
    line = torch.eye(count, dtype=torch.float64)[None, None]
    line = F.interpolate(line, size=(count, enlarged * count), mode="bilinear")[0, 0].T
    line = line[enlarged * around :][:pixels]
    covariance = line @ small @ line.T
    pairs = covariance.unflatten(1, (-1, 2)).mean(2)
    own = pairs.unflatten(0, (-1, 2)).mean(1)
    return torch.linalg.solve(own + 1e-4 * torch.eye(len(own)), pairs.T).T


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="a model folder with its encoder")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to create")
    parser.add_argument("--window", type=int, help="cells of a side of the decoder's windows")
    options = parser.parse_args()
    if options.output.exists():
        raise InputError(f"{options.output} exists: choose another name")
    halve_lr(NanoTraining.starting_from(options.folder), options.window).export(options.output)


if __name__ == "__main__":
    run_module(main, before="")
