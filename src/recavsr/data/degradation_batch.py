"""The degradation of `data/degradation.py` for a batch of clips at once, on the device they are on.

Every clip has its own record. Frames of different sizes lie in the upper left corners of equally large
canvases, so that one operation serves them all; clips that wait for the same kind of stage do it together.
Blur, resize and JPEG give the reference's pixels (within a grey level); noise has its distribution, drawn
from the given generator on the clips' device. Video codecs are either the real ones, on the CPU, or a
stand-in (`hybrid_codec`): a closed-loop transform codec with H.264's quantiser, without motion search,
entropy coder or deblocking. It makes about the same amount of damage (tests say how nearly), not the same
artefacts; at a tight bitrate it makes more, the more the clip moves.

B clips, T frames of each, N frames in all, Y X rows and columns of a canvas, h w of the frame in it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from recavsr.data.degradation import (
    Blur,
    Codec,
    DegradationRecord,
    Jpeg,
    Noise,
    Resize,
    Stage,
    _compress,
    _dct8,
    _luminance,
    _merge_420,
    _split_420,
    _to_8bit,
    _wanted_size,
    bitrate_scale,
    blur_kernels,
    jpeg_compress,
    lr_size,
    sample_degradation,
)
from recavsr.errors import InputError

Codecs = Literal["stand-in", "real"]
Sizes = np.ndarray
"""Rows and columns of frames, int64 [..., 2], in CPU memory: nothing waits for the device to know them."""


def sample_records(
    generator: torch.Generator, preset: str, batch: int, frames: int, scale: int = 4
) -> list[DegradationRecord]:
    """`batch` records of one preset, drawn from a CPU generator (which moves on by one number)."""
    seed = int(torch.randint(2**62, (), generator=generator))
    return [sample_degradation(np.random.default_rng((seed, i)), preset, frames, scale) for i in range(batch)]


@torch.no_grad()
def degrade_batch(
    clips: Tensor,
    records: Sequence[DegradationRecord],
    generator: torch.Generator | None = None,
    *,
    codecs: Codecs = "stand-in",
) -> Tensor:
    """Degrade clips, each by its record.

    clips: float32 [B, T, 3, H, W] in [0, 1]. generator: of the noise, on the clips' device (the records'
    own noise seeds are not used). codecs: "real" sends clips through the CPU at each codec stage.
    Returns uint8 [B, T, 3, h, w] on the clips' device, (h, w) = lr_size(H, W, scale). Raises InputError if
    the records do not fit the clips or differ in scale.
    """
    batch, count, _, height, width = clips.shape
    if len(records) != batch or any(record.frames != count for record in records):
        raise InputError(f"{batch} clips of {count} frames need as many records of as many frames")
    scales = {record.scale for record in records}
    if len(scales) != 1:
        raise InputError(f"one batch has one scale, not {sorted(scales)}; make a batch of each")
    lr = lr_size(height, width, scales.pop())
    frames = list(clips)
    sizes = [np.tile((height, width), (count, 1)) for _ in range(batch)]
    waiting = [list(record.stages) for record in records]
    while any(waiting):
        # What most clips wait for comes next: those that skip a stage wait for the others.
        kind = Counter(type(stages[0]) for stages in waiting if stages).most_common(1)[0][0]
        rows = [row for row, stages in enumerate(waiting) if stages and type(stages[0]) is kind]
        stages = [waiting[row].pop(0) for row in rows]
        canvas, own = _gather([frames[row] for row in rows]), np.stack([sizes[row] for row in rows])
        canvas, own = _apply(canvas, own, stages, lr, height * width, generator, codecs)
        for index, row in enumerate(rows):
            high, wide = own[index].max(0)
            frames[row], sizes[row] = canvas[index, ..., :high, :wide], own[index]
    for row, size in enumerate(sizes):
        if (size != lr).any():
            raise InputError(f"record {row} does not end at the LR size; draw it with sample_degradation")
    return _to_8bit(torch.stack(frames)).byte()


def _gather(frames: list[Tensor]) -> Tensor:
    """Clips [T, 3, Y, X] of any sizes as one [B, T, 3, Y, X], zeros outside."""
    high, wide = (max(clip.shape[axis] for clip in frames) for axis in (-2, -1))
    return torch.stack([F.pad(c, (0, wide - c.shape[-1], 0, high - c.shape[-2])) for c in frames])


def _apply(
    canvas: Tensor,
    sizes: Sizes,
    stages: Sequence[Stage],
    lr: tuple[int, int],
    hq_area: int,
    generator: torch.Generator | None,
    codecs: Codecs,
) -> tuple[Tensor, Sizes]:
    """One stage of each clip, all of one kind: canvas [B, T, 3, Y, X], sizes [B, T, 2] -> the same after."""
    flat, flat_sizes = canvas.flatten(0, 1), sizes.reshape(-1, 2)
    match stages[0]:
        case Blur():
            return _blur(flat, flat_sizes, stages).view_as(canvas), sizes  # type: ignore[arg-type]
        case Resize():
            return _resize_stage(canvas, sizes, stages, lr)  # type: ignore[arg-type]
        case Noise():
            return _add_noise(canvas, sizes, stages, generator), sizes  # type: ignore[arg-type]
        case Jpeg():
            quality = [value for stage in stages for value in stage.quality]  # type: ignore[union-attr]
            return jpeg_compress(_extended(flat, flat_sizes), quality).view_as(canvas), sizes
    # As an encoder would: all frames at the first one's size.
    first = np.broadcast_to(sizes[:, :1], sizes.shape)
    canvas = _resized(flat, flat_sizes, first.reshape(-1, 2), "bicubic").unflatten(0, canvas.shape[:2])
    if codecs == "real":
        return _real_codecs(canvas, first, stages, hq_area), first  # type: ignore[arg-type]
    return hybrid_codec(canvas, first[:, 0], stages, hq_area), first  # type: ignore[arg-type]


# ---------------------------------------------------------------- blur and resize


def _sampled(flat: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Frames [N, C, Y, X] at rows [N, M] and columns [N, K] of each frame's own: [N, C, M, K]."""
    channels = flat.shape[1]
    tall = flat.gather(2, rows[:, None, :, None].expand(-1, channels, -1, flat.shape[3]))
    return tall.gather(3, columns[:, None, None, :].expand(-1, channels, tall.shape[2], -1))


