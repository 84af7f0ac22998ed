"""Linear layers of bfloat16 on a CPU, as oneDNN computes them best.

Given a weight as it lies, oneDNN lays it out anew at every call, which takes as long as the product itself
where inputs are a few hundred wide. A `PackedLinear` has that done once, and leaves activations and products
by another tensor to the same pass. The operators are those that PyTorch's compiler writes into its code for
CPUs; no compiler is needed to call them. They are not promised to stay, so `has_packed_products` tries them.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Activation = Literal["none", "swish", "gelu"]


@cache
def cpu_flags() -> frozenset[str]:
    """Return what Linux says that the processor has, by its names; nothing elsewhere."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found.group(1).split()) if found else frozenset()


def takes_bfloat16() -> bool:
    """Return whether this PyTorch has a oneDNN that takes bfloat16 here, with instructions for it or not."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def has_packed_products() -> bool:
    """Return whether packed layers of bfloat16 work here, and give what plain ones do."""
    try:
        if not takes_bfloat16():
            return False
        plain = nn.utils.skip_init(nn.Linear, 32, 16, device="cpu", dtype=torch.bfloat16)  # draws nothing
        x = torch.linspace(-1, 1, 4 * 32, device="cpu", dtype=torch.bfloat16).view(4, 32)
        with torch.no_grad():
            for values in plain.parameters():
                values.copy_(torch.linspace(-0.3, 0.3, values.numel()).view_as(values))
            packed = PackedLinear(plain, 4)
            made = packed.times(x, packed(x, "swish"))
            wanted = F.silu(plain(x)) * plain(x)
        return torch.allclose(made.float(), wanted.float(), rtol=0.02, atol=0.01)
    except (AttributeError, RuntimeError, TypeError):  # another version's
        return False


class PackedLinear(nn.Linear):
    """A linear layer for inference on a CPU whose weight lies in memory as oneDNN's products read it."""

    def __init__(self, plain: nn.Linear, rows: int) -> None:
        """Pack a layer for inputs of so many rows; it serves others too."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        weight = torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach(), rows)
        self.weight = cast(nn.Parameter, weight)  # no parameter: nothing trains, saves or moves it
        self.bias = plain.bias

    def forward(self, x: Tensor, activation: Activation = "none") -> Tensor:
        """Apply to [..., C]; "swish" is SiLU, "gelu" its tanh form."""
        form = "tanh" if activation == "gelu" else ""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, activation, [], form)

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """Return the layer's result for `x` [..., C] times `other`, of the result's shape."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, other, self.weight, self.bias, "mul")


@torch.no_grad()
def pack_linears(module: nn.Module, rows: int) -> None:
    """Replace every plain linear layer inside a module by a packed one for inputs of so many rows."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child, rows))
        else:
            pack_linears(child, rows)
