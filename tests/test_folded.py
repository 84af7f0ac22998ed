"""The folded generator computes what the plain one computes, from fewer weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from recavsr.errors import InputError
from recavsr.fp8 import Float8Rows, FP8Linear, quantize_rows
from recavsr.geometry import BlockPlan
from recavsr.models import folded as folded_module
from recavsr.models.folded import FoldedGenerator, fold
from recavsr.models.generator import Generator, GeneratorState, teacher_forced_recycled
from recavsr.models.weights import ModelFolder, save_model_folder
from recavsr.stream.load import load
from tiny import CHANNELS, STRIDE, one_thread, tiny_decoder, tiny_generator, tiny_prompt

PLAN = BlockPlan()
BLOCKS = 4


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread(), torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def plain() -> Generator:
    return tiny_generator().requires_grad_(False)


@pytest.fixture(scope="module")
def folded(plain: Generator) -> FoldedGenerator:
    return fold(plain.config, plain.state_dict().__getitem__, tiny_prompt(), torch.float32)


def block_inputs(index: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(index)
    noise = torch.randn(1, CHANNELS, PLAN.latents(index), 4, 6, generator=random)
    lr_frames = torch.rand(1, 3, PLAN.frames(index), 4 * STRIDE, 6 * STRIDE, generator=random) * 2 - 1
    return noise, lr_frames.to(dtype)


def roll_out(
    generator: Generator, dtype: torch.dtype = torch.float32, blocks: int = BLOCKS
) -> tuple[GeneratorState, Tensor]:
    state, latents = generator.start(), []
    condition = generator.condition(tiny_prompt())
    for index in range(blocks):
        state, block = generator.step(state, condition, *block_inputs(index, dtype))
        latents.append(block)
    return state, torch.cat(latents, dim=2)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b).square().mean().sqrt() / b.square().mean().sqrt())


def test_a_folded_stream_is_the_plain_one(plain: Generator, folded: FoldedGenerator) -> None:
    _, wanted = roll_out(plain)
    _, latents = roll_out(folded)
    torch.testing.assert_close(latents, wanted, atol=2e-5, rtol=0)


def test_states_are_the_same_in_both_forms(plain: Generator, folded: FoldedGenerator) -> None:
    """A stream that the plain form began goes on in the folded one."""
    state, _ = roll_out(plain, blocks=2)
    results = []
    for generator in (plain, folded):
        _, latents = generator.step(state.clone(), generator.condition(tiny_prompt()), *block_inputs(2))
        results.append(latents)
    torch.testing.assert_close(results[1], results[0], atol=2e-5, rtol=0)


def test_whole_clips_are_the_same(plain: Generator, folded: FoldedGenerator) -> None:
    random = torch.Generator().manual_seed(3)
    noisy = torch.randn(1, CHANNELS, 8, 4, 6, generator=random)
    lr_frames = torch.rand(1, 3, 29, 4 * STRIDE, 6 * STRIDE, generator=random)
    recycled = teacher_forced_recycled(noisy, PLAN)
    a, b = (
        generator(generator.condition(tiny_prompt()), noisy, lr_frames, recycled, PLAN)
        for generator in (plain, folded)
    )
    torch.testing.assert_close(b, a, atol=2e-5, rtol=0)


def test_bfloat16_is_no_further_off_than_the_plain_form(plain: Generator) -> None:
    _, exact = roll_out(plain)
    half = tiny_generator().bfloat16().requires_grad_(False)
    plain_error = relative(_roll_in_half(half), exact)
    folded = fold(plain.config, plain.state_dict().__getitem__, tiny_prompt(), torch.bfloat16)
    assert {p.dtype for p in folded.parameters()} == {torch.bfloat16}
    folded_error = relative(roll_out(folded, torch.bfloat16)[1], exact)
    assert 0 < folded_error < 1.25 * plain_error


def _roll_in_half(generator: Generator) -> Tensor:
    state, latents = generator.start(), []
    condition = generator.condition(tiny_prompt().bfloat16())
    for index in range(BLOCKS):
        state, block = generator.step(state, condition, *block_inputs(index, torch.bfloat16))
        latents.append(block)
    return torch.cat(latents, dim=2)


def test_what_is_constant_is_not_kept(plain: Generator, folded: FoldedGenerator) -> None:
    width, layers = plain.config.width, plain.config.layers
    gone = sum(p.numel() for p in plain.embedding.parameters())
    text_projections, norms = 2 * width * (width + 1), width + 2 * width  # cross k, v; norm_k, cross_norm
    gone += layers * (text_projections + norms + 6 * width)
    gone += 2 * width  # the head's modulation
    patch = CHANNELS * plain.config.patch**2
    gone += width * (width + 1) - width * patch  # S becomes as wide as P
    kept = sum(p.numel() for p in folded.parameters())
    assert kept == sum(p.numel() for p in plain.parameters()) - gone


def test_another_prompt_or_time_is_refused(folded: FoldedGenerator) -> None:
    with pytest.raises(ValueError, match="another prompt"):
        folded.condition(tiny_prompt() + 1)
    with pytest.raises(ValueError, match="another prompt"):
        folded.condition(tiny_prompt(), 500.0)


@pytest.fixture(scope="module")
def folder(plain: Generator, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    decoder = tiny_decoder()
    vae = {
        "latents_mean": list(decoder.config.latents_mean),
        "latents_std": list(decoder.config.latents_std),
        "scale_factor_spatial": STRIDE,
    }
    save_model_folder(path, plain, decoder, tiny_prompt(), vae, torch.float32)
    return path


def test_a_folder_loads_folded_in_bfloat16_and_plain_in_float32(plain: Generator, folder: Path) -> None:
    assert type(load(folder, device="cpu", precision="fp32").generator) is Generator  # type: ignore[attr-defined]
    model = load(folder, device="cpu", precision="bf16")
    assert isinstance(model.generator, FoldedGenerator)  # type: ignore[attr-defined]
    _, frames = model.step(model.start(32, 48), block_inputs(0)[1])
    wanted = load(folder, device="cpu", precision="fp32")
    _, exact = wanted.step(wanted.start(32, 48), block_inputs(0)[1])
    assert relative(frames, exact) < 0.05


def test_a_folder_that_does_not_fit_is_refused(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in folder.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(broken / "transformer.safetensors")
    del tensors["blocks.2.attn1.to_q.weight"]
    save_file(tensors, broken / "transformer.safetensors")
    opened = ModelFolder.open(broken)
    with pytest.raises(InputError, match=r"missing blocks\.2\.attn1\.to_q\.weight"):
        opened.load_folded(opened.load_prompt(), torch.bfloat16)


def test_a_folder_with_unmerged_lora_is_refused(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "transformer.safetensors")
    tensors["blocks.0.attn1.to_q.lora_A.weight"] = torch.zeros(1)
    save_file(tensors, tmp_path / "transformer.safetensors")
    opened = ModelFolder.open(tmp_path)
    with pytest.raises(InputError, match="LoRA"):
        opened.load_folded(opened.load_prompt(), torch.bfloat16)


def test_long_blocks_in_pieces_and_states_in_place(
    folded: FoldedGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of a few rows, keys and values forgotten at once, and states written over change nothing."""
    condition, results = folded.condition(tiny_prompt()), []
    for rows, in_place in ((1 << 14, False), (10, True)):
        monkeypatch.setattr(folded_module, "PIECE_ROWS", rows)
        state = folded.start()
        for index in range(BLOCKS):
            state, latents = folded.step(state, condition, *block_inputs(index), in_place)
            results.append(latents)
    for wanted, made in zip(results[:BLOCKS], results[BLOCKS:], strict=True):
        torch.testing.assert_close(made, wanted, atol=2e-5, rtol=1e-4)


def test_float8_feed_forward_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    up, down = (FP8Linear(torch.randn(*shape), torch.randn(shape[0])) for shape in ((64, 32), (32, 64)))
    layer, x = folded_module.FoldedFeedForward(up, down), torch.randn(1, 5, 7, 32).bfloat16()
    rows = Float8Rows(*quantize_rows(x.flatten(0, -2)), x.shape)
    wanted = layer(rows)
    monkeypatch.setattr(folded_module, "PIECE_ROWS", 8)
    torch.testing.assert_close(layer(rows), wanted)
