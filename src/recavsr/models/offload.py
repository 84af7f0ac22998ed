"""Layers that wait in main memory and come to the device one after the other, while others compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import chain

import torch
from torch import Tensor, nn

SLOTS = 2
"""Places on the device for layers that travel: one computes while the next arrives."""


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Return parameters and buffers of a module, in a fixed order."""
    return list(chain(module.parameters(), module.buffers()))


def to_main_memory(module: nn.Module, device: torch.device) -> None:
    """Move a module to main memory, page-locked where `device` copies from there by itself."""
    for tensor in tensors_of(module):
        away = tensor.data.cpu()
        tensor.data = away.pin_memory() if device.type == "cuda" else away


class StreamedLayers(nn.Module):
    """Layers of one form, to iterate over once a block; some of them visit the device only then.

    A layer that is iterated over is valid until the next one. Copies run on a stream of their own.
    """

    def __init__(self, layers: Sequence[nn.Module], resident: Sequence[bool], device: torch.device) -> None:
        """Take layers, of which those that are not resident lie in main memory (see `to_main_memory`)."""
        super().__init__()
        self.layers, self.resident = nn.ModuleList(layers), tuple(resident)
        away = [layer for layer, stays in zip(layers, resident, strict=True) if not stays]
        self.slots = nn.ModuleList(deepcopy(layer).to(device) for layer in away[:SLOTS])
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[nn.Module]:
        waiting = deque(index for index, stays in enumerate(self.resident) if not stays)
        free = deque(self.slots)
        arrived: dict[int, tuple[nn.Module, torch.cuda.Event | None]] = {}
        for index, layer in enumerate(self.layers):
            while waiting and free:
                slot = free.popleft()
                following = waiting.popleft()
                arrived[following] = slot, self._fetch(self.layers[following], slot)
            if self.resident[index]:
                yield layer
                continue
            slot, ready = arrived.pop(index)
            if ready is not None:
                torch.cuda.current_stream().wait_event(ready)
            yield slot
            free.append(slot)

    def _fetch(self, layer: nn.Module, slot: nn.Module) -> torch.cuda.Event | None:
        """Copy a layer into a slot, after all work that is under way; return when it is there."""
        if self._copies is None:
            _copy(layer, slot)
            return None
        # What was computed in this slot before is already in the queue of the current stream.
        self._copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._copies):
            _copy(layer, slot)
            return self._copies.record_event()


def _copy(layer: nn.Module, slot: nn.Module) -> None:
    for source, target in zip(tensors_of(layer), tensors_of(slot), strict=True):
        target.data.copy_(source.data, non_blocking=True)
