"""Folders as training data: shots, indexes, quality, ready-made pairs; and the commands for them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import av
import cv2
import numpy as np
import pytest
import torch
from scipy import ndimage

from recavsr.cli.main import run
from recavsr.data import folders, quality
from recavsr.data.clips import ClipSource
from recavsr.data.folders import cut_at, index_folders, photo_files, scenedetect_cuts, video_files
from recavsr.data.pack import PackIndex
from recavsr.data.paired import PairedBatches, PairedFolder
from recavsr.data.pool import PairSettings, TrainingPool
from recavsr.data.quality import Limits, QualityReport, check_folder
from recavsr.errors import InputError
from recavsr.video.images import encode_picture
from recavsr.video.memory_codec import decode_planes


def texture(height: int, width: int, seed: int, shift: int = 0) -> np.ndarray:
    """A sharp random picture of blotches and edges, uint8 [H, W, 3]."""
    rng = np.random.default_rng(seed)
    soft = ndimage.gaussian_filter(rng.normal(size=(height, width, 3)), (6, 6, 0))
    picture = 128 + 60 * np.sign(soft) + 400 * soft
    return np.roll(picture.clip(20, 235).round().astype(np.uint8), shift, axis=1)


def write_video(path: Path, frames: list[np.ndarray], pixel_format: str = "yuv420p", crf: int = 12) -> None:
    height, width, _ = frames[0].shape
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=Fraction(25), options={"crf": str(crf)})
        stream.width, stream.height, stream.pix_fmt = width, height, pixel_format
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode(None))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """videos/: one with a cut, one of pictures, one too small, one broken; photos/: PNG and small JPEG."""
    root = tmp_path_factory.mktemp("folders")
    (root / "videos" / "deep" / "frames").mkdir(parents=True)
    (root / "photos").mkdir()
    first, second = ([texture(80, 96, seed, 2 * t) for t in range(16)] for seed in (1, 2))
    write_video(root / "videos" / "cut.mp4", [*first, *(255 - frame // 2 for frame in second[:12])])
    write_video(root / "videos" / "small.mp4", [texture(40, 48, 3, t) for t in range(12)])
    (root / "videos" / "broken.mp4").write_bytes(b"nothing")
    for t in range(11):
        picture = encode_picture(texture(80, 80, 5, t), ".png")
        (root / "videos" / "deep" / "frames" / f"{t + 1}.png").write_bytes(picture)
    (root / "photos" / "p.png").write_bytes(encode_picture(texture(96, 100, 7), ".png"))
    (root / "photos" / "q.jpg").write_bytes(encode_picture(texture(96, 100, 8), ".jpg"))
    return root


# ---------------------------------------------------------------- decoding of any format


@pytest.mark.parametrize("pixel_format", ["yuv444p", "yuv422p", "yuv420p10le"])
def test_other_pixel_formats_become_444(pixel_format: str, tmp_path: Path) -> None:
    frames = [texture(48, 64, 1)]
    write_video(tmp_path / "v.mp4", frames, pixel_format, crf=1)
    (planes,) = decode_planes(tmp_path / "v.mp4")
    assert planes.luma.shape == planes.blue.shape == (48, 64)
    assert not planes.full_range
    luma = 16 + frames[0] @ np.array([0.299, 0.587, 0.114]) * 219 / 255
    assert np.abs(planes.luma - luma).mean() < 1.5


def test_a_png_keeps_its_colours(data: Path) -> None:
    from recavsr.data.clips import planes_to_rgb

    (planes,) = decode_planes(data / "photos" / "p.png")
    rgb = planes_to_rgb(planes).permute(1, 2, 0).numpy()
    assert np.abs(rgb - texture(96, 100, 7)).max() < 3


# ---------------------------------------------------------------- indexes


def test_files_are_found_at_any_depth(data: Path) -> None:
    assert [p.name for p in video_files(data / "videos")] == ["broken.mp4", "cut.mp4", "frames", "small.mp4"]
    assert [p.name for p in photo_files(data / "photos")] == ["p.png", "q.jpg"]
    with pytest.raises(InputError, match="not a folder"):
        video_files(data / "nothing")


def test_short_shots_are_left_out() -> None:
    assert cut_at([12, 15, 40], 60) == ((0, 12), (15, 25), (40, 20))


@pytest.mark.parametrize("method", ["auto", "builtin", "scenedetect"])
def test_an_index_lists_shots_and_says_what_it_skips(data: Path, method: folders.ShotMethod) -> None:
    if method == "scenedetect":
        pytest.importorskip("scenedetect")
    skipped: dict[str, str] = {}
    index = index_folders(
        data / "videos",
        data / "photos",
        shots=method,
        smallest_side=64,
        held_out=1,
        on_skip=lambda path, reason: skipped.update({path.name: reason}),
    )
    assert [(v.name, v.frames, v.size, v.shots) for v in index.videos] == [
        ("cut", 28, (80, 96), ((0, 16), (16, 12))),
        ("frames", 11, (80, 80), ((0, 11),)),
    ]
    assert [(p.name, p.size) for p in index.photos] == [("p", (96, 100)), ("q", (96, 100))]
    assert sorted(item.split for item in (*index.videos, *index.photos)) == ["train"] * 2 + ["validation"] * 2
    assert sorted(skipped) == ["broken.mp4", "small.mp4"]
    assert skipped["small.mp4"] == "48x40 is smaller than 64 pixels"


def test_worker_processes_make_the_same_index(data: Path, tmp_path: Path, capsys) -> None:
    words = ["--videos", str(data / "videos"), "--photos", str(data / "photos"), "--side", "64"]
    assert run(["data", "index", str(tmp_path / "alone"), *words]) == 0
    said = capsys.readouterr().err
    assert run(["data", "index", str(tmp_path / "together"), *words, "--workers", "2"]) == 0
    assert capsys.readouterr().err.replace("together", "alone") == said
    assert "broken.mp4" in said
    assert PackIndex.load(tmp_path / "together") == PackIndex.load(tmp_path / "alone")


@pytest.mark.parametrize(
    # A cut at 25 leaves shots of 9 and 3 frames, too short. With another number of frames it is not believed.
    ("counted", "shots"),
    [(28, ((0, 16),)), (27, ((0, 16), (16, 12)))],
)
def test_auto_takes_the_cuts_of_both(data: Path, counted: int, shots: tuple, monkeypatch) -> None:
    monkeypatch.setattr(folders, "has_scenedetect", lambda: True)
    monkeypatch.setattr(folders, "scenedetect_cuts", lambda path: ([25], counted))
    assert index_folders(data / "videos", smallest_side=64).videos[0].shots == shots


def test_without_scenedetect_it_falls_back_or_says_so(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scenedetect", None)
    assert not folders.has_scenedetect()
    assert len(index_folders(data / "videos", smallest_side=64).videos) == 2
    with pytest.raises(InputError, match=r"pip install recavsr\[train\]"):
        scenedetect_cuts(data / "videos" / "cut.mp4")


def test_training_opens_an_index_of_folders(data: Path, tmp_path: Path) -> None:
    words = ["data", "index", str(tmp_path / "set"), "--videos", str(data / "videos"), "--side", "64"]
    assert run([*words, "--photos", str(data / "photos"), "--shots", "builtin"]) == 0
    source = ClipSource.open(tmp_path / "set", cache=tmp_path / "cache", processes=0)
    assert [shot.name for shot in source.shots] == ["cut", "cut", "frames"]
    rng = np.random.default_rng(0)
    kinds = [source.sample(rng, frames=9, size=64, video_fraction=0.7).kind for _ in range(200)]
    assert kinds.count("video") / 200 == pytest.approx(0.7, abs=0.1)
    specs = [source.sample(rng, frames=9, size=64, video_fraction=1.0) for _ in range(40)]
    assert len({(spec.source, spec.y, spec.x) for spec in specs}) > 20
    assert all(source.render(spec, 9, 64).shape == (9, 3, 64, 64) for spec in specs[:5])
    settings = PairSettings(frames=9, size=64, scales={4: 1.0}, presets={"mild": 1.0}, degradations=1)
    with TrainingPool(
        tmp_path / "set", "cpu", workers=0, capacity=4, settings=settings, cache=tmp_path / "cache"
    ) as pool:
        pool.fill(2)
        hq, lr_up = pool.batch(2, 3)
        assert hq.shape == lr_up.shape == (2, 3, 3, 64, 64)


# ---------------------------------------------------------------- quality


def luma_of(seed: int, blur: float = 0.0) -> np.ndarray:
    picture = texture(192, 256, seed).astype(float) @ np.array([0.299, 0.587, 0.114])
    return ndimage.gaussian_filter(picture, blur) if blur else picture


def test_blur_grows_with_blur_and_hardly_depends_on_contrast() -> None:
    values = [quality.blur(luma_of(1, sigma)) for sigma in (0.0, 1.0, 2.0, 4.0)]
    assert all(b > a + 0.03 for a, b in pairwise(values))
    assert quality.blur(60 + 0.4 * luma_of(1)) == pytest.approx(values[0], abs=0.02)
    assert quality.blur(np.full((100, 100), 7.0)) == 1.0


def test_a_sharp_part_before_a_soft_background_is_sharp() -> None:
    picture = luma_of(1, 4.0)
    soft = quality.blur(picture)
    picture[:128, :64] = luma_of(1)[:128, :64]
    assert quality.blur(picture) < (soft + quality.blur(luma_of(1))) / 2


@pytest.mark.parametrize("offset", [0, 3])
def test_blockiness_sees_jpegs_grid_wherever_it_lies(offset: int) -> None:
    smooth = ndimage.gaussian_filter(np.random.default_rng(0).normal(size=(200, 264)), 5)
    picture = (128 + 900 * smooth).clip(0, 255).round().astype(np.uint8)
    assert quality.blocks(picture)[0] < 1.2
    results = []
    for level in (90, 10):
        coded = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, level])[1]
        results.append(quality.blocks(cv2.imdecode(coded, cv2.IMREAD_GRAYSCALE)[offset:, offset:]))
    (_, fine_step), (coarse_ratio, coarse_step) = results
    assert fine_step < 1
    assert coarse_ratio > 1.5
    assert coarse_step > 2
    assert quality.blocks(picture[:20, :20]) == (1.0, 0.0)


def test_a_report_flags_what_is_bad_and_travels_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    good = texture(192, 256, 1)
    pictures = {
        "good": good,
        "blurred": ndimage.gaussian_filter(good, (4, 4, 0)),
        "dark": good // 40,
        "bright": 255 - (255 - good) // 20,
        "small": good[:100],
        "blocky": cv2.imdecode(
            cv2.imencode(".jpg", good, [cv2.IMWRITE_JPEG_QUALITY, 4])[1], cv2.IMREAD_COLOR
        ),
    }
    for name, picture in pictures.items():
        (tmp_path / f"{name}.png").write_bytes(encode_picture(picture, ".png"))
    write_video(tmp_path / "clip.mp4", [texture(192, 256, 2, t) for t in range(30)])
    (tmp_path / "broken.jpg").write_bytes(b"no")
    report = check_folder(tmp_path, limits=Limits(side=128))
    assert QualityReport.from_json(report.to_json()) == report
    named = {Path(q.file).stem: q for q in report.files}
    assert (named["good"].flags, named["clip"].flags) == ((), ())
    assert named["clip"].frames == 5
    for name in ("blurred", "dark", "bright", "small", "blocky"):
        assert name in named[name].flags
    assert [Path(file).name for file, _ in report.unreadable] == ["broken.jpg"]
    assert {p.stem for p in report.rejected} == {"blurred", "dark", "bright", "small", "blocky", "broken"}
    # The command says the same, and an index leaves the rejected out.
    out = tmp_path / "report.json"
    assert run(["data", "check", str(tmp_path), "-o", str(out), "--side", "128"]) == 1
    assert QualityReport.from_json(out.read_text()) == report
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].endswith("7 measured, 5 flagged, 1 unreadable")
    words = ["data", "index", str(tmp_path / "set"), "--photos", str(tmp_path), "--side", "64"]
    assert run([*words, "--quality", str(out)]) == 0
    assert [photo.name for photo in PackIndex.load(tmp_path / "set").photos] == ["good"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["check", "nothing"], "not a folder"),
        (["check", "empty"], "no videos and no pictures"),
        (["check", "empty", "-o", "no/where.json"], "does not exist"),
        (["index", "o"], "name a folder of videos or one of photos"),
        (["index", "o", "--photos", "empty"], "nothing in it can be used"),
        (["index", "o", "--photos", "empty", "--shots", "magic"], "auto, scenedetect, builtin"),
        (["index", "o", "--photos", "empty", "--quality", "bad.json"], "not a quality report"),
    ],
)
def test_refusals_are_one_line(
    words: list[str], reason: str, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text(json.dumps({"files": 3}))
    assert run(["data", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


def test_an_index_is_made_again_in_its_place_but_not_over_a_pack(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(encode_picture(texture(64, 64, 1, 0), ".png"))
    words = ["data", "index", str(tmp_path / "set"), "--photos", str(tmp_path / "photos"), "--side", "64"]
    assert run(words) == 0
    (tmp_path / "photos" / "b.png").write_bytes(encode_picture(texture(64, 64, 2, 0), ".png"))
    assert run(words) == 0
    index = PackIndex.load(tmp_path / "set")
    assert [photo.name for photo in index.photos] == ["a", "b"]
    pack = replace(index, photos=tuple(replace(photo, file="part0/a.png") for photo in index.photos))
    pack.save(tmp_path / "set")
    assert run(words) == 2
    assert "is a pack with files of its own" in capsys.readouterr().err
    assert PackIndex.load(tmp_path / "set") == pack


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(folders, "index_folders", lambda *_, **__: pytest.fail("it read"))
    (tmp_path / "file").touch()
    assert run(["data", "index", str(tmp_path / "file" / "set"), "--photos", str(tmp_path)]) == 2
    assert "can't be written" in capsys.readouterr().err


# ---------------------------------------------------------------- pairs


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """HQ of a clip of pictures, a picture and a video; LR holds every second pixel."""
    root = tmp_path_factory.mktemp("pairs")
    for side, step in (("LR", 2), ("HQ", 1)):
        (root / side / "clip").mkdir(parents=True)
        for t in range(4):
            picture = encode_picture(texture(48, 64, t)[::step, ::step], ".png")
            (root / side / "clip" / f"{t:03d}.png").write_bytes(picture)
        (root / side / "still.png").write_bytes(encode_picture(texture(40, 40, 9)[::step, ::step], ".png"))
        film = [texture(64, 64, 11, 2 * t)[::step, ::step] for t in range(5)]
        write_video(root / side / "film.mp4", film, "yuv444p", crf=1)
    return root


def test_pairs_are_matched_by_name_and_read(pairs: Path) -> None:
    folder = PairedFolder.open(pairs)
    assert folder.scale == 2
    assert [(p.name, p.frames, p.lr_size) for p in folder.pairs] == [
        ("clip", 4, (24, 32)),
        ("film", 5, (32, 32)),
        ("still", 1, (20, 20)),
    ]
    lr, hq = folder.read(0, [2, 0])
    assert (hq == np.stack([texture(48, 64, t) for t in (2, 0)])).all()
    assert (lr == hq[:, ::2, ::2]).all()
    assert {name: (lr.shape, hq.shape) for name, lr, hq in folder.clips()} == {
        "clip": ((4, 24, 32, 3), (4, 48, 64, 3)),
        "film": ((5, 32, 32, 3), (5, 64, 64, 3)),
        "still": ((1, 20, 20, 3), (1, 40, 40, 3)),
    }


def test_crops_of_a_pair_show_the_same_place(pairs: Path) -> None:
    batches = PairedBatches(PairedFolder.open(pairs), size=32, seed=4)
    turned = set()
    for _ in range(30):
        hq, lr = batches.sample(6)
        assert hq.shape == (6, 3, 32, 32)
        # LR pixel (y, x) is HQ pixel (2y, 2x), or (2y + 1, ...) where the crop is flipped.
        errors = {
            (y, x): float((hq[..., y::2, x::2].int() - lr.int()).abs().float().mean())
            for y in (0, 1)
            for x in (0, 1)
        }
        best = min(errors, key=lambda place: errors[place])
        assert errors[best] < 3  # the video's pair went through a codec
        turned.add(best)
    assert len(turned) == 4


def test_batches_keep_the_pools_contract(pairs: Path) -> None:
    folder = PairedFolder.open(pairs)
    hq, lr_up = PairedBatches(folder, size=32, seed=1).batch(3, 5, dtype=torch.bfloat16)
    assert hq.shape == lr_up.shape == (3, 3, 5, 32, 32)
    assert hq.dtype == torch.bfloat16
    assert -1 <= float(hq.min()) < 0 < float(hq.max()) <= 1
    again, _ = PairedBatches(folder, size=32, seed=1).batch(3, 5, dtype=torch.bfloat16)
    assert torch.equal(hq, again)
    with pytest.raises(InputError, match="scale 2, not 4"):
        PairedBatches(folder, size=32).batch(1, 5, scale=4)
    for size, reason in ((33, "take a multiple"), (64, "smaller than the crops")):
        with pytest.raises(InputError, match=reason):
            PairedBatches(folder, size=size)


def test_folders_that_are_no_pairs_are_refused(pairs: Path, tmp_path: Path) -> None:
    for side in ("LR", "HQ"):
        (tmp_path / side).mkdir()
    with pytest.raises(InputError, match="no videos and no pictures"):
        PairedFolder.open(tmp_path)
    small, large = (encode_picture(texture(20, side, 1), ".png") for side in (20, 50))
    (tmp_path / "LR" / "a.png").write_bytes(small)
    (tmp_path / "HQ" / "b.png").write_bytes(large)
    with pytest.raises(InputError, match=r"HQ: has no counterpart of a \(1 missing\)"):
        PairedFolder.open(tmp_path)
    (tmp_path / "HQ" / "b.png").rename(tmp_path / "HQ" / "a.png")
    with pytest.raises(InputError, match="no whole multiple"):
        PairedFolder.open(tmp_path)
