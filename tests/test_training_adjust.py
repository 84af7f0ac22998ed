"""Settings of recipes by name."""

from __future__ import annotations

import pytest

from recavsr.errors import InputError
from recavsr.training.adjust import settings_of, settings_of_data, with_settings
from recavsr.training.recipes import RECIPES, nano_full, nano_short
from recavsr.training.runner import Recipe, RecipeStage, with_budget, with_stages


def stage(recipe: Recipe, name: str) -> RecipeStage:
    return next(stage for stage in recipe.stages if stage.name == name)


def test_a_setting_changes_in_every_stage_that_has_it() -> None:
    changed = with_settings(nano_full(), ["structure_weight=1.5"])
    assert settings_of(stage(changed, "polish"))["structure_weight"] == 1.5
    assert settings_of(stage(changed, "stage2"))["structure_weight"] == 1.5
    assert stage(changed, "stage2").settings["settings"]["frames"]["structure_weight"] == 1.5  # as written
    assert settings_of(stage(changed, "routing")) == settings_of(stage(nano_full(), "routing"))


def test_a_stages_name_before_it_means_that_stage_alone() -> None:
    changed = with_settings(nano_full(), ["polish.perceptual_weight=0", "routing.plan.first=2"])
    assert settings_of(stage(changed, "polish"))["perceptual_weight"] == 0.0
    assert not stage(changed, "polish").perceptual  # no LPIPS weights are looked for
    assert settings_of(stage(changed, "stage2"))["perceptual_weight"] > 0
    assert settings_of(stage(changed, "routing"))["plan.first"] == 2
    assert settings_of(stage(changed, "joint"))["plan.first"] == 6


def test_a_players_settings_are_not_taken_for_the_stage_of_that_name() -> None:
    changed = with_settings(nano_short(), ["generator.optimizer.learning_rate=0.5"])
    assert settings_of(stage(changed, "generator"))["optimizer.learning_rate"] == 0.5
    assert settings_of(stage(changed, "teacher"))["optimizer.learning_rate"] != 0.5
    changed = with_settings(nano_full(), ["generator.learning_rate=0.5"])
    assert settings_of(stage(changed, "stage2"))["generator.learning_rate"] == 0.5
    assert settings_of(stage(changed, "stage2"))["discriminator.learning_rate"] != 0.5


def test_the_data_of_all_stages() -> None:
    changed = with_settings(nano_full(), ["pairs.presets.heavy=0.5", "pairs.still_fraction=0.25"])
    assert changed.pairs.presets == nano_full().pairs.presets | {"heavy": 0.5}
    assert changed.pairs.still_fraction == 0.25
    assert nano_full().pairs.presets["heavy"] != 0.5


def test_sizes() -> None:
    recipe = RECIPES["paper_5b_decoder"]()
    assert settings_of_data(recipe)["pairs.size"] == "896x1344"
    assert with_settings(recipe, ["pairs.size=480x832"]).pairs.size == (480, 832)
    assert with_settings(recipe, ["pairs.size=512"]).pairs.size == 512


def test_values_that_are_right_only_together() -> None:
    with pytest.raises(InputError, match="do not end at a block's end"):
        with_settings(nano_full(), ["stage2.plan.first=5"])
    changed = settings_of(
        stage(with_settings(nano_full(), ["stage2.plan.first=5", "stage2.batches.frames=49"]), "stage2")
    )
    assert (changed["plan.first"], changed["batches.frames"]) == (5, 49)


def test_kinds_of_values() -> None:
    changed = with_settings(
        nano_full(),
        ["polish.pixel=mse", "joint.train_decoder=false", "adversarial_cap=none", "polish.batch=4"],
    )
    assert settings_of(stage(changed, "polish"))["pixel"] == "mse"
    assert settings_of(stage(changed, "joint"))["train_decoder"] is False
    assert settings_of(stage(changed, "stage2"))["adversarial_cap"] is None
    assert settings_of(stage(changed, "polish"))["batch"] == 4


def test_lengths_and_the_choice_of_stages_stay() -> None:
    recipe = with_stages(with_budget(nano_full(), steps=7), ["polish", "stage2"])
    changed = with_settings(recipe, ["structure_weight=1"])
    assert [s.name for s in changed.stages] == ["polish", "stage2"]
    assert [s.run for s in changed.stages] == [s.run for s in recipe.stages]
    assert changed.number(changed.stages[0]) == recipe.number(recipe.stages[0])


@pytest.mark.parametrize(
    ("assignment", "line"),
    [
        ("structure_weigt=1", "no setting 'structure_weigt'; did you mean structure_weight"),
        ("xyzzy=1", "--list` lists them"),
        ("structure_weight", "NAME=VALUE"),
        ("=1", "NAME=VALUE"),
        ("structure_weight=much", "structure_weight is a number from 0 on, not 'much'"),
        ("structure_weight=-1", "structure_weight is a number from 0 on"),
        ("structure_weight=nan", "structure_weight is a number from 0 on"),
        ("batch=1.5", "batch is a whole number from 0 on"),
        ("batch=0", "not 0 clips"),
        ("latents=0", "clips of 0"),
        ("plan.first=0", "first=0: a block needs at least one latent"),
        ("pixel=l3", "pixel is one of l1, mse, charbonnier, log_rms"),
        ("train_decoder=maybe", "train_decoder is one of true, false"),
        ("batches.frames=54", "do not end at a block's end"),
        ("batches.image_fraction=2", "image_fraction is a share"),
        ("pairs.still_fraction=2", "still_fraction is a share"),
        ("pairs.scales.4=0", "more than 0"),
        ("pairs.size=0", "pairs need frames"),
        ("pairs.size=64x", "size is a whole number"),
        ("structure_weight=64x64", "structure_weight is not a size"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_line(assignment: str, line: str) -> None:
    with pytest.raises(InputError, match=line):
        with_settings(nano_full(), [assignment])


@pytest.mark.parametrize("name", RECIPES)
def test_every_stage_of_every_recipe_can_be_adjusted(name: str) -> None:
    recipe = RECIPES[name]()
    for part in recipe.stages:
        settings = settings_of(part)
        assert settings, part.name
        rate = next(key for key in settings if key.endswith("learning_rate"))
        changed = with_settings(recipe, [f"{part.name}.{rate}=0.125"])
        assert settings_of(stage(changed, part.name))[rate] == 0.125
        others = [other for other in recipe.stages if other.name != part.name]
        assert all(settings_of(stage(changed, o.name)) == settings_of(o) for o in others)
