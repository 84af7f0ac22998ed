"""Full-reference, no-reference and temporal metrics of video frames.

Frames are arrays [N, H, W, 3], RGB, `uint8` or float on the same 0 to 255 scale. Per-frame functions return
arrays [N] (or [N - 1] for frame differences); the mean over frames, then over clips, is the table's value.

Conventions are those of pyiqa's defaults: PSNR on RGB, SSIM on the full-range luma of BT.601 rounded to
integers (`channel="rgb"` for the mean over channels), Gaussian window 11 / 1.5 without padding, NIQE on the
same luma with 96-pixel blocks and the published parameters.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from importlib import resources
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import load as load_safetensors

Frames = NDArray[np.generic]
Values = NDArray[np.float64]

LATENT_PERIOD, LATENT_BORDER = 4, 0  # transition t -> t + 1 crosses a latent border where t % 4 == 0
BLOCK_PERIOD, BLOCK_BORDER = 8, 4  # and a block border where t % 8 == 4, from t = 20 (the first block has 21)
FIRST_BLOCK_FRAMES = 21


def _check_pair(output: Frames, truth: Frames) -> None:
    if output.shape != truth.shape or output.ndim != 4 or output.shape[-1] != 3:
        raise ValueError(f"expected two arrays [N, H, W, 3] of one shape, got {output.shape}, {truth.shape}")


def psnr(output: Frames, truth: Frames) -> Values:
    """Peak signal-to-noise ratio on RGB in dB, [N, H, W, 3] x 2 -> [N]; identical frames give 80 dB."""
    _check_pair(output, truth)
    mse = [np.mean(np.square(_unit_float(a) - _unit_float(b))) for a, b in zip(output, truth)]
    return -10 * np.log10(np.array(mse) + 1e-8)


def _unit_float(frame: Frames) -> NDArray[np.float64]:
    return frame.astype(np.float64) / 255


def luma(frames: Frames) -> NDArray[np.float64]:
    """Full-range BT.601 luma rounded to integers, [..., 3] -> [...], 0 to 255."""
    return np.rint(frames.astype(np.float64) @ np.array([0.299, 0.587, 0.114]))


def ssim(output: Frames, truth: Frames, channel: Literal["y", "rgb"] = "y") -> Values:
    """Structural similarity (Wang et al. 2004), [N, H, W, 3] x 2 -> [N].

    Gaussian window 11 x 11, sigma 1.5, valid positions only; K1 = 0.01, K2 = 0.03, range 255; negative
    contrast-structure terms count as 0. "y": on luma; "rgb": mean over the three channels.
    """
    _check_pair(output, truth)
    if min(output.shape[1:3]) < 11:
        raise ValueError("SSIM needs frames of at least 11 x 11 pixels")

    def planes(frame: Frames) -> torch.Tensor:
        values = luma(frame)[None] if channel == "y" else np.moveaxis(frame.astype(np.float64), -1, 0)
        # Centred so that float32 keeps variances exact to 1e-6 of their scale.
        return torch.from_numpy((values - 128).astype(np.float32))[:, None]

    return np.array([_ssim_planes(planes(a), planes(b)) for a, b in zip(output, truth)])


def _filter_valid(planes: torch.Tensor, axis: int, size: int = 11, sigma: float = 1.5) -> torch.Tensor:
    """Gaussian along one axis of [B, H, W], valid positions only; shifted adds are 8 x faster than conv2d."""
    taps = np.exp(-np.square(np.arange(size) - (size - 1) / 2) / (2 * sigma * sigma))
    taps /= taps.sum()
    length = planes.shape[axis] - size + 1
    result = planes.narrow(axis, 0, length) * taps[0]
    for i in range(1, size):
        result.add_(planes.narrow(axis, i, length), alpha=float(taps[i]))
    return result


def _ssim_planes(x: torch.Tensor, y: torch.Tensor) -> float:
    """x, y [C, 1, H, W], centred at 0 for values 0 to 255 -> mean SSIM."""
    stack = torch.cat([x, y, x * x, y * y, x * y], dim=1).flatten(0, 1)
    blurred = _filter_valid(_filter_valid(stack, 1), 2)
    mean_x, mean_y, xx, yy, xy = blurred.unflatten(0, (x.shape[0], 5)).unbind(1)
    var_x, var_y, cov = xx - mean_x**2, yy - mean_y**2, xy - mean_x * mean_y
    mean_x, mean_y = mean_x + 128, mean_y + 128
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    structure = ((2 * cov + c2) / (var_x + var_y + c2)).clamp_min(0)
    brightness = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    return float((structure * brightness).double().mean())


# Temporal metrics ---------------------------------------------------------------------------------------


def frame_differences(frames: Frames) -> NDArray[np.float32]:
    """Change from each frame to the next, [N, H, W, 3] -> [N - 1, H, W, 3]."""
    values = frames.astype(np.float32)
    return values[1:] - values[:-1]


def td(output: Frames, truth: Frames) -> Values:
    """Mean absolute error of frame differences against truth, in 1/255, [N, H, W, 3] x 2 -> [N - 1].

    Lower is truer in time; it also favours blur, so read it beside LPIPS.
    """
    _check_pair(output, truth)
    return np.array(
        [
            np.abs(frame_differences(output[t : t + 2]) - frame_differences(truth[t : t + 2])).mean()
            for t in range(len(output) - 1)
        ],
        dtype=np.float64,
    )


@dataclass(frozen=True)
class Flicker:
    """Change of the output where the truth stands still.

    `change`: mean absolute change of the output over static pixels, in 1/255; None without static pixels.
    `static_share`: share of pixel transitions (all but the last frame's pixels) that are static.
    """

    change: float | None
    static_share: float


def static_flicker(output: Frames, truth: Frames) -> Flicker:
    """Flicker of static areas: pixels of which every channel of the truth changes by less than 1/255.

    Shapes [N, H, W, 3] x 2. Meaningful as a ratio to another method's value on the same frames.
    """
    _check_pair(output, truth)
    total, count = 0.0, 0
    for t in range(len(output) - 1):
        static = np.abs(frame_differences(truth[t : t + 2])[0]).max(axis=-1) < 1
        changes = np.abs(frame_differences(output[t : t + 2])[0])[static]
        total += float(changes.mean(axis=-1).sum(dtype=np.float64)) if len(changes) else 0.0
        count += len(changes)
    pixels = (len(output) - 1) * output.shape[1] * output.shape[2]
    return Flicker(total / count if count else None, count / pixels if pixels else 0.0)


def pulse_profile(values: Values, period: int) -> Values:
    """Mean of per-frame or per-transition `values` [N] at each position modulo `period` -> [period].

    A decoder that restarts at latent borders shows as a line in the profile with period 4, a generator that
    restarts at block borders as one with period 8. Positions that never occur are NaN.
    """
    positions = np.arange(len(values)) % period
    return np.array(
        [values[positions == p].mean() if (positions == p).any() else np.nan for p in range(period)]
    )


def border_excess(differences: Values, border: Literal["latent", "block"]) -> float | None:
    """How much larger frame differences (or their errors) are at borders than inside latents: 0.03 = 3 %.

    Args:
        differences: [N - 1], one value a transition t -> t + 1, from the stream's first frame on.
        border: "latent" (every 4 frames) or "block" (after 21 frames, then every 8).

    The first latents are left out, where no history exists yet. None if the clip has no such border.
    """
    t = np.arange(len(differences))
    inside = (t % LATENT_PERIOD != LATENT_BORDER) & (t > LATENT_PERIOD)
    at_border = _at_border(t, border)
    if not at_border.any() or not inside.any():
        return None
    rest = float(differences[inside].mean())
    return float(differences[at_border].mean()) / rest - 1 if rest else None


def border_line(differences: Values, border: Literal["latent", "block"]) -> float | None:
    """How much larger frame differences are at borders than those beside them, in the same two latents.

    Unlike `border_excess` this takes no slow rise or fall for a line: block borders are late in a clip, and
    H.264 lets the noise of a still scene grow over its first second. 0.03 = 3 %.

    Args:
        differences: [N - 1], as for `border_excess`.
        border: "latent" or "block", from frame 8 or 20 on.

    None if the clip has no such border with three differences on both sides, or nothing changes beside them.
    """
    inside = LATENT_PERIOD - 1
    t = np.arange(2 * LATENT_PERIOD, len(differences) - inside)
    t = t[_at_border(t, border)]
    if not len(t):
        return None
    beside = np.mean([(differences[t - step] + differences[t + step]) / 2 for step in range(1, inside + 1)])
    return float(differences[t].mean() / beside) - 1 if beside else None


def _at_border(t: NDArray[np.integer], border: Literal["latent", "block"]) -> NDArray[np.bool_]:
    """Whether transitions t -> t + 1 cross such a border; that after a stream's first frame is left out."""
    if border == "latent":
        return (t % LATENT_PERIOD == LATENT_BORDER) & (t > 0)
    return (t % BLOCK_PERIOD == BLOCK_BORDER) & (t >= FIRST_BLOCK_FRAMES - 1)


# NIQE ---------------------------------------------------------------------------------------------------

NIQE_BLOCK = 96


def niqe(frames: Frames) -> Values:
    """Natural image quality evaluator (Mittal et al. 2013), [N, H, W, 3] -> [N]; lower is more natural.

    Statistics of locally normalised luma in 96-pixel blocks at two scales, compared with those of pristine
    photographs. It rewards grit: never read it alone. NaN where a frame has fewer than two usable blocks.
    """
    return np.array([_niqe_plane(luma(frame)) for frame in frames])


@functools.cache
def _pristine_parameters() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean [36] and covariance [36, 36] of pristine features, as published by the authors of NIQE."""
    data = resources.files("recavsr.evaluation").joinpath("niqe_parameters.safetensors").read_bytes()
    tensors = load_safetensors(data)
    return tensors["mean"], tensors["covariance"]


def _niqe_plane(plane: NDArray[np.float64]) -> float:
    rows, columns = plane.shape[0] // NIQE_BLOCK, plane.shape[1] // NIQE_BLOCK
    if rows * columns < 2:
        return math.nan
    plane = plane[: rows * NIQE_BLOCK, : columns * NIQE_BLOCK]
    scales = [_block_features(_normalise_locally(scaled), rows, columns) for scaled in (plane, _halve(plane))]
    features = np.concatenate(scales, axis=1)
    usable = features[~np.isnan(features).any(axis=1)]
    if len(usable) < 2:
        return math.nan
    mean, covariance = _pristine_parameters()
    difference = mean - np.nanmean(features, axis=0)
    pooled = (covariance + np.cov(usable, rowvar=False)) / 2
    return math.sqrt(max(0.0, float(difference @ np.linalg.pinv(pooled) @ difference)))


def _filter_replicate(plane: NDArray[np.float64], taps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Separable symmetric filter with replicated borders, [H, W] -> [H, W]."""
    for axis in (0, 1):
        radius = len(taps) // 2
        padding = [(radius, radius) if a == axis else (0, 0) for a in (0, 1)]
        padded = np.pad(plane, padding, mode="edge")
        length = plane.shape[axis]
        plane = sum(
            (tap * padded.take(range(i, i + length), axis=axis) for i, tap in enumerate(taps)),
            start=np.zeros_like(plane),
        )
    return plane


def _normalise_locally(plane: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean-subtracted, contrast-normalised coefficients (the paper's Eq. 1), 7 x 7 window, sigma 7/6."""
    taps = np.exp(-np.square(np.arange(-3, 4)) / (2 * (7 / 6) ** 2))
    taps /= taps.sum()
    mean = _filter_replicate(plane, taps)
    deviation = np.sqrt(np.abs(_filter_replicate(plane * plane, taps) - mean * mean))
    return (plane - mean) / (deviation + 1)


def _halve(plane: NDArray[np.float64]) -> NDArray[np.float64]:
    """Antialiased bicubic reduction by 2 with mirrored borders, as NIQE's parameters were made with."""
    distance = np.abs(np.arange(8) - 3.5) / 2  # of the eight input pixels under the widened kernel
    inner = (1.5 * distance - 2.5) * distance**2 + 1
    outer = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    taps = np.where(distance <= 1, inner, outer)
    taps /= taps.sum()
    for axis in (0, 1):
        padding = [(3, 4) if a == axis else (0, 0) for a in (0, 1)]
        padded = np.pad(plane, padding, mode="symmetric")
        length = plane.shape[axis] // 2
        plane = sum(
            (tap * padded.take(range(i, i + 2 * length, 2), axis=axis) for i, tap in enumerate(taps)),
            start=np.zeros(()),
        )
    return plane


def _block_features(normalised: NDArray[np.float64], rows: int, columns: int) -> NDArray[np.float64]:
    """The 18 features of every block, [H, W] -> [rows x columns, 18]."""
    height, width = normalised.shape[0] // rows, normalised.shape[1] // columns
    blocks = normalised.reshape(rows, height, columns, width).swapaxes(1, 2).reshape(-1, height, width)
    shape, left, right = _fit_asymmetric_gaussian(blocks)
    features = [shape, (left + right) / 2]
    # Products of neighbours: across, down, and the two diagonals; neighbours wrap inside a block.
    for shift in ((0, 1), (1, 0), (1, 1), (1, -1)):
        shape, left, right = _fit_asymmetric_gaussian(blocks * np.roll(blocks, shift, axis=(1, 2)))
        mean = (right - left) * _gamma(2 / shape) / _gamma(1 / shape)
        features += [shape, mean, left, right]
    return np.stack(features, axis=1)


def _gamma(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([math.gamma(v) if math.isfinite(v) else math.nan for v in values])


@functools.cache
def _shape_table() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Shapes 0.2 to 10 in steps of 0.001 and the moment ratio that each one gives (increasing)."""
    shapes = np.arange(0.2, 10.001, 0.001)
    ratios = _gamma(2 / shapes) ** 2 / (_gamma(1 / shapes) * _gamma(3 / shapes))
    return shapes, ratios


def _fit_asymmetric_gaussian(blocks: NDArray[np.float64]) -> tuple[Values, Values, Values]:
    """Moment fit of an asymmetric generalised Gaussian to each block, [B, h, w] -> shape, left, right [B].

    A block without values on one side (flat areas) gives NaN.
    """
    values = blocks.reshape(len(blocks), -1)
    with np.errstate(invalid="ignore", divide="ignore"):
        squares = values * values
        left = np.sqrt((squares * (values < 0)).sum(1) / (values < 0).sum(1))
        right = np.sqrt((squares * (values > 0)).sum(1) / (values > 0).sum(1))
        skew = left / right
        ratio = np.abs(values).mean(1) ** 2 / squares.mean(1)
        target = ratio * (skew**3 + 1) * (skew + 1) / (skew**2 + 1) ** 2
    shapes, ratios = _shape_table()
    above = np.clip(np.searchsorted(ratios, target), 1, len(ratios) - 1)
    nearest = above - (target - ratios[above - 1] <= ratios[above] - target)
    shape = np.where(np.isnan(target), np.nan, shapes[nearest])
    spread = np.sqrt(_gamma(1 / shape) / _gamma(3 / shape))
    return shape, left * spread, right * spread
