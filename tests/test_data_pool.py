"""Packing, clips and the pool, end to end on a tiny pack made here."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from queue import SimpleQueue

import av
import cv2
import numpy as np
import pytest
import torch
from torch import Tensor

from recavsr.data.clips import (
    CameraMotion,
    ClipSource,
    ClipSpec,
    ClipTable,
    CropSize,
    Cutout,
    Selection,
    frame_numbers,
    render_table,
)
from recavsr.data.degradation import lr_size
from recavsr.data.pack import PackIndex, build_pack, find_cuts, thumbnail
from recavsr.data.pool import PairSettings, TrainingPool, WorkerError, make_pairs, upsample_lr
from recavsr.data.stream import ClipStream
from recavsr.errors import InputError
from recavsr.video.memory_codec import Planes, decode_planes

FRAMES, SIZE = 9, 64
SETTINGS = PairSettings(frames=FRAMES, size=SIZE)


def picture(height: int, width: int, seed: int, shift: float = 0.0) -> np.ndarray:
    """A drawn RGB picture, uint8 [H, W, 3]."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / 64.0
    channels = []
    for _ in range(3):
        a, b, c = rng.uniform(1, 5, 3)
        wave = np.sin(a * (x + shift) + b * y) + np.sin(c * (x + shift) * 2.5) * np.cos(a * y)
        channels.append(128 + 50 * wave)
    return np.stack(channels, -1).clip(0, 255).round().astype(np.uint8)


def write_video(path: Path, frames: list[np.ndarray]) -> None:
    height, width, _ = frames[0].shape
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=Fraction(25), options={"crf": "10"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode(None))


