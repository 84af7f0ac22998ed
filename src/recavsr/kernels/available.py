"""Which tensors go through kernels."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


@cache
def has_triton() -> bool:
    """Return whether kernels can be compiled here."""
    return find_spec("triton") is not None


def kernels_on(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether activations of this type go through kernels there."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and has_triton()


def kernels_for(x: Tensor) -> bool:
    """Return whether `x` goes through kernels: on a card, in a 16-bit type, without gradients."""
    return x.is_cuda and not torch.is_grad_enabled() and kernels_on(x.device, x.dtype)
