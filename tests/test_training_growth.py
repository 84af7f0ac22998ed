"""The slow teacher: a larger network that begins as the trained one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from recavsr.geometry import BlockPlan
from recavsr.models.presets import nano_decoder
from recavsr.training.growth import grown
from recavsr.training.nano import NanoTraining
from recavsr.training.rollout import decode_blocks, roll_out
from tiny import lively, one_thread

PLAN = BlockPlan(2, 2)


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def trained() -> NanoTraining:
    torch.manual_seed(0)
    model = NanoTraining()
    lively(model)
    channels = torch.rand(2, 48)
    model.set_statistics(channels[0], 0.5 + channels[1])
    return model


def rollout(model: NanoTraining) -> tuple[Tensor, Tensor]:
    """Latents and frames of two blocks: the second one sees history."""
    torch.manual_seed(1)
    lr, noise = torch.rand(1, 3, 13, 64, 64) * 2 - 1, torch.randn(1, 48, 4, 4, 4)
    blocks = roll_out(model.generator, model.generator.condition(model.prompt), noise, lr, PLAN)
    return torch.cat(blocks, 2), decode_blocks(model.decoder, blocks, lr, PLAN)


def test_it_computes_what_the_trained_one_does(trained: NanoTraining) -> None:
    larger = grown(trained)
    assert len(larger.generator.blocks) == 12
    assert (len(larger.decoder.backbone), len(larger.decoder.refinement)) == (8, 4)
    actions = larger.generator.config.schedule.actions
    assert actions[::2] == actions[1::2] == trained.generator.config.schedule.actions
    with torch.no_grad():
        for made, wanted in zip(rollout(larger), rollout(trained)):
            torch.testing.assert_close(made, wanted, rtol=0, atol=1e-5)


def test_what_is_new_learns(trained: NanoTraining) -> None:
    larger = grown(trained)
    optimizer = torch.optim.SGD([*larger.generator.parameters(), *larger.decoder.parameters()], lr=1e-2)
    for _ in range(2):  # at first only the last steps of the new layers have gradients
        optimizer.zero_grad()
        rollout(larger)[1].square().mean().backward()
        optimizer.step()
    new = [larger.generator.blocks[1].ffn.up, larger.decoder.backbone[1].attention.value]
    new += [larger.decoder.refinement[1].feed_forward.gate]
    for part in new:
        assert part.weight.grad is not None
        assert part.weight.grad.any()
    assert larger.decoder.head.stem.weight.grad is not None
    assert larger.decoder.head.stem.weight.grad[48:].any()


def test_a_head_only_grows(trained: NanoTraining) -> None:
    with pytest.raises(ValueError, match="can't grow to 24"):
        grown(trained, head_channels=24)
    linear = NanoTraining(decoder=replace(nano_decoder(), head="linear"))
    with pytest.raises(ValueError, match="linear head"):
        grown(linear)
