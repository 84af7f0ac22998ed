"""The paper's 5B recipes with tiny networks: four stages in a chain, what each leaves, two processes."""

from __future__ import annotations

import csv
import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from recavsr.cache_policy import Schedule
from recavsr.cli.main import run
from recavsr.errors import InputError
from recavsr.models.lora import LoRALinear, load_adapters, merge, read_header
from recavsr.models.wan_vae import WanVAE
from recavsr.models.weights import ModelFolder
from recavsr.training import paper, recipes
from recavsr.training.distributed import World
from recavsr.training.loop import _sample
from recavsr.training.losses import FrameLosses
from recavsr.training.objective import Batch, BatchSettings
from recavsr.training.paper import TINY_VAE, PaperDecoder, PaperStage1, PaperStage2, Start
from recavsr.training.recompute import recompute_vae_blocks
from recavsr.training.router import CacheRouter
from recavsr.training.runner import RunOptions, Setup, run_recipe
from recavsr.training.stage1 import FixedScope, RouteLearning
from recavsr.training.stage2 import trained_parameters
from recavsr.training.step import TrainingStep
from recavsr.training.vae_losses import frame_losses_by_latent
from recavsr.video.clips import read_clip, write_clip
from tiny import one_thread

pytest.importorskip("diffusers", reason="needs the extra wan")

CPU = World(torch.device("cpu"))
NAMES = ("adaptation", "routing", "stage2", "decoder")
DEBUG = paper.paper_debug()


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with one clip: two patterns that move apart."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "train_video").mkdir()
    y, x = np.mgrid[:256, :288] / 12.0
    frames = [
        np.stack([np.sin(x + t / 5) * np.cos(y), np.sin(y - t / 4), np.cos(x * y / 9)], -1) for t in range(16)
    ]
    clip = [(128 + 100 * frame).astype(np.uint8) for frame in frames]
    write_clip(folder / "train_video" / "waves.mp4", clip, 25)
    rows = ["path\tlicence\tsource\tnote", "train_video/waves.mp4\tCC0\there\tsharp 0.7; split train"]
    (folder / "manifest.tsv").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture(scope="module")
