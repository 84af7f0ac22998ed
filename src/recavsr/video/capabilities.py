"""What the FFmpeg libraries inside this PyAV can do on this machine."""

from __future__ import annotations

from collections.abc import Iterable

import av


def versions() -> dict[str, str]:
    """Return the versions of PyAV and of FFmpeg's libavcodec inside it."""
    codec = ".".join(map(str, av.library_versions["libavcodec"]))
    return {"PyAV": av.__version__, "libavcodec": codec}


def encoders(names: Iterable[str]) -> list[str]:
    """Return those of the named encoders that this build has."""
    return [name for name in names if _has(name, "w")]


def decoders(names: Iterable[str]) -> list[str]:
    """Return those of the named decoders that this build has."""
    return [name for name in names if _has(name, "r")]


def _has(name: str, mode: str) -> bool:
    try:
        av.codec.Codec(name, mode)  # type: ignore[arg-type]
    except av.codec.codec.UnknownCodecError:
        return False
    return True
