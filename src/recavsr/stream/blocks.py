"""LR frames in, block by block: upsampling, padding, quantising (paper, Appendix B.1, B.4).

Pictures outside are numpy [N, H, W, 3] RGB, uint8 or uint16 (full scale); inside they are torch
[1, 3, F, H, W] in [-1, 1].
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from recavsr.geometry import padded_size

Picture = np.ndarray


def full_scale(dtype: np.dtype) -> int:
    """Return the value of white: 255 or 65535; raise ValueError for other dtypes."""
    if dtype not in (np.uint8, np.uint16):
        raise ValueError(f"frames must be uint8 or uint16, got {dtype}")
    return int(np.iinfo(dtype).max)


def prepare_lr_frames(
    frames: Picture, size: tuple[int, int], multiple: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Bring LR frames [N, h, w, 3] to the output size (H, W), padded to `multiple`, in [-1, 1].

    Bilinear, rounded to the depth of the input; then padded at the bottom and right by reflection,
    or by replication along an axis whose padding is not smaller than the picture.
    Returns [1, 3, N, H', W'] in float32.
    """
    white = full_scale(frames.dtype)
    if frames.dtype == np.uint8:
        x = torch.from_numpy(np.ascontiguousarray(frames)).to(device).permute(0, 3, 1, 2)
        x = _bilinear_uint8(x, size).float()
    else:
        x = torch.from_numpy(frames.astype(np.float32)).to(device).permute(0, 3, 1, 2)
        if x.shape[2:] != size:
            x = F.interpolate(x, size=size, mode="bilinear", align_corners=False).round_()
    x = x.mul_(2.0 / white).sub_(1.0)
    height, width = padded_size(*size, multiple)
    x = _pad(x, (0, width - size[1], 0, 0))
    x = _pad(x, (0, 0, 0, height - size[0]))
    return x.transpose(0, 1).unsqueeze(0)


def _bilinear_uint8(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize [N, C, h, w] uint8 to int32 levels in the fixed-point arithmetic that OpenCV uses.

    The released weights were trained on such pictures: a float bilinear differs by one level in a
    tenth of the pixels.
    """
    if x.shape[2:] == size:
        return x.int()
    height, width = x.shape[2:]
    left, right, near, far = _taps(width, size[1], clamp_weights=True, device=x.device)
    lines = x.index_select(3, left).int().mul_(near).add_(x.index_select(3, right).int().mul_(far))
    lines >>= 4
    top, bottom, near, far = _taps(height, size[0], clamp_weights=False, device=x.device)
    upper = lines.index_select(2, top).mul_(near[:, None]).bitwise_right_shift_(16)
    lower = lines.index_select(2, bottom).mul_(far[:, None]).bitwise_right_shift_(16)
    return upper.add_(lower).add_(2).bitwise_right_shift_(2)


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
    return tuple(torch.from_numpy(y).to(device) for y in (*pair, near, far))  # type: ignore[return-value]


def _pad(x: Tensor, pad: tuple[int, int, int, int]) -> Tensor:
    if not any(pad):
        return x
    extent = x.shape[3] if pad[1] else x.shape[2]
    return F.pad(x, pad, mode="reflect" if max(pad) < extent else "replicate")


def to_picture(frames: Tensor, size: tuple[int, int], dtype: np.dtype) -> Picture:
    """Crop, clamp and quantise frames [1, 3, F, H', W'] in [-1, 1] to [F, H, W, 3] of `dtype`.

    Rounds half to even.
    """
    x = frames[0, :, :, : size[0], : size[1]].float().clamp(-1, 1)
    x = x.add(1).mul_(full_scale(dtype) / 2).round_().permute(1, 2, 3, 0)
    if dtype == np.uint8:
        return x.to(torch.uint8).contiguous().cpu().numpy()
    return x.contiguous().cpu().numpy().astype(dtype)
