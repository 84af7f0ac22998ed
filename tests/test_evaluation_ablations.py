"""Switching parts off: what is forgotten can not be felt, what is kept is kept, positions go on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from recavsr.errors import InputError
from recavsr.evaluation.ablations import FORGETTING, VARIANTS, Ablated, forget, worth_table
from recavsr.geometry import BlockPlan
from recavsr.models.decoder import DecoderState
from recavsr.stream.step import ReCaVSR, StreamState
from tiny import STRIDE, one_thread, tiny_model

PLAN = BlockPlan(2, 2)
FRAMES = (5, 8, 8)
HEIGHT, WIDTH = 2 * STRIDE, 3 * STRIDE


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


def pieces(seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.rand(1, 3, count, HEIGHT, WIDTH, generator=draw) * 2 - 1 for count in FRAMES]


def stream(model: ReCaVSR, lr: list[Tensor]) -> list[Tensor]:
    state, frames = model.start(HEIGHT, WIDTH), []
    for piece in lr:
        state, out = model.step(state, piece)
        frames.append(out)
    return frames


def state_after_two(model: ReCaVSR) -> StreamState:
    state = model.start(HEIGHT, WIDTH)
    for piece in pieces()[:2]:
        state, _ = model.step(state, piece)
    return state


@pytest.mark.parametrize("variant", FORGETTING)
def test_the_past_is_felt_through_what_is_kept_only(variant: str) -> None:
    """Another past changes a block exactly where some memory is left."""
    model = Ablated(tiny_model(PLAN), variant)
    one, other = pieces(), pieces()
    other[:2] = pieces(seed=1)[:2]
    same = torch.equal(stream(model, one)[2], stream(model, other)[2])
    assert same == (variant == "stateless")


@pytest.mark.parametrize("variant", FORGETTING)
def test_each_forgetting_shows_from_the_second_block_on(variant: str) -> None:
    whole, without = stream(tiny_model(PLAN), pieces()), stream(Ablated(tiny_model(PLAN), variant), pieces())
    assert torch.equal(whole[0], without[0])
    assert not torch.equal(whole[1], without[1])


def test_decoder_alone_keeps_latents_and_is_not_a_start() -> None:
    model, lr = tiny_model(PLAN), pieces()
    state = state_after_two(model)
    _, latents = model.generate(state, lr[2])
    _, frames = Ablated(model, "decoder-alone").step(state, lr[2])
    layers = len(state.decoder.layers)
    _, expected = model.decoder.step(DecoderState((None,) * layers, 4), latents, lr[2])
    assert torch.equal(frames, expected)
    assert frames.shape[2] == 8
    with pytest.raises(ValueError, match="do not fit"):  # as it would be at a stream's start
        model.decoder.step(model.decoder.start(), latents, lr[2])


def test_forgetting_touches_nothing_else() -> None:
    state = state_after_two(tiny_model(PLAN))
    after = forget(state, {"recycled"})
    assert after.generator.recycled is None
    assert after.generator.layers is state.generator.layers
    assert after.decoder is state.decoder
    bare = forget(state, FORGETTING["stateless"])
    assert list(bare.tensors()) == []
    assert (bare.generator.next_position, bare.decoder.next_position, bare.block) == (4, 4, 2)
    assert state.generator.recycled is not None  # states are values


def test_spoiled_latents() -> None:
    model, lr = tiny_model(PLAN), pieces()
    state = model.start(HEIGHT, WIDTH)
    _, latents = model.generate(state, lr[0])
    assert not Ablated(model, "zero-latents").generate(state, lr[0])[1].any()
    assert torch.equal(Ablated(model, "flipped-latents").generate(state, lr[0])[1].flip(-1), latents)
    with pytest.raises(InputError, match="unknown"):
        Ablated(model, "no-such")


def test_the_table_of_worth() -> None:
    def row(model: str, psnr: float, flicker: float) -> dict:
        values = {
            "psnr": psnr,
            "ssim": 0.9,
            "lpips": None,
            "td": 4.0,
            "flicker": flicker,
            "static_share": 0.5,
        }
        return {"model": model, "degradation": "mild", "clip": "a", "height": 8, "width": 8, **values}

    table = worth_table([row("nano", 30.0, 1.0), row("nano stateless", 29.75, 1.5)], "nano")
    (line,) = [line for line in table.splitlines() if "stateless" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["stateless", "-0.250", "+0.0000", "-", "1.000", "1.500", *"------"]
    assert set(VARIANTS) == {*FORGETTING, "zero-latents", "flipped-latents"}
