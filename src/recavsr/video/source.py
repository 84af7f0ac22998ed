"""What a source is (file, picture, folder or pattern of pictures, standard input, URL) and how it is opened.

Every reason for which a source can't be used becomes one InputError line here.
"""

from __future__ import annotations

import errno
import glob
import io
import os
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import av
import av.error
from av.container import InputContainer

from recavsr.errors import InputError
from recavsr.video.tiff import is_tiff, jpeg_inside

PICTURE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp"})
# fmt: off
VIDEO_SUFFIXES = frozenset({
    ".3gp", ".asf", ".avi", ".dv", ".flv", ".gif", ".h264", ".hevc", ".ivf", ".m2ts", ".m4v", ".mkv",
    ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".mxf", ".ogv", ".ts", ".vob", ".webm", ".wmv", ".y4m",
})
# fmt: on
STDIN = "-"

# Demuxers that would "play" a text file or read other files on their own.
_NOT_VIDEO_FORMATS = frozenset({"tty", "ansi", "bin", "concat", "lavfi"})


class CountedInput:
    """A pipe or file as libav's input that hands over whatever is there and remembers how much that was.

    y4m has no length in its header: only the byte count shows that the last frame is incomplete.
    """

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self._head = b""
        self.bytes_read = 0

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes, empty at the end; waits only while there is nothing at all."""
        data = self._file.read(size) or b""
        self.bytes_read += len(data)
        if b"\n" not in self._head:
            self._head += data
        return data

    @property
    def header(self) -> str:
        """Return the first line, as far as it was read."""
        return self._head.partition(b"\n")[0].decode("ascii", "replace")

    def incomplete(self, frames: int, frame_bytes: int) -> bool:
        """Say whether the input held something else than its header and `frames` frames."""
        header = self._head.find(b"\n") + 1
        return self.bytes_read != header + frames * (frame_bytes + len(b"FRAME\n"))


_PNG_HEAD = 1 << 16


class SourceKind(Enum):
    """What the user named."""

    FILE = "file"
    STILL = "still"
    SEQUENCE = "sequence"
    STDIN = "stdin"
    URL = "url"


@dataclass(frozen=True)
class Source:
    """A resolved source: its kind, its name as given, and the picture files of a sequence in order."""

    kind: SourceKind
    name: str
    pictures: tuple[Path, ...] = ()


def shown_name(url: str) -> str:
    """Return a URL without what may be secret: user, password, query, and the key of an RTMP stream."""
    head, _, _ = url.partition("?")
    scheme, _, rest = head.partition("://")
    host, slash, path = rest.rpartition("@")[2].partition("/")
    if scheme.startswith("rtmp") and "/" in path:
        path = path.rpartition("/")[0] + "/..."
    return f"{scheme}://{host}{slash}{path}"


def is_picture(path: Path) -> bool:
    """Return whether the name ends like a picture file."""
    return path.suffix.lower() in PICTURE_SUFFIXES


def natural_order(path: Path) -> list[tuple[int, int | str]]:
    """Return a sort key that puts frame2 before frame10."""
    parts = re.split(r"(\d+)", path.name.lower())
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts if part]


def is_video_folder(path: str | os.PathLike[str]) -> bool:
    """Return whether `path` is a folder with video files in it (not just pictures)."""
    folder = Path(path)
    if not folder.is_dir():
        return False
    return any(p.suffix.lower() in VIDEO_SUFFIXES and not p.name.startswith(".") for p in folder.iterdir())


def resolve(source: str | os.PathLike[str]) -> Source:
    """Say what `source` is, without decoding anything.

    Raises InputError if it is missing, unreadable, empty, or a folder or pattern without pictures.
    """
    name = os.fspath(source)
    if name == STDIN:
        return Source(SourceKind.STDIN, name)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", name):
        return Source(SourceKind.URL, name)
    path = Path(name)
    try:
        os.lstat(path)
    except FileNotFoundError:
        return _pattern(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{name}: can't be read ({getattr(error, 'strerror', None) or error})") from None
    if is_video_folder(path):
        raise InputError(f"{name}: a folder of videos; name one file in it, or upscale the whole folder")
    if path.is_dir():
        return Source(SourceKind.SEQUENCE, name, _pictures_in(path))
    if not path.exists():
        raise InputError(f"{name}: a link to a file that does not exist")
    _check_readable(path)
    return Source(SourceKind.STILL if is_still(path) else SourceKind.FILE, name)


def is_still(path: Path) -> bool:
    """Return whether the name ends like a picture file, and it is no animated PNG."""
    if path.suffix.lower() != ".png" or not path.is_file():
        return is_picture(path)
    try:
        with open(path, "rb") as file:
            head = file.read(_PNG_HEAD)
    except OSError:
        return True
    return b"acTL" not in head.partition(b"IDAT")[0]  # the chunk of animation comes before the picture


def matches(pattern: str) -> list[Path]:
    """Return what a pattern finds; folders that are there are taken by their names, brackets and all."""
    folder, rest = Path(Path(pattern).anchor), list(Path(pattern).relative_to(Path(pattern).anchor).parts)
    while len(rest) > 1 and (folder / rest[0]).is_dir():
        folder /= rest.pop(0)
    place = os.path.join(glob.escape(str(folder)), *rest)
    return [Path(path) for path in glob.glob(place, recursive=True)]


def _pictures_in(folder: Path) -> tuple[Path, ...]:
    try:
        found = [path for path in folder.iterdir() if is_picture(path) and not path.name.startswith(".")]
    except OSError as error:
        raise InputError(f"{folder}: can't be listed ({error.strerror})") from None
    if not found:
        raise InputError(f"{folder}: a folder without pictures ({', '.join(sorted(PICTURE_SUFFIXES))})")
    return tuple(sorted(found, key=natural_order))


def _pattern(path: Path) -> Source:
    """Resolve `frame_%04d.png` or `*.png`; anything else is a file that does not exist."""
    name = str(path)
    number = re.search(r"%0?(\d*)d", path.name)
    if number:
        left, right = path.name[: number.start()], path.name[number.end() :]
        numbered = re.compile(re.escape(left) + r"\d+" + re.escape(right))
        folder = path.parent
        found = [p for p in folder.iterdir() if numbered.fullmatch(p.name)] if folder.is_dir() else []
    elif any(mark in path.name for mark in "*?["):
        found = matches(name)
    else:
        raise InputError(f"{name}: no such file")
    found = [p for p in found if is_picture(p)]
    if not found:
        raise InputError(f"{name}: no files match this pattern")
    return Source(SourceKind.SEQUENCE, name, tuple(sorted(found, key=natural_order)))


def _check_readable(path: Path) -> None:
    if not path.is_file() and not path.is_fifo():
        raise InputError(f"{path}: not a file")
    if not os.access(path, os.R_OK):
        raise InputError(f"{path}: no permission to read it")
    if path.is_file() and path.stat().st_size == 0:
        raise InputError(f"{path}: the file is empty")


def open_container(source: Source) -> InputContainer:
    """Open a file, a picture, standard input or a URL for demuxing; InputError says why not."""
    try:
        if source.kind is SourceKind.STDIN:
            return _open_y4m(io.FileIO(0, closefd=False))
        if source.kind is SourceKind.URL:
            return av.open(source.name, metadata_errors="replace", timeout=(30.0, 30.0))
        if source.kind is SourceKind.STILL:
            # From memory: by name, "%03d" would be taken as a numbered sequence.
            data = Path(source.name).read_bytes()
            if is_tiff(data) and jpeg_inside(data):
                raise InputError(f"{source.name}: JPEG inside TIFF can't be decoded here; convert it to PNG")
            return av.open(io.BytesIO(data), "r", metadata_errors="replace")
        if Path(source.name).suffix.lower() == ".y4m":
            return _open_y4m(io.FileIO(source.name))
        if Path(source.name).is_fifo():  # libav's own waiting for a writer can't be interrupted
            return av.open(io.FileIO(source.name), "r", metadata_errors="replace")
        container = av.open(f"file:{source.name}", metadata_errors="replace")
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise InputError(_why_not(source, error)) from None
    if container.format.name in _NOT_VIDEO_FORMATS:
        container.close()
        raise InputError(f"{source.name}: not a video file")
    return container


def _open_y4m(file: io.FileIO) -> InputContainer:
    # One frame must be enough to start: a pipe may stall after any frame.
    options = {"probesize": "32", "analyzeduration": "0", "fpsprobesize": "0"}
    return av.open(CountedInput(file), "r", format="yuv4mpegpipe", options=options)


def _why_not(source: Source, error: Exception) -> str:
    number = getattr(error, "errno", None)
    if source.kind is SourceKind.STDIN:
        return "standard input is not a YUV4MPEG2 (y4m) stream; pipe one, e.g. from ffmpeg -f yuv4mpegpipe -"
    if source.kind is SourceKind.URL:
        return f"{shown_name(source.name)}: can't be opened ({getattr(error, 'strerror', None) or error})"
    if number in (errno.EACCES, errno.EPERM):
        return f"{source.name}: no permission to read it"
    if number == errno.EIO:
        return f"{source.name}: can't be read (input/output error)"
    with open(source.name, "rb") as file:
        head = file.read(12)
    if head[4:8] == b"ftyp":
        return f"{source.name}: the file breaks off before its index, nothing in it can be decoded"
    return f"{source.name}: not a video file, or damaged at its beginning"
