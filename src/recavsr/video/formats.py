"""Output containers and codecs: what each can hold, and the encoder settings that follow from the source."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction

import av

from recavsr.errors import InputError
from recavsr.video.color import ColorTags
from recavsr.video.encoders import (
    DEFAULT_QUALITY,
    HARDWARE,
    LOSSLESS,
    SOFTWARE,
    Encoder,
    opens,
    with_hdr_metadata,
)
from recavsr.video.info import VideoInfo

_SMALL = 64  # pixels; encoders have limits below


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
class Encoding:
    """How the video stream will be written."""

    codec: str
    library: str
    pixel_format: str
    color: ColorTags
    siting: str | None  # of subsampled chroma
    quality: str  # in words
    options: dict[str, str]
    hdr_metadata: bool  # is written
    changes: tuple[str, ...]  # what the pixels lose or gain on the way
    warnings: tuple[str, ...]


def container_of(suffix: str, *, also: Iterable[str] = ()) -> Container:
    """Return the container for a file ending; InputError names those that exist, and those the caller has."""
    try:
        return CONTAINERS[suffix.lower()]
    except KeyError:
        known = " ".join([*CONTAINERS, *also])
        raise InputError(f"can't write {suffix or 'a file without an ending'}; use one of {known}") from None


def choose_encoding(
    info: VideoInfo,
    container: Container,
    size: tuple[int, int],
    *,
    codec: str | None = None,
    quality: int | str | None = None,
    preset: str | None = None,
    hardware: bool = False,
) -> Encoding:
    """Return the encoding for frames of `size` (height, width) from a source, or InputError if impossible.

    8-bit sources become H.264 4:2:0, deeper ones HEVC of 10 bits; 4:4:4 where the source is or a side is odd.
    `codec` is a codec or one encoder (h264_nvenc); `quality` is a number from 0 (best) to 51, the same for
    every codec, or "lossless". With `hardware` an encoder of a graphics card is taken if one opens here.
    """
    name = codec or (container.deep_codec if info.deep else container.codecs[0])
    name = {"h265": "hevc", "x264": "h264", "x265": "hevc", "avc": "h264"}.get(name, name)
    named = next((encoder for encoder in HARDWARE if encoder.library == name), None)
    name = named.codec if named is not None else name
    if name not in SOFTWARE or name not in container.codecs:
        raise InputError(
            f"codec {codec or name} does not go into {container.suffix}; use {', '.join(container.codecs)}"
        )
    if named is not None:
        encoding = _encoding(info, size, named, quality, preset)
        if not opens(named, encoding.pixel_format, size, encoding.options):
            raise InputError(f"{named.library} can't be opened on this machine for this video; use {name}")
        return encoding
    warnings = []
    if hardware:
        for encoder in HARDWARE:
            if encoder.codec == name and quality != LOSSLESS and _fits(info, size, encoder):
                encoding = _encoding(info, size, encoder, quality, preset)
                if opens(encoder, encoding.pixel_format, size, encoding.options):
                    return encoding
        warnings.append(f"no graphics card here encodes this {name}: {SOFTWARE[name].library} does it")
    encoder = SOFTWARE[name]
    if encoder.library not in av.codecs_available:
        raise InputError(f"this installation of PyAV has no {encoder.library} encoder; choose another codec")
    if preset is not None and encoder.presets and preset not in encoder.presets:
        raise InputError(f"{encoder.library} has no preset {preset!r}; it has {', '.join(encoder.presets)}")
    encoding = _encoding(info, size, encoder, quality, preset)
    if (
        min(size) < _SMALL
        and name != "raw"
        and not opens(encoder, encoding.pixel_format, size, encoding.options)
    ):
        raise InputError(f"{encoder.library} can't encode {size[1]}x{size[0]}; choose h264, or a larger size")
    if preset is not None and not opens(encoder, encoding.pixel_format, size, encoding.options):
        raise InputError(f"{encoder.library} has no preset {preset!r}")
    return replace(encoding, warnings=(*warnings, *encoding.warnings))


def _fits(info: VideoInfo, size: tuple[int, int], encoder: Encoder) -> bool:
    """Say whether an encoder takes as much as the software encoder would."""
    wanted = SOFTWARE[encoder.codec].holds(*_wanted(info, size, encoder.codec))
    return encoder.holds(*wanted) == wanted


def _wanted(info: VideoInfo, size: tuple[int, int], codec: str) -> tuple[str, int]:
    """Return the chroma and bits that keep what the source has, as far as it makes sense in a codec."""
    height, width = size
    if codec == "ffv1":
        return ("rgb" if info.chroma == "rgb" else _chroma(info, height, width)), info.bit_depth
    # 12 bits are kept for 12-bit video; deeper picture files would only gain files that few can play.
    bits = 8 if not info.deep else 12 if info.bit_depth == 12 else 10
    return _chroma(info, height, width), bits


def _chroma(info: VideoInfo, height: int, width: int) -> str:
    fitting = {"422": "422", "444": "444"}.get(info.chroma, "420")
    return "444" if (width % 2 and fitting != "444") or (height % 2 and fitting == "420") else fitting


def _encoding(
    info: VideoInfo,
    size: tuple[int, int],
    encoder: Encoder,
    quality: int | str | None,
    preset: str | None,
) -> Encoding:
    height, width = size
    wanted, wanted_bits = _wanted(info, size, encoder.codec)
    # Only where RGB is kept as it is are there formats for it.
    chroma, bits = (
        (wanted, wanted_bits)
        if (wanted, wanted_bits) in encoder.formats
        else (encoder.holds("444" if wanted == "rgb" else wanted, wanted_bits))
    )
    if (width % 2 and chroma in ("420", "422")) or (height % 2 and chroma == "420"):
        raise InputError(
            f"{width}x{height} has an odd side, which {encoder.codec} can't hold; choose h264, hevc or vp9"
        )
    pixel_format = encoder.pixel_format(chroma, bits)
    options = encoder.settings(quality, preset)
    if encoder.profiles and chroma == "444":
        options["profile"] = "4444"
    color = info.color_used if chroma == "rgb" else info.color_used.for_yuv()
    siting = _siting(info, chroma, encoder.codec)
    if siting is not None:
        options["chroma_sample_location"] = siting
    warnings = []
    if info.hdr_metadata is not None:
        with_metadata = with_hdr_metadata(encoder, options, info.hdr_metadata)
        if with_metadata is None:
            warnings.append(f"{encoder.library} can't write the HDR mastering metadata, it is left out")
        options = with_metadata or options
    return Encoding(
        codec=encoder.codec,
        library=encoder.library,
        pixel_format=pixel_format,
        color=color,
        siting=siting,
        quality=_quality_in_words(encoder, options, quality),
        options=options,
        hdr_metadata=info.hdr_metadata is not None and not warnings,
        changes=tuple(_changes(info, chroma, bits)),
        warnings=tuple(warnings),
    )


def _siting(info: VideoInfo, chroma: str, codec: str) -> str | None:
    """Return where chroma goes: as in the source; what can't be tagged goes where players take it to be."""
    if chroma not in ("420", "422"):
        return None
    taggable = ("left", "topleft") if codec == "av1" else ("left", "center", "topleft", "top")
    return info.siting if chroma == "420" and info.siting in taggable else "left"


