"""Recipes from data to model: exact batches, the command, nano_debug end to end on drawn data."""

from __future__ import annotations

import csv
import itertools
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import cv2
import pytest
import torch
from safetensors.torch import load_file

from media import drawn
from recavsr.cache_policy import CacheAction
from recavsr.cli.main import run
from recavsr.data.clips import ClipSource
from recavsr.data.pack import build_pack
from recavsr.data.pool import PairSettings, TrainingPool
from recavsr.errors import InputError
from recavsr.training import recipes, runner
from recavsr.training.batches import PairSource, PoolSource, Prefetch, size_of_batch
from recavsr.training.distributed import World
from recavsr.training.nano import NanoTraining
from recavsr.training.nano_stages import NanoStage1
from recavsr.training.objective import BatchSettings
from recavsr.training.runner import RunOptions, run_recipe, with_budget
from recavsr.video.clips import read_clip, write_clip
from tiny import one_thread

WORLD = World(torch.device("cpu"))
SETTINGS = BatchSettings(clips=2, frames=5, images=4, image_fraction=0.5)
PAIRS = PairSettings(frames=5, size=32, degradations=1)
NO_HISTORY, WINDOW = CacheAction(), CacheAction(recent=2)


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder: one clip, two photos."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "train_video").mkdir()
    (folder / "photos").mkdir()
    write_clip(folder / "train_video" / "waves.mp4", [drawn(1, t / 30) for t in range(24)], 25)
    rows = ["path\tlicence\tsource\tnote", "train_video/waves.mp4\tCC0\there\tsharp 0.7; split train"]
    for seed in (2, 3):
        cv2.imwrite(str(folder / "photos" / f"p{seed}.jpg"), drawn(seed))
        rows.append(f"photos/p{seed}.jpg\tCC0\there\t")
    (folder / "manifest.tsv").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture(scope="module")
