"""Ablations from data to table: what each variant trains, one run of several, what the report says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from media import drawn
from recavsr.cache_policy import CacheAction, Schedule
from recavsr.cli.main import run
from recavsr.data.clips import ClipSource
from recavsr.data.pack import build_pack
from recavsr.data.pool import PairSettings
from recavsr.errors import InputError
from recavsr.evaluation.peers import Upscaler, bicubic
from recavsr.evaluation.validation import CONDITIONS, validate, validation_pairs
from recavsr.models.presets import nano
from recavsr.stream.load import load
from recavsr.training import ablations
from recavsr.training.ablation_report import TABLES, mean_of, read_results, render
from recavsr.training.ablations import VARIANTS, Bench, Job, Micro, ablation, chosen_jobs, cost, spread
from recavsr.training.distributed import World
from recavsr.training.nano import NanoTraining
from recavsr.training.runner import Setup
from recavsr.video.clips import write_clip
from tiny import one_thread

CPU = torch.device("cpu")
TOY = Micro(
    seconds=0.5,  # by time, a stage writes no checkpoint at its end
    pairs=PairSettings(frames=29, size=32, degradations=1),
    latents=8,
    clips=1,
    perceptual_weight=0.0,
    evaluated_frames=25,
    evaluated_photos=0,
)


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pack of two clips and two photos, one of each held back."""
    data, pack = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("pack")
    (data / "train_video").mkdir()
    (data / "photos").mkdir()
    rows = ["path\tlicence\tsource\tnote"]
    for seed in (1, 2):
        name = f"train_video/waves{seed}.mp4"
        write_clip(data / name, [drawn(seed, t / 30) for t in range(12)], 25)
        rows.append(f"{name}\tCC0\there\tsharp 0.7; split train")
        cv2.imwrite(str(data / "photos" / f"p{seed}.jpg"), drawn(seed + 2))
        rows.append(f"photos/p{seed}.jpg\tCC0\there\t")
    (data / "manifest.tsv").write_text("\n".join(rows) + "\n")
    build_pack(data, pack, part_bytes=10**9, validation_videos=1, validation_photos=1)
    return pack


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder to start from: fresh weights whose decoder answers to its latents."""
    torch.manual_seed(0)
    model = NanoTraining()
    with torch.no_grad():
        model.decoder.head.outer.weight.normal_(std=0.01)
    model.set_statistics(torch.linspace(-1, 1, 48), torch.linspace(0.5, 2, 48))
    folder = tmp_path_factory.mktemp("start")
    model.export(folder)
    return folder


@pytest.fixture(scope="module")
def bench(pack: Path, start: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("out")
    return Bench(pack, start, folder, CPU, TOY, workers=0, fill=2, cache=tmp_path_factory.mktemp("cache"))


# ---------------------------------------------------------------- what a variant is


def built(name: str, start: Path, stage: int = 0, route: Schedule | None = None):
    return ablation(name, TOY, route).stages[stage].build(Setup(World(CPU), start))


def test_every_variant_is_a_row_of_its_table() -> None:
    for group, table in TABLES.items():
        assert set(table.rows) == {name for name, variant in VARIANTS.items() if variant.group == group}
        assert {name for pair in table.comparisons for name in pair} <= set(table.rows)


def test_every_variant_is_a_recipe(capsys: pytest.CaptureFixture) -> None:
    route = nano().schedule
    for name in VARIANTS:
        recipe = ablation(name, Micro(seconds=120), route)
        assert sum(stage.run.seconds or 0 for stage in recipe.stages) == pytest.approx(120)
        assert recipe.pairs.bursts == VARIANTS[name].bursts
    assert run(["ablate", "list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in VARIANTS)


def test_cache_variants_differ_in_the_generator_only(start: Path) -> None:
    saved = NanoTraining.starting_from(start)
    route = replace(nano().schedule, actions=(CacheAction(1),) * 6)
    wanted = {
        "uniform-r": (Schedule.uniform(6, CacheAction(2)), True),
        "uniform-3r": (Schedule.uniform(6, CacheAction(6)), True),
        "routed": (nano().schedule, True),
        "no-recycling": (route, False),
    }
    for name, (schedule, recycling) in wanted.items():
        made = built(name, start, route=route).nano
        assert (made.generator.config.schedule, made.generator.config.recycling) == (schedule, recycling)
        for part in ("encoder", "decoder"):
            for a, b in zip(getattr(made, part).parameters(), getattr(saved, part).parameters()):
                assert torch.equal(a, b)
        assert torch.equal(made.latents_std, saved.latents_std)
        assert torch.equal(made.decoder.latents_mean, saved.decoder.latents_mean)
        assert not torch.equal(made.generator.head.weight, saved.generator.head.weight)
    with pytest.raises(InputError, match="run that first"):
        ablation("no-recycling", TOY)


def test_the_other_variants_start_from_what_is_given(start: Path) -> None:
    saved = NanoTraining.starting_from(start)
    scoped = built("scope-temporal", start)
    assert scoped.model.discriminator.config.scopes == ("global", "temporal")
    assert torch.equal(scoped.nano.generator.head.weight, saved.generator.head.weight)
    assert not any(p.requires_grad for p in scoped.nano.decoder.parameters())
    without = built("decoder-no-lr", start)
    assert not without.nano.decoder.config.lr_conditioning
    assert not torch.equal(without.nano.decoder.lr_stem.weight, saved.decoder.lr_stem.weight)
    assert torch.equal(without.nano.decoder.latents_mean, saved.decoder.latents_mean)
    wide, deep = (built(f"generator-{name}", start)._nano for name in ("wide", "deep"))
    assert (wide.generator.config.width, deep.generator.config.layers) == (384, 12)
    assert torch.equal(deep.decoder.lr_stem.weight, saved.decoder.lr_stem.weight)
    assert torch.equal(deep.latents_std, saved.latents_std)
    stage = built("all-four", start).stage
    assert (stage.plan.first, stage.later_weight, stage.through_history) == (2, 2.0, True)


def test_costs() -> None:
    uniform = cost(replace(nano(), schedule=Schedule.uniform(6, CacheAction(2))))
    assert (uniform["slots"], uniform["history_latents"]) == (12, 12)
    assert uniform["history_bytes"] == 12 * 2 * (34 * 60) * 256 * 2
    # Anchors inside the recent window count once: W4+A holds 4 recent latents and 1 or 2 anchors before them.
    both = cost(replace(nano(), schedule=Schedule.uniform(6, CacheAction(4, anchors=True))))
    assert both["slots"] == 36
    assert 6 * 5 <= both["history_latents"] < 36


def test_jobs_and_cards() -> None:
    jobs = chosen_jobs(["cache", "scope-all"], [0, 1])
    assert [job.name for job in jobs[:4]] == ["uniform-3r-0", "uniform-r-0", "routed-0", "no-recycling-0"]
    loads = spread(jobs, 4)
    assert sorted(job.name for share in loads for job in share) == sorted(job.name for job in jobs)
    for share in loads:
        names = [job.name for job in share]
        for seed in (0, 1):
            if f"no-recycling-{seed}" in names:
                assert names.index(f"routed-{seed}") < names.index(f"no-recycling-{seed}")
    with pytest.raises(InputError, match="no ablation 'caches'"):
        chosen_jobs(["caches"], [0])


def test_cards_share_the_jobs(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each card's process is this command again, for its own jobs on its own card."""
    calls: list[tuple[list[str], str]] = []

    class Process:
        def __init__(self, command: list[str], env: dict[str, str], **_: object) -> None:
            calls.append((command, env["CUDA_VISIBLE_DEVICES"]))

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(ablations.subprocess, "Popen", Process)
    ClipSource.open(bench.pack, cache=bench.cache, processes=0)
    monkeypatch.setattr(ablations.ClipSource, "open", lambda *_, **__: None)
    arguments = ["ablate", "run", "cache", "--seeds", "3", "--data", str(bench.pack), "--seconds", "60"]
    arguments += ["--start", str(bench.start), "--out", str(tmp_path), "--device", "cpu"]
    assert run([*arguments, "--cards", "2"]) == 0
    assert [card for _, card in calls] == ["0", "1"]
    ran: list[str] = []

    def note(jobs: list[Job], bench: Bench, *_: object) -> None:
        assert bench.micro.seconds == 60
        ran.extend(job.name for job in jobs)

    monkeypatch.setattr(ablations, "run_jobs", note)
    for command, _ in calls:
        assert command[1:3] == ["-m", "recavsr"]
        assert run(command[3:]) == 0
    assert ran == ["uniform-3r-3", "routed-3", "no-recycling-3", "uniform-r-3"]


