"""Live outputs: what a name means (network, playlist, file, y4m), and one connection to it.

A `LiveWriter` is one connection: it encodes the picture without delay and writes the sound beside it. When it
breaks it raises `SinkLost`, and a new one goes on, on the same clock.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import cast

import av
import av.error
from av.container import OutputContainer
from av.video.frame import PictureType, VideoFrame
from av.video.stream import VideoStream

from recavsr.errors import InputError
from recavsr.video.color import FromRgb
from recavsr.video.formats import CONTAINERS, LOSSLESS, Container, Encoding, choose_encoding, container_of
from recavsr.video.info import VideoInfo
from recavsr.video.live_sound import SoundCopy, SoundEncoder, SoundPolicy, carries
from recavsr.video.live_source import LiveFrame, SoundPacket, SoundTrack, check_host
from recavsr.video.output import PendingOutput, write_error
from recavsr.video.relay import Relay, ffmpeg_with
from recavsr.video.source import STDIN, shown_name

TIME_BASE = Fraction(1, 90000)
"""The output's clock: every usual frame rate has whole ticks of it."""

_FLV = Container(".flv", "flv", ("h264",), "h264", {"flvflags": "no_duration_filesize"})
_MPEGTS = Container(".ts", "mpegts", ("h264", "hevc"), "h264")
_HLS_OPTIONS = {"hls_time": "2", "hls_list_size": "6", "hls_flags": "delete_segments+independent_segments"}
_HLS = Container(".m3u8", "hls", ("h264", "hevc"), "h264", _HLS_OPTIONS)
# Fragments keep what a crash interrupts; at the end the file becomes an ordinary one.
_SAFE_MP4 = {"movflags": "+hybrid_fragmented+delay_moov+write_colr", "movie_timescale": "90000"}

_SCHEMES = {"rtmp": _FLV, "rtmps": _FLV, "srt": _MPEGTS, "udp": _MPEGTS, "tcp": _MPEGTS}

_KEY_FRAME_EVERY = Fraction(2)  # seconds
_BITS_A_PIXEL = 0.12  # of a second's pixels: 3.3 Mbit/s for 720p at 30, 7.5 for 1080p
_STREAM_QUALITY = "20"
_SOUND_AHEAD_SECONDS = 10  # sound waits so long for the picture of its time, then it is written without
_NETWORK_PATIENCE_MICROSECONDS = 5_000_000
_INTERLEAVE_MICROSECONDS = "300000"


class SinkLost(Exception):
    """The output broke off; it may come back."""


@dataclass(frozen=True)
class Destination:
    """A resolved live output. `shown` is its name without passwords and stream keys."""

    name: str
    shown: str
    container: Container
    network: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    overwrite: bool = False

    @property
    def comes_back(self) -> bool:
        """Return whether it can be opened again after it broke."""
        return self.network

    @property
    def confirmed_after(self) -> float:
        """Return how many seconds without an error mean that a connection stands."""
        return 5.0 if self.name.startswith("srt:") else 1.0

    def check(self) -> None:
        """Raise InputError where it is clear before anything is written that it can't be."""
        if self.name == STDIN and sys.stdout.isatty():
            raise InputError("the output is a terminal: send it to a file or a pipe")
        if self.network or self.name == STDIN:
            return
        path = Path(self.name)
        if not path.parent.is_dir():
            raise InputError(f"{path}: the folder {path.parent} does not exist")
        if path.exists() and not self.overwrite:
            raise InputError(f"{path}: exists already; choose another name, or --overwrite it")


def resolve_destination(
    name: str, *, options: Mapping[str, str] | None = None, overwrite: bool = False
) -> Destination:
    """Say what output `name` is; InputError if it is none that can be streamed to."""
    given = dict(options or {})
    if name == STDIN:
        return Destination(name, "standard output", CONTAINERS[".y4m"], options=given)
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+)://", name)
    if scheme is not None:
        protocol = scheme[1].lower()
        if protocol not in _SCHEMES:
            raise InputError(
                f"{protocol}:// is no output that can be streamed to; "
                f"use {', '.join(_SCHEMES)}, a .m3u8 playlist, a file, or - (y4m)"
            )
        check_host(name)
        if protocol == "srt":
            ffmpeg_with("srt")
        url = name
        if protocol == "udp" and "pkt_size" not in name:  # seven packets of MPEG-TS fit into one of Ethernet
            url += f"{'&' if '?' in name else '?'}pkt_size=1316"
        return Destination(url, shown_name(name), _SCHEMES[protocol], True, given)
    suffix = Path(name).suffix.lower()
    own = {".ts": _MPEGTS, ".flv": _FLV, ".m3u8": _HLS}
    container = own.get(suffix) or container_of(suffix, also=own)
    if container.muxer in ("mp4", "mov"):
        container = replace(container, options=_SAFE_MP4)
    return Destination(name, name, container, options=given, overwrite=overwrite)


@dataclass(frozen=True)
class Picture:
    """How the picture is written: size (height, width), pixel aspect, nominal rate, encoding."""

    size: tuple[int, int]
    sample_aspect: Fraction
    rate: Fraction
    encoding: Encoding


