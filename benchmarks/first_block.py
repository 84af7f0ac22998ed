"""What a short first block costs in quality: a shot's first frames against truth, by the block's length.

    python benchmarks/first_block.py DATA [--model nano] [-o benchmarks/results/first_block.json]

The held-out clips of the evaluation below the folder DATA, in its quick form (29 frames, crops of 320
pixels), degraded mildly. Frames 0 to 20 are the paper's first block; the others follow it at any length.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from recavsr.evaluation import metrics
from recavsr.evaluation.environment import environment
from recavsr.evaluation.protocol import DEGRADATIONS, QUICK, held_out_clips, make_pair, session_upscaler
from recavsr.geometry import frames_of_latents
from recavsr.stream.load import load

PARTS = {"0 to 4": slice(0, 5), "5 to 20": slice(5, 21), "21 to 28": slice(21, 29)}


def main() -> None:
    """Parse the command line, measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data")
    parser.add_argument("--model", default="nano")
    parser.add_argument("--latents", type=int, nargs="*", default=[1, 2, 3, 6])
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    degradation = DEGRADATIONS["mild"]
    pairs = [make_pair(clip, degradation, QUICK) for clip in held_out_clips(options.data)]
    rows: list[dict[str, Any]] = []
    for latents in options.latents:
        model = load(options.model, device="cpu", first_block_latents=latents)
        run = session_upscaler(model, options.model)
        outputs = [run.run(pair.lr_frames) for pair in pairs]
        psnr = np.stack([metrics.psnr(out, pair.truth) for out, pair in zip(outputs, pairs)])
        ssim = np.stack([metrics.ssim(out, pair.truth) for out, pair in zip(outputs, pairs)])
        td = np.stack([metrics.td(out, pair.truth) for out, pair in zip(outputs, pairs)])
        row: dict[str, Any] = {"latents": latents, "frames": frames_of_latents(0, latents)}
        for name, part in PARTS.items():
            row[name] = {
                "psnr": round(float(psnr[:, part].mean()), 3),
                "ssim": round(float(ssim[:, part].mean()), 4),
            }
        row["td"] = round(float(td.mean()), 4)
        rows.append(row)
        print(json.dumps(row), flush=True)
    if options.output is not None:
        about = {"environment": environment("cpu"), "model": options.model, "clips": [p.clip for p in pairs]}
        options.output.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
