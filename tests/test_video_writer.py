"""Writing: formats, colour, depth, copied streams, pictures, and outputs that appear only when complete."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from media import ffmpeg, ffprobe, make_clip, packets, pixels, run_identity, times, video_stream
from recavsr.errors import InputError
from recavsr.video.images import encode_picture
from recavsr.video.output import PendingOutput
from recavsr.video.writer import mend_decoding_times


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a film with two sound tracks, subtitles, an attachment, chapters and titles."""
    folder = tmp_path_factory.mktemp("rich")
    path = folder / "film.mkv"
    (folder / "words.srt").write_text(
        "1\n00:00:00,500 --> 00:00:01,000\nhello\n\n2\n00:00:02,000 --> 00:00:03,000\nworld\n"
    )
    (folder / "font.ttf").write_bytes(b"not really a font" * 20)
    (folder / "chapters.txt").write_text(
        ";FFMETADATA1\ntitle=the film\n[CHAPTER]\nTIMEBASE=1/1000\nSTART=0\nEND=2000\ntitle=one\n"
        "[CHAPTER]\nTIMEBASE=1/1000\nSTART=2000\nEND=4000\ntitle=two\n"
    )
    ffmpeg("-f", "lavfi", "-i", "testsrc2=s=64x36:r=25:d=4", "-f", "lavfi", "-i", "sine=f=440:d=4",
           "-f", "lavfi", "-i", "sine=f=880:d=4", "-i", folder / "words.srt", "-i", folder / "chapters.txt",
           "-map", 1, "-map", 0, "-map", 2, "-map", 3, "-map_metadata", 4, "-map_chapters", 4,
           "-attach", folder / "font.ttf", "-metadata:s:t", "mimetype=application/x-truetype-font",
           "-c:v", "libx264", "-pix_fmt", "yuv420p", "-c:a:0", "aac", "-c:a:1", "ac3", "-c:s", "subrip",
           "-metadata:s:a:0", "language=eng", "-metadata:s:a:1", "language=deu",
           "-metadata:s:a:1", "title=Kommentar", "-metadata:s:s:0", "language=fra",
           "-disposition:a:1", "comment", "-disposition:s:0", "forced", path)  # fmt: skip
    return path


