"""Encoders: pixel formats, one scale of quality for all of them, HDR metadata, and those of graphics cards.

Quality is x264's CRF scale: 0 is best, 51 worst, 17 the default. Every other encoder takes the number of its
own scale at which it reaches x264's PSNR of luma (benchmarks/quality_scale.py measures them).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from fractions import Fraction
from typing import cast

import av
import av.error
from av.video.codeccontext import VideoCodecContext

from recavsr.errors import InputError
from recavsr.video.color import HdrMetadata

LOSSLESS = "lossless"
DEFAULT_QUALITY, WORST_QUALITY = 17, 51
_POINTS = (0, 12, 17, 22, 27, 32, WORST_QUALITY)


@dataclass(frozen=True)
class Encoder:
    """An encoder: its settings, and its pixel formats by (chroma, bits)."""

    codec: str
    library: str
    numbers: tuple[
        int, ...
    ] = ()  # its quality numbers at the points 0, 12, 17, 22, 27, 32 and 51 of the scale
    option: str = "crf"  # takes the quality number
    profiles: tuple[tuple[int, str], ...] = ()  # instead of numbers: (worst quality that it serves, its name)
    preset: tuple[str, str] | None = None  # name of the option, default value
    presets: tuple[str, ...] = ()  # all there are, where the library prints a complaint about others
    fixed: dict[str, str] = field(default_factory=dict)
    lossless: dict[str, str] | None = None
    chroma: tuple[str, ...] = ("420", "422", "444")
    bits: tuple[int, ...] = (8, 10)
    formats: dict[tuple[str, int], str] = field(default_factory=dict)  # where they are not called yuv...p
    hardware: bool = False

    def holds(self, chroma: str, bits: int) -> tuple[str, int]:
        """Return the chroma and bits of the nearest format that has at least these, or the most there is."""
        finer = [name for name in self.chroma if name >= chroma]
        depth = min((b for b in self.bits if b >= bits), default=max(self.bits))
        return (finer[0] if finer else self.chroma[-1]), depth

    def pixel_format(self, chroma: str, bits: int) -> str:
        """Return the name of a format; of what `holds` returned."""
        usual = f"yuv{chroma}p" + ("" if bits == 8 else f"{bits}le")
        return self.formats.get((chroma, bits), usual)

    def settings(self, quality: int | str | None, preset: str | None) -> dict[str, str]:
        """Return the options for a quality, None for the default; InputError if it has no such thing."""
        chosen = dict(self.fixed)
        if self.preset is not None:
            name, default = self.preset
            chosen[name] = preset or default
        if quality == LOSSLESS:
            if self.lossless is None:
                raise InputError(f"{self.codec} has no lossless mode here; use h264, hevc, vp9 or ffv1")
            return chosen | self.lossless
        if not self.numbers and not self.profiles:
            if quality is not None:
                raise InputError(f"{self.codec} is always lossless and takes no quality number")
            return chosen
        level = _level(quality)
        if self.profiles:
            name = next(name for worst, name in self.profiles if level <= worst)
            # Who takes such a codec wants room for grading: the best one unless told otherwise.
            return chosen | {"profile": self.profiles[0][1] if quality is None else name}
        return chosen | {self.option: str(self.number(level))}

    def number(self, quality: int) -> int:
        """Return its own quality number for one of the scale: linear between the measured points."""
        for (low, high), (first, last) in zip(
            itertools.pairwise(_POINTS), itertools.pairwise(self.numbers), strict=True
        ):
            if quality <= high:
                return round(first + (last - first) * (quality - low) / (high - low))
        return self.numbers[-1]


def _level(quality: int | str | None) -> int:
    if quality is None:
        return DEFAULT_QUALITY
    try:
        level = int(quality)
    except ValueError:
        level = -1
    if not 0 <= level <= WORST_QUALITY:
        raise InputError(
            f"quality is a number from 0 (best) to {WORST_QUALITY} or 'lossless', the same for every codec; "
            f"not {quality!r}"
        )
    return level


_NV12 = {("420", 8): "nv12", ("420", 10): "p010le"}
_NVENC_FORMATS = {("420", 10): "p010le", ("444", 10): "yuv444p16le"}
# fmt: off
_SPEEDS = (
    "ultrafast", "superfast", "veryfast", "faster", "fast", "medium", "slow", "slower", "veryslow", "placebo",
)
# fmt: on
_LIKE_X264, _LIKE_X265 = (0, 12, 17, 22, 27, 32, 51), (0, 12, 18, 24, 30, 36, 51)

SOFTWARE = {
    encoder.codec: encoder
    for encoder in (
        Encoder(
            "h264",
            "libx264",
            _LIKE_X264,
            preset=("preset", "veryfast"),
            presets=_SPEEDS,
            lossless={"qp": "0"},
        ),
        Encoder(
            "hevc",
            "libx265",
            _LIKE_X265,
            preset=("preset", "fast"),
            presets=_SPEEDS,
            fixed={"x265-params": "log-level=error"},
            lossless={"x265-params": "log-level=error:lossless=1"},
            bits=(8, 10, 12),
        ),
        Encoder("av1", "libsvtav1", (0, 12, 24, 39, 50, 58, 63), preset=("preset", "8"), chroma=("420",)),
        Encoder(
            "vp9",
            "libvpx-vp9",
            (0, 14, 24, 37, 48, 57, 63),
            preset=("cpu-used", "4"),
            fixed={"b": "0", "row-mt": "1"},
            lossless={"lossless": "1"},
            bits=(8,),
        ),
        Encoder(
            "ffv1",
            "ffv1",
            fixed={"level": "3"},
            lossless={},
            bits=(8, 10, 12, 14, 16),
            formats={("rgb", 8): "bgr0"} | {("rgb", bits): f"gbrp{bits}le" for bits in (10, 12, 14, 16)},
        ),
        Encoder(
            "prores",
            "prores_ks",
            profiles=((13, "hq"), (19, "standard"), (29, "lt"), (WORST_QUALITY, "proxy")),
            chroma=("422", "444"),
            bits=(10,),
        ),
        Encoder("raw", "wrapped_avframe", lossless={}, bits=(8, 10, 12)),
    )
}


def _nvenc(codec: str, numbers: tuple[int, ...], bits: tuple[int, ...], chroma: tuple[str, ...]) -> Encoder:
    return Encoder(
        codec,
        f"{codec}_nvenc",
        numbers,
        option="cq",
        preset=("preset", "p5"),
        fixed={"rc": "vbr", "b": "0"},
        chroma=chroma,
        bits=bits,
        formats=_NVENC_FORMATS,
        hardware=True,
    )


def _quick_sync(codec: str, numbers: tuple[int, ...], bits: tuple[int, ...]) -> Encoder:
    return Encoder(
        codec,
        f"{codec}_qsv",
        numbers,
        option="global_quality",
        preset=("preset", "medium"),
        chroma=("420",),
        bits=bits,
        formats=_NV12,
        hardware=True,
    )


HARDWARE = (
    _nvenc("h264", _LIKE_X264, (8,), ("420", "444")),
    _nvenc("hevc", _LIKE_X265, (8, 10), ("420", "444")),
    _nvenc("av1", _LIKE_X265, (8, 10), ("420",)),
    _quick_sync("h264", _LIKE_X264, (8,)),
    _quick_sync("hevc", _LIKE_X265, (8, 10)),
)
"""Encoders of graphics cards, the preferred ones first. Their numbers are those of the software encoders: not
measured."""


def opens(encoder: Encoder, pixel_format: str, size: tuple[int, int], options: dict[str, str]) -> bool:
    """Say whether this machine can encode so: the encoder is opened, and nothing is encoded."""
    height, width = size
    try:
        context = cast(VideoCodecContext, av.CodecContext.create(encoder.library, "w"))
        context.width, context.height, context.pix_fmt = width, height, pixel_format
        context.time_base, context.framerate = Fraction(1, 25), Fraction(25)
        context.options = dict(options)
        context.open()
    except (av.error.FFmpegError, ValueError, OSError):
        return False
    return True


def with_hdr_metadata(encoder: Encoder, options: dict[str, str], hdr: HdrMetadata) -> dict[str, str] | None:
    """Return the options that also write static HDR metadata, or None where the encoder writes none."""
    writers = {"libx264": ("x264-params", _x264), "libx265": ("x265-params", _x265)}
    writers["libsvtav1"] = ("svtav1-params", _svtav1)
    if encoder.library not in writers:
        return None
    name, write = writers[encoder.library]
    parameters = [*filter(None, [options.get(name)]), *write(hdr)]
    return options | {name: ":".join(parameters)}


def _x264(hdr: HdrMetadata) -> list[str]:
    return [*_mastering("mastering-display", hdr, 50000, 10000), *_light("cll", hdr)]


def _x265(hdr: HdrMetadata) -> list[str]:
    found = [*_mastering("master-display", hdr, 50000, 10000), *_light("max-cll", hdr)]
    return ["hdr10=1", "repeat-headers=1", *found]


def _svtav1(hdr: HdrMetadata) -> list[str]:
    return [*_mastering("mastering-display", hdr, None, None), *_light("content-light", hdr)]


def _mastering(option: str, hdr: HdrMetadata, place: int | None, light: int | None) -> list[str]:
    """Return the mastering display: in parts of 1/place and 1/light cd/m2, or as plain numbers."""
    if not hdr.display_primaries or not hdr.white_point or hdr.max_luminance is None:
        return []

    def number(value: Fraction, parts: int | None) -> str:
        return f"{float(value):.6g}" if parts is None else str(round(value * parts))

    red, green, blue = hdr.display_primaries
    points = [("G", green), ("B", blue), ("R", red), ("WP", hdr.white_point)]
    places = [f"{name}({number(x, place)},{number(y, place)})" for name, (x, y) in points]
    low = hdr.min_luminance or Fraction(0)
    return [f"{option}={''.join(places)}L({number(hdr.max_luminance, light)},{number(low, light)})"]


def _light(option: str, hdr: HdrMetadata) -> list[str]:
    if hdr.max_content_light is None:
        return []
    return [f"{option}={hdr.max_content_light},{hdr.max_average_light or 0}"]
