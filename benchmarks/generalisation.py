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
from statistics import mean

from recavsr.data.clips import ClipSource
from recavsr.evaluation import metrics
from recavsr.evaluation.environment import environment
from recavsr.evaluation.peers import open_peer
from recavsr.evaluation.protocol import Pair, session_upscaler
from recavsr.evaluation.validation import validation_pairs
from recavsr.stream.load import load

FRAMES, CONDITIONS = 29, ("mild", "heavy")


def chosen(pack: Path, split: str, each: int) -> list[tuple[str, Pair]]:
    """Return pairs of at most `each` videos and of `each` photos of a split, with their kind."""
    source = ClipSource.open(pack, processes=2, split=split)
    pairs = [p.moving for p in validation_pairs(source, frames=FRAMES, photos=each, conditions=CONDITIONS)]
    kinds = {kind: [p for p in pairs if p.clip.startswith("photo") == (kind == "photo")]
             for kind in ("video", "photo")}  # fmt: skip
    names = list(dict.fromkeys(p.clip for p in kinds["video"]))
    kept = set(names[:: -(-len(names) // each)])
    return [(kind, p) for kind, some in kinds.items() for p in some if kind == "photo" or p.clip in kept]


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
    models = {Path(name).name: session_upscaler(load(name, device="cpu"), name) for name in options.model}
    rows = []
    for split in ("train", "validation"):
        for kind, pair in chosen(options.pack, split, options.each):
            for name, upscaler in {"bicubic": open_peer("bicubic"), **models}.items():
                made = upscaler.run(pair.lr_frames)
                row = {"model": name, "split": split, "kind": kind, "degradation": pair.degradation}
                row |= {"clip": pair.clip, "psnr": float(metrics.psnr(made, pair.truth).mean())}
                rows.append(row | {"ssim": float(metrics.ssim(made, pair.truth).mean())})
    for split in ("train", "validation"):
        for kind in ("video", "photo"):
            for condition in CONDITIONS:
                case = [
                    r for r in rows if (r["split"], r["kind"], r["degradation"]) == (split, kind, condition)
                ]

                def value(name: str, key: str, case: list = case) -> float:
                    return mean(r[key] for r in case if r["model"] == name)

                for name in models:
                    psnr, ssim = (value(name, key) - value("bicubic", key) for key in ("psnr", "ssim"))
                    print(
                        f"{split:10} {kind} {condition:5} {name:12} {psnr:+.3f} dB  SSIM {ssim:+.4f}",
                        flush=True,
                    )
    if options.output:
        result = {"frames": FRAMES, "environment": environment("cpu"), "rows": rows}
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
