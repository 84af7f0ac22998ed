"""Colour of a stream: what its tags say, what stands in where they say nothing, and the conversions.

Pixels are converted with the matrix and range that the source is tagged with, and written back with the
same ones, so that an identity model changes nothing. Untagged sources follow the rule that players use:
BT.709 from 720 rows (or 1280 columns) up, BT.601 below, limited range for Y'CbCr and full range for RGB.
The output is always tagged with the matrix and range in use, because its new size would make a player
guess differently. Chroma siting is kept in the same way; untagged 4:2:0 counts as `left`, but in full range
and in pictures as `center`; untagged 4:2:2 as `left`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from fractions import Fraction

import av
import numpy as np
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter

from recavsr.errors import InputError
from recavsr.video.frames import side_data_of
from recavsr.video.siting import Sited

UNSPECIFIED = 2  # matrix, primaries, transfer
RANGE_UNSPECIFIED, RANGE_LIMITED, RANGE_FULL = 0, 1, 2
MATRIX_RGB, MATRIX_BT709, MATRIX_BT470BG, MATRIX_BT601 = 0, 1, 5, 6
TRANSFER_PQ, TRANSFER_HLG = 16, 18

# Tagged matrix (H.273 code) -> swscale's colour space number. Codes absent here have no conversion.
_SWSCALE_MATRIX = {1: 1, 4: 4, 5: 5, 6: 5, 7: 7, 9: 9}
_MATRIX_NAMES = {
    0: "RGB",
    1: "BT.709",
    4: "FCC",
    5: "BT.601",
    6: "BT.601",
    7: "SMPTE 240M",
    8: "YCgCo",
    9: "BT.2020",
    10: "BT.2020 constant luminance",
    14: "ICtCp",
}

# Bicubic chroma, accurate rounding, full chroma interpolation in and out: without them swscale's fast path
# takes the nearest chroma sample and darkens by about one level.
ACCURATE = 0x4 | 0x40000 | 0x2000 | 0x4000


@dataclass(frozen=True)
class ColorTags:
    """Colour description of a stream, as H.273 code points (range: 0 untagged, 1 limited, 2 full)."""

    range: int = RANGE_UNSPECIFIED
    matrix: int = UNSPECIFIED
    primaries: int = UNSPECIFIED
    transfer: int = UNSPECIFIED

    @property
    def full_range(self) -> bool:
        """Return whether samples use the full code range."""
        return self.range == RANGE_FULL

    @property
    def matrix_name(self) -> str:
        """Return the matrix in words."""
        return _MATRIX_NAMES.get(self.matrix, f"matrix {self.matrix}")

    @property
    def hdr(self) -> str | None:
        """Return "PQ" or "HLG" for a high-dynamic-range transfer, else None."""
        return {TRANSFER_PQ: "PQ", TRANSFER_HLG: "HLG"}.get(self.transfer)

    def resolved(self, width: int, height: int, *, rgb: bool) -> ColorTags:
        """Return the tags with a definite matrix and range (rule at the top of this file)."""
        if rgb:
            return replace(self, matrix=MATRIX_RGB, range=RANGE_FULL)
        matrix = self.matrix
        if matrix in (MATRIX_RGB, UNSPECIFIED, 3):
            matrix = MATRIX_BT709 if height >= 720 or width >= 1280 else MATRIX_BT601
        return replace(self, matrix=matrix, range=self.range or RANGE_LIMITED)

    def or_else(self, other: ColorTags) -> ColorTags:
        """Return the tags, completed by those of `other` where they say nothing."""
        return ColorTags(
            range=self.range or other.range,
            matrix=other.matrix if self.matrix == UNSPECIFIED else self.matrix,
            primaries=other.primaries if self.primaries == UNSPECIFIED else self.primaries,
            transfer=other.transfer if self.transfer == UNSPECIFIED else self.transfer,
        )

    def for_yuv(self) -> ColorTags:
        """Return the tags for writing as Y'CbCr: RGB sources become BT.709, limited range."""
        if self.matrix != MATRIX_RGB:
            return self
        return replace(self, matrix=MATRIX_BT709, range=RANGE_LIMITED)


@dataclass(frozen=True)
class HdrMetadata:
    """Static HDR10 data: mastering display (chromaticities, luminance) and content light levels."""

    display_primaries: tuple[tuple[Fraction, Fraction], ...] | None = None  # R, G, B as (x, y)
    white_point: tuple[Fraction, Fraction] | None = None
    min_luminance: Fraction | None = None  # cd/m2
    max_luminance: Fraction | None = None  # cd/m2
    max_content_light: int | None = None  # cd/m2
    max_average_light: int | None = None  # cd/m2


