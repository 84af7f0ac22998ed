"""Looking at a video before any work: `probe`."""

from __future__ import annotations

import os

from recavsr.video.info import StreamInfo, VideoInfo
from recavsr.video.reader import open_reader

__all__ = ["StreamInfo", "VideoInfo", "probe"]


def probe(source: str | os.PathLike[str]) -> VideoInfo:
    """Return what `source` is: a file, picture, folder or pattern of pictures, "-" (y4m) or URL.

    Decodes the first frame. Probing "-" uses that frame up: a pipe is to be read by `open_reader` alone,
    whose `info` says the same. Raises InputError with the reason if nothing can be decoded.
    """
    with open_reader(source) as reader:
        return reader.info
