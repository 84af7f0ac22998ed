"""Decoding: frames in presentation order with exact times, and the packets of all other streams.

    with open_reader("in.mp4", Trim(start=10)) as reader:
        for item in reader:        # Frame, Passed, or av.Packet of another stream, in file order
            ...
        reader.cut_short           # None, or why the source ended early

One pass over the file gives both, so that pipes and live sources work, and memory does not grow.
"""

from __future__ import annotations

import heapq
import itertools
import math
import os
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, cast

import av
import av.error
import numpy as np
from av.container import InputContainer
from av.filter import Graph
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from recavsr.errors import InputError
from recavsr.video.color import ColorTags, ToRgb, tags_of
from recavsr.video.frames import Frame, Passed, Stamp, alpha_of, is_opaque
from recavsr.video.info import DEFAULT_RATE, VideoInfo, choose_stream, describe
from recavsr.video.source import CountedInput, Source, SourceKind, open_container, resolve
from recavsr.video.tiff import is_tiff, pages

# A stream may end this much before the container says so: durations are rounded, last packets short.
_END_TOLERANCE = Fraction(1, 2)
# Sound may lie this much later in the file than the picture of the same time.
_INTERLEAVE_SLACK = Fraction(10)
_REORDER_DEPTH = 4  # frames; more than any codec that is kept in AVI reorders
_UNDATED_DEPTH = 2  # frames without a time at the beginning of a source whose other frames have one
_UNDATED_DEPTH_MATROSKA = 64
_BROADCAST = ("mpegts", "mpeg")
_CLOCK_JUMP = Fraction(1, 2)  # seconds back; less is disorder
_INTERLEAVED = 1  # seconds between neighbours in a broadcast, at most
_LEAP_PACKETS = 64  # a leap forward that ends after fewer was damage


@dataclass(frozen=True)
class Trim:
    """Which part to read: seconds from the beginning of the source, seconds long, or a count of frames."""

    start: Fraction | None = None
    duration: Fraction | None = None
    frames: int | None = None

    @classmethod
    def parse(
        cls,
        start: float | str | Fraction | None = None,
        duration: float | str | Fraction | None = None,
        frames: int | None = None,
    ) -> Trim:
        """Build a Trim from seconds or timecodes ("90", "1:30", "0:01:30.5"); InputError if senseless."""
        begin = None if start is None else parse_time(start, "start")
        length = None if duration is None else parse_time(duration, "duration")
        if length is not None and length <= 0:
            raise InputError(f"duration must be more than 0, not {duration}")
        if frames is not None and (not isinstance(frames, int) or frames < 1):
            raise InputError(f"frames must be a whole number of at least 1, not {frames!r}")
        return cls(begin or None, length, frames)

    @property
    def whole(self) -> bool:
        """Return whether nothing is cut away."""
        return self.start is None and self.duration is None and self.frames is None


def parse_time(value: float | str | Fraction, what: str) -> Fraction:
    """Return seconds from a number or a timecode [[HH:]MM:]SS[.fraction]; InputError if it is neither."""
    text = str(value).strip()
    if isinstance(value, Fraction):
        seconds = value
    elif re.fullmatch(r"(\d+:){0,2}\d+(\.\d*)?|\.\d+", text):
        seconds = Fraction(0)
        for number, part in enumerate(text.split(":")):
            if number and Fraction(part) >= 60:
                raise InputError(f"{what}: {part} minutes or seconds in {value!r} are more than 59")
            seconds = seconds * 60 + Fraction(part)
    elif isinstance(value, (int, float)) and math.isfinite(value):
        seconds = Fraction(value)
    else:
        raise InputError(f"{what} must be seconds or a timecode like 1:30.5, not {value!r}")
    if seconds < 0:
        raise InputError(f"{what} must not be negative, got {value}")
    return seconds


