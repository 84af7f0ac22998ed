"""Output containers and codecs: what each can hold, and the encoder settings that follow from the source."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import av

from recavsr.errors import InputError
from recavsr.video.color import ColorTags, HdrMetadata
from recavsr.video.info import VideoInfo

LOSSLESS = "lossless"


@dataclass(frozen=True)
class Container:
    """An output file format: its muxer and what it holds."""

    suffix: str
    muxer: str
    codecs: tuple[str, ...]  # the first is the default for 8 bits
    deep_codec: str  # the default for more than 8 bits
    options: dict[str, str] = field(default_factory=dict)
    subtitles: str | None = None  # what text subtitles become that it can't hold as they are
    chapters: bool = True
    times: bool = True  # each frame has a time of its own; else the rate is all there is


# Edit lists carry streams that start late or before zero exactly; the index goes to the front, for the web.
_MP4_OPTIONS = {"movflags": "+faststart+write_colr"}
# Matroska can hold times before zero (encoder delay of sound); shifting everything would move the picture.
_MKV_OPTIONS = {"avoid_negative_ts": "disabled"}

CONTAINERS = {
    container.suffix: container
    for container in (
        Container(".mp4", "mp4", ("h264", "hevc", "av1", "vp9"), "hevc", _MP4_OPTIONS, "mov_text"),
        Container(".m4v", "mp4", ("h264", "hevc"), "hevc", _MP4_OPTIONS, "mov_text"),
        Container(".mov", "mov", ("h264", "hevc", "prores"), "hevc", _MP4_OPTIONS, "mov_text"),
        Container(
            ".mkv",
            "matroska",
            ("h264", "hevc", "av1", "vp9", "ffv1", "prores"),
            "hevc",
            _MKV_OPTIONS,
            "subrip",
        ),
        Container(".webm", "webm", ("vp9", "av1"), "av1", _MKV_OPTIONS, "webvtt"),
        Container(".y4m", "yuv4mpegpipe", ("raw",), "raw", {"strict": "-1"}, chapters=False, times=False),
    )
}


@dataclass(frozen=True)
class Encoder:
    """An encoder and its pixel formats by (chroma, bits)."""

    library: str
    quality_option: str | None
    default_quality: int
    worst_quality: int
    presets: tuple[str, str]  # name of the option, default value
    lossless: dict[str, str] | None
    chroma: tuple[str, ...] = ("420", "422", "444")
    bits: tuple[int, ...] = (8, 10)

    def pixel_format(self, chroma: str, bits: int) -> str:
        """Return the pixel format that holds at least `bits` bits (or the most there is) in `chroma`."""
        depth = min((b for b in self.bits if b >= bits), default=max(self.bits))
        return f"yuv{chroma}p" + ("" if depth == 8 else f"{depth}le")


ENCODERS = {
    "h264": Encoder("libx264", "crf", 17, 51, ("preset", "veryfast"), {"qp": "0"}),
    "hevc": Encoder(
        "libx265", "crf", 18, 51, ("preset", "fast"), {"x265-params": "lossless=1"}, bits=(8, 10, 12)
    ),
    "av1": Encoder("libsvtav1", "crf", 25, 63, ("preset", "8"), None, chroma=("420",)),
    "vp9": Encoder("libvpx-vp9", "crf", 24, 63, ("cpu-used", "4"), {"lossless": "1"}, bits=(8,)),
    "ffv1": Encoder("ffv1", None, 0, 0, ("level", "3"), {}, bits=(8, 10, 12, 16)),
    "prores": Encoder("prores_ks", None, 0, 0, ("profile", "hq"), None, chroma=("422", "444"), bits=(10,)),
    "raw": Encoder("wrapped_avframe", None, 0, 0, ("", ""), {}, bits=(8, 10, 12)),
}


@dataclass(frozen=True)
class Encoding:
    """How the video stream will be written."""

    codec: str
    library: str
    pixel_format: str
    color: ColorTags
    siting: str | None  # of subsampled chroma
    options: dict[str, str]


def container_of(suffix: str) -> Container:
    """Return the container for a file ending; InputError names those that exist."""
    try:
        return CONTAINERS[suffix.lower()]
    except KeyError:
        known = " ".join(CONTAINERS)
        raise InputError(f"can't write {suffix or 'a file without an ending'}; use one of {known}") from None


def choose_encoding(
    info: VideoInfo,
    container: Container,
    size: tuple[int, int],
    *,
    codec: str | None = None,
    quality: int | str | None = None,
    preset: str | None = None,
) -> Encoding:
    """Return the encoding for frames of `size` (height, width) from a source, or InputError if impossible.

    8-bit sources become H.264 4:2:0, deeper ones HEVC of 10 bits; 4:4:4 where the source is or a side is odd.
    `quality` is the encoder's constant-quality number (0 best) or "lossless".
    """
    name = codec or (container.deep_codec if info.deep else container.codecs[0])
    name = {"h265": "hevc", "x264": "h264", "x265": "hevc", "avc": "h264"}.get(name, name)
    if name not in ENCODERS or name not in container.codecs:
        raise InputError(
            f"codec {name} does not go into {container.suffix}; use {', '.join(container.codecs)}"
        )
    encoder = ENCODERS[name]
    if encoder.library not in av.codecs_available:
        raise InputError(f"this installation of PyAV has no {encoder.library} encoder; choose another codec")
    pixel_format = encoder.pixel_format(_chroma(info, size, encoder, name), _bits(info))
    options = _options(encoder, name, quality, preset)
    color = info.color_used.for_yuv()
    siting = _siting(info, pixel_format, name)
    if siting is not None:
        options["chroma_sample_location"] = siting
    if name == "hevc":
        options["x265-params"] = ":".join(_x265_parameters(options, info.hdr_metadata))
    if name == "prores" and "444" in pixel_format:
        options["profile"] = "4444"
    return Encoding(name, encoder.library, pixel_format, color, siting, options)


def _siting(info: VideoInfo, pixel_format: str, name: str) -> str | None:
    """Return where chroma goes: as in the source; what can't be tagged goes where players take it to be."""
    if "444" in pixel_format:
        return None
    taggable = ("left", "topleft") if name == "av1" else ("left", "center", "topleft", "top")
    return info.siting if "420" in pixel_format and info.siting in taggable else "left"


