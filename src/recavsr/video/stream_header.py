"""What libav knows of a stream and PyAV does not tell, read from the header that it writes for Matroska."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass

import av
import av.error
from av.video.stream import VideoStream

# BlockAddIDType, then BlockAddIDExtraData with a Dolby Vision configuration record of 24 bytes
_DOLBY_VISION = re.compile(rb"\x41\xe7\x84dv[cvw]C\x41\xed\x98(.{24})", re.DOTALL)
_WITHOUT_BASE = (5, 10, 20)  # the profiles that exist without a base layer for other players


@dataclass(frozen=True)
class DolbyVision:
    """A Dolby Vision configuration record: the profile, and what its base layer is for other players."""

    profile: int
    compatibility: int  # 0 nothing, 1 or 6 HDR10, 2 SDR, 4 HLG

    @property
    def shown_by_dolby_alone(self) -> bool:
        """Return whether the coded picture has a colour space (IPT) of which no tag of the video tells."""
        return self.compatibility == 0 and self.profile in _WITHOUT_BASE


def matroska_header(stream: VideoStream) -> bytes:
    """Return the header of a Matroska file that holds only this stream; empty for what can't lie in one."""
    header = io.BytesIO()
    try:
        with av.open(header, "w", format="matroska") as trial:
            trial.add_stream_from_template(stream, opaque=True)
            trial.start_encoding()
            return header.getvalue()
    except (av.error.FFmpegError, ValueError):
        return b""


def dolby_vision(stream: VideoStream) -> DolbyVision | None:
    """Return the stream's Dolby Vision configuration, None if it has none."""
    record = _DOLBY_VISION.search(matroska_header(stream))
    return None if record is None else DolbyVision(record[1][2] >> 1, record[1][4] >> 4)
