"""Encoding: upscaled frames and the copied streams into a file, or y4m on standard output."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from enum import Enum
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, cast

import av
import av.error
import numpy as np
from av.codec.context import Flags as CodecFlags
from av.container import OutputContainer
from av.format import Flags as ContainerFlags
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from av.video.stream import VideoStream

from recavsr.errors import InputError
from recavsr.video.color import FromRgb
from recavsr.video.formats import Container, Encoding
from recavsr.video.frames import Frame, Stamp
from recavsr.video.info import VideoInfo
from recavsr.video.output import PendingOutput, write_error
from recavsr.video.packet_log import PacketLog
from recavsr.video.reader import Reader
from recavsr.video.streams import (
    StreamCopier,
    StreamPlan,
    kept_tags,
    later_timecode,
    plan_streams,
    shifted_chapters,
)


class Writer(Protocol):
    """A sink for frames and packets. Leaving the context without `finish` removes what was written."""

    warnings: list[str]

    def write(self, frame: Frame) -> None:
        """Take the next frame of the picture."""

    def pass_over(self, stamp: Stamp) -> None:
        """Take the next frame of the picture from what an earlier run encoded."""

    def copy(self, packet: Packet) -> None:
        """Take a packet of another stream."""

    def mark(self) -> None:
        """Close what later frames could build on: a later run can continue here."""

    def sync(self) -> int:
        """Bring everything up to the last mark to the disk; return the size of the log, for `resume`."""
        ...

    def resume(self, log_size: int) -> None:
        """Continue what an earlier run left in the writer's folder; before the first frame."""

    def finish(self) -> None:
        """Complete the output and give it its name."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


ENCODER_THREADS = 8
"""What x264 and x265 write depends on this number: fixed, a video is the same file on every machine."""


class _Encoder:
    """Encodes the frames of a picture. After `end` the next one knows nothing of those before it."""

    def __init__(
        self,
        info: VideoInfo,
        container: Container,
        encoding: Encoding,
        size: tuple[int, int],
        aspect: Fraction,
    ) -> None:
        self._info, self._container, self._encoding = info, container, encoding
        self._size, self._aspect = size, aspect
        self._from_rgb = FromRgb(encoding.pixel_format, encoding.color, encoding.siting)
        self._context: VideoCodecContext | None = None
        self._used = False
        self._durations: dict[int, int] = {}
        if encoding.library == "libsvtav1":
            os.environ.setdefault("SVT_LOG", "1")  # errors only: it writes to stderr past every other switch

    def encode(self, pixels: np.ndarray, stamp: Stamp) -> list[Packet]:
        """Take the next frame [H, W, 3]; return the packets that are finished."""
        if self._context is None:
            self._context = self._new_context(stamp)
        self._used = True
        picture = self._from_rgb(pixels)
        picture.pts, picture.time_base = stamp.pts, stamp.time_base
        self._durations[stamp.pts] = stamp.duration
        return self._with_durations(self._context.encode(picture))

    def end(self) -> list[Packet]:
        """Return the packets that are left."""
        if self._context is None or not self._used:
            return []
        packets = self._with_durations(self._context.encode(None))
        if self._encoding.library == "libx265":
            mend_decoding_times(packets)
        self._context, self._used = None, False
        return packets

    def adopt(self, context: VideoCodecContext, first: Stamp) -> None:
        """Encode the frames up to the next `end` with this context, that of a file's stream."""
        self._configure(context, first)
        self._context = context

    def _new_context(self, first: Stamp) -> VideoCodecContext:
        """Return a context like that of a file's stream."""
        context = cast(VideoCodecContext, av.CodecContext.create(self._encoding.library, "w"))
        context.bit_rate = 0
        if av.ContainerFormat(self._container.muxer, "w").flags & _flag(ContainerFlags.global_header):
            context.flags |= _flag(CodecFlags.global_header)
        context.framerate = self._info.rate
        context.options = dict(self._encoding.options)
        self._configure(context, first)
        return context

    def _configure(self, context: VideoCodecContext, first: Stamp) -> None:
        encoding = self._encoding
        context.thread_count = ENCODER_THREADS
        context.height, context.width = self._size
        context.pix_fmt = encoding.pixel_format
        context.time_base = first.time_base
        context.sample_aspect_ratio = self._aspect
        context.color_range, context.colorspace = encoding.color.range, encoding.color.matrix
        context.color_primaries, context.color_trc = encoding.color.primaries, encoding.color.transfer
        if encoding.codec == "hevc" and self._container.muxer in ("mp4", "mov"):
            context.codec_tag = "hvc1"  # the tag that Apple's players want

    def _with_durations(self, packets: list[Packet]) -> list[Packet]:
        for packet in packets:
            if packet.pts is not None:
                packet.duration = self._durations.pop(packet.pts, packet.duration or 0)
        return packets


