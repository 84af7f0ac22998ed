"""Labelled crops side by side, to look at: input | bicubic | peers | ours | truth, one row per request.

    python -m recavsr.evaluation.crops --data DIR --model bicubic,animevideov3,span,nano \\
        --crop A_bbb_stereo:heavy:22:400,200,256,192 [--crop ...] -o sheet.png

A crop is CLIP:DEGRADATION:FRAME:X,Y,WIDTH,HEIGHT in truth pixels after the protocol's cropping. Needs OpenCV.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from recavsr.errors import InputError, run_module
from recavsr.evaluation.lpips import weights_folder
from recavsr.evaluation.peers import SCALE, Frames, Upscaler
from recavsr.evaluation.protocol import (
    DEGRADATIONS,
    FULL,
    Pair,
    held_out_clips,
    make_pair,
    open_upscaler,
    opencv,
)
from recavsr.stream.load import resolve_device

LABEL_HEIGHT = 22
GAP = 4


@dataclass(frozen=True)
class CropRequest:
    """One region of one frame; x, y, width, height in truth pixels."""

    clip: str
    degradation: str
    frame: int
    x: int
    y: int
    width: int
    height: int

    @classmethod
    def parse(cls, text: str) -> CropRequest:
        """Read CLIP:DEGRADATION:FRAME:X,Y,WIDTH,HEIGHT; raises InputError."""
        try:
            clip, degradation, frame, region = text.split(":")
            x, y, width, height = (int(value) for value in region.split(","))
            request = cls(clip, degradation, int(frame), x, y, width, height)
        except ValueError:
            raise InputError(f"{text!r} is not CLIP:DEGRADATION:FRAME:X,Y,WIDTH,HEIGHT") from None
        if degradation not in DEGRADATIONS:
            raise InputError(f"unknown degradation {degradation!r}; choose of {', '.join(DEGRADATIONS)}")
        return request

    def cut(self, image: Frames) -> Frames:
        """The region of a truth-sized image [H, W, 3]."""
        height, width = image.shape[:2]
        right, bottom = self.x + self.width, self.y + self.height
        if min(self.x, self.y) < 0 or right > width or bottom > height or min(self.width, self.height) < 1:
            raise InputError(
                f"the region {self.x},{self.y},{self.width},{self.height} leaves {width}x{height}"
            )
        return image[self.y : self.y + self.height, self.x : self.x + self.width]


def crops(request: CropRequest, pair: Pair, upscalers: Sequence[Upscaler]) -> list[tuple[str, Frames]]:
    """(label, crop [height, width, 3]) of the input (pixels repeated), of every upscaler and of truth."""
    if not 0 <= request.frame < len(pair.truth):
        raise InputError(f"frame {request.frame} is outside the clip's {len(pair.truth)} frames")
    lr_frame = pair.lr_frames[request.frame]
    cells = [("input", request.cut(lr_frame.repeat(SCALE, axis=0).repeat(SCALE, axis=1)))]
    for upscaler in upscalers:
        if upscaler.per_frame:
            output = upscaler.run(lr_frame[None])[0]
        else:
            output = upscaler.run(pair.lr_frames)[request.frame]
        cells.append((upscaler.name, request.cut(output)))
    return [*cells, ("truth", request.cut(pair.truth[request.frame]))]


def contact_sheet(rows: Sequence[Sequence[tuple[str, Frames]]], zoom: int = 1) -> Frames:
    """Lay labelled images [h, w, 3] out in rows -> one uint8 RGB image; `zoom` repeats pixels."""
    strips = []
    for row in rows:
        cells = [_labelled(label, image.repeat(zoom, axis=0).repeat(zoom, axis=1)) for label, image in row]
        gap = np.full((cells[0].shape[0], GAP, 3), 255, np.uint8)
        strip = [part for cell in cells for part in (cell, gap)][:-1]
        strips.append(np.concatenate(strip, axis=1))
    width = max(strip.shape[1] for strip in strips)
    padded = [
        np.pad(strip, ((0, GAP), (0, width - strip.shape[1]), (0, 0)), constant_values=255)
        for strip in strips
    ]
    return np.concatenate(padded, axis=0)


def _labelled(label: str, image: Frames) -> Frames:
    cv2 = opencv()
    banner = np.full((LABEL_HEIGHT, image.shape[1], 3), 255, np.uint8)
    cv2.putText(banner, label, (3, 16), cv2.FONT_HERSHEY_SIMPLEX, 0.5, (0, 0, 0), 1, cv2.LINE_AA)
    return np.concatenate([banner, image], axis=0)


def save_png(image: Frames, path: Path) -> None:
    """Write an RGB image [H, W, 3]."""
    _, data = opencv().imencode(".png", image[..., ::-1])
    path.write_bytes(data.tobytes())


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; writes one PNG."""
    parser = argparse.ArgumentParser(prog="recavsr.evaluation.crops", description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="comma-separated: bicubic, animevideov3, span, ours")
    parser.add_argument("--data", required=True, help="folder of the held-out clips")
    parser.add_argument("--crop", required=True, action="append", help="CLIP:DEGRADATION:FRAME:X,Y,W,H")
    parser.add_argument("-o", "--output", required=True, type=Path)
    parser.add_argument("--zoom", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--cache", type=Path, default=weights_folder() / "evaluation")
    options = parser.parse_args(argv)
    requests = [CropRequest.parse(text) for text in options.crop]
    files = {clip.stem: clip for clip in held_out_clips(options.data)}
    unknown = [request.clip for request in requests if request.clip not in files]
    if unknown:
        raise InputError(f"unknown clip {unknown[0]!r}; choose of {', '.join(files)}")
    device = str(resolve_device(options.device))
    upscalers = [open_upscaler(name, device) for name in options.model.split(",")]
    rows = []
    for request in requests:
        degradation = DEGRADATIONS[request.degradation]
        pair = make_pair(files[request.clip], degradation, FULL, options.cache)
        rows.append(crops(request, pair, upscalers))
    save_png(contact_sheet(rows, options.zoom), options.output)
    return 0


if __name__ == "__main__":
    run_module(main)