def tags_of(frame: VideoFrame, context: av.VideoCodecContext | None) -> ColorTags:
    """Return the tags of a decoded frame, completed by those of its stream."""

    def first(name: str, empty: int) -> int:
        of_frame = int(getattr(frame, name, empty))
        return of_frame if of_frame != empty or context is None else int(getattr(context, name))

    color_range = first("color_range", RANGE_UNSPECIFIED)
    if frame.format.name.startswith("yuvj"):
        color_range = RANGE_FULL
    return ColorTags(
        range=color_range,
        matrix=first("colorspace", UNSPECIFIED),
        primaries=first("color_primaries", UNSPECIFIED),
        transfer=first("color_trc", UNSPECIFIED),
    )


def hdr_metadata_of(frame: VideoFrame) -> HdrMetadata | None:
    """Return the frame's static HDR data, or None."""
    found = HdrMetadata()
    for kind, data in side_data_of(frame):
        if kind == "MASTERING_DISPLAY_METADATA" and len(data) >= 88:
            # AVMasteringDisplayMetadata: 3 x (x, y), white (x, y), min, max as rationals, then two flags.
            values = struct.unpack_from("=22i", data)
            numbers = [Fraction(n, d) if d else Fraction(0) for n, d in zip(values[:20:2], values[1:20:2])]
            if values[20]:
                points = tuple((numbers[2 * i], numbers[2 * i + 1]) for i in range(3))
                found = replace(found, display_primaries=points, white_point=(numbers[6], numbers[7]))
            if values[21]:
                found = replace(found, min_luminance=numbers[8], max_luminance=numbers[9])
        elif kind == "CONTENT_LIGHT_LEVEL" and len(data) >= 8:
            content, average = struct.unpack_from("=2I", data)
            found = replace(found, max_content_light=content, max_average_light=average)
    return None if found == HdrMetadata() else found


class ToRgb:
    """Converts decoded frames to RGB arrays [H, W, 3]: uint8, or uint16 (full scale) if `deep`."""

    def __init__(
        self, tags: ColorTags, *, deep: bool, siting: str | None = None, source: str = "the video"
    ) -> None:
        self._tags = tags
        self._sited = None if siting is None else Sited(siting)
        self._format = "rgb48le" if deep else "rgb24"
        self._reformatter = VideoReformatter()
        if tags.matrix != MATRIX_RGB and tags.matrix not in _SWSCALE_MATRIX:
            raise InputError(
                f"{source}: the colour matrix {tags.matrix_name} has no conversion to RGB here; "
                "convert it to BT.709 or BT.2020 first"
            )

    def __call__(self, frame: VideoFrame) -> np.ndarray:
        """Return the frame's pixels, [H, W, 3]."""
        matrix = _SWSCALE_MATRIX.get(self._tags.matrix)
        rgb = self._reformatter.reformat(
            frame if self._sited is None else self._sited(frame),
            format=self._format,
            src_colorspace=matrix,
            src_color_range=self._tags.range,
            dst_color_range=RANGE_FULL,
            interpolation=ACCURATE,
        )
        return rgb.to_ndarray()


class FromRgb:
    """Converts RGB arrays [H, W, 3], uint8 or uint16, to frames of one pixel format and colour.

    With a `size` (height, width) they are also brought to it (bicubic). `siting`: where chroma lies in it.
    """

    def __init__(
        self,
        pixel_format: str,
        tags: ColorTags,
        siting: str | None = None,
        size: tuple[int, int] | None = None,
    ) -> None:
        self._size = (None, None) if size is None else size
        self._format = pixel_format
        self._tags = tags
        self._sited = None if siting is None else Sited(siting)
        self._reformatter = VideoReformatter()

    def __call__(self, pixels: np.ndarray) -> VideoFrame:
        """Return the frame, tagged."""
        name = "rgb48le" if pixels.dtype == np.uint16 else "rgb24"
        source = VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format=name)
        height, width = self._size
        frame = self._reformatter.reformat(
            source if self._sited is None else self._sited(source),
            width,
            height,
            format=self._format,
            src_color_range=RANGE_FULL,
            dst_colorspace=_SWSCALE_MATRIX.get(self._tags.matrix),
            dst_color_range=self._tags.range,
            interpolation=ACCURATE,
        )
        frame.color_range = self._tags.range
        frame.colorspace = self._tags.matrix
        return frame
