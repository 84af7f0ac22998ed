"""Adapters: what they compute, how many there are, merging, saving, and gradients with checkpointing."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from recavsr.cli.main import run
from recavsr.errors import InputError
from recavsr.geometry import BlockPlan
from recavsr.models.generator import Generator, teacher_forced_recycled
from recavsr.models.lora import (
    TARGETS,
    LoRALinear,
    adapted,
    attach,
    load_adapters,
    merge,
    save_adapters,
    trained_tensors,
)
from recavsr.models.presets import recavsr_5b
from recavsr.models.weights import ModelFolder
from test_weights import write
from tiny import CHANNELS, STRIDE, tiny_generator, tiny_prompt

PLAN = BlockPlan(first=2, rest=1)


def predict(generator: Generator, dtype: torch.dtype = torch.float32) -> Tensor:
    rng = torch.Generator().manual_seed(3)
    latents = torch.randn(1, CHANNELS, 4, 4, 4, generator=rng)
    lr_frames = torch.rand(1, 3, 13, 4 * STRIDE, 4 * STRIDE, generator=rng).to(dtype)
    condition = generator.condition(tiny_prompt().to(dtype), 500.0)
    return generator(condition, latents, lr_frames, teacher_forced_recycled(latents, PLAN), PLAN)


def with_adapters(rank: int = 4, alpha: float = 8.0) -> Generator:
    generator = tiny_generator()
    attach(generator, rank, alpha)
    torch.manual_seed(9)
    with torch.no_grad():
        for _, layer in adapted(generator):
            layer.lora_B.weight.normal_(std=0.3)
    return generator


def test_a_layer_by_its_definition() -> None:
    base = nn.Linear(5, 7)
    layer, x = LoRALinear(base, 3, 6.0), torch.randn(2, 4, 5)
    assert torch.equal(layer(x), base(x))
    nn.init.normal_(layer.lora_B.weight)
    a, b = layer.lora_A.weight, layer.lora_B.weight
    wanted = torch.einsum("oi,bti->bto", base.weight + 2.0 * torch.einsum("or,ri->oi", b, a), x) + base.bias
    assert torch.allclose(layer(x), wanted, atol=1e-5)
    assert torch.allclose(layer.merged()(x), wanted, atol=1e-5)


def test_attaching_changes_nothing_yet_and_trains_the_right_parts() -> None:
    generator = tiny_generator()
    names = attach(generator, 4)
    assert len(names) == generator.config.layers * 10
    with torch.no_grad():
        assert torch.equal(predict(generator), predict(tiny_generator()))
    predict(generator).square().mean().backward()
    trained = {name for name, p in generator.named_parameters() if p.grad is not None}
    assert trained == {name for name, p in generator.named_parameters() if p.requires_grad}
    assert {name.split(".")[0] for name in trained} == {"blocks", "lr_projector", "recycle_projection"}
    assert all(".lora_" in name for name in trained if name.startswith("blocks"))


def test_parameters_of_the_paper() -> None:
    with torch.device("meta"):
        generator = Generator(recavsr_5b())
        names = attach(generator)
    assert len(names) == 300
    width, ffn = 3072, 14336
    per_layer = 512 * (8 * (width + width) + 2 * (width + ffn))
    adapters = sum(p.numel() for n, p in generator.named_parameters() if ".lora_" in n)
    assert adapters == 30 * per_layer == 1_289_748_480
    trained = sum(p.numel() for p in generator.parameters() if p.requires_grad)
    projections = 5_301_793_984 - 4_999_787_712  # the released generator has them, Wan does not
    assert trained == adapters + projections


def test_targets_that_fit_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="no linear layer is called head2"):
        attach(tiny_generator(), 4, targets=("ffn.up", "head2"))
    with pytest.raises(ValueError, match="already"):
        attach(with_adapters())


def test_merging() -> None:
    generator = with_adapters()
    with torch.no_grad():
        wanted = predict(generator)
        assert not torch.allclose(wanted, predict(tiny_generator()), atol=1e-3)
        twin = copy.deepcopy(generator)
        merged = merge(generator)
        assert torch.allclose(predict(merged), wanted, atol=1e-5)
    assert set(merged.state_dict()) == set(tiny_generator().state_dict())
    again = merge(twin).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in merged.state_dict().items())


def test_merging_rounds_once() -> None:
    base = nn.Linear(64, 64, dtype=torch.bfloat16)
    layer = LoRALinear(base, 8, 8.0)
    assert layer.lora_A.weight.dtype == torch.float32
    assert torch.equal(layer.merged().weight, base.weight)
    nn.init.normal_(layer.lora_B.weight, std=0.02)
    exact = base.weight.double() + layer.lora_B.weight.double() @ layer.lora_A.weight.double()
    merged = layer.merged().weight
    assert merged.dtype == torch.bfloat16
    near = exact.float().bfloat16()
    assert (
        merged != near
    ).float().mean() < 1e-3  # float32 sums at a rounding border may fall on the other side


def test_saving_and_loading(tmp_path: Path) -> None:
    generator, path = with_adapters(), tmp_path / "adapters.safetensors"
    with torch.no_grad():
        generator.recycle_projection.weight.add_(0.1)
    save_adapters(generator, path)
    names = set(load_file(str(path)))
    assert "blocks.3.attn2.to_out.0.lora_B.weight" in names
    assert "blocks.0.ffn.net.0.proj.lora_A.weight" in names
    assert "sr_proj.weight" in names
    assert names == set(trained_tensors(generator))
    other = tiny_generator()
    load_adapters(other, path)
    assert next(adapted(other))[1].scale == 2.0
    with torch.no_grad():
        assert torch.equal(predict(other), predict(generator))
    assert {n for n, p in other.named_parameters() if p.requires_grad} == {
        n for n, p in generator.named_parameters() if p.requires_grad
    }


def test_adapter_files_that_do_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "adapters.safetensors"
    with pytest.raises(InputError, match="can not be read"):
        load_adapters(tiny_generator(), path)
    save_file({"a": torch.ones(1)}, str(path))
    with pytest.raises(InputError, match="names no rank"):
        load_adapters(tiny_generator(), path)
    with pytest.raises(ValueError, match="no adapters"):
        save_adapters(tiny_generator(), path)
    torch.manual_seed(0)
    larger = tiny_generator()
    larger.blocks.append(copy.deepcopy(larger.blocks[0]))
    attach(larger, 4)
    save_adapters(larger, path)
    with pytest.raises(InputError, match=r"unexpected blocks\.4\..* and 15 more"):
        load_adapters(tiny_generator(), path)


def test_merged_into_a_folder(tmp_path: Path, capsys) -> None:
    """The whole way round: train-like change, adapters alone, merge, strict load, same numbers."""
    base = write(tmp_path / "base")
    generator = with_adapters()
    save_adapters(generator, tmp_path / "adapters.safetensors")
    arguments = ["convert", "lora", str(base), str(tmp_path / "adapters.safetensors")]
    assert run([*arguments, "-o", str(tmp_path / "new"), "--precision", "fp32"]) == 0
    assert "40 layers" in capsys.readouterr().err
    folder = ModelFolder.open(tmp_path / "new")
    with torch.no_grad():
        assert torch.allclose(predict(folder.load_generator()), predict(generator), atol=1e-5)
    assert run([*arguments, "-o", str(tmp_path / "new")]) == 2
    assert run([*arguments, "-o", str(tmp_path / "half")]) == 0
    tensors = load_file(str(tmp_path / "half" / "transformer.safetensors"))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_with_checkpointing(dtype: torch.dtype) -> None:
    """Base in bfloat16, adapters in float32, activations thrown away and made again: the same gradients."""
    gradients = []
    for again in (False, True):
        generator = tiny_generator().to(dtype)
        attach(generator, 4)
        torch.manual_seed(9)
        for _, layer in adapted(generator):
            nn.init.normal_(layer.lora_A.weight)
            nn.init.normal_(layer.lora_B.weight, std=0.1)
        if again:
            for block in generator.blocks:
                plain = block.forward
                block.forward = lambda *x, plain=plain: checkpoint(plain, *x, use_reentrant=False)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            predict(generator, dtype).square().mean().backward()
        gradients.append({n: p.grad for n, p in generator.named_parameters() if p.requires_grad})
    plain, remade = gradients
    assert plain.keys() == remade.keys()
    for name, gradient in plain.items():
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, remade[name]), name
    assert sum(g.count_nonzero().item() > 0 for g in plain.values()) == len(plain)
    assert len(plain) > 2 * 4 * len(TARGETS)
