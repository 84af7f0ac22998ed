"""Saturated attention is found by the size of its queries, and a stage of nano that trained it says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from recavsr.models.decoder import FlashDecoder
from recavsr.training import recipes
from recavsr.training.decoder_stage import DecoderSettings
from recavsr.training.distributed import World
from recavsr.training.loop import RunSettings
from recavsr.training.losses import FrameLosses
from recavsr.training.nano import STAGES, NanoTraining
from recavsr.training.objective import Batch, BatchSettings, OptimizerSettings
from recavsr.training.runner import Recipe, RecipeStage, RunOptions, Setup, train_stages
from recavsr.training.saturation import attention_layers, saturated_layers, saturation_remark
from tiny import DECODER, GENERATOR, STRIDE, one_thread, tiny_decoder

CPU = torch.device("cpu")
RUN = RunSettings(steps=1)
SLOW = OptimizerSettings(1e-6, warm_up_steps=0)


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


@torch.no_grad()
def saturate(decoder: FlashDecoder, name: str, times: float) -> None:
    attention_layers(decoder)[name].query.weight.mul_(times)


@pytest.mark.parametrize("name", ["backbone layer 2", "refinement layer 1"])
def test_a_layer_of_great_queries_is_named(name: str) -> None:
    decoder = tiny_decoder()
    assert list(attention_layers(decoder)) == ["backbone layer 1", "backbone layer 2", "refinement layer 1"]
    assert saturated_layers(decoder) == {}
    assert saturation_remark(decoder) is None
    saturate(decoder, name, 5)
    assert saturated_layers(decoder) == {}
    saturate(decoder, name, 10)
    found = saturated_layers(decoder)
    assert list(found) == [name]
    assert found[name] == pytest.approx(50, rel=0.2)
    remark = saturation_remark(decoder)
    assert remark is not None
    assert f"in {name} (queries {found[name]:.0f} times the usual size):" in remark


def test_all_saturated_layers_are_in_one_line() -> None:
    decoder = tiny_decoder(replace(DECODER, depth=4))
    for name in ("backbone layer 3", "refinement layer 1"):
        saturate(decoder, name, 50)
    remark = saturation_remark(decoder)
    assert remark is not None
    assert "\n" not in remark
    assert "backbone layer 3 (queries " in remark
    assert ", refinement layer 1 (queries " in remark


# ---------------------------------------------------------------- at a stage's end


class Noise:
    """Batches of noise."""

    def batch(self, settings: BatchSettings) -> Batch:
        hq = torch.rand(settings.clips, 3, settings.frames, 4 * STRIDE, 4 * STRIDE) * 2 - 1
        return Batch(hq, 0.8 * hq)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def describe(self, number: int) -> str:
        return "noise"


def open_ordinary(setup: Setup) -> NanoTraining:
    torch.manual_seed(0)
    return NanoTraining(GENERATOR, DECODER)


def open_saturated(setup: Setup) -> NanoTraining:
    model = open_ordinary(setup)
    saturate(model.decoder, "refinement layer 1", 50)
    return model


def short_form(name: str, opens: recipes.OpenNano, **changes: Any) -> RecipeStage:
    stage = replace(STAGES[name](), latents=6, batch=1, optimizer=SLOW, perceptual_weight=0.0, **changes)
    return recipes.nano_stage(name, RUN, stage, opens)


def decoder_alone(opens: recipes.OpenNano) -> RecipeStage:
    frames = FrameLosses("l1", perceptual_weight=0.0)
    settings = DecoderSettings(BatchSettings(clips=1, frames=5), SLOW, frames=frames)
    return recipes.decoder_stage(RUN, settings, opens)


def remarks_of(stage: RecipeStage, out: Path) -> list[str]:
    """Train a stage; return the lines about saturation, checked against the weights that it leaves."""
    said: list[str] = []
    options = RunOptions(out, out, CPU)
    recipe = Recipe("", (stage,))
    weights = train_stages(recipe, options, World(CPU), lambda number: Noise(), said.append)
    found = [line for line in said if "attention is saturated" in line]
    if found:
        left = NanoTraining(GENERATOR, DECODER)
        left.load_state_dict(load_file(weights))
        remark = saturation_remark(left.decoder)
        assert found == [said[-1]] == [f"{stage.name}: {remark}"]
    return found


@pytest.mark.parametrize("name", ["control", "autoencoder", "joint", "decoder"])
def test_a_stage_that_trained_the_decoder_says_so(name: str, tmp_path: Path) -> None:
    def stage(opens: recipes.OpenNano) -> RecipeStage:
        return decoder_alone(opens) if name == "decoder" else short_form(name, opens)

    (line,) = remarks_of(stage(open_saturated), tmp_path / "saturated")
    assert line.startswith(f"{name}: attention is saturated in refinement layer 1 (queries ")
    assert remarks_of(stage(open_ordinary), tmp_path / "ordinary") == []


def test_a_stage_with_a_resting_decoder_says_nothing(tmp_path: Path) -> None:
    assert remarks_of(short_form("generator", open_saturated), tmp_path / "generator") == []
    joint = short_form("joint", open_saturated, train_decoder=False)
    assert remarks_of(joint, tmp_path / "joint") == []
