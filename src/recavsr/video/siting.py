"""Chroma siting: where the samples of subsampled chroma lie among those of luma, as tagged, kept and used."""

from __future__ import annotations

from fractions import Fraction
from typing import cast

from av.filter import Graph
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from recavsr.video.stream_header import matroska_header

# Matroska's ChromaSitingHorz and ChromaSitingVert: 1 on the first luma sample, 2 half-way to the next.
_HORIZONTAL, _VERTICAL = b"\x55\xb7\x81", b"\x55\xb8\x81"
_BY_POSITION = {(1, 2): "left", (2, 2): "center", (1, 1): "topleft", (2, 1): "top"}
_BY_Y4M_TAG = {"420": "center", "420jpeg": "center", "420mpeg2": "left", "420paldv": "topleft"}


def tagged_siting(stream: VideoStream, y4m_header: str = "") -> str | None:
    """Return left, center, topleft or top, or None where the stream does not say."""
    if y4m_header:
        tags = [word[1:] for word in y4m_header.split() if word.startswith("C")]
        return _BY_Y4M_TAG.get(tags[0].partition("p1")[0]) if tags else "center"
    written = matroska_header(stream)
    found = [written.find(element) for element in (_HORIZONTAL, _VERTICAL)]
    if min(found) < 0:
        return None
    horizontal, vertical = (written[place + len(_HORIZONTAL)] for place in found)
    return _BY_POSITION.get((horizontal, vertical))


class Sited:
    """Marks frames with a siting: libswscale converts by it (an unmarked frame counts as `center`)."""

    def __init__(self, siting: str) -> None:
        self._siting = siting
        self._graph: Graph | None = None

    def __call__(self, frame: VideoFrame) -> VideoFrame:
        """Return the frame, marked; its pixels are shared."""
        if self._graph is None:
            self._graph = Graph()
            source = self._graph.add_buffer(
                None, frame.width, frame.height, frame.format, time_base=Fraction(1, 25)
            )
            mark = self._graph.add("setparams", f"chroma_location={self._siting}")
            self._graph.link_nodes(source, mark, self._graph.add("buffersink")).configure()
        self._graph.push(frame)
        return cast(VideoFrame, self._graph.pull())
