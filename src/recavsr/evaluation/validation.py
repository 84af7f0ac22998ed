"""Held-back items of a training pack as evaluation pairs: small, degraded alike every time, no files needed.

Every held-back video gives the centre of its longest shot, and as many drawn camera moves over held-back
photos join them. Each clip is degraded by `mild` and `heavy` of the protocol, and by `bursts`: mild, with
noise that comes and goes, where what a stream remembers is worth most. Beside each moving clip stands a
still scene, its first frame held.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recavsr.data.clips import ClipSource, ClipSpec, CropSize, rows_and_columns
from recavsr.data.degradation import apply_degradation, fixed_degradation, with_noise_bursts
from recavsr.evaluation.lpips import LPIPS
from recavsr.evaluation.peers import SCALE, Frames, Upscaler
from recavsr.evaluation.protocol import Pair, Protocol, measure, measure_still

CONDITIONS = ("mild", "heavy", "bursts")


@dataclass(frozen=True)
class ValidationPair:
    """A moving clip and its still scene, both [N, H, W, 3] and degraded alike."""

    moving: Pair
    still: Pair


def validation_pairs(
    source: ClipSource,
    *,
    frames: int = 37,
    size: CropSize = 256,
    photos: int = 4,
    conditions: Sequence[str] = CONDITIONS,
) -> list[ValidationPair]:
    """Make the pairs of a source opened with `split="validation"`: the same for the same pack.

    Clips are `frames` frames of `size` (rows and columns, or the side of a square). Raises InputError
    where nothing is held back.
    """
    rng = np.random.default_rng(0)
    specs = _centres(source, size)
    for number in range(photos):
        spec = source.sample(rng, frames=frames, size=size, video_fraction=0.0)
        if spec.kind == "photo":
            specs.append((f"photo {number}", spec))
    pairs = []
    for number, (name, spec) in enumerate(specs):
        moving = source.render(spec, frames, size)
        still = moving[:1].expand(frames, -1, -1, -1).contiguous()
        for condition in conditions:
            both = (_pair(name, condition, clip, seed=number) for clip in (moving, still))
            pairs.append(ValidationPair(*both))
    return pairs


def _centres(source: ClipSource, size: CropSize) -> list[tuple[str, ClipSpec]]:
    """The centre of each held-back video's longest shot."""
    rows, columns = rows_and_columns(size)
    longest: dict[str, int] = {}
    for index, shot in enumerate(source.shots):
        if shot.split == source.split:
            best = longest.get(shot.name)
            if best is None or shot.frames > source.shots[best].frames:
                longest[shot.name] = index
    return [
        (
            name,
            ClipSpec(
                "video", i, y=(source.shots[i].height - rows) // 2, x=(source.shots[i].width - columns) // 2
            ),
        )
        for name, i in longest.items()
    ]


def _pair(name: str, condition: str, clip: Tensor, seed: int) -> Pair:
    """A clip, float [N, 3, S, S] in [0, 1], with its LR frames."""
    kind = "mild" if condition == "bursts" else condition
    record = fixed_degradation(kind, len(clip), SCALE, seed)
    if condition == "bursts":
        record = with_noise_bursts(record, np.random.default_rng(seed))
    lr = apply_degradation(clip, record)
    truth = clip.mul(255).round().clamp(0, 255).byte()
    return Pair(name, condition, *(x.permute(0, 2, 3, 1).contiguous().numpy() for x in (truth, lr)))


def validate(
    upscalers: Sequence[Upscaler],
    pairs: Sequence[ValidationPair],
    *,
    lpips: LPIPS | None = None,
    niqe_every: int = 0,
) -> list[dict[str, Any]]:
    """Run every upscaler on every pair: the protocol's rows, one per (model, condition, clip)."""
    protocol = replace(Protocol(), niqe_every=niqe_every)

    def row(upscaler: Upscaler, pair: ValidationPair, moving: Frames, still: Frames, seconds: float) -> dict:
        found: dict[str, Any] = {
            "model": upscaler.name,
            "degradation": pair.moving.degradation,
            "clip": pair.moving.clip,
            "frames": len(moving),
            "height": moving.shape[1],
            "width": moving.shape[2],
        }
        found |= measure(moving, pair.moving, protocol, lpips) | measure_still(still)
        return found | {"seconds_per_frame": seconds / len(moving)}

    waiting = []
    with ThreadPoolExecutor() as threads:  # metrics leave the interpreter; models take turns
        for upscaler in upscalers:
            for pair in pairs:
                started = time.perf_counter()
                moving = upscaler.run(pair.moving.lr_frames)
                seconds = time.perf_counter() - started
                still = upscaler.run(pair.still.lr_frames)
                waiting.append(threads.submit(row, upscaler, pair, moving, still, seconds))
        return [future.result() for future in waiting]


def frames_to_tensor(frames: Frames, device: torch.device) -> Tensor:
    """uint8 [N, H, W, 3] to [1, 3, N, H, W] in [-1, 1]."""
    return torch.from_numpy(frames).to(device).permute(3, 0, 1, 2)[None].float().div(127.5).sub(1)


def tensor_to_frames(frames: Tensor) -> Frames:
    """[1, 3, N, H, W] in [-1, 1] to uint8 [N, H, W, 3]."""
    return frames[0].permute(1, 2, 3, 0).add(1).mul(127.5).round().clamp(0, 255).byte().cpu().numpy()
