"""Frames between decoder, model and encoder: pixels with their exact time, upright.

Arrays are RGB [H, W, 3], uint8, or uint16 (full 16-bit scale) for sources of more than 8 bits.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from typing import Any

import numpy as np
from av.packet import Packet
from av.sidedata.sidedata import Type as SideDataType
from av.video.frame import VideoFrame

__all__ = [
    "Frame",
    "Orientation",
    "Packet",
    "Passed",
    "Stamp",
    "alpha_of",
    "has_alpha",
    "is_opaque",
    "orientation_of",
    "same_depth",
    "side_data_of",
]


@dataclass(frozen=True)
class Stamp:
    """When a frame is shown: `pts` and `duration` in units of `time_base` seconds (duration 0: unknown)."""

    pts: int
    duration: int
    time_base: Fraction

    @property
    def time(self) -> Fraction:
        """Return the start in seconds, exactly."""
        return self.pts * self.time_base

    @property
    def end(self) -> Fraction:
        """Return the end in seconds, exactly."""
        return (self.pts + self.duration) * self.time_base


@dataclass(frozen=True)
class Frame:
    """One picture: pixels [H, W, 3], its time, and its file name where it came from a picture file.

    `alpha` [h, w], of the pixels' depth, is its transparency where that is kept; it has the source's size.
    """

    pixels: np.ndarray
    stamp: Stamp
    name: str | None = None
    alpha: np.ndarray | None = None


@dataclass(frozen=True)
class Passed:
    """A frame that is in the output already: only its time."""

    stamp: Stamp


@dataclass(frozen=True)
class Orientation:
    """How stored pixels are turned for display: x' = a x + c y, y' = b x + d y with entries -1, 0, 1."""

    a: int = 1
    b: int = 0
    c: int = 0
    d: int = 1

    @property
    def upright(self) -> bool:
        """Return whether nothing has to be done."""
        return (self.a, self.b, self.c, self.d) == (1, 0, 0, 1)

    @property
    def swaps_sides(self) -> bool:
        """Return whether width and height change places."""
        return self.a == 0

    @property
    def clockwise_degrees(self) -> int:
        """Return the clockwise turn that makes the picture upright (mirroring apart)."""
        return {(1, 0): 0, (0, 1): 90, (-1, 0): 180, (0, -1): 270}[self.a, self.b]

    @property
    def mirrored(self) -> bool:
        """Return whether the picture is also mirrored."""
        return self.a * self.d - self.b * self.c < 0

    def apply(self, pixels: np.ndarray) -> np.ndarray:
        """Return [H, W, 3] pixels turned upright."""
        if self.upright:
            return pixels
        if self.swaps_sides:
            turned = pixels.transpose(1, 0, 2)[:: self.b, :: self.c]
        else:
            turned = pixels[:: self.d, :: self.a]
        return np.ascontiguousarray(turned)


def _unnamed(cls: type[Enum], value: object) -> Enum:
    """Make a member for a kind of side data that PyAV has no name for (Exif is one)."""
    member = object.__new__(cls)
    member._name_, member._value_ = f"KIND_{value}", value
    return member


# Without it one such kind hides all side data of the frame, and with it the rotation of a camera's picture.
SideDataType._missing_ = classmethod(_unnamed)  # type: ignore[assignment]


def side_data_of(frame: VideoFrame) -> list[tuple[str, bytes]]:
    """Return the frame's side data as (kind, bytes)."""
    container: Any = frame.side_data  # a sequence at run time; PyAV's type hints say a dict
    return [(side.type.name, bytes(side)) for side in container]


def orientation_of(frame: VideoFrame) -> Orientation | None:
    """Return the orientation of the frame's display matrix; None if it is not made of right angles."""
    for kind, data in side_data_of(frame):
        if kind != "DISPLAYMATRIX" or len(data) < 36:
            continue
        m = struct.unpack_from("=9i", data)
        entries = [m[0], m[1], m[3], m[4]]  # a, b, c, d in 16.16 fixed point
        largest = max(abs(value) for value in entries)
        a, b, c, d = (0 if abs(v) * 64 < largest else (1 if v > 0 else -1) for v in entries)
        if largest == 0 or (a == 0) == (b == 0) or (a == 0) != (d == 0) or (b == 0) != (c == 0):
            return None
        return Orientation(a, b, c, d)
    return Orientation()


def has_alpha(frame: VideoFrame) -> bool:
    """Return whether the pixel format carries transparency (palettes may)."""
    return any(part.is_alpha for part in frame.format.components) or frame.format.has_palette


def alpha_of(frame: VideoFrame, *, deep: bool) -> np.ndarray:
    """Return the transparency channel [H, W]: uint8, or uint16 (full scale) if `deep`."""
    return frame.reformat(format="rgba64le" if deep else "rgba").to_ndarray()[..., 3].copy()


def same_depth(pixels: np.ndarray, *, deep: bool) -> np.ndarray:
    """Return code values, uint8 or uint16 (full scale), as uint16 if `deep`, else as uint8."""
    if deep == (pixels.dtype == np.uint16):
        return pixels
    if deep:
        return pixels.astype(np.uint16) * 257
    return ((pixels.astype(np.uint32) + 128) // 257).astype(np.uint8)


def is_opaque(alpha: np.ndarray) -> bool:
    """Return whether a transparency channel is opaque everywhere, but for what rounding to 8 bits leaves."""
    most = int(np.iinfo(alpha.dtype).max)
    return int(alpha.min()) * 255 >= most * 254