def done(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of paper_debug."""
    out = tmp_path_factory.mktemp("run")
    arguments = ["--data", str(data), "--out", str(out), "--device", "cpu", "--workers", "0", "--steps", "3"]
    assert run(["train", "paper_debug", *arguments]) == 0
    return out


def logged(folder: Path) -> list[dict[str, float]]:
    with (folder / "log.csv").open(newline="") as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    assert set(a) == set(b)
    return all(torch.equal(a[name], b[name]) for name in a)


# ---------------------------------------------------------------- the chain


@pytest.mark.parametrize("name", NAMES)
def test_every_stage_trains(done: Path, name: str) -> None:
    rows = logged(done / name)
    assert len(rows) == 3
    assert all(math.isfinite(value) for row in rows for value in row.values())
    norms = [key for key in rows[-1] if key.endswith("grad_norm")]
    assert all(rows[-1][key] > 0 for key in norms)
    assert len(norms) == (2 if name == "stage2" else 1)
    assert (done / f"{name}.safetensors").is_file()
    ModelFolder.open(done / f"{name}_model").check()


def test_adapters_go_from_stage_to_stage_and_the_folder_is_their_sum(done: Path) -> None:
    base = ModelFolder.open(done / "start")
    before: dict[str, Tensor] = {}
    for name in NAMES[:3]:
        file = done / f"{name}.safetensors"
        assert read_header(file).base == (done / "start").resolve()
        generator = base.load_generator()
        load_adapters(generator, file)
        merged = ModelFolder.open(done / f"{name}_model").load_generator().state_dict()
        assert same(merge(generator).state_dict(), merged)
        tensors = load_file(file)
        assert {t.dtype for t in tensors.values()} == {torch.float32}
        if before:
            change = max(float((tensors[key] - before[key]).abs().max()) for key in tensors)
            assert 0 < change < 0.05  # three steps of 1e-3 from where the last stage ended
        before = tensors


def test_the_learned_route_is_handed_on(done: Path) -> None:
    config = ModelFolder.open(done / "routing_model").generator
    router = CacheRouter(config.layers, config.schedule.anchor_rule)
    router.load_state_dict(load_file(done / "routing_model" / "router.safetensors"))
    learned = router.export()
    assert Schedule.from_json((done / "schedule.json").read_text()) == learned
    assert config.schedule == learned
    assert json.loads((done / "stage2" / "settings.json").read_text())["schedule"] == json.dumps(
        learned.to_config()
    )
    for name in ("stage2_model", "decoder_model"):
        assert ModelFolder.open(done / name).generator.schedule == learned
    adaptation = ModelFolder.open(done / "adaptation_model").generator.schedule
    assert {action.recent for action in adaptation.actions} == {6}


def test_the_decoder_is_put_beside_the_generator_of_stage_2(done: Path) -> None:
    def transformer(name: str) -> dict[str, Tensor]:
        return load_file(done / name / "transformer.safetensors")

    assert same(transformer("decoder_model"), transformer("stage2_model"))
    decoder = load_file(done / "decoder_model" / "flashdecoder.safetensors")
    assert same(decoder, load_file(done / "decoder.safetensors"))
    assert not same(decoder, load_file(done / "start" / "flashdecoder.safetensors"))


def test_the_result_upscales(done: Path, data: Path, tmp_path: Path) -> None:
    source, output = data / "train_video" / "waves.mp4", tmp_path / "large.mp4"
    arguments = ["--model", str(done / "decoder_model"), "--scale", "1", "--frames", "3", "--device", "cpu"]
    assert run(["upscale", str(source), "-o", str(output), *arguments]) == 0
    assert read_clip(output).shape == (3, 256, 288, 3)


def test_checkpoints_hold_only_what_is_trained(done: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    (path,) = sorted((done / "stage2" / "checkpoints").glob("step_*"))[-1:]
    names = {n.removeprefix("model.") for n in FileSystemReader(path).read_metadata().state_dict_metadata}
    names = {n for n in names if not n.startswith("players.")}
    assert any(".lora_A." in n for n in names)
    assert any(n.startswith("discriminator.heads.") for n in names)
    frozen = {n for n in names if "backbone" in n} | {n for n in names if n.endswith("to_q.weight")}
    assert frozen == {"discriminator.backbone.prompt"}


def test_a_stage_that_was_cut_off_goes_on(done: Path, data: Path, tmp_path: Path) -> None:
    """Adaptation for two steps, then for one more: as three at once."""
    only = replace(DEBUG, stages=DEBUG.stages[:1], make_start=None)
    arguments = ["train", "paper_debug", "--data", str(data), "--out", str(tmp_path), "--device", "cpu"]
    arguments += ["--workers", "0", "--start", str(done / "start")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(recipes.RECIPES, "paper_debug", lambda: only)
        assert run([*arguments, "--steps", "2"]) == 0
        (tmp_path / "adaptation" / "finished.json").unlink()
        assert run([*arguments, "--steps", "3", "--resume"]) == 0
    assert same(load_file(tmp_path / "adaptation.safetensors"), load_file(done / "adaptation.safetensors"))


# ---------------------------------------------------------------- starts


def test_starts_that_do_not_fit(done: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"recavsr convert wan2\.2"):
        Start.open(None)
    with pytest.raises(InputError, match="does not exist"):
        Start.open(tmp_path / "nothing")
    moved = tmp_path / "adaptation.safetensors"
    from safetensors.torch import save_file

    header = {"lora": '{"rank": 4, "alpha": 4.0, "targets": []}', "base": str(tmp_path / "gone")}
    save_file({"x": torch.zeros(1)}, str(moved), metadata=header)
    with pytest.raises(InputError, match=r"gone, which is not there any more.*adaptation_model"):
        Start.open(moved)


def test_a_merged_folder_is_a_start_too(done: Path) -> None:
    start = Start.open(done / "routing_model")
    generator = start.generator(torch.device("cpu"), rank=2)
    assert generator.config.schedule == ModelFolder.open(done / "routing_model").generator.schedule
    ranks = {m.lora_A.out_features for m in generator.modules() if isinstance(m, LoRALinear)}
    assert ranks == {2}


# ---------------------------------------------------------------- memory


def test_the_discriminator_shares_the_frozen_weights_of_its_generator(done: Path) -> None:
    objective = DEBUG.stages[2].build(Setup(CPU, done / "routing.safetensors"))
    assert isinstance(objective, PaperStage2)
    generator, backbone = objective.model.generator, objective.model.discriminator.backbone
    owned = {id(p) for p in generator.parameters()}
    assert all(id(p) in owned for p in backbone.parameters())
    assert not any(p.requires_grad for p in backbone.parameters())
    assert {player.name for player in objective.players} == {"discriminator", "generator"}
    assert {id(p) for p in objective.players[1].parameters} == {id(p) for p in trained_parameters(generator)}


@pytest.mark.parametrize("phase", [FixedScope, RouteLearning])
def test_bfloat16_with_float32_masters(done: Path, phase: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "compute_dtype", lambda device: torch.bfloat16)
    stage = DEBUG.stages[0 if phase is FixedScope else 1]
    objective = stage.build(Setup(CPU, done / "adaptation.safetensors"))
    assert isinstance(objective, PaperStage1)
    parameters = list(objective.model.generator.parameters())
    assert {p.dtype for p in parameters if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in parameters if not p.requires_grad} == {torch.bfloat16}
    hq = torch.rand(1, 3, 13, 64, 96) * 2 - 1
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        ((_, losses),) = objective.updates(Batch(hq, hq))
    losses["loss"].backward()
    assert torch.isfinite(losses["loss"])
    gradients = [p.grad for p in objective.players[0].parameters]
    assert all(g is not None and g.dtype == torch.float32 and torch.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("name", ["stage2", "decoder"])
@pytest.mark.parametrize("frames", [13, 1])
def test_pictures_of_clips_and_of_images_in_bfloat16(
    done: Path, name: str, frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paper, "compute_dtype", lambda device: torch.bfloat16)
    objective = DEBUG.stages[NAMES.index(name)].build(Setup(CPU, done / "routing.safetensors"))
    assert isinstance(objective, (PaperStage2, PaperDecoder))
    hq = torch.rand(1, 3, frames, 64, 96) * 2 - 1
    step = TrainingStep(objective, CPU, precision="bf16")
    made = _sample(objective.sample, step, Batch(hq, hq))
    assert made.shape == hq.shape
    assert torch.isfinite(made).all()


# ---------------------------------------------------------------- frames, one latent at a time


def distance(x: Tensor, y: Tensor) -> Tensor:
    """A stand-in for LPIPS."""
    return (x - y).diff(dim=-1).square().flatten(1).mean(1)


@pytest.mark.parametrize(("frames", "again"), [(1, True), (9, False), (9, True)])
def test_frame_losses_by_latent_are_those_of_the_whole_clip(frames: int, again: bool) -> None:
    torch.manual_seed(0)
    vae = WanVAE(TINY_VAE).eval().requires_grad_(False)
    hq = torch.rand(2, 3, frames, 32, 48) * 2 - 1
    batch = Batch(hq, 0.9 * hq)
    losses = FrameLosses("mse", perceptual_weight=2.0)
    latents = torch.randn(2, 48, (frames + 3) // 4, 2, 3, requires_grad=True)
    plain = deepcopy(vae)
    if again:
        recompute_vae_blocks(vae.model.decoder)
    total, terms = frame_losses_by_latent(vae, latents, batch, losses, distance)
    (3 * total).backward()
    found, latents.grad = latents.grad, None

    # The whole clip at once, with the decoder's memory cut in the same places.
    state, pieces = plain.start(), []
    for piece in latents.split(1, dim=2):
        state, made = plain.step(state.detach(), piece)
        pieces.append(made)
    whole, wanted = losses(torch.cat(pieces, dim=2), *batch, distance)
    (3 * whole).backward()
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(found, latents.grad, rtol=1e-4, atol=1e-8)
    for name in ("pixel", "perceptual"):
        torch.testing.assert_close(terms[name], wanted[name])
    assert found is not None
    assert float(found.abs().max()) > 0


def test_losses_between_frames_are_refused() -> None:
    vae = WanVAE(TINY_VAE)
    batch = Batch(torch.zeros(1, 3, 1, 32, 32), torch.zeros(1, 3, 1, 32, 32))
    with pytest.raises(ValueError, match="whole clip"):
        frame_losses_by_latent(
            vae, torch.zeros(1, 48, 1, 2, 2), batch, FrameLosses("l1", 0.0, 1.0, 1.0), None
        )


# ---------------------------------------------------------------- the paper's numbers


def test_the_papers_numbers() -> None:
    """Appendix B of the paper, line by line."""
    made = {
        stage.name: (stage, recipe.pairs)
        for recipe in (make() for name, make in recipes.RECIPES.items() if name.startswith("paper_5b"))
        for stage in recipe.stages
    }
    assert tuple(made) == NAMES
    steps = {name: stage.run.steps for name, (stage, _) in made.items()}
    assert steps == {"adaptation": 70_000, "routing": 30_000, "stage2": 10_000, "decoder": 500_000}
    sizes = {name: (pairs.frames, pairs.size) for name, (_, pairs) in made.items()}
    assert sizes == dict.fromkeys(NAMES[:3], (85, (704, 1280))) | {"decoder": (17, (896, 1344))}
    assert {tuple(pairs.presets.items()) for _, pairs in made.values()} == {(("realbasicvsr", 1.0),)}
    assert {tuple(pairs.scales.items()) for _, pairs in made.values()} == {((4, 1.0),)}
    facts = {name: stage.settings for name, (stage, _) in made.items()}
    assert {facts[name]["rank"] for name in NAMES[:3]} == {512}

    def optimizer(of: dict) -> tuple:
        return of["learning_rate"], of["betas"], of["weight_decay"], of["average_decay"]

    for name in ("adaptation", "routing"):
        settings = facts[name]["settings"]
        assert settings["batches"] == BatchSettings(32, 85, 32, 0.25).__dict__
        assert optimizer(settings["optimizer"]) == (2e-5, (0.9, 0.99), 1e-4, None)
        assert settings["plan"] == {"first": 6, "rest": 2}
        assert settings["one_step_share"] == 0
    assert facts["adaptation"]["settings"]["phase"]["action"] == {"recent": 6, "anchors": False}
    phase = facts["routing"]["settings"]["phase"]
    assert (phase["capacity"], phase["budget_weight"], phase["entropy_weight"]) == (2.0, 0.5, 0.5)
    assert (phase["temperatures"], phase["entropy_rise"]) == ((2.0, 0.3), (0.0, 0.0))

    settings = facts["stage2"]["settings"]
    assert settings["batches"] == BatchSettings(16, 85, 64, 0.2).__dict__
    assert settings["plan"] == {"first": 6, "rest": 2}
    assert optimizer(settings["generator"]) == (1e-5, (0.5, 0.99), 1e-4, 0.999)
    assert optimizer(settings["discriminator"]) == (1e-5, (0.0, 0.99), 1e-4, None)
    assert (settings["generator"]["first_step"], settings["discriminator"]["first_step"]) == (20, 0)
    assert settings["discriminator"]["warm_up_steps"] == 20
    weights = [settings[name] for name in ("latent_weight", "adversarial_weight", "r1_weight")]
    assert weights == [1.0, 0.1, 1000.0]
    assert (settings["adversarial_cap"], settings["train_decoder"]) == (None, False)
    assert settings["frames"] == FrameLosses("mse", perceptual_weight=2.0).__dict__
    msq = facts["stage2"]["discriminator"]
    assert (msq["layers"], msq["width"], msq["queries"]) == ((8, 15, 22), 512, 36 // 3)
    assert (msq["scopes"], msq["window"], msq["tube_latents"]) == (
        ("global", "spatial", "temporal"),
        (8, 8),
        4,
    )

    settings = facts["decoder"]["settings"]
    assert settings["batches"] == BatchSettings(32, 17, 128, 0.2).__dict__
    assert settings["frames"] == FrameLosses("l1", perceptual_weight=0.4).__dict__
    assert optimizer(settings["optimizer"]) == (5e-5, (0.9, 0.999), 0.01, 0.9995)
    passes = {
        name: stage.run.passes(facts[name]["settings"]["batches"]["clips"] // 8)
        for name, (stage, _) in made.items()
    }
    assert passes == {"adaptation": 4, "routing": 4, "stage2": 2, "decoder": 4}


# ---------------------------------------------------------------- two processes


def alike(data: Path, out: Path, start: Path) -> None:
    """Train two stages for a step, every process on the same clip with the same noise."""
    from recavsr.training import batches, runner

    seeds = runner._set_seeds
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_set_seeds", lambda seed, rank: seeds(seed, 0))
        patch.setattr(World, "share", lambda world, count, what: count // 2)
        patch.setattr(batches, "_share_of", lambda world, first, count: range(first, first + count // 2))
        run = replace(DEBUG.stages[0].run, steps=1, sample_every=0)
        stages = [replace(DEBUG.stages[number], run=run) for number in (0, 2)]
        recipe = replace(DEBUG, stages=tuple(stages))
        run_recipe(recipe, RunOptions(out, data, CPU.device, start=start, workers=0))


def test_two_processes_with_fsdp_train_like_one(data: Path, done: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    call = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]); "
        "from test_training_paper import alike; alike(*map(Path, sys.argv[2:]))"
    )
    here = str(Path(__file__).parent)
    arguments = [sys.executable, "-c", call, here, str(data), str(tmp_path / "two"), str(done / "start")]
    together = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(arguments, env={**os.environ, **together, "RANK": rank, "LOCAL_RANK": rank})
        for rank in "01"
    ]
    assert [process.wait(timeout=300) for process in processes] == [0, 0]
    alike(data, tmp_path / "one", done / "start")
    base = ModelFolder.open(done / "start")
    for name in ("adaptation", "stage2"):
        ((two,), (one,)) = (logged(tmp_path / side / name) for side in ("two", "one"))
        for key in set(two) - {"seconds"}:
            assert two[key] == pytest.approx(one[key], rel=2e-3, abs=1e-6), key
        file = tmp_path / "two" / f"{name}.safetensors"
        generator = base.load_generator()
        load_adapters(generator, file)
        merged = ModelFolder.open(tmp_path / "two" / f"{name}_model").load_generator().state_dict()
        assert same(merge(generator).state_dict(), merged)
        # AdamW's first step is of the gradient's sign: what is next to zero may go the other way.
        alone = load_file(tmp_path / "one" / f"{name}.safetensors")
        close = [(value - alone[key]).abs() < 1e-5 for key, value in load_file(file).items()]
        assert float(torch.cat([c.flatten() for c in close]).float().mean()) > 0.99
