"""The counted memory plan against what autograd really keeps, at small width; parameters at full size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from recavsr.attention import SpatialWindow, plan_window
from recavsr.cache_policy import CacheAction, Schedule
from recavsr.geometry import BlockPlan, Grid
from recavsr.models.dit_block import DiTBlock
from recavsr.models.generator import Generator
from recavsr.models.kv_history import KVHistory
from recavsr.models.lora import attach
from recavsr.models.lr_projector import LRProjector, LRProjectorState
from recavsr.models.presets import recavsr_5b
from recavsr.rope import AxisSplit, rotation_table
from recavsr.training.memory_plan import (
    STAGE1,
    STAGE2,
    WAN_DECODER_BYTES,
    WAN_DECODER_HISTORY,
    ParameterCount,
    TrainingSetup,
    adapter_casts,
    layer_activations,
    msq_parameters,
    plan_stage1,
    plan_stage2,
    projector_activations,
    seen_keys,
)

CONFIG = replace(recavsr_5b(), heads=2, head_width=48, ffn_width=416, lr_hidden=(32, 48))
RANK, PROMPT, GRID, CPU = 8, 7, Grid(5, 9), torch.device("cpu")
WINDOW = plan_window(GRID, SpatialWindow(5, 9), CPU)


def kept(module: nn.Module, compute: Callable[[], object], constants: list[Tensor]) -> int:
    """Return the bytes that autograd keeps for the backward pass: neither parameters nor `constants`."""
    known = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *constants]}
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in known:
            seen[place] = tensor  # held, so that no other tensor takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), torch.autocast("cpu", torch.bfloat16):
        result = compute()
    total = sum(t.untyped_storage().nbytes() for t in seen.values())
    del result
    return total


def layer_call(rank: int, latents: int, history: int, *views: object) -> int:
    """Return what autograd keeps of a call of one layer, the casts of its adapters left out."""
    torch.manual_seed(0)
    block = DiTBlock(CONFIG.width, CONFIG.heads, CONFIG.head_width, CONFIG.ffn_width, 1e-6).bfloat16()
    holder = nn.Module()
    holder.blocks = nn.ModuleList([block])
    if rank:
        attach(holder, rank, trained_in_full=())
    block.requires_grad_(bool(rank))
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    shape = (1, CONFIG.heads, GRID.cells, history, CONFIG.head_width)
    past = KVHistory(torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16(), tuple(range(history)))
    turn = rotation_table(tuple(range(latents)), GRID, AxisSplit.wan(CONFIG.head_width), CPU)
    x = torch.randn(1, GRID.cells, latents, CONFIG.width).bfloat16().requires_grad_(True)
    condition = block.condition(
        torch.randn(1, 6, CONFIG.width).bfloat16(), torch.randn(1, PROMPT, CONFIG.width).bfloat16()
    )
    constants = [x, turn, condition.modulation, condition.cross_keys, condition.cross_values]
    total = kept(
        block, lambda: block(x, condition, turn, past if history else None, WINDOW, *views), constants
    )
    return total - (adapter_casts(CONFIG, rank) if rank else 0)


@pytest.mark.parametrize("rank", [0, RANK], ids=["frozen", "adapters"])
@pytest.mark.parametrize(("latents", "history"), [(6, 0), (2, 0), (2, 4)])
def test_activations_of_a_layer(rank: int, latents: int, history: int) -> None:
    tokens, seen = GRID.cells * latents, GRID.cells * (latents + history)
    counted = layer_activations(CONFIG, rank, tokens, seen)
    assert layer_call(rank, latents, history) == pytest.approx(counted, rel=0.01)


def test_activations_of_a_layer_block_by_block() -> None:
    visibility = pytest.importorskip("recavsr.models.visibility")
    setup = TrainingSetup(CONFIG, frames=53, height=160, width=288)
    assert (setup.cells, setup.tokens) == (GRID.cells, GRID.cells * 14)
    schedule = Schedule.uniform(1, CacheAction(6))
    (view,) = visibility.schedule_visibility(schedule, setup.plan.cut(14))
    seen = GRID.cells * seen_keys(schedule, setup.blocks)[0]
    counted = layer_activations(CONFIG, RANK, setup.tokens, seen, joined=True)
    assert layer_call(RANK, 14, 0, view) == pytest.approx(counted, rel=0.01)


@pytest.mark.parametrize(("frames", "height", "width"), [(13, 128, 192), (21, 64, 64)])
def test_activations_of_the_lr_projector(frames: int, height: int, width: int) -> None:
    projector = LRProjector(CONFIG.lr_hidden, CONFIG.width, 16, 2)
    projector.conv1.method = "planes"  # as in the wide model, for which the plan is
    lr_frames = torch.rand(1, 3, frames, height, width).bfloat16()
    counted = projector_activations(CONFIG, 1, frames, height, width)
    # The casts of the weights that lead on to the first convolution, and its own in another order: the same
    # for any picture.
    weights = projector.conv1.weight, projector.conv2.weight, projector.out_proj.weight
    counted += 2 * sum(weight.numel() for weight in weights)
    measured = kept(projector, lambda: projector.step(LRProjectorState(), lr_frames), [lr_frames])
    assert measured == pytest.approx(counted, rel=0.01)


def test_seen_keys_by_hand() -> None:
    blocks = TrainingSetup(frames=85).blocks
    assert [len(block) for block in blocks] == [6] + [2] * 8
    actions = tuple(CacheAction.parse(name) for name in ("none", "recent_6", "recent_1"))
    assert seen_keys(Schedule(actions), blocks) == [22, 22 + 8 * 6, 22 + 8]


def test_parameters() -> None:
    count = ParameterCount.of(recavsr_5b(), 512)
    assert count.frozen == 4_999_787_712
    assert count.trained == 1_289_748_480 + 302_006_272
    discriminator = pytest.importorskip("recavsr.training.discriminator")
    config = discriminator.MSQConfig()
    heads = [discriminator.QueryHead(3072, config) for _ in config.layers]
    assert msq_parameters(3072) == sum(p.numel() for head in heads for p in head.parameters())


def test_what_changes_the_plan() -> None:
    setup = TrainingSetup()
    assert setup.tokens == 22 * 880
    for plan in (plan_stage1, plan_stage2):
        eight, one = plan(setup), plan(replace(setup, gpus=1))
        sharded = "AdamW's two moments, fp32, sharded"
        assert one.held[sharded] == pytest.approx(8 * eight.held[sharded], abs=8)
        assert one.peak > eight.peak
        assert plan(replace(setup, recompute=False)).peak > 2 * eight.peak
        assert plan(replace(setup, clips=2)).peak > eight.peak
        assert eight.peak == sum(eight.held.values()) + max(eight.moments.values())
        assert f"**{eight.peak / 1e9:.1f}**" in eight.table()


def test_the_documented_tables() -> None:
    from conftest import REPOSITORY

    text = (REPOSITORY / "docs" / "training-5b.md").read_text(encoding="utf-8")
    for plan in (plan_stage1(STAGE1), plan_stage2(STAGE2)):
        assert plan.table() in text
    for gpus in (1, 2, 4, 8):
        one, two = (replace(stage, gpus=gpus) for stage in (STAGE1, STAGE2))
        peaks = (plan_stage1(one), plan_stage2(two), plan_stage2(replace(two, passes=1)))
        assert f"| {gpus} | " + " | ".join(f"{p.peak / 1e9:.1f}" for p in peaks) + " |" in text


def test_what_the_wan_decoder_keeps_and_remembers() -> None:
    pytest.importorskip("diffusers", reason="needs the extra wan")
    from recavsr.models.wan_vae import WAN22_VAE, WanVAE

    with torch.device("meta"):
        vae = WanVAE(WAN22_VAE)
    vae.latents_mean, vae.latents_std = vae.latents_mean.to("meta"), vae.latents_std.to("meta")
    vae.model.to(torch.bfloat16)
    vae.requires_grad_(False)
    weights = {p.untyped_storage()._cdata for p in vae.parameters()}
    latent = torch.zeros(1, 48, 1, 44, 80, device="meta")
    state = vae.start()
    for _ in range(2):
        state, _ = vae.step(state, latent)
    pixels = 704 * 1280
    assert state.nbytes / pixels == pytest.approx(WAN_DECODER_HISTORY, abs=1)
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if (storage := tensor.untyped_storage()._cdata) not in weights:
            saved[storage] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        vae.step(state, latent.requires_grad_())
    kept = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    assert kept / pixels == pytest.approx(WAN_DECODER_BYTES, abs=1)


def test_the_plan_of_a_small_generator_counts_its_own_layers() -> None:
    config = replace(CONFIG, layers=2, schedule=Schedule.uniform(2, CacheAction(2)))
    setup = TrainingSetup(config, RANK, 1, 21, 64, 96, plan=BlockPlan(2, 1))
    with torch.device("meta"):
        generator = Generator(config)
        attach(generator, RANK)
    frozen = sum(p.numel() for p in generator.parameters() if not p.requires_grad)
    assert plan_stage1(setup).held["frozen weights, bf16, sharded"] == 2 * frozen
    assert plan_stage2(setup).held["history of every layer and block"] == 2 * (2 + 2 + 2 + 2) * 6 * 2 * 96 * 2
