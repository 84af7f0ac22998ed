"""Everything beside the picture: sound, subtitles, attachments, chapters and metadata.

Streams are copied as they are. Text subtitles that the output can't hold are converted, and all else that it
can't hold is named.
"""

from __future__ import annotations

import io
from collections import deque
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, cast

import av
import av.error
from av.container import InputContainer, OutputContainer
from av.packet import Packet
from av.stream import Stream
from av.subtitles.stream import SubtitleStream

from recavsr.video.formats import Container
from recavsr.video.info import StreamInfo, VideoInfo

_PICTURE_TYPES = {"mjpeg": ("cover.jpg", "image/jpeg"), "png": ("cover.png", "image/png")}
_TEXT_SUBTITLES = frozenset({"ass", "mov_text", "srt", "ssa", "subrip", "text", "webvtt"})

# Written by the muxer or true of the old file only.
_STALE_TAGS = frozenset(
    {
        "encoder",
        "major_brand",
        "minor_version",
        "compatible_brands",
        "duration",
        "rotate",
        "number_of_frames",
        "number_of_bytes",
        "bps",
        "_statistics_writing_app",
        "_statistics_writing_date_utc",
        "_statistics_tags",
        "source_id",
        "vendor_id",
    }
)


def kept_tags(tags: dict[str, str]) -> dict[str, str]:
    """Return the metadata that stays true in the new file (MKV writes keys like BPS-eng too)."""
    return {key: value for key, value in tags.items() if key.lower().split("-")[0] not in _STALE_TAGS}


def can_hold(container: Container, template: Stream) -> bool:
    """Say whether the format takes a copy of this stream, by writing a header into memory."""
    try:
        with av.open(io.BytesIO(), "w", format=container.muxer) as trial:
            _add_copy(trial, template)
            trial.start_encoding()
    except (av.error.FFmpegError, ValueError, TypeError):
        return False
    return True


@dataclass(frozen=True)
class StreamPlan:
    """What becomes of the other streams: their indices, and a line for each that is left out."""

    copied: tuple[int, ...]
    converted: tuple[int, ...]
    attached: tuple[int, ...]  # cover pictures that become attachments
    lost: tuple[str, ...]


def plan_streams(info: VideoInfo, source: InputContainer, container: Container) -> StreamPlan:
    """Decide for every stream beside the picture."""
    copied, converted, attached, lost = [], [], [], []
    for stream in info.streams:
        template = source.streams[stream.index]
        wanted = stream.kind in ("audio", "subtitle", "attachment") or stream.cover_art
        if stream.cover_art and container.muxer == "matroska" and stream.codec in _PICTURE_TYPES:
            attached.append(stream.index)
        elif wanted and can_hold(container, template):
            copied.append(stream.index)
        elif container.subtitles and stream.kind == "subtitle" and stream.codec in _TEXT_SUBTITLES:
            converted.append(stream.index)
        else:
            lost.append(_why_lost(stream, container))
    return StreamPlan(tuple(copied), tuple(converted), tuple(attached), tuple(lost))


def _why_lost(stream: StreamInfo, container: Container) -> str:
    if stream.kind in ("audio", "subtitle", "attachment") or stream.cover_art:
        hint = "" if container.suffix == ".mkv" else "; .mkv can"
        return f"{container.suffix} can't hold {stream}, it is left out{hint}"
    if stream.kind == "video":
        return f"{stream} is left out: one video stream is upscaled"
    return f"{stream} is left out"


def _add_copy(output: OutputContainer, template: Stream) -> Stream:
    copy = output.add_stream_from_template(template, opaque=True)
    copy.metadata.update(kept_tags(dict(template.metadata)))
    copy.disposition = template.disposition
    return copy


