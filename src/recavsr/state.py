"""What a state is: an immutable tree of tensors and plain values.

Every streaming part keeps what it must remember in a frozen dataclass derived from `State`, and
returns the next one from `step`. So a state can be copied, moved, saved and compared as a whole:
a scene cut is a fresh state, a resume is a loaded one, two viewers are two states.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from recavsr.errors import InputError


@dataclasses.dataclass(frozen=True)
class State:
    """Base of all states: fields are tensors, states, tuples of these, or plain JSON values."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the same tree with `function` applied to every tensor."""
        return _map(self, function)

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor of the tree, in field order."""
        for _, tensor in _named_tensors(self, ""):
            yield tensor

    def detach(self) -> Self:
        """Return the state cut from the autograd graph."""
        return self.map(Tensor.detach)

    def clone(self) -> Self:
        """Return a deep copy."""
        return self.map(Tensor.clone)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the state with `Tensor.to(*args, **kwargs)` applied to every tensor."""
        return self.map(lambda tensor: tensor.to(*args, **kwargs))

    def gathered(self) -> State:
        """Return the state with all of it in this process; parts may lie in others (`stream.devices`)."""
        return self

    @property
    def nbytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def save(self, path: str | Path, **metadata: Any) -> None:
        """Write the state to a safetensors file, with JSON-able `metadata` beside it."""
        tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in _named_tensors(self, "")}
        # Tensors that share memory are refused by the format; a state may hold a view twice.
        tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        header = {"structure": json.dumps(_structure(self)), "metadata": json.dumps(metadata)}
        save_file(tensors, str(path), metadata=header)

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "cpu") -> tuple[Self, dict[str, Any]]:
        """Read (state, metadata) from a file written by `save`.

        Raises InputError where the file is missing, damaged, or holds another kind of state.
        """
        try:
            with safe_open(str(path), framework="pt", device=str(device)) as file:
                header = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            structure, metadata = json.loads(header["structure"]), json.loads(header["metadata"])
            state = _rebuild(structure, tensors, "", {c.__name__: c for c in _subclasses(State)})
        except (OSError, SafetensorError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise InputError(f"{path} is not a readable recavsr state: {error}") from error
        if not isinstance(state, cls):
            raise InputError(f"{path} holds a {type(state).__name__}, not a {cls.__name__}")
        return state, metadata


def _subclasses(base: type) -> Iterator[type]:
    child: type
    for child in base.__subclasses__():
        yield child
        yield from _subclasses(child)


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, State):
        fields = dataclasses.fields(value)
        return type(value)(**{f.name: _map(getattr(value, f.name), function) for f in fields})
    if isinstance(value, tuple):
        return tuple(_map(item, function) for item in value)
    return value


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, State):
        for field in dataclasses.fields(value):
            yield field.name, getattr(value, field.name)
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield str(index), item


def _named_tensors(value: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield prefix, value
    for name, child in _children(value):
        yield from _named_tensors(child, f"{prefix}.{name}" if prefix else name)


def _structure(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"tensor": True}
    if isinstance(value, State):
        return {"state": type(value).__name__, "fields": {k: _structure(v) for k, v in _children(value)}}
    if isinstance(value, tuple):
        return {"tuple": [_structure(item) for item in value]}
    return {"value": value}


def _rebuild(node: dict[str, Any], tensors: dict[str, Tensor], prefix: str, classes: dict[str, type]) -> Any:
    def below(name: str) -> str:
        return f"{prefix}.{name}" if prefix else name

    if "tensor" in node:
        return tensors[prefix]
    if "tuple" in node:
        return tuple(_rebuild(item, tensors, below(str(i)), classes) for i, item in enumerate(node["tuple"]))
    if "state" in node:
        fields = {k: _rebuild(v, tensors, below(k), classes) for k, v in node["fields"].items()}
        return classes[node["state"]](**fields)
    return node["value"]
