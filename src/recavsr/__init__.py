"""recavsr: streaming video super-resolution by one-step diffusion.

    import recavsr

    recavsr.upscale("in.mp4", "out.mp4")                    # file to file

    model = recavsr.load("nano")                            # or identity, a model folder, a hub id
    session = recavsr.Session(model, lr_size=(180, 320), out_size=(720, 1280))
    for frames in session.push(lr_frames):                  # [N, 180, 320, 3] -> [M, 720, 1280, 3] a block
        ...
    for frames in session.flush():
        ...

Importing this package is light; PyTorch and PyAV are loaded when a name is first used that needs them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from recavsr.errors import InputError, PartialError

if TYPE_CHECKING:
    from recavsr.stream.engine import Progress, UpscaleReport, upscale
    from recavsr.stream.load import load
    from recavsr.stream.session import Session
    from recavsr.stream.step import BlockModel

__version__ = "0.1.0"

__all__ = [
    "BlockModel",
    "InputError",
    "PartialError",
    "Progress",
    "Session",
    "UpscaleReport",
    "__version__",
    "load",
    "upscale",
]

_HOMES = {
    "BlockModel": "recavsr.stream.step",
    "Progress": "recavsr.stream.engine",
    "Session": "recavsr.stream.session",
    "UpscaleReport": "recavsr.stream.engine",
    "load": "recavsr.stream.load",
    "upscale": "recavsr.stream.engine",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'recavsr' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
