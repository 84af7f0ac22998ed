"""Packed linear layers: what plain ones give, and a loaded model that is made of them."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from recavsr.fused import gelu_linear, in_pieces, silu_linear, swiglu_linear
from recavsr.onednn import PackedLinear, has_packed_products, pack_linears
from recavsr.stream import load as loading
from recavsr.stream.load import load
from recavsr.stream.session import Session

needs_operators = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this PyTorch is built without oneDNN"
)


def close(made: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)


@needs_operators
@torch.no_grad()
@pytest.mark.parametrize("shape", [(7, 32), (2, 5, 3, 32)])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_layer_gives_what_a_plain_one_gives(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    plain, x = nn.Linear(32, 48, bias=bias), torch.randn(*shape)
    packed = PackedLinear(plain, 100)  # laid out for another number of rows
    close(packed(x), plain(x))
    close(silu_linear(packed, x), F.silu(plain(x)))
    close(gelu_linear(packed, x), F.gelu(plain(x), approximate="tanh"))


@needs_operators
@torch.no_grad()
def test_a_packed_swiglu_and_what_goes_in_pieces() -> None:
    torch.manual_seed(0)
    gate, up, down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
    x = torch.randn(3, 5000, 32)
    wanted = down(F.silu(gate(x)) * up(x))
    close(in_pieces(lambda rows: swiglu_linear(gate, up, rows), down, x, 1 << 20), wanted)
    one, two, three = (PackedLinear(layer, 4096) for layer in (gate, up, down))
    close(in_pieces(lambda rows: swiglu_linear(one, two, rows), three, x, 1 << 20), wanted)


@needs_operators
def test_all_plain_linear_layers_of_a_model_are_packed_and_its_frames_stay() -> None:
    frames = np.random.default_rng(0).integers(0, 256, (29, 32, 48, 3), np.uint8)
    pictures = []
    for packed in (False, True):
        model: Any = load("nano", device="cpu", precision="fp32")
        before = model.fingerprint
        if packed:
            pack_linears(model.generator, 4096)
            pack_linears(model.decoder, 4096)
            layers = [*model.generator.modules(), *model.decoder.modules()]
            assert not [layer for layer in layers if type(layer) is nn.Linear]
            assert sum(isinstance(layer, PackedLinear) for layer in layers) > 60
        assert model.fingerprint == before
        session = Session(model, (32, 48), (128, 192))
        pictures.append(np.concatenate(session.push(frames)))
    assert np.abs(pictures[0].astype(int) - pictures[1]).max() <= 1


def test_a_model_in_bfloat16_is_packed_where_that_works() -> None:
    for precision in ("bf16", "fp32"):
        model: Any = load("nano", device="cpu", precision=precision)
        packed = any(isinstance(layer, PackedLinear) for layer in model.decoder.modules())
        assert packed == (precision == "bf16" and has_packed_products())


@pytest.mark.parametrize(
    ("precision", "memory", "parts"), [("bf16", None, 2), ("fp32", None, 0), ("bf16", 1, 0)]
)
def test_what_is_packed_when_a_model_is_loaded(
    precision: str, memory: int | None, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any machine: only bfloat16, and nothing while layers wait in main memory."""
    packed: list[nn.Module] = []
    monkeypatch.setattr(loading, "has_packed_products", lambda: True)
    monkeypatch.setattr(loading, "pack_linears", lambda part, rows: packed.append(part))
    if memory is not None:
        monkeypatch.setattr(loading, "_resident_layers", lambda *_: (False,) * 6)
    model: Any = load("nano", device="cpu", precision=precision, memory=memory)
    assert packed == [model.generator, model.decoder][:parts]


@pytest.mark.skipif(not has_packed_products(), reason="no packed products of bfloat16 on this machine")
def test_packed_products_of_bfloat16_are_as_near_to_float32_as_plain_ones() -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        exact, x = nn.Linear(256, 512), torch.randn(3000, 256).bfloat16()
        plain = nn.Linear(256, 512, dtype=torch.bfloat16)
        plain.load_state_dict(exact.state_dict())
        exact.load_state_dict(plain.state_dict())
        wanted = F.silu(exact(x.float()))
        errors = [
            (made.float() - wanted).abs().mean()
            for made in (F.silu(plain(x)), silu_linear(PackedLinear(plain, 3000), x))
        ]
    assert errors[1] < 1.1 * errors[0]


@needs_operators
def test_the_trial_finds_right_and_wrong_operators_and_draws_no_random_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On any machine: in float32 the operators work everywhere."""
    monkeypatch.setattr(torch, "bfloat16", torch.float32)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    drawn = torch.random.get_rng_state()
    assert has_packed_products.__wrapped__()
    assert torch.equal(torch.random.get_rng_state(), drawn)
    monkeypatch.setattr(PackedLinear, "times", lambda self, x, other: 1.1 * other * self(x))
    assert not has_packed_products.__wrapped__()


def test_operators_that_are_gone_or_wrong_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Operators:
        def _is_mkldnn_bf16_supported(self) -> bool:
            return True

        def _reorder_linear_weight(self, weight: torch.Tensor, rows: int) -> torch.Tensor:
            return weight

    for faults in ({}, {"_linear_pointwise": lambda *_: (_ for _ in ()).throw(RuntimeError("no"))}):
        operators = Operators()
        for name, value in faults.items():
            setattr(operators, name, value)
        monkeypatch.setattr(torch.ops, "mkldnn", operators)
        assert not has_packed_products.__wrapped__()


def test_no_compiler_is_imported_to_load_and_run_a_model() -> None:
    """PyTorch's compiler takes a second to import, and several of its functions import it."""
    code = (
        "import sys, numpy, recavsr\n"
        "from recavsr.stream.session import Session\n"
        "model = recavsr.load('nano', device='cpu', precision='fp32')\n"
        "Session(model, (16, 16), (64, 64)).push(numpy.zeros((21, 16, 16, 3), numpy.uint8))\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"torch._dynamo", "torch._inductor", "sympy"}