def choose_picture(
    info: VideoInfo,
    destination: Destination,
    size: tuple[int, int],
    sample_aspect: Fraction,
    *,
    codec: str | None = None,
    quality: int | str | None = None,
    preset: str | None = None,
    bitrate: int | None = None,
) -> Picture:
    """Decide how the picture is encoded; InputError if impossible.

    Streams that players take everywhere: 8 bits, 4:2:0, a key frame every two seconds, no delay in the
    encoder, and over a network at most `bitrate` bits a second (default: by size and rate).
    """
    container = destination.container
    if container.times:  # y4m goes to programs, which get what there is
        height, width = size
        size = max(2, height - height % 2), max(2, width - width % 2)
        info = replace(info, bit_depth=8, chroma="420", color=info.color_used.for_yuv(), hdr_metadata=None)
    encoding = choose_encoding(info, container, size, codec=codec, quality=quality, preset=preset)
    options = dict(encoding.options)
    if encoding.library in ("libx264", "libx265"):
        options["tune"] = "zerolatency"
        options["forced-idr"] = "1"
        if destination.network or bitrate is not None:
            most = bitrate or int(_BITS_A_PIXEL * size[0] * size[1] * info.rate)
            options |= {"maxrate": str(most), "bufsize": str(most)}
            if quality is None:
                options["crf"] = _STREAM_QUALITY
    elif encoding.library == "libvpx-vp9":
        options |= {"deadline": "realtime", "lag-in-frames": "0", "cpu-used": preset or "8"}
    if bitrate is not None and "maxrate" not in options and quality != LOSSLESS:
        options["b"] = str(bitrate)
    return Picture(size, sample_aspect, info.rate, replace(encoding, options=options))


