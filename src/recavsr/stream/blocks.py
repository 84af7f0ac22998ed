"""LR frames in, block by block: upsampling, padding, quantising (paper, Appendix A.1, A.4).

Pictures outside are numpy [N, H, W, 3] RGB, uint8 or uint16 (full scale); inside they are torch
[1, 3, F, H, W] in [-1, 1].
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from recavsr.geometry import padded_size
from recavsr.kernels.available import has_triton

Picture = np.ndarray

PIECE = 1 << 19
"""How many values the CPU works on at once: a few arrays of so many stay in its caches."""


LANCZOS_LOBES = 3

LANCZOS_CELLS = 32
"""How many cells of an axis are made by one product: more would mostly multiply by zeros."""


def full_scale(dtype: np.dtype) -> int:
    """Return the value of white: 255 or 65535; raise ValueError for other dtypes."""
    if dtype not in (np.uint8, np.uint16):
        raise ValueError(f"frames must be uint8 or uint16, got {dtype}")
    return int(np.iinfo(dtype).max)


def prepare_lr_frames(
    frames: Picture,
    size: tuple[int, int],
    multiple: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Bring LR frames [N, h, w, 3] to the output size (H, W), padded to `multiple`, in [-1, 1].

    Bilinear, rounded to the depth of the input; then padded at the bottom and right by reflection,
    or by replication along an axis whose padding is not smaller than the picture.
    Returns [1, 3, N, H', W'] in `dtype`, rounded to it once.
    """
    white = full_scale(frames.dtype)
    height, width = size
    padded = padded_size(height, width, multiple)
    out = torch.empty(len(frames), 3, *padded, dtype=dtype, device=device)
    inside = out[:, :, :height, :width]
    if frames.shape[1:3] == size:
        levels = frames if frames.dtype == np.uint8 else frames.astype(np.int32)
        for source, target in zip(torch.from_numpy(np.ascontiguousarray(levels)).to(device), inside):
            target.copy_(source.permute(2, 0, 1).float().mul_(2.0 / white).sub_(1.0))
    elif frames.dtype == np.uint8:
        _resize_uint8(torch.from_numpy(np.ascontiguousarray(frames)).to(device), inside)
    else:
        for source, target in zip(frames, inside):
            x = torch.from_numpy(source.astype(np.float32)).to(device).permute(2, 0, 1)
            x = F.interpolate(x[None], size=size, mode="bilinear", align_corners=False)[0]
            target.copy_(x.round_().mul_(2.0 / white).sub_(1.0))
    if out.shape[3] > width:
        out[:, :, :height, width:] = inside[:, :, :, _mirror(width, out.shape[3], out.device)]
    if out.shape[2] > height:
        out[:, :, height:] = out[:, :, _mirror(height, out.shape[2], out.device)]
    return out.transpose(0, 1).unsqueeze(0)


def _resize_uint8(frames: Tensor, out: Tensor) -> None:
    """Resize [N, h, w, 3] uint8 into `out` [N, 3, H, W], in the fixed-point arithmetic that OpenCV uses.

    The released weights were trained on such pictures: a float bilinear differs by one level in a
    tenth of the pixels. The steps run on pieces that stay in the cache: on the CPU most of the time
    would go into memory traffic otherwise.
    """
    (height, width), size, device = frames.shape[1:3], out.shape[2:], out.device
    left, right, near, far = _taps(width, size[1], clamp_weights=True, device=device)
    left, right = left.expand(3 * height, -1), right.expand(3 * height, -1)
    top, bottom, upper_weight, lower_weight = _taps(height, size[0], clamp_weights=False, device=device)
    upper_weight, lower_weight = upper_weight[:, None], lower_weight[:, None]
    sixteen = torch.tensor(16, dtype=torch.int32, device=device)
    rows = min(_piece_rows(out), size[0])
    # The same memory serves all pieces: fresh memory would cost more than the arithmetic.
    lines, beside = torch.empty(2, 3 * height, size[1], dtype=torch.int32, device=device)
    work = torch.empty(2, rows, 3 * size[1], dtype=torch.int32, device=device)
    levels = torch.empty(3, rows, size[1], dtype=torch.float32, device=device)
    for frame, target in zip(frames, out):
        pixels = frame.transpose(1, 2).contiguous().int().flatten(0, 1)
        torch.gather(pixels, 1, left, out=lines)
        torch.gather(pixels, 1, right, out=beside)
        lines.mul_(near).add_(beside.mul_(far)).bitwise_right_shift_(4)
        for first in range(0, size[0], rows):
            piece = slice(first, min(first + rows, size[0]))
            upper, lower = work[:, : piece.stop - first]
            torch.index_select(lines.view(height, -1), 0, top[piece], out=upper)
            torch.index_select(lines.view(height, -1), 0, bottom[piece], out=lower)
            upper.mul_(upper_weight[piece]).bitwise_right_shift_(sixteen)
            lower.mul_(lower_weight[piece]).bitwise_right_shift_(sixteen)
            upper.add_(lower).add_(2).bitwise_right_shift_(2)
            made = levels[:, : piece.stop - first].copy_(upper.unflatten(1, (3, -1)).transpose(0, 1))
            target[:, piece] = made.mul_(2.0 / 255).sub_(1.0)


