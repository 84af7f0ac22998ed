"""What does a model that was trained for x4 make of other factors, and of clean input?

    python benchmarks/factors.py CLIPS [--model nano ...] [--lpips WEIGHTS] [-o FILE]

CLIPS is a folder with the held-out clips of the evaluation protocol. The middle of each is made smaller by
the factor, under the tables' mild degradation or by area alone (`clean`), and brought back: by bicubic, by
the model at that factor (`direct`), and, below the model's native scale, by way of that.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import torch

from recavsr.data.degradation import apply_degradation, fixed_degradation
from recavsr.evaluation import metrics
from recavsr.evaluation.environment import environment
from recavsr.evaluation.lpips import LPIPS
from recavsr.evaluation.protocol import (
    QUICK,
    held_out_clips,
    lpips_frames,
    read_truth,
)
from recavsr.stream.load import load
from recavsr.stream.session import Session
from recavsr.stream.step import BlockModel

FRAMES, SIDE = 21, 312  # a first block; the side is even in LR frames of each factor
CASES = ((1, "mild"), *((factor, name) for factor in (2, 3, 4) for name in ("mild", "clean")))


def resized(frames: np.ndarray, size: tuple[int, int], how: int) -> np.ndarray:
    """Resize frames [N, h, w, 3] to (H, W)."""
    return np.stack([cv2.resize(frame, size[::-1], interpolation=how) for frame in frames])


def lr_of(truth: np.ndarray, factor: int, name: str) -> np.ndarray:
    """Make LR frames of the truth."""
    size = truth.shape[1] // factor, truth.shape[2] // factor
    if name == "clean":
        return resized(truth, size, cv2.INTER_AREA)
    clip = torch.from_numpy(truth).permute(0, 3, 1, 2) / 255
    lr = apply_degradation(clip, fixed_degradation(name, len(truth), factor))
    return lr.permute(0, 2, 3, 1).contiguous().numpy()


def upscaled(model: BlockModel, lr: np.ndarray, factor: int, *, direct: bool = False) -> np.ndarray:
    """Upscale LR frames by the factor."""
    size = lr.shape[1], lr.shape[2]
    session = Session(model, size, (factor * size[0], factor * size[1]), direct=direct)
    return np.concatenate([*session.push(lr), *session.flush()])


def main() -> None:
    """Measure, print a line a factor and way, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clips", type=Path)
    parser.add_argument("--model", nargs="+", default=["nano"])
    parser.add_argument("--lpips", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/factors.json"))
    arguments = parser.parse_args()
    metric = LPIPS("alex", arguments.lpips)
    models = {Path(name).name: load(name, device="cpu") for name in arguments.model}
    protocol = replace(QUICK, frames=FRAMES, short_side=SIDE, long_side=SIDE)
    rows = []
    for clip in held_out_clips(arguments.clips):
        truth, _ = read_truth(clip, protocol)
        size = truth.shape[1:3]
        for factor, name in CASES:
            lr = lr_of(truth, factor, name)
            made = {"bicubic": resized(lr, size, cv2.INTER_CUBIC)}
            for called, model in models.items():
                made[f"{called}, direct"] = upscaled(model, lr, factor, direct=True)
                if factor < model.native_scale:
                    made[f"{called}, by way of x{model.native_scale:g}"] = upscaled(model, lr, factor)
            for way, output in made.items():
                row = {"clip": clip.stem, "factor": factor, "input": name, "way": way}
                row["psnr"] = round(float(metrics.psnr(output, truth).mean()), 3)
                row["ssim"] = round(float(metrics.ssim(output, truth).mean()), 4)
                row["lpips"] = round(float(np.mean(lpips_frames(output, truth, metric))), 4)
                rows.append(row)
                print(json.dumps(row), flush=True)
    found: dict[tuple[int, str, str], list[dict]] = {}
    for row in rows:
        found.setdefault((row["factor"], row["input"], row["way"]), []).append(row)
    means = [
        dict(zip(("factor", "input", "way"), key))
        | {name: round(float(np.mean([row[name] for row in same])), 4) for name in ("psnr", "ssim", "lpips")}
        for key, same in found.items()
    ]
    for mean in means:
        print(json.dumps(mean))
    text = json.dumps(
        {"frames": FRAMES, "environment": environment("cpu"), "means": means, "rows": rows}, indent=1
    )
    arguments.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
