"""What one `upscale` run will do, decided and checked before any frame is decoded in earnest."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from recavsr import __version__
from recavsr.errors import InputError
from recavsr.geometry import scaled_size
from recavsr.video.capabilities import versions
from recavsr.video.color import UNSPECIFIED
from recavsr.video.formats import (
    CONTAINERS,
    Container,
    Encoding,
    choose_encoding,
    container_of,
    output_sample_aspect,
)
from recavsr.video.images import ALPHA_SUFFIXES, WRITABLE_SUFFIXES, PictureWriter, SequenceWriter
from recavsr.video.info import VideoInfo
from recavsr.video.reader import Reader, Trim, transparent
from recavsr.video.source import PICTURE_SUFFIXES, STDIN, SourceKind
from recavsr.video.streams import kept_tags, plan_streams
from recavsr.video.transfer import SRGB
from recavsr.video.writer import ShotsWriter, VideoWriter, Writer

DEFAULT_SCALE = 4.0
LARGEST_SIDE = 16384
"""Encoders and players end here; a side beyond it is a mistyped option."""


@dataclass(frozen=True)
class SizeRequest:
    """The wanted output size: at most one of scale, size (width, height), fit, height, width.

    `fit` is a box (width, height): the largest size of the source's shape that it holds.
    """

    scale: float | None = None
    size: tuple[int, int] | str | None = None
    height: int | None = None
    width: int | None = None
    fit: tuple[int, int] | str | None = None

    @property
    def forced(self) -> bool:
        """Return whether both sides are dictated."""
        return self.size is not None

    def resolve(self, lr_size: tuple[int, int]) -> tuple[int, int]:
        """Return the output (height, width) for an upright source of `lr_size`; InputError if senseless."""
        given = [n for n in ("scale", "size", "fit", "height", "width") if getattr(self, n) is not None]
        if len(given) > 1:
            raise InputError(f"give one of scale, size, fit, height and width, not {' and '.join(given)}")
        height, width = lr_size
        if self.size is not None:
            out_width, out_height = _pair(self.size, "size")
        elif self.fit is not None:
            box_width, box_height = _pair(self.fit, "fit")
            factor = min(Fraction(box_width, width), Fraction(box_height, height))
            out_width, out_height = (math.floor(side * factor + Fraction(1, 2)) for side in (width, height))
        elif self.height is not None:
            out_height = _whole(self.height, "height")
            out_width = math.floor(Fraction(width * out_height, height) + Fraction(1, 2))
        elif self.width is not None:
            out_width = _whole(self.width, "width")
            out_height = math.floor(Fraction(height * out_width, width) + Fraction(1, 2))
        else:
            out_height, out_width = scaled_size(height, width, _factor(self.scale))
        if min(out_height, out_width) < 1:
            raise InputError(f"the output would be {out_width}x{out_height} pixels; choose a larger one")
        if max(out_height, out_width) > LARGEST_SIDE:
            raise InputError(
                f"the output would be {out_width}x{out_height} pixels; "
                f"no side may be longer than {LARGEST_SIDE}"
            )
        return out_height, out_width


def _factor(scale: float | None) -> float:
    if scale is None:
        return DEFAULT_SCALE
    if not isinstance(scale, (int, float)) or not math.isfinite(scale) or scale <= 0:
        raise InputError(f"scale must be a number above 0, not {scale}")
    if scale > LARGEST_SIDE:
        raise InputError(f"scale {scale:g} is too large; no output side may be longer than {LARGEST_SIDE}")
    return float(scale)


def _whole(value: int, what: str) -> int:
    if not isinstance(value, int) or value < 1:
        raise InputError(f"{what} must be a whole number of pixels above 0, not {value}")
    return value


def _pair(size: tuple[int, int] | str, what: str) -> tuple[int, int]:
    if isinstance(size, str):
        match = re.fullmatch(r"(\d+)[xX](\d+)", size.strip())
        if not match:
            raise InputError(f"{what} must look like 1920x1080 (width x height), not {size!r}")
        size = int(match[1]), int(match[2])
    if len(size) != 2:
        raise InputError(f"{what} is (width, height), not {size}")
    return _whole(size[0], "width"), _whole(size[1], "height")


class OutputKind(Enum):
    """Where the frames go."""

    VIDEO = "video file"
    STDOUT = "y4m on standard output"
    PICTURE = "picture"
    PICTURES = "picture files"


@dataclass(frozen=True)
class Plan:
    """One run: source, output, sizes and encoding. Sizes are (height, width)."""

    source: str
    source_kind: SourceKind
    output: str
    kind: OutputKind
    lr_size: tuple[int, int]
    out_size: tuple[int, int]
    sample_aspect: Fraction
    rate: Fraction
    frames: int | None
    container: Container | None
    encoding: Encoding | None
    suffix: str
    transfer: int  # of the code values, for pictures that hold light
    keeps_alpha: bool
    copied_streams: tuple[str, ...]
    converted_streams: tuple[str, ...]
    lost: tuple[
        str, ...
    ]  # a line for each part of the file that the output can't hold; also among `warnings`
    kept: tuple[str, ...]  # chapters, tags, transparency
    changes: tuple[str, ...]  # what happens to the pixels beside the model's work
    warnings: tuple[str, ...]

    def sizes(self, *, direct: bool) -> dict[str, tuple[int, int] | None]:
        """Return what `load` has to know of sizes for a budget of memory; `direct` as in `upscale`."""
        return {"out_size": self.out_size, "lr_size": None if direct else self.lr_size}

    def lines(self) -> list[str]:
        """Return the plan in words, one fact a line."""
        (h, w), (out_h, out_w) = self.lr_size, self.out_size
        count = "unknown number of" if self.frames is None else str(self.frames)
        said = [
            f"{self.source} -> {self.output} ({self.kind.value})",
            f"{w}x{h} -> {out_w}x{out_h}, {count} frames at {float(self.rate):.6g} a second",
        ]
        if self.encoding is not None:
            color = self.encoding.color
            siting = f", chroma {self.encoding.siting}" if self.encoding.siting else ""
            said.append(
                f"video: {self.encoding.codec}, {self.encoding.pixel_format}, {color.matrix_name}, "
                f"{'full' if color.full_range else 'limited'} range{siting}; {self.encoding.library}, "
                f"{self.encoding.quality}"
            )
        said += [f"copied: {stream}" for stream in self.copied_streams]
        said += [f"kept: {part}" for part in self.kept]
        if self.container is not None:
            into = self.container.subtitles
            said += [f"converted: {stream} becomes {into}" for stream in self.converted_streams]
        said += [f"changed: {change}" for change in self.changes]
        return said + [f"note: {warning}" for warning in self.warnings]

    def json(self) -> dict[str, Any]:
        """Return the plan as plain values."""
        encoding = self.encoding
        color = None
        if encoding is not None:
            color = {
                "matrix": encoding.color.matrix_name,
                "range": "full" if encoding.color.full_range else "limited",
                "primaries": encoding.color.primaries,
                "transfer": encoding.color.transfer,
                "chroma_siting": encoding.siting,
            }
        return {
            "source": self.source,
            "output": self.output,
            "kind": self.kind.value,
            "input_size": list(self.lr_size),
            "output_size": list(self.out_size),
            "sample_aspect": str(self.sample_aspect),
            "rate": str(self.rate),
            "frames": self.frames,
            "codec": None if encoding is None else encoding.codec,
            "encoder": None if encoding is None else encoding.library,
            "pixel_format": None if encoding is None else encoding.pixel_format,
            "quality": None if encoding is None else encoding.quality,
            "color": color,
            "copied": list(self.copied_streams),
            "converted": list(self.converted_streams),
            "kept": list(self.kept),
            "changed": list(self.changes),
            "left_out": list(self.lost),
            "warnings": list(self.warnings),
            "resumable": self.resumable,
        }

    @property
    def resumable(self) -> bool:
        """Return whether an interrupted run can be continued: files to files of several frames."""
        if self.source_kind is SourceKind.FILE:
            seekable = Path(self.source).is_file()
        else:
            seekable = self.source_kind is SourceKind.SEQUENCE
        coded = self.kind is OutputKind.VIDEO and self.encoding is not None and self.encoding.codec != "raw"
        return seekable and (coded or self.kind is OutputKind.PICTURES)

    def facts(self) -> dict[str, Any]:
        """Return what decides how the frames are written, by its name for the user."""
        encoding = self.encoding
        return {
            "output size": f"{self.out_size[1]}x{self.out_size[0]}",
            "container": None if self.container is None else self.container.suffix,
            "codec": None if encoding is None else encoding.codec,
            "encoding": None
            if encoding is None
            else f"{encoding.pixel_format} {sorted(encoding.options.items())}",
            "versions": f"recavsr {__version__}, PyAV {versions()['PyAV']}, PyTorch {torch.__version__}",
        }

    def writer(self, reader: Reader, *, overwrite: bool, folder: Path | None = None) -> Writer:
        """Return the writer for this plan (nothing is written before the first frame).

        `folder` is where it makes the output and keeps what can be resumed.
        """
        if self.kind is OutputKind.PICTURE:
            return PictureWriter(Path(self.output), overwrite=overwrite, transfer=self.transfer)
        if self.kind is OutputKind.PICTURES:
            return SequenceWriter(
                Path(self.output), overwrite=overwrite, folder=folder, transfer=self.transfer
            )
        assert self.container is not None
        assert self.encoding is not None
        path = None if self.kind is OutputKind.STDOUT else Path(self.output)
        return VideoWriter(
            path,
            reader,
            self.container,
            self.encoding,
            self.out_size,
            self.sample_aspect,
            overwrite=overwrite,
            folder=folder,
        )

    def shots_writer(self, reader: Reader, path: Path) -> ShotsWriter:
        """Return a writer of the packet log `path` for some shots of a video file."""
        assert self.container is not None
        assert self.encoding is not None
        return ShotsWriter(path, reader, self.container, self.encoding, self.out_size, self.sample_aspect)


def make_plan(
    reader: Reader,
    output: str | os.PathLike[str] | None,
    request: SizeRequest,
    trim: Trim,
    *,
    codec: str | None = None,
    quality: int | str | None = None,
    preset: str | None = None,
    encoder: str = "software",
    deinterlace: bool = False,
) -> Plan:
    """Decide everything about a run from the opened source and the options; InputError if impossible."""
    info = reader.info
    out_size = request.resolve(info.size)
    beside = f"_{out_size[1]}x{out_size[0]}"
    target = default_output(info, beside) if output is None else os.fspath(output)
    kind, suffix = _output_kind(info, target)
    if kind is OutputKind.PICTURE and Path(target).is_dir():
        target = str(Path(target) / f"{Path(info.source).stem}{suffix}")
    if kind in (OutputKind.VIDEO, OutputKind.PICTURE):
        _refuse_same_file(info.source, target)
    if kind is OutputKind.PICTURES:
        _refuse_same_pictures(reader.source.pictures, target)
    container = encoding = None
    warnings = list(reader.warnings)
    copied: list[str] = []
    converted: list[str] = []
    lost: list[str] = []
    if kind in (OutputKind.VIDEO, OutputKind.STDOUT):
        container = container_of(suffix)
        encoding = choose_encoding(
            info,
            container,
            out_size,
            codec=codec,
            quality=quality,
            preset=preset,
            hardware=encoder == "hardware",
        )
        warnings += encoding.warnings
        if reader.container is not None:
            others = plan_streams(info, reader.container, container)
            copied = [str(s) for s in info.streams if s.index in (*others.copied, *others.attached)]
            converted = [str(s) for s in info.streams if s.index in others.converted]
            lost += others.lost
        if info.chapters and not container.chapters:
            lost.append(f"{container.suffix} can't hold chapters, they are left out; .mkv can")
        if kept_tags(info.metadata) and not container.times:
            lost.append(f"{container.suffix} can't hold tags, they are left out; .mkv can")
    else:
        if codec is not None or quality is not None or preset is not None:
            raise InputError("codec, quality and preset are for video files, not for pictures")
        lost += [f"pictures can't hold {stream}, it is left out" for stream in info.streams]
        lost += ["pictures can't hold chapters, they are left out"] if info.chapters else []
    keeps_alpha = info.alpha and encoding is None and suffix in ALPHA_SUFFIXES
    if info.transparent and not keeps_alpha:
        raise InputError(transparent(info.source))
    return Plan(
        source=info.source,
        source_kind=info.kind,
        output=target,
        kind=kind,
        lr_size=info.size,
        out_size=out_size,
        sample_aspect=output_sample_aspect(info, out_size, forced=request.forced),
        rate=info.rate,
        frames=expected_frames(info, trim),
        container=container,
        encoding=encoding,
        suffix=suffix,
        transfer=_transfer(info),
        keeps_alpha=keeps_alpha,
        copied_streams=tuple(copied),
        converted_streams=tuple(converted),
        lost=tuple(lost),
        kept=tuple(_kept(info, container, encoding, keeps_alpha=keeps_alpha)),
        changes=tuple(_changes(info, encoding, trim, deinterlace=deinterlace)),
        warnings=(*warnings, *lost),
    )


def _kept(
    info: VideoInfo, container: Container | None, encoding: Encoding | None, *, keeps_alpha: bool
) -> list[str]:
    kept = []
    if container is not None and container.chapters and info.chapters:
        kept.append(f"{len(info.chapters)} chapters")
    tags = kept_tags(info.metadata)
    if container is not None and container.times and tags:
        kept.append(f"tags ({', '.join(sorted(tags))})")
    if encoding is not None and encoding.hdr_metadata:
        kept.append("HDR mastering metadata")
    return [*kept, "transparency, resized without the model"] if keeps_alpha else kept


def _changes(info: VideoInfo, encoding: Encoding | None, trim: Trim, *, deinterlace: bool) -> list[str]:
    changes = []
    if not info.orientation.upright:
        mirrored = " and mirrored" if info.orientation.mirrored else ""
        changes.append(
            f"the pixels are turned by {info.orientation.clockwise_degrees} degrees{mirrored}, "
            "in place of the rotation tag"
        )
    if deinterlace:
        changes.append("the fields are made into full frames (bwdif)")
    if not trim.whole:
        changes.append("only a part is taken; it starts at 0")
    return changes + ([] if encoding is None else list(encoding.changes))


def _transfer(info: VideoInfo) -> int:
    """Return the transfer of the source; untagged RGB, and pictures, are sRGB."""
    untagged = info.color.transfer in (0, UNSPECIFIED)
    return SRGB if untagged and (info.chroma == "rgb" or info.still) else info.color.transfer


def expected_frames(info: VideoInfo, trim: Trim) -> int | None:
    """Return the number of frames that a trim of the source will give, or None if the source does not say."""
    count = info.frame_count
    if count is not None and trim.start is not None and info.kind is not SourceKind.SEQUENCE:
        count = max(1, count - math.floor(trim.start * info.rate))
    for limit in (trim.frames, None if trim.duration is None else math.ceil(trim.duration * info.rate)):
        if limit is not None:
            count = limit if count is None else min(count, limit)
    return count


def default_output(info: VideoInfo, tail: str) -> str:
    """Return a name beside the source: clip.mp4 -> clip_1280x720.mp4 for the tail "_1280x720"."""
    if info.kind in (SourceKind.STDIN, SourceKind.URL):
        raise InputError("name the output (-o): it can't be derived from this source")
    source = Path(info.source)
    if info.kind is SourceKind.SEQUENCE:
        folder = source if source.is_dir() else source.parent
        return str(folder.resolve().with_name(f"{folder.resolve().name}{tail}"))
    if info.still:
        suffix = source.suffix.lower()
        return str(
            source.with_name(f"{source.stem}{tail}{suffix if suffix in WRITABLE_SUFFIXES else '.png'}")
        )
    suffix = source.suffix.lower()
    return str(source.with_name(f"{source.stem}{tail}{suffix if suffix in CONTAINERS else '.mp4'}"))


def _output_kind(info: VideoInfo, target: str) -> tuple[OutputKind, str]:
    if target == STDIN:
        return OutputKind.STDOUT, ".y4m"
    path = Path(target)
    suffix = path.suffix.lower()
    folder = os.path.isdir(path) or target.endswith(("/", os.sep)) or not suffix
    if info.still:
        if folder:
            return OutputKind.PICTURE, ".png"
        if suffix not in WRITABLE_SUFFIXES:
            raise InputError(
                f"{target}: a still picture becomes a picture; use {' '.join(WRITABLE_SUFFIXES)}"
            )
        return OutputKind.PICTURE, suffix
    if folder:
        return OutputKind.PICTURES, ".png"
    if suffix in PICTURE_SUFFIXES or suffix in WRITABLE_SUFFIXES:
        if suffix not in WRITABLE_SUFFIXES or not re.search(r"%0?\d*d", path.name):
            raise InputError(
                f"{target}: a video becomes many pictures; use a folder or a name like frame_%05d.png"
            )
        return OutputKind.PICTURES, suffix
    container_of(suffix)
    return OutputKind.VIDEO, suffix


def _refuse_same_file(source: str, target: str) -> None:
    if os.path.exists(source) and os.path.exists(target) and os.path.samefile(source, target):
        raise InputError(f"{target}: is the source itself; choose another output name")


def _refuse_same_pictures(pictures: Sequence[Path], target: str) -> None:
    """Refuse pictures written over those that are read: into their folder under their own names."""
    pattern = re.fullmatch(r"(.*?)%0?\d*d(.*)", Path(target).name)
    folder = Path(target).parent if pattern else Path(target)
    if not pictures or not folder.is_dir() or not os.path.samefile(pictures[0].parent, folder):
        return
    written = re.compile(".*" if pattern is None else rf"{re.escape(pattern[1])}\d+{re.escape(pattern[2])}")
    if any(written.fullmatch(path.name) for path in pictures):
        raise InputError(f"{target}: holds the source's own pictures; choose another folder or other names")
