"""Pictures: transparency is carried, EXR holds linear light."""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from media import ffmpeg, make_clip, run_identity, video_stream
from recavsr.errors import InputError
from recavsr.video.images import encode_picture
from recavsr.video.transfer import linear_light


def stored(path: Path, pixel_format: str, kind: type, channels: int) -> np.ndarray:
    """Return a picture's values as ffmpeg reads them, [H, W, channels]."""
    stream = video_stream(path)
    assert stream["pix_fmt"].replace("be", "le") == pixel_format
    command = ["ffmpeg", "-v", "error", "-i", path, "-f", "rawvideo", "-pix_fmt", pixel_format, "-"]
    values = np.frombuffer(subprocess.run(command, capture_output=True, check=True).stdout, kind)
    shape = stream["height"], stream["width"]
    if pixel_format.startswith("gbr"):  # planes
        order = [2, 0, 1, 3][:channels]
        return np.stack([values.reshape(channels, *shape)[plane] for plane in order], axis=-1)
    return values.reshape(*shape, channels)


def rgba(kind: type, seed: int = 0) -> np.ndarray:
    """Return random colours under a disc of growing transparency, [12, 16, 4]."""
    picture = np.random.default_rng(seed).integers(0, np.iinfo(kind).max, (12, 16, 4)).astype(kind)
    rows, columns = np.mgrid[:12, :16]
    distance = np.hypot(rows - 5.5, columns - 7.5) / 10
    picture[..., 3] = np.rint(np.clip(1 - distance, 0, 1) * np.iinfo(kind).max)
    return picture


@pytest.mark.parametrize("suffix", [".png", ".tif"])
@pytest.mark.parametrize(("kind", "pixel_format"), [(np.uint8, "rgba"), (np.uint16, "rgba64le")])
def test_transparency_is_carried(tmp_path: Path, suffix: str, kind: type, pixel_format: str) -> None:
    source, out = tmp_path / "in.png", tmp_path / f"out{suffix}"
    picture = rgba(kind)
    source.write_bytes(encode_picture(picture[..., :3], ".png", picture[..., 3]))
    assert np.array_equal(stored(source, pixel_format, kind, 4), picture)
    run_identity(source, out, scale=1)
    assert np.array_equal(stored(out, pixel_format, kind, 4), picture)
    report = run_identity(source, out, scale=2, overwrite=True)
    large = stored(out, pixel_format, kind, 4)
    halved = large[..., 3].reshape(12, 2, 16, 2).mean(axis=(1, 3)) / np.iinfo(kind).max
    assert np.abs(halved - picture[..., 3] / np.iinfo(kind).max)[1:-1, 1:-1].max() < 0.05
    assert any("transparency" in line for line in report.plan.lines())


def test_transparent_sequences_and_videos(tmp_path: Path) -> None:
    """Also where some pictures are opaque; a video with alpha gives transparent pictures too."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(3):
        picture = rgba(np.uint8, number)
        if number == 1:
            picture[..., 3] = 255
        (folder / f"f{number}.png").write_bytes(encode_picture(picture[..., :3], ".png", picture[..., 3]))
    run_identity(folder, tmp_path / "out", scale=1)
    for number in range(3):
        made, given = (stored(tmp_path / d / f"f{number}.png", "rgba", np.uint8, 4) for d in ("out", "in"))
        assert np.array_equal(made, given)
    film = tmp_path / "film.mov"
    ffmpeg("-i", folder / "f%d.png", "-c:v", "qtrle", film)
    (tmp_path / "from_film").mkdir()
    run_identity(film, tmp_path / "from_film" / "f%d.tif", scale=1)
    assert np.array_equal(stored(tmp_path / "from_film" / "f3.tif", "rgba", np.uint8, 4), rgba(np.uint8, 2))
    for out in ("out.mp4", "jpg/f%d.jpg"):
        (tmp_path / "jpg").mkdir(exist_ok=True)
        with pytest.raises(InputError, match=r"transparent in places; \.png, \.tif and \.exr"):
            run_identity(folder, tmp_path / out)
        with pytest.raises(InputError, match="transparent in places"):
            run_identity(folder, tmp_path / out, dry_run=True)


# -- EXR -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transfer", "signal", "light"),
    [
        (13, 0.5, 0.21404),  # IEC 61966-2-1
        (1, 0.5, 0.5**2.4),
        (8, 0.5, 0.5),
        (16, 0.580689, 1.0),  # PQ of 203 cd/m2 (BT.2408)
        (16, 0.508078, 100 / 203),  # of 100 cd/m2
        (16, 1.0, 10_000 / 203),
        (18, 0.75, 1.0),
        (18, 0.5, (1 / 12) / 0.264963),
        (18, 1.0, 1 / 0.264963),
    ],
)
def test_light_of_known_signals(transfer: int, signal: float, light: float) -> None:
    code = np.array([round(signal * 65535)], np.uint16)
    assert linear_light(code, transfer)[0] == pytest.approx(light, rel=2e-3)
    assert linear_light(np.array([0], np.uint8), transfer)[0] == 0


def test_exr_holds_the_light_of_a_picture(tmp_path: Path) -> None:
    picture = rgba(np.uint16)
    (tmp_path / "in.png").write_bytes(encode_picture(picture[..., :3], ".png"))
    run_identity(tmp_path / "in.png", tmp_path / "out.exr", scale=1)
    signal = picture[..., :3] / 65535
    wanted = np.where(signal <= 0.04045, signal / 12.92, ((signal + 0.055) / 1.055) ** 2.4)
    made = stored(tmp_path / "out.exr", "gbrpf32le", np.float32, 3)
    assert np.abs(made - wanted).max() < 1e-3
    (tmp_path / "in.png").write_bytes(encode_picture(picture[..., :3], ".png", picture[..., 3]))
    run_identity(tmp_path / "in.png", tmp_path / "out.exr", scale=1, overwrite=True)
    made = stored(tmp_path / "out.exr", "gbrapf32le", np.float32, 4)
    alpha = picture[..., 3:] / 65535
    assert np.abs(made[..., 3:] - alpha).max() < 1e-3
    assert np.abs(made[..., :3] - wanted * alpha).max() < 1e-3


def test_a_video_becomes_numbered_exr(tmp_path: Path) -> None:
    source = make_clip(tmp_path / "in.mp4", 3)
    run_identity(source, tmp_path / "f%03d.exr", scale=1)
    assert sorted(p.name for p in tmp_path.glob("*.exr")) == ["f001.exr", "f002.exr", "f003.exr"]
    with pytest.raises(InputError, match="a video becomes many pictures"):
        run_identity(source, tmp_path / "out.exr")
