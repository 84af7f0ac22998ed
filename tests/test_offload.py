"""Layers that travel compute the same pixels; the plan counts what is there and keeps to its budget."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recavsr.attention import SpatialWindow, plan_window, windowed_attention
from recavsr.errors import InputError
from recavsr.fp8 import FP8Linear
from recavsr.geometry import BlockPlan, Grid
from recavsr.models.folded import FoldedGenerator, MakeLinear, fold
from recavsr.models.offload import SLOTS, StreamedLayers, tensors_of
from recavsr.models.presets import recavsr_5b, recavsr_5b_decoder
from recavsr.models.weights import ModelFolder
from recavsr.stream.engine import Progress, upscale
from recavsr.stream.load import load, model_folder
from recavsr.stream.memory import ALLOWANCE, MemoryPlan, parse_memory, plan_memory
from recavsr.stream.step import ReCaVSR
from recavsr.video.clips import write_clip
from tiny import GENERATOR, STRIDE, one_thread, tiny_decoder, tiny_generator, tiny_prompt

PLAN = BlockPlan()


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread(), torch.inference_mode():
        yield


def tiny(resident: tuple[bool, ...] | None, make: MakeLinear | None = None) -> ReCaVSR:
    generator = fold(
        GENERATOR, tiny_generator().state_dict().__getitem__, tiny_prompt(), torch.bfloat16, make, resident
    )
    return ReCaVSR("tiny", generator, tiny_decoder().bfloat16().requires_grad_(False), tiny_prompt())


def frames_of(model: ReCaVSR, height: int, width: int, blocks: int) -> Tensor:
    random = torch.Generator().manual_seed(0)
    state, frames = model.start(height, width), []
    for index in range(blocks):
        lr_frames = torch.rand(1, 3, PLAN.frames(index), height, width, generator=random) * 2 - 1
        state, made = model.step(state, lr_frames)
        frames.append(made)
    return torch.cat(frames, dim=2)


@pytest.mark.parametrize("make", [None, FP8Linear], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    "resident", [(False,) * 4, (True, False, True, False), (False, True, True, True)], ids=str
)
def test_the_pixels_are_the_same(resident: tuple[bool, ...], make: MakeLinear | None) -> None:
    wanted = frames_of(tiny(None, make), 4 * STRIDE, 6 * STRIDE, 3)
    model = tiny(resident, make)
    assert isinstance(model.generator.blocks, StreamedLayers)
    assert torch.equal(frames_of(model, 4 * STRIDE, 6 * STRIDE, 3), wanted)


def test_streams_in_several_threads_do_not_meet() -> None:
    model = tiny((False,) * 4)
    wanted = frames_of(model, 4 * STRIDE, 6 * STRIDE, 2)

    def same(_: int) -> bool:
        with torch.inference_mode():
            return all(torch.equal(frames_of(model, 4 * STRIDE, 6 * STRIDE, 2), wanted) for _ in range(3))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(3) as threads:
            assert all(threads.map(same, range(3)))
    finally:
        sys.setswitchinterval(before)


def test_travelling_layers_compute_in_two_places() -> None:
    generator = tiny((False, True, False, False)).generator
    layers = generator.blocks
    assert isinstance(layers, StreamedLayers)
    assert len(layers) == 4
    seen = []
    for index, layer in enumerate(layers):
        seen.append(layer)
        for own, used in zip(tensors_of(layers.layers[index]), tensors_of(layer), strict=True):
            assert torch.equal(own, used)
    assert seen[1] is layers.layers[1]
    travelled = [seen[0], seen[2], seen[3]]
    assert len({id(layer) for layer in travelled}) == SLOTS
    assert not any(layer is own for layer in travelled for own in layers.layers)


@pytest.mark.gpu
def test_on_a_card_too() -> None:
    """Copies on their own stream must not overtake the work that still reads a slot."""
    torch.manual_seed(0)
    config = replace(
        GENERATOR, layers=12, schedule=replace(GENERATOR.schedule, actions=GENERATOR.schedule.actions * 3)
    )
    config = replace(config, heads=8, head_width=64, ffn_width=2048)
    weights = tiny_generator(config).state_dict().__getitem__
    prompt = tiny_prompt().cuda()
    outs = []
    for resident in (None, (False, True, False) * 4):
        generator = fold(config, weights, prompt, torch.bfloat16, None, resident)
        decoder = tiny_decoder().bfloat16().cuda().requires_grad_(False)
        model = ReCaVSR("tiny", generator, decoder, prompt)
        state, latents = model.start(16 * STRIDE, 24 * STRIDE), []
        for index in range(4):
            lr_frames = torch.zeros(1, 3, PLAN.frames(index), 16 * STRIDE, 24 * STRIDE, device="cuda")
            state, frames = model.step(state, lr_frames)
            latents.append(frames)
        outs.append(torch.cat(latents, dim=2))
    assert torch.equal(*outs)


# ------------------------------------------------------------------------------------------------ the plan


def plan_5b(budget: float, size: tuple[int, int] = (1088, 1920), weight: int = 2) -> MemoryPlan:
    return plan_memory(recavsr_5b(), recavsr_5b_decoder(), size, PLAN, int(budget), 512, 2, weight)


@pytest.mark.parametrize("budget", [8e9, 12e9, 16e9, 80e9])
def test_a_plan_keeps_to_its_budget_and_uses_it(budget: float) -> None:
    plan = plan_5b(budget)
    assert plan.peak <= budget
    if not plan.all_stay:  # one layer more would not fit, up to the two places of travelling ones
        assert plan.peak + plan.layer > budget or sum(plan.resident) >= len(plan.resident) - SLOTS
        gaps = [index for index, stays in enumerate(plan.resident) if stays]
        assert all(b - a <= 30 / len(gaps) + 1 for a, b in pairwise(gaps))
    assert plan_5b(80e9).all_stay


def test_on_a_card_nothing_is_gathered_or_joined() -> None:
    for weight, peak in ((2, 12.39e9), (1, 8.10e9)):  # measured on an H200
        sizes = (recavsr_5b(), recavsr_5b_decoder(), (1088, 1920), PLAN, 10**11, 512, 2, weight)
        card, plain = plan_memory(*sizes, kernels=True), plan_memory(*sizes)
        assert peak <= card.peak - ALLOWANCE <= 1.08 * peak
        assert card.held == plain.held
        assert card.peak < plain.peak
    cheap = plan_memory(*sizes[:4], int(8e9), *sizes[5:], kernels=True)
    assert sum(cheap.resident) > sum(plan_5b(8e9, weight=1).resident)


def test_a_smaller_budget_keeps_fewer_layers() -> None:
    staying = [sum(plan_5b(budget).resident) for budget in (8e9, 10e9, 12e9, 14e9, 30e9)]
    assert staying == sorted(staying)
    assert staying[0] < staying[-1] == 30
    assert sum(plan_5b(8e9, weight=1).resident) > staying[0]


def test_too_little_is_refused_with_what_is_needed() -> None:
    with pytest.raises(InputError, match=r"memory 2\.00 GB is too little at 1920x1088: \d+\.\d\d GB"):
        plan_5b(2e9)


@pytest.mark.parametrize(("make", "weight"), [(None, 2), (FP8Linear, 1)])
def test_weights_are_counted_as_they_are(make: MakeLinear | None, weight: int) -> None:
    model = tiny(None, make)
    generator, decoder = model.generator, model.decoder
    assert isinstance(generator, FoldedGenerator)
    plan = plan_memory(GENERATOR, decoder.config, (64, 96), PLAN, 10**10, 3, 2, weight)

    def size(module: nn.Module) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(module))

    layers = list(generator.blocks)  # type: ignore[call-overload]
    assert {size(layer) for layer in layers} == {plan.layer}
    rest = size(generator) - sum(map(size, layers)) + sum(p.numel() * 2 for p in decoder.parameters())
    assert plan.held["projector, ends and decoder"] == pytest.approx(rest, rel=0.02)
    constants = [t for c in model.condition.layers for t in (c.cross_keys, c.cross_values)]
    assert plan.held["prompt"] == sum(t.numel() * t.element_size() for t in constants)
    state = model.start(64, 96)
    for index in range(12):
        state, _ = model.step(state, torch.zeros(1, 3, PLAN.frames(index), 64, 96))
    moments = plan.moments
    counted = moments["attention of a later block"] - _later_attention_without_state(plan)
    assert state.nbytes <= counted <= 1.1 * state.nbytes


def _later_attention_without_state(plan: MemoryPlan) -> int:
    """Count by hand what the test above needs: 8 frames, and attention of 2 latents on a 8 x 12 grid."""
    frames = 3 * 64 * 96 * 8 * (4 + 2)
    cells, width, seen = (64 // STRIDE) * (96 // STRIDE), GENERATOR.width, 2 + 6
    tiles = plan_window(Grid(64 // STRIDE, 96 // STRIDE), GENERATOR.window, torch.device("cpu")).tiling
    assert tiles is not None
    joined = 2 * 2 * seen * cells * width
    gathered = 2 * 2 * seen * width * tiles.key_cells.numel()
    return frames + 2 * cells * width * 32 + joined + gathered


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GB", 8 * 10**9), ("7.5 gb", 7_500_000_000), ("800MB", 8 * 10**8), ("1GiB", 2**30), (5, 5)],
)
def test_memory_sizes(text: str | int, size: int) -> None:
    assert parse_memory(text) == size


@pytest.mark.parametrize("text", ["8", "GB", "eight GB", "8 apples", "-1GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="like 8GB"):
        parse_memory(text)
    with pytest.raises(InputError, match="like 8GB"):
        load("identity", device="cpu", memory=text)


# --------------------------------------------------------------------------------------------- in use


def budget_for_nano(staying: int, size: tuple[int, int]) -> int:
    folder = ModelFolder.open(model_folder("nano"))
    tokens = folder.load_prompt().shape[1]
    plan = plan_memory(folder.generator, folder.decoder, size, PLAN, 10**11, tokens, 2, 2)
    return plan.peak - (folder.generator.layers - staying - SLOTS) * plan.layer


def test_nano_within_a_budget_gives_its_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    # Layers that travel are not packed, and packed ones round otherwise on some processors.
    monkeypatch.setattr("recavsr.stream.load.has_packed_products", lambda: False)
    size = (64, 96)
    told: list[str] = []
    budget = budget_for_nano(2, size)
    options = {"device": "cpu", "precision": "bf16"}
    model = load("nano", memory=budget, out_size=size, tell=told.append, **options)  # type: ignore[arg-type]
    assert isinstance(model, ReCaVSR)
    assert isinstance(model.generator.blocks, StreamedLayers)
    assert sum(model.generator.blocks.resident) == 2
    assert "2 of 6 layers stay on the device, 4 travel" in told[0]
    resident = load("nano", **options)  # type: ignore[arg-type]
    assert isinstance(resident, ReCaVSR)
    assert torch.equal(frames_of(model, *size, 2), frames_of(resident, *size, 2))


def test_a_run_says_its_plan_before_it_starts(tmp_path: Path) -> None:
    write_clip(tmp_path / "in.mp4", np.full((3, 16, 24, 3), 90, np.uint8), 25)
    said: list[Progress] = []
    upscale(
        tmp_path / "in.mp4",
        tmp_path / "out.mp4",
        device="cpu",
        precision="bf16",
        memory=budget_for_nano(3, (64, 96)),
        progress=said.append,
    )
    notes = [state.note for state in said if state.note]
    assert "3 of 6 layers stay" in notes[0]
    assert [state.stage for state in said].index("upscaling") > max(i for i, s in enumerate(said) if s.note)


@pytest.mark.parametrize("window", [SpatialWindow(4, 4), SpatialWindow(4, 4, stride=2)])
def test_attention_in_pieces_is_the_same(window: SpatialWindow, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    grid = Grid(18, 20)
    query = torch.randn(1, 2, grid.cells, 2, 1, 8)
    key, value = torch.randn(2, 1, 2, grid.cells, 3, 8)
    plan = plan_window(grid, window, query.device)
    whole = windowed_attention(query, key, value, plan)
    monkeypatch.setattr("recavsr.attention._GATHER_BYTES", 1 << 14)
    torch.testing.assert_close(windowed_attention(query, key, value, plan), whole, atol=1e-6, rtol=0)


def test_a_long_first_block_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = frames_of(tiny(None), 4 * STRIDE, 6 * STRIDE, 2)
    monkeypatch.setattr("recavsr.models.lr_projector.PIECE_FRAMES", 100)
    monkeypatch.setattr("recavsr.models.decoder.PIECE_LATENTS", 100)
    whole = frames_of(tiny(None), 4 * STRIDE, 6 * STRIDE, 2)
    assert float((pieces - whole).square().mean().sqrt()) < 2e-3  # bfloat16 sums in another order
