"""VideoInfo: a video's size, orientation, colour, timing and everything else that is in the file."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import av
from av.container import InputContainer
from av.stream import Stream
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from recavsr.errors import InputError
from recavsr.video.color import ColorTags, HdrMetadata, hdr_metadata_of, tags_of
from recavsr.video.frames import Orientation, alpha_of, has_alpha, is_opaque, orientation_of, side_data_of
from recavsr.video.siting import tagged_siting
from recavsr.video.source import CountedInput, Source, SourceKind
from recavsr.video.stream_header import dolby_vision

DEFAULT_RATE = Fraction(25)  # for picture sequences and streams that name no rate


@dataclass(frozen=True)
class StreamInfo:
    """A stream of the source other than the chosen video."""

    index: int
    kind: str  # audio, subtitle, data, attachment, video
    codec: str
    language: str | None
    title: str | None
    cover_art: bool
    bit_rate: int | None = None  # bits a second, where the file says

    def __str__(self) -> str:
        words = [self.kind if not self.cover_art else "cover picture", str(self.index), f"({self.codec}"]
        if self.language and self.language != "und":
            words[-1] += f", {self.language}"
        words[-1] += ")"
        return " ".join(words)


@dataclass(frozen=True)
class VideoInfo:
    """Everything known about a source before decoding it in full. Sizes are (height, width) pixels."""

    source: str
    kind: SourceKind
    container: str
    codec: str
    stream_index: int
    coded_size: tuple[int, int]
    size: tuple[int, int]  # upright: after the display rotation
    orientation: Orientation
    sample_aspect: Fraction  # width / height of a pixel, upright
    pixel_format: str
    bit_depth: int
    chroma: str  # "420", "422", "444", "rgb" or "gray"; other subsamplings count as the next finer one
    siting: str | None  # of subsampled chroma: left, center, topleft, top; as tagged, else by convention
    alpha: bool
    transparent: bool  # is the first frame
    color: ColorTags  # as tagged
    hdr_metadata: HdrMetadata | None
    interlaced: bool
    time_base: Fraction
    rate: Fraction
    frame_count: int | None  # an estimate where the container does not count
    start_time: Fraction  # of the chosen stream, seconds
    origin: Fraction  # earliest time of any stream, seconds: the zero of --start
    duration: Fraction | None  # seconds
    streams: tuple[StreamInfo, ...]
    chapters: tuple[dict[str, Any], ...]
    metadata: dict[str, str]
    video_metadata: dict[str, str]
    warnings: tuple[str, ...]

    @property
    def color_used(self) -> ColorTags:
        """Return the tags with the stand-ins for what is untagged."""
        height, width = self.coded_size
        return self.color.resolved(width, height, rgb=self.chroma == "rgb")

    @property
    def deep(self) -> bool:
        """Return whether frames are uint16 (sources of more than 8 bits)."""
        return self.bit_depth > 8

    @property
    def still(self) -> bool:
        """Return whether the source is a single picture."""
        return self.kind is SourceKind.STILL


def choose_stream(container: InputContainer, source: Source) -> VideoStream:
    """Return the video stream to work on: the default one, else the largest; never cover art."""
    moving = [s for s in container.streams.video if not _is_cover_art(s)]
    if not moving:
        if container.streams.audio:
            cover = " and a cover picture" if container.streams.video else ""
            raise InputError(f"{source.name}: audio only{cover}, there is no video in it")
        raise InputError(f"{source.name}: there is no video in it")
    usable = [s for s in moving if s.codec_context is not None]
    if not usable:
        raise InputError(f"{source.name}: no decoder for its video ({moving[0].codec.name})")

    def preference(stream: VideoStream) -> tuple[bool, int]:
        context = stream.codec_context
        return bool(stream.disposition & av.stream.Disposition.default), context.width * context.height

    return max(usable, key=preference)


def describe(source: Source, container: InputContainer, stream: VideoStream, frame: VideoFrame) -> VideoInfo:
    """Return the VideoInfo of an opened container, its chosen stream and its first decoded frame."""
    warnings: list[str] = []
    orientation = orientation_of(frame)
    if orientation is None:
        warnings.append("the display rotation is not a multiple of 90 degrees and is ignored")
        orientation = Orientation()
    sample_aspect = stream.sample_aspect_ratio or Fraction(1)
    coded = (frame.height, frame.width)
    rate = _rate_of(stream)
    color = tags_of(frame, stream.codec_context)
    hdr = color.hdr
    if hdr:
        warnings.append(
            f"HDR ({hdr}) is upscaled as it is coded, by a model that was trained on SDR; "
            "--color-fix wavelet holds its colours"
        )
    dolby = dolby_vision(stream)
    if dolby is not None and dolby.shown_by_dolby_alone:
        raise InputError(
            f"{source.name}: Dolby Vision profile {dolby.profile} has no picture that can be shown without "
            "Dolby's metadata; convert it to HDR10 or SDR first, e.g. with ffmpeg's libplacebo filter"
        )
    if dolby is not None or any(kind.startswith(("DOVI", "DYNAMIC_HDR")) for kind, _ in side_data_of(frame)):
        warnings.append("dynamic HDR metadata (Dolby Vision, HDR10+) is not kept")
    kinds = {kind for kind, _ in side_data_of(frame)}
    if "A53_CC" in kinds:
        warnings.append("closed captions inside the pictures (CEA-608, CEA-708) are not kept")
    if "ICC_PROFILE" in kinds:
        warnings.append("the ICC colour profile is not kept: the colours are taken as untagged")
    origin = Fraction(container.start_time or 0, av.time_base)
    time_base = stream.time_base or 1 / rate
    start = origin if stream.start_time is None else stream.start_time * time_base
    duration = _duration_of(container, stream)
    chroma, picture = _chroma_of(frame), source.kind is SourceKind.STILL
    return VideoInfo(
        source=source.name,
        kind=source.kind,
        container=container.format.name,
        codec=stream.codec_context.codec.name,
        stream_index=stream.index,
        coded_size=coded,
        size=(coded[1], coded[0]) if orientation.swaps_sides else coded,
        orientation=orientation,
        sample_aspect=1 / sample_aspect if orientation.swaps_sides else sample_aspect,
        pixel_format=frame.format.name,
        bit_depth=bit_depth_of(frame, source),
        chroma=chroma,
        siting=_siting_of(container, stream, chroma, full_range=color.full_range or picture),
        alpha=has_alpha(frame),
        transparent=has_alpha(frame) and not is_opaque(alpha_of(frame, deep=False)),
        color=color,
        hdr_metadata=hdr_metadata_of(frame) if hdr else None,
        interlaced=frame.interlaced_frame,
        time_base=time_base,
        rate=rate,
        frame_count=_frame_count(source, stream, duration, rate),
        start_time=start,
        origin=min(origin, start),
        duration=duration,
        streams=tuple(_stream_info(s) for s in container.streams if s.index != stream.index),
        chapters=tuple(dict(chapter) for chapter in container.chapters()),
        metadata=dict(container.metadata),
        video_metadata=dict(stream.metadata),
        warnings=tuple(warnings),
    )


def bit_depth_of(frame: VideoFrame, source: Source) -> int:
    """Return the bits per colour component; floating-point pictures are refused."""
    bits = max((part.bits for part in frame.format.components), default=8)
    if bits > 16 or frame.format.name.startswith(("xyz", "bayer")):
        raise InputError(f"{source.name}: pixels of the kind {frame.format.name} are not supported")
    return 8 if frame.format.has_palette else bits


def _is_cover_art(stream: VideoStream) -> bool:
    pictures = av.stream.Disposition.attached_pic | av.stream.Disposition.timed_thumbnails
    return bool(stream.disposition & pictures)


def _chroma_of(frame: VideoFrame) -> str:
    pixel_format = frame.format
    if pixel_format.is_rgb or pixel_format.has_palette:
        return "rgb"
    if sum(not part.is_alpha for part in pixel_format.components) < 3:
        return "gray"
    # A half-size chroma plane of an odd side is rounded up, so compare with a side of 16.
    halves = (pixel_format.chroma_width(16) < 16, pixel_format.chroma_height(16) < 16)
    return {(True, True): "420", (True, False): "422"}.get(halves, "444")


def _siting_of(
    container: InputContainer, stream: VideoStream, chroma: str, *, full_range: bool
) -> str | None:
    if chroma not in ("420", "422"):
        return None
    file = container.file.file if container.file is not None else None
    header = file.header if isinstance(file, CountedInput) else ""
    usual = "center" if full_range and chroma == "420" else "left"
    return tagged_siting(stream, header) or usual


def _rate_of(stream: VideoStream) -> Fraction:
    average, guessed = stream.average_rate, stream.guessed_rate
    if average and stream.time_base and guessed and guessed < average == 1 / stream.time_base:
        average = guessed  # of DV libav takes the clock's ticks for frames
    for rate in (average, guessed, stream.base_rate):
        if rate and rate > 0:
            return Fraction(rate)
    return DEFAULT_RATE


def _duration_of(container: InputContainer, stream: VideoStream) -> Fraction | None:
    if stream.duration and stream.time_base:
        return stream.duration * stream.time_base
    # Matroska says in a tag at what time a stream ends.
    tag = re.fullmatch(r"(\d+):(\d+):(\d+(?:\.\d+)?)", stream.metadata.get("DURATION", ""))
    if tag:
        end = int(tag[1]) * 3600 + int(tag[2]) * 60 + Fraction(tag[3])
        begin = (stream.start_time or 0) * (stream.time_base or 0)
        return end - max(begin, Fraction(0)) or None
    if container.duration and container.duration > 0:
        return Fraction(container.duration, av.time_base)
    return None


def _frame_count(
    source: Source, stream: VideoStream, duration: Fraction | None, rate: Fraction
) -> int | None:
    if source.kind is SourceKind.STILL:
        return 1
    if stream.frames > 0:
        return stream.frames
    return math.floor(duration * rate + Fraction(1, 2)) if duration and rate else None


def _stream_info(stream: Stream) -> StreamInfo:
    context = stream.codec_context
    return StreamInfo(
        index=stream.index,
        kind=stream.type or "unknown",
        codec=context.codec.name if context is not None else "unknown",
        language=stream.metadata.get("language"),
        title=stream.metadata.get("title") or stream.metadata.get("filename"),
        cover_art=isinstance(stream, VideoStream) and _is_cover_art(stream),
        bit_rate=getattr(context, "bit_rate", None) or None,
    )
