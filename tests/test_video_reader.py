"""Probing and reading: what a source is, which frames come at which time, and why others are refused."""

from __future__ import annotations

import itertools
import os
import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from media import ffmpeg, make_clip, pixels, tell_times, times
from recavsr.errors import InputError
from recavsr.video.color import ColorTags, ToRgb
from recavsr.video.frames import Frame, Orientation
from recavsr.video.images import encode_picture
from recavsr.video.probe import probe
from recavsr.video.reader import Trim, open_reader, parse_time
from recavsr.video.source import SourceKind


def read(source: Path | str, **trim: object) -> tuple[list[Frame], str | None]:
    """Return the frames of a source and why it was cut short."""
    with open_reader(source, Trim.parse(**trim)) as reader:  # type: ignore[arg-type]
        frames = [item for item in reader if isinstance(item, Frame)]
        return frames, reader.cut_short


def test_probe_says_what_is_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    ffmpeg("-f", "lavfi", "-i", "testsrc2=s=64x36:r=30000/1001:d=1", "-f", "lavfi", "-i", "sine=d=1",
           "-map", "0", "-map", "1", "-metadata:s:a:0", "language=fra", "-metadata", "title=a clip",
           "-pix_fmt", "yuv420p10le", "-c:v", "libx265", "-x265-params", "log-level=error",
           "-color_range", "tv", "-colorspace", "bt709", path)  # fmt: skip
    info = probe(path)
    assert info.kind is SourceKind.FILE
    assert info.size == info.coded_size == (36, 64)
    assert (info.bit_depth, info.deep, info.chroma, info.alpha) == (10, True, "420", False)
    assert info.rate == Fraction(30000, 1001)
    assert info.frame_count == 30
    assert abs(info.duration - Fraction(30 * 1001, 30000)) < Fraction(1, 1000)
    assert (info.color.range, info.color.matrix) == (1, 1)
    assert [(s.kind, s.codec, s.language) for s in info.streams] == [("audio", "aac", "fra")]
    assert info.metadata["title"] == "a clip"


def test_cover_art_is_not_the_video(tmp_path: Path) -> None:
    cover, song, film = tmp_path / "cover.png", tmp_path / "song.mp3", tmp_path / "film.mp4"
    cover.write_bytes(encode_picture(np.zeros((64, 64, 3), np.uint8), ".png"))
    ffmpeg("-f", "lavfi", "-i", "sine=d=1", "-i", cover, "-map", "0", "-map", "1", "-c:v", "copy",
           "-id3v2_version", "3", "-disposition:v:0", "attached_pic", song)  # fmt: skip
    with pytest.raises(InputError, match="audio only and a cover picture"):
        probe(song)
    clip = make_clip(tmp_path / "clip.mp4")
    ffmpeg(
        "-i",
        clip,
        "-i",
        cover,
        "-map",
        "1",
        "-map",
        "0",
        "-c",
        "copy",
        "-disposition:v:0",
        "attached_pic",
        film,
    )
    info = probe(film)
    assert info.size == (36, 64)
    assert [s.cover_art for s in info.streams] == [True]


def test_missing_unreadable_and_senseless_sources(tmp_path: Path) -> None:
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.txt").write_text("no video in here, just words\n" * 50)
    (tmp_path / "noise.mp4").write_bytes(np.random.default_rng(0).bytes(20000))
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.mp4").symlink_to(tmp_path / "nowhere.mp4")
    (tmp_path / "subtitles.srt").write_text("1\n00:00:00,000 --> 00:00:01,000\nwords\n")
    expected = {
        "missing.mp4": "no such file",
        "empty.mp4": "the file is empty",
        "text.txt": "not a video",
        "noise.mp4": "not a video|nothing could be decoded",
        "folder": "a folder without pictures",
        "link.mp4": "a link to a file that does not exist",
        "frames_%04d.png": "no files match",
        "*.png": "no files match",
        "subtitles.srt": "there is no video in it",
    }
    for name, reason in expected.items():
        with pytest.raises(InputError, match=reason) as caught:
            probe(tmp_path / name)
        assert "\n" not in str(caught.value)
        assert name in str(caught.value)
    with pytest.raises(InputError, match="can't be opened"):
        probe("http://127.0.0.1:9/none.mp4")


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_clip(tmp_path / "clip.mp4")
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may read everything
    with pytest.raises(InputError, match="no permission"):
        probe(path)


def test_frames_come_in_order_with_exact_times(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "clip.mp4", 30, rate=Fraction(24000, 1001))
    frames, cut_short = read(path)
    assert [f.stamp.time for f in frames] == [n * Fraction(1001, 24000) for n in range(30)]
    assert {f.stamp.duration * f.stamp.time_base for f in frames} == {Fraction(1001, 24000)}
    assert cut_short is None
    assert all(f.pixels.shape == (36, 64, 3) and f.pixels.dtype == np.uint8 for f in frames)


