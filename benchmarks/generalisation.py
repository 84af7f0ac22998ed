"""How much of what training gained carries over to clips that it did not see?

    python benchmarks/generalisation.py PACK --model OLD --model NEW [-o FILE]

PACK is a training pack. Clips that were trained on and clips that it holds back are degraded alike; what each
model gains over bicubic is shown for videos and for photos under a drawn camera. Where gains on the first
grow faster than on the second, more training of the same kind is not what helps.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from recavsr.data.clips import ClipSource
from recavsr.evaluation import metrics
from recavsr.evaluation.environment import environment
from recavsr.evaluation.peers import open_peer
from recavsr.evaluation.protocol import Pair, session_upscaler
from recavsr.evaluation.report import BASELINE, summarise
from recavsr.evaluation.validation import validation_pairs
from recavsr.stream.load import load

FRAMES, CONDITIONS = 29, ("mild", "heavy")
METRICS = {"psnr": metrics.psnr, "ssim": metrics.ssim}


def chosen(pack: Path, split: str, each: int) -> list[Pair]:
    """Return pairs of at most `each` videos, evenly spread, and of `each` photos of a split."""
    source = ClipSource.open(pack, processes=2, split=split)
    pairs = [p.moving for p in validation_pairs(source, frames=FRAMES, photos=each, conditions=CONDITIONS)]
    videos = list(dict.fromkeys(pair.clip for pair in pairs if kind_of(pair) == "video"))
    kept = videos[:: -(-len(videos) // each)]
    return [pair for pair in pairs if kind_of(pair) == "photo" or pair.clip in kept]


def kind_of(pair: Pair) -> str:
    """Return what a validation pair was made from."""
    return "photo" if pair.clip.startswith("photo ") else "video"


def main() -> None:
    """Measure every model on both splits; print means, and write a row a clip."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pack", type=Path)
    parser.add_argument("--model", action="append", required=True)
    parser.add_argument("--each", type=int, default=12, help="videos, and photos, of a split")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    models = (session_upscaler(load(name, device="cpu"), Path(name).name) for name in options.model)
    upscalers = [open_peer(BASELINE), *models]
    rows = []
    for split in ("train", "validation"):
        cases: dict[str, list[dict]] = {"video": [], "photo": []}
        for pair in chosen(options.pack, split, options.each):
            for upscaler in upscalers:
                made = upscaler.run(pair.lr_frames)
                row = {"model": upscaler.name, "degradation": pair.degradation, "clip": pair.clip}
                row |= {name: float(measure(made, pair.truth).mean()) for name, measure in METRICS.items()}
                cases[kind_of(pair)].append(row)
        for kind, case in cases.items():
            rows += [{"split": split, "kind": kind, **row} for row in case]
            for mean in summarise(case):
                gains = f"{mean['psnr_gain']:+.3f} dB  SSIM {mean['ssim_gain']:+.4f}"
                if mean["model"] != BASELINE:
                    print(f"{split:10} {kind} {mean['degradation']:5} {mean['model']:12} {gains}", flush=True)
    if options.output:
        result = {"frames": FRAMES, "environment": environment("cpu"), "rows": rows}
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
