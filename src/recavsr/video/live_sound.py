"""Sound of a live stream: copied where the output can carry it, else decoded and encoded again."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from typing import Literal, cast

import av
import av.error
from av.audio.codeccontext import AudioCodecContext
from av.audio.resampler import AudioResampler
from av.audio.stream import AudioStream
from av.container import OutputContainer
from av.packet import Packet
from av.stream import Stream

from recavsr.video.formats import Container
from recavsr.video.live_source import SoundTrack
from recavsr.video.streams import can_hold

SoundPolicy = Literal["copy", "encode", "none"]

# What may be copied into formats whose muxers also take what no player finds in them.
_SOUND_CODECS = {
    "flv": {"aac", "mp3", "mp3float"},
    "mpegts": {"aac", "mp2", "mp2float", "mp3", "mp3float", "ac3", "eac3", "opus", "libopus"},
    "hls": {"aac", "mp3", "mp3float", "ac3", "eac3"},
}

_BITS = 160_000


def carries(container: Container, track: SoundTrack) -> bool:
    """Say whether players find this track's codec in the container."""
    listed = _SOUND_CODECS.get(container.muxer)
    return track.codec in listed if listed is not None else can_hold(container, track.template)


class SoundCopy:
    """Sound that is copied, packet by packet."""

    def __init__(self, output: OutputContainer, container: Container, track: SoundTrack) -> None:
        self._track = track
        self._stream: Stream = output.add_stream_from_template(track.template, opaque=True)
        self._last: Fraction | None = None

    def __call__(self, packet: Packet) -> Iterator[Packet]:
        """Yield the packet for the output, unless its time is taken."""
        start = packet.dts if packet.dts is not None else packet.pts
        assert start is not None
        assert packet.time_base is not None
        if self._last is None or start * packet.time_base > self._last:  # else two connections overlap
            self._last = start * packet.time_base
            packet.stream = self._stream
            yield packet

    def follows(self, track: SoundTrack) -> bool:
        """Say whether packets of `track` can follow."""
        return self._track.same_form(track)

    def rest(self) -> Iterator[Packet]:
        """Yield what is left at the end: nothing."""
        yield from ()


class SoundEncoder:
    """Sound that the output can't carry as it is: decoded, and encoded as AAC (Opus in WebM)."""

    def __init__(self, output: OutputContainer, container: Container, track: SoundTrack) -> None:
        codec = "libopus" if container.muxer == "webm" else "aac"
        layout = "mono" if track.channels == 1 else "stereo"
        rate = 48000 if codec == "libopus" or track.rate not in (32000, 44100, 48000) else track.rate
        self._stream = cast(AudioStream, output.add_stream(codec, rate=rate, layout=layout))
        context = cast(AudioCodecContext, self._stream.codec_context)
        context.bit_rate = _BITS
        if container.muxer == "flv":
            context.flags |= av.codec.context.Flags.global_header
        self._layout, self._rate = layout, rate
        self._last: int | None = None
        self.follows(track)

    def follows(self, track: SoundTrack) -> bool:
        """Go on with a track of any form."""
        self._decoder = track.decoder()
        self._resampler: AudioResampler | None = None
        return True

    def __call__(self, packet: Packet) -> Iterator[Packet]:
        """Yield the encoder's packets for what the packet holds."""
        try:
            frames = self._decoder.decode(packet)
        except av.error.FFmpegError:  # a damaged packet is a short silence
            return
        for frame in frames:
            if self._resampler is None:
                context = self._stream.codec_context
                size = context.frame_size or 960
                self._resampler = AudioResampler(context.format, self._layout, self._rate, frame_size=size)
            for piece in self._resampler.resample(frame):
                yield from self._encoded(piece)

    def rest(self) -> Iterator[Packet]:
        """Yield what the encoder still holds."""
        if self._last is not None:
            yield from self._stream.encode(None)

    def _encoded(self, frame: av.AudioFrame) -> Iterator[Packet]:
        if self._last is None or frame.pts is None or frame.pts > self._last:
            self._last = frame.pts if frame.pts is not None else self._last
            yield from self._stream.encode(frame)