def write_jpeg(path: Path, image: np.ndarray) -> None:
    with av.open(str(path), "w", format="image2") as file:
        stream = file.add_stream("mjpeg", rate=1, options={"qmin": "1", "qmax": "1"})
        stream.width, stream.height, stream.pix_fmt = image.shape[1], image.shape[0], "yuvj420p"
        file.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        file.mux(stream.encode(None))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder: a clip with a cut, a soft one that is for testing only, two photos."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "train_video").mkdir()
    (folder / "test_video").mkdir()
    (folder / "photos").mkdir()
    first = [picture(256, 288, 1, t / 40) for t in range(20)]
    second = [picture(256, 288, 5, -t / 30) // 2 for t in range(14)]
    write_video(folder / "train_video" / "cut.mp4", first + second)
    write_video(folder / "test_video" / "held.mp4", first)
    rows = ["path\tlicence\tsource\tnote", "train_video/cut.mp4\tCC0\there\tclass A; sharp 0.7; split train"]
    rows.append("test_video/held.mp4\tCC0\there\tclass A; sharp 0.7; split test")
    for seed in (10, 11):
        write_jpeg(folder / "photos" / f"p{seed}.jpg", picture(301, 400, seed))
        rows.append(f"photos/p{seed}.jpg\tCC0\there\tlong side at most 1360")
    (folder / "manifest.tsv").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture(scope="module")
def pack(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    build_pack(data, folder, part_bytes=10**8, validation_videos=0, validation_photos=0)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def source(pack: Path, cache: Path) -> ClipSource:
    return ClipSource.open(pack, cache=cache, processes=0)


# ---------------------------------------------------------------- packing


def test_pack_copies_files_unchanged_and_splits_at_the_cut(pack: Path, data: Path) -> None:
    index = PackIndex.load(pack)
    assert [video.name for video in index.videos] == ["cut"]
    assert index.videos[0].shots == ((0, 20), (20, 14))
    assert index.videos[0].licence == "CC0"
    assert [photo.size for photo in index.photos] == [(301, 400), (301, 400)]
    assert (pack / index.videos[0].file).read_bytes() == (data / "train_video" / "cut.mp4").read_bytes()
    assert not list(pack.rglob("held.mp4"))


def test_parts_stay_below_their_size_and_hold_everything(data: Path, tmp_path: Path) -> None:
    largest = max(path.stat().st_size for path in data.rglob("*") if path.suffix in (".mp4", ".jpg"))
    index = build_pack(data, tmp_path / "pack", part_bytes=largest + 1, validation_photos=1)
    files = [item.file for item in index.videos] + [item.file for item in index.photos]
    assert len({file.split("/")[0] for file in files}) > 1
    for part in (tmp_path / "pack").glob("part*"):
        assert sum(path.stat().st_size for path in part.iterdir()) <= largest + 1
    assert sorted(photo.split for photo in index.photos) == ["train", "validation"]
    assert PackIndex.load(tmp_path / "pack") == index
    with pytest.raises(InputError, match="not empty"):
        build_pack(data, tmp_path / "pack", part_bytes=10**8)


def test_manifests_that_do_not_fit_are_refused(data: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(data, tmp_path / "data")
    (copy / "photos" / "more").mkdir()
    name = next((copy / "photos").glob("*.jpg")).name
    shutil.copy(copy / "photos" / name, copy / "photos" / "more" / name)
    with (copy / "manifest.tsv").open("a") as file:
        file.write(f"photos/more/{name}\tCC0\n")  # a row that ends early is no matter
    with pytest.raises(InputError, match=f"another file of the set is called {name}"):
        build_pack(copy, tmp_path / "pack", part_bytes=10**8)
    (copy / "manifest.tsv").write_text("name\tlicence\nphotos/a.jpg\tCC0\n")
    with pytest.raises(InputError, match="its first line names no column note"):
        build_pack(copy, tmp_path / "other", part_bytes=10**8)


HANGS = """
import sys, time
from pathlib import Path
from recavsr.data import clips
def hang(job):
    print("decoding", flush=True)
    time.sleep(100)
clips._decode_item = hang
clips.ClipSource.open(sys.argv[1], cache=Path(sys.argv[2]), processes=0)
"""


def test_one_process_decodes_and_what_a_killed_one_left_is_removed(pack: Path, tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HANGS, pack, tmp_path], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"decoding\n"
    told: SimpleQueue[str] = SimpleQueue()
    with ThreadPoolExecutor(2) as threads:
        both = [
            threads.submit(ClipSource.open, pack, cache=tmp_path, processes=0, say=told.put) for _ in "ab"
        ]
        assert all("waiting for another process" in told.get(timeout=60) for _ in both)
        process.kill()
        process.communicate()
        sources = [opened.result() for opened in both]
    place = sources[0].cache
    assert told.get() == f"decoding {pack} into {place}: 0.0 GB, kept for the next run (remove it when done)"
    assert told.empty()
    assert sources[1].cache == place
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [place]


def test_a_file_replaced_by_one_of_its_size_is_decoded_again(pack: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(pack, tmp_path / "pack")
    before, again = (ClipSource.open(copy, cache=tmp_path / "cache", processes=0) for _ in range(2))
    assert again.cache == before.cache
    photo = copy / PackIndex.load(copy).photos[0].file
    cv2.imwrite(str(photo), 255 - cv2.imread(str(photo)))
    after = ClipSource.open(copy, cache=tmp_path / "cache", processes=0)
    offset, rows, columns = after.photos[0].levels[0]
    old, new = (source.pixels[offset : offset + 3 * rows * columns].astype(int) for source in (before, after))
    assert np.abs(old + new - 255).mean() < 4


def test_a_cache_that_cannot_be_written_is_said(pack: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"can't be written .*; choose another cache"):
        ClipSource.open(pack, cache=tmp_path / "file" / "cache", processes=0)
    with pytest.raises(InputError, match="can't be written"):
        ClipStream.open(pack, cache=tmp_path / "file" / "cache")


def test_an_incomplete_pack_is_refused(pack: Path, tmp_path: Path, cache: Path) -> None:
    with pytest.raises(InputError, match=r"index\.json: not found"):
        ClipSource.open(tmp_path, cache=cache)
    (tmp_path / "index.json").write_bytes((pack / "index.json").read_bytes())
    with pytest.raises(InputError, match="3 files missing"):
        ClipSource.open(tmp_path, cache=cache)
    (tmp_path / "index.json").write_text('{"videos": 3}')
    with pytest.raises(InputError, match="not a pack index"):
        PackIndex.load(tmp_path)


def test_cuts_are_found_and_motion_and_flashes_are_not() -> None:
    def thumb(image: np.ndarray) -> np.ndarray:
        half = image[::2, ::2]
        return thumbnail(Planes(image[..., 1], half[..., 2], half[..., 0], True, "bt601"))

    fast = [thumb(picture(144, 256, 1, t / 16)) for t in range(12)]
    other = [thumb(picture(144, 256, 9, t / 16) // 2) for t in range(12)]
    assert find_cuts(fast + other) == [12]
    assert find_cuts(fast) == []
    flash = list(fast)
    flash[6] = (
        np.clip(flash[6] + 60, 0, 255) * np.array([1, 0, 0])[:, None, None]
        + flash[6] * np.array([0, 1, 1])[:, None, None]
    )
    assert find_cuts(flash) == []
    assert find_cuts(fast[:1]) == []


# ---------------------------------------------------------------- rendering


def decoded(path: Path) -> list[Planes]:
    return list(decode_planes(path))


def test_a_video_clip_is_the_decoded_crop(source: ClipSource, pack: Path) -> None:
    spec = ClipSpec("video", 1, first=2, y=31, x=70)
    clip = source.render(spec, 5, SIZE)
    assert clip.shape == (5, 3, SIZE, SIZE)
    with av.open(str(pack / PackIndex.load(pack).videos[0].file)) as file:
        frames = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    expected = np.stack(frames[22:27])[:, 31 : 31 + SIZE, 70 : 70 + SIZE].transpose(0, 3, 1, 2)
    difference = np.abs(clip.numpy() * 255 - expected)
    assert difference.mean() < 2  # another chroma interpolation
    mirrored = source.render(ClipSpec("video", 1, True, True, True, True, first=2, y=31, x=70), 5, SIZE)
    assert torch.equal(mirrored, clip.flip(0).transpose(2, 3).flip((2, 3)))


def test_short_shots_run_back_and_forth() -> None:
    assert frame_numbers(ClipSpec("video", 0, first=1), 4, 9).tolist() == [1, 2, 3, 2, 1, 0, 1, 2, 3]
    assert frame_numbers(ClipSpec("video", 0, first=1, stride=2), 6, 4).tolist() == [1, 3, 5, 3]
    assert frame_numbers(ClipSpec("video", 0, first=1, backwards=True), 4, 3).tolist() == [3, 2, 1]
    assert frame_numbers(ClipSpec("video", 0), 1, 3).tolist() == [0, 0, 0]


def test_a_still_photo_is_the_photo_itself_in_every_frame(source: ClipSource) -> None:
    motion = CameraMotion(0, x=50 + (SIZE - 1) / 2, y=20 + (SIZE - 1) / 2)
    clip = source.render(ClipSpec("photo", 0, motion=motion), 4, SIZE)
    assert torch.equal(clip, clip[:1].expand_as(clip))
    offset, rows, columns = source.photos[0].levels[0]
    stored = torch.from_numpy(source.pixels[offset : offset + 3 * rows * columns]).view(3, rows, columns)
    own = stored[:, 40 : 40 + 2 * SIZE : 2, 100 : 100 + 2 * SIZE : 2].float() / 255
    torch.testing.assert_close(clip[0], own, atol=2e-4, rtol=0)
    truth = picture(301, 400, 10)[20 : 20 + SIZE, 50 : 50 + SIZE]
    assert np.abs(own.permute(1, 2, 0).numpy() * 255 - truth).mean() < 2  # the JPEG


def test_pan_moves_by_its_velocity_without_losing_sharpness(source: ClipSource) -> None:
    start = {"x": 120.0, "y": 130.0}
    clip = source.render(
        ClipSpec("photo", 1, motion=CameraMotion(0, **start, velocity_x=2, velocity_y=1)), 5, SIZE
    )
    torch.testing.assert_close(clip[4, :, : SIZE - 4, : SIZE - 8], clip[0, :, 4:, 8:], atol=2e-3, rtol=0)
    half = source.render(ClipSpec("photo", 1, motion=CameraMotion(0, **start, velocity_x=0.5)), 2, SIZE)
    between = (half[0, :, :, 1:] + half[0, :, :, :-1]) / 2
    detail = [float((x[:, :, 2:] - x[:, :, :-2]).abs().mean()) for x in (half[0], half[1], between)]
    assert detail[2] < detail[1] < 1.02 * detail[0]
    assert detail[1] > 0.97 * detail[0]


@pytest.mark.parametrize(
    "mirror", [(False, False, False), (True, False, False), (False, True, True), (True, True, True)]
)
def test_mirrored_photo_clips_are_the_mirrored_clip(
    source: ClipSource, mirror: tuple[bool, bool, bool]
) -> None:
    motion = CameraMotion(
        0,
        150.3,
        140.6,
        velocity_x=1.3,
        scale=1.1,
        angle=0.1,
        zoom=0.005,
        spin=0.01,
        shake=((0.5, 0.3, 0.002, 0.1, 0.2),),
    )
    plain = source.render(ClipSpec("photo", 0, motion=motion), 4, SIZE)
    clip = source.render(ClipSpec("photo", 0, *mirror, motion=motion), 4, SIZE)
    if mirror[2]:
        plain = plain.transpose(2, 3)
    plain = plain.flip([axis for axis, flip in ((3, mirror[0]), (2, mirror[1])) if flip])
    torch.testing.assert_close(clip, plain, atol=1e-3, rtol=0)


def test_pause_holds_the_camera_before_and_after() -> None:
    path = CameraMotion(0, 10.0, 20.0, velocity_x=2.0, pause=(2, 6)).matrices(10, SIZE, (False,) * 3)[:, 0, 2]
    assert np.ptp(path[:3]) == 0
    assert np.ptp(path[6:]) == 0
    assert path[6] - path[2] == pytest.approx(8)


def drawn_specs(source: ClipSource, count: int, **options: float) -> list[ClipSpec]:
    rng = np.random.default_rng(3)
    return [source.sample(rng, frames=FRAMES, size=SIZE, **options) for _ in range(count)]  # type: ignore[arg-type]


def still_ones(photos: list[ClipSpec]) -> list[ClipSpec]:
    return [s for s in photos if s.motion == CameraMotion(s.motion.level, s.motion.x, s.motion.y)]  # type: ignore[union-attr]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_share_of_photo_clips_stands_still(source: ClipSource, share: float) -> None:
    specs = drawn_specs(source, 200, video_fraction=0.0, still_fraction=share)
    assert len(still_ones(specs)) / 200 == pytest.approx(share, abs=0.1)
    if share == 1.0:
        clip = source.render(specs[0], FRAMES, SIZE)
        assert torch.equal(clip, clip[:1].expand_as(clip))


def test_draws_have_all_kinds(source: ClipSource) -> None:
    specs = drawn_specs(source, 400)
    photos = [spec for spec in specs if spec.kind == "photo"]
    assert 0.4 < len(photos) / 400 < 0.6
    assert 0.06 < len(still_ones(photos)) / len(photos) < 0.22
    assert 0.1 < sum(s.cutout is not None for s in photos) / len(photos) < 0.35
    assert {s.motion.level for s in photos if s.motion} == {0, 1}
    assert {s.source for s in specs if s.kind == "video"} == {0, 1}
    for flag in ("flip_x", "flip_y", "transpose", "backwards"):
        assert {getattr(s, flag) for s in specs} == {True, False}
    assert all(s.kind == "video" for s in drawn_specs(source, 20, video_fraction=1.0))


def test_free_draws_show_the_same_items_in_other_colours_and_at_other_angles(source: ClipSource) -> None:
    specs = drawn_specs(source, 300, variety=0.5)
    free = [spec for spec in specs if spec.is_coloured]
    assert 0.4 < len(free) / len(specs) < 0.6
    assert {spec.channels for spec in free} == set(permutations(range(3)))
    assert all(0 <= spec.lift <= 1 - spec.gain <= 0.4 for spec in free)
    cameras = [spec.motion for spec in free if spec.motion]
    assert sum(abs(camera.angle) > 0.5 for camera in cameras) > len(cameras) / 3
    assert {
        abs(camera.angle) > 0.5 for camera in (s.motion for s in specs if not s.is_coloured) if camera
    } == {False}
    assert any(camera.scale < 0.8 for camera in cameras)
    assert {spec.motion.velocity_x == 0 for spec in free if spec.motion} == {True, False}


def test_colours_are_the_sources_channels_with_gain_and_lift(source: ClipSource) -> None:
    plain = ClipSpec("video", 1, first=2, y=31, x=70)
    clip = source.render(replace(plain, channels=(2, 0, 1), gain=0.5, lift=0.25), FRAMES, SIZE)
    torch.testing.assert_close(clip, source.render(plain, FRAMES, SIZE)[:, [2, 0, 1]] * 0.5 + 0.25)


@pytest.mark.parametrize("variety", [0.0, 1.0])
def test_cameras_stay_inside_their_photos(source: ClipSource, variety: float) -> None:
    for spec in drawn_specs(source, 150, video_fraction=0.0, variety=variety):
        cameras = [(spec.source, spec.motion)] + (
            [(spec.cutout.photo, spec.cutout.motion)] if spec.cutout else []
        )
        for photo, motion in cameras:
            assert motion is not None
            height, width = source.photos[photo].size(motion.level)
            corners = np.array([(0, 0, 1), (SIZE - 1, 0, 1), (0, SIZE - 1, 1), (SIZE - 1, SIZE - 1, 1)]).T
            seen = motion.matrices(FRAMES, SIZE, spec.mirror) @ corners
            assert seen.min() >= -1e-6
            assert seen[:, 0].max() <= width - 1 + 1e-6
            assert seen[:, 1].max() <= height - 1 + 1e-6
            step = np.diff(seen.mean(2), axis=0)
            assert np.abs(step).max() < 20


def rendered_by_table(
    source: ClipSource, specs: list[ClipSpec], pixels: Tensor, size: CropSize = SIZE
) -> Tensor:
    table = ClipTable.empty(len(specs), FRAMES)
    for row, spec in enumerate(specs):
        table.set(row, source, spec, size)
    device = pixels.device
    table = ClipTable(*(tensor.to(device) for tensor in table.tensors()))

    def rows(wanted: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
        index = torch.tensor([i for i, yes in enumerate(wanted) if yes], dtype=torch.int64, device=device)
        return index, index, torch.zeros_like(index)

    selection = Selection(
        rows([s.kind == "video" for s in specs]),
        rows([s.kind == "photo" for s in specs]),
        rows([s.cutout is not None for s in specs]),
        rows([s.is_coloured for s in specs]),
    )
    return render_table(pixels, table, selection, len(specs), FRAMES, size)


@pytest.mark.parametrize("variety", [0.0, 0.5])
def test_table_renders_what_render_renders(source: ClipSource, variety: float) -> None:
    specs = drawn_specs(source, 60, variety=variety)
    assert {(s.kind, s.cutout is not None) for s in specs} == {
        ("video", False),
        ("photo", False),
        ("photo", True),
    }
    batch = rendered_by_table(source, specs, torch.from_numpy(source.pixels))
    for spec, clip in zip(specs, batch):
        torch.testing.assert_close(clip, source.render(spec, FRAMES, SIZE), atol=2e-3, rtol=0)
    assert float(batch.min()) >= 0
    assert float(batch.max()) <= 1


def test_a_wide_crop_is_the_middle_of_a_square_one(source: ClipSource) -> None:
    """Rows cut from a square clip with the same camera, by both renderers."""
    rows, columns = 40, 72
    cut = (columns - rows) // 2
    rng = np.random.default_rng(6)
    specs = [source.sample(rng, frames=FRAMES, size=(rows, columns)) for _ in range(60)]
    assert {(s.kind, s.cutout is not None) for s in specs} == {
        ("video", False),
        ("photo", False),
        ("photo", True),
    }
    assert not any(spec.transpose for spec in specs)
    batch = rendered_by_table(source, specs, torch.from_numpy(source.pixels), (rows, columns))
    assert batch.shape == (60, FRAMES, 3, rows, columns)
    inside = 0
    for spec, clip in zip(specs, batch):
        wide = source.render(spec, FRAMES, (rows, columns))
        torch.testing.assert_close(clip, wide, atol=2e-3, rtol=0)
        height = source.shots[spec.source].height if spec.kind == "video" else columns
        if spec.kind == "video" and not cut <= spec.y <= height - columns + cut:
            continue
        inside += 1
        around = replace(spec, y=spec.y - cut) if spec.kind == "video" else spec
        square = source.render(around, FRAMES, columns)[:, :, cut : cut + rows]
        torch.testing.assert_close(wide, square, atol=1e-4, rtol=0)
    assert inside > 40


def test_wide_cameras_stay_inside_and_small_items_are_not_drawn(source: ClipSource) -> None:
    rng = np.random.default_rng(7)
    for size in ((120, 380), (290, 120)):
        corners = np.array([(x, y, 1) for x in (0, size[1] - 1) for y in (0, size[0] - 1)]).T
        for _ in range(30):
            spec = source.sample(rng, frames=FRAMES, size=size)
            assert spec.kind == "photo"  # the shots have 256 x 288 pixels
            assert spec.motion is not None
            height, width = source.photos[spec.source].size(spec.motion.level)
            seen = spec.motion.matrices(FRAMES, size, spec.mirror) @ corners
            assert seen.min() >= -1e-6
            assert seen[:, 0].max() <= width - 1 + 1e-6
            assert seen[:, 1].max() <= height - 1 + 1e-6
    with pytest.raises(InputError, match="no train items of 401x64 pixels or more"):
        source.sample(rng, frames=FRAMES, size=(64, 401))


@pytest.mark.gpu
def test_gpu_renders_what_the_cpu_renders(source: ClipSource) -> None:
    specs = drawn_specs(source, 60)
    batch = rendered_by_table(source, specs, torch.from_numpy(source.pixels).cuda())
    for spec, clip in zip(specs, batch.cpu()):
        torch.testing.assert_close(clip, source.render(spec, FRAMES, SIZE), atol=2e-3, rtol=0)


def test_rendering_is_deterministic(source: ClipSource) -> None:
    for spec in drawn_specs(source, 12):
        assert torch.equal(source.render(spec, FRAMES, SIZE), source.render(spec, FRAMES, SIZE))


def test_cutout_moves_with_its_photo_and_has_soft_edges(source: ClipSource) -> None:
    back = CameraMotion(0, 150.0, 150.0)
    front = CameraMotion(0, 200.0, 150.0, velocity_x=-2.0)
    cutout = Cutout(1, front, 200.0, 150.0, 14.0, 10.0, 0.0, (0.0, 3.0, 0.0), 1.5)
    clip = source.render(ClipSpec("photo", 0, motion=back, cutout=cutout), 6, SIZE)
    plain = source.render(ClipSpec("photo", 0, motion=back), 6, SIZE)
    other = source.render(ClipSpec("photo", 1, motion=front), 6, SIZE)
    covered = (clip - other).abs().amax(1) < 1e-6
    open_ = (clip - plain).abs().amax(1) < 1e-6
    area = np.pi * (14 - 0.75) * (10 - 0.75)  # inside the soft edge
    assert float(covered.float().sum((1, 2)).mean()) == pytest.approx(area, rel=0.1)
    columns = torch.arange(SIZE).float()
    centre = [float((c.float().sum(0) * columns).sum() / c.sum()) for c in covered]
    assert centre[5] - centre[0] == pytest.approx(10, abs=0.5)
    assert 20 < float((~covered & ~open_).float().sum((1, 2)).mean()) < 200


# ---------------------------------------------------------------- the pool


def test_pairs_are_a_function_of_seed_and_index(source: ClipSource) -> None:
    first, again, other = (make_pairs(source, SETTINGS, 4, index) for index in (7, 7, 8))
    assert len(first) == SETTINGS.degradations
    for a, b in zip(first, again):
        assert (a.spec, a.degradation) == (b.spec, b.degradation)
        assert torch.equal(a.lr, b.lr)
    assert first[0].spec == first[1].spec
    assert first[0].degradation != first[1].degradation
    assert other[0].spec != first[0].spec


def check_batch(pool: TrainingPool, source: ClipSource, seed: int, indices: range) -> None:
    """Every sample of a batch of whole clips is one of the pairs that the seed gives."""
    hq, lr_up = pool.batch(12, FRAMES)
    assert hq.shape == lr_up.shape == (12, 3, FRAMES, SIZE, SIZE)
    assert float(hq.min()) >= -1
    assert float(hq.max()) <= 1
    levels = (lr_up + 1) * 127.5
    torch.testing.assert_close(levels, levels.round(), atol=1e-3, rtol=0)
    pairs = [pair for index in indices for pair in make_pairs(source, SETTINGS, seed, index)]
    known = [upsample_lr(pair.lr, SIZE).transpose(0, 1) for pair in pairs]
    for one_hq, one_lr in zip(hq, lr_up):
        distances = [float((one_lr - candidate).abs().max()) for candidate in known]
        best = int(np.argmin(distances))
        assert distances[best] < 1e-5
        clip = source.render(pairs[best].spec, FRAMES, SIZE).transpose(0, 1) * 2 - 1
        torch.testing.assert_close(one_hq, clip, atol=4e-3, rtol=0)


def test_pool_without_workers(pack: Path, cache: Path, source: ClipSource) -> None:
    with TrainingPool(pack, "cpu", 0, 40, settings=SETTINGS, seed=2, cache=cache) as pool:
        with pytest.raises(InputError, match="call fill"):
            pool.batch(2, 3)
        with pytest.raises(InputError, match="capacity"):
            pool.fill(41)
        pool.fill(20)
        check_batch(pool, source, 2, range(pool.made // 2))
        hq, lr_up = pool.batch(3, 4, scale=2, dtype=torch.bfloat16)
        assert hq.shape == lr_up.shape == (3, 3, 4, SIZE, SIZE)
        assert hq.dtype == lr_up.dtype == torch.bfloat16
        assert pool.batch(2, 1)[0].shape == (2, 3, 1, SIZE, SIZE)
        with pytest.raises(InputError, match="don't fit"):
            pool.batch(1, FRAMES + 1)
        with pytest.raises(InputError, match="wanted scale"):
            pool.batch(1, 2, scale=5)


def test_new_records_replace_the_oldest(pack: Path, cache: Path) -> None:
    only4 = PairSettings(frames=FRAMES, size=SIZE, scales={4: 1.0}, degradations=1, presets={"mild": 1.0})
    with TrainingPool(pack, "cpu", 0, 4, settings=only4, cache=cache) as pool:
        pool.fill(4)
        before = pool._rings[4].lr.clone()
        pool._take(1)
        changed = (pool._rings[4].lr != before).flatten(1).any(1)
        assert changed.tolist() == [True, False, False, False]
        assert pool.count == 4


def test_a_pool_of_wide_clips(pack: Path, cache: Path, source: ClipSource) -> None:
    wide = PairSettings(frames=FRAMES, size=(48, 80), scales={4: 1.0}, presets={"mild": 1.0}, degradations=1)
    with TrainingPool(pack, "cpu", 0, 4, settings=wide, seed=3, cache=cache) as pool:
        pool.fill(1)
        hq, lr_up = pool.batch(1, FRAMES)
    (pair,) = make_pairs(source, wide, 3, 0)
    assert pair.lr.shape == (FRAMES, 3, 12, 20)
    clip = source.render(pair.spec, FRAMES, (48, 80)).transpose(0, 1) * 2 - 1
    torch.testing.assert_close(hq[0], clip, atol=4e-3, rtol=0)
    assert torch.equal(lr_up[0], upsample_lr(pair.lr, (48, 80)).transpose(0, 1))


def test_windows_stay_in_step(pack: Path, cache: Path) -> None:
    """A window's HQ and LR show the same frames: their difference is smallest without a shift in time."""
    settings = PairSettings(
        frames=FRAMES, size=SIZE, scales={2: 1.0}, presets={"mild": 1.0}, video_fraction=1.0
    )
    with TrainingPool(pack, "cpu", 0, 16, settings=settings, cache=cache) as pool:
        pool.fill(16)
        hq, lr_up = pool.batch(16, 4)
    inner, wrong = hq[:, :, 1:], hq[:, :, :-1]
    assert (inner - lr_up[:, :, 1:]).abs().mean() < 0.7 * (wrong - lr_up[:, :, 1:]).abs().mean()


def test_target_sharpening_reaches_both_sides(pack: Path, cache: Path, source: ClipSource) -> None:
    settings = PairSettings(frames=FRAMES, size=SIZE, scales={4: 1.0}, sharpen=0.5)
    with TrainingPool(pack, "cpu", 0, 4, settings=settings, cache=cache) as pool:
        pool.fill(2)
        hq, _ = pool.batch(1, FRAMES)
    plain = source.render(make_pairs(source, settings, 0, 0)[0].spec, FRAMES, SIZE).transpose(0, 1) * 2 - 1
    assert (hq[0] - plain).abs().max() > 0.01


def test_pool_with_a_worker(pack: Path, cache: Path, source: ClipSource) -> None:
    with TrainingPool(pack, "cpu", 1, 40, settings=SETTINGS, seed=2, cache=cache) as pool:
        pool.fill(12)
        processes = pool._feed._processes  # type: ignore[union-attr]
        check_batch(pool, source, 2, range(pool.made))
    assert not any(process.is_alive() for process in processes)


def test_a_failing_worker_is_reported_with_its_traceback(pack: Path, cache: Path) -> None:
    settings = PairSettings(frames=FRAMES, size=SIZE, presets={"nonsense": 1.0})
    with (
        TrainingPool(pack, "cpu", 1, 8, settings=settings, cache=cache) as pool,
        pytest.raises(
            WorkerError, match=r"(?s)pairs-0 failed.*Traceback.*unknown degradation preset 'nonsense'"
        ),
    ):
        pool.fill(4)


def test_a_killed_worker_is_reported(pack: Path, cache: Path) -> None:
    with TrainingPool(pack, "cpu", 1, 2000, settings=SETTINGS, cache=cache) as pool:
        os.kill(pool._feed._processes[0].pid, signal.SIGKILL)  # type: ignore[union-attr,arg-type]
        with pytest.raises(WorkerError, match="ended without a word"):
            pool.fill(2000)


def test_upsampling_is_torchs_bilinear_on_8_bit_values() -> None:
    lr = torch.randint(
        0, 256, (2, 5, 3, 16, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    ours = upsample_lr(lr, 48)
    flat = torch.nn.functional.interpolate(
        lr.view(10, 3, 16, 12).float(), size=(48, 48), mode="bilinear", align_corners=False
    )
    assert torch.equal(ours, (flat.round() / 127.5 - 1).view(2, 5, 3, 48, 48))


def test_lr_sizes_are_even() -> None:
    assert [lr_size(256, 256, scale) for scale in (2, 3, 4)] == [(128, 128), (86, 86), (64, 64)]
