"""The odd inputs of `shared/cases`: each row of its table as an exact test, with the identity model."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from media import bar_numbers, ffmpeg, ffprobe, packets, pixels, run_identity, times, video_stream
from recavsr.stream.batch import FileStatus, upscale_many
from recavsr.stream.step import IdentityModel

pytestmark = pytest.mark.shared


@pytest.fixture(scope="session")
def cases(shared: Path, tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Make all cases once per test run, also when several workers ask at the same time."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "cases"
    ffmpeg("-version")  # skips, or fails in CI, where there is none
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            script = shared / "cases" / "make_cases.sh"
            subprocess.run(["bash", script, folder], check=True, capture_output=True)
            (folder / "made").touch()
    return folder


@pytest.mark.parametrize("count", [1, 2, 4, 5, 8, 20, 21, 22, 24, 25, 81, 100, 145])
def test_c01_every_frame_once_in_order(cases: Path, tmp_path: Path, count: int) -> None:
    out = tmp_path / "out.mp4"
    report = run_identity(cases / f"c01_n{count}.mp4", out)
    assert bar_numbers(out, 2) == list(range(count))
    assert report.frames == count
    assert times(out) == times(cases / f"c01_n{count}.mp4")
    assert not report.truncated


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("320x180", 2),
        ("320x180", 4),
        ("640x360", 1.5),
        ("480x720", 2),
        ("854x480", 1.5),
        ("426x240", 2),
        ("36x20", 4),
        ("36x20", 1.5),
        ("322x182", 1.5),
        ("1000x16", 2),
        ("1000x16", 4),
    ],
)
def test_c02_exact_size_and_all_four_edges(cases: Path, tmp_path: Path, name: str, scale: float) -> None:
    out = tmp_path / "out.mp4"
    run_identity(cases / f"c02_{name}.mp4", out, scale=scale, frames=2)
    width, height = (int(np.floor(int(side) * scale + 0.5)) for side in name.split("x"))
    frame = pixels(out)[0].astype(int)
    assert frame.shape == (height, width, 3)
    for edge in (frame[0], frame[-1], frame[:, 0], frame[:, -1]):
        # Lime, or what it is under the other matrix: 4:2:0 mixes in a little of the picture behind.
        red, green, blue = np.median(edge, axis=0)
        assert green >= 200
        assert max(red, blue) <= 48


def test_c02_odd_sides_become_444(cases: Path, tmp_path: Path) -> None:
    for scale, size in ((1, (181, 321)), (3, (543, 963)), (2, (362, 642))):
        out = tmp_path / f"out{scale}.mp4"
        run_identity(cases / "c02_odd321.mkv", out, scale=scale, frames=2)
        stream = video_stream(out)
        assert (stream["height"], stream["width"]) == size
        assert stream["pix_fmt"] == "yuv444p"
    same = pixels(tmp_path / "out1.mp4").astype(int) - pixels(cases / "c02_odd321.mkv")[:2]
    assert np.abs(same).max() <= 3


def test_c04_every_cut_is_found_and_nothing_else(cases: Path, tmp_path: Path) -> None:
    assert run_identity(cases / "c04_cuts.mp4", tmp_path / "out.mp4").cuts == (31, 71, 74)
    assert run_identity(cases / "c04_cuts.mp4", tmp_path / "off.mp4", cuts="off").cuts == ()


@pytest.mark.parametrize(("name", "rate"), [("c06_2997", "30000/1001"), ("c06_23976", "24000/1001")])
def test_c06_ntsc_rates_are_exact_over_a_minute(cases: Path, tmp_path: Path, name: str, rate: str) -> None:
    source, out = cases / f"{name}.mp4", tmp_path / "out.mp4"
    run_identity(source, out, scale=1, quality=30, preset="ultrafast")
    assert video_stream(out)["avg_frame_rate"] == rate
    assert times(out) == [number / Fraction(rate) for number in range(len(times(source)))]
    assert packets(out, 1) == packets(source, 1)
    picture, sound = (Fraction(stream["duration"]) for stream in ffprobe(out)["streams"])
    assert abs(picture - sound) <= 1 / Fraction(rate)
    assert bar_numbers(out, 1) == bar_numbers(source, 1)


def test_c07_variable_frame_rate_keeps_every_time(cases: Path, tmp_path: Path) -> None:
    source = cases / "c07_vfr.mp4"
    run_identity(source, tmp_path / "out.mp4")
    assert times(tmp_path / "out.mp4") == times(source)
    last = packets(tmp_path / "out.mp4", 0)[-1][1]
    assert last == packets(source, 0)[-1][1]


def test_c07_variable_frame_rate_in_matroska(cases: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.mkv"
    ffmpeg("-i", cases / "c07_vfr.mp4", "-c", "copy", source)
    run_identity(source, tmp_path / "out.mkv")
    assert times(tmp_path / "out.mkv") == times(source)
    # Matroska counts milliseconds: finer times are rounded to them, never moved further.
    run_identity(cases / "c07_vfr.mp4", tmp_path / "rounded.mkv")
    pairs = zip(times(tmp_path / "rounded.mkv"), times(cases / "c07_vfr.mp4"), strict=True)
    assert all(abs(ours - theirs) <= Fraction(1, 2000) for ours, theirs in pairs)


@pytest.mark.parametrize("suffix", [".mkv", ".mp4"])
@pytest.mark.parametrize("name", ["c08_late_audio", "c08_early_audio"])
def test_c08_sound_is_copied_with_its_offset(cases: Path, tmp_path: Path, name: str, suffix: str) -> None:
    source, out = cases / f"{name}.mkv", tmp_path / f"out{suffix}"
    run_identity(source, out)
    assert times(out) == times(source)
    before, after = (
        [s for s in ffprobe(path)["streams"] if s["codec_type"] == "audio"] for path in (source, out)
    )
    assert [s["codec_name"] for s in after] == [s["codec_name"] for s in before]
    if suffix == ".mkv":  # in MP4 the first track of a kind counts as default if none is
        assert [s["disposition"] for s in after] == [s["disposition"] for s in before]
    for ours, theirs in zip(after, before, strict=True):
        language = theirs.get("tags", {}).get("language", "und")
        assert ours.get("tags", {}).get("language", "und") == language
        copied, original = packets(out, ours["index"]), packets(source, theirs["index"])
        assert [p[2] for p in copied] == [p[2] for p in original]
        # Exact in Matroska; MP4 counts samples, so milliseconds are met to the nearest of those.
        tolerance = 0 if suffix == ".mkv" else Fraction(1, 1000)
        assert all(abs(ours[0] - theirs[0]) <= tolerance for ours, theirs in zip(copied, original))


@pytest.mark.parametrize("suffix", [".mkv", ".mp4"])
def test_c09_pixel_aspect_and_chapters_are_kept(cases: Path, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"out{suffix}"
    run_identity(cases / "c09_sar_chapters.mkv", out)
    stream = video_stream(out)
    assert (stream["width"], stream["height"]) == (360, 288)
    assert stream["sample_aspect_ratio"] == "64:45"
    chapters = [(c["tags"]["title"], c["start_time"], c["end_time"]) for c in ffprobe(out)["chapters"]]
    assert chapters == [("one", "0.000000", "1.000000"), ("two", "1.000000", "2.000000")]


def test_c11_rotation_is_baked_in_once(cases: Path, tmp_path: Path) -> None:
    source, out = cases / "c11_rotated.mp4", tmp_path / "out.mp4"
    run_identity(source, out, scale=1)
    run_identity(source, tmp_path / "pictures", scale=1, frames=3)
    stream = video_stream(out)
    assert (stream["width"], stream["height"]) == (90, 160)
    assert "side_data_list" not in stream
    assert "rotate" not in stream["tags"]
    # The turn that ffmpeg shows; it turns before it interpolates chroma, so only nearly the same.
    shown, stored = pixels(source).astype(int), pixels(cases / "c11_tmp.mp4").astype(int)
    turns = [np.rot90(stored, turn, axes=(1, 2)) for turn in (1, 3)]
    right, wrong = sorted(turns, key=lambda turned: np.abs(turned - shown).mean())
    assert np.abs(wrong - shown).mean() > 10 * np.abs(right - shown).mean()
    for number, path in enumerate(sorted((tmp_path / "pictures").iterdir())):
        assert np.abs(pixels(path)[0].astype(int) - right[number]).max() <= 2


@pytest.mark.parametrize("name", ["c13_bt601", "c13_fullrange"])
@pytest.mark.parametrize("codec", ["h264", "hevc"])
def test_c13_colour_tags_and_patches(cases: Path, tmp_path: Path, name: str, codec: str) -> None:
    source, out = cases / f"{name}.mp4", tmp_path / "out.mp4"
    run_identity(source, out, codec=codec, quality="lossless", preset="ultrafast")
    tags = ("color_range", "color_space", "color_primaries", "color_transfer")
    assert [video_stream(out).get(tag) for tag in tags] == [video_stream(source).get(tag) for tag in tags]
    before, after = pixels(source)[3].astype(int), pixels(out)[3].astype(int)
    for x in (12, 36, 60, 84, 108, 132, 152):  # the middle of each bar
        patch = after[20:80, 2 * x - 4 : 2 * x + 4]
        assert np.abs(patch - before[25, x]).max() <= 2


def test_c16_folder_with_traps(cases: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    seen: list[str] = []
    options = {"model": IdentityModel(), "scale": 2, "on_file": lambda result: seen.append(result.source)}
    report = upscale_many(cases / "c16", out, **options)
    status = {Path(result.source).name: result for result in report.files}
    good = {"ünïcode name %03d.MP4": (144, 256), "tall.mp4": (1440, 960), "-dash.mp4": (144, 256)}
    for name, size in good.items():
        assert status[name].status is FileStatus.DONE
        stream = video_stream(out / name)
        assert (stream["height"], stream["width"]) == size
    assert bar_numbers(out / "ünïcode name %03d.MP4", 2) == list(range(25))
    assert status["still.png"].status is FileStatus.DONE
    assert (video_stream(out / "still.png")["width"], video_stream(out / "still.png")["codec_name"]) == (
        64,
        "png",
    )
    reasons = {
        "truncated.mp4": "breaks off before its index",
        "empty.mkv": "the file is empty",
        "audio_only.m4a": "audio only",
        "broken_link.mp4": "link to a file that does not exist",
    }
    for name, reason in reasons.items():
        assert status[name].status is FileStatus.FAILED
        assert reason in (status[name].reason or "")
    assert sorted(p.name for p in out.iterdir()) == sorted([*good, "still.png"])
    assert report.exit_code == 1
    assert len(seen) == len(report.files) == 8
    before = {p: p.stat().st_mtime_ns for p in out.iterdir()}
    second = upscale_many(cases / "c16", out, **options)
    assert second.count(FileStatus.SKIPPED) == 4
    assert second.count(FileStatus.FAILED) == 4
    assert {p: p.stat().st_mtime_ns for p in out.iterdir()} == before


PIPE = """
from recavsr.stream.engine import upscale
from recavsr.stream.step import IdentityModel
upscale("-", "-", model=IdentityModel(), scale=4)
"""


def test_c17_first_block_comes_out_while_the_source_stalls(cases: Path, tmp_path: Path) -> None:
    data = (cases / "c17.y4m").read_bytes()
    header, frame_bytes = 57, 13830
    out_frame = len(b"FRAME\n") + 512 * 288 * 3 // 2
    process = subprocess.Popen(
        [sys.executable, "-c", PIPE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdin
    assert process.stdout
    try:
        process.stdin.write(data[: header + 21 * frame_bytes])
        process.stdin.flush()
        head = process.stdout.readline()
        # The rest is only sent once the first block has arrived: without it, this read would never end.
        first = process.stdout.read(21 * out_frame)
        assert len(first) == 21 * out_frame
        rest, errors = process.communicate(data[header + 21 * frame_bytes :])
        assert process.returncode == 0, errors
    finally:
        process.kill()
        process.wait()
    assert head.startswith(b"YUV4MPEG2 W512 H288 F25:1 ")
    (tmp_path / "out.y4m").write_bytes(head + first + rest)
    assert bar_numbers(tmp_path / "out.y4m", 4) == list(range(60))
    assert errors == b""