class Reader(Protocol):
    """A source being read: `info`, then iteration; the last attributes are final when it ends."""

    source: Source
    info: VideoInfo
    cut_short: str | None
    warnings: list[str]
    shift: Fraction  # seconds by which all times were moved
    end: Fraction | None  # for trimmed sources: other streams end here (shifted seconds)
    passed: int  # so many frames come as `Passed`: set it before the iteration
    keep_alpha: bool  # frames carry their transparency; else it is refused: set it before the iteration

    @property
    def container(self) -> InputContainer | None:
        """Return the opened container, for its streams; picture sequences have none."""

    def __iter__(self) -> Iterator[Frame | Passed | Packet]: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_reader(
    source: str | os.PathLike[str] | Source, trim: Trim | None = None, *, deinterlace: bool = False
) -> Reader:
    """Open a source for reading; raises InputError if nothing in it can be decoded."""
    from recavsr.video.images import SequenceReader

    resolved = source if isinstance(source, Source) else resolve(source)
    if resolved.kind is SourceKind.SEQUENCE:
        return SequenceReader(resolved, trim or Trim())
    return VideoReader(resolved, trim or Trim(), deinterlace=deinterlace)


def transparent(source: str) -> str:
    """Return why a transparent source is refused."""
    return (
        f"{source}: the picture is transparent in places; .png, .tif and .exr pictures can keep that, "
        "or flatten it onto a background first"
    )


class SizeChange(InputError):
    """The picture has another size than the first one."""


class _JoinedClocks:
    """Lets the times of a broadcast go on where they jump back: joined recordings, a sender that restarted.

    Behind such a place everything is moved by one offset, so that sound and picture stay as they are to each
    other. A stream takes the newest offset when its own times jump; what is no picture or sound, at once.
    """

    def __init__(self) -> None:
        self.jumps = 0
        self._offsets = [Fraction(0)]
        self._place: dict[int, int] = {}  # of each stream among the offsets
        self._last: dict[int, Fraction] = {}
        self._ends: dict[int, Fraction] = {}
        self._leaps: dict[int, tuple[Fraction, int]] = {}

    def move(self, packet: Packet) -> None:
        """Move a packet's times, in the order of the file."""
        base, stream = packet.time_base, packet.stream_index
        if packet.dts is None or packet.stream.type not in ("video", "audio"):
            self._shift(packet, self._offsets[self._place.get(stream, -1)])
            return
        time, length = packet.dts * base, (packet.duration or 0) * base
        last = self._last.get(stream)
        place = self._place.get(stream, self.jumps)
        if last is not None and self._is_damaged(stream, time + self._offsets[place]):
            last = None
        elif last is not None and time + self._offsets[place] < last - _CLOCK_JUMP:
            if place == self.jumps:
                self._offsets.append(max(self._ends.values()) - time)
                self.jumps += 1
            elif time + self._offsets[-1] < self._ends[stream]:
                self._offsets[-1] = self._ends[stream] - time
            place = self.jumps
        self._place[stream] = place
        self._shift(packet, self._offsets[place])
        time += self._offsets[place]
        self._last[stream] = time if last is None else max(last, time)
        self._ends[stream] = max(self._ends.get(stream, time) if last is not None else time, time + length)

    def _is_damaged(self, stream: int, time: Fraction) -> bool:
        """Say whether a stream comes back from damaged times: to where it was, or to where others are."""
        back = time < self._last[stream] - _CLOCK_JUMP
        place = self._place[stream]
        others = [
            last for index, last in self._last.items() if index != stream and self._place[index] == place
        ]
        if back and any(abs(time - last) < _INTERLEAVED for last in others):
            return True
        before, left = self._leaps.pop(stream, (Fraction(0), 0))
        if time > self._ends[stream] + _CLOCK_JUMP:
            before, left = self._last[stream], _LEAP_PACKETS
        elif left and back and time >= before - _CLOCK_JUMP:
            return True
        if left:
            self._leaps[stream] = before, left - 1
        return False

    @staticmethod
    def _shift(packet: Packet, offset: Fraction) -> None:
        if offset and packet.time_base:
            ticks = round(offset / packet.time_base)
            packet.pts = None if packet.pts is None else packet.pts + ticks
            packet.dts = None if packet.dts is None else packet.dts + ticks


class _Clock:
    """Gives every frame a strictly rising time, also where the file gives none."""

    def __init__(self, stream: VideoStream, first: VideoFrame, rate: Fraction) -> None:
        self.counts = first.pts is None
        self.time_base: Fraction = 1 / rate if self.counts else (stream.time_base or 1 / rate)
        self._usual = max(1, round(1 / rate / self.time_base))
        self._next = 0
        self._last: int | None = None
        self.repaired = 0

    def stamp(self, frame: VideoFrame) -> Stamp:
        """Return the frame's time."""
        duration = int(getattr(frame, "duration", 0) or 0) if not self.counts else 1
        pts = self._next if self.counts or frame.pts is None else frame.pts
        if self._last is not None and pts <= self._last:
            pts = self._last + 1
            self.repaired += 1
        self._last = pts
        duration = duration or self._usual
        self._next = pts + duration
        return Stamp(pts, duration, self.time_base)


