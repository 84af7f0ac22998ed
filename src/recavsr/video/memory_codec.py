"""Pixels in and out of codecs without a file in between: what training data needs of PyAV.

`code_clip` pushes a clip through an encoder and its decoder in memory (the compression damage of
RealBasicVSR's degradation); `decode_planes` reads a file's luma and chroma planes, 8-bit 4:2:0 as they are,
`decode_planes_from` a part of a file.

T frames, H W rows and columns of the luma plane (both even in `code_clip`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal

import av
import av.error
import numpy as np
from av.container import InputContainer
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream

from recavsr.errors import InputError
from recavsr.video.color import ACCURATE
from recavsr.video.source import is_picture, natural_order

_DECODER = {"libx264": "h264", "mpeg4": "mpeg4"}


def code_clip(
    planes: np.ndarray,
    codec: str,
    *,
    crf: float | None = None,
    bits_per_frame: float | None = None,
    speed: str = "fast",
    rate: Fraction | int = 1,
) -> np.ndarray:
    """Encode and decode a clip in memory.

    planes: uint8 [T, H*3/2, W], planar 4:2:0 (Y rows, then U, then V). codec: "libx264" or "mpeg4".
    Rate: `crf` (libx264 only) or `bits_per_frame`, never both. speed: libx264's preset.
    rate: frames a second; x264 spends far more bits at one crf when frames last longer.
    Returns the decoded planes, same shape. One thread, so the result depends on the input alone.
    """
    frames, rows, width = planes.shape
    height = rows * 2 // 3
    encoder = _context(codec, "w")
    encoder.width, encoder.height, encoder.pix_fmt = width, height, "yuv420p"
    encoder.time_base = 1 / Fraction(rate)
    encoder.framerate = Fraction(rate)
    encoder.thread_count = 1
    options = {}
    if codec == "libx264":
        # Without mb-tree, whose lookahead makes x264's output vary from run to run.
        options = {"preset": speed, "x264-params": "threads=1:mbtree=0"}
        if crf is not None:
            options["crf"] = f"{crf:g}"
    if bits_per_frame is not None:
        encoder.bit_rate = max(int(bits_per_frame * rate), 1000)  # x264 refuses less
    encoder.options = options

    decoder = _context(_DECODER[codec], "r")
    decoder.thread_count = 1
    packets = []
    for index in range(frames):
        frame = av.VideoFrame.from_ndarray(planes[index], format="yuv420p")
        frame.pts = index
        packets += encoder.encode(frame)
    packets += encoder.encode(None)
    decoded = [frame for packet in packets for frame in decoder.decode(packet)]
    decoded += decoder.decode(None)
    if len(decoded) != frames:
        raise RuntimeError(f"{codec} gave {len(decoded)} frames for {frames}")
    return np.stack([frame.to_ndarray() for frame in decoded])


def _context(codec: str, mode: Literal["r", "w"]) -> av.VideoCodecContext:
    context = av.CodecContext.create(codec, mode)
    assert isinstance(context, av.VideoCodecContext)
    return context


@dataclass(frozen=True)
class Planes:
    """A decoded frame: luma uint8 [H, W], chroma uint8 [H/2, W/2] (rounded up) or [H, W], how to read it."""

    luma: np.ndarray
    blue: np.ndarray
    red: np.ndarray
    full_range: bool
    matrix: str  # "bt709" or "bt601"
    pts: int | None = None  # in the stream's own time base
    is_keyframe: bool = False

    def crop(self, y: int, x: int, rows: int, columns: int) -> Planes:
        """A part of the frame; y and x even."""
        luma = (slice(y, y + rows), slice(x, x + columns))
        chroma = luma
        if self.blue.shape != self.luma.shape:
            chroma = (slice(y // 2, (y + rows + 1) // 2), slice(x // 2, (x + columns + 1) // 2))
        return replace(self, luma=self.luma[luma], blue=self.blue[chroma], red=self.red[chroma])


def _crop(plane: av.video.plane.VideoPlane, height: int, width: int) -> np.ndarray:
    flat = np.frombuffer(memoryview(plane), np.uint8)
    return flat.reshape(-1, plane.line_size)[:height, :width].copy()


def decode_planes(path: Path | str) -> Iterator[Planes]:
    """Decode the first video stream (or the picture) of a file, or a folder of numbered pictures.

    8-bit 4:2:0 comes as it is, everything else as 8-bit 4:4:4 (RGB by full-range BT.601). The matrix is
    BT.709 where the file says so, or says nothing and is a video of 720 rows or more. Raises InputError
    for a file that can not be read.
    """
    path = Path(path)
    if path.is_dir():
        for picture in sorted(filter(is_picture, path.iterdir()), key=natural_order):
            yield from decode_planes(picture)
        return
    with _opened(path) as (container, stream):
        to_444 = VideoReformatter()
        for frame in container.decode(stream):
            yield _planes(frame, to_444)


def decode_planes_from(
    path: Path | str, first: int, keyframe: tuple[int, int] | None = None
) -> Iterator[Planes]:
    """Decode a video like `decode_planes`, from frame number `first` on.

    keyframe: number and pts of a keyframe at or before `first`, where decoding can begin; without one, or
    where the file can't be entered there, it is decoded from its beginning. Raises InputError for a file
    that can not be read, and at a damaged frame.
    """
    path = Path(path)
    if path.is_dir():
        pictures = sorted(filter(is_picture, path.iterdir()), key=natural_order)
        for picture in pictures[first:]:
            yield from decode_planes(picture)
        return
    with _opened(path) as (container, stream):
        frames, number = _entered(container, stream, keyframe), keyframe[0] if keyframe else 0
        if frames is None:
            container.seek(0, stream=stream)
            frames, number = container.decode(stream), 0
        to_444 = VideoReformatter()
        for frame in itertools.islice(frames, first - number, None):
            if frame.is_corrupt:
                raise InputError(f"{path}: damaged at {frame.time} s")
            yield _planes(frame, to_444)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open a file's first video stream, decoded by one thread; what can't be read is an InputError."""
    try:
        with av.open(str(path)) as container:
            if not container.streams.video:
                raise InputError(f"{path}: there is no picture in it")
            stream = container.streams.video[0]
            stream.thread_count = 1
            yield container, stream
    except (av.error.FFmpegError, OSError) as error:
        raise InputError(f"{path}: can't be read ({error})") from error