# ---------------------------------------------------------------- validation


def test_validation_pairs_are_held_back_and_alike_every_time(bench: Bench) -> None:
    source = ClipSource.open(bench.pack, cache=bench.cache, processes=0, split="validation")
    first, again = (validation_pairs(source, frames=5, size=64, photos=1) for _ in range(2))
    assert [pair.moving.degradation for pair in first] == [*CONDITIONS] * 2
    held = {shot.name for shot in source.shots if shot.split == "validation"}
    assert {first[0].moving.clip} == held
    for a, b in zip(first, again):
        assert np.array_equal(a.moving.lr_frames, b.moving.lr_frames)
        assert a.moving.lr_frames.shape == (5, 16, 16, 3)
        assert (a.still.truth == a.still.truth[0]).all()
        assert np.array_equal(a.still.truth[0], a.moving.truth[0])
    (shot,) = [i for i, shot in enumerate(source.shots) if shot.split == "validation"]
    centre = source.pixels[source.shots[shot].offset :][: 3 * 270 * 300].reshape(3, 270, 300)
    assert np.array_equal(first[0].moving.truth[0], centre[:, 103:167, 118:182].transpose(1, 2, 0))
    rows = validate([Upscaler("bicubic", bicubic, per_frame=True)], first)
    assert [row["degradation"] for row in rows] == [*CONDITIONS] * 2
    assert min(row["psnr"] for row in rows) > 15
    mild, heavy, bursts = (row["still_flicker"] for row in rows[:3])
    assert bursts > 2 * mild > 0
    assert heavy < bursts  # H.264 holds what stands still


