"""Everything beside the picture: sound, subtitles, attachments, chapters and metadata.

Streams are copied as they are. Text subtitles that the output can't hold are converted, and all else that it
can't hold is named.
"""

from __future__ import annotations

import io
import re
from collections import Counter, deque
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, cast

import av
import av.error
from av.audio.codeccontext import AudioCodecContext
from av.container import InputContainer, OutputContainer
from av.packet import Packet
from av.stream import Stream
from av.subtitles.stream import SubtitleStream

from recavsr.video.formats import CONTAINERS, Container
from recavsr.video.info import StreamInfo, VideoInfo

_PICTURE_TYPES = {"mjpeg": ("cover.jpg", "image/jpeg"), "png": ("cover.png", "image/png")}
_USUAL_LAYOUTS = {1: "mono", 2: "stereo", 3: "2.1", 4: "4.0", 5: "5.0", 6: "5.1", 7: "6.1", 8: "7.1"}
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
    """Say whether the format takes a copy of this stream, by writing an empty file into memory."""
    try:
        with av.open(io.BytesIO(), "w", format=container.muxer) as trial:
            _add_copy(trial, template)
            trial.start_encoding()
            trial.close()
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
        elif not _lives_on(stream, template, info, container):
            lost.append(_why_lost(stream, template, container))
    return StreamPlan(tuple(copied), tuple(converted), tuple(attached), tuple(lost))


def _lives_on(stream: StreamInfo, template: Stream, info: VideoInfo, container: Container) -> bool:
    """Say whether a data track is written anew: MP4 has its chapters in one, its timecode in another."""
    if stream.kind != "data":
        return False
    if "timecode" not in template.metadata:
        in_mp4 = "mp4" in info.container and container.chapters
        return in_mp4 and 0 < len(info.chapters) == getattr(template, "frames", 0)
    # Of drop-frame timecode its muxer makes a track at these rates alone.
    dropping = ";" in template.metadata["timecode"] and container.muxer in ("mp4", "mov")
    return container.times and (not dropping or info.rate in (Fraction(30000, 1001), Fraction(60000, 1001)))


def _why_lost(stream: StreamInfo, template: Stream, container: Container) -> str:
    if stream.kind in ("audio", "subtitle", "attachment") or stream.cover_art:
        matroska = CONTAINERS[".mkv"]
        attachable = stream.cover_art and stream.codec in _PICTURE_TYPES
        elsewhere = container != matroska and (attachable or can_hold(matroska, template))
        hint = "; .mkv can" if elsewhere else ""
        return f"{container.suffix} can't hold {stream}, it is left out{hint}"
    if stream.kind == "video":
        return f"{stream} is left out: one video stream is upscaled"
    return f"{stream} is left out"


def _add_copy(output: OutputContainer, template: Stream) -> Stream:
    copy = output.add_stream_from_template(template, opaque=True)
    context = copy.codec_context
    if isinstance(context, AudioCodecContext) and context.layout.name == f"{context.channels} channels":
        # Not every format can say how many there are without saying where they stand.
        context.layout = _USUAL_LAYOUTS.get(context.channels, context.layout)
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


def later_timecode(tags: dict[str, str], frames: int, rate: Fraction) -> dict[str, str]:
    """Return tags whose `timecode` (HH:MM:SS:FF, or ;FF with dropped numbers) is some frames later."""
    found = re.fullmatch(r"(\d+):(\d+):(\d+)([:;.])(\d+)", tags.get("timecode", ""))
    if found is None or frames < 1:
        return tags
    each = round(rate)
    dropped = each // 15 if found[4] != ":" else 0  # numbers a minute, but for every tenth
    minutes = 60 * int(found[1]) + int(found[2])
    number = (60 * minutes + int(found[3])) * each + int(found[5]) - dropped * (minutes - minutes // 10)
    number = (number + frames) % (24 * 6 * (600 * each - 9 * dropped))
    tens, rest = divmod(number, 600 * each - 9 * dropped)
    number += dropped * (9 * tens + max(0, rest - dropped) // (60 * each - dropped)) if dropped else 0
    seconds, frame = divmod(number, each)
    hours, minutes = seconds // 3600, seconds // 60 % 60
    return tags | {"timecode": f"{hours:02d}:{minutes:02d}:{seconds % 60:02d}{found[4]}{frame:02d}"}


class StreamCopier:
    """Copies, or converts, the packets of the other streams into the output, in step with the picture."""

    def __init__(self, output: OutputContainer) -> None:
        self._output = output
        self._copies: dict[int, Stream] = {}
        self._converters: dict[int, _Subtitles] = {}
        self._waiting: deque[tuple[Fraction, Packet]] = deque()
        self._last: dict[int, int] = {}  # decoding time of each stream's last packet, in its own units
        self._moved: Counter[str] = Counter()
        self._damaged: Counter[str] = Counter()

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
                self._mux(packet)
            else:
                later.append((time, packet))
        self._waiting = later

    def _mux(self, packet: Packet) -> None:
        """Write a packet. Times that do not rise are moved; what the format can't take is left out."""
        stream = packet.stream
        name = f"{stream.type} {stream.index}"
        if packet.dts is not None:
            packet.pts = packet.dts if packet.pts is None else packet.pts
            dts = round(packet.dts * packet.time_base / stream.time_base)
            last = self._last.get(stream.index)
            if last is not None and dts <= last and stream.type == "audio":
                packet.pts = max(round(packet.pts * packet.time_base / stream.time_base), last + 1)
                packet.dts, packet.time_base = last + 1, stream.time_base
                if dts < last:
                    self._moved[name] += 1
                dts = last + 1
            self._last[stream.index] = dts
        try:
            self._output.mux(packet)
        except av.error.InvalidDataError:
            self._damaged[name] += 1

    def warnings(self) -> list[str]:
        """Return a line for each stream with packets that were moved or left out."""
        moved = [f"{count} packets of {name} had times out of order" for name, count in self._moved.items()]
        damaged = [f"{count} damaged packets of {name} are left out" for name, count in self._damaged.items()]
        return [*moved, *damaged]

    def drop_rest(self) -> None:
        """Forget the packets that come after the end of a trimmed picture."""
        self._waiting.clear()