def _piece_rows(frames: Tensor) -> int:
    """Return how many rows of [..., H, W], three channels each, to work on at once."""
    if frames.device.type != "cpu":
        return frames.shape[-2]
    return max(1, PIECE // (3 * frames.shape[-1]))


def _taps(
    extent: int, target: int, *, clamp_weights: bool, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return both neighbours of each target cell and their weights in 1/2048."""
    place = ((np.arange(target) + 0.5) * (extent / target) - 0.5).astype(np.float32)
    first = np.floor(place).astype(np.int64)
    weight = place - first
    if clamp_weights:  # across, a cell beyond the border is that border; down, it is summed twice
        weight[(first < 0) | (first >= extent - 1)] = 0
    far = np.rint(weight * 2048).astype(np.int32)
    near = np.rint((1 - weight) * 2048).astype(np.int32)
    pair = (np.clip(first, 0, extent - 1), np.clip(first + 1, 0, extent - 1))
    left, right, near_weight, far_weight = (torch.from_numpy(y).to(device) for y in (*pair, near, far))
    return left, right, near_weight, far_weight


def _mirror(extent: int, padded: int, device: torch.device) -> Tensor:
    """Return which cells stand in for cells `extent` to `padded`: reflected, or the last one repeated."""
    beyond = torch.arange(extent, padded, device=device)
    return 2 * (extent - 1) - beyond if padded - extent < extent else torch.full_like(beyond, extent - 1)


def made_smaller(frames: Tensor, size: tuple[int, int]) -> Tensor:
    """Bring frames [1, 3, F, H', W'] to a smaller size (H, W) by Lanczos' filter, in float32.

    The same size gives the frames themselves.
    """
    if frames.shape[3:] == size:
        return frames
    rows, columns = (_lanczos(*sides, frames.device) for sides in zip(frames.shape[3:], size))
    out = torch.empty(*frames.shape[:3], *size, dtype=torch.float32, device=frames.device)
    for frame, target in zip(frames.unbind(2), out.unbind(2)):  # one at a time: no large copies
        lines = torch.cat([weights @ frame[..., near, :].float() for near, weights in rows], dim=-2)
        torch.cat([lines[..., near] @ weights.t() for near, weights in columns], dim=-1, out=target)
    return out


@lru_cache(maxsize=8)
def _lanczos(extent: int, target: int, device: torch.device) -> tuple[tuple[slice, Tensor], ...]:
    """Return how an axis is brought to a smaller extent, for some cells of the target after the other.

    With each go the cells that these read, and their weights [cells, cells read].
    """
    step, goes = extent / target, []
    reach = LANCZOS_LOBES * step
    for first in range(0, target, LANCZOS_CELLS):
        centres = (np.arange(first, min(first + LANCZOS_CELLS, target)) + 0.5) * step
        near = slice(max(0, int(centres[0] - reach)), min(extent, int(centres[-1] + reach) + 1))
        away = (np.arange(near.start, near.stop) + 0.5 - centres[:, None]) / step
        weights = np.sinc(away) * np.sinc(away / LANCZOS_LOBES) * (np.abs(away) < LANCZOS_LOBES)
        weights /= weights.sum(axis=1, keepdims=True)  # beyond the border there is nothing
        goes.append((near, torch.from_numpy(weights.astype(np.float32)).to(device)))
    return tuple(goes)


def to_picture(frames: Tensor, size: tuple[int, int], dtype: np.dtype) -> Picture:
    """Crop, clamp and quantise frames [1, 3, F, H', W'] in [-1, 1] to [F, H, W, 3] of `dtype`.

    Rounds half to even.
    """
    half = full_scale(dtype) / 2
    x = frames[0, :, :, : size[0], : size[1]].transpose(0, 1)
    if x.is_cuda and has_triton():
        from recavsr.kernels.pictures import levels_of

        return _to_main_memory(levels_of(x, full_scale(dtype)))
    if x.device.type != "cpu":
        levels = x.float().clamp(-1, 1).add_(1).mul_(half).round_().permute(0, 2, 3, 1).int()
        levels = levels.to(torch.uint8) if dtype == np.uint8 else levels
        return levels.contiguous().cpu().numpy().astype(dtype, copy=False)
    out = np.empty((len(x), *size, 3), dtype)
    rows = min(_piece_rows(x), size[0])
    work = torch.empty(3, rows, size[1], dtype=torch.float32, device="cpu")
    for frame, picture in zip(x, out):
        for first in range(0, size[0], rows):
            piece = frame[:, first : first + rows]
            rounded = work[:, : piece.shape[1]].copy_(piece).clamp_(-1, 1).add_(1).mul_(half).round_()
            for channel, values in enumerate(rounded.numpy()):
                # numpy converts into the interleaved picture several times faster than torch
                np.copyto(picture[first : first + rows, :, channel], values, casting="unsafe")
    return out


def _to_main_memory(levels: Tensor) -> Picture:
    """Copy pictures from a card by way of page-locked memory, several times faster than without."""
    place = torch.empty(levels.shape, dtype=levels.dtype, device="cpu", pin_memory=True)
    place.copy_(levels, non_blocking=True)
    torch.cuda.current_stream(levels.device).synchronize()
    return place.numpy()
