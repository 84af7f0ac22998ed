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


def kernels_for(x: Tensor) -> bool:
    """Return whether `x` goes through kernels: on a card, in a 16-bit type, without gradients."""
    sixteen = x.dtype in (torch.bfloat16, torch.float16)
    return x.is_cuda and sixteen and not torch.is_grad_enabled() and has_triton()
