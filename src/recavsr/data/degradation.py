"""Second-order video degradation: how HQ training clips become LR ones.

The pipeline is RealBasicVSR's (Chan et al. 2022): blur, resize, noise, JPEG, video codec, the same
again in a milder range, then a last codec and a resize to the exact LR size with a sinc blur, in
either order. Kinds (kernel, filter, codec) are drawn once a clip; their numbers random-walk from
frame to frame. `sample_degradation` draws a `DegradationRecord`, `apply_degradation` is a pure
function of (clip, record): on CPU the same record gives the same pixels bit for bit. A record is
JSON and does not depend on the clip's size: sizes are factors, bitrates are per 256x256 HQ pixels.
A picture is a clip of one frame (`degrade_image`).

Presets: "mild" (clean small video), "medium", "heavy" (RealBasicVSR's, with the stronger shot noise of
Real-ESRGAN), "realbasicvsr" (as published) and "realesrgan" (Wang et al. 2021: no codec, nothing walks).

T frames, H W rows and columns, R rank-one terms of a blur kernel. Clips are float [T, 3, H, W] in
[0, 1]; they may leave that range between a noise and the next 8-bit stage.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from recavsr.errors import InputError
from recavsr.video.memory_codec import code_clip

PRESETS = ("clean", "mild", "medium", "heavy", "realbasicvsr", "realesrgan")
TRAINING_MIX = {"mild": 0.35, "medium": 0.45, "heavy": 0.20}
SCALE_MIX = {4: 0.8, 3: 0.1, 2: 0.1}
FILTERS = ("bilinear", "area", "bicubic", "antialiased")
_RANDOM_FILTERS = FILTERS[:3]  # what the published pipelines draw from

KERNELS = ("iso", "aniso", "generalized_iso", "generalized_aniso", "plateau_iso", "plateau_aniso", "sinc")
_KERNEL_ODDS = (0.405, 0.225, 0.108, 0.027, 0.108, 0.027, 0.1)
_CODECS = ("libx264", "libx264", "mpeg4")  # RealBasicVSR's libx264, h264 (the same encoder here), mpeg4
_BITRATE_AREA = 256 * 256  # HQ pixels that RealBasicVSR's bitrates were made for
_SPEEDS = ("veryfast", "fast", "medium")  # of x264 at a crf; medium is what it does if it is not told
_CRF_FRAME = (180, 320)  # rows and columns of the frame that a crf is meant for, if the clip is smaller
_SEED_STEP = 7919  # between the noise seeds of two frames

Walk = tuple[float, ...]


# ---------------------------------------------------------------- the record


@dataclass(frozen=True)
class Blur:
    """One kernel a frame. Sigmas in pixels, angle in radians, beta the exponent or plateau shape,
    omega the sinc cutoff in radians a pixel; numbers that the kind does not use are ignored."""

    kernel: str
    size: int
    sigma_x: Walk
    sigma_y: Walk
    angle: Walk
    beta: Walk
    omega: Walk


@dataclass(frozen=True)
class Resize:
    """Scale each frame by its factor (sizes rounded to even), or, with `to_lr`, to the LR size.

    `of_lr`: the factor is of the LR size (Real-ESRGAN's second resize), not of the frame's own.
    """

    filter: str
    factor: Walk
    to_lr: bool = False
    of_lr: bool = False


@dataclass(frozen=True)
class Noise:
    """Fresh in each frame. Gaussian: level is sigma in 8-bit steps; Poisson: a factor on the shot noise.

    Shot noise is that of a picture in [0, 1]. `clip`: the result is cut to [0, 1] at once (Real-ESRGAN).
    """

    kind: str
    grey: bool
    level: Walk
    seed: int
    clip: bool = False


@dataclass(frozen=True)
class Jpeg:
    """Baseline JPEG, 4:2:0, one quality a frame (libjpeg's scale)."""

    quality: Walk


@dataclass(frozen=True)
class Codec:
    """A real video codec in memory: `crf` (as `crf_of_part`), or `bits` a frame for 256x256 HQ pixels."""

    codec: str
    crf: float | None
    bits: float | None
    speed: str = "fast"


Stage = Blur | Resize | Noise | Jpeg | Codec
_STAGES: dict[str, type] = {kind.__name__.lower(): kind for kind in (Blur, Resize, Noise, Jpeg, Codec)}


@dataclass(frozen=True)
class DegradationRecord:
    """All that is needed to degrade a clip again: LR = round-to-even(HQ / scale), stages in order."""

    preset: str
    scale: int
    frames: int
    stages: tuple[Stage, ...]

    def part(self, first: int, frames: int) -> DegradationRecord:
        """The record of frames `first` to `first + frames` of the clip: for clips too long for one piece."""
        if not 0 <= first <= first + frames <= self.frames:
            raise InputError(f"a record of {self.frames} frames has no {frames} frames from {first} on")
        return replace(
            self, frames=frames, stages=tuple(_stage_part(stage, first, frames) for stage in self.stages)
        )

    def to_json(self) -> str:
        """One JSON object; `from_json` gives an equal record."""
        stages = [{"stage": type(stage).__name__.lower(), **asdict(stage)} for stage in self.stages]
        return json.dumps({**asdict(self), "stages": stages})

    @staticmethod
    def from_json(text: str) -> DegradationRecord:
        """Rebuild a record. Raises InputError for anything that is not one."""
        try:
            data = json.loads(text)
            stages = tuple(_stage_from(dict(stage)) for stage in data.pop("stages"))
            return DegradationRecord(**data, stages=stages)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"not a degradation record ({error}); make it with DegradationRecord.to_json"
            ) from error


def _stage_part(stage: Stage, first: int, frames: int) -> Stage:
    part = _with_walks(stage, lambda walk: walk[first : first + frames])
    return replace(part, seed=part.seed + _SEED_STEP * first) if isinstance(part, Noise) else part


def _with_walks(stage: Stage, change: Callable[[Walk], Walk]) -> Stage:
    """The stage with every number that walks changed."""
    values = {field.name: getattr(stage, field.name) for field in fields(stage)}
    walks: dict[str, Any] = {name: change(v) for name, v in values.items() if isinstance(v, tuple)}
    return replace(stage, **walks)


def _stage_from(data: dict) -> Stage:
    kind = _STAGES[data.pop("stage")]
    known = {field.name for field in fields(kind)}
    if unknown := set(data) - known:
        raise KeyError(f"unknown fields {sorted(unknown)}")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in data.items()})


