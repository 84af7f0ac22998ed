"""Losses. Frames are [B, 3, F, H, W] in [-1, 1]; latents [B, C, T, H, W]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from recavsr.errors import InputError
from recavsr.geometry import FRAMES_PER_LATENT
from recavsr.training.recompute import recompute

PerceptualDistance = Callable[[Tensor, Tensor], Tensor]
"""Two batches of images [N, 3, H, W] in [-1, 1] to distances [N]."""


def charbonnier(x: Tensor, target: Tensor, eps: float = 1e-3) -> Tensor:
    """Return the mean of sqrt((x - target)^2 + eps^2), a smooth L1."""
    return (x.float() - target.float()).square().add(eps**2).sqrt().mean()


def log_rms(x: Tensor, target: Tensor, floor: float = 2 / 255) -> Tensor:
    """Return the mean of ln(rms) over frames, [B, C, F, H, W] in [-1, 1]: minus their mean PSNR, times .115.

    Every frame counts by how much better it gets, not by how wrong it is, and within a frame the expected
    value is best, where an L1 asks for the median. What is below `floor` (one grey level) hardly counts.
    """
    errors = (x.float() - target.float()).square().mean(dim=(1, 3, 4))
    return (errors + floor**2).log().mean() / 2


PixelLoss = Literal["l1", "mse", "charbonnier", "log_rms"]
_PIXEL_LOSSES: dict[PixelLoss, Callable[[Tensor, Tensor], Tensor]] = {
    "l1": F.l1_loss,
    "mse": F.mse_loss,
    "charbonnier": charbonnier,
    "log_rms": log_rms,
}


def pixel_loss(kind: PixelLoss, frames: Tensor, target: Tensor) -> Tensor:
    """Return the distance of frames [B, C, F, H, W], in float32."""
    return _PIXEL_LOSSES[kind](frames.float(), target.float())


def temporal_difference(
    frames: Tensor,
    target: Tensor,
    still_weight: float = 0.0,
    border_weight: float = 0.0,
    still_softness: float = 1e-3,
    first_frame: int = 0,
) -> Tensor:
    """Return the smooth L1 of frame-to-frame differences: flicker and lag. Zero for single frames.

    Pixels whose target changes by less than 1/255 count `still_weight` times more: flicker is seen
    most where nothing moves, and is smallest there. Differences across a latent's border count
    `border_weight` times more: what is decoded latent by latent pulses there. The clip begins with
    frame `first_frame` of its stream.

    Below `still_softness` the still pixels' extra part is quadratic. An L1 does not mind whether a change
    comes at once or over four frames; a square does, and spreads what would pulse.
    """
    if frames.shape[2] == 1:
        return frames.new_zeros(())
    change = target.float().diff(dim=2)
    error = (frames.float().diff(dim=2) - change).square().add(1e-6).sqrt()
    if still_weight:
        still = change.abs().amax(1, keepdim=True) < 2 / 255
        flicker = (frames.float().diff(dim=2) - change).square().add(still_softness**2).sqrt()
        error = error + still_weight * still * (flicker - still_softness)
    if border_weight:
        # Frame 0 is a latent of its own, then come four a latent: borders follow frames 0, 4, 8...
        t = first_frame + torch.arange(error.shape[2], device=error.device)
        borders = t % FRAMES_PER_LATENT == 0
        error = error * (1 + border_weight * borders[:, None, None])
    return error.mean()


def structural_dissimilarity(frames: Tensor, target: Tensor) -> Tensor:
    """Return 1 - SSIM of the luma, mean over the valid positions of all frames.

    As `evaluation.metrics.ssim` (Wang et al. 2004: Gaussian window 11 / 1.5, K1 = .01, K2 = .03), but without
    rounding to 8 bits and without a floor at 0: there is a gradient everywhere. In float32 throughout.
    """
    with torch.autocast(frames.device.type, enabled=False):
        x, y = (_half_luma(v.float()).flatten(0, 1) for v in (frames, target))
        blurred = _blurred(torch.stack([x, y, x * x, y * y, x * y], dim=1))
        mean_x, mean_y, xx, yy, xy = blurred.unbind(1)
        variances, covariance = xx - mean_x**2 + yy - mean_y**2, xy - mean_x * mean_y
        mean_x, mean_y = mean_x + 0.5, mean_y + 0.5
        c1, c2 = 0.01**2, 0.03**2
        structure = (2 * covariance + c2) / (variances + c2)
        brightness = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
        return 1 - (structure * brightness).mean()


def _half_luma(frames: Tensor) -> Tensor:
    """Return the luma [B, F, H, W] in [-0.5, 0.5]: centred, so that variances keep their digits."""
    red, green, blue = frames.unbind(1)
    return 0.1495 * red + 0.2935 * green + 0.057 * blue


def _blurred(planes: Tensor, size: int = 11, sigma: float = 1.5) -> Tensor:
    """Filter planes [N, C, H, W] by a Gaussian window; valid positions only."""
    places = torch.arange(size, device=planes.device) - (size - 1) / 2
    taps = torch.exp(-places.square() / (2 * sigma**2))
    channels = planes.shape[1]  # one group each: kernels for that never round to TF32
    taps = (taps / taps.sum()).expand(channels, 1, 1, size)
    rows = F.conv2d(planes, taps, groups=channels)
    return F.conv2d(rows, taps.transpose(2, 3), groups=channels)


def perceptual(
    frames: Tensor,
    target: Tensor,
    distance: PerceptualDistance,
    picks: Tensor,
    *,
    checkpoint: bool = False,
) -> Tensor:
    """Return the mean perceptual distance of the frames at indices `picks` [n] of every clip.

    With `checkpoint` one frame of every clip at a time, each computed again in the backward pass.
    """
    chosen, wanted = (x.index_select(2, picks).transpose(1, 2) for x in (frames, target))
    chosen = chosen.clamp(-1, 1)
    if checkpoint:
        pairs = zip(chosen.unbind(1), wanted.unbind(1))
        return torch.stack([recompute(distance, x, y).mean() for x, y in pairs]).mean()
    return distance(chosen.flatten(0, 1), wanted.flatten(0, 1)).mean()


def pick_frames(frames: int, count: int | None, device: torch.device) -> Tensor:
    """Draw `count` different frame indices out of `frames`; all of them where `count` is None or more."""
    if count is None or count >= frames:
        return torch.arange(frames, device=device)
    return torch.rand(frames, device=device).argsort()[:count]


def latent_statistics_penalty(latents: Tensor) -> Tensor:
    """Return how far each latent channel is from mean 0 and deviation 1 over the batch."""
    x = latents.float().transpose(0, 1).flatten(1)
    return x.mean(1).square().mean() + (x.std(1) - 1).square().mean()


def psnr(x: Tensor, target: Tensor) -> Tensor:
    """Return the PSNR in dB of frames in [-1, 1], over the whole batch."""
    error = (x.float().clamp(-1, 1) - target.float()).square().mean() / 4
    return -10 * torch.log10(error)


@cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, fullgraph=True, dynamic=False)


@dataclass(frozen=True)
class FrameLosses:
    """Which losses of decoded frames against the truth a stage adds up, and their weights."""

    pixel: PixelLoss
    perceptual_weight: float
    pixel_weight: float = 1.0
    difference_weight: float = 0.0
    """Of errors in frame-to-frame differences (not in the paper)."""
    still_weight: float = 0.0
    """Of still pixels in these differences, beyond the others' (not in the paper)."""
    border_weight: float = 0.0
    """Of differences across latent borders, beyond the others' (not in the paper)."""
    still_softness: float = 1e-3
    """Below this the still pixels' part is quadratic."""
    structure_weight: float = 0.0
    """Of 1 - SSIM (not in the paper)."""
    perceptual_frames: int | None = None
    """Frames of a clip that the perceptual distance looks at, drawn anew each step; None: all."""

    def __call__(
        self,
        frames: Tensor,
        hq: Tensor,
        lr_frames: Tensor,
        distance: PerceptualDistance | None,
        *,
        first_frame: int = 0,
        checkpoint: bool = False,
        compiled: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the weighted sum, and each loss with the gain in PSNR over the LR frames.

        The clip begins with frame `first_frame` of its stream. `distance` may be None where its
        weight is 0 (see `check`); `checkpoint` is `perceptual`'s; with `compiled` all else is compiled: on a
        card many passes over whole clips become few.
        """
        of_pixels = _compiled(FrameLosses.of_pixels) if compiled else FrameLosses.of_pixels
        total, terms = of_pixels(self, frames, hq, lr_frames, first_frame)
        if self.perceptual_weight and distance is not None:
            picks = pick_frames(hq.shape[2], self.perceptual_frames, hq.device)
            terms["perceptual"] = perceptual(frames, hq, distance, picks, checkpoint=checkpoint)
            total = total + self.perceptual_weight * terms["perceptual"]
        return total, terms

    def of_pixels(
        self, frames: Tensor, hq: Tensor, lr_frames: Tensor, first_frame: int = 0
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the same without the perceptual distance."""
        terms = {
            "pixel": pixel_loss(self.pixel, frames, hq),
            "difference": temporal_difference(
                frames,
                hq,
                self.still_weight,
                self.border_weight,
                self.still_softness,
                first_frame,
            ),
        }
        total = self.pixel_weight * terms["pixel"] + self.difference_weight * terms["difference"]
        if self.structure_weight:
            terms["structure"] = structural_dissimilarity(frames, hq)
            total = total + self.structure_weight * terms["structure"]
        with torch.no_grad():
            terms["gain_db"] = psnr(frames, hq) - psnr(lr_frames, hq)
        return total, terms

    def check(self, distance: PerceptualDistance | None) -> None:
        """Raise InputError where a perceptual distance is wanted but not given."""
        if self.perceptual_weight and distance is None:
            raise InputError("the stage wants a perceptual distance: give LPIPS, or set its weight to 0")
