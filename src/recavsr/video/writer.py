"""Encoding: upscaled frames and the copied streams into a file, or y4m on standard output."""

from __future__ import annotations

import contextlib
import sys
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self, cast

import av
import av.error
from av.container import OutputContainer
from av.packet import Packet
from av.video.stream import VideoStream

from recavsr.errors import InputError
from recavsr.video.color import FromRgb
from recavsr.video.formats import Container, Encoding
from recavsr.video.frames import Frame, Stamp
from recavsr.video.output import PendingOutput, write_error
from recavsr.video.reader import Reader
from recavsr.video.streams import StreamCopier, kept_tags, shifted_chapters, split_streams


class Writer(Protocol):
    """A sink for frames and packets. Leaving the context without `finish` removes what was written."""

    warnings: list[str]

    def write(self, frame: Frame) -> None:
        """Take the next frame of the picture."""

    def copy(self, packet: Packet) -> None:
        """Take a packet of another stream."""

    def finish(self) -> None:
        """Complete the output and give it its name."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class VideoWriter:
    """Writes a video file (or standard output, if `path` is None) from a reader's frames and packets."""

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
    ) -> None:
        if path is None and sys.stdout.isatty():
            raise InputError("the output is a terminal: send it to a file or a pipe")
        self._name = "standard output" if path is None else str(path)
        self._pending = None if path is None else PendingOutput(path, overwrite=overwrite)
        self._reader = reader
        self._container = container
        self._encoding = encoding
        self._size = size
        self._sample_aspect = sample_aspect
        self._from_rgb = FromRgb(encoding.pixel_format, encoding.color)
        self._durations: dict[int, int] = {}
        self._count = 0
        self._output: OutputContainer | None = None
        self._done = False
        self.warnings: list[str] = []

    # -- frames and packets ----------------------------------------------------------------------------

    def write(self, frame: Frame) -> None:
        """Encode one frame [H, W, 3]; the first one opens the file."""
        try:
            stamp = frame.stamp
            if not self._container.times:
                stamp = Stamp(self._count, 1, 1 / self._reader.info.rate)
            if self._output is None:
                self._open(stamp)
            picture = self._from_rgb(frame.pixels)
            picture.pts, picture.time_base = stamp.pts, stamp.time_base
            self._durations[stamp.pts] = stamp.duration
            self._count += 1
            self._mux(self._video.encode(picture))
            self._copier.release(frame.stamp.end)
        except (av.error.FFmpegError, OSError) as error:
            raise write_error(self._name, error) from None

    def copy(self, packet: Packet) -> None:
        """Take a packet of another stream of the source."""
        self._early.append(packet) if self._output is None else self._copier.take(packet, self._reader.shift)

    def finish(self) -> None:
        """Write what is left and give the file its name."""
        assert self._output is not None, "no frame was written"
        try:
            self._mux(self._video.encode(None))
            self._copier.release(self._reader.end)
            self._copier.drop_rest()
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
        if self._done:
            return
        if self._output is not None:
            with contextlib.suppress(av.error.FFmpegError, OSError):
                self._output.close()  # the file is thrown away
        if self._pending is not None:
            self._pending.discard()

    # -- opening ---------------------------------------------------------------------------------------

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
        copied: list[int] = []
        if reader.container is not None:
            copied, lost = split_streams(reader.info, reader.container, container)
            self.warnings += lost
        for index in sorted([*copied, reader.info.stream_index]):
            if index == reader.info.stream_index:
                self._video = self._add_video(output, first)
            else:
                assert reader.container is not None
                self._copier.add(reader.container.streams[index])
        output.metadata.update(kept_tags(reader.info.metadata))
        self._set_chapters(output)
        self._output = output
        output.start_encoding()
        for packet in self._early:
            self._copier.take(packet, reader.shift)
        self._early.clear()

    def _add_video(self, output: OutputContainer, first: Stamp) -> VideoStream:
        encoding, info = self._encoding, self._reader.info
        height, width = self._size
        added = output.add_stream(
            encoding.library, rate=info.rate, options=dict(encoding.options), time_base=first.time_base
        )
        stream = cast(VideoStream, added)
        context = stream.codec_context
        context.width, context.height = width, height
        context.pix_fmt = encoding.pixel_format
        context.time_base = first.time_base
        context.sample_aspect_ratio = self._sample_aspect
        context.color_range, context.colorspace = encoding.color.range, encoding.color.matrix
        context.color_primaries, context.color_trc = encoding.color.primaries, encoding.color.transfer
        if encoding.codec == "hevc" and self._container.muxer in ("mp4", "mov"):
            context.codec_tag = "hvc1"  # the tag that Apple's players want
        stream.metadata.update(kept_tags(info.video_metadata))
        return stream

    def _set_chapters(self, output: OutputContainer) -> None:
        reader = self._reader
        chapters = shifted_chapters(reader.info.chapters, reader.shift, None)
        if not chapters:
            return
        if self._container.chapters:
            output.set_chapters(cast(Any, chapters))
        else:
            self.warnings.append(f"{self._container.suffix} can't hold chapters, they are left out; .mkv can")

    def _mux(self, packets: list[Packet]) -> None:
        assert self._output is not None
        for packet in packets:
            if packet.pts is not None:
                packet.duration = self._durations.pop(packet.pts, packet.duration or 0)
            self._output.mux(packet)


def _movie_timescale(time_base: Fraction) -> int:
    """Return the clock of MP4 edit lists: a multiple of the picture's, so that its start is exact, and fine
    enough for that of sound; the usual 1/1000 s, rounded down, moves both.
    """
    ticks = min(time_base.denominator, 1_000_000)
    return ticks * -(-90_000 // ticks)