def lr_size(height: int, width: int, scale: int) -> tuple[int, int]:
    """LR rows and columns for an HQ size: HQ / scale rounded to even numbers, as 4:2:0 codecs need."""
    return _even(height / scale), _even(width / scale)


def _even(size: float) -> int:
    return max(2 * round(size / 2), 2)


# ---------------------------------------------------------------- drawing


@dataclass(frozen=True)
class _Range:
    low: float
    high: float
    step: float  # largest change from one frame to the next

    def walk(self, rng: np.random.Generator, frames: int, start: float | None = None) -> Walk:
        value = rng.uniform(self.low, self.high) if start is None else start
        steps = rng.uniform(-self.step, self.step, frames - 1)
        values = [value]
        for change in steps:
            values.append(min(max(values[-1] + change, self.low), self.high))
        return tuple(round(float(v), 5) for v in values)


def _draw_blur(
    rng: np.random.Generator,
    frames: int,
    sigma: _Range,
    *,
    sizes: Sequence[int] = tuple(range(7, 22, 2)),
    kinds=None,
) -> Blur:
    kernel = str(rng.choice(KERNELS, p=_KERNEL_ODDS)) if kinds is None else str(rng.choice(kinds))
    size = int(rng.choice(sizes))
    sigma_x = sigma.walk(rng, frames)
    sigma_y = sigma_x if kernel.endswith("iso") and not kernel.endswith("aniso") else sigma.walk(rng, frames)
    beta = _Range(1, 2, 0.1) if kernel.startswith("plateau") else _Range(0.5, 4, 0.05)
    return Blur(
        kernel,
        size,
        sigma_x,
        sigma_y,
        angle=_Range(-math.pi, math.pi, 0.31416).walk(rng, frames),
        beta=beta.walk(rng, frames),
        omega=_Range(math.pi / 3 if size < 13 else math.pi / 5, math.pi, 0.0628).walk(rng, frames),
    )


def _draw_resize(
    rng: np.random.Generator, frames: int, odds: Sequence[float], low: float, high: float, step: float
) -> Resize:
    direction = rng.choice(("up", "down", "keep"), p=odds)
    name = str(rng.choice(_RANDOM_FILTERS))
    start = 1.0 if direction == "keep" else rng.uniform(*((1, high) if direction == "up" else (low, 1)))
    # Whatever the direction, the walk may cross 1: its range is the whole one.
    return Resize(name, _Range(low, high, step).walk(rng, frames, start))


def _draw_noise(
    rng: np.random.Generator, frames: int, gaussian: _Range, poisson: _Range, *, gaussian_odds: float = 0.5
) -> Noise:
    kind = "gaussian" if rng.random() < gaussian_odds else "poisson"
    level = (gaussian if kind == "gaussian" else poisson).walk(rng, frames)
    return Noise(kind, bool(rng.random() < 0.4), level, int(rng.integers(2**31)))


def _draw_codec(rng: np.random.Generator) -> Codec:
    return Codec(str(rng.choice(_CODECS)), None, float(rng.integers(10_000, 100_001)), "veryfast")


def _heavy_stages(rng: np.random.Generator, frames: int, shot: float = 1.0) -> list[Stage]:
    """RealBasicVSR's stages; `shot` is the unit of its Poisson scales."""
    stages: list[Stage] = [
        _draw_blur(rng, frames, _Range(0.2, 3, 0.02)),
        _draw_resize(rng, frames, (0.2, 0.7, 0.1), 0.15, 1.5, 0.015),
        _draw_noise(rng, frames, _Range(1, 30, 0.1), _Range(0.05 * shot, 3 * shot, 0.005 * shot)),
        Jpeg(_Range(30, 95, 3).walk(rng, frames)),
        _draw_codec(rng),
    ]
    if rng.random() < 0.8:
        stages.append(_draw_blur(rng, frames, _Range(0.2, 1.5, 0.02)))
    stages += [
        _draw_resize(rng, frames, (0.3, 0.4, 0.3), 0.3, 1.2, 0.03),
        _draw_noise(rng, frames, _Range(1, 25, 0.1), _Range(0.05 * shot, 2.5 * shot, 0.005 * shot)),
        Jpeg(_Range(30, 95, 3).walk(rng, frames)),
    ]
    last_size = _draw_last_size(rng, frames)
    groups: list[list[Stage]] = [[_draw_codec(rng)], last_size]
    if rng.random() < 0.5:
        groups.reverse()
    return stages + groups[0] + groups[1]


def _draw_last_size(rng: np.random.Generator, frames: int) -> list[Stage]:
    """The resize to the LR size, followed by a sinc blur in four of five clips."""
    stages: list[Stage] = [Resize(str(rng.choice(_RANDOM_FILTERS)), (1.0,) * frames, to_lr=True)]
    if rng.random() < 0.8:
        size = int(rng.choice(range(7, 22, 2)))
        omega = _Range(math.pi / 3, math.pi, 0.0628).walk(rng, frames)
        unused = (1.0,) * frames
        stages.append(Blur("sinc", size, unused, unused, unused, unused, omega))
    return stages


