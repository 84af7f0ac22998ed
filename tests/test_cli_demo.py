"""The demo: its drawing tools, its scene, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from recavsr.cli.demo_scene import HEIGHT, WIDTH, Street
from recavsr.cli.drawing import (
    blend,
    coverage,
    fractal_noise,
    halves,
    over,
    pixel_grid,
    polygon_distance,
    segment_distance,
    stroke,
    text_width,
    write,
)
from recavsr.cli.main import run
from recavsr.video.clips import read_clip


@pytest.fixture(scope="module")
def street() -> Street:
    return Street()


# --------------------------------------------------------------------------------------------- the drawing


def test_coverage_sums_to_the_area() -> None:
    x, y = pixel_grid(60, 60)
    disc = coverage(np.hypot(x - 30.3, y - 29.6) - 12.25)
    assert disc.sum() == pytest.approx(np.pi * 12.25**2, rel=2e-3)


def test_polygon_distance_is_signed_and_exact() -> None:
    x, y = np.float32([[5.0, 30.0, 12.0]]), np.float32([[10.0]])
    square = [(2.0, 2.0), (20.0, 2.0), (20.0, 20.0), (2.0, 20.0)]
    np.testing.assert_allclose(polygon_distance(x, y, square), [[-3.0, 10.0, -8.0]], atol=1e-5)


def test_segment_of_no_length_is_a_dot() -> None:
    x, y = pixel_grid(4, 4)
    np.testing.assert_allclose(segment_distance(x, y, (2, 2), (2, 2)), np.hypot(x - 2, y - 2), atol=1e-6)


def test_stroke_has_its_width() -> None:
    picture = np.zeros((40, 100, 3), np.float32)
    stroke(picture, [(20, 20), (80, 20)], 3.0, (1, 1, 1))
    assert picture[:, 50, 0].sum() == pytest.approx(3.0, abs=1e-4)
    assert picture[:, 10, 0].sum() == 0


def test_text_fills_its_width_and_unknown_letters_are_boxes() -> None:
    picture = np.zeros((40, 200, 3), np.float32)
    write(picture, "H_H", 10, 10, 18, (1, 1, 1))
    columns = np.flatnonzero(picture[..., 0].sum(axis=0))
    assert columns[0] == pytest.approx(10, abs=2)
    assert columns[-1] == pytest.approx(10 + text_width("H_H", 18), abs=2)


def test_premultiplied_layers_composite_as_direct_painting() -> None:
    mask = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
    direct = np.full((3, 4, 3), 0.5, np.float32)
    blend(direct, mask, (0.9, 0.2, 0.1))
    layer = np.zeros((3, 4, 4), np.float32)
    blend(layer, mask, (0.9, 0.2, 0.1))
    layered = np.full((3, 4, 3), 0.5, np.float32)
    over(layered, layer, 0, 0)
    np.testing.assert_allclose(layered, direct, atol=1e-6)


def test_a_layer_that_sticks_out_is_cut() -> None:
    picture = np.zeros((4, 4, 3), np.float32)
    over(picture, np.ones((4, 4, 4), np.float32), -3, 2)
    assert picture[..., 0].sum() == 2
    over(picture, np.ones((4, 4, 4), np.float32), 9, 9)
    assert picture[..., 0].sum() == 2


def test_fractal_noise_repeats_without_a_seam() -> None:
    noise = fractal_noise(64, 96, 6, 4, seed=1)
    inner = np.abs(np.diff(noise, axis=1)).max()
    assert np.abs(noise[:, 0] - noise[:, -1]).max() <= inner
    assert noise.min() >= 0
    assert noise.max() <= 1
    assert noise.std() > 0.05


def test_halves_keep_the_mean() -> None:
    picture = np.random.default_rng(0).random((16, 24, 3), dtype=np.float32)
    levels = list(halves(picture, 3))
    assert [level.shape for level in levels] == [(16, 24, 3), (8, 12, 3), (4, 6, 3)]
    np.testing.assert_allclose([level.mean() for level in levels], picture.mean(), atol=1e-6)


# ----------------------------------------------------------------------------------------------- the scene


def test_the_scene_is_the_same_every_time(street: Street) -> None:
    np.testing.assert_array_equal(street.frame(7), Street().frame(7))


def test_the_scene_moves_and_has_detail(street: Street) -> None:
    first, later = street.frame(0), street.frame(12)
    assert first.shape == (HEIGHT, WIDTH, 3)
    assert first.dtype == np.uint8
    assert np.abs(first.astype(int) - later).mean() > 5
    quarter = first.reshape(HEIGHT // 4, 4, WIDTH // 4, 4, 3).mean(axis=(1, 3))
    lost = first - quarter.repeat(4, axis=0).repeat(4, axis=1)
    assert np.sqrt(np.square(lost).mean()) > 10, "a quarter of the size holds nearly all of it"


# --------------------------------------------------------------------------------------------- the command


def test_demo_writes_before_and_after(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    output = tmp_path / "made"
    assert run(["demo", "--output", str(output), "--model", "identity", "--frames", "3", "--json"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    result = json.loads(err.splitlines()[-1])
    assert (result["event"], result["frames"]) == ("result", 3)
    assert set(result["scores"]) == {"bicubic", "identity"}
    assert 15 < result["scores"]["bicubic"]["psnr"] < 35
    assert read_clip(output / "demo_input.mp4").shape == (3, HEIGHT // 4, WIDTH // 4, 3)
    video = read_clip(output / "demo_before_after.mp4")
    assert (video.shape[0], video.shape[2]) == (3, 3 * WIDTH)
    truth = video[:, -HEIGHT:, 2 * WIDTH :]
    assert np.abs(truth[0].astype(int) - Street().frame(0)).mean() < 4
    picture = read_clip(output / "demo_before_after.png")
    assert picture.shape[0] == 1
    assert picture.std() > 30


def test_demo_needs_a_place_to_write(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert run(["demo", "--output", str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
