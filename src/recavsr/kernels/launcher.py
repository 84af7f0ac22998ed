"""Triton kernels launched by their compiled forms: Triton's own search takes the host longer than the rest."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor
from triton.runtime.jit import JITFunction


def by_handle(kernel: Any) -> Any:
    """Return a `triton.jit` kernel that is launched alike, and finds its compiled form by a short key.

    Constants are given by name, all else by place; the first argument is a tensor. A kernel that is
    interpreted stays as it is.
    """
    return _Launcher(kernel) if isinstance(kernel, JITFunction) else kernel


class _Launcher:
    """A kernel and its compiled forms so far."""

    def __init__(self, kernel: JITFunction) -> None:
        self._kernel = kernel
        self._names: list[str] = list(kernel.arg_names)
        self._forms: dict[Hashable, tuple[Any, list[Any]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        whole = (*grid, 1, 1)[:3]

        def launch(*args: Any, **constants: Any) -> None:
            key = (args[0].get_device(), *map(_kind, args), *constants.values())
            if key in self._forms:
                form, last = self._forms[key]
                form[whole](*args, *last)
            else:
                form = self._kernel[whole](*args, **constants)
                self._forms[key] = form, [constants[name] for name in self._names[len(args) :]]

        return launch


def _kind(argument: Any) -> Any:
    """Return all of an argument that a compiled form may take for granted."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() & 15
    if isinstance(argument, int):
        return argument == 1, argument & 15, argument.bit_length() > 31
    return type(argument)