def _realbasicvsr_stages(rng: np.random.Generator, frames: int) -> list[Stage]:
    # Its code draws shot noise in grey levels, where counts are 255 times larger than in [0, 1].
    return _heavy_stages(rng, frames, shot=255**-0.5)


def _realesrgan_stages(rng: np.random.Generator, frames: int) -> list[Stage]:
    """Real-ESRGAN's stages, drawn for one picture and held for all frames (it has no notion of time)."""
    blurs = [_draw_still_blur(rng, 3.0)] + ([_draw_still_blur(rng, 1.5)] if rng.random() < 0.8 else [])
    jpegs = [Jpeg(_Range(30, 95, 0).walk(rng, 1)) for _ in range(2)]
    stages: list[Stage] = [
        blurs[0],
        _draw_resize(rng, 1, (0.2, 0.7, 0.1), 0.15, 1.5, 0),
        replace(_draw_noise(rng, 1, _Range(1, 30, 0), _Range(0.05, 3, 0)), clip=True),
        jpegs[0],
        *blurs[1:],
        replace(_draw_resize(rng, 1, (0.3, 0.4, 0.3), 0.3, 1.2, 0), of_lr=True),
        replace(_draw_noise(rng, 1, _Range(1, 25, 0), _Range(0.05, 2.5, 0)), clip=True),
    ]
    last_size = _draw_last_size(rng, 1)
    stages += [*last_size, jpegs[1]] if rng.random() < 0.5 else [jpegs[1], *last_size]
    return [_with_walks(stage, lambda walk: walk * frames) for stage in stages]


def _draw_still_blur(rng: np.random.Generator, widest: float) -> Blur:
    blur = _draw_blur(rng, 1, _Range(0.2, widest, 0))
    below = rng.random() < 0.5  # Real-ESRGAN draws shapes below and above 1 equally often
    low, high = (1, 2) if blur.kernel.startswith("plateau") else (0.5, 4)
    return replace(blur, beta=_Range(low if below else 1, 1 if below else high, 0).walk(rng, 1))


def _medium_stages(rng: np.random.Generator, frames: int) -> list[Stage]:
    kinds = ("iso", "iso", "iso", "aniso", "generalized_iso", "plateau_iso")
    stages: list[Stage] = [
        _draw_blur(rng, frames, _Range(0.5, 2.2, 0.02), sizes=(13, 15, 17), kinds=kinds),
        Resize(str(rng.choice(FILTERS, p=(0.35, 0.3, 0.2, 0.15))), (1.0,) * frames, to_lr=True),
        _draw_noise(rng, frames, _Range(0, 10, 0.1), _Range(0.05, 1, 0.005), gaussian_odds=0.65),
    ]
    if rng.random() < 0.75:
        stages.append(Jpeg(_Range(55, 95, 3).walk(rng, frames)))
    draw = rng.random()
    if draw < 0.7:
        stages.append(Codec("libx264", round(float(rng.uniform(18, 32)), 1), None, str(rng.choice(_SPEEDS))))
    elif draw < 0.8:
        stages.append(Codec("mpeg4", None, float(rng.integers(1_500, 12_001))))
    return stages


def _mild_stages(rng: np.random.Generator, frames: int) -> list[Stage]:
    stages: list[Stage] = []
    if rng.random() < 0.8:
        stages.append(
            _draw_blur(rng, frames, _Range(0.1, 1.0, 0.02), sizes=(7, 9), kinds=("iso", "iso", "aniso"))
        )
    stages.append(Resize(str(rng.choice(FILTERS, p=(0.2, 0.4, 0.2, 0.2))), (1.0,) * frames, to_lr=True))
    if rng.random() < 0.85:
        stages.append(
            _draw_noise(rng, frames, _Range(0, 3, 0.05), _Range(0.02, 0.4, 0.005), gaussian_odds=0.75)
        )
    draw = rng.random()
    if draw < 0.6:
        stages.append(Jpeg(_Range(75, 95, 1).walk(rng, frames)))
    if 0.5 <= draw < 0.88:
        stages.append(Codec("libx264", round(float(rng.uniform(14, 24)), 1), None, str(rng.choice(_SPEEDS))))
    return stages


def _clean_stages(rng: np.random.Generator, frames: int) -> list[Stage]:
    stages: list[Stage] = [
        Resize(str(rng.choice(FILTERS, p=(0.1, 0.4, 0.1, 0.4))), (1.0,) * frames, to_lr=True)
    ]
    if rng.random() < 0.5:
        stages.append(Codec("libx264", round(float(rng.uniform(8, 16)), 1), None, "fast"))
    return stages


_DRAWS: dict[str, Callable[[np.random.Generator, int], list[Stage]]] = {
    "clean": _clean_stages,
    "mild": _mild_stages,
    "medium": _medium_stages,
    "heavy": _heavy_stages,
    "realbasicvsr": _realbasicvsr_stages,
    "realesrgan": _realesrgan_stages,
}


def draw_preset(rng: np.random.Generator) -> str:
    """A preset's name by the shares of `TRAINING_MIX`."""
    return str(rng.choice(tuple(TRAINING_MIX), p=tuple(TRAINING_MIX.values())))


def draw_scale(rng: np.random.Generator) -> int:
    """A scale factor by the shares of `SCALE_MIX`."""
    return int(rng.choice(tuple(SCALE_MIX), p=tuple(SCALE_MIX.values())))


def sample_degradation(
    rng: np.random.Generator, preset: str, frames: int, scale: int = 4
) -> DegradationRecord:
    """Draw how a clip of `frames` frames is degraded.

    preset: "clean" (made smaller, in half of the clips H.264 crf 8 to 16), "mild" (good small video: mild
    blur, noise to 3, JPEG 75 to 95 or H.264 crf 14 to 24), "medium" (blur to 2.2, noise to 10, JPEG 55 to
    95, H.264 crf 18 to 32), "heavy" (RealBasicVSR in full, Poisson noise in [0, 1]), "realbasicvsr" (the
    same with Poisson noise in grey levels, as its code has it: 16 times weaker) or "realesrgan".
    Raises InputError for another name.
    """
    draw = _DRAWS.get(preset)
    if draw is None:
        raise InputError(f"unknown degradation preset {preset!r}; choose one of {', '.join(PRESETS)}")
    return DegradationRecord(preset, scale, frames, tuple(draw(rng, frames)))


