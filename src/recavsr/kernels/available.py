"""Which tensors go through kernels, and word of it while kernels are compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

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


def tell_of_compilation(tell: Callable[[str], None]) -> None:
    """Have `tell` called once when a kernel was not found in the cache: some more will be compiled then."""
    if not has_triton():
        return
    import triton

    settings = getattr(getattr(triton, "knobs", None), "compilation", None)
    if settings is None or not hasattr(settings, "listener") or settings.listener is not None:
        return  # an older Triton, or somebody else listens

    def heard(*_: Any, cache_hit: bool = False, **__: Any) -> None:
        if not cache_hit and settings.listener is heard:
            settings.listener = None
            tell("compiling GPU kernels: the first run with this version takes up to a minute longer")

    settings.listener = heard