# ---------------------------------------------------------------- a run


@pytest.fixture(scope="module")
def results(bench: Bench) -> list[dict]:
    names = ["no-recycling", "routed", "decoder-no-lr", "scope-all", "generator-wide", "all-four"]
    said: list[str] = []
    ablations.run_jobs(chosen_jobs(names, [0]), bench, say=said.append)
    assert sum("done in" in line for line in said) == 6
    return read_results([bench.out / "results.jsonl"])


def test_a_run_of_several(results: list[dict], bench: Bench) -> None:
    by_name = {result["variant"]: result for result in results}
    assert set(by_name) == {
        "no-recycling", "routed", "decoder-no-lr", "scope-all", "generator-wide", "all-four"
    }  # fmt: skip
    for result in results:
        assert all(steps >= 1 for steps in result["steps"].values())
        whole = [row for row in result["rows"] if row["model"] == "whole"]
        assert {row["degradation"] for row in whole} == set(CONDITIONS)
        assert mean_of(result, "psnr") == pytest.approx(
            np.mean([row["psnr"] for row in whole if row["degradation"] != "bursts"])
        )
    routed, without = by_name["routed"], by_name["no-recycling"]
    assert routed["schedule"] == without["schedule"]
    assert json.loads((bench.out / "routed-0" / "schedule.json").read_text()) == routed["schedule"]
    assert {row["model"] for row in routed["rows"]} == {"whole", "blocks-alone", "stateless"}
    assert {row["model"] for row in by_name["decoder-no-lr"]["rows"]} == {"whole", "reconstruction"}
    assert by_name["decoder-no-lr"]["decoder_fps"] > 0


def test_switches_hold_in_the_exported_folders(results: list[dict], bench: Bench) -> None:
    without = load(bench.out / "no-recycling-0" / "joint_model", device="cpu", precision="fp32")
    assert not without.generator.config.recycling
    decoder = load(bench.out / "decoder-no-lr-0" / "decoder_model", device="cpu", precision="fp32").decoder
    latents = torch.randn(1, 48, 2, 2, 2)
    frames = [decoder.step(decoder.start(), latents, torch.rand(1, 3, 5, 32, 32))[1] for _ in range(2)]
    assert torch.equal(*frames)


