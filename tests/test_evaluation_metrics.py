"""Metrics against hand-computed values and independent implementations."""

from __future__ import annotations

import math

import cv2
import numpy as np
import pytest
from scipy import ndimage, special, stats

from recavsr.evaluation import metrics
from recavsr.geometry import BlockPlan


def grey(levels: list[float], height: int = 16, width: int = 20) -> np.ndarray:
    """One flat grey frame per level."""
    return np.stack([np.full((height, width, 3), level, np.float32) for level in levels])


def texture(seed: int, height: int, width: int, sigma: float = 1.5) -> np.ndarray:
    """A smooth random RGB frame, uint8."""
    noise = np.random.default_rng(seed).normal(size=(height, width, 3))
    smooth = ndimage.gaussian_filter(noise, (sigma, sigma, 0))
    return np.rint(np.clip(128 + 50 * smooth / smooth.std(), 0, 255)).astype(np.uint8)


def test_psnr_of_a_constant_error():
    assert metrics.psnr(grey([100, 50]), grey([110, 50])) == pytest.approx(
        [20 * math.log10(255 / 10), 80.0], abs=1e-4
    )


def test_luma_is_full_range_and_rounded():
    frame = np.array([[[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]]], np.uint8)
    assert metrics.luma(frame).tolist() == [[76, 150, 29, 255]]


@pytest.mark.parametrize("channel", ["y", "rgb"])
def test_ssim_equals_a_float64_reference(channel):
    a, b = texture(1, 60, 71), texture(2, 60, 71)
    b = np.rint(0.7 * a + 0.3 * b).astype(np.uint8)

    def planes(frame):
        return [metrics.luma(frame)] if channel == "y" else list(np.moveaxis(frame.astype(np.float64), -1, 0))

    def blur(plane):
        return ndimage.gaussian_filter(plane, 1.5, radius=5)[5:-5, 5:-5]

    expected = []
    for x, y in zip(planes(a), planes(b)):
        mx, my = blur(x), blur(y)
        vx, vy, cov = blur(x * x) - mx**2, blur(y * y) - my**2, blur(x * y) - mx * my
        c1, c2 = 2.55**2, 7.65**2
        structure = np.maximum((2 * cov + c2) / (vx + vy + c2), 0)
        expected.append(((2 * mx * my + c1) / (mx**2 + my**2 + c1) * structure).mean())
    assert metrics.ssim(a[None], b[None], channel) == pytest.approx([np.mean(expected)], abs=2e-6)


def test_ssim_of_equal_frames_is_one_and_small_frames_are_refused():
    frames = texture(3, 32, 40)[None]
    assert metrics.ssim(frames, frames) == pytest.approx([1.0], abs=1e-6)
    with pytest.raises(ValueError, match="11 x 11"):
        metrics.ssim(frames[:, :8], frames[:, :8])


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="one shape"):
        metrics.psnr(grey([1, 2]), grey([1]))


def test_td_counts_wrong_motion_and_ignores_a_constant_error():
    truth = grey([10, 20, 30])
    assert metrics.td(truth + 7, truth) == pytest.approx([0, 0])
    assert metrics.td(grey([10, 24, 30]), truth) == pytest.approx([4, 4])


def test_td_does_not_wrap_around_in_uint8():
    output, truth = grey([200, 10]).astype(np.uint8), grey([10, 200]).astype(np.uint8)
    assert metrics.td(output, truth) == pytest.approx([380])


def test_flicker_looks_only_where_the_truth_stands_still():
    truth = grey([10, 10, 10])
    truth[:, :, 10:] += np.array([0, 40, 80]).reshape(3, 1, 1, 1)  # the right half moves
    output = truth.copy()
    output[1, :, :10] += 2  # the still half of the output flickers by 2 levels
    output[1, :, 10:] += 99
    flicker = metrics.static_flicker(output, truth)
    assert flicker.change == pytest.approx(2)
    assert flicker.static_share == pytest.approx(0.5)


def test_flicker_needs_every_channel_to_stand_still():
    truth = grey([10, 10])
    truth[1, :, :, 2] += 5
    assert metrics.static_flicker(truth, truth) == metrics.Flicker(None, 0.0)


def test_pulse_profile_finds_the_phase():
    values = np.array([1.0, 2.0, 3.0, 4.0, 3.0, 2.0])
    assert metrics.pulse_profile(values, 4) == pytest.approx([2, 2, 3, 4])
    assert np.isnan(metrics.pulse_profile(values, 8)[6:]).all()


