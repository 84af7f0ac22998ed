"""What each part of a model is worth: the same weights with one part switched off.

    python -m recavsr.evaluation.ablations --model nano --data DIR -o FILE.json

Variants: `zero-latents` decodes zeros in place of the generator's latents, `flipped-latents` decodes
them mirrored (a latent that carries nothing would not be missed), `no-recycling` feeds zeros back,
`no-history` forgets K/V of earlier blocks, `blocks-alone` both. The decoder keeps its own history.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from recavsr.errors import InputError
from recavsr.evaluation.environment import environment
from recavsr.evaluation.lpips import LPIPS, weights_folder
from recavsr.evaluation.peers import open_peer
from recavsr.evaluation.protocol import (
    FULL,
    QUICK,
    evaluate,
    held_out_clips,
    session_upscaler,
)
from recavsr.models.generator import GeneratorState
from recavsr.stream.load import load
from recavsr.stream.step import ReCaVSR, StreamState


class Ablated(ReCaVSR):
    """A model with one part switched off; weights and everything else as given."""

    def __init__(self, model: ReCaVSR, variant: str) -> None:
        if variant not in VARIANTS:
            raise InputError(f"variant {variant!r} is unknown; choose one of {', '.join(VARIANTS)}")
        self.__dict__.update(model.__dict__)
        self.name, self.variant = f"{model.name} {variant}", variant

    def generate(self, state: StreamState, lr_frames: Tensor) -> tuple[GeneratorState, Tensor]:
        """Make the SR latents of the next block with the part switched off."""
        before = state.generator
        if self.variant in ("no-recycling", "blocks-alone"):
            before = replace(before, recycled=None)
        if self.variant in ("no-history", "blocks-alone"):
            before = replace(before, layers=(None,) * len(before.layers))
        after, latents = super().generate(replace(state, generator=before), lr_frames)
        if self.variant == "zero-latents":
            latents = torch.zeros_like(latents)
        elif self.variant == "flipped-latents":
            latents = latents.flip(-1)
        return after, latents


VARIANTS = ("zero-latents", "flipped-latents", "no-recycling", "no-history", "blocks-alone")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every variant beside bicubic and the whole model; write a protocol result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--data", required=True, help="folder of the held-out clips")
    parser.add_argument("-o", "--output", required=True, type=Path, help="result file (JSON)")
    parser.add_argument("--full", action="store_true", help="the full protocol instead of the quick one")
    parser.add_argument("--no-lpips", action="store_true", help="leave LPIPS out")
    parser.add_argument("--weights", help="folder of the LPIPS weights")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    options = parser.parse_args(argv)
    model = load(options.model, device=options.device, precision=options.precision)
    if not isinstance(model, ReCaVSR):
        raise InputError(f"{options.model} has no parts to switch off")
    variants: list[ReCaVSR] = [model, *(Ablated(model, variant) for variant in VARIANTS)]
    protocol = FULL if options.full else QUICK
    rows = evaluate(
        [open_peer("bicubic"), *(session_upscaler(variant, variant.name) for variant in variants)],
        held_out_clips(options.data),
        protocol,
        lpips=None if options.no_lpips else LPIPS("alex", options.weights).to(model.device),
        cache=weights_folder() / "evaluation",
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    # Folders are left out: they say nothing about the result.
    command = f"python -m recavsr.evaluation.ablations --model {shlex.quote(options.model)} --data DIR"
    result = {
        "protocol": asdict(protocol),
        "environment": environment(str(model.device)),
        "command": command + (" --full" if options.full else ""),
        "rows": rows,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"error: {error}")
