"""Short clips as arrays: a whole file into memory, an array into a file.

For clips that are made or measured here. A user's video goes through `open_reader` and `VideoWriter`, which
keep its times, sound and colour.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path

import av
import av.error
import numpy as np

from recavsr.video.color import MATRIX_BT709, RANGE_LIMITED, ColorTags, FromRgb
from recavsr.video.frames import Frame
from recavsr.video.output import PendingOutput, write_error
from recavsr.video.reader import Trim, open_reader

_BT709 = ColorTags(range=RANGE_LIMITED, matrix=MATRIX_BT709, primaries=1, transfer=1)


def read_clip(path: Path, frames: int | None = None) -> np.ndarray:
    """Return the frames of a video, or its first `frames`: RGB [N, H, W, 3], uint8 or uint16."""
    with open_reader(path, Trim(frames=frames)) as reader:
        return np.stack([item.pixels for item in reader if isinstance(item, Frame)])


def write_clip(
    path: Path, frames: Iterable[np.ndarray], rate: Fraction | int, crf: int = 17, keyint: int = 250
) -> None:
    """Write RGB frames [H, W, 3], uint8, sides even, as H.264 4:2:0 in BT.709; replaces an existing file.

    keyint: most frames from one keyframe to the next.
    """
    pending = PendingOutput(path, overwrite=True)
    try:
        with av.open(str(pending.path), "w", format="mp4") as container:
            # Without mb-tree, whose lookahead makes x264's output vary from run to run.
            options = {"crf": str(crf), "preset": "fast", "g": str(keyint), "x264-params": "mbtree=0"}
            stream = container.add_stream("libx264", rate=rate, options=options)
            to_frame = FromRgb("yuv420p", _BT709, "left")
            for index, pixels in enumerate(frames):
                if index == 0:
                    stream.height, stream.width = pixels.shape[:2]
                    context = stream.codec_context
                    context.color_range, context.colorspace = _BT709.range, _BT709.matrix
                    context.color_primaries, context.color_trc = _BT709.primaries, _BT709.transfer
                picture = to_frame(pixels)
                picture.pts, picture.time_base = index, 1 / Fraction(rate)
                container.mux(stream.encode(picture))
            container.mux(stream.encode(None))
        pending.commit()
    except (av.error.FFmpegError, OSError) as error:
        raise write_error(path, error) from None
    finally:
        pending.discard()