def with_noise_bursts(record: DegradationRecord, rng: np.random.Generator) -> DegradationRecord:
    """The record with Gaussian noise that comes and goes, added where frames get their LR size.

    Calm stretches of 4 to 16 frames alternate with bursts of 2 to 10, each with a sigma of its own from 8 to
    40 grey levels: what is hidden in a burst was seen before it. Not part of any published pipeline.
    """
    levels: list[float] = []
    calm = bool(rng.random() < 0.5)
    while len(levels) < record.frames:
        length = int(rng.integers(4, 17) if calm else rng.integers(2, 11))
        levels += [0.0 if calm else round(float(rng.uniform(8, 40)), 3)] * length
        calm = not calm
    noise = Noise("gaussian", False, tuple(levels[: record.frames]), int(rng.integers(2**31)))
    place = 1 + next(i for i, stage in enumerate(record.stages) if isinstance(stage, Resize) and stage.to_lr)
    return replace(record, stages=(*record.stages[:place], noise, *record.stages[place:]))


@dataclass(frozen=True)
class FixedDegradation:
    """A degradation without draws, for result tables: blur, resize to LR, noise, JPEG, perhaps H.264.

    blur: sigma in HQ pixels; resize: filter; noise: sigma in 8-bit steps; jpeg: quality; crf: of libx264,
    or None for no codec.
    """

    name: str
    blur: float
    resize: Literal["area", "bilinear"]
    noise: float
    jpeg: int
    crf: int | None

    def record(self, frames: int, scale: int = 4, seed: int = 0) -> DegradationRecord:
        """The record for a clip of `frames` frames; `seed` is the noise's."""

        def still(value: float) -> Walk:
            return (float(value),) * frames

        size = 2 * math.ceil(4 * self.blur) + 1
        stages: list[Stage] = [
            Blur("iso", size, still(self.blur), still(self.blur), still(0), still(1), still(1)),
            Resize(self.resize, still(1), to_lr=True),
            Noise("gaussian", False, still(self.noise), seed),
            Jpeg(still(self.jpeg)),
        ]
        if self.crf is not None:
            stages.append(Codec("libx264", float(self.crf), None, "medium"))
        return DegradationRecord(f"test_{self.name}", scale, frames, tuple(stages))


FIXED_DEGRADATIONS = {
    "mild": FixedDegradation("mild", blur=0.8, resize="area", noise=1.5, jpeg=80, crf=None),
    "heavy": FixedDegradation("heavy", blur=1.8, resize="bilinear", noise=7.0, jpeg=70, crf=27),
}
"""The two degradations of the held-out tables."""


def fixed_degradation(name: str, frames: int, scale: int = 4, seed: int = 0) -> DegradationRecord:
    """The record of one of `FIXED_DEGRADATIONS`. Raises InputError for another name."""
    if name not in FIXED_DEGRADATIONS:
        raise InputError(f"unknown test degradation {name!r}; choose mild or heavy")
    return FIXED_DEGRADATIONS[name].record(frames, scale, seed)


# ---------------------------------------------------------------- blur and resize as matrices


def blur_kernels(blur: Blur) -> np.ndarray:
    """The blur's 2-D kernels, float64 [T, size, size], each summing to 1."""
    radius = blur.size // 2
    grid = np.arange(-radius, radius + 1, dtype=np.float64)
    x, y = np.meshgrid(grid, grid)
    if blur.kernel == "sinc":
        return _sinc_kernels(np.hypot(x, y), np.array(blur.omega))
    column = np.array(blur.sigma_x)[:, None, None], np.array(blur.sigma_y)[:, None, None]
    angle, beta = np.array(blur.angle)[:, None, None], np.array(blur.beta)[:, None, None]
    along = (np.cos(angle) * x + np.sin(angle) * y) / column[0]
    across = (np.cos(angle) * y - np.sin(angle) * x) / column[1]
    squared = along**2 + across**2
    if blur.kernel.startswith("generalized"):
        kernels = np.exp(-0.5 * squared**beta)
    elif blur.kernel.startswith("plateau"):
        kernels = 1 / (1 + squared**beta)
    else:
        kernels = np.exp(-0.5 * squared)
    return kernels / kernels.sum((1, 2), keepdims=True)


def _sinc_kernels(distance: np.ndarray, omega: np.ndarray) -> np.ndarray:
    """Circular low-pass kernels: omega J1(omega r) / (2 pi r), normalised to sum 1."""
    cutoff = omega[:, None, None]
    away = np.where(distance > 0, distance, 1.0)[None]
    bessel = torch.special.bessel_j1(torch.from_numpy(cutoff * away)).numpy()
    kernels = np.where(distance[None] > 0, cutoff * bessel / (2 * np.pi * away), cutoff**2 / (4 * np.pi))
    return kernels / kernels.sum((1, 2), keepdims=True)


