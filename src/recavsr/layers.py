"""Small layers shared by the networks.

Rules of precision: weights and activations may be bfloat16; statistics of norms, modulation and
residual sums are float32 and rounded once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recavsr.fused import rms_norm, rms_norm_silu
from recavsr.kernels.available import kernels_for


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, in float32; returns the input's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` [..., width]."""
        return rms_norm(x, self.weight, self.eps)

    def in_float32(self, x: Tensor) -> Tensor:
        """Normalise `x` [..., width] and leave the result in float32."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)


class ChannelRMSNorm(nn.Module):
    """RMS norm over the channels of `x` [B, C, F, H, W]; its weight is [C, 1, 1, 1]."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise `x` [B, C, F, H, W] in float32; returns the input's dtype."""
        rows = x.permute(0, 2, 3, 4, 1)
        if kernels_for(x) and rows.is_contiguous():  # channels last in memory
            return rms_norm(rows, self.weight.flatten(), self.eps).permute(0, 4, 1, 2, 3)
        value = x.float()
        factor = torch.rsqrt(value.square().mean(dim=1, keepdim=True) + self.eps)
        if x.dtype == torch.float32 or torch.is_grad_enabled():
            return (value * factor * self.weight.float()).to(x.dtype)
        # The float32 copy is our own: two fewer of them, the largest tensors of a block.
        return value.mul_(factor).mul_(self.weight.float()).to(x.dtype)

    def silu(self, x: Tensor, out: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        """Normalise `x` [B, C, F, H, W], with a `bias` [C], and apply SiLU, into `out` if given.

        On a card all in one pass.
        """
        rows = x.permute(0, 2, 3, 4, 1)
        if kernels_for(x) and rows.is_contiguous():
            place = None if out is None else out.permute(0, 2, 3, 4, 1)
            made = rms_norm_silu(rows, self.weight.flatten(), self.eps, place, bias)
            return made.permute(0, 4, 1, 2, 3)
        made = F.silu(self(x if bias is None else x + bias[:, None, None, None]))
        return made if out is None else out.copy_(made)


def packed(x: Tensor) -> Tensor:
    """Return `x` contiguous; copied in words of eight bytes where its memory allows.

    A card copies what lies scattered number by number: four times as many of bfloat16 as of words.
    """
    if x.is_contiguous() or x.requires_grad or not _in_words(x):
        return x.contiguous()
    return x.view(torch.int64).contiguous().view(x.dtype)


def _in_words(x: Tensor) -> bool:
    """Return whether the last dimension of `x` lies in memory as whole words of eight bytes.

    A compiler, which can not know, makes its own copies.
    """
    if torch.compiler.is_compiling():
        return False
    places = (*x.stride()[:-1], x.shape[-1], x.storage_offset())
    return x.stride(-1) == 1 and not any(place * x.element_size() % 8 for place in places)


def copy_packed(target: Tensor, source: Tensor) -> None:
    """Copy as `Tensor.copy_` does, in words of eight bytes where the memory of both allows."""
    same = target.dtype == source.dtype and target.shape == source.shape
    if same and _in_words(target) and _in_words(source):
        target, source = target.view(torch.int64), source.view(torch.int64)
    target.copy_(source)


def copy_both(targets: tuple[Tensor, Tensor], sources: tuple[Tensor, Tensor]) -> None:
    """Copy keys and values [B, G, N, T, D], on a card in one pass."""
    if kernels_for(sources[0]) and all(x.stride(-1) == 1 for x in (*targets, *sources)):
        from recavsr.kernels import rows

        rows.copy_both(targets, sources)
        return
    for target, source in zip(targets, sources):
        copy_packed(target, source)


def grid_cells(x: Tensor, size: int) -> Tensor:
    """Cut pictures [B, C, T, s H, s W] into cells of `size` pixels: [B, H W, T, C s s], contiguous.

    The values of a cell are in the order (channel, row, column).
    """
    cells = x.unflatten(4, (-1, size)).unflatten(3, (-1, size))  # B C T H s W s
    return packed(cells.permute(0, 3, 5, 2, 1, 4, 6)).flatten(4).flatten(1, 2)


def cells_of(frames: Tensor, factor: int) -> Tensor:
    """View frames [B, C, F, f H, f W] as cells of f x f pixels: [B, F, H, W, C, f, f]."""
    cells = frames.unflatten(4, (-1, factor)).unflatten(3, (-1, factor))  # B C F H f W f
    return cells.permute(0, 2, 3, 5, 1, 4, 6)


def unshuffled(frames: Tensor, factor: int) -> Tensor:
    """Pixel-unshuffle every frame: [B, C, F, f H, f W] -> [B, C f f, F, H, W], channels last in memory."""
    return packed(cells_of(frames, factor)).flatten(4).permute(0, 4, 1, 2, 3)


def halved(frames: Tensor) -> Tensor:
    """Return frames [B, C, F, H, W] at half their size: means of 2 x 2 pixels."""
    small = F.interpolate(frames.flatten(1, 2), scale_factor=0.5, mode="bilinear")  # just between four
    return small.unflatten(1, frames.shape[1:3])


def modulation_table(rows: int, width: int) -> nn.Parameter:
    """Return the learned part of a modulation [1, rows, width], drawn with variance 1 / width.

    On the meta device it stays empty: drawing there would import PyTorch's compiler, which takes a second.
    """
    table = torch.empty(1, rows, width)
    return nn.Parameter(table if table.is_meta else table.normal_(std=width**-0.5))


def modulated_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float) -> Tensor:
    """Return layer_norm(x) (1 + scale) + shift, computed in float32, in the dtype of `x`.

    `x` is [B, N, T, C]; `scale` and `shift` are [B or 1, C].
    """
    normal = F.layer_norm(x.float(), x.shape[-1:], eps=eps)
    return torch.addcmul(shift[:, None, None], normal, 1 + scale[:, None, None]).to(x.dtype)


def gated_residual(x: Tensor, update: Tensor, gate: Tensor) -> Tensor:
    """Return x + update * gate in float32, rounded to the dtype of `x`; gate is [B or 1, C]."""
    return torch.addcmul(x.float(), update.float(), gate[:, None, None]).to(x.dtype)


def sinusoid(timestep: Tensor, channels: int) -> Tensor:
    """Embed timesteps [B] as [B, channels], cosines first, in float32 throughout.

    The released weights were made with float32 frequencies exp(-ln(10000) i / half).
    """
    half = channels // 2
    index = torch.arange(half, dtype=torch.float32, device=timestep.device)
    angle = timestep.float()[:, None] * torch.exp(-math.log(10_000.0) * index / half)
    return torch.cat([angle.cos(), angle.sin()], dim=-1)
