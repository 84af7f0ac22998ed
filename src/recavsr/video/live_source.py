"""Live sources: what a name means (camera, network, pipe, file in real time), and one connection to it.

source = resolve_live("rtmp://127.0.0.1:1935/live/key", listen=True)
with LiveReader(source) as reader:
    reader.info, reader.tracks
    for item in reader:        # LiveFrame, or SoundPacket, at the source's own times
        ...
    reader.why_ended           # None: the source said that this is the end
"""

from __future__ import annotations

import io
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from urllib.parse import urlsplit

import av
import av.error
from av.audio.codeccontext import AudioCodecContext
from av.audio.stream import AudioStream
from av.container import InputContainer
from av.packet import Packet
from av.video.frame import VideoFrame

from recavsr.errors import InputError
from recavsr.video.frames import Frame, Stamp
from recavsr.video.info import VideoInfo
from recavsr.video.reader import Trim, VideoReader
from recavsr.video.relay import Relay, ffmpeg_with
from recavsr.video.source import (
    STDIN,
    CountedInput,
    Source,
    SourceKind,
    open_container,
    resolve,
    shown_name,
)

NETWORK_SCHEMES = ("rtmp", "rtmps", "rtsp", "rtsps", "srt", "udp", "tcp", "rtp", "http", "https")
_DEVICE_FORMATS = {"linux": "v4l2", "darwin": "avfoundation", "win32": "dshow"}
_DEVICE = re.compile(r"(camera|v4l2|avfoundation|dshow)(?::(.*))?", re.DOTALL)

_SEGMENTED = ("hls", "dash")  # libav's formats whose pictures come in pieces of some seconds

# Enough to find a picture and its sound in a stream that sends key frames every two seconds.
_PROBE_MICROSECONDS = "2000000"
_PACE_JUMP_SECONDS = 10.0  # a picture that would be so much too early or late has a new clock


class LiveKind(Enum):
    """What kind of source a name means."""

    DEVICE = "camera"
    NETWORK = "network"
    PIPE = "pipe"
    FILE = "file in real time"


@dataclass(frozen=True)
class LiveSource:
    """A resolved live source. `shown` is its name without passwords and stream keys."""

    name: str
    shown: str
    kind: LiveKind
    format: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    listen: bool = False
    patience: float = 5.0  # seconds without data after which it counts as lost
    connect_seconds: float | None = 10.0  # None: as long as it takes

    @property
    def comes_back(self) -> bool:
        """Return whether it can be opened again after it was lost."""
        return self.kind in (LiveKind.DEVICE, LiveKind.NETWORK)


@dataclass(frozen=True)
class LiveFrame(Frame):
    """A frame, and when the decoder gave it (`time.monotonic`)."""

    arrived: float = 0.0


@dataclass(frozen=True)
class SoundTrack:
    """One sound track: how it is coded. `template` is a stream of its own, which outlives the source."""

    codec: str
    rate: int
    channels: int
    template: AudioStream
    _container: InputContainer

    def decoder(self) -> AudioCodecContext:
        """Return a new decoder."""
        decoder = av.CodecContext.create(self.codec, "r")
        assert isinstance(decoder, AudioCodecContext)
        decoder.extradata = self.template.codec_context.extradata
        decoder.sample_rate, decoder.layout = self.rate, self.template.codec_context.layout
        return decoder

    def same_form(self, other: SoundTrack) -> bool:
        """Return whether packets of both can follow each other in one stream."""
        return (self.codec, self.rate, self.channels) == (other.codec, other.rate, other.channels)

    def __str__(self) -> str:
        return f"{self.codec}, {self.rate} Hz, {self.channels} channel{'s' * (self.channels > 1)}"


@dataclass(frozen=True)
class SoundPacket:
    """A packet of the sound track number `track`, and its time in seconds."""

    track: int
    packet: Packet
    time: Fraction

    def moved(self, offset: Fraction) -> SoundPacket:
        """Move the packet itself by `offset` seconds, and return it."""
        packet = self.packet
        assert packet.time_base is not None
        ticks = round(offset / packet.time_base)
        packet.pts = None if packet.pts is None else packet.pts + ticks
        packet.dts = None if packet.dts is None else packet.dts + ticks
        return SoundPacket(self.track, packet, self.time + ticks * packet.time_base)