def test_trims_take_the_same_frames_as_reading_all(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "clip.mkv", 200)  # seeking goes to a keyframe before
    whole, _ = read(path)
    part, _ = read(path, start="0:00:03.2", duration=1, frames=20)
    assert len(part) == 20
    assert all(np.array_equal(a.pixels, b.pixels) for a, b in zip(part, whole[80:100], strict=True))
    assert [f.stamp.time for f in part] == [Fraction(n, 25) for n in range(20)]
    assert len(read(path, start=3.2, duration=1)[0]) == 25
    assert len(read(path, duration="0:02")[0]) == 50
    with pytest.raises(InputError, match="ends at 8"):
        read(path, start=9)


def test_start_in_a_file_that_can_not_seek(tmp_path: Path) -> None:
    path = tmp_path / "clip.y4m"
    ffmpeg("-f", "lavfi", "-i", "testsrc2=s=64x36:r=25:d=4", "-pix_fmt", "yuv420p", path)
    whole, part = read(path)[0], read(path, start=2, frames=3)[0]
    assert [np.array_equal(a.pixels, b.pixels) for a, b in zip(part, whole[50:53], strict=True)] == [True] * 3


@pytest.mark.parametrize("value", ["x", "1:2:3:4", -1, float("nan"), "-3", ""])
def test_senseless_times(value: object) -> None:
    with pytest.raises(InputError, match="start must"):
        parse_time(value, "start")  # type: ignore[arg-type]


def test_timecodes() -> None:
    assert parse_time("1:02:03.25", "start") == Fraction(14893, 4)
    assert parse_time("90", "start") == parse_time("1:30", "start") == parse_time(90, "start") == 90
    assert parse_time(0.5, "start") == Fraction(1, 2)
    for bad in ({"duration": 0}, {"frames": 0}, {"frames": -2}):
        with pytest.raises(InputError):
            Trim.parse(**bad)


