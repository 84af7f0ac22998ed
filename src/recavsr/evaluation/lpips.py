"""LPIPS v0.1, the learned perceptual distance, with AlexNet or VGG16 features.

Zhang et al., "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric", CVPR 2018, Eq. 1:
unit-normalise each feature vector over channels, square the difference, weight the channels with a learned
non-negative head, average over space, sum over five layers.

The weights are public but not ours, so they do not ship: `python tools/fetch_perceptual.py` puts them in the
cache folder (`RECAVSR_WEIGHTS`, else `~/.cache/recavsr`).

    LPIPS(net="vgg", weights=path)(x, y)    # x, y [N, 3, H, W] in [-1, 1] -> [N], differentiable in both

Shapes: N images, C channels, H W rows and columns of the layer at hand.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from recavsr.errors import InputError


@dataclass(frozen=True)
class ConvSpec:
    """One convolution (ReLU follows), the max pooling before it, and whether its output is compared."""

    channels_in: int
    channels_out: int
    kernel: int
    stride: int = 1
    padding: int = 1
    pool: int = 0  # size of the max pooling in front, stride 2; 0 = none
    tap: bool = True


@dataclass(frozen=True)
class Backbone:
    """A convolution stack, the file that holds it and the digest of the file's tensors."""

    convs: tuple[ConvSpec, ...]
    file: str
    digest: str


def _vgg16() -> tuple[ConvSpec, ...]:
    specs: list[ConvSpec] = []
    channels = 3
    for stage, (width, depth) in enumerate([(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]):
        for i in range(depth):
            pool = 2 if i == 0 and stage > 0 else 0
            specs.append(ConvSpec(channels, width, 3, pool=pool, tap=i == depth - 1))
            channels = width
    return tuple(specs)


_ALEXNET = (
    ConvSpec(3, 64, 11, stride=4, padding=2),
    ConvSpec(64, 192, 5, padding=2, pool=3),
    ConvSpec(192, 384, 3, pool=3),
    ConvSpec(384, 256, 3),
    ConvSpec(256, 256, 3),
)

BACKBONES = {
    "alex": Backbone(
        _ALEXNET, "lpips_alex.safetensors", "9caf6f24f73985b70e0e928c54e1b598e9579b797b86f20da6f0c14ddffbf219"
    ),
    "vgg": Backbone(
        _vgg16(), "lpips_vgg.safetensors", "c38dafabd3f27404e2e6cdb3706a55d31aa42d7fa98d42bfc923d15f5905c304"
    ),
}


def weights_folder() -> Path:
    """The cache folder of downloaded weights: `RECAVSR_WEIGHTS`, else `~/.cache/recavsr`."""
    return Path(os.environ.get("RECAVSR_WEIGHTS") or Path.home() / ".cache" / "recavsr")


def tensor_digest(tensors: dict[str, Tensor]) -> str:
    """sha256 over sorted names, dtypes, shapes and values: the same however a file lays its tensors out."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def load_backbone_weights(net: str, weights: str | os.PathLike[str] | None = None) -> dict[str, Tensor]:
    """Read and verify the tensors of `net` ("alex" or "vgg").

    `weights` is the file, the folder that holds it, or None for the cache folder. Raises InputError when the
    file is missing or holds other values than the published ones.
    """
    backbone = BACKBONES[net]
    path = Path(weights) if weights is not None else weights_folder()
    if path.is_dir() or path.suffix != ".safetensors":
        path = path / backbone.file
    if not path.is_file():
        raise InputError(f"LPIPS weights not found: {path}; run `python tools/fetch_perceptual.py`")
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: can't be read as weights ({error}); fetch them again") from error
    if tensor_digest(tensors) != backbone.digest:
        raise InputError(f"{path} does not hold the LPIPS {net} weights; fetch them again")
    return tensors


class LPIPS(nn.Module):
    """LPIPS v0.1 as a frozen module: `LPIPS(net="vgg", weights=path)(x, y)`.

    Args:
        net: "alex" (the usual metric) or "vgg" (the usual training loss).
        weights: file or folder of the weights; None reads the cache folder; `pretrained=False` leaves the
            layers at their random initialisation (for tests of shapes and gradients).

    Usable under autocast: features may be bf16, comparison and heads are fp32.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        net: str = "alex",
        weights: str | os.PathLike[str] | None = None,
        *,
        pretrained: bool = True,
    ) -> None:
        super().__init__()
        if net not in BACKBONES:
            raise InputError(f"unknown LPIPS network {net!r}; choose one of {', '.join(BACKBONES)}")
        self.net = net
        self.specs = BACKBONES[net].convs
        self.convs = nn.ModuleList(
            nn.Conv2d(s.channels_in, s.channels_out, s.kernel, s.stride, s.padding) for s in self.specs
        )
        self.heads = nn.ParameterList(torch.rand(s.channels_out) for s in self.specs if s.tap)
        # ImageNet statistics, moved from [0, 1] to [-1, 1].
        self.register_buffer("mean", torch.tensor([-0.030, -0.088, -0.188]).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor([0.458, 0.448, 0.450]).view(1, 3, 1, 1))
        if pretrained:
            tensors = {k: v.float() for k, v in load_backbone_weights(net, weights).items()}
            self.load_state_dict({"mean": self.mean, "std": self.std, **tensors})
        self.requires_grad_(False).eval()

    def features(self, images: Tensor) -> list[Tensor]:
        """images [N, 3, H, W] in [-1, 1] -> five unit-normalised fp32 feature maps [N, C, H', W']."""
        hidden = (images - self.mean) / self.std
        taps: list[Tensor] = []
        for spec, conv in zip(self.specs, self.convs):
            if spec.pool:
                hidden = F.max_pool2d(hidden, spec.pool, stride=2)
            hidden = F.relu(conv(hidden))
            if spec.tap:
                taps.append(_unit(hidden.float()))
        return taps

    def distance(self, features_x: list[Tensor], features_y: list[Tensor]) -> Tensor:
        """Distance of two results of `features` -> [N]."""
        layers = [
            torch.einsum("nchw,c->nhw", (a - b).square(), head.float()).mean(dim=(1, 2))
            for a, b, head in zip(features_x, features_y, self.heads)
        ]
        return torch.stack(layers).sum(dim=0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x, y [N, 3, H, W] in [-1, 1] -> [N]; larger is more different. A constant y costs no graph."""
        if x.shape != y.shape or x.ndim != 4 or x.shape[1] != 3:
            raise ValueError(f"LPIPS wants two [N, 3, H, W] tensors, got {tuple(x.shape)}, {tuple(y.shape)}")
        return self.distance(self.features(x), self.features(y))


def _unit(features: Tensor) -> Tensor:
    # The clamp changes no value (1e-10 is the published epsilon); it keeps the gradient of sqrt finite where
    # a feature vector is all zero, which the published code turns into NaN.
    norm = features.square().sum(dim=1, keepdim=True).clamp_min(1e-20).sqrt()
    return features / (norm + 1e-10)