def test_border_excess_reads_latent_and_block_borders():
    differences = np.ones(44)
    differences[0::4] = 1.1
    assert metrics.border_excess(differences, "latent") == pytest.approx(0.1)
    differences[[20, 28, 36]] = 1.5
    assert metrics.border_excess(differences, "block") == pytest.approx(0.5)
    differences[0] = 9.0  # nothing before the first border counts: there is no history yet
    assert metrics.border_excess(differences, "block") == pytest.approx(0.5)
    assert metrics.border_excess(np.ones(12), "block") is None
    assert metrics.border_excess(np.ones(3), "latent") is None


def test_borders_are_those_of_the_block_plan():
    starts = [block.first_frame for block in BlockPlan().blocks(45)][1:]
    for start in starts:
        marked = np.ones(44)
        marked[start - 1] = 2.0  # the transition into the block's first frame
        assert metrics.border_excess(marked, "block") > 0
        assert metrics.border_excess(marked, "latent") > 0


def test_a_line_at_borders_is_read_against_what_lies_beside_it():
    differences = np.arange(44) + 5.0  # noise that grows: not a line, but an excess of block borders
    assert metrics.border_line(differences, "block") == pytest.approx(0)
    assert metrics.border_line(differences, "latent") == pytest.approx(0)
    assert metrics.border_excess(differences, "block") > 0.1
    differences[8::4] *= 1.1
    assert metrics.border_line(differences, "latent") == pytest.approx(0.1)
    differences[[20, 28, 36]] /= 1.1
    assert metrics.border_line(differences, "block") == pytest.approx(0)
    differences[:5] = 900.0  # before a first latent has history
    assert metrics.border_line(differences[:12], "latent") == pytest.approx(0.1)
    assert metrics.border_line(differences[:11], "latent") is None
    assert metrics.border_line(differences[:23], "block") is None
    assert metrics.border_line(np.zeros(44), "latent") is None


# NIQE ---------------------------------------------------------------------------------------------------


def test_niqe_equals_basicsr():
    """Values of BasicSR 1.4.2 on the same luma, itself within 1e-5 of the authors' MATLAB code."""
    frames = np.stack([texture(11, 300, 410, 1.0), texture(12, 300, 410, 2.5)])
    assert metrics.niqe(frames) == pytest.approx([9.953438, 10.523139], abs=2e-4)


def test_niqe_is_nan_where_two_blocks_do_not_fit():
    assert np.isnan(metrics.niqe(texture(4, 150, 190)[None])).all()
    assert np.isnan(metrics.niqe(grey([128], 200, 200))).all()


def test_niqe_prefers_the_clean_clip(shared):
    frame = cv2.imread(str(sorted((shared / "data" / "photos").glob("*.jpg"))[0]))[:480, :480, ::-1]
    blurred = cv2.GaussianBlur(frame, (0, 0), 3)
    clean, soft = metrics.niqe(np.stack([frame, blurred]))
    assert clean < soft


def test_half_size_keeps_constants_and_ramps():
    rows, columns = np.mgrid[0:40, 0:48].astype(np.float64)
    ramp = 3 * rows + 2 * columns
    half = metrics._halve(ramp)
    assert half.shape == (20, 24)
    # Away from the mirrored border a ramp stays a ramp, sampled between the two pixels it replaces.
    assert half[4:-4, 4:-4] == pytest.approx((ramp[0::2, 0::2] + 2.5)[4:-4, 4:-4])
    assert metrics._halve(np.full((8, 8), 7.0)) == pytest.approx(np.full((4, 4), 7.0))


@pytest.mark.parametrize("shape", [1.0, 2.0])
def test_asymmetric_fit_recovers_a_known_distribution(shape):
    sizes = np.abs(stats.gennorm.rvs(shape, size=(1, 400, 400), random_state=5))
    # The left side is twice as wide, so a draw falls there twice as often.
    values = sizes * np.where(np.random.default_rng(6).random(sizes.shape) < 2 / 3, -2, 1)
    fitted, left, right = metrics._fit_asymmetric_gaussian(values)
    assert fitted == pytest.approx([shape], rel=0.02)
    assert right == pytest.approx([1.0], rel=0.02)
    assert left == pytest.approx([2.0], rel=0.02)


def test_gamma_agrees_with_scipy():
    values = np.linspace(0.1, 9, 50)
    assert metrics._gamma(values) == pytest.approx(special.gamma(values))
