"""What each part of a model is worth: the same weights with one part switched off.

    python -m recavsr.evaluation.ablations --model nano --data DIR -o FILE.json

Variants that spoil the latents: `zero-latents` decodes zeros in place of the generator's, `flipped-latents`
decodes them mirrored (a latent that carries nothing would not be missed). Variants that forget at every
block's start:

    no-recycling     the latents of the block before
    no-history       K/V of earlier blocks in the generator
    blocks-alone     both
    no-lr-history    LR frames of earlier blocks in the projector
    decoder-alone    K/V of earlier blocks in the decoder
    stateless        everything

Positions go on counting, so a block in mid-stream is never taken for the start of a stream.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from recavsr.errors import InputError, run_module
from recavsr.evaluation.environment import environment
from recavsr.evaluation.lpips import LPIPS, weights_folder
from recavsr.evaluation.peers import open_peer
from recavsr.evaluation.protocol import (
    FULL,
    QUICK,
    choose_clips,
    described,
    evaluate,
    held_out_clips,
    result_file,
    session_upscaler,
)
from recavsr.evaluation.report import summarise
from recavsr.models.generator import GeneratorState
from recavsr.stream.load import load
from recavsr.stream.step import ReCaVSR, StreamState

Memory = Literal["recycled", "history", "lr", "decoder"]
"""A part of a stream's state: recycled latents, generator's K/V, LR projector's frames, decoder's K/V."""

FORGETTING: Mapping[str, frozenset[Memory]] = MappingProxyType(
    {
        "no-recycling": frozenset({"recycled"}),
        "no-history": frozenset({"history"}),
        "blocks-alone": frozenset({"recycled", "history"}),
        "no-lr-history": frozenset({"lr"}),
        "decoder-alone": frozenset({"decoder"}),
        "stateless": frozenset({"recycled", "history", "lr", "decoder"}),
    }
)
"""What each of these variants forgets at every block's start."""

VARIANTS = ("zero-latents", "flipped-latents", *FORGETTING)


def forget(state: StreamState, memories: Collection[Memory]) -> StreamState:
    """Return the state without some of its memories, at the same position of the stream."""
    generator, decoder = state.generator, state.decoder
    if "recycled" in memories:
        generator = replace(generator, recycled=None)
    if "history" in memories:
        generator = replace(generator, layers=(None,) * len(generator.layers))
    if "lr" in memories:
        generator = replace(generator, lr_projector=generator.lr_projector.forget())
    if "decoder" in memories:
        decoder = replace(decoder, layers=(None,) * len(decoder.layers))
    return replace(state, generator=generator, decoder=decoder)


class Ablated(ReCaVSR):
    """A model with one part switched off; weights and everything else as given."""

    def __init__(self, model: ReCaVSR, variant: str) -> None:
        if variant not in VARIANTS:
            raise InputError(f"variant {variant!r} is unknown; choose one of {', '.join(VARIANTS)}")
        self.__dict__.update(model.__dict__)
        self.graphs = None  # those of the model do not forget
        self.name, self.variant = f"{model.name} {variant}", variant

    def step(
        self, state: StreamState, lr_frames: Tensor, wanted: int | None = None
    ) -> tuple[StreamState, Tensor]:
        """Make the next block without what the variant forgets."""
        return super().step(forget(state, FORGETTING.get(self.variant, ())), lr_frames, wanted)

    def generate(
        self,
        state: StreamState,
        lr_frames: Tensor,
        noise: Tensor | None = None,
        position: Tensor | None = None,
    ) -> tuple[GeneratorState, Tensor]:
        """Make the SR latents of the next block, and spoil them where the variant says so."""
        after, latents = super().generate(state, lr_frames, noise, position)
        if self.variant == "zero-latents":
            latents = torch.zeros_like(latents)
        elif self.variant == "flipped-latents":
            latents = latents.flip(-1)
        return after, latents


