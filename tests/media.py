"""Helpers of the media tests: making odd files with ffmpeg, reading results back with ffprobe and PyAV."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from av.packet import Packet
from av.video.frame import VideoFrame

from recavsr.stream.engine import UpscaleReport, upscale
from recavsr.stream.step import IdentityModel
from recavsr.video.reader import VideoReader

LOSSLESS = {"quality": "lossless", "preset": "ultrafast"}


def run_identity(source: Path | str, output: Path | str, **options: Any) -> UpscaleReport:
    """Upscale with the model that only resizes; x2 and lossless unless told otherwise."""
    sized = {"scale", "size", "height", "width"} & options.keys()
    if not sized:
        options["scale"] = 2
    if Path(output).suffix in (".mp4", ".mkv", ".mov") and not {"codec", "quality"} & options.keys():
        options |= LOSSLESS
    return upscale(source, output, model=IdentityModel(), **options)


def ffmpeg(*arguments: object) -> None:
    """Run ffmpeg; without one the test skips, and under CI=true it fails."""
    _tool("ffmpeg", "-hide_banner", "-loglevel", "error", "-nostdin", "-y", *arguments)


def ffprobe(path: Path, *entries: str) -> dict[str, Any]:
    """Return ffprobe's JSON of a file: streams, format and chapters, or what `entries` ask for."""
    what = entries or ("-show_streams", "-show_format", "-show_chapters")
    return json.loads(_tool("ffprobe", "-v", "error", "-of", "json", *what, path))


def _tool(name: str, *arguments: object) -> bytes:
    if shutil.which(name) is None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"{name} is missing: CI must install it")
        pytest.skip(f"no {name} executable")
    done = subprocess.run([name, *map(str, arguments)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def tell_times(monkeypatch: pytest.MonkeyPatch, told: Sequence[int | None]) -> list[int | None]:
    """Let a source give only so many frames, which tell these times: hundredths of a second from its start.

    Returns those that are still to come.
    """
    decode, left = VideoReader._decode_packet, list(told)

    def decode_retimed(self: VideoReader, packet: Packet | None) -> Iterator[VideoFrame]:
        for frame in itertools.islice(decode(self, packet), len(left)):
            stream, now = self._stream, left.pop(0)
            frame.pts = None if now is None else stream.start_time + round(now / 100 / stream.time_base)
            frame.duration = 0
            yield frame

    monkeypatch.setattr(VideoReader, "_decode_packet", decode_retimed)
    return left


def video_stream(path: Path) -> dict[str, Any]:
    """Return ffprobe's view of the first video stream."""
    return next(s for s in ffprobe(path)["streams"] if s["codec_type"] == "video")


def times(path: Path) -> list[Fraction]:
    """Return the exact presentation times of the video's frames, in order."""
    with av.open(str(path)) as container:
        return [frame.pts * frame.time_base for frame in container.decode(video=0)]


def pixels(path: Path) -> np.ndarray:
    """Return all frames as 8-bit RGB [N, H, W, 3], by ffmpeg with the tagged colours, rotation applied."""
    flags = "flags=accurate_rnd+full_chroma_int+full_chroma_inp+bicubic"
    stream = video_stream(path)
    if stream["pix_fmt"].startswith(("yuv420", "yuvj420")):
        flags += (
            ":in_h_chr_pos=0:in_v_chr_pos=128"  # where H.264 and HEVC have chroma unless tagged otherwise
        )
    size = _tool(
        "ffmpeg", "-v", "error", "-nostdin", "-i", path, "-map", "0:v:0", "-vf", f"scale={flags}",
        "-fps_mode", "passthrough", "-f", "rawvideo", "-pix_fmt", "rgb24", "-",
    )  # fmt: skip
    height, width = stream["height"], stream["width"]
    if any(abs(side.get("rotation", 0)) == 90 for side in stream.get("side_data_list", [])):
        height, width = width, height
    return np.frombuffer(size, np.uint8).reshape(-1, height, width, 3)


def packets(path: Path, stream: int) -> list[tuple[Any, ...]]:
    """Return (time, duration, checksum) of every packet of a stream, times exact."""
    with av.open(str(path)) as container:
        return [
            (
                None if p.pts is None else p.pts * p.time_base,
                (p.duration or 0) * p.time_base,
                hashlib.md5(bytes(p)).hexdigest(),
            )
            for p in container.demux(container.streams[stream])
            if p.size
        ]


def bar_numbers(path: Path, scale: float) -> list[int]:
    """Return the frame number that `make_cases.sh` drew into the top strip of each frame."""
    numbers = []
    with av.open(str(path)) as container:
        for frame in container.decode(video=0):
            grey = frame.to_ndarray(format="gray")
            value = 0
            for bit in range(16):
                left, right = int((8 * bit + 2) * scale), int((8 * bit + 6) * scale)
                if right <= grey.shape[1] and grey[int(4 * scale) : int(12 * scale), left:right].mean() > 125:
                    value |= 1 << bit
            numbers.append(value)
    return numbers


def make_clip(
    path: Path,
    frames: int = 10,
    size: tuple[int, int] = (36, 64),
    *,
    codec: str = "libx264",
    pixel_format: str = "yuv420p",
    rate: Fraction = Fraction(25),
) -> Path:
    """Write a small moving gradient with PyAV alone (no ffmpeg needed); size is (height, width)."""
    height, width = size
    across = np.linspace(0, 200, width)[None, :] + np.linspace(0, 50, height)[:, None]
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, pixel_format
        for number in range(frames):
            picture = np.repeat(((across + 5 * number) % 256).astype(np.uint8)[..., None], 3, axis=2)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    return path


def drawn(seed: int, shift: float = 0.0) -> np.ndarray:
    """A picture of waves, uint8 [270, 300, 3], moved to the left by `shift` wavelengths."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:270, :300] / 40.0
    waves = [np.sin(a * (x + shift) + b * y) * np.cos(c * y) for a, b, c in rng.uniform(1, 6, (3, 3))]
    return (128 + 100 * np.stack(waves, -1)).astype(np.uint8)