class VideoReader:
    """Reads a container: file, picture, standard input or URL."""

    def __init__(self, source: Source, trim: Trim, *, deinterlace: bool = False) -> None:
        self.source = source
        self._trim = trim
        self.cut_short: str | None = None
        self.shift = Fraction(0)
        self.end: Fraction | None = None
        self.passed = 0
        self.keep_alpha = False
        self._bad_packets = 0
        self._video_packets = 0
        self._packet_bytes = 0
        self._last_end = Fraction(0)
        self._demux_error: str | None = None
        self._joined: _JoinedClocks | None = None
        self._interlaced_from: Fraction | None = None
        self._waiting_for_data = False
        self.container = self._open()
        try:
            self._stream = self._prepare()
            self._early: list[Packet] = []  # packets of other streams seen before the first frame
            self._decoded = self._decode()
            first = self._first_frame()
            self.info = describe(source, self.container, self._stream, first)
            self.warnings: list[str] = [*self.info.warnings, *_further_pages(source)]
            self._deinterlace = deinterlace
            if self.info.interlaced and not deinterlace:
                self.warnings.append(
                    "the video is interlaced and is upscaled as it is; --deinterlace makes full frames"
                )
            self._to_rgb = self._converter(self.info.color_used)
            self._tags = self.info.color
            self._first: VideoFrame | None = first
        except BaseException:
            self.container.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Closing under a thread that still waits in a silent pipe would crash; the process's end closes it.
        if not self._waiting_for_data:
            self.container.close()

    def __iter__(self) -> Iterator[Frame | Passed | Packet]:
        window = self._begin()
        clock: _Clock | None = None
        count = 0
        video_ended = False
        for item in self._items():
            if isinstance(item, Packet):
                packet = self._moved(item)
                if video_ended and self._past_end(packet):
                    break
                if packet is not None and packet.stream is not self._stream:
                    yield packet
                continue
            if video_ended:
                continue
            clock = clock or _Clock(self._stream, item, self.info.rate)
            stamp = clock.stamp(item)
            if window.before(stamp):
                continue
            if window.after(stamp) or count == self._trim.frames:
                video_ended = True
                self.end = self._end_of_trim(stamp)
                continue
            if count == 0:
                self._set_shift(stamp, window)
            if item.interlaced_frame and self._interlaced_from is None:
                self._interlaced_from = stamp.time - self.info.origin
            stamp = self._shifted(stamp)
            try:
                frame = Passed(stamp) if count < self.passed else self._frame(item, stamp)
            except SizeChange as change:
                since = float(stamp.time - self.shift - self.info.origin)
                if count == 0:
                    raise InputError(f"{self.info.source}: {change} before {since:.2f} s; split it") from None
                self.cut_short = f"{change} at {since:.2f} s; split the file there to do the rest"
                self._note(clock)
                return
            yield frame
            count += 1
        self._finish(count, clock, video_ended)

    # -- opening -------------------------------------------------------------------------------------

    def _open(self) -> InputContainer:
        return open_container(self.source)

    def _prepare(self) -> VideoStream:
        stream = choose_stream(self.container, self.source)
        if self.source.kind is SourceKind.FILE:
            stream.thread_type = (
                "AUTO"  # frame threads delay frames, which a pipe or live source can't afford
            )
        return stream

    def _first_frame(self) -> VideoFrame:
        for item in self._decoded:
            if isinstance(item, VideoFrame):
                return item
            self._early.append(item)
        reason = self._demux_error or "its video can't be decoded"
        raise InputError(f"{self.source.name}: nothing could be decoded ({reason})")

    # -- demuxing and decoding -----------------------------------------------------------------------

    def _decode(self) -> Iterator[VideoFrame | Packet]:
        """Yield decoded frames, packets of other streams, and the video's own packets once decoded."""
        demuxer = self.container.demux()
        broadcast = self.source.kind is SourceKind.FILE and self.container.format.name in _BROADCAST
        self._joined = _JoinedClocks() if broadcast else None
        while True:
            self._waiting_for_data = True
            try:
                packet = next(demuxer)
            except StopIteration:
                return
            except av.error.FFmpegError as error:
                self._demux_error = f"reading failed: {error.strerror}"
                packet = None
            finally:
                self._waiting_for_data = False
            if packet is None:  # what the decoder still holds is good
                yield from self._decode_packet(None)
                return
            if not packet.size and packet.pts is not None:
                continue  # Theora's "as before"; decoders refuse it
            if self._joined is not None and packet.stream is not None:
                self._joined.move(packet)
            if packet.stream is self._stream:
                yield from self._decode_packet(packet)
            if packet.size and packet.stream is not None:
                yield packet

    def _decode_packet(self, packet: Packet | None) -> Iterator[VideoFrame]:
        try:
            yield from self._stream.decode(packet)
        except av.error.EOFError:
            return
        except (av.error.InvalidDataError, av.error.PatchWelcomeError, av.error.UnknownError):
            self._bad_packets += 1
        if packet is not None and packet.size:
            self._video_packets += 1
            self._packet_bytes = packet.size
            if packet.is_corrupt:
                self._bad_packets += 1

    def _items(self) -> Iterator[VideoFrame | Packet]:
        frames = self._frames()
        yield from frames if self.info.container == "avi" else _times_completed(frames, self.info)

    def _frames(self) -> Iterator[VideoFrame | Packet]:
        """Give what was decoded; the first frames may lack their times."""
        yield from self._early
        self._early = []
        frames: Iterator[VideoFrame | Packet] = self._decoded
        if self._first is not None:
            frames = itertools.chain([self._first], frames)
        if self.info.container == "avi":
            frames = _times_sorted(frames)
        yield from _deinterlaced(frames) if self._deinterlace else frames

    # -- trimming ------------------------------------------------------------------------------------

    def _begin(self) -> _Window:
        """Seek if there is something to skip, and return the window of times to keep."""
        info, trim = self.info, self._trim
        if info.duration is not None and trim.start is not None:
            reach = info.start_time - info.origin + info.duration
            if trim.start >= reach and info.container not in _BROADCAST:  # their clocks may jump back
                raise InputError(
                    f"start is {float(trim.start):g} s, but {info.source} ends at {float(reach):.3f} s"
                )
        begin = None if trim.start is None else info.origin + trim.start
        window = _Window(begin, None if trim.duration is None else (begin or info.origin) + trim.duration)
        if begin is not None and info.kind is SourceKind.FILE and self._first is not None:
            self._seek(begin)
        return window

    def _seek(self, begin: Fraction) -> None:
        """Go to a keyframe before `begin`; where the file can't, read from its beginning."""
        target = begin - Fraction(1, 2)
        info = self.info
        if self._first is None or self._first.pts is None or target <= info.start_time:
            return
        if (
            info.container in _BROADCAST
            and info.duration is not None
            and target > info.start_time + info.duration
        ):
            return  # there is no such time in the file: its clock jumps back
        try:
            self.container.seek(math.floor(target / self.info.time_base), stream=self._stream)
            self._decoded = self._decode()
            self._early = []
            first = self._first_frame()
        except (av.error.FFmpegError, InputError):
            first = None
        if first is None or first.pts is None or first.pts * self.info.time_base > begin:
            self.container.close()
            self.container = self._open()
            self._stream = self._prepare()
            self._early = []
            self._decoded = self._decode()
            first = self._first_frame()
        self._first = first
        self._video_packets = 0

    def _set_shift(self, stamp: Stamp, window: _Window) -> None:
        """Trimmed: the first kept frame is shown at 0. Broadcast clocks, which start anywhere: likewise."""
        if window.begin is not None:
            late = stamp.time - window.begin
            self.shift = -(stamp.time if late < Fraction(stamp.duration) * stamp.time_base else window.begin)
        elif self.info.container in (*_BROADCAST, "rtsp", "hls"):
            # A first frame that told no time was counted back, perhaps to before the origin.
            self.shift = -min(self.info.origin, stamp.time)
        elif stamp.time < 0:  # not every container can say so, and readers of Matroska can't see it
            self.shift = -stamp.time

    def _shifted(self, stamp: Stamp) -> Stamp:
        return replace(stamp, pts=stamp.pts + round(self.shift / stamp.time_base)) if self.shift else stamp

    def _moved(self, packet: Packet) -> Packet | None:
        """Note how far the file was read, and drop packets of other streams that come before a trim."""
        pts = packet.pts if packet.pts is not None else packet.dts
        if pts is None or packet.time_base is None:
            return packet
        start = pts * packet.time_base
        self._last_end = max(self._last_end, start + (packet.duration or 0) * packet.time_base)
        if packet.stream is self._stream or self._trim.start is None:
            return packet
        return packet if start >= self.info.origin + self._trim.start else None

    def _end_of_trim(self, after: Stamp) -> Fraction:
        """Return where other streams end: at the first frame that is not kept (shifted seconds)."""
        return after.time + self.shift

    def _past_end(self, packet: Packet | None) -> bool:
        """Say whether nothing before the trim's end can follow in the file."""
        assert self.end is not None
        return not self.info.streams or (self._last_end + self.shift > self.end + _INTERLEAVE_SLACK)

    # -- pixels --------------------------------------------------------------------------------------

    def _frame(self, frame: VideoFrame, stamp: Stamp) -> Frame:
        height, width = self.info.coded_size
        if (frame.height, frame.width) != (height, width):
            raise SizeChange(
                f"the picture size changes from {width}x{height} to {frame.width}x{frame.height}"
            )
        tags = tags_of(frame, None).or_else(self.info.color)
        if tags != self._tags:
            used = tags.resolved(width, height, rgb=frame.format.is_rgb or frame.format.has_palette)
            self._to_rgb = self._converter(used)
            self._tags = tags
        turn = self.info.orientation.apply
        return Frame(turn(self._to_rgb(frame)), stamp, alpha=self._alpha(frame))

    def _converter(self, tags: ColorTags) -> ToRgb:
        info = self.info
        return ToRgb(tags, deep=info.deep, siting=info.siting, source=info.source)

    def _alpha(self, frame: VideoFrame) -> np.ndarray | None:
        if not self.info.alpha:
            return None
        alpha = alpha_of(frame, deep=self.info.deep)
        opaque = is_opaque(alpha)
        if not opaque and not self.keep_alpha:
            raise InputError(transparent(self.info.source))
        if not self.keep_alpha or (opaque and frame.format.has_palette):
            return None
        return self.info.orientation.apply(alpha[..., None])[..., 0]

    # -- the end -------------------------------------------------------------------------------------

    def _finish(self, count: int, clock: _Clock | None, trimmed_end: bool) -> None:
        if count == 0:
            raise InputError(f"{self.info.source}: there is no frame in the chosen range")
        self._note(clock)
        if trimmed_end:
            if self._bad_packets:
                self.cut_short = self._damage()
            return
        self.cut_short = self._why_cut_short()

    def _damage(self) -> str:
        places = (
            "1 damaged place was" if self._bad_packets == 1 else f"{self._bad_packets} damaged places were"
        )
        return f"{places} skipped"

    def _note(self, clock: _Clock | None) -> None:
        """Warn of what has shown only while reading."""
        if clock is not None and clock.repaired:
            self.warnings.append(f"{clock.repaired} frames had times out of order and were moved")
        if self._joined is not None and self._joined.jumps:
            self.warnings.append(
                f"the clock of the file jumps back {self._joined.jumps} times: the output's goes on evenly"
            )
        if self._interlaced_from is not None and not self.info.interlaced and not self._deinterlace:
            self.warnings.append(
                f"the video is interlaced from {float(self._interlaced_from):.2f} s on and was upscaled "
                "as it is; --deinterlace makes full frames"
            )

    def _why_cut_short(self) -> str | None:
        """Return why the source ended before its time, or None: errors, missing samples, missing time."""
        if self._demux_error:
            return self._demux_error
        info = self.info
        counted_input = self.container.file.file if self.container.file is not None else None
        if isinstance(counted_input, CountedInput):
            if counted_input.incomplete(self._video_packets, self._packet_bytes):
                return f"it breaks off inside frame {self._video_packets + 1}"
            return None
        expected = self._stream.frames
        counted = "mp4" in info.container and expected > 0 and self._trim.start is None
        if info.duration is not None and not info.still:
            whole = self.container.duration
            length = Fraction(whole, av.time_base) if whole else info.duration
            # In Matroska some write the time at the end as the length.
            reach = length + (min(info.origin, Fraction(0)) if "matroska" in info.container else info.origin)
            missing = reach - self._last_end
            if missing > (1 / info.rate if counted and self._video_packets < expected else _END_TOLERANCE):
                return f"it breaks off {float(missing):.2f} s before its stated end"
        if counted and self._video_packets < expected and self._bad_packets:
            return f"{expected - self._video_packets} of {expected} frames are missing"
        if self._bad_packets:
            return self._damage()
        return None


