"""Does a crop of training size get coded as hard as the whole frame at the same crf?

    python benchmarks/crf_of_crops.py VIDEO... [-o FILE]

Every clip is made small as in the held-out protocol, coded by x264 whole and in crops of 64 x 64 pixels, at
the same crf and at `crf_of_part`. What counts is the squared error of the crop's luma, as a share of what
the whole frame's code leaves there.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from recavsr.data.degradation import crf_of_part
from recavsr.evaluation import protocol
from recavsr.evaluation.environment import environment
from recavsr.video.memory_codec import code_clip

SIDE = 64
CRFS = (16, 22, 28)
QUALITIES = {
    "clean": protocol.Degradation("clean", 0.6, "area", 0, 100, None),
    "noisy": protocol.Degradation("noisy", 1.2, "bilinear", 4, 85, None),
    "heavy": protocol.Degradation("heavy", 1.8, "bilinear", 7, 70, None),
}


def error(clip: np.ndarray, crf: float) -> np.ndarray:
    """Return the squared error of coded luma, [N, H, W]."""
    height = clip.shape[1] * 2 // 3
    coded = code_clip(clip, "libx264", crf=crf, speed="medium", rate=Fraction(25))
    return (coded[:, :height].astype(float) - clip[:, :height]) ** 2


def measured(clip: np.ndarray) -> Iterator[dict[str, float]]:
    """Yield the mean squared error that is left in a clip's crops by the three codes, at each crf."""
    height, width = clip.shape[1:3]
    corners = list(product(range(0, height - SIDE + 1, SIDE), range(0, width - SIDE + 1, SIDE)))
    for crf in CRFS:
        whole = error(protocol.planes_of(clip), crf)
        errors = []
        for y, x in corners:
            part = (slice(None), slice(y, y + SIDE), slice(x, x + SIDE))
            crop, own = protocol.planes_of(clip[part]), crf_of_part(crf, SIDE, SIDE)
            errors.append((whole[part].mean(), error(crop, crf).mean(), error(crop, own).mean()))
        means = dict(zip(("whole", "same_crf", "crf_of_part"), np.mean(errors, axis=0)))
        yield {"crf": crf, **{name: round(float(value), 3) for name, value in means.items()}}


def main() -> None:
    """Measure every clip; print means, and write a row a clip, quality and crf."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("videos", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for video in options.videos:
        truth, rate = protocol.read_truth(video, protocol.FULL)
        for quality, degradation in QUALITIES.items():
            clip = protocol.degrade(truth, degradation, rate, 0)
            height, width = clip.shape[1:3]
            if height >= 2 * SIDE:
                about = {"clip": video.stem, "height": height, "width": width, "quality": quality}
                rows += [about | row for row in measured(clip)]
    for quality, crf in product(QUALITIES, CRFS):
        chosen = [row for row in rows if (row["quality"], row["crf"]) == (quality, crf)]
        print(
            f"{quality:6} crf {crf}: {len(chosen)} clips, error of crops, as a share of the frame's:", end=""
        )
        for name in ("same_crf", "crf_of_part"):
            shares = [row[name] / row["whole"] for row in chosen]
            mean = statistics.geometric_mean(shares)
            print(f" {name} {mean:.2f} ({min(shares):.2f} to {max(shares):.2f})", end="")
        print()
    if options.output:
        result = {"environment": environment("cpu"), "rows": rows}
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
