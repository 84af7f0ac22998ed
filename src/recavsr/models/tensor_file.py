"""Writing a safetensors file one tensor at a time: memory never holds the whole file."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class TensorWriter:
    """A safetensors file whose names and shapes are known before its values, which come in any order.

    A context manager: leaving it without an error raises ValueError where a tensor was never written.
    """

    def __init__(self, path: Path, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> None:
        """Lay out the file; `dtype` is float32, float16 or bfloat16."""
        self._dtype = dtype
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self._places: dict[str, int] = {}
        self._missing = set(shapes)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in self._shapes.items():
            self._places[name] = end
            end += math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": _NAMES[dtype],
                "shape": list(shape),
                "data_offsets": [self._places[name], end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._start = 8 + len(text)
        self._file = path.open("wb")
        self._file.write(struct.pack("<Q", len(text)) + text)
        self._file.truncate(self._start + end)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, cast to the file's dtype; raise ValueError for a wrong name or shape."""
        if name not in self._missing or tuple(tensor.shape) != self._shapes[name]:
            raise ValueError(f"{name} {list(tensor.shape)} was not announced, or was written before")
        values = tensor.detach().to("cpu", self._dtype).contiguous()
        self._file.seek(self._start + self._places[name])
        self._file.write(values.reshape(-1).view(torch.uint8).numpy().data)
        self._missing.remove(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if kind is None and self._missing:
            raise ValueError(f"{len(self._missing)} tensors were never written, first {min(self._missing)}")