def test_what_is_done_is_not_done_again(results: list[dict], bench: Bench) -> None:
    said: list[str] = []
    ablations.run_jobs(chosen_jobs(["routed", "scope-all"], [0]), bench, say=said.append)
    assert said == []
    with pytest.raises(InputError, match=r"was made from .*: take another --out"):
        ablations.run_jobs([], replace(bench, start=bench.out / "routed-0" / "joint_model"))
    late = replace(bench, micro=replace(TOY, seconds=60.0))
    ablations.run_jobs([Job(VARIANTS["routed"], 1)], late, budget=30.0, say=said.append)
    assert said == ["routed-1: left out, the time is up"]
    ablations.run_jobs([Job(VARIANTS["no-recycling"], 1)], bench, say=said.append)
    assert "left out, `routed` must run first" in said[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "cache", "--start", "X"], "Missing option '--data'"),
        (["run", "caches", "--data", "P", "--start", "X", "--out", "O"], "no ablation 'caches'; choose of"),
        (["run", "cache", "--data", "P", "--start", "X", "--out", "O", "--seeds", "0 1"], "--seeds takes"),
        (["report", "nowhere"], "no results in nowhere: "),
    ],
)
def test_the_command_says_what_it_lacks(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture
) -> None:
    assert run(["ablate", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_the_record_of_the_repository_is_rendered(capsys: pytest.CaptureFixture) -> None:
    record = Path(__file__).parents[1] / "benchmarks" / "results" / "ablations.jsonl"
    assert run(["ablate", "report", str(record)]) == 0
    assert "| Uniform (3R) (`uniform-3r`) | " in capsys.readouterr().out


# ---------------------------------------------------------------- the report


def result(variant: str, group: str, seed: int, psnr: float, **models: float) -> dict:
    rows = [
        {
            "model": model,
            "degradation": name,
            "clip": "c",
            "lpips": None,
            "psnr": value,
            "still_flicker": 2.0 / value,
        }
        | {"later_psnr": 2 * value, "later_still_flicker": 1.0}
        for model, value in {"whole": psnr, **models}.items()
        for name in CONDITIONS
    ]
    costs = {"slots": 12, "history_bytes": 5e7, "history_latents": 12.0, "steps": {"a": 10, "b": 20}}
    return {"variant": variant, "group": group, "seed": seed, "rows": rows, **costs}


def test_the_report_says_what_came_out() -> None:
    schedule = Schedule((CacheAction(2), CacheAction(), CacheAction(4, True))).to_config()
    made = [
        result("routed", "cache", 1, 30.4) | {"schedule": schedule},
        result("routed", "cache", 0, 30.2),
        result("uniform-r", "cache", 0, 30.0),
        result("uniform-r", "cache", 1, 30.0),
        result("uniform-3r", "cache", 0, 30.3) | {"history_latents": 36.0},
        result("uniform-3r", "cache", 1, 30.3) | {"history_latents": 36.0},
    ]
    text = render(made)
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows[0] == "| variant | PSNR ↑ | flicker ↓ | slots | KV (MB) | FLOPs (x) | steps | seeds |"
    assert [row.split(" | ")[0] for row in rows[2:5]] == [
        "| Uniform (3R) (`uniform-3r`)", "| Uniform (R) (`uniform-r`)", "| Ours (`routed`)"
    ]  # fmt: skip
    assert rows[4].endswith("| 30.30 ± 0.10 | 0.066 ± 0.000 | 12 | 50 | 0.33 | 30 | 0, 1 |")
    assert rows[5] == "| difference | PSNR ↑ | flicker ↓ |"
    assert rows[7].startswith("| `routed` - `uniform-r` | +0.300 (+0.200 to +0.400) | -0.0007 (-0.0009 to")
    assert "**routed against uniform-r**: better in all 2 seeds: PSNR, flicker." in text
    assert "**routed against uniform-3r**: seeds disagree: PSNR, flicker." in text
    assert "- Route learned under seed 1: W2, ∅, W4+A (8 slots)." in text
    assert "no-recycling" not in text
    assert "- Made not recorded: all." in text


def test_the_report_tells_results_of_other_makings_apart() -> None:
    facts = [{"start": start, "budget": 120.0, "environment": {"device": "H"}} for start in ("a", "b")]
    made = [result("routed", "cache", seed, 30.0) | facts[seed] for seed in (0, 1)]
    text = render(made)
    assert "- Made from a, by 120 s of training, on H: routed-0." in text
    assert "- Made from b, by 120 s of training, on H: routed-1." in text
    assert "on H: all." in render(made[:1])
    one = render([made[0], result("uniform-r", "cache", 0, 29.0)])
    assert "**routed against uniform-r**: one seed, no verdict: PSNR, flicker." in one


def test_targets_of_the_history_group() -> None:
    history = render([result("as-nano", "history", 0, 30.0, **{"blocks-alone": 29.9, "stateless": 29.7})])
    said = "K/V of the generator: +0.100 dB, +0.3% less flicker; after the first block +0.200 dB, +0.0%."
    assert f"{said} Target missed." in history
    assert "without any memory: +0.300 dB, +1.0% less flicker; after the first block +0.600 dB" in history
    assert history.count("Target met.") == 1
