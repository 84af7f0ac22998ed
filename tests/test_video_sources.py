"""Sources with times of their own: edit lists, offsets, an hour of an NTSC rate; fields of both orders."""

from __future__ import annotations

import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from media import ffmpeg, make_clip, packets, run_identity, times, video_stream
from recavsr.errors import InputError
from recavsr.video.frames import Frame
from recavsr.video.reader import open_reader


def test_an_edit_list_hides_frames_and_keeps_times(tmp_path: Path) -> None:
    """Cut by copying: the file holds all from the key frame on, its edit list shows what begins at 0.6 s."""
    source, cut = tmp_path / "in.mp4", tmp_path / "cut.mp4"
    ffmpeg("-f", "lavfi", "-i", "testsrc2=s=64x36:r=25:d=3", "-f", "lavfi", "-i", "sine=d=3", "-g", 50,
           "-c:v", "libx264", "-pix_fmt", "yuv420p", "-c:a", "aac", source)  # fmt: skip
    ffmpeg("-ss", 0.6, "-i", source, "-c", "copy", cut)
    with av.open(str(cut)) as container:
        coded = sum(packet.size > 0 for packet in container.demux(video=0))
    shown = times(cut)
    assert coded > len(shown) == 60
    report = run_identity(cut, tmp_path / "out.mp4")
    assert not report.truncated
    assert report.frames == len(shown)
    assert times(tmp_path / "out.mp4") == shown


