"""Linear layers in 8-bit floating point (e4m3), with one scale a row of activations and one an output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from recavsr.kernels.available import kernels_for

FLOAT8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FLOAT8).max
_LEAST = 1e-12  # stands in for the largest value of a row of zeros
_NEEDED = (8, 9)  # compute capability of the first cards with such products


def why_no_fp8(device: torch.device) -> str | None:
    """Return why a device can not compute in float8, or None where it can."""
    if device.type == "cpu":
        return None  # slower than bfloat16, but right: for measuring errors
    if device.type != "cuda":
        return f"{device.type} has no float8 products"
    if torch.cuda.get_device_capability(device) < _NEEDED:
        return f"{torch.cuda.get_device_name(device)} has no float8 products (Ada and Hopper cards on do)"
    return None


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return `x` [rows, C] as float8 and its scales [rows, 1], float32: x = values * scales, nearly."""
    largest = torch.linalg.vector_norm(x, float("inf"), dim=1, keepdim=True)
    # Rounded to the dtype of x first, so that values and scales fit each other. That moves the largest value
    # by less than half a step of float8: it can not overflow.
    inverse = (_LARGEST / largest.float().clamp(min=_LEAST)).to(x.dtype)
    return (x * inverse).to(FLOAT8), inverse.float().reciprocal()


@dataclass(frozen=True)
class Float8Rows:
    """Activations as `quantize_rows` returns them, and the shape [..., C] that they stand for."""

    values: Tensor  # [rows, C]
    scale: Tensor  # [rows, 1]
    shape: torch.Size

    @staticmethod
    def of(x: Tensor) -> Float8Rows:
        """Round `x` [..., C], on a card in one pass."""
        flat = x.flatten(0, -2)
        if kernels_for(x):
            from recavsr.kernels import rows

            return Float8Rows(*rows.quantize(flat, gelu=False), x.shape)
        return Float8Rows(*quantize_rows(flat), x.shape)


class FP8Linear(nn.Module):
    """A linear layer whose weight is float8; its input is scaled and rounded row by row at each call.

    On a card its sides must be multiples of 16.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor

    def __init__(self, weight: Tensor, bias: Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
        """Round a weight [out, in] of any dtype; the bias is kept in `dtype`, that of the results."""
        super().__init__()
        values, scale = quantize_rows(weight)
        self.register_buffer("weight", values)
        self.register_buffer("scale", scale.t().contiguous())  # [1, out]
        self.register_buffer("bias", bias.to(dtype))

    def forward(self, x: Tensor | Float8Rows) -> Tensor:
        """Apply to [..., in]; the result has the dtype of the bias."""
        rows = x if isinstance(x, Float8Rows) else Float8Rows.of(x)
        out = scaled_product(rows.values, rows.scale, self.weight, self.scale, self.bias)
        return out.unflatten(0, rows.shape[:-1])


def scaled_product(
    values: Tensor, scale: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor
) -> Tensor:
    """Return (values scale) (weight weight_scale)^T + bias of float8 [rows, in] and [out, in].

    Scales are [rows, 1] and [1, out].
    """
    return torch._scaled_mm(
        values,
        weight.t(),
        scale_a=scale,
        scale_b=weight_scale,
        bias=bias,
        out_dtype=bias.dtype,
        use_fast_accum=True,
    )