def check_host(url: str) -> None:
    """Raise InputError where a URL of the network names neither host nor port."""
    if not urlsplit(url).netloc:
        raise InputError(f"{shown_name(url)}: the address lacks a host, as in srt://host:9000")


def resolve_live(
    name: str,
    *,
    listen: bool = False,
    options: Mapping[str, str] | None = None,
    patience: float = 5.0,
) -> LiveSource:
    """Say what `name` is, without opening it; InputError if it can't be a live source here.

    listen: be the server that the source connects to (rtmp, rtsp, tcp, srt). options: of the demuxer or
        device.
    """
    given = dict(options or {})
    if name == STDIN:
        return LiveSource(name, "standard input", LiveKind.PIPE, None, given, patience=patience)
    device = _device(name)
    if device is not None:
        return LiveSource(device[1], name, LiveKind.DEVICE, device[0], given, patience=patience)
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+)://", name)
    if scheme is None:
        source = resolve(name)
        if source.kind is not SourceKind.FILE:
            raise InputError(f"{name}: not a video; live takes a camera, a URL, a pipe or a video file")
        kind = LiveKind.PIPE if Path(name).is_fifo() else LiveKind.FILE
        return LiveSource(name, name, kind, None, given, patience=patience)
    protocol = scheme[1].lower()
    if protocol not in NETWORK_SCHEMES:
        raise InputError(f"{protocol}:// is not known; live takes {', '.join(NETWORK_SCHEMES)}")
    check_host(name)
    if listen and protocol not in ("rtmp", "rtsp", "tcp", "srt"):
        raise InputError(f"--listen is for rtmp, rtsp, tcp and srt; {protocol} has no such mode")
    url = name
    if protocol == "srt":
        ffmpeg_with("srt")
        if listen and "mode=" not in name:
            url += f"{'&' if '?' in name else '?'}mode=listener"
    defaults = {"analyzeduration": _PROBE_MICROSECONDS}
    if protocol == "rtsp":
        defaults["rtsp_transport"] = "tcp"  # UDP rarely passes routers, and loses packets where it does
    if listen and protocol == "rtsp":
        defaults["listen_timeout"] = "86400"  # implies listening; libav refuses its own default
    elif listen and protocol != "srt":
        defaults["listen"] = "1"
    listening = listen or protocol in ("udp", "rtp") or "mode=listener" in name
    return LiveSource(url, shown_name(name), LiveKind.NETWORK, None, defaults | given, listening, patience)


def _device(name: str) -> tuple[str, str] | None:
    """Return libav's input format and name of a camera, None if `name` is none."""
    if re.fullmatch(r"/dev/video\d+", name):
        form, device = "v4l2", name
    else:
        match = _DEVICE.fullmatch(name)
        if match is None:
            return None
        system = _DEVICE_FORMATS.get(sys.platform)
        if system is None:
            raise InputError(f"{name}: cameras are not known on this system; pipe the picture in")
        form = system if match[1] == "camera" else match[1]
        device = match[2] or _first_device(form)
        if form == "dshow" and "=" not in device:
            device = f"video={device}"
        if form == "v4l2" and device.isdecimal():
            device = f"/dev/video{device}"
    if form not in av.formats_available and not any(form in f.split(",") for f in av.formats_available):
        raise InputError(f"{name}: this installation of PyAV has no {form} devices")
    if form == "v4l2" and not os.path.exists(device):
        raise InputError(f"{name}: there is no such camera{_devices_found(form)}")
    return form, device


def _first_device(form: str) -> str:
    found = _devices(form)
    if found:
        return found[0]
    return {"v4l2": "/dev/video0", "avfoundation": "0"}.get(form, "")