@lru_cache(maxsize=4)
def _rank_one_terms(blur: Blur) -> tuple[np.ndarray, np.ndarray]:
    """Columns and rows [T, R, size] whose outer products add up to the kernels.

    As few terms as keep every pixel within half a grey level of the exact blur.
    """
    kernels = blur_kernels(blur)
    if blur.kernel == "iso":
        taps = kernels.sum(1)
        return taps[:, None], taps[:, None]
    left, values, right = np.linalg.svd(kernels)
    columns = left.transpose(0, 2, 1) * values[:, :, None]
    rest = kernels.copy()
    rank = 0
    moved = 1.0
    while moved > 0.5 / 255 and rank < blur.size:
        rest -= columns[:, rank, :, None] * right[:, rank, None, :]
        # A residual of L1 norm e and sum s moves a pixel of a picture in [0, 1] by at most (e + |s|) / 2.
        moved = float((np.abs(rest).sum((1, 2)) + np.abs(rest.sum((1, 2)))).max()) / 2
        rank += 1
    return columns[:, :rank], right[:, :rank]


@lru_cache(maxsize=512)
def resize_matrix(source: int, target: int, filter_name: str) -> np.ndarray:
    """The 1-D resampling operator, float64 [target, source], pixel centres at (i + 0.5).

    bilinear, bicubic (a = -0.75) and area are OpenCV's (no antialiasing but area's box); antialiased
    is the bicubic (a = -0.5) widened to the scale. Edges replicate.
    """
    if source == target:
        return np.eye(source)
    ratio = source / target
    if filter_name == "area" and ratio > 1:
        edges = np.arange(target + 1) * ratio
        cells = np.arange(source)
        overlap = np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells)
        return np.clip(overlap, 0, None) / ratio
    centre: np.ndarray = (np.arange(target) + 0.5) * ratio - 0.5
    if filter_name == "area":  # OpenCV enlarges by area so: flat cells with linear ramps between them
        cell = np.arange(target) * source // target
        ramp = np.arange(1, target + 1) - (cell + 1) * target / source
        centre = cell + np.where(ramp <= 0, 0, ramp - np.floor(ramp))
    stretch = max(ratio, 1.0) if filter_name == "antialiased" else 1.0
    if filter_name in ("bicubic", "antialiased"):
        reach, shape = 2 * stretch, -0.5 if filter_name == "antialiased" else -0.75
    elif filter_name in ("bilinear", "area"):
        reach, shape = 1.0, None
    else:
        raise InputError(f"unknown resize filter {filter_name!r}; choose one of {', '.join(FILTERS)}")
    count = 2 * math.ceil(reach) + 1
    first = np.floor(centre).astype(int) - math.ceil(reach) + 1
    taps = first[:, None] + np.arange(count)
    distance = np.abs(taps - centre[:, None]) / stretch
    weight = np.clip(1 - distance, 0, None) if shape is None else _cubic(distance, shape)
    weight /= weight.sum(1, keepdims=True)
    matrix = np.zeros((target, source))
    np.add.at(matrix, (np.arange(target)[:, None].repeat(count, 1), np.clip(taps, 0, source - 1)), weight)
    return matrix


def _cubic(distance: np.ndarray, a: float) -> np.ndarray:
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0))


def _blur_then(resample: np.ndarray, taps: np.ndarray) -> np.ndarray:
    """resample [M, N] after a correlation with taps [B, size] over reflected edges: float32 [B, M, N]."""
    size, source = taps.shape[1], resample.shape[1]
    radius = size // 2
    # Row m of the product is row m of `resample`, spread by the taps over a line with padded ends ...
    lines = torch.from_numpy(np.ascontiguousarray(resample, np.float32))[:, None]
    weights = torch.from_numpy(np.ascontiguousarray(taps[:, ::-1], np.float32))[:, None]
    spread = F.conv1d(lines, weights, padding=size - 1).transpose(0, 1)  # [B, M, N + 2 radius]
    # ... and the padding is the reflection of the line itself.
    inside = spread[:, :, radius : radius + source].contiguous()
    if source > radius:
        inside[:, :, 1 : radius + 1] += spread[:, :, :radius].flip(2)
        inside[:, :, source - radius - 1 : source - 1] += spread[:, :, radius + source :].flip(2)
        return inside.numpy()
    outside = np.r_[-radius:0, source : source + radius]  # a line shorter than the kernel reflects repeatedly
    period = max(2 * (source - 1), 1)
    folded = np.abs((outside + source - 1) % period - (source - 1)) % source
    inside.index_add_(2, torch.from_numpy(folded), spread[:, :, outside + radius])
    return inside.numpy()


Band = tuple[int, int, int, int]
"""Output rows first..end of an operator, and the input columns first..end that they touch."""