def test_everything_beside_the_picture_is_copied(rich: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.mkv"
    report = run_identity(rich, out)
    assert report.warnings == ()
    before, after = ffprobe(rich), ffprobe(out)
    kinds = [s["codec_type"] for s in before["streams"]]
    assert kinds == ["audio", "video", "audio", "subtitle", "attachment"]
    assert [s["codec_type"] for s in after["streams"]] == kinds
    for ours, theirs in zip(after["streams"], before["streams"], strict=True):
        for tag in ("language", "title", "filename", "mimetype"):
            assert ours["tags"].get(tag) == theirs["tags"].get(tag)
        assert ours["disposition"] == theirs["disposition"]
    for stream in (0, 2, 3):
        assert packets(out, stream) == packets(rich, stream)
    assert after["format"]["tags"]["title"] == "the film"
    assert [c["tags"]["title"] for c in after["chapters"]] == ["one", "two"]


def test_what_mp4_can_not_hold_is_named(rich: Path, tmp_path: Path) -> None:
    report = run_identity(rich, tmp_path / "out.mp4")
    assert report.warnings == (".mp4 can't hold attachment 4 (unknown), it is left out; .mkv can",)
    assert "converted: subtitle 3 (srt, fra) becomes mov_text" in report.plan.lines()
    assert [s["codec_name"] for s in ffprobe(tmp_path / "out.mp4")["streams"]][:3] == ["aac", "h264", "ac3"]
    languages = [s["tags"]["language"] for s in ffprobe(tmp_path / "out.mp4")["streams"]][:3]
    assert languages == ["eng", "und", "deu"]


def test_a_trim_takes_the_sound_and_chapters_along(rich: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.mkv"
    run_identity(rich, out, start=1.5, duration=2)
    assert times(out) == [Fraction(n, 25) for n in range(50)]
    kept = [t for t in times(rich) if t >= Fraction(3, 2)][:51]
    shift, end = kept[0], kept[50]  # the first frame is shown at 0, and all else with it
    for stream in (0, 2, 3):
        moved = [(t - shift, *rest) for t, *rest in packets(rich, stream) if Fraction(3, 2) <= t < end]
        assert packets(out, stream) == moved
    chapters = [
        (c["tags"]["title"], float(c["start_time"]), float(c["end_time"])) for c in ffprobe(out)["chapters"]
    ]
    two = float(Fraction(2) - shift)
    assert chapters == [
        ("one", 0.0, pytest.approx(two)),
        ("two", pytest.approx(two), pytest.approx(2, abs=0.6)),
    ]


def test_a_trim_by_frames_ends_the_sound_too(rich: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.mkv"
    run_identity(rich, out, frames=30)
    assert len(times(out)) == 30
    end = times(rich)[30]
    for stream in (0, 2):
        assert packets(out, stream) == [p for p in packets(rich, stream) if p[0] < end]


@pytest.mark.parametrize(
    ("name", "codec", "pixel_format"),
    [
        ("out.mp4", None, "yuv420p"),
        ("out.mkv", None, "yuv420p"),
        ("out.mov", None, "yuv420p"),
        ("out.webm", None, "yuv420p"),
        ("out.y4m", None, "yuv420p"),
        ("out.mp4", "hevc", "yuv420p"),
        ("out.mp4", "av1", "yuv420p"),
        ("out.mkv", "ffv1", "yuv420p"),
        ("out.mov", "prores", "yuv422p10le"),
    ],
)
def test_formats_and_codecs(tmp_path: Path, name: str, codec: str | None, pixel_format: str) -> None:
    source, out = make_clip(tmp_path / "in.mp4", 12, (72, 128)), tmp_path / name
    run_identity(source, out, codec=codec, quality=None, scale=1)
    stream = video_stream(out)
    assert stream["codec_name"] == {None: {"out.webm": "vp9", "out.y4m": "rawvideo"}.get(name, "h264")}.get(
        codec, codec
    )
    assert stream["pix_fmt"] == pixel_format
    assert len(times(out)) == 12
    assert np.abs(pixels(out).astype(int) - pixels(source)).mean() < 4


@pytest.mark.parametrize(
    ("name", "pixel_format", "codec", "expected"),
    [
        ("in.mkv", "yuv420p10le", None, ("hevc", "yuv420p10le")),
        ("in.mkv", "yuv420p10le", "h264", ("h264", "yuv420p10le")),
        ("in.mkv", "yuv422p10le", "ffv1", ("ffv1", "yuv422p10le")),
        ("in.mkv", "yuv444p12le", None, ("hevc", "yuv444p12le")),
        ("in.mkv", "yuv422p", None, ("h264", "yuv422p")),
        ("in.mkv", "gray", None, ("h264", "yuvj420p")),  # grey is full range, and stays so
        ("in.mkv", "bgr0", None, ("h264", "yuv420p")),
    ],
)
def test_depth_and_chroma_follow_the_source(
    tmp_path: Path, name: str, pixel_format: str, codec: str | None, expected: tuple[str, str]
) -> None:
    source, out = tmp_path / name, tmp_path / "out.mkv"
    ffmpeg(
        "-f", "lavfi", "-i", "smptebars=s=128x72:r=25:d=0.2", "-pix_fmt", pixel_format, "-c:v", "ffv1", source
    )
    run_identity(source, out, codec=codec, quality="lossless" if codec != "ffv1" else None, scale=1)
    stream = video_stream(out)
    assert (stream["codec_name"], stream["pix_fmt"]) == expected
    bars = [10, 30, 50, 70, 90, 110, 124]  # the middle of each
    before, after = pixels(source)[2, 20, bars].astype(int), pixels(out)[2, 20, bars].astype(int)
    assert np.abs(before - after).max() <= 2


def test_ten_bits_are_not_squeezed_through_eight(tmp_path: Path) -> None:
    """A ramp of single 10-bit steps comes back within one step."""
    source, out = tmp_path / "in.mkv", tmp_path / "out.mkv"
    ramp = np.tile(np.arange(64, 64 + 256, dtype="<u2"), (64, 1))
    raw = ramp.tobytes() + np.full((64, 128), 512, "<u2").tobytes()
    (tmp_path / "in.yuv").write_bytes(raw * 2)
    ffmpeg("-f", "rawvideo", "-pix_fmt", "yuv420p10le", "-s", "256x64", "-r", 25, "-i", tmp_path / "in.yuv",
           "-c:v", "ffv1", source)  # fmt: skip
    run_identity(source, out, codec="ffv1", scale=1)
    ffmpeg("-i", out, "-f", "rawvideo", "-pix_fmt", "yuv420p10le", tmp_path / "out.yuv")
    luma = np.frombuffer((tmp_path / "out.yuv").read_bytes(), "<u2")[: 64 * 256].reshape(64, 256)
    assert np.abs(luma.astype(int) - ramp).max() <= 1


def test_hdr10_keeps_tags_and_mastering_data(tmp_path: Path) -> None:
    source, out = tmp_path / "in.mp4", tmp_path / "out.mp4"
    master = "G(13250,34500)B(7500,3000)R(34000,16000)WP(15635,16450)L(10000000,50)"
    ffmpeg("-f", "lavfi", "-i", "smptebars=s=128x72:r=25:d=0.2", "-pix_fmt", "yuv420p10le", "-c:v", "libx265",
           "-x265-params", f"log-level=error:hdr10=1:master-display={master}:max-cll=1000,400:lossless=1"
           ":colorprim=bt2020:transfer=smpte2084:colormatrix=bt2020nc:range=limited", source)  # fmt: skip
    report = run_identity(source, out, scale=1)
    assert any("HDR (PQ)" in warning for warning in report.warnings)
    before, after = video_stream(source), video_stream(out)
    for tag in ("pix_fmt", "color_range", "color_space", "color_primaries", "color_transfer"):
        assert after[tag] == before[tag]
    assert before["color_transfer"] == "smpte2084"
    assert _hdr_data(out) == _hdr_data(source) != []


def _hdr_data(path: Path) -> list[dict[str, object]]:
    frames = ffprobe(path, "-show_frames", "-read_intervals", "%+#1")["frames"]
    wanted = ("Mastering display metadata", "Content light level metadata")
    return sorted((s for s in frames[0]["side_data_list"] if s["side_data_type"] in wanted), key=str)


def test_untagged_small_sources_are_tagged_as_what_they_were(tmp_path: Path) -> None:
    """Without a tag a player would take the 720 rows of the output as BT.709."""
    source, out = tmp_path / "in.mp4", tmp_path / "out.mp4"
    ffmpeg("-f", "lavfi", "-i", "smptebars=s=320x180:r=25:d=0.1", "-pix_fmt", "yuv420p", source)
    assert "color_space" not in video_stream(source)
    run_identity(source, out, scale=4, frames=1)
    assert video_stream(out)["color_space"] == "smpte170m"


def test_odd_sides_that_a_codec_can_not_hold(tmp_path: Path) -> None:
    source = make_clip(tmp_path / "in.mp4", 3)
    run_identity(source, tmp_path / "odd.mp4", size=(65, 37))
    stream = video_stream(tmp_path / "odd.mp4")
    assert (stream["width"], stream["height"], stream["pix_fmt"]) == (65, 37, "yuv444p")
    with pytest.raises(InputError, match="odd side, which av1 can't hold; choose h264, hevc or vp9"):
        run_identity(source, tmp_path / "odd.webm", size=(65, 37), codec="av1")


def test_a_forced_size_keeps_the_display_shape(tmp_path: Path) -> None:
    source = make_clip(tmp_path / "in.mp4", 2, (36, 48))
    run_identity(source, tmp_path / "wide.mp4", size="128x72")
    assert video_stream(tmp_path / "wide.mp4")["display_aspect_ratio"] == "4:3"
    run_identity(source, tmp_path / "same.mp4", size=(96, 72))
    assert video_stream(tmp_path / "same.mp4")["sample_aspect_ratio"] == "1:1"


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".tif", ".bmp", ".webp"])
def test_a_picture_in_gives_a_picture_out(tmp_path: Path, suffix: str) -> None:
    across = np.linspace(0, 255, 32).astype(np.uint8)
    picture = np.stack(np.broadcast_arrays(across[None, :], across[:24, None], np.uint8(90)), axis=-1)
    source, out = tmp_path / "in%03d.png", tmp_path / f"out{suffix}"
    source.write_bytes(encode_picture(picture, ".png"))
    report = run_identity(source, out, scale=1)
    assert report.frames == 1
    assert np.abs(pixels(out)[0].astype(int) - picture).max() <= (
        0 if suffix in (".png", ".tif", ".bmp") else 24
    )


def test_deep_pictures_stay_deep(tmp_path: Path) -> None:
    picture = np.random.default_rng(0).integers(0, 65536, (8, 8, 3)).astype(np.uint16)
    (tmp_path / "in.png").write_bytes(encode_picture(picture, ".png"))
    run_identity(tmp_path / "in.png", tmp_path / "out.png", scale=1)
    ffmpeg("-i", tmp_path / "out.png", "-f", "rawvideo", "-pix_fmt", "rgb48le", tmp_path / "raw")
    assert np.array_equal(np.fromfile(tmp_path / "raw", "<u2").reshape(8, 8, 3), picture)


def test_pictures_out_and_back(tmp_path: Path) -> None:
    source = make_clip(tmp_path / "in.mp4", 23)
    run_identity(source, tmp_path / "folder", scale=1)
    names = sorted(p.name for p in (tmp_path / "folder").iterdir())
    assert names == [f"frame_{n:06d}.png" for n in range(1, 24)]
    (tmp_path / "numbered").mkdir()
    run_identity(tmp_path / "folder", tmp_path / "numbered" / "p%03d.png", scale=1)
    assert sorted(p.name for p in (tmp_path / "numbered").iterdir()) == [
        f"p{n:03d}.png" for n in range(1, 24)
    ]
    run_identity(tmp_path / "folder", tmp_path / "same_names", scale=1)
    assert sorted(p.name for p in (tmp_path / "same_names").iterdir()) == names
    for name, number in (("frame_000001.png", "p001.png"), ("frame_000023.png", "p023.png")):
        first = (tmp_path / "folder" / name).read_bytes()
        assert (
            first
            == (tmp_path / "numbered" / number).read_bytes()
            == (tmp_path / "same_names" / name).read_bytes()
        )
    with pytest.raises(InputError, match="holds pictures already"):
        run_identity(source, tmp_path / "folder")
    with pytest.raises(InputError, match="holds other files"):
        run_identity(tmp_path / "folder", source.parent)
    run_identity(tmp_path / "folder", tmp_path / "film.mp4", scale=1)
    assert np.abs(pixels(tmp_path / "film.mp4").astype(int) - pixels(source)).mean() < 2


def test_outputs_are_refused_before_any_work(tmp_path: Path) -> None:
    source = make_clip(tmp_path / "in.mp4", 3)
    taken = tmp_path / "taken.mp4"
    taken.write_bytes(b"mine")
    expected = {
        taken: "exists already",
        tmp_path / "none" / "out.mp4": "does not exist",
        tmp_path / "out.xyz": "can't write .xyz",
        tmp_path / "out.png": "a video becomes many pictures",
        source: "is the source itself",
    }
    for out, reason in expected.items():
        with pytest.raises(InputError, match=reason):
            run_identity(source, out, scale=2, quality=None)
    assert taken.read_bytes() == b"mine"
    for options, reason in (
        ({"codec": "prores"}, "does not go into .mp4"),
        ({"quality": 99}, "is a number from 0"),
        ({"quality": "best"}, "is a number from 0"),
        ({"codec": "av1", "quality": "lossless"}, "no lossless mode"),
    ):
        with pytest.raises(InputError, match=reason):
            run_identity(source, tmp_path / "out.mp4", **options)
    with pytest.raises(InputError, match="not for pictures"):
        run_identity(source, tmp_path / "folder", codec="h264")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.mp4", "taken.mp4"]


def test_a_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_clip(tmp_path / "in.mp4", 3)
    monkeypatch.setattr(os, "access", lambda path, mode: mode == os.R_OK)  # root may write everywhere
    for name in ("out.mp4", "pictures"):
        with pytest.raises(InputError, match="no permission to write into"):
            run_identity(source, tmp_path / name)
    assert [p.name for p in tmp_path.iterdir()] == ["in.mp4"]


def test_overwriting_replaces_only_with_something_complete(tmp_path: Path) -> None:
    source, out = make_clip(tmp_path / "in.mp4", 3), tmp_path / "out.mp4"
    out.write_bytes(b"old")
    run_identity(source, out, overwrite=True)
    assert len(times(out)) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.mp4", "out.mp4"]


def test_somebody_else_made_the_output_meanwhile(tmp_path: Path) -> None:
    pending = PendingOutput(tmp_path / "out.mp4", overwrite=False)
    pending.path.write_bytes(b"ours")
    pending.final.write_bytes(b"theirs")
    with pytest.raises(InputError, match="meanwhile"):
        pending.commit()
    assert [p.name for p in tmp_path.iterdir()] == ["out.mp4"]
    assert pending.final.read_bytes() == b"theirs"


FULL = """
import resource, sys
from recavsr.errors import InputError
from recavsr.stream.engine import upscale
from recavsr.stream.step import IdentityModel
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
try:
    upscale(sys.argv[1], sys.argv[2], model=IdentityModel(), scale=4)
except InputError as error:
    print(error)
"""


@pytest.mark.parametrize("name", ["out.mp4", "out.mkv", "out.y4m", "pictures"])
def test_a_file_limit_is_one_line_and_leaves_nothing(tmp_path: Path, name: str) -> None:
    source = tmp_path / "in.mp4"
    ffmpeg("-f", "lavfi", "-i", "testsrc2=s=128x72:r=25:d=2", "-pix_fmt", "yuv420p", source)
    done = subprocess.run(
        [sys.executable, "-c", FULL, source, tmp_path / name], capture_output=True, text=True, check=True
    )
    assert done.stdout.count("\n") == 1
    assert "too large for this disk or limit" in done.stdout
    assert [p.name for p in tmp_path.iterdir()] == ["in.mp4"]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    """A real file system of 64 kB, where mounting is allowed."""
    source, disk = make_clip(tmp_path / "in.mp4", 60, (144, 256)), tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("may not mount a small disk here; the file limit above stands in")
    try:
        for name in ("out.mp4", "out.mkv", "pictures"):
            with pytest.raises(InputError, match="the disk is full"):
                run_identity(source, disk / name, scale=4, **({} if name == "pictures" else {"quality": 0}))
            assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("rate", ["25", "24000/1001"])
def test_y4m_states_the_rate_of_the_source(tmp_path: Path, rate: str) -> None:
    source, out = tmp_path / "in.mp4", tmp_path / "out.y4m"
    ffmpeg("-f", "lavfi", "-i", f"testsrc2=s=64x36:r={rate}", "-frames:v", "9", "-pix_fmt", "yuv420p", source)
    run_identity(source, out)
    assert Fraction(rate) == Fraction(out.read_bytes().split()[3][1:].decode().replace(":", "/"))
    assert len(times(out)) == 9


def test_y4m_holds_every_frame_of_a_source_with_uneven_times(tmp_path: Path) -> None:
    source, out = tmp_path / "in.mkv", tmp_path / "out.y4m"
    uneven = "setpts='if(lt(N,4),N,if(lt(N,7),4+N/50,N))/TB/25'"
    ffmpeg("-f", "lavfi", "-i", "testsrc2=s=64x36:r=25", "-vf", uneven, "-fps_mode", "passthrough",
           "-frames:v", "12", "-pix_fmt", "yuv420p", source)  # fmt: skip
    count = len(times(source))
    run_identity(source, out)
    assert len(times(out)) == count


@pytest.mark.parametrize(
    ("first", "second"), [("out.mp4", "mov_text"), ("out.mov", "mov_text"), ("out.webm", "webvtt")]
)
def test_text_subtitles_are_converted_there_and_back(
    rich: Path, tmp_path: Path, first: str, second: str
) -> None:
    """Same words at the same times in every form, read by ffmpeg."""

    def words(path: Path) -> str:
        ffmpeg("-copyts", "-i", path, "-map", "0:s:0", tmp_path / "words.srt")
        return (tmp_path / "words.srt").read_text()

    out, back = tmp_path / first, tmp_path / "back.mkv"
    run_identity(rich, out, **({"quality": 40} if first == "out.webm" else {}))
    stream = next(s for s in ffprobe(out)["streams"] if s["codec_type"] == "subtitle")
    assert stream["codec_name"] == second
    assert stream["tags"]["language"] == "fra"
    assert words(out) == words(rich)
    run_identity(out, back, scale=1)
    assert words(back) == words(rich)


def test_cover_pictures_are_kept(tmp_path: Path) -> None:
    """As a cover in MP4, as an attachment in Matroska, from either; WebM has no place for one."""
    clip, cover = make_clip(tmp_path / "clip.mp4", 5), tmp_path / "cover.png"
    cover.write_bytes(encode_picture(np.full((8, 8, 3), (200, 30, 60), np.uint8), ".png"))
    kind = ("-metadata:s:t", "mimetype=image/png", "-metadata:s:t", "filename=front.png")
    ffmpeg("-i", clip, "-i", cover, "-map", 0, "-map", 1, "-c", "copy", "-disposition:v:1", "attached_pic",
           tmp_path / "in.mp4")  # fmt: skip
    ffmpeg("-i", clip, "-attach", cover, *kind, "-c", "copy", tmp_path / "in.mkv")
    for source in ("in.mp4", "in.mkv"):
        for name in ("out.mp4", "out.mkv"):
            report = run_identity(tmp_path / source, tmp_path / name, overwrite=True)
            assert report.warnings == ()
            picture = ffprobe(tmp_path / name)["streams"][1]
            assert picture["disposition"]["attached_pic"] == 1
            assert packets(tmp_path / name, 1)[0][2] == hashlib.md5(cover.read_bytes()).hexdigest()
            assert len(times(tmp_path / name)) == 5
        report = run_identity(tmp_path / source, tmp_path / "out.webm", overwrite=True, quality=40)
        assert report.warnings == (".webm can't hold cover picture 1 (png), it is left out; .mkv can",)


def test_decoding_times_that_can_not_be_are_mended() -> None:
    def packets(*times: tuple[int, int]) -> list[av.Packet]:
        made = []
        for pts, dts in times:
            packet = av.Packet(4)
            packet.pts, packet.dts, packet.duration = pts, dts, 40
            made.append(packet)
        return made

    (alone,) = made = packets((0, 8908818372740748722))
    mend_decoding_times(made)
    assert (alone.pts, alone.dts) == (0, 0)
    reordered = packets((0, -(2**40)), (120, 120 - 2**40), (40, 40 - 2**40), (80, 80 - 2**40))
    mend_decoding_times(reordered)
    assert [packet.dts for packet in reordered] == [-40, 0, 40, 80]
    fine = packets((0, -80), (80, -40), (40, 0))
    mend_decoding_times(fine)
    assert [packet.dts for packet in fine] == [-80, -40, 0]