def _devices(form: str) -> list[str]:
    try:
        found = av.enumerate_input_devices(form)
    except (av.error.FFmpegError, ValueError, NotImplementedError):
        return []
    return [device.name for device in found if not device.media_types or "video" in device.media_types]


def _devices_found(form: str) -> str:
    found = _devices(form)
    return f"; found: {', '.join(found)}" if found else ", and none was found"


class _Pipe(CountedInput):
    """Standard input or a named pipe: hands over whatever is there; its first bytes may be looked at."""

    def __init__(self, file: io.FileIO) -> None:
        super().__init__(file)
        self._seen = b""

    def peek(self, size: int) -> bytes:
        """Return the first `size` bytes (less at the end), which `read` will give again."""
        while len(self._seen) < size and (data := super().read(size)):
            self._seen += data
        return self._seen

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes, empty at the end."""
        seen, self._seen = self._seen[:size], self._seen[size:]
        return seen or super().read(size)


class LiveReader(VideoReader):
    """One connection to a live source. Raises InputError if it can't be made or shows no picture.

    Iteration gives `LiveFrame` and `SoundPacket`, each as soon as it is there, at the source's own times; it
    ends when the source does, and `why_ended` then says why. Files and playlists come in real time.
    """

    def __init__(self, source: LiveSource, *, deinterlace: bool = False) -> None:
        self.live = source
        self.why_ended: str | None = None
        self._relay: Relay | None = None
        self._arrivals: deque[float] = deque()  # of the frames whose times are not known yet
        self._next = Fraction(0)  # when a frame is shown that tells no time
        kind = SourceKind.FILE if source.kind is LiveKind.FILE else SourceKind.URL
        try:
            super().__init__(Source(kind, source.shown), Trim(), deinterlace=deinterlace)
            self.tracks = tuple(_track(stream) for stream in self._sound_streams())
        except BaseException:
            self._end_relay()
            raise

    @property
    def ends(self) -> bool:
        """Return whether it is a file: it has a length, and its end is no drop-out."""
        over_http = self.live.name.startswith(("http:", "https:"))
        return self.live.kind is LiveKind.FILE or (over_http and self.info.duration is not None)

    @property
    def paced(self) -> bool:
        """Return whether it gives more at once than is due, a file or a playlist; both say when they end."""
        return self.ends or self.container.format.name in _SEGMENTED

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._end_relay()

    def __iter__(self) -> Iterator[LiveFrame | SoundPacket]:  # type: ignore[override]
        try:
            yield from self._in_real_time() if self.paced else self._arriving()
        except InputError as error:  # it goes on with a picture of another size or kind
            self.why_ended = str(error)
        except OSError as error:  # of a pipe; libav's own are told by `_demux_error`
            self.why_ended = str(error)
        if self._demux_error is not None:
            self.why_ended = self._demux_error
            if "exit requested" in self._demux_error:
                self.why_ended = f"no data for {self.live.patience:g} s"
        elif self.container.format.name in _SEGMENTED and not self._playlist_is_complete():
            self.why_ended = f"no data for {self.live.patience:g} s"  # libav calls that an end, too
        if self._relay is not None:
            self.why_ended = self._relay.why_ended() or self.why_ended

    def _playlist_is_complete(self) -> bool:
        try:
            with self._open() as again:
                return again.duration is not None
        except InputError:
            return False

    def _arriving(self) -> Iterator[LiveFrame | SoundPacket]:
        numbers = {stream.index: number for number, stream in enumerate(self._sound_streams())}
        first_sound: list[SoundPacket] | None = []
        for item in self._items():
            if isinstance(item, VideoFrame):
                frame = self._frame(item, self._stamp(item))
                yield LiveFrame(frame.pixels, frame.stamp, arrived=self._arrivals.popleft())
                yield from first_sound or ()
                first_sound = None
                continue
            number = numbers.get(item.stream_index)
            moment = item.pts if item.pts is not None else item.dts
            if number is None or moment is None or item.time_base is None:
                continue
            sound = SoundPacket(number, item, moment * item.time_base)
            if first_sound is None:
                yield sound
            else:  # nobody knows where on the output's clock it belongs until there is a picture
                first_sound.append(sound)

    def _frames(self) -> Iterator[VideoFrame | Packet]:
        for item in super()._frames():
            if isinstance(item, VideoFrame):
                self._arrivals.append(time.monotonic())
            yield item

    def _stamp(self, frame: VideoFrame) -> Stamp:
        """Say when a frame is shown: at its own time, wherever that jumps, else after the one before."""
        base = self.info.time_base
        start = self._next if frame.pts is None else frame.pts * base
        length = (frame.duration or 0) * base or 1 / self.info.rate
        self._next = start + length
        return Stamp(round(start / base), max(1, round(length / base)), base)

    def _in_real_time(self) -> Iterator[LiveFrame | SoundPacket]:
        """Give frames when their time has come, on a clock that begins with the first one."""
        zero: float | None = None
        for item in self._arriving():
            if isinstance(item, LiveFrame):
                now, place = time.monotonic(), float(item.stamp.time)
                new_clock = zero is not None and abs(zero + place - now) > _PACE_JUMP_SECONDS
                if zero is None or (new_clock and not self.ends):
                    zero = now - place
                time.sleep(max(0.0, zero + place - now))
                yield replace(item, arrived=time.monotonic())
            else:
                yield item

    def _sound_streams(self) -> list[AudioStream]:
        return [stream for stream in self.container.streams.audio if stream.codec_context is not None]

    def _open(self) -> InputContainer:
        live = self.live
        try:
            if live.kind is LiveKind.PIPE:
                return _open_pipe(live)
            if live.kind is LiveKind.FILE:
                return open_container(Source(SourceKind.FILE, live.name))
            if live.name.startswith("srt:"):
                seconds = {"patience": live.patience, "connect_seconds": live.connect_seconds}
                self._relay = Relay(live.name, sending=False, **seconds)
                return av.open(self._relay, "r", format="mpegts", options=dict(live.options))
            return av.open(
                live.name,
                format=live.format,
                options=dict(live.options),
                metadata_errors="replace",
                timeout=(live.connect_seconds, live.patience),
            )
        except (av.error.FFmpegError, OSError, ValueError) as error:
            reason = self._relay.why_ended() if self._relay is not None else None
            reason = reason or getattr(error, "strerror", None) or str(error)
            if "exit requested" in reason:
                reason = "no answer"
            raise InputError(f"{live.shown}: can't be opened ({reason})") from None

    def _end_relay(self) -> None:
        if self._relay is not None:
            self._relay.close()


def _open_pipe(live: LiveSource) -> InputContainer:
    pipe = _Pipe(io.FileIO(0, closefd=False) if live.name == STDIN else io.FileIO(live.name))
    if pipe.peek(9) == b"YUV4MPEG2":
        # One frame must be enough to start: a pipe may stall after any frame.
        options = {"probesize": "32", "analyzeduration": "0", "fpsprobesize": "0"}
        return av.open(pipe, "r", format="yuv4mpegpipe", options=options)
    return av.open(pipe, "r", options=dict(live.options), metadata_errors="replace")


def _track(stream: AudioStream) -> SoundTrack:
    """Describe a sound stream; a copy of its header in memory outlives the connection."""
    context = stream.codec_context
    assert stream.time_base is not None
    header = io.BytesIO()
    with av.open(header, "w", format="nut") as file:
        copy = file.add_stream_from_template(stream, opaque=True)
        empty = Packet(bytes(16))  # the header is written before the first packet
        empty.pts, empty.dts, empty.time_base, empty.stream = 0, 0, stream.time_base, copy
        file.mux(empty)
    header.seek(0)
    container = av.open(header, "r", format="nut")
    return SoundTrack(
        context.codec.name, context.sample_rate, context.channels, container.streams.audio[0], container
    )


__all__ = [
    "NETWORK_SCHEMES",
    "LiveFrame",
    "LiveKind",
    "LiveReader",
    "LiveSource",
    "SoundPacket",
    "SoundTrack",
    "VideoInfo",
    "resolve_live",
]