def pack(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pack")
    build_pack(data, folder, part_bytes=10**9, validation_videos=0, validation_photos=0)
    return folder


@pytest.fixture(scope="module")
def clips(pack: Path, tmp_path_factory: pytest.TempPathFactory) -> ClipSource:
    return ClipSource.open(pack, cache=tmp_path_factory.mktemp("cache"), processes=0)


# ---------------------------------------------------------------- batches


def test_batches_are_a_function_of_seed_and_number(clips: ClipSource) -> None:
    one = PairSource(clips, PAIRS, WORLD, seed=1)
    batches = [one.batch(SETTINGS) for _ in range(5)]
    sizes = [tuple(batch.hq.shape) for batch in batches]
    assert set(sizes) == {(2, 3, 5, 32, 32), (4, 3, 1, 32, 32)}
    assert all(x.min() >= -1 and x.max() <= 1 and x.std() > 0.05 for batch in batches for x in batch)
    other = PairSource(clips, PAIRS, WORLD, seed=1, workers=2)
    for number in (0, 1, 2):
        assert all(torch.equal(a, b) for a, b in zip(other.batch(SETTINGS), batches[number]))
    position = other.state_dict()
    other.batch(SETTINGS)
    fresh = PairSource(clips, PAIRS, WORLD, seed=1, workers=2)
    for source in (fresh, other):
        source.load_state_dict(position)
        for number in (3, 4):
            assert all(torch.equal(a, b) for a, b in zip(source.batch(SETTINGS), batches[number]))
    different = PairSource(clips, PAIRS, WORLD, seed=2)
    assert not torch.equal(different.batch(replace(SETTINGS, images=0)).hq[0], batches[0].hq[0, :, :5])
    assert one.describe(3) == "batch seed (1, 3)"


def test_a_closed_source_leaves_no_threads(clips: ClipSource) -> None:
    before = set(threading.enumerate())
    source = PairSource(clips, PAIRS, WORLD, workers=2)
    source.batch(SETTINGS)
    assert set(threading.enumerate()) - before
    source.close()
    assert not set(threading.enumerate()) - before


def test_ranks_share_a_batch(clips: ClipSource) -> None:
    whole = PairSource(clips, PAIRS, WORLD).batch(SETTINGS)
    halves = [
        PairSource(clips, PAIRS, World(torch.device("cpu"), rank, 2)).batch(SETTINGS) for rank in (0, 1)
    ]
    for index in (0, 1):
        assert torch.equal(torch.cat([half[index] for half in halves]), whole[index])


def test_the_share_of_images_is_as_asked_for() -> None:
    settings = BatchSettings(clips=2, frames=5, images=4, image_fraction=0.2)
    images = sum(size_of_batch(settings, 3, number) == (4, 1) for number in range(2000))
    assert images / 2000 == pytest.approx(0.2, abs=0.03)  # more than three deviations
    assert size_of_batch(BatchSettings(clips=2, frames=5), 3, 0) == (2, 5)


def test_a_batch_fits_any_number_of_processes(pack: Path, tmp_path: Path) -> None:
    settings = BatchSettings(clips=11, frames=5, images=3)
    assert settings.shared_by(1) == settings
    shared = [settings.shared_by(count) for count in (2, 4, 8)]
    assert [(batch.clips, batch.images) for batch in shared] == [(12, 4), (12, 4), (16, 8)]
    assert settings.shared_by(4, times=4) == replace(settings, clips=44, images=12)
    first = with_budget(recipes.nano_debug(), steps=1).stages[0]
    recipe = replace(recipes.nano_debug(), stages=(first,), checks=0)
    run_recipe(recipe, RunOptions(tmp_path, pack, torch.device("cpu"), workers=0, batch_times=2))
    made = json.loads((tmp_path / first.name / "settings.json").read_text())["batches"]["clips"]
    assert made == 2 * recipes.nano_debug().stages[0].settings["batch"]


def test_a_batch_drawn_ahead_is_not_lost_in_a_checkpoint(clips: ClipSource) -> None:
    wanted = PairSource(clips, PAIRS, WORLD)
    expected = [wanted.batch(SETTINGS).hq for _ in range(3)]
    feed = Prefetch(PairSource(clips, PAIRS, WORLD), SETTINGS, WORLD.device)
    assert torch.equal(feed.take().hq, expected[0])
    feed.prepare()
    position = feed.state_dict()
    assert torch.equal(feed.peek().hq, expected[1])
    feed.load_state_dict(position)
    assert torch.equal(feed.take().hq, expected[1])
    assert torch.equal(feed.take().hq, expected[2])


def test_a_pool_without_workers_goes_on_exactly(pack: Path, clips: ClipSource) -> None:
    def source() -> PoolSource:
        pool = TrainingPool(pack, "cpu", workers=0, capacity=8, settings=PAIRS, cache=clips.cache.parent)
        pool.fill(6)
        return PoolSource(pool, WORLD, seed=4)

    one = source()
    one.batch(SETTINGS)
    position = one.state_dict()
    expected = one.batch(SETTINGS)
    other = source()
    other.load_state_dict(position)
    assert all(torch.equal(a, b) for a, b in zip(other.batch(SETTINGS), expected))


def test_no_data_is_said_plainly(clips: ClipSource, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    empty = ClipSource(clips.folder, clips.cache, "validation")
    with pytest.raises(InputError, match="no validation items"):
        PairSource(empty, PAIRS, WORLD).batch(SETTINGS)
    assert run(["train", "nano_debug", "--data", str(tmp_path), "--out", str(tmp_path / "run")]) == 2
    assert "holds no training data" in capsys.readouterr().err
    (tmp_path / "manifest.tsv").write_text("path\tlicence\tsource\tnote\n")
    for _ in "ab":  # nothing is left that a second try would take for a pack
        assert run(["train", "nano_debug", "--data", str(tmp_path), "--out", str(tmp_path / "run")]) == 2
        assert "lists no usable training data" in capsys.readouterr().err


# ---------------------------------------------------------------- recipes and the command


def test_every_recipe_is_what_its_name_returns() -> None:
    for name, make in recipes.RECIPES.items():
        recipe = make()
        assert make.__name__ == name
        assert recipe.about
        names = [stage.name for stage in recipe.stages]
        assert len(set(names)) == len(names) > 0


def test_budgets() -> None:
    short = recipes.nano_short()
    by_time = with_budget(short, seconds=129)
    assert [stage.run.seconds for stage in by_time.stages] == [30, 18, 15, 42, 24]
    by_steps = with_budget(short, steps=7)
    assert {(stage.run.seconds, stage.run.steps) for stage in by_steps.stages} == {(None, 7)}
    both = with_budget(short, seconds=129, steps=7)
    assert {(stage.run.seconds, stage.run.steps) for stage in both.stages[:1]} == {(30, 7)}


def test_the_list(capsys: pytest.CaptureFixture) -> None:
    assert run(["train", "--list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in recipes.RECIPES)
    assert "stages: autoencoder, generator, teacher, joint, polish" in printed
    assert "structure_weight" not in printed
    assert run(["train", "nano_full", "--list"]) == 0
    printed = capsys.readouterr().out
    assert "nano_short" not in printed
    assert "    polish: latents=8 batch=16" in printed
    assert "    data: pairs.frames=53" in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train"], "name a recipe: nano_full"),
        (["train", "nano_7"], "no recipe 'nano_7'"),
        (["train", "nano_debug"], "needs --data"),
        (["train", "nano_debug", "--data", "D", "--out", "O", "--stage", "jont"], "has no stage 'jont'; its"),
        (["train", "nano_debug", "--data", "D", "--out", "O", "--set", "bach=2"], "did you mean batch"),
        (["train", "nano_debug", "--data", "D", "--out", "O", "--set", "pairs.size=60"], "a multiple of 32"),
        (["train", "nano_teacher", "--data", "D", "--out", "O"], "by --start"),
    ],
)
def test_bad_commands(arguments: list[str], said: str, capsys: pytest.CaptureFixture) -> None:
    assert run(arguments) == 2
    assert said in capsys.readouterr().err


def test_what_was_set_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(runner, "run_recipe", lambda recipe, *rest: called.append(recipe))
    set_both = ["--set", "joint.structure_weight=1.5", "--set", "pairs.presets.heavy=0.5"]
    assert run(["train", "nano_debug", "--data", "D", "--out", "O", "--device", "cpu", *set_both]) == 0
    (recipe,) = called
    weights = {stage.name: stage.settings.get("structure_weight") for stage in recipe.stages}
    assert (weights["joint"], weights["generator"]) == (1.5, 0.0)
    assert recipe.pairs.presets["heavy"] == 0.5


def test_only_the_stages_named_run_in_the_order_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(runner, "run_recipe", lambda recipe, *rest: called.append(recipe))
    only = ["--stage", "stage2", "--stage", "joint"]
    assert run(["train", "nano_debug", "--data", "D", "--out", "O", "--device", "cpu", *only]) == 0
    assert [stage.name for stage in called[0].stages] == ["joint", "stage2"]


def test_a_single_stage_goes_on_from_the_one_before_it(
    debug_run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for name in ("routing.safetensors", "routing"):
        path = debug_run / name
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / name)
    command = ["train", "nano_debug", "--data", str(data), "--out", str(tmp_path), "--device", "cpu"]
    command += ["--workers", "0", "--steps", "1", "--stage", "generator"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(recipes.RECIPES, "nano_debug", smaller_debug)
        assert run(command) == 0
    both = [load_file(folder / "generator.safetensors") for folder in (debug_run, tmp_path)]
    assert all(torch.equal(value, both[1][name]) for name, value in both[0].items())
    (tmp_path / "routing" / "finished.json").unlink()
    shutil.rmtree(tmp_path / "generator")
    assert run(command) == 2
    assert "generator goes on from what routing leaves" in capsys.readouterr().err


def test_a_run_keeps_the_pack_that_it_began_with(
    debug_run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    other = shutil.copytree(data, tmp_path / "other")
    command = ["train", "nano_debug", "--out", str(debug_run), "--device", "cpu", "--resume", "--data"]
    assert run([*command, str(other)]) == 2
    assert f"trains on a pack of {data}" in capsys.readouterr().err
    assert run([*command, str(debug_run / "data" / "pack")]) == 0
    assert run([*command, str(data)]) == 0


def test_workers_are_by_the_cores_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(runner, "run_recipe", lambda recipe, options, say: called.append(options.workers))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(18)), raising=False)
    command = ["train", "nano_debug", "--data", "D", "--out", "O", "--device", "cpu"]
    assert run(command) == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert run(command) == 0
    assert run([*command, "--workers", "3"]) == 0
    assert called == [16, 4, 3]


def test_a_folder_without_data_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "run"
    assert run(["train", "nano_debug", "--data", str(tmp_path), "--out", str(out), "--device", "cpu"]) == 2
    assert "holds no training data" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("recipe", ["nano_full", "nano_short", "paper_5b_stage2", "paper_5b_decoder"])
def test_what_a_later_stage_lacks_is_said_at_once(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Before the data is opened, which here does not exist."""
    command = ["train", recipe, "--data", str(tmp_path / "no"), "--out", str(tmp_path / "run")]
    assert run([*command, "--device", "cpu", "--lpips", str(tmp_path)]) == 2
    assert "LPIPS weights not found" in capsys.readouterr().err
    assert run([*command, "--device", "cpu", "--start", str(tmp_path / "gone")]) == 2
    assert "gone does not exist" in capsys.readouterr().err
    wrong = tmp_path / "wrong.safetensors"
    wrong.write_text("no weights")
    for start in (wrong, tmp_path):
        assert run([*command, "--device", "cpu", "--start", str(start)]) == 2
        said = capsys.readouterr().err
        assert str(start) in said
        assert len(said.splitlines()) == 1
        assert "LPIPS" not in said


def test_rates_of_a_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    called = []
    monkeypatch.setattr(runner, "run_recipe", lambda recipe, *rest: called.append(recipe))
    command = ["train", "nano_debug", "--data", "D", "--out", "O", "--device", "cpu", "--rate"]
    assert run([*command, "0.5"]) == 0
    assert {stage.run.rate for stage in called[0].stages} == {0.5}
    assert run([*command, "0"]) == 2
    assert "--rate is above 0" in capsys.readouterr().err


def smaller_debug() -> recipes.Recipe:
    """nano_debug on crops of 32 pixels."""
    made = recipes.nano_debug()
    return replace(made, pairs=replace(made.pairs, size=32), checks=1)


@pytest.fixture(scope="module")
def debug_run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """nano_debug on the drawn data, cut short."""
    out = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(recipes.RECIPES, "nano_debug", smaller_debug)
        arguments = ["--data", str(data), "--out", str(out), "--device", "cpu", "--steps", "1"]
        assert run(["train", "nano_debug", *arguments, "--workers", "0"]) == 0
        yield out


def test_nano_debug_gives_a_model_that_upscales(debug_run: Path, data: Path, tmp_path: Path) -> None:
    source, output = data / "train_video" / "waves.mp4", tmp_path / "large.mp4"
    model = str(debug_run / "stage2_model")
    arguments = [str(source), "-o", str(output), "--model", model, "--scale", "1", "--frames", "3"]
    assert run(["upscale", *arguments, "--device", "cpu"]) == 0
    assert read_clip(output).shape == (3, 270, 300, 3)


def test_a_stage_leaves_its_settings_log_and_outcome(debug_run: Path) -> None:
    settings = json.loads((debug_run / "joint" / "settings.json").read_text())
    assert settings["batches"]["frames"] == 29
    learned = json.loads((debug_run / "schedule.json").read_text())
    assert json.loads(settings["schedule"]) == learned
    with (debug_run / "joint" / "log.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 1
    outcome = json.loads((debug_run / "joint" / "finished.json").read_text())
    assert outcome["steps"] == 1
    assert set(outcome["loss_before"]) == set(outcome["loss_after"]) == {"nano"}


def test_resume_skips_what_is_finished(debug_run: Path, data: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = ["train", "nano_debug", "--data", str(data), "--out", str(debug_run), "--workers", "0"]
    arguments += ["--steps", "2", "--device", "cpu"]
    assert run(arguments) == 2
    assert "holds a run of nano_debug already" in capsys.readouterr().err
    before = (debug_run / "stage2.safetensors").stat().st_mtime_ns
    assert run([*arguments, "--resume"]) == 0
    assert capsys.readouterr().err.count("finished before, skipped") == 6
    assert (debug_run / "stage2.safetensors").stat().st_mtime_ns == before


def test_a_streamed_run_goes_on_where_it_was(data: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    def first_stage() -> recipes.Recipe:
        made = smaller_debug()
        run = replace(made.stages[1].run, save_every=2)
        return replace(made, stages=(replace(made.stages[1], run=run),))

    def train(out: str, steps: int, *more: str) -> int:
        arguments = ["--data", str(data), "--out", str(tmp_path / out), "--device", "cpu", *more]
        return run(["train", "nano_debug", *arguments, "--steps", str(steps), "--workers", "0"])

    monkeypatch.setitem(recipes.RECIPES, "nano_debug", first_stage)
    assert train("whole", 4, "--stream") == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NanoStage1, "advance", _stop_at(3, NanoStage1.advance))
        assert train("cut", 4, "--stream") == 2
    assert train("cut", 4, "--resume") == 2
    assert "its data is stream, this run's is exact" in capsys.readouterr().err
    assert train("cut", 4, "--stream", "--resume", "--seed", "1") == 2
    assert "its seed is 0, this run's is 1" in capsys.readouterr().err
    assert train("cut", 4, "--stream", "--resume") == 0
    whole, cut = (load_file(tmp_path / out / "adaptation.safetensors") for out in ("whole", "cut"))
    assert all(torch.equal(value, cut[name]) for name, value in whole.items())


def _stop_at(calls: int, advance: Callable) -> Callable:
    """Return `advance` that fails at a later call: two come before the first step."""
    count = itertools.count()

    def stopping(self, progress: float) -> None:
        if next(count) == calls + 1:
            raise RuntimeError("cut off")
        advance(self, progress)

    return stopping


def test_weights_of_another_schedule_are_refused(debug_run: Path) -> None:
    model = NanoTraining.starting_from(debug_run / "joint.safetensors")
    model.load(debug_run / "joint_model")
    config = model.generator.config
    actions = config.schedule.actions
    first = WINDOW if actions[0] == NO_HISTORY else NO_HISTORY
    schedule = replace(config.schedule, actions=(first, *actions[1:]))
    other = NanoTraining(replace(config, schedule=schedule))
    for name in ("joint.safetensors", "joint_model"):
        with pytest.raises(InputError, match="was trained under the schedule"):
            other.load(debug_run / name)


@pytest.mark.shared
def test_losses_fall_on_real_data(shared: Path, tmp_path: Path) -> None:
    recipe = recipes.nano_debug()
    run_recipe(
        replace(recipe, stages=recipe.stages[:2]),
        RunOptions(tmp_path, shared / "data", torch.device("cpu"), workers=1),
    )
    for stage in recipe.stages[:2]:
        outcome = json.loads((tmp_path / stage.name / "finished.json").read_text())
        before, after = outcome["loss_before"], outcome["loss_after"]
        assert before.keys() == after.keys()
        assert all(after[player] < before[player] for player in after), stage.name