def mend_decoding_times(packets: list[Packet]) -> None:
    """Give the last packets of an encoder decoding times where it gave none that can be.

    x265 subtracts a delay that it never measured where a run has fewer frames than it reorders: the times are
    then whatever was in memory.
    """
    shown = sorted(packet.pts for packet in packets if packet.pts is not None)
    if len(shown) != len(packets) or not packets:
        return
    reach = shown[-1] - shown[0] + 16 * max(packet.duration or 0 for packet in packets)
    if all(p.dts is not None and shown[0] - reach <= p.dts <= cast(int, p.pts) for p in packets):
        return
    delay = max(time - cast(int, packet.pts) for time, packet in zip(shown, packets))
    for time, packet in zip(shown, packets):
        packet.dts = time - delay


class VideoWriter:
    """Writes a video file (or standard output, if `path` is None) from a reader's frames and packets.

    With a `folder` the file is made there, and the encoded picture is logged beside it, to be resumed.
    """

    def __init__(
        self,
        path: Path | None,
        reader: Reader,
        container: Container,
        encoding: Encoding,
        size: tuple[int, int],
        sample_aspect: Fraction,
        *,
        overwrite: bool = False,
        folder: Path | None = None,
    ) -> None:
        if path is None and sys.stdout.isatty():
            raise InputError("the output is a terminal: send it to a file or a pipe")
        self._name = "standard output" if path is None else str(path)
        self._pending = None if path is None else PendingOutput(path, overwrite=overwrite, place=folder)
        self._log_path = None if folder is None else folder / "packets"
        self._log: PacketLog | None = None
        self._reader = reader
        self._container = container
        self._encoding = encoding
        self._encoder = _Encoder(reader.info, container, encoding, size, sample_aspect)
        self._last_dts: int | None = None
        self._count = 0
        self._output: OutputContainer | None = None
        self._done = False
        self.warnings: list[str] = []

    # -- frames and packets ----------------------------------------------------------------------------

    def write(self, frame: Frame) -> None:
        """Encode one frame [H, W, 3]; the first one opens the file."""
        try:
            self._take(self._encoder.encode(frame.pixels, self._next(frame.stamp)))
            self._copier.release(frame.stamp.end)
        except (av.error.FFmpegError, OSError) as error:
            raise write_error(self._name, error) from None

    def pass_over(self, stamp: Stamp) -> None:
        """Take a frame from the log: encoders give one packet a frame."""
        assert self._log is not None
        try:
            self._next(stamp)
            packet = self._log.read()
            if packet is not None:
                self._mux(packet)
            self._copier.release(stamp.end)
        except (av.error.FFmpegError, OSError) as error:
            raise write_error(self._name, error) from None

    def mark(self) -> None:
        """Let the encoder finish; the next frame gets a new one, which knows nothing of the frames before."""
        try:
            self._take(self._encoder.end())
        except (av.error.FFmpegError, OSError) as error:
            raise write_error(self._name, error) from None

    def sync(self) -> int:
        """Bring the log to the disk and return its size."""
        assert self._log is not None
        return self._log.sync()

    def resume(self, log_size: int) -> None:
        """Open the log: the frames in its first `log_size` bytes will be passed over."""
        if self._log_path is not None:
            try:
                self._log = PacketLog(self._log_path, log_size)
            except OSError as error:
                raise write_error(self._name, error) from None

    def copy(self, packet: Packet) -> None:
        """Take a packet of another stream of the source."""
        self._early.append(packet) if self._output is None else self._copier.take(packet, self._reader.shift)

    def finish(self) -> None:
        """Write what is left and give the file its name."""
        assert self._output is not None, "no frame was written"
        self.mark()
        try:
            self._copier.release(self._reader.end)
            self._copier.drop_rest()
            self.warnings += self._copier.warnings()
            self._output.close()
        except (av.error.FFmpegError, OSError) as error:
            raise write_error(self._name, error) from None
        if self._pending is not None:
            self._pending.commit()
        self._done = True

    def __enter__(self) -> Self:
        self._early: list[Packet] = []
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.close()
        if self._done:
            return
        if self._output is not None:
            with contextlib.suppress(av.error.FFmpegError, OSError):
                self._output.close()  # the file is thrown away
        if self._pending is not None:
            self._pending.discard()

    # -- opening ---------------------------------------------------------------------------------------

    def _next(self, stamp: Stamp) -> Stamp:
        """Count a frame, with the first one open the file; return its time in the file."""
        if not self._container.times:
            stamp = Stamp(self._count, 1, 1 / self._reader.info.rate)
        if self._output is None:
            self._open(stamp)
        self._count += 1
        return stamp

    def _open(self, first: Stamp) -> None:
        reader, container = self._reader, self._container
        options = dict(container.options)
        if self._pending is None:
            options["flush_packets"] = "1"
        if container.muxer in ("mp4", "mov"):
            options["movie_timescale"] = str(_movie_timescale(first.time_base))
        target = "pipe:1" if self._pending is None else f"file:{self._pending.path}"
        output = av.open(target, "w", format=container.muxer, options=options)
        self._copier = StreamCopier(output)
        others = StreamPlan((), (), (), ())
        if reader.container is not None:
            others = plan_streams(reader.info, reader.container, container)
            self.warnings += others.lost
        for index in sorted([*others.copied, *others.converted, *others.attached, reader.info.stream_index]):
            if index == reader.info.stream_index:
                self._video = self._add_video(output, first)
                continue
            assert reader.container is not None
            template = reader.container.streams[index]
            if index in others.copied:
                self._copier.add(template)
            elif index in others.attached:
                if not self._copier.attach(template, self._early):
                    self.warnings.append(
                        f"cover picture {index} is left out: it was not found at the beginning"
                    )
            else:
                assert container.subtitles is not None
                self._copier.convert(template, container.subtitles)
        output.metadata.update(self._tags(reader.info.metadata))
        self._set_chapters(output)
        self._output = output
        output.start_encoding()
        for packet in self._early:
            self._copier.take(packet, reader.shift)
        self._early.clear()

    def _add_video(self, output: OutputContainer, first: Stamp) -> VideoStream:
        encoding, info = self._encoding, self._reader.info
        added = output.add_stream(
            encoding.library, rate=info.rate, options=dict(encoding.options), time_base=first.time_base
        )
        stream = cast(VideoStream, added)
        self._encoder.adopt(stream.codec_context, first)
        stream.metadata.update(self._tags(info.video_metadata))
        return stream

    def _tags(self, tags: dict[str, str]) -> dict[str, str]:
        """Return the tags for the new file; the timecode is that of its first frame."""
        info, shift = self._reader.info, self._reader.shift
        skipped = round((-shift - info.start_time) * info.rate) if shift < 0 else 0
        return later_timecode(kept_tags(tags), skipped, info.rate)

    def _set_chapters(self, output: OutputContainer) -> None:
        reader = self._reader
        chapters = shifted_chapters(reader.info.chapters, reader.shift, None)
        if not chapters:
            return
        if self._container.chapters:
            output.set_chapters(cast(Any, chapters))
        else:
            self.warnings.append(f"{self._container.suffix} can't hold chapters, they are left out; .mkv can")

    def _take(self, packets: list[Packet]) -> None:
        """Log and mux what the encoder gives."""
        for packet in packets:
            if self._log is not None:
                # Whether it comes from the encoder or from the log must not show in the file.
                packet = self._log.append(packet)
            self._mux(packet)

    def _mux(self, packet: Packet) -> None:
        assert self._output is not None
        # A new encoder sets its first decoding times back by its delay, as it takes the frame rate to be. The
        # times of the frames that its predecessor delayed are free: counting on from the last always fits.
        if packet.dts is not None:
            if self._last_dts is not None and packet.dts <= self._last_dts:
                packet.dts = self._last_dts + 1
            self._last_dts = packet.dts
        packet.stream = self._video
        self._output.mux(packet)


