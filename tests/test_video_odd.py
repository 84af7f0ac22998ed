"""Odd sources of many kinds: each gives all of its frames at their times, or one line that says why not."""

from __future__ import annotations

import os
import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from media import ffmpeg, ffprobe, make_clip, packets, pixels, run_identity, times, video_stream
from recavsr.errors import InputError
from recavsr.stream.resume import work_folder
from recavsr.video import reader
from recavsr.video.images import encode_picture
from recavsr.video.streams import later_timecode

SIZE = "64x36"
TEST = ("-f", "lavfi", "-i", f"testsrc2=s={SIZE}:r=25")
SINE = ("-f", "lavfi", "-i", "sine=f=440:r=48000")


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seconds of picture (with B-frames) and sound."""
    path = tmp_path_factory.mktemp("odd") / "film.mp4"
    ffmpeg(*TEST, *SINE, "-t", 2, "-c:v", "libx264", "-qp", 0, "-bf", 2, "-g", 25, "-pix_fmt", "yuv420p",
           "-c:a", "aac", path)  # fmt: skip
    return path


def sound_starts(path: Path) -> list[Fraction]:
    """Return the times of the sound packets."""
    index = next(s["index"] for s in ffprobe(path)["streams"] if s["codec_type"] == "audio")
    return [packet[0] for packet in packets(path, index)]


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_joined_broadcasts_go_on_evenly(film: Path, tmp_path: Path, suffix: str) -> None:
    part, joined, out = tmp_path / "part.ts", tmp_path / "joined.ts", tmp_path / f"out{suffix}"
    ffmpeg("-i", film, "-c", "copy", part)
    joined.write_bytes(part.read_bytes() * 3)
    report = run_identity(joined, out, scale=1)
    assert report.frames == 150
    assert "the clock of the file jumps back 2 times: the output's goes on evenly" in report.warnings
    shown, heard = times(out), sound_starts(out)
    assert len(heard) == 3 * len(sound_starts(part))
    steps = np.diff([float(time) for time in shown])
    assert steps.min() >= 0.039
    assert steps.max() < 0.15
    # Each part's sound lies to its picture as in the part alone.
    run_identity(joined, tmp_path / "end.mp4", scale=1, start=5)
    assert 20 <= len(times(tmp_path / "end.mp4")) < 50
    alone = float(sound_starts(part)[0] - times(part)[0])
    for number in range(3):
        offset = float(heard[number * len(heard) // 3] - shown[number * 50])
        assert abs(offset - alone) < 0.04


@pytest.mark.parametrize("rule", ["_LEAP_PACKETS", "_INTERLEAVED"])
def test_a_damaged_time_in_a_broadcast_is_no_jump_of_its_clock(
    film: Path, tmp_path: Path, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rules say so, each alone: a leap that soon ends, and streams that stay where they are."""
    monkeypatch.setattr(reader, rule, 0)
    source, out = tmp_path / "in.ts", tmp_path / "out.mp4"
    ffmpeg("-i", film, "-c", "copy", source)
    right = times(source)
    data, starts = bytearray(source.read_bytes()), []
    for place in range(0, len(data), 188):  # transport packets in which a picture starts
        if data[place + 1] & 0x5F == 0x41 and data[place + 2] == 0:
            starts.append(data.index(b"\x00\x00\x01\xe0", place))
    for field in (9, 14):  # PTS and DTS of the 21st: 2^18 ticks, nearly 3 s, later
        if field == 9 or data[starts[20] + 7] & 0x40:
            data[starts[20] + field + 2] ^= 0x10
    source.write_bytes(data)
    leap = max(abs(a - b) for a, b in zip(times(source), right))
    assert 2 < leap < 4
    report = run_identity(source, out, scale=1)
    assert report.frames == 50
    assert not any("jumps back" in line for line in report.warnings)
    starts_of_sound = sound_starts(out)
    assert starts_of_sound[-1] < Fraction(22, 10)


