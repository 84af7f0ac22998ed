"""Everything beside the picture: sound, subtitles, attachments, chapters and metadata, copied as it is."""

from __future__ import annotations

import io
from collections import deque
from fractions import Fraction
from typing import Any

import av
import av.error
from av.container import InputContainer, OutputContainer
from av.packet import Packet
from av.stream import Stream

from recavsr.video.formats import Container
from recavsr.video.info import StreamInfo, VideoInfo

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


def split_streams(
    info: VideoInfo, source: InputContainer, container: Container
) -> tuple[list[int], list[str]]:
    """Return the indices of the streams that can be copied, and one line for each that can't."""
    copied, lost = [], []
    for stream in info.streams:
        if stream.kind in ("audio", "subtitle", "attachment") and can_hold(
            container, source.streams[stream.index]
        ):
            copied.append(stream.index)
        else:
            lost.append(_why_lost(stream, container))
    return copied, lost


def _why_lost(stream: StreamInfo, container: Container) -> str:
    if stream.kind in ("audio", "subtitle", "attachment"):
        hint = "" if container.suffix == ".mkv" else "; .mkv can"
        return f"{container.suffix} can't hold {stream}, it is left out{hint}"
    if stream.kind == "video" and not stream.cover_art:
        return f"{stream} is left out: one video stream is upscaled"
    return f"{stream} is left out"


def _add_copy(output: OutputContainer, template: Stream) -> Stream:
    copy = output.add_stream_from_template(template, opaque=True)
    copy.metadata.update(kept_tags(dict(template.metadata)))
    copy.disposition = template.disposition
    return copy


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
    """Copies packets of the other streams into the output, in step with the picture."""

    def __init__(self, output: OutputContainer) -> None:
        self._output = output
        self._copies: dict[int, Stream] = {}
        self._waiting: deque[tuple[Fraction, Packet]] = deque()

    def add(self, template: Stream) -> None:
        """Create the copy of a stream (before the first packet)."""
        self._copies[template.index] = _add_copy(self._output, template)

    def take(self, packet: Packet, shift: Fraction) -> None:
        """Keep a packet until the picture reaches its time; packets of streams left out are dropped."""
        copy = self._copies.get(packet.stream_index)
        if copy is None:
            return
        start = packet.pts if packet.pts is not None else packet.dts
        time = Fraction(0) if start is None else start * packet.time_base + shift
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