class ShotsWriter:
    """Encodes a run of shots into a packet log of their own, from which a VideoWriter can take them.

    The log has its name `path` when it is complete; whoever makes the same shots twice may write it twice.
    """

    def __init__(
        self,
        path: Path,
        reader: Reader,
        container: Container,
        encoding: Encoding,
        size: tuple[int, int],
        sample_aspect: Fraction,
    ) -> None:
        self._pending = PendingOutput(path, overwrite=True)
        self._encoder = _Encoder(reader.info, container, encoding, size, sample_aspect)
        self.warnings: list[str] = []

    def write(self, frame: Frame) -> None:
        """Encode one frame [H, W, 3]."""
        self._append(lambda: self._encoder.encode(frame.pixels, frame.stamp))

    def pass_over(self, stamp: Stamp) -> None:
        """Leave out a frame of an earlier shot."""

    def copy(self, packet: Packet) -> None:
        """Leave out what is not of the picture."""

    def mark(self) -> None:
        """Let the encoder finish."""
        self._append(self._encoder.end)

    def sync(self) -> int:
        """Bring the log to the disk and return its size."""
        return self._log.sync()

    def resume(self, log_size: int) -> None:
        """Runs of shots are begun afresh."""

    def finish(self) -> None:
        """Write what is left and give the log its name."""
        self.mark()
        self.sync()
        self._log.close()
        self._pending.commit()

    def __enter__(self) -> Self:
        try:
            self._log = PacketLog(self._pending.path)
        except OSError as error:
            raise write_error(self._pending.final, error) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self._log.close()
        self._pending.discard()

    def _append(self, encode: Callable[[], list[Packet]]) -> None:
        try:
            for packet in encode():
                self._log.append(packet)
        except (av.error.FFmpegError, OSError) as error:
            raise write_error(self._pending.final, error) from None


def _flag(flag: Enum) -> int:
    return cast(int, flag.value)  # PyAV's type hints say that it is the flag itself


def _movie_timescale(time_base: Fraction) -> int:
    """Return the clock of MP4 edit lists: a multiple of the picture's, so that its start is exact, and fine
    enough for that of sound; the usual 1/1000 s, rounded down, moves both.
    """
    ticks = min(time_base.denominator, 1_000_000)
    return ticks * -(-90_000 // ticks)
