"""Float8 layers: what rounding costs, against exact arithmetic on the rounded values."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from recavsr.fp8 import FLOAT8, FP8Linear, quantize_rows, why_no_fp8
from tiny import one_thread


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def test_every_row_uses_the_whole_range() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 64) * torch.tensor([1e-4, 1.0, 300.0, 0.0, 1e4])[:, None]
    values, scale = quantize_rows(x)
    assert values.dtype == FLOAT8
    largest = values.float().abs().amax(dim=1)
    assert largest.tolist() == [448.0, 448.0, 448.0, 0.0, 448.0]
    # Three bits after the leading one: half a step is 1/16 of the value at most.
    error = (values.float() * scale - x).abs()
    assert bool((error <= x.abs() / 16 + scale * 2**-10).all())
    values, scale = quantize_rows(x.bfloat16())
    assert values.float().isfinite().all()
    error = (values.float() * scale - x.bfloat16()).abs()
    assert bool((error <= x.abs() * (1 / 16 + 1 / 128) + scale * 2**-10).all())


@pytest.mark.parametrize("shape", [(3, 32), (2, 5, 3, 32)])
def test_a_layer_is_exact_on_rounded_values(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(32, 48).requires_grad_(False)
    layer = FP8Linear(plain.weight.data, plain.bias.data)
    x = torch.randn(shape).bfloat16()
    values, scale = quantize_rows(x.flatten(0, -2))
    weight, weight_scale = quantize_rows(plain.weight.data)
    exact = (values.double() * scale) @ (weight.double() * weight_scale).t() + plain.bias.data.bfloat16()
    out = layer(x)
    assert out.shape == (*shape[:-1], 48)
    assert out.dtype == torch.bfloat16
    assert relative(out.flatten(0, -2), exact) < 4e-3  # bfloat16 results
    assert 0.01 < relative(out, plain(x.float())) < 0.06  # what float8 costs


def test_a_weight_takes_a_byte_and_travels_in_a_state_dict() -> None:
    plain = nn.Linear(32, 48).requires_grad_(False)
    layer = FP8Linear(plain.weight.data, plain.bias.data)
    assert layer.weight.element_size() == 1
    other = FP8Linear(torch.zeros(48, 32), torch.zeros(48))
    other.load_state_dict(layer.state_dict())
    x = torch.randn(4, 32).bfloat16()
    assert torch.equal(other(x), layer(x))


def test_old_cards_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_no_fp8(torch.device("cpu")) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old Card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "Old Card" in str(why_no_fp8(torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert why_no_fp8(torch.device("cuda")) is None
    assert why_no_fp8(torch.device("mps")) is not None
