"""What a TIFF holds beside its first picture, and pictures in it that libav does not decode."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_SUBFILE, _COMPRESSION = 254, 259
_JPEG = (6, 7)
_REDUCED = 1  # a smaller copy of another picture in the file


def is_tiff(data: bytes) -> bool:
    """Return whether a file with these first bytes is a TIFF."""
    return data[:4] in (b"II*\0", b"MM\0*")


def jpeg_inside(data: bytes) -> bool:
    """Return whether the first picture is compressed as JPEG: libav gives a black one for it."""
    return next((tags.get(_COMPRESSION) in _JPEG for tags in _directories(data)), False)


def pages(data: bytes) -> int:
    """Return the number of full pictures."""
    return sum(not tags.get(_SUBFILE, 0) & _REDUCED for tags in _directories(data))


def _directories(data: bytes) -> Iterator[dict[int, int]]:
    """Yield the short and long values of each image file directory (TIFF 6.0, section 2)."""
    order, seen = ">" if data[:1] == b"M" else "<", set()
    try:
        (place,) = struct.unpack_from(f"{order}I", data, 4)
        while place and place not in seen:
            seen.add(place)
            (count,) = struct.unpack_from(f"{order}H", data, place)
            tags = {}
            for entry in range(place + 2, place + 2 + 12 * count, 12):
                tag, kind, values = struct.unpack_from(f"{order}HHI", data, entry)
                if kind in (3, 4) and values == 1:
                    (tags[tag],) = struct.unpack_from(f"{order}{'HI'[kind - 3]}", data, entry + 8)
            (following,) = struct.unpack_from(f"{order}I", data, place + 2 + 12 * count)
            yield tags
            place = following
    except struct.error:  # it breaks off
        return