def test_a_picture_that_starts_late(tmp_path: Path) -> None:
    """An empty edit before the first frame: the offset to the sound stays."""
    source, out = tmp_path / "in.mp4", tmp_path / "out.mp4"
    ffmpeg("-itsoffset", 0.48, "-i", make_clip(tmp_path / "clip.mp4", 25), "-f", "lavfi", "-i", "sine=d=1.48",
           "-map", 0, "-map", 1, "-c:v", "copy", "-c:a", "aac", source)  # fmt: skip
    run_identity(source, out)
    assert times(out) == times(source)
    assert times(out)[0] == Fraction(12, 25)
    assert packets(out, 1) == packets(source, 1)


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_the_end_of_an_hour_at_an_ntsc_rate(tmp_path: Path, suffix: str) -> None:
    """Frames after 107,892 others: in MP4 exact, in Matroska to its millisecond.

    benchmarks/ntsc_hour.py does all of them.
    """
    source, out, rate = tmp_path / "in.mp4", tmp_path / f"out{suffix}", Fraction(30000, 1001)
    with av.open(str(source), "w") as container:
        stream = container.add_stream("libx264", rate=rate, options={"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
        for number in (0, *range(107_880, 107_892)):
            frame = av.VideoFrame.from_ndarray(np.full((48, 32), number % 200, np.uint8), format="yuv420p")
            frame.pts, frame.time_base = number, 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    wanted = [number / rate for number in (0, *range(107_880, 107_892))]
    assert times(source) == wanted
    run_identity(source, out, scale=1)
    off = [abs(ours - theirs) for ours, theirs in zip(times(out), wanted, strict=True)]
    assert max(off) <= (0 if suffix == ".mp4" else Fraction(1, 2000))


@pytest.mark.parametrize(
    ("pixel_format", "codec", "expected"),
    [
        ("yuv422p12le", "hevc", "yuv422p12le"),
        ("yuv444p16le", "ffv1", "yuv444p16le"),
        ("gbrp16le", "ffv1", "gbrp16le"),
        ("bgr0", "ffv1", "bgr0"),
        ("yuv420p12le", "av1", "yuv420p10le"),
    ],
)
def test_depths_and_rgb(tmp_path: Path, pixel_format: str, codec: str, expected: str) -> None:
    source, out = tmp_path / "in.mkv", tmp_path / "out.mkv"
    ffmpeg(
        "-f", "lavfi", "-i", "testsrc2=s=64x36:r=25:d=0.1", "-pix_fmt", pixel_format, "-c:v", "ffv1", source
    )
    report = run_identity(source, out, codec=codec, quality=None, scale=1)
    assert video_stream(out)["pix_fmt"] == expected
    assert report.plan.changes == (("12 bits become 10",) if codec == "av1" else ())
    if expected in ("bgr0", "gbrp16le"):  # RGB is not converted at all
        with av.open(str(source)) as before, av.open(str(out)) as after:
            for theirs, ours in zip(before.decode(video=0), after.decode(video=0), strict=True):
                kind = "rgb24" if expected == "bgr0" else "rgb48le"
                assert np.array_equal(
                    ours.reformat(format=kind).to_ndarray(), theirs.reformat(format=kind).to_ndarray()
                )


# -- fields ----------------------------------------------------------------------------------------------


def interlaced(path: Path, order: str) -> tuple[Path, np.ndarray]:
    """Write a ball that moves 2.5 pixels a field, as fields; return the file, and the full frames of each."""
    full = path.with_suffix(".full.mkv")
    ball = "geq=lum='if(lt(hypot(X-10-2.5*N,Y-32),14),220,40)':cb=128:cr=128"
    black = "color=black:s=96x64:r=50:d=0.6"
    ffmpeg("-f", "lavfi", "-i", f"{black},{ball}", "-c:v", "ffv1", "-pix_fmt", "yuv420p", full)
    x264 = "tff=1" if order == "tff" else "bff=1"
    ffmpeg("-i", full, "-vf", f"interlace=scan={order}:lowpass=off", "-c:v", "libx264", "-qp", 0,
           "-flags", "+ildct+ilme", "-x264-params", x264, path)  # fmt: skip
    with av.open(str(full)) as container:
        return path, np.stack([frame.to_ndarray(format="gray") for frame in container.decode(video=0)])


@pytest.mark.parametrize("order", ["tff", "bff"])
def test_fields_of_both_orders(tmp_path: Path, order: str) -> None:
    """The full frames are near those from which the first fields were taken; the woven ones are combed."""
    source, truth = interlaced(tmp_path / "fields.mkv", order)

    def luma(**options: bool) -> np.ndarray:
        with open_reader(source, **options) as reader:
            assert reader.info.interlaced
            return np.stack([item.pixels[..., 1] for item in reader if isinstance(item, Frame)])

    woven, made = luma(), luma(deinterlace=True)
    assert len(woven) == len(made) == len(truth) // 2

    def difference(frames: np.ndarray, field: int) -> float:
        """Return the mean difference to the full frames of the first or second fields, ends apart."""
        return float(np.abs(frames[2:-2].astype(float) - truth[field::2][2:-2]).mean())

    def combed(frames: np.ndarray) -> float:
        """Return how much the lines alternate."""
        lines = frames.astype(float)
        return float(np.abs(2 * lines[:, 1:-1] - lines[:, :-2] - lines[:, 2:]).mean())

    assert combed(made) < 0.5 * combed(woven)
    assert difference(made, 0) < 0.7 * difference(woven, 0)
    assert difference(made, 0) < 0.5 * difference(made, 1)  # and not of the second fields: the order is right


# -- HDR -------------------------------------------------------------------------------------------------


def tag_dolby_vision(path: Path, profile: int, compatibility: int) -> Path:
    """Lay a Dolby Vision configuration box into the sample entry of an MP4 whose index comes last."""
    flags = profile << 9 | 1 << 3 | 1 << 2 | 1  # level 1, with RPU and base layer
    box = struct.pack(
        ">I4sBBHB19x", 32, b"dvcC" if profile <= 7 else b"dvvC", 1, 0, flags, compatibility << 4
    )
    data, at = bytearray(path.read_bytes()), 0
    for name in (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsd", b"hvc1"):
        while data[at + 4 : at + 8] != name:
            at += struct.unpack_from(">I", data, at)[0]
        (size,) = struct.unpack_from(">I", data, at)
        struct.pack_into(">I", data, at, size + len(box))
        end, at = at + size, at + (16 if name == b"stsd" else 8)
    data[end:end] = box
    path.write_bytes(data)
    return path


def hevc_clip(path: Path) -> Path:
    """Write a clip of HEVC with 10 bits."""
    with av.open(str(path), "w") as container:
        video = container.add_stream("libx265", rate=25, options={"x265-params": "log-level=none"})
        video.width, video.height, video.pix_fmt = 64, 48, "yuv420p10le"
        video.codec_context.codec_tag = "hvc1"
        for level in (40, 80, 120):
            picture = av.VideoFrame.from_ndarray(np.full((48, 64, 3), level, np.uint8), format="rgb24")
            container.mux(video.encode(picture))
        container.mux(video.encode(None))
    return path


@pytest.mark.parametrize("container", [".mp4", ".mkv"])
def test_dolby_vision_without_a_base_layer_is_refused(container: str, tmp_path: Path) -> None:
    tagged = tag_dolby_vision(hevc_clip(tmp_path / "tagged.mp4"), profile=5, compatibility=0)
    source = tmp_path / f"in{container}"
    with av.open(str(tagged)) as file, av.open(str(source), "w", options={"strict": "unofficial"}) as copy:
        stream = copy.add_stream_from_template(file.streams.video[0], opaque=True)
        for packet in file.demux():
            if packet.dts is not None:
                packet.stream = stream
                copy.mux(packet)
    with pytest.raises(InputError, match="Dolby Vision profile 5 has no picture"), open_reader(source):
        pass


@pytest.mark.parametrize(("profile", "compatibility"), [(7, 6), (8, 1), (8, 4)])
def test_dolby_vision_over_a_base_layer_is_named_as_dropped(
    profile: int, compatibility: int, tmp_path: Path
) -> None:
    source = tag_dolby_vision(hevc_clip(tmp_path / "in.mp4"), profile, compatibility)
    with open_reader(source) as reader:
        assert len([frame for frame in reader if isinstance(frame, Frame)]) == 3
    assert any("Dolby Vision" in line and "\n" not in line for line in reader.info.warnings)


def test_a_codec_of_a_card_that_is_not_there(tmp_path: Path) -> None:
    """Named, it is refused; asked for in general, the software does it and a line says so."""
    source, out = make_clip(tmp_path / "in.mp4", 3, (144, 160)), tmp_path / "out.mp4"
    try:
        context = av.CodecContext.create("h264_nvenc", "w")
        context.width, context.height, context.pix_fmt = 320, 288, "yuv420p"
        context.time_base = Fraction(1, 25)
        context.open()
        pytest.skip("this machine has one")
    except (av.error.FFmpegError, ValueError):
        pass
    with pytest.raises(InputError, match="h264_nvenc can't be opened on this machine"):
        run_identity(source, out, codec="h264_nvenc", quality=None)
    report = run_identity(source, out, quality=20, encoder="hardware")
    assert "no graphics card here encodes this h264: libx264 does it" in report.warnings
    assert video_stream(out)["codec_name"] == "h264"
