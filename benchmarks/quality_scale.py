"""One quality scale for all encoders: which number of each looks as good as a number of x264?

    python benchmarks/quality_scale.py VIDEO... [-o benchmarks/results/quality_scale.json]

Frames of the videos are encoded by x264, with the preset that `recavsr upscale` takes, at the numbers of the
scale, and by every other encoder at its own. What counts is the PSNR of luma (mean squared error over all
frames of all videos). Between two of its numbers an encoder's PSNR is taken as linear.
"""

from __future__ import annotations

import argparse
import json
from fractions import Fraction
from pathlib import Path
from typing import cast

import av
import numpy as np
from av.video.codeccontext import VideoCodecContext

from recavsr.evaluation.environment import environment
from recavsr.video.encoders import SOFTWARE

SCALE = (12, 17, 22, 27, 32)
NUMBERS = {"hevc": (8, 16, 24, 32, 40), "av1": (6, 20, 34, 48, 63), "vp9": (6, 20, 34, 48, 63)}
PROFILES = ("proxy", "lt", "standard", "hq")
FRAMES, HEIGHT, WIDTH = 16, 360, 640


def read(path: Path) -> list[av.VideoFrame]:
    """Return the first frames of a video as 640x360, 8-bit 4:2:0."""
    with av.open(str(path)) as container:
        return [
            frame.reformat(WIDTH, HEIGHT, "yuv420p", interpolation="AREA")
            for frame, _ in zip(container.decode(video=0), range(FRAMES))
        ]


def measure(clips: list[list[av.VideoFrame]], codec: str, options: dict[str, str]) -> tuple[float, float]:
    """Return the PSNR of luma in dB and the bits a pixel after encoding and decoding."""
    error = bits = pixels = 0.0
    encoder = SOFTWARE[codec]
    for clip in clips:
        context = cast(VideoCodecContext, av.CodecContext.create(encoder.library, "w"))
        context.width, context.height, context.framerate = WIDTH, HEIGHT, Fraction(25)
        context.pix_fmt = encoder.pixel_format(*encoder.holds("420", 8))
        preset = dict([encoder.preset]) if encoder.preset else {}
        context.time_base, context.options = Fraction(1, 25), encoder.fixed | preset | options
        packets = []
        for number, frame in enumerate(clip):
            picture = frame.reformat(format=context.pix_fmt, interpolation="BICUBIC")
            picture.pts, picture.time_base = number, Fraction(1, 25)
            packets += context.encode(picture)
        packets += context.encode(None)
        name = {"h264": "h264", "av1": "libdav1d", "vp9": "vp9"}.get(codec, codec)
        decoder = cast(VideoCodecContext, av.CodecContext.create(name, "r"))
        decoder.extradata = context.extradata
        decoder.width, decoder.height = WIDTH, HEIGHT
        if codec == "prores":
            decoder.codec_tag = {"proxy": "apco", "lt": "apcs", "standard": "apcn", "hq": "apch"}[
                options["profile"]
            ]
        decoded = [frame for packet in packets for frame in decoder.decode(packet)]
        decoded += decoder.decode(None)
        assert len(decoded) == len(clip), (codec, len(decoded))
        for made, wanted in zip(decoded, clip, strict=True):
            difference = luma(made) - luma(wanted)
            error += float((difference**2).sum())
            pixels += difference.size
        bits += sum(8 * packet.size for packet in packets)
    return 10 * np.log10(255**2 * pixels / error), bits / pixels


def luma(frame: av.VideoFrame) -> np.ndarray:
    """Return the luma plane in 8-bit levels."""
    plane = frame.planes[0]
    deep = "10" in frame.format.name
    values = np.frombuffer(memoryview(plane), np.uint16 if deep else np.uint8).reshape(plane.height, -1)
    return values[:, :WIDTH].astype(float) / (4 if deep else 1)


def main() -> None:
    """Measure, print a line a point, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("videos", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/quality_scale.json"))
    arguments = parser.parse_args()
    clips = [read(path) for path in arguments.videos]

    def curve(codec: str, option: str, values: tuple[object, ...]) -> list[dict[str, object]]:
        rows = []
        for value in values:
            psnr, bits = measure(clips, codec, {option: str(value)})
            rows.append({option: value, "psnr_db": round(psnr, 3), "bits_a_pixel": round(bits, 4)})
            print(codec, rows[-1], flush=True)
        return rows

    scale = curve("h264", "crf", SCALE)
    curves = {codec: curve(codec, "crf", numbers) for codec, numbers in NUMBERS.items()}
    equal = {}
    for codec, rows in curves.items():
        falling = sorted((float(row["psnr_db"]), float(row["crf"])) for row in rows)
        levels, numbers = zip(*falling, strict=True)
        equal[codec] = {
            str(row["crf"]): round(float(np.interp(float(row["psnr_db"]), levels, numbers)), 1)
            for row in scale
        }
    result = {
        "videos": [path.name for path in arguments.videos],
        "frames_each": FRAMES,
        "size": f"{WIDTH}x{HEIGHT}",
        "x264": scale,
        **curves,
        "prores": curve("prores", "profile", PROFILES),
        "number_of_equal_psnr": equal,
        "environment": environment(),
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
