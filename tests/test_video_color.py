"""Colour through the whole path, with the identity model and a lossless codec: planes in, planes out."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from media import run_identity, video_stream

WEIGHTS = {1: (0.2126, 0.0722), 6: (0.299, 0.114), 9: (0.2627, 0.0593)}  # red's and blue's share of luma
PATCHES = np.array(
    [
        (0.0, 0.0, 0.0), (0.1, 0.1, 0.1), (0.5, 0.5, 0.5), (1.0, 1.0, 1.0), (0.9, 0.1, 0.1), (0.1, 0.8, 0.1),
        (0.1, 0.1, 0.9), (0.8, 0.8, 0.05), (0.7, 0.5, 0.4), (0.02, 0.03, 0.05),
    ]
)  # fmt: skip
SIDE = 16  # pixels of a patch


def coded(rgb: np.ndarray, matrix: int, *, full: bool, bits: int) -> np.ndarray:
    """Return Y', Cb, Cr code values [..., 3] of R'G'B' in 0..1, by the formulas of BT.601, 709 and 2020."""
    red, blue = WEIGHTS[matrix]
    luma = rgb @ np.array([red, 1 - red - blue, blue])
    differences = (rgb[..., 2] - luma) / (2 - 2 * blue), (rgb[..., 0] - luma) / (2 - 2 * red)
    unit = 1 << (bits - 8)
    if full:
        scale, offset, spread = (1 << bits) - 1, 0, (1 << bits) - 1
    else:
        scale, offset, spread = 219 * unit, 16 * unit, 224 * unit
    codes = [offset + scale * luma, *(128 * unit + spread * difference for difference in differences)]
    return np.rint(np.clip(np.stack(codes, -1), 0, (1 << bits) - 1))


def write_planes(
    path: Path,
    planes: list[np.ndarray],
    pixel_format: str,
    codec: str = "ffv1",
    options: dict[str, str] | None = None,
    **tags: int,
) -> None:
    """Write two frames of these planes with tags."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=25, options=options)
        stream.height, stream.width = planes[0].shape
        stream.pix_fmt = pixel_format
        for name, value in tags.items():
            setattr(stream.codec_context, name, value)
        for number in range(2):
            frame = av.VideoFrame(stream.width, stream.height, pixel_format)
            for plane, values in zip(frame.planes, planes, strict=True):
                rows = np.zeros((plane.height, plane.line_size // values.itemsize), values.dtype)
                rows[:, : plane.width] = values
                plane.update(rows.tobytes())
            frame.pts, frame.time_base = number, Fraction(1, 25)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def read_planes(path: Path) -> tuple[str, list[np.ndarray]]:
    """Return the pixel format and the planes of the second frame, exactly as they are stored."""
    with av.open(str(path)) as container:
        *_, frame = container.decode(video=0)
        kind = np.uint16 if "le" in frame.format.name else np.uint8
        planes = [
            np.frombuffer(memoryview(p), kind).reshape(p.height, -1)[:, : p.width].astype(int)
            for p in frame.planes
        ]
        return frame.format.name, planes


def patches(matrix: int, *, full: bool, bits: int, chroma: str) -> tuple[str, list[np.ndarray]]:
    """Return the pixel format and the planes of two rows of flat patches."""
    codes = coded(PATCHES.reshape(2, -1, 3), matrix, full=full, bits=bits)
    across, down = (1 if chroma == "444" else 2), (2 if chroma == "420" else 1)
    kind = np.uint8 if bits == 8 else np.uint16
    steps = ((1, 1), (down, across), (down, across))
    planes = [
        codes[..., n].repeat(SIDE // rows, 0).repeat(SIDE // columns, 1).astype(kind)
        for n, (rows, columns) in enumerate(steps)
    ]
    return f"yuv{chroma}p" + ("" if bits == 8 else f"{bits}le"), planes


@pytest.mark.parametrize("chroma", ["420", "422", "444"])
@pytest.mark.parametrize("bits", [8, 10, 12])
@pytest.mark.parametrize("full", [False, True], ids=["limited", "full"])
@pytest.mark.parametrize("matrix", [6, 1, 9], ids=["bt601", "bt709", "bt2020"])
def test_flat_patches_do_not_shift(tmp_path: Path, matrix: int, full: bool, bits: int, chroma: str) -> None:
    """Within 2/255, in code values, whatever the matrix, range, depth and subsampling; tags kept."""
    source, out = tmp_path / "in.mkv", tmp_path / "out.mkv"
    pixel_format, planes = patches(matrix, full=full, bits=bits, chroma=chroma)
    tags = {"color_range": 2 if full else 1, "colorspace": matrix, "color_primaries": matrix}
    write_planes(source, planes, pixel_format, **tags, color_trc=1)
    run_identity(source, out, codec="ffv1")
    made_format, made = read_planes(out)
    assert made_format == pixel_format
    for before, after in zip(planes, made, strict=True):
        row = SIDE * before.shape[0] // planes[0].shape[0]
        column = SIDE * before.shape[1] // planes[0].shape[1]
        middle = (slice(row // 2, None, row), slice(column // 2, None, column))
        wide = (slice(row, None, 2 * row), slice(column, None, 2 * column))
        assert np.abs(before[middle].astype(int) - after[wide]).max() <= 2 * (1 << (bits - 8))
    tagged = ("color_range", "color_space", "color_primaries", "color_transfer")
    assert [video_stream(out)[tag] for tag in tagged] == [video_stream(source)[tag] for tag in tagged]


# -- chroma siting ---------------------------------------------------------------------------------------

OFFSETS = {
    "left": (0.0, 0.5),
    "center": (0.5, 0.5),
    "topleft": (0.0, 0.0),
}  # of a chroma sample, in luma pixels


@pytest.mark.parametrize("siting", OFFSETS)
def test_chroma_stays_where_it_is(tmp_path: Path, siting: str) -> None:
    """Ramps of Cb across and of Cr down are functions of the place; enlarged, they are the same functions."""
    across, down = OFFSETS[siting]
    slope, sides, source, out = 30.0, 16, tmp_path / "in.mkv", tmp_path / "out.mkv"
    places = 2 * np.arange(sides // 2)
    ramp_across = np.broadcast_to(272 + slope * (places + across), (sides // 2, sides // 2))
    ramp_down = np.broadcast_to((272 + slope * (places + down))[:, None], (sides // 2, sides // 2))
    planes = [np.full((sides, sides), 512), ramp_across, ramp_down]
    values = [np.rint(plane).astype(np.uint16) for plane in planes]
    options = {"qp": "0", "chroma_sample_location": siting}
    write_planes(source, values, "yuv420p10le", "libx264", options, color_range=1, colorspace=1)
    assert video_stream(source)["chroma_location"] == siting
    report = run_identity(source, out, codec="h264", quality="lossless", preset="ultrafast")
    assert any(f"chroma {siting}" in line for line in report.plan.lines())
    assert video_stream(out)["chroma_location"] == siting
    _, (_, blue, red) = read_planes(out)
    inner = slice(4, -4)  # borders are extended
    for made, offset, axis in ((blue, across, 1), (red, down, 0)):
        at = (2 * np.arange(sides) + offset + 0.5) / 2 - 0.5  # the output's chroma samples in source pixels
        wanted = 272 + slope * at[inner]
        got = made[inner, inner].mean(axis=1 - axis)
        assert np.abs(got - wanted).max() <= 4, (siting, axis)


def test_untagged_siting_follows_the_convention(tmp_path: Path) -> None:
    """FFV1 says nothing of it: left, center in full range; 4:2:2 is left."""
    for pixel_format, full, siting in (
        ("yuv420p", 1, "left"),
        ("yuv420p", 2, "center"),
        ("yuv422p", 2, "left"),
    ):
        source = tmp_path / f"{pixel_format}{full}.mkv"
        _, planes = patches(1, full=full == 2, bits=8, chroma=pixel_format[3:6])
        write_planes(source, planes, pixel_format, color_range=full, colorspace=1)
        assert "chroma_location" not in video_stream(source)
        report = run_identity(source, tmp_path / "out.mkv", codec="ffv1", overwrite=True)
        assert any(f"chroma {siting}" in line for line in report.plan.lines())


# -- HDR -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transfer", [16, 18], ids=["pq", "hlg"])
def test_an_hdr_ramp_comes_back(tmp_path: Path, transfer: int) -> None:
    """Flat patches over all codes, 10 bits, default codec without loss: within 8/1023, tagged as HDR."""
    source, out = tmp_path / "in.mkv", tmp_path / "out.mkv"
    luma = np.rint(np.linspace(64, 940, 16)).astype(np.uint16)[None].repeat(SIDE, 0).repeat(SIDE, 1)
    blue = np.full((SIDE // 2, 8 * SIDE), 512, np.uint16)
    tint = 60 * np.sin(np.linspace(0, np.pi, 16))  # none at black and white, where there is no other colour
    red = np.rint(512 + tint).astype(np.uint16)[None].repeat(SIDE // 2, 0).repeat(SIDE // 2, 1)
    tags = {"color_range": 1, "colorspace": 9, "color_primaries": 9, "color_trc": transfer}
    write_planes(source, [luma, blue, red], "yuv420p10le", **tags)
    report = run_identity(source, out)
    assert any(f"HDR ({'PQ' if transfer == 16 else 'HLG'})" in warning for warning in report.warnings)
    stream = video_stream(out)
    assert (stream["codec_name"], stream["pix_fmt"]) == ("hevc", "yuv420p10le")
    assert stream["color_transfer"] == {16: "smpte2084", 18: "arib-std-b67"}[transfer]
    _, made = read_planes(out)
    for before, after, side in zip((luma, blue, red), made, (SIDE, SIDE // 2, SIDE // 2), strict=True):
        middle, wide = slice(side // 2, None, side), slice(side, None, 2 * side)
        assert np.abs(before[middle, middle].astype(int) - after[wide, wide]).max() <= 8
