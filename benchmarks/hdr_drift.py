"""What does a model that was trained on SDR do to PQ and HLG code values?

    python benchmarks/hdr_drift.py [--model nano] [-o benchmarks/results/hdr_drift.json]

Flat patches of grey and of colours, from black to the brightest code, are upscaled (x2, 16 bits inside)
as they are coded, with each colour fix, and by the same model behind a curve: cd/m2 up to 1,000 laid on
a gamma of 2.4, as SDR is, and back. Given are differences in 10-bit code values between the middle of a
patch before and after, and for PQ what they mean in per cent of light. Patches lie beside each other, so
their edges are in the picture.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from recavsr.evaluation.environment import environment
from recavsr.stream.load import load
from recavsr.stream.session import Session
from recavsr.video.transfer import HLG, PQ, linear_light

SIDE, ROWS, COLUMNS = 24, 4, 6
WHITE = 65535
PEAK = 1000 / 203  # of the curve, in reference whites

Curve = Callable[[np.ndarray], np.ndarray]


def patches() -> np.ndarray:
    """Return the picture of patches, uint16 [H, W, 3]: a ramp of greys, then colours, dark and bright."""
    greys = np.linspace(0, 1, 12)[:, None].repeat(3, 1)
    hues = np.array([(1, 0.2, 0.2), (0.2, 1, 0.2), (0.2, 0.2, 1), (1, 1, 0.2), (0.2, 1, 1), (1, 0.6, 0.5)])
    colors = np.concatenate([greys, 0.35 * hues, 0.75 * hues])
    grid = np.rint(colors.reshape(ROWS, COLUMNS, 3) * WHITE).astype(np.uint16)
    return grid.repeat(SIDE, 0).repeat(SIDE, 1)


def curve_of(transfer: int) -> tuple[Curve, Curve]:
    """Return the way to gamma 2.4 and back, as tables between code values."""
    codes = np.arange(WHITE + 1)
    light = linear_light(codes.astype(np.uint16), transfer)
    there = np.rint(WHITE * (np.clip(light / PEAK, 0, 1)) ** (1 / 2.4)).astype(np.uint16)
    back = np.rint(np.interp(codes, there.astype(float), codes)).astype(np.uint16)
    return (lambda x: there[x]), (lambda x: back[x])


def main() -> None:
    """Measure, print a line a way, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="nano")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/hdr_drift.json"))
    arguments = parser.parse_args()
    model, picture = load(arguments.model, device="cpu"), patches()
    height, width = picture.shape[:2]
    rows = []
    for name, transfer in (("PQ", PQ), ("HLG", HLG)):
        there, back = curve_of(transfer)
        for way in ("none", "wavelet", "adain", "curve", "curve and wavelet"):
            bent = way.startswith("curve")
            fix = "wavelet" if way.endswith("wavelet") else "none" if bent else way
            sizes = (height, width), (2 * height, 2 * width)
            session = Session(model, *sizes, color_fix=fix)  # type: ignore[arg-type]
            given = there(picture) if bent else picture
            blocks = session.push(given[None].repeat(21, 0)) + session.flush()
            made = back(blocks[0][-1]) if bent else blocks[0][-1]
            before = picture[SIDE // 2 :: SIDE, SIDE // 2 :: SIDE].astype(float)
            tiles = made.reshape(ROWS, 2 * SIDE, COLUMNS, 2 * SIDE, 3)[:, SIDE // 2 : -SIDE // 2]
            after = tiles[:, :, :, SIDE // 2 : -SIDE // 2].mean(axis=(1, 3))
            off = np.abs(after - before) * 1023 / WHITE
            row = {
                "transfer": name,
                "way": way,
                "mean_codes": float(off.mean()),
                "largest_codes": float(off.max()),
                "largest_codes_below_1000_nits": float(off[before <= _code_of_peak(transfer)].max()),
            }
            if name == "PQ":
                lights = (linear_light(np.rint(x).astype(np.uint16), PQ) for x in (before, after))
                first, last = lights
                visible = (first > 1 / 203) & (first <= PEAK)  # above 1 cd/m2
                change = np.abs(last[visible] / first[visible] - 1)
                row["largest_percent_of_light"] = float(100 * change.max())
            rows.append({key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()})
            print(rows[-1], flush=True)
    result = {"model": arguments.model, "rows": rows, "environment": environment()}
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _code_of_peak(transfer: int) -> int:
    light = linear_light(np.arange(WHITE + 1).astype(np.uint16), transfer)
    return int(np.searchsorted(light, PEAK))


if __name__ == "__main__":
    main()