def _further_pages(source: Source) -> list[str]:
    """Return a line if a still picture is the first of several in its file."""
    if source.kind is not SourceKind.STILL or not source.name.lower().endswith((".tif", ".tiff")):
        return []
    data = Path(source.name).read_bytes()
    count = pages(data) if is_tiff(data) else 1
    return [f"{source.name} has {count} pages: the first one is taken"] if count > 1 else []


def _deinterlaced(items: Iterator[VideoFrame | Packet]) -> Iterator[VideoFrame | Packet]:
    """Make full frames (bwdif), one for each frame and at its time; needs one frame of look-ahead."""
    graph: Graph | None = None
    form: tuple[int, int, str] | None = None
    frames: deque[VideoFrame] = deque()

    def finished() -> Iterator[VideoFrame]:
        assert graph is not None
        while frames:
            try:
                full = cast(VideoFrame, graph.pull())
            except (av.error.BlockingIOError, av.error.EOFError):
                return
            frame = frames.popleft()
            full.pts, full.duration, full.time_base = frame.pts, frame.duration, frame.time_base
            yield full

    for item in items:
        if isinstance(item, Packet):
            yield item
            continue
        if graph is not None and (item.height, item.width, item.format.name) != form:
            graph.push(None)
            yield from finished()
            graph = None
        if graph is None:
            graph = Graph()
            form = (item.height, item.width, item.format.name)
            base = item.time_base or Fraction(1, 25)
            source = graph.add_buffer(None, item.width, item.height, item.format, time_base=base)
            graph.link_nodes(
                source, graph.add("bwdif", "mode=send_frame"), graph.add("buffersink")
            ).configure()
        frames.append(item)
        graph.push(item)
        yield from finished()
    if graph is not None:
        graph.push(None)
        yield from finished()