def _quality_in_words(encoder: Encoder, options: dict[str, str], quality: int | str | None) -> str:
    if quality == LOSSLESS or not (encoder.numbers or encoder.profiles):
        return LOSSLESS
    option = "profile" if encoder.profiles else encoder.option
    level = DEFAULT_QUALITY if quality is None else quality
    return (
        f"quality {level} ({option} {options[option]})" if encoder.numbers else f"profile {options[option]}"
    )


def _changes(info: VideoInfo, chroma: str, bits: int) -> list[str]:
    changes = []
    if bits < info.bit_depth:
        changes.append(f"{info.bit_depth} bits become {bits}")
    if info.chroma == "rgb" and chroma != "rgb":
        changes.append(f"RGB becomes Y'CbCr {chroma[0]}:{chroma[1]}:{chroma[2]}, BT.709")
    elif info.chroma in ("420", "422", "444") and chroma != info.chroma:
        changes.append(f"chroma {':'.join(info.chroma)} becomes {':'.join(chroma)}")
    return changes


def output_sample_aspect(info: VideoInfo, size: tuple[int, int], *, forced: bool) -> Fraction:
    """Return the pixel aspect of the output: the source's, or for a forced size what keeps the display shape.

    A forced size that matches the source's shape within a pixel keeps the source's pixel aspect.
    """
    height, width = info.size
    if not forced or abs(size[1] * height - size[0] * width) < max(height, width):
        return info.sample_aspect
    return (info.sample_aspect * Fraction(size[0] * width, size[1] * height)).limit_denominator(32767)
