"""Another stride of latents: nano_fine is saved, exported, trained and upscaled with as nano is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from media import drawn
from recavsr.errors import InputError
from recavsr.evaluation.floor import decoder_work, generator_work
from recavsr.evaluation.protocol import session_upscaler
from recavsr.geometry import BlockPlan, Grid
from recavsr.models import presets
from recavsr.models.decoder import DecoderConfig
from recavsr.models.generator import GeneratorConfig
from recavsr.models.weights import ModelFolder
from recavsr.stream.load import load
from recavsr.training import nano, recipes
from recavsr.training.distributed import World
from recavsr.training.nano import NanoTraining
from recavsr.training.runner import RecipeStage, Setup
from tiny import lively, one_thread

MEAN, STD = torch.arange(12) / 8 - 0.5, torch.arange(12) / 8 + 0.25
"""Statistics of latents that six decimals hold exactly."""


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


def fresh(kind: str) -> NanoTraining:
    """Fresh networks of nano or nano_fine, whose decoder's last convolution does not begin at zero."""
    configs = {
        "nano": (presets.nano(), presets.nano_decoder()),
        "nano_fine": (presets.nano_fine(), presets.nano_fine_decoder()),
    }
    torch.manual_seed(0)
    model = NanoTraining(*configs[kind])
    nn.init.normal_(model.decoder.head.outer.weight, std=0.01)
    return model


@pytest.fixture(scope="module")
def fine() -> NanoTraining:
    model = fresh("nano_fine")
    lively(model.generator)
    model.set_statistics(MEAN, STD)
    return model