@lru_cache(maxsize=4096)
def _bands(source: int, target: int, filter_name: str, radius: int) -> tuple[Band, ...]:
    """A blur-and-resize operator in pieces of about 64 rows, which touch few of its columns."""
    touched = resize_matrix(source, target, filter_name) != 0
    if source <= radius:
        return ((0, target, 0, source),)
    pieces = max(round(target / 64), 1)
    edges = [target * i // pieces for i in range(pieces + 1)]
    bands = []
    for first, end in pairwise(edges):
        columns = np.flatnonzero(touched[first:end].any(0))
        bands.append(
            (first, end, max(int(columns[0]) - radius, 0), min(int(columns[-1]) + radius + 1, source))
        )
    return tuple(bands)


def _sandwich(
    clip: Tensor, rows: Tensor, columns: Tensor, row_bands: tuple[Band, ...], column_bands: tuple[Band, ...]
) -> Tensor:
    """sum over r of rows[t, r] @ clip[t, c] @ columns[t, r]^T: [T, 3, H, W] -> [T, 3, M, N].

    rows [T or 1, R, M, H], columns [T or 1, R, N, W]; the bands hold all that is not zero in them.
    """
    frames, channels, height, _ = clip.shape
    rank, wide = columns.shape[1:3]
    tall = rows.shape[2]
    result = clip.new_zeros((frames, channels, tall, wide))
    flat = clip.flatten(1, 2)
    for r in range(rank):
        half = clip.new_empty((frames, channels * height, wide))
        for first, end, low, high in column_bands:
            half[:, :, first:end] = flat[:, :, low:high] @ columns[:, r, first:end, low:high].transpose(1, 2)
        half = half.view(frames, channels, height, wide)
        for first, end, low, high in row_bands:
            result[:, :, first:end] += rows[:, r, None, first:end, low:high] @ half[:, :, low:high]
    return result


def _blur_resize(
    clip: Tensor, blur: Blur | None, frame_index: Sequence[int], size: tuple[int, int], filter_name: str
) -> Tensor:
    """Blur (optional) and resample a stack of equally large frames to `size`."""
    height, width = clip.shape[-2:]
    down, across = resize_matrix(height, size[0], filter_name), resize_matrix(width, size[1], filter_name)
    radius = 0
    if blur is None:
        if (height, width) == size:
            return clip
        rows, columns = down[None, None], across[None, None]
    else:
        radius = blur.size // 2
        vertical, horizontal = (term[list(frame_index)] for term in _rank_one_terms(blur))
        count, rank, taps = vertical.shape
        rows = _blur_then(down, vertical.reshape(-1, taps)).reshape(count, rank, *down.shape)
        columns = _blur_then(across, horizontal.reshape(-1, taps)).reshape(count, rank, *across.shape)
    return _sandwich(
        clip,
        torch.from_numpy(rows).to(clip),
        torch.from_numpy(columns).to(clip),
        _bands(height, size[0], filter_name, radius),
        _bands(width, size[1], filter_name, radius),
    )


# ---------------------------------------------------------------- noise


def _luminance(clip: Tensor) -> Tensor:
    weights = clip.new_tensor((0.299, 0.587, 0.114)).view(3, 1, 1)
    return (clip * weights).sum(1, keepdim=True)


@lru_cache(maxsize=16)
def _shot_noise_table(levels: int) -> np.ndarray:
    """1024 equally likely values of Poisson(x levels) / levels - x for each grey level x: [256, 1024]."""
    quantile = (np.arange(1024) + 0.5) / 1024
    table = np.empty((256, 1024), np.float32)
    for grey in range(256):
        mean = grey / 255 * levels
        counts = np.arange(int(mean + 8 * math.sqrt(mean) + 10))
        log_probability = (
            counts * math.log(mean) - mean - np.cumsum(np.log(np.maximum(counts, 1))) if mean else None
        )
        cumulative = np.ones(1) if log_probability is None else np.cumsum(np.exp(log_probability))
        draws = np.minimum(np.searchsorted(cumulative, quantile), len(cumulative) - 1)
        table[grey] = draws / levels - grey / 255
    return table


def _shot_noise(clip: Tensor, generator: torch.Generator) -> Tensor:
    """Poisson noise of each frame, at as many levels as it has distinct values (up to a power of 2)."""
    grey = _to_8bit(clip).long()
    draw = torch.randint(1024, grey.shape, generator=generator)
    noise = torch.empty(clip.shape)
    for index, frame in enumerate(grey):
        distinct = int((torch.bincount(frame.flatten(), minlength=256) > 0).sum())
        table = torch.from_numpy(_shot_noise_table(2 ** math.ceil(math.log2(max(distinct, 2)))))
        noise[index] = torch.take(table, frame * 1024 + draw[index])
    return noise


def _add_noise(clip: Tensor, noise: Noise, frame_index: Sequence[int]) -> Tensor:
    # Drawn on the CPU, one generator a stack: records give the same noise whatever device holds the clip.
    generator = torch.Generator().manual_seed(noise.seed + _SEED_STEP * frame_index[0])
    base = _luminance(clip) if noise.grey else clip
    level = torch.tensor([noise.level[i] for i in frame_index]).view(-1, 1, 1, 1)
    if noise.kind == "gaussian":
        added = torch.randn(base.shape, generator=generator) * (level / 255)
    else:
        added = _shot_noise(base.cpu(), generator) * level
    noisy = clip + added.to(clip)
    return noisy.clamp_(0, 1) if noise.clip else noisy


# ---------------------------------------------------------------- JPEG

_LUMA_TABLE = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
_CHROMA_TABLE = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
) + ((99,) * 8,) * 4


def _quantisation(table: tuple, quality: Sequence[float]) -> np.ndarray:
    """ITU T.81 annex K's table at libjpeg's quality (1 to 100): float32 [T, 8, 8]."""
    whole = np.clip(np.round(np.array(quality)), 1, 100)
    percent = np.where(whole < 50, np.floor(5000 / whole), 200 - 2 * whole)
    scaled = np.floor((np.array(table)[None] * percent[:, None, None] + 50) / 100)
    return np.clip(scaled, 1, 255).astype(np.float32)


@lru_cache(maxsize=1)
def _dct8() -> np.ndarray:
    k, n = np.arange(8)[:, None], np.arange(8)[None]
    matrix = np.cos(np.pi * (2 * n + 1) * k / 16) / 2
    matrix[0] /= math.sqrt(2)
    return matrix.astype(np.float32)