def _bits(info: VideoInfo) -> int:
    if not info.deep:
        return 8
    # 12 bits are kept for 12-bit video; deeper picture files would only gain files that few can play.
    return 12 if info.bit_depth == 12 else 10


def _chroma(info: VideoInfo, size: tuple[int, int], encoder: Encoder, name: str) -> str:
    height, width = size
    fitting = {"422": "422", "444": "444"}.get(info.chroma, "420")
    if (fitting == "420" and height % 2) or (fitting != "444" and width % 2):
        fitting = "444"
    better = [c for c in encoder.chroma if c >= fitting]
    if not better:
        if height % 2 or width % 2:
            raise InputError(
                f"{width}x{height} has an odd side, which {name} can't hold; choose h264 or hevc"
            )
        return encoder.chroma[-1]
    return better[0]


def _options(encoder: Encoder, name: str, quality: int | str | None, preset: str | None) -> dict[str, str]:
    options: dict[str, str] = {}
    option, default = encoder.presets
    if option:
        options[option] = preset or default
    if quality == LOSSLESS:
        if encoder.lossless is None:
            raise InputError(f"{name} has no lossless mode here; use h264, hevc, vp9 or ffv1")
        return options | encoder.lossless
    if encoder.quality_option is None:
        if quality is not None:
            raise InputError(f"{name} takes no quality number")
        return options
    value = encoder.default_quality if quality is None else quality
    try:
        number = int(value)
    except ValueError:
        number = -1
    if not 0 <= number <= encoder.worst_quality:
        raise InputError(
            f"quality for {name} is a number from 0 (best) to {encoder.worst_quality} or 'lossless', "
            f"not {value!r}"
        )
    options[encoder.quality_option] = str(number)
    if name == "vp9":
        options |= {"b": "0", "row-mt": "1"}
    return options


def _x265_parameters(options: dict[str, str], hdr: HdrMetadata | None) -> list[str]:
    parameters = ["log-level=error"]
    if "x265-params" in options:
        parameters.append(options["x265-params"])
    if hdr is not None:
        parameters += ["hdr10=1", "repeat-headers=1", *hdr.x265_parameters()]
    return parameters


def output_sample_aspect(info: VideoInfo, size: tuple[int, int], *, forced: bool) -> Fraction:
    """Return the pixel aspect of the output: the source's, or for a forced size what keeps the display shape.

    A forced size that matches the source's shape within a pixel keeps the source's pixel aspect.
    """
    height, width = info.size
    if not forced or abs(size[1] * height - size[0] * width) < max(height, width):
        return info.sample_aspect
    return (info.sample_aspect * Fraction(size[0] * width, size[1] * height)).limit_denominator(32767)
