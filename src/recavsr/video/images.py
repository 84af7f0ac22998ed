"""Picture files: reading numbered pictures as a video, writing pictures."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Self

import av
import av.error
import numpy as np
from av.container import InputContainer
from av.packet import Packet
from av.video.frame import VideoFrame

from recavsr.errors import InputError
from recavsr.video.color import MATRIX_BT470BG, RANGE_FULL, ColorTags, FromRgb
from recavsr.video.frames import Frame, Passed, Stamp, same_depth
from recavsr.video.info import DEFAULT_RATE
from recavsr.video.output import PendingFiles, PendingOutput, sync, write_error
from recavsr.video.reader import Trim, VideoReader
from recavsr.video.source import Source, SourceKind
from recavsr.video.transfer import SRGB, linear_light

WRITABLE_SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp", ".exr")
ALPHA_SUFFIXES = (".png", ".tif", ".tiff", ".exr")
"""Pictures that can be transparent."""

_NUMBER = re.compile(r"%0?(\d*)d")

# encoder, pixel format for 8 bits, pixel format for more
_PICTURE_CODECS = {
    ".png": ("png", "rgb24", "rgb48be"),
    ".tif": ("tiff", "rgb24", "rgb48le"),
    ".tiff": ("tiff", "rgb24", "rgb48le"),
    ".bmp": ("bmp", "bgr24", "bgr24"),
    ".jpg": ("mjpeg", "yuvj444p", "yuvj444p"),
    ".jpeg": ("mjpeg", "yuvj444p", "yuvj444p"),
    ".webp": ("libwebp", "yuv420p", "yuv420p"),
}
_ALPHA_FORMATS = {"png": ("rgba", "rgba64be"), "tiff": ("rgba", "rgba64le")}
_JPEG_COLOR = ColorTags(range=RANGE_FULL, matrix=MATRIX_BT470BG)
_WEBP_COLOR = ColorTags(range=1, matrix=MATRIX_BT470BG)


class SequenceReader:
    """Reads numbered pictures as a video of 25 frames a second."""

    def __init__(self, source: Source, trim: Trim) -> None:
        self.source = source
        self.cut_short: str | None = None
        self.container: InputContainer | None = None
        self.end: Fraction | None = None
        self.passed = 0
        self.keep_alpha = False
        rate = DEFAULT_RATE
        first = 0 if trim.start is None else -int(-trim.start * rate // 1)
        self.shift = -first / rate
        count = len(source.pictures) - first
        if trim.duration is not None:
            count = min(count, -int(-trim.duration * rate // 1))
        if trim.frames is not None:
            count = min(count, trim.frames)
        if count < 1:
            raise InputError(f"{source.name}: there is no picture in the chosen range")
        self._pictures = source.pictures[first : first + count]
        self._named = len({path.stem for path in source.pictures}) == len(source.pictures)
        with _open_picture(self._pictures[0]) as picture:
            still = picture.info
        self.info = replace(
            still,
            source=source.name,
            kind=SourceKind.SEQUENCE,
            time_base=1 / rate,
            rate=rate,
            frame_count=count,
            start_time=Fraction(0),
            origin=Fraction(0),
            duration=count / rate,
        )
        self.warnings: list[str] = [*still.warnings, *_gaps(source.pictures)]

    def __iter__(self) -> Iterator[Frame | Passed | Packet]:
        for number, path in enumerate(self._pictures):
            stamp = Stamp(number, 1, self.info.time_base)
            if number < self.passed:
                yield Passed(stamp)
                continue
            try:
                frame = self._read(path)
            except InputError as error:
                if number == 0:
                    raise
                self.cut_short = f"picture {number + 1} of {len(self._pictures)} can't be used: {error}"
                return
            yield replace(frame, stamp=stamp, name=path.stem if self._named else None)

    def _read(self, path: Path) -> Frame:
        with _open_picture(path) as picture:
            picture.keep_alpha = self.keep_alpha
            if picture.info.size != self.info.size:
                (height, width), (first_height, first_width) = picture.info.size, self.info.size
                raise InputError(
                    f"{path}: is {width}x{height}, the first picture is {first_width}x{first_height}"
                )
            frame = next(item for item in picture if isinstance(item, Frame))
        alpha = None if frame.alpha is None else same_depth(frame.alpha, deep=self.info.deep)
        return replace(frame, pixels=same_depth(frame.pixels, deep=self.info.deep), alpha=alpha)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def _gaps(pictures: Sequence[Path]) -> list[str]:
    """Return a line if numbers are missing in the names, which end in numbers and are alike otherwise."""
    found = [re.fullmatch(r"(.*?)(\d+)", path.stem) for path in pictures]
    numbers = {int(name[2]) for name in found if name is not None}
    if None in found or len({name[1] for name in found if name is not None}) > 1:
        return []
    missing = max(numbers) - min(numbers) + 1 - len(numbers)
    between = f"between {pictures[0].name} and {pictures[-1].name}"
    return [f"{missing} numbers {between} have no picture: the others follow one another"] if missing else []


def _open_picture(path: Path) -> VideoReader:
    return VideoReader(Source(SourceKind.STILL, str(path)), Trim())


def encode_picture(
    pixels: np.ndarray, suffix: str, alpha: np.ndarray | None = None, transfer: int = SRGB
) -> bytes:
    """Return the bytes of a picture file of RGB pixels [H, W, 3], uint8 or uint16.

    `alpha` [h, w] is brought to their size (bicubic). EXR holds linear light (half floats, multiplied by
    alpha): `transfer` says what the code values are.
    """
    if alpha is not None:
        alpha = _sized(alpha, (pixels.shape[0], pixels.shape[1]))
    if suffix == ".exr":
        return _encode_exr(pixels, alpha, transfer)
    codec, pixel_format, deep_format = _PICTURE_CODECS[suffix]
    deep = pixels.dtype == np.uint16
    if alpha is not None:
        straight = VideoFrame.from_ndarray(np.dstack([pixels, alpha]), format="rgba64le" if deep else "rgba")
        return _encoded(straight.reformat(format=_ALPHA_FORMATS[codec][deep]), codec)
    chosen = deep_format if deep else pixel_format
    colors = {"mjpeg": _JPEG_COLOR, "libwebp": _WEBP_COLOR}.get(codec, ColorTags(range=RANGE_FULL, matrix=0))
    return _encoded(FromRgb(chosen, colors)(pixels), codec, color_range=colors.range)


def _sized(alpha: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    if alpha.shape == size:
        return alpha
    frame = VideoFrame.from_ndarray(alpha, format="gray16le" if alpha.dtype == np.uint16 else "gray")
    return frame.reformat(size[1], size[0], interpolation="BICUBIC").to_ndarray()


def _encode_exr(pixels: np.ndarray, alpha: np.ndarray | None, transfer: int) -> bytes:
    light = linear_light(pixels, transfer)
    if alpha is not None:
        cover = (alpha / np.iinfo(alpha.dtype).max).astype(np.float32)[..., None]
        light = np.dstack([light * cover, cover])
    frame = VideoFrame.from_ndarray(light, format="gbrpf32le" if alpha is None else "gbrapf32le")
    return _encoded(frame, "exr", options={"format": "half", "compression": "zip16"})


def _encoded(
    frame: VideoFrame, codec: str, *, color_range: int = RANGE_FULL, options: dict[str, str] | None = None
) -> bytes:
    context = av.CodecContext.create(codec, "w")
    assert isinstance(context, av.VideoCodecContext)
    context.width, context.height, context.pix_fmt = frame.width, frame.height, frame.format.name
    context.time_base = Fraction(1, 25)
    context.color_range = color_range
    context.options = options or {}
    if codec == "mjpeg":
        context.qmin = context.qmax = 2
    frame.pts = 0
    return b"".join(bytes(packet) for packet in [*context.encode(frame), *context.encode(None)])


class _PendingPictures:
    """What both writers of pictures share: nothing has its final name before the end."""

    _pending: PendingOutput | PendingFiles

    def pass_over(self, stamp: Stamp) -> None:
        """Count a frame whose picture is there already."""

    def copy(self, packet: Packet) -> None:
        """Pictures hold no other streams."""

    def mark(self) -> None:
        """Every picture stands on its own."""

    def sync(self) -> int:
        """Pictures have no log."""
        return 0

    def resume(self, log_size: int) -> None:
        """Go on behind the pictures that are there."""

    def finish(self) -> None:
        """Give what was written its final name."""
        self._pending.commit()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pending.discard()


class PictureWriter(_PendingPictures):
    """Writes the one frame of a still picture."""

    _pending: PendingOutput

    def __init__(self, path: Path, *, overwrite: bool = False, transfer: int = SRGB) -> None:
        self._pending = PendingOutput(path, overwrite=overwrite)
        self._transfer = transfer
        self._suffix = path.suffix.lower()
        self.warnings: list[str] = []

    def write(self, frame: Frame) -> None:
        """Write the picture."""
        try:
            data = encode_picture(frame.pixels, self._suffix, frame.alpha, self._transfer)
            self._pending.path.write_bytes(data)
        except (OSError, av.error.FFmpegError) as error:
            raise write_error(self._pending.final, error) from None


class SequenceWriter(_PendingPictures):
    """Writes every frame as a picture file into a folder, or under a pattern like out/f_%05d.png."""

    _pending: PendingFiles

    def __init__(
        self,
        target: Path,
        *,
        overwrite: bool = False,
        folder: Path | None = None,
        transfer: int = SRGB,
    ) -> None:
        self._transfer = transfer
        number = _NUMBER.search(target.name)
        self._pattern = target.name if number else None
        goal = target.parent if number else target
        if not number and target.exists() and not target.is_dir():
            raise InputError(f"{target}: exists and is not a folder")
        if not overwrite and goal.is_dir() and self._taken(goal):
            if number is None and not any(p.suffix.lower() in WRITABLE_SUFFIXES for p in goal.iterdir()):
                raise InputError(
                    f"{target}: holds other files; name a file in it, or a new folder for pictures"
                )
            raise InputError(f"{target}: holds pictures already; choose another folder, or --overwrite them")
        self._suffix = Path(target.name).suffix.lower() if number else ".png"
        self._count = 0
        self._unsynced: list[Path] = []
        self._pending = PendingFiles(goal, create=not number, place=folder)
        self.warnings: list[str] = []

    def _taken(self, folder: Path) -> bool:
        if self._pattern is None:
            return any(folder.iterdir())
        number = _NUMBER.search(self._pattern)
        assert number is not None
        left, right = self._pattern[: number.start()], self._pattern[number.end() :]
        wanted = re.compile(re.escape(left) + r"\d+" + re.escape(right))
        return any(wanted.fullmatch(path.name) for path in folder.iterdir())

    def pass_over(self, stamp: Stamp) -> None:
        """Count a frame whose picture is there already."""
        self._count += 1

    def sync(self) -> int:
        """Bring the pictures to the disk."""
        for path in [*self._unsynced, self._pending.path]:
            sync(path)
        self._unsynced.clear()
        return 0

    def write(self, frame: Frame) -> None:
        """Write one picture: under its source's name, or numbered from 1."""
        self._count += 1
        if self._pattern is not None:
            name = _NUMBER.sub(lambda found: f"{self._count:0{found[1] or 0}d}", self._pattern, count=1)
        else:
            name = f"{frame.name or f'frame_{self._count:06d}'}{self._suffix}"
        try:
            self._pending.path.mkdir(exist_ok=True)
            path = self._pending.path / name
            path.write_bytes(encode_picture(frame.pixels, self._suffix, frame.alpha, self._transfer))
            self._unsynced.append(path)
        except (OSError, av.error.FFmpegError) as error:
            raise write_error(self._pending.folder / name, error) from None