def _entered(
    container: InputContainer, stream: VideoStream, keyframe: tuple[int, int] | None
) -> Iterator[av.VideoFrame] | None:
    """The frames from a keyframe on, or None where seeking does not lead there."""
    if keyframe is None:
        return None
    pts = keyframe[1]
    try:
        container.seek(pts, stream=stream)
        frames = container.decode(stream)
        # Before the keyframe itself may come frames shown earlier that refer to what was not decoded.
        for frame in frames:
            if frame.pts is None or frame.pts > pts:
                return None
            if frame.pts == pts:
                return itertools.chain([frame], frames)
    except av.error.FFmpegError:
        pass
    return None


_SWS_BT601 = 5


def _planes(frame: av.VideoFrame, to_444: VideoReformatter) -> Planes:
    height, width = frame.height, frame.width
    pts, is_keyframe = frame.pts, bool(frame.key_frame)
    name = frame.format.name
    full = name.startswith("yuvj") or int(frame.color_range) == 2
    space = int(frame.colorspace)
    matrix = "bt709" if space == 1 or (space == 2 and not full and height >= 720) else "bt601"
    half = ((height + 1) // 2, (width + 1) // 2)
    if name not in ("yuv420p", "yuvj420p"):
        half = (height, width)
        if frame.format.is_rgb or frame.format.has_palette:
            full, matrix = True, "bt601"
            frame = to_444.reformat(
                frame,
                format="yuv444p",
                src_color_range=2,
                dst_colorspace=_SWS_BT601,
                dst_color_range=2,
                interpolation=ACCURATE,
            )
        else:
            value = 2 if full else 1
            frame = to_444.reformat(
                frame, format="yuv444p", src_color_range=value, dst_color_range=value, interpolation=ACCURATE
            )
    luma, blue, red = frame.planes
    parts = (_crop(luma, height, width), _crop(blue, *half), _crop(red, *half))
    return Planes(*parts, full, matrix, pts, is_keyframe)
