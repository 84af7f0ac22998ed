"""Encoded pictures in a file that only grows, so that a run that was broken off can go on behind them."""

from __future__ import annotations

import os
import struct
from fractions import Fraction
from pathlib import Path

from av.packet import Packet

_RECORD = struct.Struct("<qqqqqBQ")  # pts, dts, duration, time base as a fraction, is it a key frame, bytes


class PacketLog:
    """Appends packets, and gives back the first `size` bytes' worth of them; what lies behind is cut off."""

    def __init__(self, path: Path, size: int = 0) -> None:
        self._file = open(path, "r+b" if size else "w+b")  # noqa: SIM115
        self._file.truncate(size)
        self._file.seek(size)
        self._known, self._at = size, 0

    def append(self, packet: Packet) -> Packet:
        """Add a packet of the picture; return it as `read` will."""
        base = packet.time_base
        assert packet.pts is not None
        assert packet.dts is not None
        times = (packet.pts, packet.dts, packet.duration or 0, base.numerator, base.denominator)
        data = bytes(packet)
        self._file.write(_RECORD.pack(*times, packet.is_keyframe, len(data)) + data)
        return _packet(data, *times, packet.is_keyframe)

    def read(self) -> Packet | None:
        """Return the next of the packets that were there at the beginning, or None after the last."""
        if self._at >= self._known:
            return None
        self._file.seek(self._at)
        pts, dts, duration, numerator, denominator, key, size = _RECORD.unpack(self._file.read(_RECORD.size))
        data = self._file.read(size)
        self._at = self._file.tell()
        self._file.seek(0, os.SEEK_END)
        return _packet(data, pts, dts, duration, numerator, denominator, key)

    def sync(self) -> int:
        """Bring what was appended to the disk and return the size of the log."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _packet(
    data: bytes, pts: int, dts: int, duration: int, numerator: int, denominator: int, key: bool
) -> Packet:
    packet = Packet(data)
    packet.pts, packet.dts, packet.duration = pts, dts, duration
    packet.time_base, packet.is_keyframe = Fraction(numerator, denominator), bool(key)
    return packet