def _times_sorted(items: Iterator[VideoFrame | Packet]) -> Iterator[VideoFrame | Packet]:
    """Give the frames of an AVI their times in rising order.

    AVI stores none: libav numbers the coded frames, and where frames are coded out of order each shown one
    comes with a neighbour's number. The set of numbers is right (gaps included), so sorting them is enough.
    """
    frames: deque[VideoFrame] = deque()
    numbers: list[int] = []

    def oldest() -> VideoFrame:
        frame = frames.popleft()
        if len(numbers) > len(frames):
            frame.pts = heapq.heappop(numbers)
        return frame

    for item in items:
        if isinstance(item, Packet):
            yield item
            continue
        frames.append(item)
        if item.pts is not None:
            heapq.heappush(numbers, item.pts)
        if len(frames) > _REORDER_DEPTH:
            yield oldest()
    while frames:
        yield oldest()


def _times_completed(items: Iterator[VideoFrame | Packet], info: VideoInfo) -> Iterator[VideoFrame | Packet]:
    """Count back from the first frame with a time to those before it.

    libav tells none for the frames of a Matroska file that lie before zero, nor for RTSP's first one. Where
    too many tell none, none will, and they are given as they are.
    """
    usual = max(1, round(1 / info.rate / info.time_base))
    depth = _UNDATED_DEPTH_MATROSKA if "matroska" in info.container else _UNDATED_DEPTH
    undated: list[VideoFrame] = []
    for item in items:
        if isinstance(item, Packet):
            yield item
            continue
        if item.pts is None and len(undated) < depth:
            undated.append(item)
            continue
        for steps, frame in enumerate(reversed(undated), 1):
            frame.pts = None if item.pts is None else item.pts - steps * usual
        yield from (*undated, item)
        undated.clear()
        yield from items
    yield from undated


@dataclass(frozen=True)
class _Window:
    """Times to keep, in the source's own seconds: begin <= t < end, where given."""

    begin: Fraction | None
    end: Fraction | None

    def before(self, stamp: Stamp) -> bool:
        return self.begin is not None and stamp.time < self.begin

    def after(self, stamp: Stamp) -> bool:
        return self.end is not None and stamp.time >= self.end


__all__ = ["DEFAULT_RATE", "Reader", "Trim", "VideoReader", "open_reader", "parse_time"]
