"""Many GPUs: who this process is, replicated gradients, and FSDP2.

Start with `torchrun --nproc-per-node N -m recavsr train ...`. Small models are replicated: each
rank holds everything and gradients are averaged in one flat all-reduce. Large ones are sharded with
`shard`, before players and objective are made of their parameters.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.export import register_dataclass
from torch.utils import _pytree as pytree

from recavsr.errors import InputError


@dataclass(frozen=True)
class World:
    """This process among those that train together."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes logs and results."""
        return self.rank == 0

    def share(self, count: int, what: str) -> int:
        """Return how many of a step's `count` samples are this process's; InputError if they don't divide."""
        if count % self.size:
            raise InputError(f"{what} ({count}) must be a multiple of the {self.size} processes")
        return count // self.size

    @torch.no_grad()
    def average_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average gradients over all ranks in one flat all-reduce; those that FSDP shards are done already.

        The same parameters must have gradients on every rank.
        """
        if self.size == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None and not isinstance(p.grad, DTensor)]
        if not gradients:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        flat.div_(self.size)
        parts = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients)])

    def mean(self, values: Tensor) -> Tensor:
        """Return the mean over all ranks."""
        if self.size > 1:
            dist.all_reduce(values)
            values = values / self.size
        return values

    def largest(self, value: int) -> int:
        """Return the largest of all ranks' values."""
        return max(self.gather(value))

    def agree(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in order of rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def join(device: torch.device) -> Iterator[World]:
    """Join the processes that torchrun started, if it did, for the length of a `with` block.

    `device` names the kind; under torchrun each process takes the card of its local rank.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield World(device)
        return
    backend = "gloo"
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend)
    try:
        yield World(device, dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def mesh(world: World) -> DeviceMesh:
    """Return the mesh of all ranks, over which `shard` spreads parameters."""
    return init_device_mesh(world.device.type, (world.size,))


def shard(
    network: nn.Module,
    layers: Iterable[nn.Module],
    over: DeviceMesh,
    *,
    methods: Sequence[str] = ("forward",),
    outputs: Sequence[type] = (),
    precision: torch.dtype | None = torch.bfloat16,
) -> None:
    """Shard a network's parameters over a mesh with FSDP2, in place.

    Each of `layers` is gathered by itself when it runs; `network` holds the rest. `methods`: by which
    network and layers are entered, where they have them, such as `step` and `condition`; `outputs`:
    dataclasses that these return and that carry gradients. Parameters stay as they are stored
    (float32 for training); they are gathered in `precision`, and gradients are reduced in float32.
    Make players only afterwards: parameters become other objects.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=precision, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for kind in outputs:
        if kind not in pytree.SUPPORTED_NODES:
            register_dataclass(kind)
    # Nothing stays gathered between calls, the network's own part neither: a rollout enters it many
    # times, and weights that change in between must be seen.
    for part in (*layers, network):
        fully_shard(part, mesh=over, mp_policy=policy, reshard_after_forward=True)
        for method in methods:
            if method != "forward" and hasattr(part, method):
                register_fsdp_forward_method(part, method)


def is_sharded(model: nn.Module) -> bool:
    """Whether any of a model's parameters is sharded."""
    return any(isinstance(p, DTensor) for p in model.parameters())


def whole_trained(model: nn.Module, world: World) -> dict[str, Tensor]:
    """Return a model's trained parameters, whole and on the CPU, to rank 0; nothing to the others.

    Every rank must call it. One parameter at a time is whole on the devices.
    """
    trained = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            if world.leads:
                trained[name] = value.detach().cpu()
    return trained


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's tensors, whole and on the CPU. Under FSDP every rank must call it."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()
        for name, value in model.state_dict().items()
    }