def _extended(flat: Tensor, sizes: Sizes) -> Tensor:
    """Frames whose last row and column go on to the end of the canvas."""
    if (sizes == flat.shape[-2:]).all():
        return flat
    limits = torch.from_numpy(sizes - 1).to(flat.device)
    places = (torch.arange(count, device=flat.device)[None] for count in flat.shape[-2:])
    rows, columns = (torch.minimum(place, limits[:, i, None]) for i, place in enumerate(places))
    return _sampled(flat, rows, columns)


def _blur(flat: Tensor, sizes: Sizes, blurs: Sequence[Blur]) -> Tensor:
    """Each frame correlated with its kernel over reflected edges, by Fourier transform."""
    radius = max(blur.size for blur in blurs) // 2
    kernels = np.zeros((len(flat), 2 * radius + 1, 2 * radius + 1), np.float32)
    for i, blur in enumerate(blurs):
        rest = radius - blur.size // 2
        inside = slice(rest, 2 * radius + 1 - rest)
        kernels[i * len(blur.sigma_x) : (i + 1) * len(blur.sigma_x), inside, inside] = blur_kernels(blur)
    last = torch.from_numpy(sizes - 1).to(flat.device)
    reflected = []
    for axis, count in enumerate(flat.shape[-2:]):
        place = torch.arange(-radius, count + radius, device=flat.device)[None]
        end = last[:, axis, None]
        reflected.append(end - (place.remainder((2 * end).clamp_min(1)) - end).abs())
    padded = _sampled(flat, *reflected)
    high, wide = flat.shape[-2:]
    shape = [-(-side // 32) * 32 for side in padded.shape[-2:]]  # sizes that transform fast
    spectrum = torch.fft.rfft2(padded, s=shape)
    spectrum *= torch.fft.rfft2(torch.from_numpy(kernels).to(flat.device), s=shape)[:, None].conj()
    return torch.fft.irfft2(spectrum, s=shape)[..., :high, :wide]


def _resize_stage(
    canvas: Tensor, sizes: Sizes, stages: Sequence[Resize], lr: tuple[int, int]
) -> tuple[Tensor, Sizes]:
    target = np.array(
        [
            [_wanted_size((int(h), int(w)), stage, t, lr) for t, (h, w) in enumerate(clip)]
            for clip, stage in zip(sizes, stages)
        ]
    )
    high, wide = target.max((0, 1))
    result = canvas.new_zeros((*canvas.shape[:3], high, wide))
    for name in {stage.filter for stage in stages}:
        rows = [row for row, stage in enumerate(stages) if stage.filter == name]
        part, source, wanted = canvas[rows].flatten(0, 1), sizes[rows], target[rows]
        done = _resized(part, source.reshape(-1, 2), wanted.reshape(-1, 2), name)
        result[rows, ..., : done.shape[-2], : done.shape[-1]] = done.unflatten(0, (len(rows), -1))
    return result, target


def _resized(flat: Tensor, source: Sizes, target: Sizes, filter_name: str) -> Tensor:
    """Each frame resampled from its own size to its own target: [N, 3, Y, X] -> [N, 3, most h, most w]."""
    if (source == target).all():
        high, wide = target.max(0)
        return flat[..., :high, :wide]
    sides = torch.from_numpy(np.stack((source, target))).to(flat.device)
    rows, columns = (
        resize_matrices(sides[0, :, axis], sides[1, :, axis], filter_name, int(most), flat.shape[2 + axis])
        for axis, most in enumerate(target.max(0))
    )
    return rows[:, None] @ (flat @ columns[:, None].transpose(2, 3))


def resize_matrices(source: Tensor, target: Tensor, filter_name: str, rows: int, columns: int) -> Tensor:
    """`degradation.resize_matrix` for many sizes at once: int64 [N] x 2 -> float32 [N, rows, columns].

    Only the upper left target[n] x source[n] of a matrix counts; rows below it go on with the last column.
    """
    out = torch.arange(rows, device=source.device)[None]
    source, target = source[:, None], target[:, None]
    ratio = source / target
    centre = (out + 0.5) * ratio - 0.5
    if filter_name == "area":
        cell = out * source // target
        ramp = out + 1 - (cell + 1) * (target / source)
        centre = cell + torch.where(ramp <= 1e-5, 0, ramp - ramp.floor())
    centre = torch.minimum(centre, source)  # rows below the frame's own would see nothing at all
    stretch = ratio.clamp_min(1) if filter_name == "antialiased" else torch.ones_like(ratio)
    reach = 1 if filter_name in ("bilinear", "area") else 2
    pad = math.ceil(reach * float(stretch.max() if filter_name == "antialiased" else 1)) + 1
    column = torch.arange(-pad, columns + pad, device=source.device)
    distance = (column - centre[..., None]).abs() / stretch[..., None]
    if reach == 1:
        weight = (1 - distance).clamp_min(0)
    else:
        weight = _cubic_tensor(distance, -0.5 if filter_name == "antialiased" else -0.75)
    weight /= weight.sum(2, keepdim=True)
    # Taps outside the frame take its first or last sample.
    end = source[..., None] - 1
    before, after = weight.where(column < 0, 0).sum(2), weight.where(column > end, 0).sum(2)
    matrix = weight.where(column <= end, 0)[..., pad : pad + columns].contiguous()
    matrix[..., 0] += before
    matrix.scatter_add_(2, end.expand(-1, rows, 1), after[..., None])
    if filter_name == "area":
        inside, edge = column[pad : pad + columns], out[..., None] * ratio[..., None]
        overlap = torch.minimum(edge + ratio[..., None], inside + 1) - torch.maximum(edge, inside)
        matrix = torch.where(ratio[..., None] > 1, overlap.clamp_min(0) / ratio[..., None], matrix)
    return matrix


def _cubic_tensor(distance: Tensor, a: float) -> Tensor:
    near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return torch.where(distance <= 1, near, far.where(distance < 2, 0))


# ---------------------------------------------------------------- noise


def _add_noise(
    canvas: Tensor, sizes: Sizes, stages: Sequence[Noise], generator: torch.Generator | None
) -> Tensor:
    result = canvas.clone()
    for kind in ("gaussian", "poisson"):
        for grey in (False, True):
            rows = [row for row, s in enumerate(stages) if (s.kind, s.grey) == (kind, grey)]
            if not rows:
                continue
            part = canvas[rows].flatten(0, 1)
            base = _luminance(part) if grey else part
            level = canvas.new_tensor([stages[row].level for row in rows]).view(-1, 1, 1, 1)
            if kind == "gaussian":
                noise = torch.randn(base.shape, generator=generator, device=base.device) / 255
            else:
                noise = _shot_noise(base, sizes[rows].reshape(-1, 2), generator)
            result[rows] += (noise * level).unflatten(0, (len(rows), -1))
    clipped = [row for row, stage in enumerate(stages) if stage.clip]
    if clipped:
        result[clipped] = result[clipped].clamp(0, 1)
    return result


def _shot_noise(base: Tensor, sizes: Sizes, generator: torch.Generator | None) -> Tensor:
    """Poisson noise of each frame, at as many levels as it has distinct values (up to a power of 2)."""
    grey = _to_8bit(_extended(base, sizes))
    seen = torch.zeros((len(base), 256), device=base.device)
    seen.scatter_(1, grey.flatten(1).long(), 1.0)
    levels = (2 ** seen.sum(1).clamp_min(2).log2().ceil()).view(-1, 1, 1, 1)
    picture = grey / 255
    return torch.poisson(picture * levels, generator=generator) / levels - picture


# ---------------------------------------------------------------- video codecs


def _real_codecs(canvas: Tensor, sizes: Sizes, stages: Sequence[Codec], hq_area: int) -> Tensor:
    result = torch.zeros_like(canvas)
    for row, codec in enumerate(stages):
        high, wide = sizes[row, 0]
        coded = _compress(canvas[row, ..., :high, :wide].cpu(), codec, hq_area)
        result[row, ..., :high, :wide] = coded.to(canvas.device)
    return result


def hybrid_codec(canvas: Tensor, sizes: Sizes, codecs: Sequence[Codec], hq_area: int) -> Tensor:
    """A stand-in for H.264 and MPEG-4: [B, T, 3, Y, X] in [0, 1], one size a clip [B, 2] -> the same, coded.

    8x8 blocks in 4:2:0, each coded as itself or as its difference to the decoded frame before, whichever is
    smaller; H.264's step sizes and dead zones. `crf` is taken as the quantiser; `bits` sets one for the clip
    by an estimate of its entropy.
    """
    batch, count = canvas.shape[:2]
    frame_sizes = np.repeat(sizes, count, 0)
    high, wide = canvas.shape[-2:]
    flat = F.pad(canvas.flatten(0, 1), (0, -wide % 16, 0, -high % 16))
    luma, chroma = _split_420(_to_8bit(_extended(flat, frame_sizes)))
    planes = [luma.mul_(219 / 255).add_(16).round_(), chroma.sub_(128).mul_(224 / 255).add_(128).round_()]
    planes = [plane.unflatten(0, (batch, count)) for plane in planes]
    step = _steps(planes, sizes, codecs, hq_area)
    decoded = [_code(plane, step) for plane in planes]
    luma, chroma = (plane.flatten(0, 1) for plane in decoded)
    rgb = _merge_420(luma.sub(16).mul_(255 / 219), chroma.sub(128).mul_(255 / 224).add_(128))
    return rgb.round_().clamp_(0, 255).div_(255)[..., :high, :wide].unflatten(0, (batch, count))


def _step_of(quantiser: Tensor) -> Tensor:
    """H.264's step size: doubles every 6."""
    return 0.625 * 2 ** (quantiser / 6)


def _steps(planes: list[Tensor], sizes: Sizes, codecs: Sequence[Codec], hq_area: int) -> Tensor:
    """The step of each clip, float32 [B]."""
    device = planes[0].device
    # x264 spends more than its crf says where the eye looks: a fit to its damage at crf 14 to 32.
    quantiser = torch.tensor([0.9 * (codec.crf or 0.0) + 2.0 for codec in codecs], device=device)
    limited = [row for row, codec in enumerate(codecs) if codec.bits is not None]
    if limited:
        budget = torch.tensor(
            [bitrate_scale(hq_area) * (codecs[row].bits or 0) for row in limited], device=device
        )
        # The canvas repeats the frame's edge: only the frame's own share of blocks costs bits.
        share = torch.tensor(sizes[limited].prod(1), device=device) / math.prod(planes[0].shape[-2:])
        residuals = []
        for plane in planes:
            part = plane[limited]
            change = torch.cat((part[:, :1] - 128, part.diff(dim=1)), 1)
            own, moved = _transform(part - 128), _transform(change)
            residuals.append(torch.where(_smaller(moved, own), moved, own))
        low = torch.tensor([_FINEST[codecs[row].codec] for row in limited], device=device)
        high = torch.full_like(low, 51.0)
        for _ in range(7):
            middle = (low + high) / 2
            bits = share * sum(_bits(residual, _step_of(middle)) for residual in residuals)
            too_many = bits > budget
            low, high = torch.where(too_many, middle, low), torch.where(too_many, high, middle)
        quantiser[limited] = high  # the finest where that is within the budget
    return _step_of(quantiser)


_FINEST = {"libx264": 3.0, "mpeg4": 18.0}  # no finer quantisers are used, whatever the bits


def _bits(coefficients: Tensor, step: Tensor) -> Tensor:
    """About the bits a frame that an entropy coder needs: [B, T, ...] and steps [B] -> [B]."""
    level = _quantised(coefficients, step.view(-1, *[1] * (coefficients.dim() - 1))).abs()
    return (level > 0).flatten(1).sum(1).mul(_BITS_LEVEL).add(
        (1 + level).log2().flatten(1).sum(1), alpha=_BITS_DOUBLING
    ) / coefficients.shape[1]


# For a coefficient that is not zero, and for each doubling of 1 + |it|: a fit to x264's damage.
_BITS_LEVEL, _BITS_DOUBLING = 1.5, 1.0


def _quantised(coefficients: Tensor, step: Tensor) -> Tensor:
    """Levels, with a dead zone: what is below 5/6 of a step is zero."""
    return coefficients.sign() * (coefficients.abs() / step + 1 / 6).floor()


def _transform(plane: Tensor) -> Tensor:
    """[..., C, Y, X] -> orthonormal 8x8 DCT of its blocks, [..., C, Y/8, X/8, 8, 8]."""
    dct = torch.from_numpy(_dct8()).to(plane)
    blocks = plane.unflatten(-1, (-1, 8)).unflatten(-3, (-1, 8)).transpose(-3, -2)
    return dct @ blocks @ dct.T


def _inverse(blocks: Tensor) -> Tensor:
    dct = torch.from_numpy(_dct8()).to(blocks)
    return (dct.T @ blocks @ dct).transpose(-3, -2).flatten(-2).flatten(-3, -2)


def _smaller(difference: Tensor, own: Tensor) -> Tensor:
    """Whether a block is cheaper to code as a difference than as itself (whose mean is predicted)."""
    cost = own.abs().sum((-2, -1), keepdim=True) - own[..., :1, :1].abs()
    return difference.abs().sum((-2, -1), keepdim=True) < cost


def _code(plane: Tensor, step: Tensor) -> Tensor:
    """Code a plane [B, T, C, Y, X] of 0..255 frame by frame with steps [B]; returns what is decoded."""
    step = step.view(-1, 1, 1, 1, 1, 1)
    own = _transform(plane - 128)
    decoded = []
    reference = torch.zeros_like(own[:, 0])
    for frame in own.unbind(1):
        # In the transform domain, prediction from the block at the same place is a subtraction.
        predicted = reference.where(_smaller(frame - reference, frame), 0)
        reference = predicted + _quantised(frame - predicted, step) * step
        decoded.append(reference)
    return _inverse(torch.stack(decoded, 1)).add_(128).round_().clamp_(0, 255)