def worth_table(rows: Sequence[dict[str, Any]], model: str) -> str:
    """Return as Markdown what changes when a part is switched off, a table a degradation.

    `rows` are the protocol's; `model` is the whole one. PSNR, SSIM and LPIPS as differences to it, td and
    flicker as ratios: history that earns its keep shows as PSNR below 0 and flicker above 1 without it.
    `later`: of the frames after the first block, which alone can gain by memory of blocks.
    """
    columns = (
        ("PSNR", "psnr", "+.3f"),
        ("SSIM", "ssim", "+.4f"),
        ("LPIPS", "lpips", "+.4f"),
        ("td", "td", ".3f"),
        ("flicker", "flicker", ".3f"),
        ("still scene", "still_flicker", ".3f"),
        ("later PSNR", "later_psnr", "+.3f"),
        ("later LPIPS", "later_lpips", "+.4f"),
        ("later td", "later_td", ".3f"),
        ("later flicker", "later_flicker", ".3f"),
        ("later still scene", "later_still_flicker", ".3f"),
    )
    means = {(row["degradation"], row["model"]): row for row in summarise(rows)}
    lines: list[str] = []
    for degradation in dict.fromkeys(degradation for degradation, _ in means):
        whole = means[degradation, model]
        headings = " | ".join(["without", *(name for name, _, _ in columns)])
        lines += [f"### {degradation}", "", f"| {headings} |", "|---" * (1 + len(columns)) + "|"]
        for variant in VARIANTS:
            row = means.get((degradation, f"{model} {variant}"))
            if row is None:
                continue
            cells = [variant]
            for _, key, form in columns:
                ours, theirs = whole.get(key), row.get(key)
                if ours is None or theirs is None:
                    cells.append("-")
                elif form.startswith("+"):
                    cells.append(format(theirs - ours, form))
                else:
                    cells.append(format(theirs / ours, form) if ours else "-")
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure every variant beside bicubic and the whole model; write a result file, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--data", required=True, help="folder of the held-out clips")
    parser.add_argument("-o", "--output", required=True, type=Path, help="result file (JSON)")
    parser.add_argument("--full", action="store_true", help="the full protocol instead of the quick one")
    parser.add_argument("--clips", help="comma-separated names of some of the clips")
    parser.add_argument("--still", type=int, help="side of the still scenes (0: none)")
    parser.add_argument("--variants", help=f"comma-separated, of {', '.join(VARIANTS)} (default: all)")
    parser.add_argument("--no-lpips", action="store_true", help="leave LPIPS out")
    parser.add_argument("--weights", help="folder of the LPIPS weights")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    options = parser.parse_args(argv)
    with result_file(options.output) as path:
        path.write_text(json.dumps(_run(options), indent=1) + "\n", encoding="utf-8")
    return 0


def _run(options: argparse.Namespace) -> dict[str, Any]:
    model = load(options.model, device=options.device, precision=options.precision)
    if not isinstance(model, ReCaVSR):
        raise InputError(f"{options.model} has no parts to switch off")
    names = options.variants.split(",") if options.variants else VARIANTS
    variants: list[ReCaVSR] = [model, *(Ablated(model, name) for name in names)]
    protocol = FULL if options.full else QUICK
    if options.still is not None:
        protocol = replace(protocol, still_side=options.still)
    clips = choose_clips(held_out_clips(options.data), options.clips)
    rows = evaluate(
        [open_peer("bicubic"), *(session_upscaler(variant, variant.name) for variant in variants)],
        clips,
        protocol,
        lpips=None if options.no_lpips else LPIPS("alex", options.weights).to(model.device),
        cache=weights_folder() / "evaluation",
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    # Folders are left out: they say nothing about the result.
    command = f"python -m recavsr.evaluation.ablations --model {shlex.quote(options.model)} --data DIR"
    command += " --full" if options.full else ""
    command += f" --clips {options.clips}" if options.clips else ""
    command += f" --still {options.still}" if options.still is not None else ""
    result = {
        "protocol": described(protocol, clips),
        "environment": environment(str(model.device)),
        "command": command,
        "rows": rows,
    }
    print(worth_table(rows, model.name))
    return result


if __name__ == "__main__":
    run_module(main)