def test_times_before_zero_in_matroska(film: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in.mkv", tmp_path / "out.mkv"
    ffmpeg("-itsoffset", "-0.2", "-i", film, "-c", "copy", "-avoid_negative_ts", "disabled", source)
    report = run_identity(source, out, scale=1)
    assert report.frames == 50
    assert times(out) == [Fraction(number, 25) for number in range(50)]
    # libav does not tell the picture's times before zero, but it tells those of sound.
    assert abs(sound_starts(out)[0] - sound_starts(source)[0] - Fraction(1, 5)) <= Fraction(1, 500)


@pytest.mark.parametrize("offset", [2, 100_000])
def test_a_late_start_in_matroska_is_no_truncation(film: Path, tmp_path: Path, offset: int) -> None:
    source = tmp_path / "in.mkv"
    ffmpeg("-itsoffset", offset, "-i", film, "-c", "copy", source)
    report = run_identity(source, tmp_path / "out.mkv", scale=1)
    assert report.cut_short is None
    assert times(tmp_path / "out.mkv") == times(source)


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_damaged_sound_does_not_cost_the_picture(film: Path, tmp_path: Path, suffix: str) -> None:
    source, out = tmp_path / "in.ts", tmp_path / f"out{suffix}"
    ffmpeg("-i", film, "-c", "copy", source)
    data, hits = bytearray(source.read_bytes()), 0
    for place in range(0, len(data), 188):  # transport packets; those of sound that begin no packet of AAC
        if data[place + 1] & 0x5F == 0x01 and data[place + 2] == 0x01 and hits < 12:
            data[place + 20 : place + 180] = bytes(160)
            hits += 1
    assert hits == 12
    source.write_bytes(data)
    report = run_identity(source, out, scale=1)
    assert report.frames == 50
    assert any("damaged packets of audio 1 are left out" in line for line in report.warnings)
    assert len(sound_starts(out)) > 60


def test_sound_of_unnamed_channels_goes_into_mp4(film: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in.mkv", tmp_path / "out.mp4"
    ffmpeg("-i", film, "-c:v", "copy", "-ac", 2, "-c:a", "pcm_s24le", source)
    report = run_identity(source, out, scale=1)
    assert report.warnings == ()
    heard = []
    for path in (source, out):
        with av.open(str(path)) as container:
            heard.append(np.concatenate([f.to_ndarray() for f in container.decode(audio=0)], axis=1))
    assert np.array_equal(*heard)


def test_what_no_format_here_can_hold_gets_no_hint(film: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.wmv"
    ffmpeg("-i", film, "-c:v", "wmv2", "-c:a", "wmav2", source)
    report = run_identity(source, tmp_path / "out.mp4", scale=1, dry_run=True)
    assert report.warnings == (".mp4 can't hold audio 1 (wmav2), it is left out",)


@pytest.mark.parametrize(("standard", "rate"), [("pal", "25/1"), ("ntsc", "30000/1001")])
def test_digital_video_of_cameras(tmp_path: Path, standard: str, rate: str) -> None:
    source, out = tmp_path / "in.dv", tmp_path / "out.mp4"
    ffmpeg("-f", "lavfi", "-i", "testsrc2", "-frames:v", 3, "-target", f"{standard}-dv", source)
    run_identity(source, out, height=64)
    stream = video_stream(out)
    assert (stream["avg_frame_rate"], len(times(out))) == (rate, 3)
    assert stream["pix_fmt"] == {"pal": "yuv420p", "ntsc": "yuv422p"}[standard]


def test_a_format_that_changes_in_the_middle(tmp_path: Path) -> None:
    """Other chroma, other range: each frame is read by its own tags, also through the deinterlacer."""
    for name, options in {
        "a": ("-pix_fmt", "yuv420p"),
        "b": ("-vf", "scale=out_range=pc,format=yuv422p", "-color_range", "pc"),
    }.items():
        ffmpeg("-f", "lavfi", "-i", f"color=0x3060C0:s={SIZE}:r=25", "-frames:v", 10, "-c:v", "libx264",
               "-qp", 0, "-bf", 0, *options, tmp_path / f"{name}.h264")  # fmt: skip
    source = tmp_path / "both.h264"
    source.write_bytes((tmp_path / "a.h264").read_bytes() + (tmp_path / "b.h264").read_bytes())
    for deinterlace in (False, True):
        out = tmp_path / f"out{deinterlace}.mp4"
        assert run_identity(source, out, scale=1, deinterlace=deinterlace).frames == 20
        middle = pixels(out)[:, 18, 32].astype(int)
        assert np.abs(middle - (0x30, 0x60, 0xC0)).max() <= 3


def test_interlaced_later_is_said(tmp_path: Path) -> None:
    ffmpeg(*TEST, "-frames:v", 10, "-c:v", "libx264", "-bf", 0, tmp_path / "a.h264")
    ffmpeg(*TEST, "-frames:v", 10, "-c:v", "libx264", "-bf", 0, "-flags", "+ilme+ildct", tmp_path / "b.h264")
    source = tmp_path / "both.h264"
    source.write_bytes((tmp_path / "a.h264").read_bytes() + (tmp_path / "b.h264").read_bytes())
    report = run_identity(source, tmp_path / "out.mp4")
    assert any(line.startswith("the video is interlaced from 0.40 s on") for line in report.warnings)
    assert run_identity(source, tmp_path / "full.mp4", deinterlace=True).warnings == ()


@pytest.mark.parametrize("codec", ["h264", "hevc", "av1", "vp9", "ffv1", "prores"])
@pytest.mark.parametrize("side", [(1, 40), (40, 1), (1, 1)])
def test_narrow_pictures(tmp_path: Path, codec: str, side: tuple[int, int]) -> None:
    """Each encoder takes them, or is refused before any work in a line that names another."""
    source = tmp_path / "in.mkv"
    ffmpeg("-f", "lavfi", "-i", "testsrc2=s=64x64:r=25", "-vf", f"scale={side[0]}:{side[1]},format=gbrp",
           "-frames:v", 3, "-c:v", "ffv1", source)  # fmt: skip
    out = tmp_path / f"out{'.mov' if codec == 'prores' else '.mkv'}"
    if codec == "hevc" or (codec == "av1" and min(side) == 1):
        with pytest.raises(InputError, match=rf"can't encode {2 * side[0]}x{2 * side[1]}; choose h264, or"):
            run_identity(source, out, scale=2, codec=codec)
        assert not out.exists()
        return
    run_identity(source, out, scale=2, codec=codec)
    stream = video_stream(out)
    assert (stream["width"], stream["height"]) == (2 * side[0], 2 * side[1])
    assert len(times(out)) == 3


@pytest.mark.parametrize("matrix", ["bt2020c", "ycgco"])
def test_a_matrix_without_conversion_names_the_file(tmp_path: Path, matrix: str) -> None:
    source = tmp_path / "in.mp4"
    ffmpeg(*TEST, "-frames:v", 3, "-pix_fmt", "yuv444p", "-c:v", "libx264", "-x264-params",
           f"colormatrix={matrix}", source)  # fmt: skip
    with pytest.raises(InputError, match=r"in\.mp4: the colour matrix .* has no conversion"):
        run_identity(source, tmp_path / "out.mp4")


def test_alpha_that_rounding_left_just_below_full_is_opaque(tmp_path: Path) -> None:
    source = tmp_path / "in.mov"
    with av.open(str(source), "w") as container:
        stream = container.add_stream("prores_ks", rate=25, options={"profile": "4444"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuva444p10le"
        frame = av.VideoFrame(64, 48, "yuva444p10le")
        for plane, value in zip(frame.planes, (500, 512, 512, 1020)):
            plane.update(np.full(plane.buffer_size // 2, value, np.uint16).tobytes())
        container.mux([*stream.encode(frame), *stream.encode(None)])
    assert run_identity(source, tmp_path / "out.mp4").frames == 1


def test_an_animated_png_is_a_video(tmp_path: Path) -> None:
    source = tmp_path / "in.png"
    ffmpeg("-f", "lavfi", "-i", "testsrc2=s=32x24:r=10", "-frames:v", 6, "-f", "apng", source)
    with pytest.raises(InputError, match="a video becomes many pictures"):
        run_identity(source, tmp_path / "out.png")
    run_identity(source, tmp_path / "out.mp4")
    assert times(tmp_path / "out.mp4") == [Fraction(number, 10) for number in range(6)]


def test_missing_numbers_are_said(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in (7, 8, 10, 13):
        picture = np.full((6, 8, 3), number, np.uint8)
        (folder / f"f_{number:03d}.png").write_bytes(encode_picture(picture, ".png"))
    report = run_identity(folder, tmp_path / "out.mp4")
    assert report.warnings == (
        "3 numbers between f_007.png and f_013.png have no picture: the others follow one another",
    )
    assert report.frames == 4


@pytest.mark.parametrize("target", ["in", "in/f_%03d.png", "in/f_%d.png"])
def test_pictures_are_never_written_over_their_source(tmp_path: Path, target: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in (1, 2):
        picture = np.full((6, 8, 3), number, np.uint8)
        (folder / f"f_{number:03d}.png").write_bytes(encode_picture(picture, ".png"))
    before = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InputError, match="the source's own pictures"):
        run_identity(folder, tmp_path / target, overwrite=True)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before
    run_identity(folder, folder / "large_%03d.png")
    assert len(list(folder.iterdir())) == 4


def test_pipes_and_devices_are_never_replaced_by_files(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.mp4"
    os.mkfifo(pipe)
    for overwrite in (False, True):
        with pytest.raises(InputError):
            run_identity(make_clip(tmp_path / "in.mp4", 2), pipe, overwrite=overwrite)
    assert pipe.is_fifo()


def test_the_longest_names(tmp_path: Path) -> None:
    stem = "n" * 251
    source, out = make_clip(tmp_path / "in.mp4", 3), tmp_path / f"{stem}.mp4"
    assert run_identity(source, out).frames == 3
    assert work_folder(out).name != work_folder(tmp_path / f"{stem[1:]}m.mp4").name
    assert {path.name for path in tmp_path.iterdir()} == {"in.mp4", out.name}
    with pytest.raises(InputError, match="name too long"):
        run_identity(tmp_path / f"{stem}{stem}.mp4", tmp_path / "out.mp4")
    with pytest.raises(InputError, match="the name is too long"):
        run_identity(source, tmp_path / f"{stem}{stem}.mp4")


def test_a_timecode_is_that_of_the_first_frame(tmp_path: Path) -> None:
    source = tmp_path / "in.mov"
    ffmpeg(*TEST, "-t", 2, "-timecode", "09:59:59:20", source)
    for name, options, timecode in (("a", {}, "09:59:59:20"), ("b", {"start": 1}, "10:00:00:20")):
        report = run_identity(source, tmp_path / f"{name}.mov", **options)
        assert report.warnings == ()
        assert video_stream(tmp_path / f"{name}.mov")["tags"]["timecode"] == timecode


def test_drop_frame_timecode_against_counting() -> None:
    rate, number = Fraction(30000, 1001), 0
    for minute in range(25):
        for second in range(60):
            for frame in range(30):
                if second == 0 and frame < 2 and minute % 10:
                    continue
                text = f"00:{minute:02d}:{second:02d};{frame:02d}"
                if frame in (0, 1, 2, 29) and second in (0, 1, 59):
                    assert later_timecode({"timecode": "00:00:00;00"}, number, rate)["timecode"] in (text,)
                    assert later_timecode({"timecode": text}, 17, rate) == later_timecode(
                        {"timecode": "00:00:00;00"}, number + 17, rate
                    )
                number += 1
    assert later_timecode({"timecode": "23:59:59:24"}, 1, Fraction(25)) == {"timecode": "00:00:00:00"}


def test_chapters_in_mp4_are_not_called_lost(film: Path, tmp_path: Path) -> None:
    about = tmp_path / "chapters.txt"
    about.write_text(";FFMETADATA1\n[CHAPTER]\nTIMEBASE=1/1000\nSTART=0\nEND=1000\ntitle=one\n"
                     "[CHAPTER]\nTIMEBASE=1/1000\nSTART=1000\nEND=2000\ntitle=two\n")  # fmt: skip
    source, out = tmp_path / "in.mp4", tmp_path / "out.mp4"
    ffmpeg("-i", film, "-i", about, "-map", 0, "-map_chapters", 1, "-c", "copy", source)
    assert run_identity(source, out).warnings == ()
    assert [chapter["tags"]["title"] for chapter in ffprobe(out)["chapters"]] == ["one", "two"]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_camera_picture_is_turned_by_its_exif_tag(tmp_path: Path, orientation: int) -> None:
    corners = np.zeros((32, 48, 3), np.uint8)
    corners[:16, :24], corners[:16, 24:], corners[16:, :24] = (200, 40, 40), (40, 200, 40), (40, 40, 200)
    plain = encode_picture(corners, ".jpg")
    tag = struct.pack(">HHIHH", 0x0112, 3, 1, orientation, 0)
    exif = b"Exif\0\0" + b"MM\0*" + struct.pack(">IH", 8, 1) + tag + bytes(4)
    source = tmp_path / "in.jpg"
    source.write_bytes(plain[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + plain[2:])
    run_identity(source, tmp_path / "out.png", scale=1)
    # Exif 2.3, 4.6.4: where the 0th row and the 0th column are
    turned = {
        1: corners,
        2: corners[:, ::-1],
        3: corners[::-1, ::-1],
        4: corners[::-1],
        5: corners.transpose(1, 0, 2),
        6: np.rot90(corners, -1),
        7: corners.transpose(1, 0, 2)[::-1, ::-1],
        8: np.rot90(corners),
    }[orientation]
    shown = pixels(tmp_path / "out.png")[0].astype(int)
    assert shown.shape == turned.shape
    assert np.abs(shown - turned).mean() < 4


@pytest.mark.parametrize("order", "<>")
def test_tiff_of_several_pages_and_with_jpeg_inside(tmp_path: Path, order: str) -> None:
    """A file made by hand: three directories, the second a reduced copy of the first."""

    def directory(place: int, compression: int, reduced: bool, following: int) -> bytes:
        tags = [(254, 4, int(reduced)), (256, 3, 2), (257, 3, 2), (258, 3, 8), (259, 3, compression),
                (262, 3, 1), (273, 4, 8), (277, 3, 1), (278, 3, 2), (279, 4, 4)]  # fmt: skip
        entries = b"".join(
            struct.pack(f"{order}HHI{'HH' if kind == 3 else 'I'}", tag, kind, 1, *((value, 0)[: 5 - kind]))
            for tag, kind, value in tags
        )
        return struct.pack(f"{order}H", len(tags)) + entries + struct.pack(f"{order}I", following)

    for name, compression in (("pages", 1), ("jpeg", 7)):
        size, source = 2 + 10 * 12 + 4, tmp_path / f"{name}.tif"
        places = [12 + number * size for number in range(3)]
        head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}I", places[0])
        parts = [directory(places[n], compression, n == 1, [*places, 0][n + 1]) for n in range(3)]
        source.write_bytes(head + bytes((10, 90, 170, 250)) + b"".join(parts))
    report = run_identity(tmp_path / "pages.tif", tmp_path / "out.png", scale=1)
    assert report.warnings == (f"{tmp_path / 'pages.tif'} has 2 pages: the first one is taken",)
    assert pixels(tmp_path / "out.png")[0, ..., 0].ravel().tolist() == [10, 90, 170, 250]
    with pytest.raises(InputError, match="JPEG inside TIFF"):
        run_identity(tmp_path / "jpeg.tif", tmp_path / "other.png")


def test_names_of_pictures_with_more_signs(tmp_path: Path) -> None:
    source = make_clip(tmp_path / "in.mp4", 2)
    run_identity(source, tmp_path / "50% of %03d_%s_%02d.png")
    assert sorted(path.name for path in tmp_path.glob("*.png")) == [
        "50% of 001_%s_%02d.png",
        "50% of 002_%s_%02d.png",
    ]


@pytest.mark.parametrize("codec", ["h264", "hevc", "av1", "vp9"])
def test_an_unknown_preset_is_named_before_any_work(tmp_path: Path, codec: str) -> None:
    with pytest.raises(InputError, match="has no preset 'bogus'"):
        run_identity(make_clip(tmp_path / "in.mp4", 2), tmp_path / "out.mkv", codec=codec, preset="bogus")


def test_packets_that_say_as_before(tmp_path: Path) -> None:
    """Theora codes a frame like the one before as an empty packet: nothing new is shown."""
    source = tmp_path / "in.ogv"
    black = "drawbox=c=black:t=fill:enable='between(n,5,9)'"
    ffmpeg(*TEST, "-vf", black, "-frames:v", 20, "-c:v", "libtheora", "-q:v", 10, source)
    with av.open(str(source)) as container:
        shown = [p.pts * p.time_base for p in container.demux(video=0) if p.size]
    assert len(shown) < 20
    report = run_identity(source, tmp_path / "out.mkv")
    assert report.cut_short is None
    assert times(tmp_path / "out.mkv") == shown


def test_sound_whose_times_go_back(film: Path, tmp_path: Path) -> None:
    source, out = tmp_path / "in.mkv", tmp_path / "out.mp4"
    ffmpeg("-i", film, "-c", "copy", "-bsf:a", "setts=ts='if(gt(N,20),PTS-5000,PTS)'", source)
    report = run_identity(source, out)
    assert report.frames == 50
    assert len(packets(out, 1)) == len(packets(source, 1))
    starts = sound_starts(out)
    assert starts == sorted(starts)


def test_captions_inside_the_pictures_are_named(tmp_path: Path) -> None:
    """A supplemental message of ATSC A/53, put by hand before the first slice."""
    plain, source = tmp_path / "plain.h264", tmp_path / "in.h264"
    ffmpeg(*TEST, "-frames:v", 3, "-c:v", "libx264", "-bf", 0, plain)
    captions = b"\xb5\x00\x31GA94\x03\x41\xff\xfc\x94\x2c\xff"
    message = b"\x00\x00\x01\x06\x04" + bytes([len(captions)]) + captions + b"\x80"
    data = plain.read_bytes()
    place = data.index(b"\x00\x00\x01\x65")
    source.write_bytes(data[:place] + message + data[place:])
    line = "closed captions inside the pictures (CEA-608, CEA-708) are not kept"
    assert run_identity(source, tmp_path / "out.mp4").warnings == (line,)
    assert run_identity(plain, tmp_path / "plain.mp4").warnings == ()