class _Subtitles:
    """Converts text subtitles, packet by packet, through the form that all their codecs share (ASS)."""

    def __init__(self, output: OutputContainer, template: SubtitleStream, codec: str) -> None:
        self._decoder = template.codec_context
        self._decoder.open(strict=False)  # it makes the header that the encoder needs
        self.stream = cast(SubtitleStream, output.add_stream(codec, time_base=Fraction(1, 1000)))
        self._encoder = self.stream.codec_context
        self._encoder.time_base = Fraction(1, 1000)
        self._encoder.subtitle_header = self._decoder.subtitle_header
        self.stream.metadata.update(kept_tags(dict(template.metadata)))
        self.stream.disposition = template.disposition

    def __call__(self, packet: Packet) -> Packet | None:
        """Return the packet in the output's form, at the same time; None if it shows nothing."""
        shown = self._decoder.decode2(packet)
        if shown is None or not len(shown):
            return None
        text = self._encoder.encode_subtitle(shown)
        text.pts, text.dts, text.duration = packet.pts, packet.pts, packet.duration
        text.time_base, text.stream = packet.time_base, self.stream
        return text


def shifted_chapters(
    chapters: tuple[dict[str, Any], ...], shift: Fraction, end: Fraction | None
) -> list[dict[str, Any]]:
    """Return the chapters moved by `shift` seconds, cut to 0 .. end; those outside are dropped."""
    moved = []
    for chapter in chapters:
        base = chapter["time_base"] or Fraction(1)
        first, last = chapter["start"] * base + shift, chapter["end"] * base + shift
        if end is not None:
            last = min(last, end)
        if last <= max(first, 0):
            continue
        start = max(first, Fraction(0))
        moved.append(chapter | {"start": round(start / base), "end": round(last / base)})
    return moved


class StreamCopier:
    """Copies, or converts, the packets of the other streams into the output, in step with the picture."""

    def __init__(self, output: OutputContainer) -> None:
        self._output = output
        self._copies: dict[int, Stream] = {}
        self._converters: dict[int, _Subtitles] = {}
        self._waiting: deque[tuple[Fraction, Packet]] = deque()

    def add(self, template: Stream) -> None:
        """Create the copy of a stream (before the first packet)."""
        self._copies[template.index] = _add_copy(self._output, template)

    def convert(self, template: Stream, codec: str) -> None:
        """Create the stream that text subtitles become (before the first packet)."""
        self._converters[template.index] = _Subtitles(self._output, cast(SubtitleStream, template), codec)

    def attach(self, template: Stream, packets: list[Packet]) -> bool:
        """Attach a cover picture, whose packet comes before all others; say whether it was there."""
        picture = next((p for p in packets if p.stream_index == template.index), None)
        if picture is None:
            return False
        name, kind = _PICTURE_TYPES[template.codec_context.name]
        self._output.add_attachment(template.metadata.get("filename", name), kind, bytes(picture))
        return True

    def take(self, packet: Packet, shift: Fraction) -> None:
        """Keep a packet until the picture reaches its time; packets of streams left out are dropped."""
        converter = self._converters.get(packet.stream_index)
        copy = converter.stream if converter is not None else self._copies.get(packet.stream_index)
        if copy is None:
            return
        if converter is not None:
            converted = converter(packet)
            if converted is None:
                return
            packet = converted
        start = packet.pts if packet.pts is not None else packet.dts
        time = Fraction(0) if start is None else start * packet.time_base + shift
        if start is None:  # a cover picture
            packet.pts = packet.dts = 0
        if shift:
            ticks = round(shift / packet.time_base)
            packet.pts = None if packet.pts is None else packet.pts + ticks
            packet.dts = None if packet.dts is None else packet.dts + ticks
        packet.stream = copy
        self._waiting.append((time, packet))

    def release(self, until: Fraction | None) -> None:
        """Write the packets that start before `until` seconds (None: all)."""
        later: deque[tuple[Fraction, Packet]] = deque()
        for time, packet in self._waiting:
            if until is None or time < until:
                self._output.mux(packet)
            else:
                later.append((time, packet))
        self._waiting = later

    def drop_rest(self) -> None:
        """Forget the packets that come after the end of a trimmed picture."""
        self._waiting.clear()