@pytest.mark.parametrize("name", ["clip.mp4", "clip.mkv", "clip.y4m", "fragments.mp4"])
def test_a_source_that_breaks_off_gives_what_it_has_and_says_so(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    options = {
        "clip.mp4": ("-movflags", "faststart"),
        "fragments.mp4": ("-movflags", "frag_keyframe+empty_moov"),
    }.get(name, ())
    ffmpeg("-f", "lavfi", "-i", "testsrc2=s=64x36:r=25:d=4", "-pix_fmt", "yuv420p", "-g", 10, *options, path)
    assert read(path)[1] is None
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 6 // 10])
    frames, cut_short = read(path)
    assert 30 <= len(frames) <= 75
    assert cut_short is not None
    assert "breaks off" in cut_short or "damaged" in cut_short


def test_a_damaged_middle_is_named(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "clip.mp4", 100)
    with av.open(str(path)) as container:
        packets = [(p.pos, p.size) for p in container.demux(video=0) if p.size]
    data = bytearray(path.read_bytes())
    position, size = packets[50]
    data[position : position + size] = b"\xff" * size
    path.write_bytes(data)
    frames, cut_short = read(path)
    assert 90 <= len(frames) <= 100
    assert cut_short == "1 damaged place was skipped"


def test_index_missing_and_no_decodable_frame(tmp_path: Path) -> None:
    path = make_clip(tmp_path / "clip.mp4", 100)
    data = path.read_bytes()
    (tmp_path / "head.mp4").write_bytes(data[:3000])
    with pytest.raises(InputError, match="breaks off before its index"):
        probe(tmp_path / "head.mp4")
    start = data.index(b"mdat") + 4
    end = data.index(b"moov") - 4
    (tmp_path / "zeros.mp4").write_bytes(data[:start] + bytes(end - start) + data[end:])
    with pytest.raises(InputError, match="nothing could be decoded"):
        probe(tmp_path / "zeros.mp4")


def test_missing_times_and_rates_are_made_up_evenly(tmp_path: Path) -> None:
    path = tmp_path / "raw.h264"
    ffmpeg("-i", make_clip(tmp_path / "clip.mp4", 20), "-c", "copy", "-bsf:v", "h264_mp4toannexb", path)
    frames, _ = read(path)
    assert [f.stamp.time for f in frames] == [Fraction(n, 25) for n in range(20)]


@pytest.mark.parametrize("name", ["clip.mp4", "clip.ts"])
@pytest.mark.parametrize(
    ("told", "times"),
    [
        ([None, 5, 9, 17], [1, 5, 9, 17]),  # as RTSP begins
        ([None, None, 3, 11], [0, 4, 8, 16]),  # from -5 on: moved to zero
        ([3, 7, None, 15], [3, 7, 11, 15]),
        ([None, None, None, None], [0, 4, 8, 12]),
    ],
)
def test_frames_that_tell_no_time_lie_between_those_that_do(
    name: str, told: list[int | None], times: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_clip(tmp_path / name, 20)
    tell_times(monkeypatch, told)
    frames, _ = read(path)
    assert [f.stamp.time * 100 for f in frames] == times
    assert [f.stamp.end - f.stamp.time for f in frames] == [Fraction(1, 25)] * len(told)


def test_avi_with_frames_coded_out_of_order(tmp_path: Path) -> None:
    path = tmp_path / "clip.avi"
    ffmpeg("-f", "lavfi", "-i", "testsrc2=s=64x36:r=25:d=2", "-c:v", "mpeg4", "-bf", 2, path)
    with open_reader(path) as reader:
        stamps = [item.stamp for item in reader if isinstance(item, Frame)]
        assert reader.warnings == []
    assert [b.pts - a.pts for a, b in itertools.pairwise(stamps)] == [1] * 49


def test_a_broadcast_clock_is_moved_to_zero(tmp_path: Path) -> None:
    path = tmp_path / "clip.ts"
    ffmpeg("-i", make_clip(tmp_path / "clip.mp4", 20), "-c", "copy", "-output_ts_offset", 5000, path)
    assert times(path)[0] > 5000
    frames, _ = read(path)
    assert [f.stamp.time for f in frames] == [Fraction(n, 25) for n in range(20)]


def test_transparency_is_refused_unless_it_is_opaque(tmp_path: Path) -> None:
    for name, alpha in (("solid.png", 255), ("glass.png", 100)):
        rgba = np.full((8, 8, 4), 90, np.uint8)
        rgba[2, 2:, 3] = alpha
        rgba[..., 3] |= 255 if alpha == 255 else 0
        frame = av.VideoFrame.from_ndarray(rgba, format="rgba")
        frame.save(str(tmp_path / name)) if alpha == 255 else _save_rgba(frame, tmp_path / name)
    assert len(read(tmp_path / "solid.png")[0]) == 1
    with pytest.raises(InputError, match="transparent in places"):
        read(tmp_path / "glass.png")


def _save_rgba(frame: av.VideoFrame, path: Path) -> None:
    context = av.CodecContext.create("png", "w")
    context.width, context.height, context.pix_fmt = frame.width, frame.height, "rgba"
    context.time_base = Fraction(1, 25)
    path.write_bytes(b"".join(bytes(p) for p in [*context.encode(frame), *context.encode(None)]))


def test_pictures_as_a_video_in_natural_order(tmp_path: Path) -> None:
    for number in (1, 2, 10):
        picture = np.full((6, 8, 3), number, np.uint8)
        (tmp_path / f"f{number}.png").write_bytes(encode_picture(picture, ".png"))
    for source in (tmp_path, tmp_path / "f%d.png", tmp_path / "f*.png"):
        frames, _ = read(source)
        assert [int(f.pixels[0, 0, 0]) for f in frames] == [1, 2, 10]
        assert [f.stamp.time for f in frames] == [0, Fraction(1, 25), Fraction(2, 25)]
    assert [f.name for f in read(tmp_path, start=0.04)[0]] == ["f2", "f10"]
    (tmp_path / "f3.png").write_bytes(encode_picture(np.zeros((6, 9, 3), np.uint8), ".png"))
    frames, cut_short = read(tmp_path)
    assert len(frames) == 2
    assert cut_short is not None
    assert "is 9x6, the first picture is 8x6" in cut_short


def test_orientation_against_its_definition() -> None:
    picture = np.arange(2 * 3 * 3).reshape(2, 3, 3)
    seen = set()
    for a, b, c, d in ((1, 0, 0, 1), (0, 1, -1, 0), (-1, 0, 0, -1), (0, -1, 1, 0),
                       (-1, 0, 0, 1), (1, 0, 0, -1), (0, 1, 1, 0), (0, -1, -1, 0)):  # fmt: skip
        turned = Orientation(a, b, c, d).apply(picture)
        height, width = turned.shape[:2]
        for y in range(2):
            for x in range(3):
                x_new, y_new = a * x + c * y, b * x + d * y
                assert np.array_equal(turned[y_new % height, x_new % width], picture[y, x]) or (
                    # A mirrored axis starts at the far end: -0 is the last index, so shift by one there.
                    np.array_equal(
                        turned[_place(y_new, b + d, height), _place(x_new, a + c, width)], picture[y, x]
                    )
                )
        seen.add(turned.tobytes() + bytes(turned.shape))
    assert len(seen) == 8


def _place(value: int, sign: int, extent: int) -> int:
    return value if sign > 0 else extent - 1 + value


@pytest.mark.parametrize("matrix", [(0, 65536, -65536, 0), (-65536, 0, 0, 65536), (0, 65536, 65536, 0)])
def test_display_matrix_of_a_file(tmp_path: Path, matrix: tuple[int, int, int, int]) -> None:
    """The 3x3 matrix of an MP4 track header is honoured, mirrors included."""
    path = make_clip(tmp_path / "clip.mp4", 3)
    plain = read(path)[0][0].pixels
    data = bytearray(path.read_bytes())
    identity = struct.pack(">9i", 65536, 0, 0, 0, 65536, 0, 0, 0, 1 << 30)
    header = data.index(identity, data.index(b"tkhd"))
    a, b, c, d = matrix
    data[header : header + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(data)
    info = probe(path)
    signs = Orientation(*(np.sign(v) for v in (a, b, c, d)))
    assert info.orientation == signs
    assert info.size == ((64, 36) if a == 0 else (36, 64))
    assert np.array_equal(read(path)[0][0].pixels, signs.apply(plain))
    if a == 0:
        assert np.abs(pixels(path)[0].astype(int) - signs.apply(plain)).mean() < 8


@pytest.mark.parametrize(
    ("matrix", "kr", "kb"), [(1, 0.2126, 0.0722), (6, 0.299, 0.114), (9, 0.2627, 0.0593)]
)
@pytest.mark.parametrize("full", [False, True])
def test_conversion_against_the_formula(matrix: int, kr: float, kb: float, full: bool) -> None:
    tags = ColorTags(range=2 if full else 1, matrix=matrix)
    generator = np.random.default_rng(1)
    for red, green, blue in generator.uniform(0.1, 0.9, (20, 3)):
        luma = kr * red + (1 - kr - kb) * green + kb * blue
        u, v = (blue - luma) / (2 - 2 * kb), (red - luma) / (2 - 2 * kr)
        coded = (
            (luma * 255, 128 + u * 255, 128 + v * 255)
            if full
            else (16 + 219 * luma, 128 + 224 * u, 128 + 224 * v)
        )
        frame = av.VideoFrame(16, 16, "yuv444p")
        for plane, value in zip(frame.planes, coded, strict=True):
            plane.update(bytes([round(value)]) * plane.buffer_size)
        seen = ToRgb(tags, deep=False)(frame)[8, 8].astype(float)
        assert np.abs(seen - 255 * np.array([red, green, blue])).max() <= 2


def test_untagged_sources_follow_the_size_rule() -> None:
    assert ColorTags().resolved(1280, 720, rgb=False) == ColorTags(range=1, matrix=1)
    assert ColorTags().resolved(720, 576, rgb=False) == ColorTags(range=1, matrix=6)
    assert ColorTags(range=2, matrix=9).resolved(64, 64, rgb=False) == ColorTags(range=2, matrix=9)
    with pytest.raises(InputError, match="ICtCp"):
        ToRgb(ColorTags(range=1, matrix=14), deep=True)


# -- interlaced video ----------------------------------------------------------------------------------


def test_interlaced_video_is_named_or_made_into_full_frames(tmp_path: Path) -> None:
    """As many frames at the same times, the pixels of ffmpeg's filter."""
    source, full = tmp_path / "fields.mkv", tmp_path / "full.mkv"
    ffmpeg("-f", "lavfi", "-i", "testsrc2=s=64x48:r=50:d=1", "-f", "lavfi", "-i", "sine=d=1", "-vf",
           "tinterlace=interleave_top", "-c:v", "libx264", "-qp", 0, "-pix_fmt", "yuv420p",
           "-flags", "+ildct+ilme", "-x264-params", "tff=1", source)  # fmt: skip
    ffmpeg("-i", source, "-vf", "bwdif=mode=send_frame", "-c:v", "libx264", "-qp", 0, "-an", full)

    def read(path: Path, **options: bool) -> tuple[np.ndarray, list[Fraction], list[str]]:
        with open_reader(path, **options) as reader:
            frames = [item for item in reader if isinstance(item, Frame)]
            return np.stack([f.pixels for f in frames]), [f.stamp.time for f in frames], reader.warnings

    combed, combed_times, warnings = read(source)
    assert warnings == ["the video is interlaced and is upscaled as it is; --deinterlace makes full frames"]
    made, made_times, warnings = read(source, deinterlace=True)
    assert warnings == []
    assert made_times == combed_times
    assert len(made) == 25
    wanted = read(full)[0].astype(int)
    assert np.abs(made - wanted).mean() < 0.5
    assert np.abs(combed - wanted).mean() > 1