class LiveWriter:
    """One connection to a destination, on the output's clock, which starts at 0."""

    def __init__(
        self,
        destination: Destination,
        picture: Picture,
        tracks: Sequence[SoundTrack],
        sound: SoundPolicy = "copy",
    ) -> None:
        self.warnings: list[str] = []
        self._destination, self._picture = destination, picture
        self._relay: Relay | None = None
        self._pending: PendingOutput | None = None
        self._from_rgb = FromRgb(
            picture.encoding.pixel_format, picture.encoding.color, picture.encoding.siting, picture.size
        )
        self._sounds: dict[int, SoundCopy | SoundEncoder] = {}
        self._waiting: deque[SoundPacket] = deque()
        self._arrivals: dict[int, float] = {}
        self._last_picture: VideoFrame | None = None
        self._count = 0
        self._until = self._next_key = Fraction(0)
        with self._failing():
            self._output = self._open()
            self._video = self._add_video()
            self._add_sound(tracks, sound)
            self._output.start_encoding()

    def write(self, frame: LiveFrame) -> list[float]:
        """Encode a frame; return when the frames that are written by now had arrived."""
        with self._failing():
            return list(self._written(frame))

    def sound(self, packet: SoundPacket) -> None:
        """Take a packet of sound; it is written with the picture of its time."""
        if packet.track not in self._sounds:
            return
        self._waiting.append(packet)
        with self._failing():
            self._release(max(self._until, packet.time - _SOUND_AHEAD_SECONDS))

    def begin_connection(self, tracks: Sequence[SoundTrack]) -> None:
        """Prepare for the packets of a new connection to the source."""
        for number, sound in list(self._sounds.items()):
            if number >= len(tracks):
                continue
            if not sound.follows(tracks[number]):
                self.warnings.append(
                    f"the sound came back as {tracks[number]} and is left out; --sound encode takes any"
                )
                del self._sounds[number]

    def close(self) -> None:
        """Write what is left and complete the output."""
        with self._failing():
            for packet in self._video.encode(None) if self._count else ():
                self._output.mux(packet)
            self._release(None)
            for sound in self._sounds.values():
                for packet in sound.rest():
                    self._output.mux(packet)
            self._output.close()
            if self._relay is not None:
                self._relay.close()
        if self._pending is not None:
            self._pending.commit()

    def abandon(self) -> None:
        """Let go of a connection that broke, as far as libav lets."""
        with contextlib.suppress(av.error.FFmpegError, OSError, ValueError):
            self._output.close()
        if self._relay is not None:
            with contextlib.suppress(OSError):
                self._relay.close()
        if self._pending is not None:
            self._pending.discard()

    # -- opening ---------------------------------------------------------------------------------------

    def _open(self) -> OutputContainer:
        destination, container = self._destination, self._destination.container
        options = {**container.options, **destination.options}
        if destination.name.startswith("srt:"):
            self._relay = Relay(destination.name, sending=True)
            return av.open(self._relay, "w", format=container.muxer, options=options)
        if destination.network:
            # libav's `fifo` connects and sends in a thread of its own, so that nothing here waits for the
            # network; what went wrong comes back with a later packet.
            inner = {"rw_timeout": str(_NETWORK_PATIENCE_MICROSECONDS), "flush_packets": "1", **options}
            packed = ":".join(f"{key}={_escaped(value)}" for key, value in inner.items())
            outer = {
                "fifo_format": container.muxer,
                "format_opts": packed,
                "queue_size": "300",
                "max_interleave_delta": _INTERLEAVE_MICROSECONDS,
            }
            return av.open(destination.name, "w", format="fifo", options=outer)
        if destination.name == STDIN:
            return av.open("pipe:1", "w", format=container.muxer, options=options | {"flush_packets": "1"})
        options = {"max_interleave_delta": _INTERLEAVE_MICROSECONDS} | options
        path = Path(destination.name)
        if container.muxer == "hls":
            names = {"hls_segment_filename": str(path.with_name(f"{path.stem}_%05d.ts"))}
            return av.open(str(path), "w", format="hls", options=names | options)
        self._pending = PendingOutput(path, overwrite=destination.overwrite)
        return av.open(f"file:{self._pending.path}", "w", format=container.muxer, options=options)

    def _add_video(self) -> VideoStream:
        picture, encoding = self._picture, self._picture.encoding
        base = TIME_BASE if self._destination.container.times else 1 / picture.rate
        added = self._output.add_stream(
            encoding.library, rate=picture.rate, options=dict(encoding.options), time_base=base
        )
        stream = cast(VideoStream, added)
        context = stream.codec_context
        context.height, context.width = picture.size
        context.pix_fmt, context.time_base = encoding.pixel_format, base
        context.sample_aspect_ratio = picture.sample_aspect
        context.color_range, context.colorspace = encoding.color.range, encoding.color.matrix
        context.color_primaries, context.color_trc = encoding.color.primaries, encoding.color.transfer
        if self._destination.container.muxer == "flv":
            context.flags |= av.codec.context.Flags.global_header
        if encoding.codec == "hevc" and self._destination.container.muxer in ("mp4", "mov"):
            context.codec_tag = "hvc1"
        return stream

    def _add_sound(self, tracks: Sequence[SoundTrack], policy: SoundPolicy) -> None:
        container = self._destination.container
        for number, track in enumerate(tracks):
            if policy == "none":
                break
            if container.muxer == "yuv4mpegpipe" or (container.muxer == "flv" and number > 0):
                self.warnings.append(f"{container.suffix} can't hold sound track {number} ({track})")
                continue
            copied = policy == "copy" and carries(container, track)
            self._sounds[number] = (SoundCopy if copied else SoundEncoder)(self._output, container, track)

    # -- writing ---------------------------------------------------------------------------------------

    def _written(self, frame: LiveFrame) -> Iterator[float]:
        image = self._from_rgb(frame.pixels)
        for pts in self._places(frame):
            image.pts, image.time_base = pts, self._video.codec_context.time_base
            if frame.stamp.time >= self._next_key:  # by time, as frames may be dropped
                self._next_key = frame.stamp.time + _KEY_FRAME_EVERY
                image.pict_type = PictureType.I
            self._arrivals[pts] = frame.arrived
            self._count += 1
            for packet in self._video.encode(image):
                arrived = None if packet.pts is None else self._arrivals.pop(packet.pts, None)
                self._output.mux(packet)
                if arrived is not None:
                    yield arrived
        self._last_picture = image
        self._until = max(self._until, frame.stamp.end)
        self._release(self._until)

    def _places(self, frame: LiveFrame) -> Iterator[int]:
        """Yield the frame's place on the clock, if it has one.

        In y4m all frames are alike in length: there a frame is shown again until the next one's time has
        come, and one whose place is taken is left out; what reads the pipe stays in step with the source.
        """
        if self._destination.container.times:
            yield round(frame.stamp.time / TIME_BASE)
            return
        place = round(frame.stamp.time * self._picture.rate)
        while self._last_picture is not None and self._count < place:
            self._last_picture.pts = self._count
            self._count += 1
            self._output.mux(self._video.encode(self._last_picture))
        if self._count <= place:
            yield self._count

    def _release(self, until: Fraction | None) -> None:
        """Write the sound that starts before `until` seconds (None: all)."""
        while self._waiting and (until is None or self._waiting[0].time < until):
            packet = self._waiting.popleft()
            sound = self._sounds.get(packet.track)
            for done in sound(packet.packet) if sound is not None else ():
                self._output.mux(done)

    def _failing(self) -> _Failing:
        return _Failing(self._destination, self)

    def reason(self, error: Exception) -> str:
        """Return why writing failed."""
        told = self._relay.why_ended() if self._relay is not None else None
        return told or getattr(error, "strerror", None) or str(error)


class _Failing:
    """Turns libav's and the system's errors into `SinkLost`, or InputError where nothing can come back."""

    def __init__(self, destination: Destination, writer: LiveWriter) -> None:
        self._destination, self._writer = destination, writer

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, (av.error.FFmpegError, OSError, ValueError)):
            return
        if self._destination.comes_back:
            raise SinkLost(self._writer.reason(error)) from None
        raise write_error(self._destination.shown, error) from None


def _escaped(value: str) -> str:
    """Return a value as libav reads it inside a list of options."""
    return re.sub(r"([\\':=])", r"\\\1", value)
