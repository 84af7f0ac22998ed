"""`recavsr compare`: which frames stand side by side, where, and what is said of them."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from media import ffmpeg, ffprobe, make_clip, pixels, times
from recavsr.cli.main import run
from recavsr.evaluation.metrics import psnr, ssim
from recavsr.video.clips import read_clip, write_clip

RATE = 10


def greys(path: Path, levels: list[int], size: tuple[int, int] = (40, 64), rate: int = RATE) -> Path:
    """A lossless video whose frames are plain grey."""
    frames = np.repeat(np.array(levels, np.uint8), size[0] * size[1] * 3)
    raw = path.with_suffix(".raw")
    raw.write_bytes(frames.tobytes())
    form = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{size[1]}x{size[0]}", "-r", rate]
    ffmpeg(*form, "-i", raw, "-c:v", "ffv1", "-pix_fmt", "gbrp", path)
    return path


def written(folder: Path) -> np.ndarray:
    """The pictures [N, H, W, 3] that a comparison wrote."""
    return np.stack([read_clip(path)[0] for path in sorted(folder.iterdir())])


def test_each_frame_stands_beside_the_one_shown_at_its_time(tmp_path: Path) -> None:
    a = greys(tmp_path / "a.mkv", [10, 20, 30, 40], size=(80, 128))
    b = greys(tmp_path / "b.mkv", [110, 115, 120, 125, 130, 135, 140, 145], rate=2 * RATE)
    c = greys(tmp_path / "c.mkv", [200, 210])
    assert run(["compare", str(a), str(b), str(c), "-o", str(tmp_path / "out")]) == 0
    sheets = written(tmp_path / "out")
    bar = sheets.shape[1] - 80
    assert sheets.shape == (4, 80 + bar, 3 * 128 + 2 * 4, 3)
    assert 0 < bar < 80
    for number, sheet in enumerate(sheets):
        columns = [sheet[bar:, left : left + 128] for left in (0, 132, 264)]
        assert [np.unique(column).tolist() for column in columns] == [
            [10 + 10 * number],
            [115 + 10 * number],  # at 20 frames a second, the one in the middle of a's frame
            [200 if number == 0 else 210],
        ]
        assert len(np.unique(sheet[:bar])) > 2  # titles


def test_lengths_and_shapes_are_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    a = greys(tmp_path / "a.mkv", [10, 20, 30, 40])
    b = greys(tmp_path / "b.mkv", [10], size=(40, 40))
    c = greys(tmp_path / "c.mkv", [10] * 9)
    assert run(["compare", str(a), str(b), str(c), "-o", str(tmp_path / "out.mp4")]) == 0
    said = capsys.readouterr().err
    assert "b.mkv ends before" in said
    assert "b.mkv has another shape" in said
    assert "c.mkv goes on after the end of" in said
    assert len(times(tmp_path / "out.mp4")) == 4


def test_times_and_sound_of_the_first(tmp_path: Path) -> None:
    a = tmp_path / "a.mkv"
    late = "setpts='if(gt(N,2),N+2,N)'"  # in tenths of a second
    ffmpeg(
        "-f", "lavfi", "-i", "testsrc=size=64x36:rate=10:duration=0.6", "-f", "lavfi", "-i", "sine=d=0.8",
        "-vf", late, "-fps_mode", "passthrough", "-c:a", "flac", a,
    )  # fmt: skip
    assert run(["compare", str(a), str(make_clip(tmp_path / "b.mp4")), "-o", str(tmp_path / "c.mkv")]) == 0
    assert times(tmp_path / "c.mkv") == times(a)
    assert [stream["codec_name"] for stream in ffprobe(tmp_path / "c.mkv")["streams"]] == ["h264", "flac"]


def test_a_wipe_moves_to_and_fro(tmp_path: Path) -> None:
    a = greys(tmp_path / "a.mkv", [10] * 61)
    b = greys(tmp_path / "b.mkv", [200] * 61)
    out = tmp_path / "out"
    assert run(["compare", str(a), str(b), "--wipe", "-o", str(out)]) == 0
    sheets = written(out)
    assert sheets.shape[2] == 64
    rows = sheets[:, -20, :, 0]
    borders = [int((row == 10).sum()) for row in rows]
    assert all((np.diff(row.astype(int)[row != 255]) >= 0).all() for row in rows)  # a on the left
    assert borders[0] == 31
    assert max(borders) > 55
    assert min(borders) < 9
    assert borders[60] == borders[0]  # after six seconds


def test_a_region_and_a_height(tmp_path: Path) -> None:
    clip = make_clip(tmp_path / "a.mp4", frames=2, size=(72, 128))
    small = make_clip(tmp_path / "b.mp4", frames=2)
    arguments = ["compare", str(clip), str(small), "--region", "16,8,32x24", "-o", str(tmp_path / "out")]
    assert run(arguments) == 0
    sheet = written(tmp_path / "out")[0]
    bar = sheet.shape[0] - 24
    truth = read_clip(clip)[0, 8:32, 16:48]
    assert np.array_equal(sheet[bar:, :32], truth)
    assert np.abs(sheet[bar:, 36:].astype(int) - truth).mean() < 6  # enlarged from half of the size
    assert run([*arguments, "--height", "48", "--overwrite"]) == 0
    assert written(tmp_path / "out").shape[2] == 2 * 64 + 4


def test_scores_against_a_reference(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(60, 200, (3, 48, 64, 3), dtype=np.uint8)
    for name, crf in (("truth", 0), ("good", 20), ("bad", 45)):
        write_clip(tmp_path / f"{name}.mp4", truth, Fraction(RATE), crf=crf)
    names = [str(tmp_path / f"{name}.mp4") for name in ("good", "bad", "truth")]
    out = ["-o", str(tmp_path / "out.mp4"), "--json"]
    assert run(["compare", *names[:2], "--names", "a,b", "--reference", names[2], *out]) == 0
    result = json.loads(capsys.readouterr().err.splitlines()[-1])
    good, bad, true = (read_clip(Path(name)) for name in names)
    for title, clip in (("a", good), ("b", bad)):
        assert result["scores"][title]["psnr"] == pytest.approx(psnr(clip, true).mean(), abs=1e-3)
        assert result["scores"][title]["ssim"] == pytest.approx(ssim(clip, true).mean(), abs=1e-4)
    assert result["scores"]["a"]["psnr"] > result["scores"]["b"]["psnr"] + 3
    assert result["frames"] == 3


def test_a_video_that_breaks_off_is_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    whole = make_clip(tmp_path / "a.mkv", frames=60, codec="ffv1", pixel_format="yuv420p")
    (tmp_path / "b.mkv").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    for order in (["a.mkv", "b.mkv"], ["b.mkv", "a.mkv"]):
        out = tmp_path / f"{order[0]}.mp4"
        assert run(["compare", *(str(tmp_path / name) for name in order), "-o", str(out)]) == 1
        assert f"done in part: {tmp_path / 'b.mkv'}: " in capsys.readouterr().err
        assert len(times(out)) == (60 if order[0] == "a.mkv" else len(times(tmp_path / "b.mkv")))


def test_pictures(tmp_path: Path) -> None:
    for name in ("a", "b"):
        ffmpeg("-f", "lavfi", "-i", "testsrc=size=64x36", "-frames:v", 1, tmp_path / f"{name}.png")
    assert run(["compare", str(tmp_path / "a.png"), str(tmp_path / "b.png")]) == 0
    sheet = pixels(tmp_path / "a_compare.png")[0]
    assert sheet.shape[1] == 2 * 64 + 4
    assert np.array_equal(sheet[-36:, :64], sheet[-36:, 68:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.mp4"], "name two videos or more"),
        (["a.mp4", "a.mp4", "a.mp4", "--wipe"], "a wipe is between two videos, not 3"),
        (["a.mp4", "a.mp4", "--names", "one"], "--names: 1 titles for 2 videos"),
        (["a.mp4", "a.mp4", "--region", "0,0,99x10"], "does not lie inside the picture of 64x36"),
        (["a.mp4", "a.mp4", "--region", "left"], "--region must look like 400,200,256x192"),
        (["a.mp4", "nowhere.mp4"], "nowhere.mp4"),
        (["a.mp4", "a.png"], "compare videos with videos, or pictures with pictures"),
        (["a.mp4", "a.mp4", "-o", "a.mp4"], "a.mp4"),
    ],
)
def test_what_is_refused(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    make_clip(tmp_path / "a.mp4", frames=2)
    ffmpeg("-f", "lavfi", "-i", "testsrc=size=64x36", "-frames:v", 1, tmp_path / "a.png")
    before = (tmp_path / "a.mp4").read_bytes()
    assert run(["compare", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mp4", "a.png"]
    assert (tmp_path / "a.mp4").read_bytes() == before