@pytest.fixture(scope="module")
def saved(fine: NanoTraining, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `save` writes."""
    path = tmp_path_factory.mktemp("saved") / "weights.safetensors"
    fine.save(path)
    return path


@pytest.fixture(scope="module")
def folder(fine: NanoTraining, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `export` writes."""
    path = tmp_path_factory.mktemp("exported") / "model"
    fine.export(path)
    return path


def clip(latents: int, side: int = 64) -> tuple[Tensor, Tensor]:
    """HQ and LR frames of one clip."""
    torch.manual_seed(1)
    hq = torch.rand(1, 3, 4 * latents - 3, side, side) * 2 - 1
    return hq, (hq + 0.1 * torch.randn_like(hq)).clamp(-1, 1)


# ---------------------------------------------------------------- files


def test_weights_come_back_from_a_file(fine: NanoTraining, saved: Path) -> None:
    again = NanoTraining.starting_from(saved).state_dict()
    assert again.keys() == fine.state_dict().keys()
    assert all(torch.equal(again[name], wanted) for name, wanted in fine.state_dict().items())


def test_configs_come_back_from_a_file(saved: Path) -> None:
    again = NanoTraining.starting_from(saved)
    assert again.generator.config == presets.nano_fine()
    assert again.decoder.config == presets.nano_fine_decoder()
    assert again.encoder.config == presets.nano_encoder(presets.nano_fine())


def test_weights_come_back_from_a_folder_in_half_precision(fine: NanoTraining, folder: Path) -> None:
    again = NanoTraining.starting_from(folder).state_dict()
    assert again.keys() == fine.state_dict().keys()
    assert all(torch.equal(again[name], wanted.half().float()) for name, wanted in fine.state_dict().items())


def test_configs_come_back_from_a_folder(folder: Path) -> None:
    again = NanoTraining.starting_from(folder)
    assert again.generator.config == presets.nano_fine()
    mean, std = tuple(MEAN.tolist()), tuple(STD.tolist())
    assert again.decoder.config == replace(presets.nano_fine_decoder(), latents_mean=mean, latents_std=std)
    assert again.encoder.config == presets.nano_encoder(presets.nano_fine())


@pytest.mark.parametrize("source", ["saved", "folder"])
def test_statistics_come_back_to_model_and_decoder(source: str, request: pytest.FixtureRequest) -> None:
    again = NanoTraining.starting_from(request.getfixturevalue(source))
    for part in (again, again.decoder):
        assert torch.equal(part.latents_mean.flatten(), MEAN)
        assert torch.equal(part.latents_std.flatten(), STD)


def test_the_sizes_are_those_of_latents_of_8_pixels(saved: Path) -> None:
    again = NanoTraining.starting_from(saved)
    generator, decoder = again.generator.config, again.decoder.config
    assert (generator.latent_stride, generator.patch, generator.latent_channels) == (8, 4, 12)
    assert (decoder.latent_stride, decoder.width, decoder.latent_channels) == (8, 128, 12)


@pytest.mark.parametrize("names", [["schedule"], ["schedule", "generator", "decoder"]])
def test_files_that_do_not_tell_their_stride_are_of_16_pixels(names: list[str], tmp_path: Path) -> None:
    model, path = fresh("nano"), tmp_path / "weights.safetensors"
    texts = {
        "schedule": nano.schedule_text(model.generator),
        "generator": json.dumps(model.generator.config.to_released()),
        "decoder": json.dumps(model.decoder.config.to_released()),
    }
    save_file(model.state_dict(), str(path), metadata={name: texts[name] for name in names})
    again = NanoTraining.starting_from(path)
    assert again.generator.config == presets.nano()
    assert again.decoder.config == presets.nano_decoder()
    assert all(torch.equal(again.state_dict()[name], wanted) for name, wanted in model.state_dict().items())


def test_an_autoencoder_is_taken_over_with_its_stride(fine: NanoTraining, saved: Path) -> None:
    other = NanoTraining.on_autoencoder_of(saved, generator=replace(presets.nano_fine(), recycling=False))
    frames, _ = clip(2)
    with torch.no_grad():
        assert torch.equal(other.encode(frames), fine.encode(frames))


# ---------------------------------------------------------------- upscaling


def test_the_folder_fits_its_configs(folder: Path) -> None:
    model = ModelFolder.open(folder)
    model.check()
    assert (model.vae["scale_factor_spatial"], model.vae["z_dim"]) == (8, 12)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_folder_upscales_by_4(precision: str, folder: Path) -> None:
    frames = np.stack([drawn(1, t / 30)[:32, :32] for t in range(7)])  # the second block ends early
    model = load(folder, device="cpu", precision=precision, first_block_latents=1)
    output = session_upscaler(model, "fine").run(frames)
    assert output.shape == (7, 128, 128, 3)
    assert output.std() > 10


def test_the_forms_of_both_precisions_make_the_same_frames(folder: Path) -> None:
    _, lr = clip(2)
    models = [load(folder, device="cpu", precision=name, first_block_latents=2) for name in ("fp32", "bf16")]
    plain, folded = (model.step(model.start(64, 64), lr)[1] for model in models)
    assert plain.isfinite().all()
    torch.testing.assert_close(folded, plain, rtol=0, atol=0.02)


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("latents", [1, 3])
def test_the_encoder_gives_a_latent_of_8_pixels_for_every_four_frames(
    latents: int, fine: NanoTraining
) -> None:
    frames = torch.rand(2, 3, 4 * latents - 3, 32, 48) * 2 - 1
    with torch.no_grad():
        assert fine.encode(frames).shape == (2, 12, latents, 4, 6)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_the_encoder_refuses_other_counts_of_frames(count: int, fine: NanoTraining) -> None:
    with pytest.raises(ValueError, match=f"{count} frames are not 4 T - 3"):
        fine.encode(torch.zeros(1, 3, count, 32, 32))


@pytest.mark.parametrize("kind", ["nano", "nano_fine"])
@pytest.mark.parametrize("name", ["control", "autoencoder", "joint"])
def test_every_stage_trains_its_decoder(name: str, kind: str) -> None:
    model = fresh(kind)
    stage = replace(nano.STAGES[name](), latents=2, plan=BlockPlan(1, 1))
    losses = {
        "control": nano.control_loss(model, stage, None),
        "autoencoder": nano.autoencoder_loss(model, stage),
        "joint": nano.joint_loss(model, stage, None),
    }
    loss = losses[name](*clip(2))["loss"]
    loss.backward()
    assert loss.isfinite()
    gradients = {key: parameter.grad for key, parameter in model.decoder.named_parameters()}
    if name == "control":  # its latents are zero
        gradients.pop("latent_projection.weight")
    assert all(grad is not None and grad.isfinite().all() and grad.any() for grad in gradients.values())


def test_statistics_are_measured_of_every_channel() -> None:
    model = fresh("nano_fine")
    nano.measure_statistics(model, iter([clip(2)]), 1)
    with torch.no_grad():
        latents = model.encode(clip(2)[0]).transpose(0, 1).flatten(1)
    torch.testing.assert_close(latents.mean(1), torch.zeros(12), rtol=0, atol=1e-4)
    torch.testing.assert_close(latents.std(1), torch.ones(12))


STAGES = pytest.mark.parametrize("stage", recipes.nano_fine().stages, ids=lambda stage: stage.name)


def opened(stage: RecipeStage, start: Path | None) -> NanoTraining:
    """The networks that a stage trains."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Setup, "distance", lambda setup, weight: None)  # its weights are not in the package
        objective = stage.build(Setup(World(torch.device("cpu")), start))
    assert isinstance(objective.model, NanoTraining)
    return objective.model


@STAGES
def test_every_stage_of_the_recipe_opens_fresh_fine_networks(stage: RecipeStage) -> None:
    model = opened(stage, None)
    assert model.generator.config == presets.nano_fine()
    assert model.decoder.config == presets.nano_fine_decoder()


@STAGES
def test_every_stage_of_the_recipe_goes_on_from_the_one_before(
    stage: RecipeStage, fine: NanoTraining, saved: Path
) -> None:
    model = opened(stage, saved)
    assert torch.equal(model.generator.head.weight, fine.generator.head.weight)
    assert torch.equal(model.decoder.latents_std, fine.decoder.latents_std)


# ---------------------------------------------------------------- cost


def operations(generator: GeneratorConfig, decoder: DecoderConfig) -> dict[str, float]:
    """Count a steady block at 1280x736, part by part."""
    tokens, cells = (
        Grid(736 // stride, 1280 // stride) for stride in (generator.token_stride, decoder.latent_stride)
    )
    seen = [2 + action.capacity(generator.schedule.anchor_rule) for action in generator.schedule.actions]
    work = generator_work(generator, tokens, 2, seen, presets.NANO_PROMPT_TOKENS)
    return {name: part.operations for name, part in (work | decoder_work(decoder, cells, 2)).items()}


def test_its_products_are_as_many_as_those_of_nano() -> None:
    plain = operations(presets.nano(), presets.nano_decoder())
    fine = operations(presets.nano_fine(), presets.nano_fine_decoder())
    # Four times the queries of half the width: the decoder's attention is twice nano's.
    assert fine.pop("decoder_attention") == pytest.approx(2 * plain.pop("decoder_attention"))
    assert fine == pytest.approx(plain, rel=0.1)


def test_weights_of_another_stride_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "nano.safetensors"
    fresh("nano").save(other)
    with pytest.raises(InputError, match="has latents of 16 pixels, nano_fine of 8"):
        opened(recipes.nano_fine().stages[0], other)
