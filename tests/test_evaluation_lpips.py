"""LPIPS: structure against plain PyTorch layers, gradients, weights, and the public values where fetched."""

from __future__ import annotations

import importlib.util
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from recavsr.errors import InputError
from recavsr.evaluation.lpips import BACKBONES, LPIPS, tensor_digest, weights_folder

TOOL = Path(__file__).resolve().parents[1] / "tools" / "fetch_perceptual.py"


def images(seed: int, count: int = 2, height: int = 70, width: int = 91) -> torch.Tensor:
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def plain_stages(module: LPIPS) -> list[nn.Sequential]:
    """The published networks as torchvision lays them out, cut behind the compared ReLUs."""
    layers = {
        "alex": [["c"], ["p3", "c"], ["p3", "c"], ["c"], ["c"]],
        "vgg": [["c", "c"], ["p2", "c", "c"], *[["p2", "c", "c", "c"]] * 3],
    }[module.net]
    convs = iter(module.convs)
    stages = []
    for names in layers:
        parts: list[nn.Module] = []
        for name in names:
            parts += [next(convs), nn.ReLU()] if name == "c" else [nn.MaxPool2d(int(name[1]), 2)]
        stages.append(nn.Sequential(*parts))
    return stages


@pytest.mark.parametrize("net", ["alex", "vgg"])
def test_distance_is_the_papers_formula(net):
    torch.manual_seed(0)
    module = LPIPS(net, pretrained=False)
    x, y = images(1), images(2)
    a, b = ((image - module.mean) / module.std for image in (x, y))
    expected = torch.zeros(2)
    for stage, head in zip(plain_stages(module), module.heads):
        a, b = stage(a), stage(b)
        difference = (F.normalize(a, dim=1, eps=1e-10) - F.normalize(b, dim=1, eps=1e-10)) ** 2
        expected = expected + F.conv2d(difference, head.view(1, -1, 1, 1)).mean(dim=(1, 2, 3))
    assert torch.allclose(module(x, y), expected, rtol=1e-4)


@pytest.mark.parametrize("net", ["alex", "vgg"])
def test_convolutions_count_as_published(net):
    module = LPIPS(net, pretrained=False)
    weights = sum(p.numel() for p in module.convs.parameters())
    assert weights == {"alex": 2_469_696, "vgg": 14_714_688}[net]
    assert [len(head) for head in module.heads] == {
        "alex": [64, 192, 384, 256, 256],
        "vgg": [64, 128, 256, 512, 512],
    }[net]
    assert not any(p.requires_grad for p in module.parameters())


def test_zero_for_equal_images_and_symmetric():
    module = LPIPS("alex", pretrained=False)
    x, y = images(3), images(4)
    assert module(x, x).tolist() == [0, 0]
    assert torch.allclose(module(x, y), module(y, x))
    assert (module(x, y) > 0).all()


def test_gradient_descends_and_stays_finite_on_black_images():
    module = LPIPS("alex", pretrained=False)
    for conv in module.convs:
        nn.init.zeros_(conv.bias)  # dead features: the published code's gradient is NaN there
    x = torch.zeros(1, 3, 64, 64) + module.mean
    x.requires_grad_()
    module(x, images(5, 1, 64, 64)).sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()

    y = images(6, 1, 64, 64)
    x = images(7, 1, 64, 64).requires_grad_()
    before = module(x, y)
    (gradient,) = torch.autograd.grad(before.sum(), x)
    assert module(x - 1e-2 * gradient / gradient.abs().max(), y) < before


def test_bad_input_is_refused():
    module = LPIPS("alex", pretrained=False)
    with pytest.raises(ValueError, match="N, 3, H, W"):
        module(images(1), images(1)[:, :1])
    with pytest.raises(InputError, match="unknown LPIPS network"):
        LPIPS("resnet", pretrained=False)


def test_missing_and_foreign_weights_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"fetch_perceptual\.py"):
        LPIPS("alex", tmp_path)
    module = LPIPS("alex", pretrained=False)
    state = {k: v for k, v in module.state_dict().items() if k not in ("mean", "std")}
    save_file(state, tmp_path / BACKBONES["alex"].file)
    with pytest.raises(InputError, match="does not hold"):
        LPIPS("alex", tmp_path)
    (tmp_path / BACKBONES["alex"].file).write_text("half a download")
    with pytest.raises(InputError, match="can't be read as weights"):
        LPIPS("alex", tmp_path)


def test_digest_sees_names_types_and_values():
    one = {"a": torch.ones(2), "b": torch.zeros(3)}
    assert tensor_digest(one) == tensor_digest(dict(reversed(one.items())))
    variants = [
        {"a": torch.ones(2), "c": torch.zeros(3)},
        {"a": torch.ones(2).half(), "b": torch.zeros(3)},
        {"a": torch.ones(1, 2), "b": torch.zeros(3)},
        {"a": torch.ones(2), "b": torch.tensor([0.0, 0.0, 1e-8])},
    ]
    assert len({tensor_digest(v) for v in [one, *variants]}) == 5


@pytest.mark.parametrize(("net", "expected"), [("alex", 0.0962604), ("vgg", 0.0228089)])
def test_published_weights_give_the_reference_package_values(net, expected):
    """Values of the authors' own code (lpips 0.1.4) with the same convolution weights."""
    if not (weights_folder() / BACKBONES[net].file).is_file():
        pytest.skip("no LPIPS weights: run `python tools/fetch_perceptual.py`")
    wave = torch.sin(torch.arange(97 * 131 * 3) * 0.37).view(1, 3, 97, 131)
    other = torch.cos(torch.arange(97 * 131 * 3) * 0.0021).view(1, 3, 97, 131)
    assert LPIPS(net)(wave, 0.8 * wave + 0.2 * other).item() == pytest.approx(expected, rel=1e-4)


# The fetching tool --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("fetch_perceptual", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_unpickler_reads_arrays_and_nothing_else(tool):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert (
        tool.ArrayUnpickler(io.BytesIO(pickle.dumps({"a": array}, protocol=3))).load()["a"] == array
    ).all()
    with pytest.raises(pickle.UnpicklingError, match="refused"):
        tool.ArrayUnpickler(io.BytesIO(pickle.dumps(print))).load()


def test_convert_turns_flax_layout_into_ours(tool):
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(3, 5, 2, 4)).astype(np.float32)  # rows, columns, in, out
    parameters = {"Net_0": {"Conv_0": {"kernel": kernel, "bias": np.ones(4, np.float32)}}}
    parameters |= {f"NetLinLayer_{i}": {"Conv_0": {"kernel": np.full((1, 1, 4, 1), i)}} for i in range(5)}
    tensors = tool.convert(parameters, "Net_0")
    assert tensors["convs.0.weight"].shape == (4, 2, 3, 5)
    assert tensors["convs.0.weight"][3, 1, 2, 4].item() == pytest.approx(kernel[2, 4, 1, 3], rel=1e-3)
    assert tensors["heads.4"].tolist() == [4, 4, 4, 4]