def _code_plane(plane: Tensor, table: Tensor) -> Tensor:
    """8x8 DCT, quantise, back. plane [T, C, H, W] 0..255, H and W multiples of 8; table [T, 8, 8]."""
    frames, channels, height, width = plane.shape
    dct = torch.from_numpy(_dct8()).to(plane)
    blocks = plane.sub(128).view(frames, channels, height // 8, 8, width // 8, 8).transpose(3, 4)
    step = table[:, None, None, None]
    levels = torch.round((dct @ blocks @ dct.T) / step)
    back = (dct.T @ (levels * step) @ dct).transpose(3, 4).reshape(plane.shape)
    return back.add_(128).round_().clamp_(0, 255)


def _split_420(rgb: Tensor) -> tuple[Tensor, Tensor]:
    """[T, 3, H, W] 0..255 -> luma [T, 1, H, W] and Cb, Cr [T, 2, H/2, W/2] (2x2 means), full-range BT.601."""
    red, green, blue = rgb.split(1, 1)
    luma = (red * 0.299).add_(green, alpha=0.587).add_(blue, alpha=0.114)
    small = F.avg_pool2d(rgb, 2)
    matrix = rgb.new_tensor(((-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312)))
    return luma, (matrix @ small.flatten(2)).add_(128).view(len(rgb), 2, *small.shape[-2:])


def _merge_420(luma: Tensor, chroma: Tensor) -> Tensor:
    """The reverse: chroma enlarged by the triangle filter (3/4, 1/4), libjpeg's; values not clipped."""
    double = F.interpolate(chroma.sub(128), scale_factor=2, mode="bilinear", align_corners=False)
    blue, red = double.split(1, 1)
    rgb = luma.repeat(1, 3, 1, 1)
    rgb[:, :1].add_(red, alpha=1.402)
    rgb[:, 1:2].add_(blue, alpha=-0.344136).add_(red, alpha=-0.714136)
    rgb[:, 2:].add_(blue, alpha=1.772)
    return rgb


def jpeg_compress(clip: Tensor, quality: Sequence[float]) -> Tensor:
    """JPEG without its entropy coding: [T, 3, H, W] in [0, 1] -> the same, on 8-bit steps.

    quality: one a frame, libjpeg's 1 to 100. 4:2:0, standard tables. Against libjpeg at the same quality
    the mean difference is 0.2 grey levels on a grey picture and 0.7 on a coloured one (chroma is not
    rounded between its steps), at most half of what JPEG 95 itself changes.
    """
    height, width = clip.shape[-2:]
    pixels = _to_8bit(clip)
    padding = (0, -width % 16, 0, -height % 16)
    if any(padding):
        pixels = F.pad(pixels, padding, mode="replicate")
    luma, chroma = _split_420(pixels)
    luma_table = torch.from_numpy(_quantisation(_LUMA_TABLE, quality)).to(pixels)
    chroma_table = torch.from_numpy(_quantisation(_CHROMA_TABLE, quality)).to(pixels)
    luma, chroma = _code_plane(luma.round_(), luma_table), _code_plane(chroma.round_(), chroma_table)
    rgb = _merge_420(luma, chroma).round_().clamp_(0, 255).div_(255)
    return rgb[..., :height, :width].contiguous() if any(padding) else rgb


def _to_8bit(clip: Tensor) -> Tensor:
    """[0, 1] -> whole numbers 0..255, still float."""
    return clip.clamp(0, 1).mul_(255).round_()


# ---------------------------------------------------------------- video codec


def _to_planes(clip: Tensor) -> np.ndarray:
    """[T, 3, H, W] in [0, 1] -> planar 4:2:0, limited-range BT.601, uint8 [T, H*3/2, W]."""
    frames, _, height, width = clip.shape
    luma, chroma = _split_420(_to_8bit(clip))
    luma = luma.mul_(219 / 255).add_(16).round_()
    chroma = chroma.sub_(128).mul_(224 / 255).add_(128).round_()
    planes = torch.cat((luma.view(frames, -1), chroma.view(frames, -1)), 1)
    return planes.byte().cpu().numpy().reshape(frames, height * 3 // 2, width)


def _from_planes(planes: np.ndarray, like: Tensor) -> Tensor:
    frames, rows, width = planes.shape
    height = rows * 2 // 3
    flat = torch.from_numpy(planes).to(like.device).to(like.dtype).view(frames, -1)
    luma = flat[:, : height * width].view(frames, 1, height, width).sub(16).mul_(255 / 219)
    chroma = flat[:, height * width :].view(frames, 2, height // 2, width // 2)
    rgb = _merge_420(luma, (chroma - 128).mul_(255 / 224).add_(128))
    return rgb.round_().clamp_(0, 255).div_(255)


def bitrate_scale(hq_area: int) -> float:
    """How many times a record's bits a frame are, for clips of that many HQ pixels a frame."""
    return hq_area / _BITRATE_AREA


def crf_of_part(crf: float, height: int, width: int) -> float:
    """The crf at which x264 codes a clip of this size as if it were part of a frame of 320 x 180 pixels.

    x264 sets a frame's quantiser by its complexity, to the power of 1 - 0.6 (its qcomp): the sum over all
    macroblocks but those at the border, measured against the number of all. Of a crop of 64 x 64 pixels 4 in
    16 count, of the whole frame 3 in 4, so the crop would be coded 3.8 steps finer. Frames that are as large
    keep their crf.
    """
    counted, all_blocks = _macroblocks(height, width)
    counted_of_whole, all_of_whole = _macroblocks(*_CRF_FRAME)
    if all_blocks >= all_of_whole:
        return crf
    shares = counted_of_whole / all_of_whole, counted / all_blocks
    return min(crf + 6 * 0.4 * math.log2(shares[0] / shares[1]), 51.0)


def _macroblocks(height: int, width: int) -> tuple[int, int]:
    """How many of a frame's macroblocks x264 counts (all, where a side is 2 or less), and how many it has."""
    rows, columns = -(-height // 16), -(-width // 16)
    inner = rows * columns if min(rows, columns) <= 2 else (rows - 2) * (columns - 2)
    return inner, rows * columns


def _compress(frames: Frames, codec: Codec, hq_area: int) -> Tensor:
    """Through the codec at the first frame's size, to which the others are scaled as an encoder would."""
    size = (frames[0].shape[-2], frames[0].shape[-1])
    same = _grouped(frames, lambda clip, index: _blur_resize(clip, None, index, size, "bicubic"))
    clip = same if isinstance(same, Tensor) else torch.stack(same)
    bits = None if codec.bits is None else codec.bits * bitrate_scale(hq_area)
    # At one frame a second, as in RealBasicVSR, a crf is almost lossless; a viewer's clip runs at 25.
    rate = 1 if codec.crf is None else 25
    crf = None if codec.crf is None else crf_of_part(codec.crf, *size)
    planes = _to_planes(clip)
    coded = code_clip(planes, codec.codec, crf=crf, bits_per_frame=bits, speed=codec.speed, rate=rate)
    return _from_planes(coded, clip)


# ---------------------------------------------------------------- applying

Frames = Tensor | list[Tensor]
"""A clip [T, 3, H, W], or, while its frames differ in size, the list of them."""


def _grouped(
    frames: Frames,
    function: Callable[[Tensor, list[int]], Tensor],
    sizes: list[tuple[int, int]] | None = None,
) -> Frames:
    """function(stack, frame indices) over stacks of frames that agree in size (and in wanted size)."""
    groups: dict[tuple, list[int]] = {}
    for index, frame in enumerate(frames):
        groups.setdefault((frame.shape, None if sizes is None else sizes[index]), []).append(index)
    if len(groups) == 1 and isinstance(frames, Tensor):
        return function(frames, list(range(len(frames))))
    result: list[Tensor] = list(frames)
    for indices in groups.values():
        stack = frames[indices[0]][None] if len(indices) == 1 else torch.stack([frames[i] for i in indices])
        for index, frame in zip(indices, function(stack, indices)):
            result[index] = frame
    same = all(frame.shape == result[0].shape for frame in result)
    return torch.stack(result) if same else result


def _wanted_size(own: tuple[int, int], resize: Resize, frame: int, lr: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of one frame after a resize."""
    if resize.to_lr:
        return lr
    height, width = lr if resize.of_lr else own
    return _even(height * resize.factor[frame]), _even(width * resize.factor[frame])


def _wanted_sizes(frames: Frames, resize: Resize | None, lr: tuple[int, int]) -> list[tuple[int, int]]:
    own = [(int(frame.shape[-2]), int(frame.shape[-1])) for frame in frames]
    if resize is None:
        return own
    return [_wanted_size(size, resize, frame, lr) for frame, size in enumerate(own)]


def _resample(frames: Frames, blur: Blur | None, resize: Resize | None, lr: tuple[int, int]) -> Frames:
    sizes = _wanted_sizes(frames, resize, lr)
    filter_name = "bilinear" if resize is None else resize.filter

    def one_stack(stack: Tensor, index: list[int]) -> Tensor:
        return _blur_resize(stack, blur, index, sizes[index[0]], filter_name)

    return _grouped(frames, one_stack, sizes)


def _apply_stage(frames: Frames, stage: Noise | Jpeg | Codec, hq_area: int) -> Frames:
    if isinstance(stage, Noise):
        noise = stage
        return _grouped(frames, lambda stack, index: _add_noise(stack, noise, index))
    if isinstance(stage, Jpeg):
        quality = stage.quality
        return _grouped(frames, lambda stack, index: jpeg_compress(stack, [quality[i] for i in index]))
    return _compress(frames, stage, hq_area)


def apply_degradation(clip: Tensor, record: DegradationRecord) -> Tensor:
    """Degrade an HQ clip.

    clip: float32 [T, 3, H, W] in [0, 1], T as in the record. Returns uint8 [T, 3, h, w] on the clip's
    device, (h, w) = lr_size(H, W, scale). Frames of a clip may differ in size in the middle of the
    pipeline (the resize factor walks), never at its end. Raises InputError if T does not fit.
    """
    if len(clip) != record.frames:
        raise InputError(f"the clip has {len(clip)} frames, its degradation record {record.frames}")
    height, width = clip.shape[-2:]
    lr = lr_size(height, width, record.scale)
    frames: Frames = clip
    blur: Blur | None = None  # waits for the next stage: a blur and the resize after it are one product
    for stage in record.stages:
        if isinstance(stage, Resize):
            frames, blur = _resample(frames, blur, stage, lr), None
            continue
        if blur is not None:
            frames, blur = _resample(frames, blur, None, lr), None
        if isinstance(stage, Blur):
            blur = stage
        else:
            frames = _apply_stage(frames, stage, height * width)
    if blur is not None:
        frames = _resample(frames, blur, None, lr)
    result = frames if isinstance(frames, Tensor) else torch.stack(frames)
    return _to_8bit(result).byte()


def degrade_image(image: Tensor, record: DegradationRecord) -> Tensor:
    """Degrade one picture, float32 [3, H, W] in [0, 1], by a record of one frame: uint8 [3, h, w]."""
    return apply_degradation(image[None], record)[0]


# ---------------------------------------------------------------- target sharpening


def usm_sharpen(clip: Tensor, weight: float = 0.5, radius: int = 25, threshold: float = 10.0) -> Tensor:
    """Unsharp mask of the target, as RealBasicVSR's option: [..., H, W] in [0, 1] -> the same.

    A Gaussian of 2 radius + 1 taps (sigma by OpenCV's rule, 8 for 51 taps) gives the low part; where the rest
    exceeds `threshold` grey levels (a soft mask) the picture plus weight x rest is taken.
    """
    sigma = 0.3 * (radius - 1) + 0.8
    x = np.arange(-radius, radius + 1)
    taps = np.exp(-0.5 * (x / sigma) ** 2)[None]
    taps /= taps.sum()
    height, width = clip.shape[-2:]
    down = torch.from_numpy(_blur_then(np.eye(height), taps)[0]).to(clip)
    across = torch.from_numpy(_blur_then(np.eye(width), taps)[0]).to(clip)

    def smooth(picture: Tensor) -> Tensor:
        return down @ (picture @ across.T)

    rest = clip - smooth(clip)
    mask = smooth((rest.abs() * 255 > threshold).to(clip.dtype))
    sharp = (clip + weight * rest).clamp(0, 1)
    return mask * sharp + (1 - mask) * clip
