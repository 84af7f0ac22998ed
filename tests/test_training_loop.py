"""The loop: players, schedules, averages, exact resume, many processes, logs, and how it stops."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recavsr.errors import InputError
from recavsr.training import loop
from recavsr.training.batches import Prefetch
from recavsr.training.checkpoints import Checkpoints, Position, complete
from recavsr.training.distributed import World
from recavsr.training.logs import CsvLog, sample_sheet
from recavsr.training.loop import RunSettings, TrainingError, _sample, train
from recavsr.training.objective import Batch, BatchSettings, Losses, OptimizerSettings, Player
from recavsr.training.optimizer import Averages, learning_rate
from recavsr.training.step import Rehearsal, TrainingStep
from recavsr.video.clips import read_clip
from tiny import one_thread
from toy_training import BATCHES, FAST, Source, TinyRollout, ToyGan

WORLD = World(torch.device("cpu"))
TOY = Path(__file__).with_name("toy_training.py")


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "log.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def losses_of(folder: Path) -> dict[int, tuple[str, ...]]:
    """Return step -> every logged number but the time."""
    return {
        int(row["step"]): tuple(value for name, value in row.items() if name != "seconds")
        for row in rows_of(folder)
    }


def run_toy(folder: Path, objective: ToyGan | None = None, **settings: object) -> ToyGan:
    objective = ToyGan() if objective is None else objective
    torch.manual_seed(0)
    run = RunSettings(**({"steps": 8, "log_every": 1} | settings))  # type: ignore[arg-type]
    train(
        objective, Source(), run, folder, WORLD, resume=True, sample=objective.sample, say=lambda text: None
    )
    return objective


# ---------------------------------------------------------------- schedules and averages


def test_the_learning_rate_warms_up_and_cools_down() -> None:
    settings = OptimizerSettings(2.0, warm_up_steps=4, cool_down=0.5)
    assert [learning_rate(settings, step, 0.0) for step in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert learning_rate(settings, 100, 0.5) == pytest.approx(2.0)
    assert learning_rate(settings, 100, 0.75) == pytest.approx(1.0)  # half of the half cosine
    assert learning_rate(settings, 100, 1.0) == pytest.approx(0.0)
    assert learning_rate(OptimizerSettings(2.0, warm_up_steps=4), 100, 0.99) == 2.0
    late = OptimizerSettings(2.0, warm_up_steps=4, first_step=10)
    assert [learning_rate(late, step, 0.0) for step in (10, 11, 13, 14)] == [0.5, 1.0, 2.0, 2.0]


def test_averages() -> None:
    parameter = nn.Parameter(torch.tensor([0.0]))
    averages = Averages([parameter], decay=0.9)
    for value in (1.0, 2.0):
        parameter.data.fill_(value)
        averages.update()
    expected = 0.9 * 0.1 + 0.1 * 2.0
    assert averages.values[0].item() == pytest.approx(expected)
    with averages.in_place_of_parameters():
        assert parameter.item() == pytest.approx(expected)
    assert parameter.item() == 2.0
    averages.copy_to_parameters()
    assert parameter.item() == pytest.approx(expected)


# ---------------------------------------------------------------- steps


def plain_training(steps: int, first_step: int = 0, rate_of_all: float = 1.0) -> ToyGan:
    """Train the toy as anyone would write it down: the oracle of the loop."""
    toy, source = ToyGan(noise=0.0), Source()
    nets = {"d": toy.discriminator, "g": toy.generator}
    optimizers = {
        name: torch.optim.AdamW(net.parameters(), 0.0, FAST.betas, weight_decay=FAST.weight_decay)
        for name, net in nets.items()
    }
    averages = {name: [p.detach().clone() for p in net.parameters()] for name, net in nets.items()}
    for step in range(steps):
        batch = source.batch(BATCHES)
        for name, losses in toy.updates(batch):
            first = first_step if name == "g" else 0
            if step < first:
                continue
            parameters = list(nets[name].parameters())
            gradients = torch.autograd.grad(losses["loss"], parameters)
            norm = torch.stack([g.norm() for g in gradients]).norm()
            for parameter, gradient in zip(parameters, gradients):
                parameter.grad = gradient * min(1.0, 1.0 / (norm.item() + 1e-6))
            left = min(1.0, (1 - step / steps) / 0.5)
            rate = rate_of_all * 0.05 * min(1.0, (step - first + 1) / 3) * (1 - math.cos(math.pi * left)) / 2
            optimizers[name].param_groups[0]["lr"] = rate
            optimizers[name].step()
            for average, parameter in zip(averages[name], parameters):
                average.mul_(0.9).add_(parameter.detach(), alpha=0.1)
    for name, net in nets.items():
        for average, parameter in zip(averages[name], net.parameters()):
            parameter.data.copy_(average)
    return toy


@pytest.mark.parametrize(("micro_batches", "first_step"), [(1, 0), (2, 0), (1, 4)])
def test_the_loop_does_what_plain_training_does(tmp_path: Path, micro_batches: int, first_step: int) -> None:
    objective = ToyGan(noise=0.0, first_step=first_step)
    run_toy(tmp_path, objective, micro_batches=micro_batches)
    expected = plain_training(8, first_step)
    for (name, made), wanted in zip(objective.model.named_parameters(), expected.model.parameters()):
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-6, msg=name)
    assert objective.progress == [step / 8 for step in range(8)]


def test_rates_can_be_multiplied(tmp_path: Path) -> None:
    objective = ToyGan(noise=0.0)
    run_toy(tmp_path, objective, rate=0.25)
    expected = plain_training(8, rate_of_all=0.25)
    for made, wanted in zip(objective.model.parameters(), expected.model.parameters()):
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-6)


def test_a_player_rests_before_its_first_step() -> None:
    objective = ToyGan(first_step=3)
    before = [p.detach().clone() for p in objective.generator.parameters()]
    step_function, source = TrainingStep(objective, WORLD), Source()
    player = step_function.players["g"]
    assert player.averages is not None
    for step in range(4):
        losses = step_function(source.batch(BATCHES), step, 0.0)
        rests = step < 3
        same = [torch.equal(a, b) for a, b in zip(before, objective.generator.parameters())]
        same += [torch.equal(a, b) for a, b in zip(before, player.averages.values)]
        assert all(same) if rests else not any(same)
        moments = [x for key in ("step", "exp_avg") for x in player.state()[key].values()]
        assert [bool(x.any()) for x in moments] == [not rests] * len(moments)
        assert ("g_grad_norm" in losses) == (not rests)
        assert {"d_loss", "d_grad_norm", "g_loss", "g_pixel"} <= set(losses)


def test_the_step_keeps_nothing_of_what_is_only_tried() -> None:
    objective = ToyGan()
    step_function, source = TrainingStep(objective, WORLD), Source()
    step_function(source.batch(BATCHES), 0, 0.0)
    tensors = [p.detach() for p in objective.model.parameters()]
    tensors += [x for p in step_function.players.values() for v in p.state().values() for x in v.values()]
    before, random_before = [x.clone() for x in tensors], torch.get_rng_state()
    with step_function._untouched():
        step_function(source.batch(BATCHES), 1, 0.0)
        assert not all(torch.equal(a, b) for a, b in zip(before, tensors))
    assert all(torch.equal(a, b) for a, b in zip(before, tensors))
    assert torch.equal(random_before, torch.get_rng_state())


def test_bytes_are_counted_exactly() -> None:
    held = TrainingStep(ToyGan(average_decay=None), WORLD).bytes()
    d, g = 3 * 8 + 8 + 8 + 1, 3 * 16 + 16 + 16 * 3 + 3
    assert held.parameters == held.gradients == 4 * (d + g)
    assert held.optimizer == 2 * 4 * (d + g) + 4 * 8  # and a step count for each of 8 tensors
    assert held.averages == 4 * d
    assert held.total == held.parameters + held.gradients + held.optimizer + held.averages


def test_bfloat16_is_used_where_it_is_asked_for() -> None:
    seen: list[torch.dtype] = []
    objective = ToyGan()
    objective.generator[0].register_forward_hook(lambda module, given, made: seen.append(made.dtype))
    for precision in ("fp32", "bf16"):
        step_function = TrainingStep(objective, WORLD, precision=precision)  # type: ignore[arg-type]
        step_function(Source().batch(BATCHES), 0, 0.0)
    assert seen == [torch.float32, torch.bfloat16]
    assert {p.dtype for p in objective.model.parameters()} == {torch.float32}


def test_a_micro_batch_goes_backward_before_the_next_goes_forward() -> None:
    events: list[str] = []

    class Recording(OnePlayer):
        def updates(self, batch: Batch) -> Iterator[tuple[str, Losses]]:
            assert len(batch.hq) == 1
            for name, losses in super().updates(batch):
                events.append("forward")
                losses["loss"].register_hook(lambda gradient: events.append("backward"))
                yield name, losses

    objective = Recording()
    TrainingStep(objective, WORLD, micro_batches=2)(Source().batch(objective.batches), 0, 0.0)
    assert events == ["forward", "backward"] * 2


def test_a_player_must_train_what_the_checkpoint_holds() -> None:
    objective = ToyGan()
    objective.model = objective.generator
    with pytest.raises(ValueError, match="toy: the model lacks parameters of d"):
        TrainingStep(objective, WORLD)


# ---------------------------------------------------------------- logs


def test_training_learns_logs_and_draws(tmp_path: Path) -> None:
    run_toy(tmp_path, steps=60, log_every=20, sample_every=30)
    rows = rows_of(tmp_path)
    assert [int(row["step"]) for row in rows] == [20, 40, 60]
    assert float(rows[-1]["g_pixel"]) < 0.5 * float(rows[0]["g_pixel"])
    assert {row["frames"] for row in rows} <= {"1", "3"}
    pictures = sorted((tmp_path / "samples").iterdir())
    assert [path.name for path in pictures] == ["step_00000030.png", "step_00000060.png"]
    picture = read_clip(pictures[-1])[0]
    assert picture.shape[1:] == (18, 3)
    assert picture.shape[0] in (8, 16)  # two clips of one frame or of two
    if (tmp_path / "tensorboard").is_dir():
        assert any((tmp_path / "tensorboard").iterdir())


def test_a_sample_sheet_shows_input_output_truth() -> None:
    lr, output, hq = (torch.full((1, 3, 5, 2, 2), value) for value in (-1.0, 0.0, 2.0))
    sheet = sample_sheet(lr, output, hq)
    assert sheet.shape == (4, 6, 3)
    assert [int(sheet[0, x, 0]) for x in (0, 2, 4)] == [0, 128, 255]


def test_drawing_samples_does_not_change_training(tmp_path: Path) -> None:
    run_toy(tmp_path / "with", sample_every=2)
    run_toy(tmp_path / "without")
    assert losses_of(tmp_path / "with") == losses_of(tmp_path / "without")


def test_samples_are_drawn_by_layers_as_they_are() -> None:
    """What is compiled for training is not compiled anew for a picture: without gradients it may fail."""
    compiled = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        compiled.append(graph)
        return graph.forward

    layer = torch.compile(nn.Linear(2, 2), backend=backend)
    layer(torch.ones(1, 2))
    step_function = TrainingStep(ToyGan(), WORLD)
    batch = Source().batch(step_function.objective.batches)
    out = _sample(lambda batch: layer(torch.ones(1, 2)), step_function, batch)
    assert out.shape == (1, 2)
    assert len(compiled) == 1


def test_a_csv_grows_by_rows_and_columns_and_forgets_what_is_redone(tmp_path: Path) -> None:
    log = CsvLog(tmp_path / "log.csv", after_step=0)
    log.write({"step": 1, "a": 5})
    log.write({"step": 2, "a": 6, "b": 7})
    log.write({"step": 3, "b": 8})
    with (tmp_path / "log.csv").open("a") as file:
        file.write("4,9")  # cut off by a kill
    log = CsvLog(tmp_path / "log.csv", after_step=2)
    log.write({"step": 3, "a": 1, "b": 2})
    assert (tmp_path / "log.csv").read_text().split() == ["step,a,b", "1,5,", "2,6,7", "3,1,2"]


# ---------------------------------------------------------------- stopping


class Broken(ToyGan):
    def updates(self, batch: Batch) -> Iterator[tuple[str, Losses]]:
        for name, losses in super().updates(batch):
            bad = len(self.progress) == 5 and name == "d"
            yield name, {**losses, "loss": losses["loss"] * (math.nan if bad else 1.0)}


def test_training_stops_where_a_loss_is_not_finite(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"at step 5 \(batch seed \(0, 4\)\); the log is .*log\.csv"):
        run_toy(tmp_path, Broken(), log_every=100, save_every=2)
    assert [path.name for path in complete(tmp_path / "checkpoints")] == ["step_00000002", "step_00000004"]


def test_time_is_estimated_from_the_first_two_steps(tmp_path: Path) -> None:
    said: list[str] = []
    train(ToyGan(), Source(), RunSettings(steps=6), tmp_path, WORLD, say=said.append)
    assert "before activations" in said[0]
    assert said[1:] == ["toy: 0 s for the steps left, by the last two"]


def test_estimates_are_of_steps_that_train_every_player(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first step a player costs next to nothing: Stage 2's cost was said at half of what it is."""
    clock, call = [0.0], TrainingStep.__call__

    def on_the_clock(self: TrainingStep, batch: Batch, step: int, progress: float) -> dict[str, Tensor]:
        clock[0] += 5 if step >= 3 else 1
        return call(self, batch, step, progress)

    monkeypatch.setattr(TrainingStep, "__call__", on_the_clock)
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    said: list[str] = []
    train(ToyGan(first_step=3), Source(), RunSettings(steps=8), tmp_path, WORLD, say=said.append)
    assert said[1:] == ["toy: 15 s for the steps left, by the last two"]

    rehearsed: list[int] = []

    def rehearse(self: TrainingStep, batch: Batch, step: int, progress: float) -> Rehearsal:
        rehearsed.append(step)
        return Rehearsal(0.0, 0)

    step_function = TrainingStep(ToyGan(first_step=3), WORLD)
    step_function.world = replace(WORLD, device=torch.device("cuda"))  # where a step is rehearsed
    monkeypatch.setattr(TrainingStep, "rehearse", rehearse)
    feed = Prefetch(Source(), BATCHES, WORLD.device)
    for step in (0, 5):
        loop._estimate(step_function, feed, RunSettings(steps=8), step, 0.0, said.append)
    assert rehearsed == [3, 5]


def test_a_stage_needs_an_end() -> None:
    with pytest.raises(InputError, match="a number of steps or of seconds"):
        RunSettings()


def test_a_stage_ends_by_the_clock(tmp_path: Path) -> None:
    started = time.monotonic()
    run_toy(tmp_path, steps=None, seconds=1.0, log_every=1)
    assert 0.9 < time.monotonic() - started < 10
    assert float(rows_of(tmp_path)[-1]["progress"]) > 0.5


def test_batches_must_divide(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="can't be split into 3 micro-batches"):
        run_toy(tmp_path, micro_batches=3)
    with pytest.raises(InputError, match=r"clips of a batch \(4\) must be a multiple of the 3 processes"):
        train(ToyGan(), Source(), RunSettings(steps=1), tmp_path, World(torch.device("cpu"), 0, 3))


# ---------------------------------------------------------------- resume


def test_a_resumed_run_repeats_the_uninterrupted_one(tmp_path: Path) -> None:
    whole = run_toy(tmp_path / "whole", steps=11, save_every=4)
    with pytest.raises(KeyboardInterrupt):
        run_toy(tmp_path / "parts", Interrupted(), steps=11, save_every=4)
    resumed = ToyGan()
    with torch.no_grad():
        for parameter in resumed.model.parameters():
            parameter.zero_()  # nothing may come from the fresh weights
    torch.manual_seed(99)
    random.seed(99)
    run = RunSettings(steps=11, log_every=1, save_every=4)
    said: list[str] = []
    train(resumed, Source(), run, tmp_path / "parts", WORLD, resume=True, say=said.append)
    assert "goes on from step 4" in said[0]
    assert resumed.progress[0] == 4 / 11
    assert losses_of(tmp_path / "parts") == losses_of(tmp_path / "whole")
    for a, b in zip(whole.model.parameters(), resumed.model.parameters()):
        assert torch.equal(a, b)
    assert [path.name for path in complete(tmp_path / "parts" / "checkpoints")] == [
        "step_00000008",
        "step_00000011",
    ]


def test_an_interrupted_run_can_be_ended_where_it_stands(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_toy(tmp_path, Interrupted(), steps=11, save_every=4)
    ended = ToyGan()
    run = RunSettings(steps=1, log_every=1)
    assert train(ended, Source(), run, tmp_path, WORLD, resume=True, say=lambda text: None) == 4
    assert ended.progress == []  # no step was made
    saved = ToyGan()
    players = TrainingStep(saved, WORLD, rate=1.0, precision="fp32", micro_batches=1, graphs=False).players
    facts = {"stage": saved.name}
    folder = tmp_path / "checkpoints"
    Checkpoints(folder, saved.model, players, WORLD, facts=facts).load(folder / "step_00000004")
    last = [value.clone() for value in saved.generator.parameters()]
    assert players["g"].averages is not None
    players["g"].averages.copy_to_parameters()
    for value, average, trained in zip(ended.generator.parameters(), saved.generator.parameters(), last):
        assert torch.equal(value, average)
        assert not torch.equal(value, trained)


class Interrupted(ToyGan):
    def updates(self, batch: Batch) -> Iterator[tuple[str, Losses]]:
        if len(self.progress) == 7:
            raise KeyboardInterrupt
        yield from super().updates(batch)


def environment(**more: str) -> dict[str, str]:
    paths = [str(TOY.parents[1] / "src"), str(TOY.parent), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", **more}


def start_toy(kinds: str, out: Path, steps: int, **more: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, str(TOY), kinds, str(out), str(steps)], env=environment(**more))


def weights_of(folder: Path) -> dict[str, list]:
    return json.loads((folder / "weights.json").read_text())


@contextmanager
def ended_and_resumed(tmp_path: Path, sent: signal.Signals) -> Iterator[tuple[int, Path]]:
    """A run that gets a signal at a random step: its exit code and folder; then it is resumed.

    What it leaves in the end is what a run leaves that nothing happened to.
    """
    steps = 120
    whole = start_toy("noisy", tmp_path / "whole", steps)
    ended = start_toy("noisy", tmp_path / "ended", steps)
    log, wanted = tmp_path / "ended" / "noisy" / "log.csv", random.randrange(5, 60)
    while ended.poll() is None and (not log.is_file() or log.read_text().count("\n") < wanted):
        time.sleep(0.01)
    ended.send_signal(sent)
    code = ended.wait()
    assert not (log.parent / "weights.json").exists()
    yield code, log.parent
    assert start_toy("noisy", tmp_path / "ended", steps).wait() == 0
    assert whole.wait() == 0
    assert losses_of(log.parent) == losses_of(tmp_path / "whole" / "noisy")
    assert weights_of(log.parent) == weights_of(tmp_path / "whole" / "noisy")


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    with ended_and_resumed(tmp_path, signal.SIGKILL) as (code, _):
        assert code == -signal.SIGKILL, "it was too fast to be killed"


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_told_to_stop_ends_its_step_and_keeps_it(tmp_path: Path, sent: signal.Signals) -> None:
    with ended_and_resumed(tmp_path, sent) as (code, folder):
        assert code == -signal.SIGINT  # how Python ends by KeyboardInterrupt
        done = max(losses_of(folder))
        assert max((folder / "checkpoints").iterdir()).name == f"step_{done:08d}"


class Told(ToyGan):
    """Gets signals in its third step."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def updates(self, batch: Batch) -> Iterator[tuple[str, Losses]]:
        for _ in range(self.count if len(self.progress) == 3 else 0):
            signal.raise_signal(signal.SIGTERM)
        yield from super().updates(batch)


@pytest.fixture
def heard() -> Iterator[None]:
    """SIGTERM as the command has it: KeyboardInterrupt."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("heard")
@pytest.mark.parametrize(("count", "kept"), [(1, ["step_00000003"]), (2, [])])
def test_a_second_signal_stops_at_once(tmp_path: Path, count: int, kept: list[str]) -> None:
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        train(Told(count), Source(), RunSettings(steps=8), tmp_path, WORLD, say=said.append)
    assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    assert any("stopped after step 3; --resume goes on" in text for text in said) is (count == 1)
    assert [path.name for path in tmp_path.glob("checkpoints/*")] == kept


@pytest.mark.usefixtures("heard")
def test_a_signal_in_the_last_step_is_not_lost(tmp_path: Path) -> None:
    run = RunSettings(steps=3)
    with pytest.raises(KeyboardInterrupt):
        train(Told(1), Source(), run, tmp_path, WORLD, say=lambda text: None)
    assert train(ToyGan(), Source(), run, tmp_path, WORLD, resume=True, say=lambda text: None) == 3


def checkpoints(folder: Path, **facts: str) -> tuple[Checkpoints, TrainingStep]:
    step_function = TrainingStep(ToyGan(), WORLD)
    kept = Checkpoints(folder, step_function.objective.model, step_function.players, WORLD, facts=facts)
    return kept, step_function


def test_checkpoints_hold_every_random_state(tmp_path: Path) -> None:
    kept, _ = checkpoints(tmp_path)
    path = kept.save(Position(1, 2.5, {"number": 7, "random": {"state": 2**100}}))
    drawn = torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist()
    kept, _ = checkpoints(tmp_path)
    assert kept.load(path) == Position(1, 2.5, {"number": 7, "random": {"state": 2**100}})
    assert drawn == (torch.rand(3).tolist(), random.random(), np.random.rand(3).tolist())


def test_an_incomplete_checkpoint_is_not_one(tmp_path: Path) -> None:
    kept, _ = checkpoints(tmp_path)
    path = kept.save(Position(5, 0.0, {}))
    (tmp_path / "step_00000009.part").mkdir()
    assert kept.latest() == path
    (path / "run.pt").write_bytes(b"PK")
    with pytest.raises(InputError, match="can not be read as a checkpoint"):
        kept.load(path)


@pytest.mark.parametrize("size", [1_000, 100_000])
def test_a_full_disk_is_said_and_the_last_checkpoint_stays(tmp_path: Path, size: int) -> None:
    """Files of so many bytes at most: too few for the run's facts, and enough for these alone."""
    resource = pytest.importorskip("resource", reason="needs limits of files' sizes")
    kept = Checkpoints(tmp_path, nn.Linear(300, 300), {}, WORLD, facts={})
    path = kept.save(Position(5, 0.0, {}))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        with pytest.raises(InputError, match=r"step_00000006\.part can't be written .*; see to that, then"):
            kept.save(Position(6, 0.0, {}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert kept.latest() == path
    kept.save(Position(7, 0.0, {}))
    assert [found.name for found in tmp_path.iterdir() if found.name != path.name] == ["step_00000007"]


def test_another_stage_or_schedule_is_refused(tmp_path: Path) -> None:
    path = checkpoints(tmp_path, schedule="none, recent_2")[0].save(Position(5, 0.0, {}))
    with pytest.raises(InputError, match="its schedule is none, recent_2, this run's is none, anchor"):
        checkpoints(tmp_path, schedule="none, anchor")[0].load(path)


def test_other_networks_are_refused(tmp_path: Path) -> None:
    kept, step_function = checkpoints(tmp_path)
    path = kept.save(Position(5, 0.0, {}))
    other = nn.ModuleDict({"g": nn.Linear(3, 5), "d": step_function.objective.model["d"]})
    with pytest.raises(InputError, match="does not fit this recipe"):
        Checkpoints(tmp_path, other, {}, WORLD, facts={}).load(path)


# ---------------------------------------------------------------- many processes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


KINDS = ("plain", "capped", "rollout_replicated", "rollout_sharded")


@pytest.fixture(scope="module")
def shared_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind trained by two processes (`two`) and by one (`one`)."""
    folder = tmp_path_factory.mktemp("shared")
    together = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    kinds = ",".join(KINDS)
    processes = [start_toy(kinds, folder / "two", 4, RANK=r, LOCAL_RANK=r, **together) for r in "01"]
    processes.append(start_toy(kinds, folder / "one", 4))
    assert [process.wait(timeout=300) for process in processes] == [0, 0, 0]
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_are_one_with_the_whole_batch(shared_runs: Path, kind: str) -> None:
    two, one = shared_runs / "two" / kind, shared_runs / "one" / kind
    assert len(rows_of(two)) == len(rows_of(one)) == 4
    for a, b in zip(rows_of(two), rows_of(one)):
        for name in set(a) - {"seconds"}:
            assert float(a[name]) == pytest.approx(float(b[name]), rel=1e-3), name
    trained, wanted = weights_of(two), weights_of(one)
    assert set(trained) == set(wanted)
    for name, value in trained.items():
        torch.testing.assert_close(Tensor(value), Tensor(wanted[name]), rtol=1e-3, atol=2e-4, msg=name)


def test_a_sharded_run_resumes_on_one_process(shared_runs: Path, tmp_path: Path) -> None:
    shutil.copytree(shared_runs / "two" / "rollout_sharded", tmp_path / "rollout_sharded")
    objective = TinyRollout(WORLD, sharded=False)
    said: list[str] = []
    run = RunSettings(steps=6, log_every=1)
    train(objective, Source(), run, tmp_path / "rollout_sharded", WORLD, resume=True, say=said.append)
    assert "goes on from step 4" in said[0]
    rows = rows_of(tmp_path / "rollout_sharded")
    assert [int(row["step"]) for row in rows] == [1, 2, 3, 4, 5, 6]
    assert float(rows[5]["loss"]) < float(rows[3]["loss"])


# ---------------------------------------------------------------- on a card


@pytest.mark.gpu
@pytest.mark.parametrize("first_step", [0, 5])
def test_graphs_train_like_plain_steps(tmp_path: Path, first_step: int) -> None:
    world = World(torch.device("cuda"))
    trained = []
    for graphs in (False, True):
        objective = ToyGan(noise=0.0, first_step=first_step, device="cuda")
        run = RunSettings(steps=12, log_every=1, graphs=graphs, save_every=5, sample_every=6)
        said: list[str] = []
        folder = tmp_path / str(graphs)
        train(objective, Source(world=world), run, folder, world, sample=objective.sample, say=said.append)
        assert "ms" in said[1]
        assert "GB at its peak" in said[1]
        trained.append((rows_of(folder), [p.detach().cpu() for p in objective.model.parameters()]))
    (plain_rows, plain), (graph_rows, graphed) = trained
    for a, b in zip(plain_rows, graph_rows):
        for name in set(a) - {"seconds"}:
            assert (a[name] == "") == (b[name] == "")
            assert not a[name] or float(a[name]) == pytest.approx(float(b[name]), rel=1e-2), name
    for a, b in zip(plain, graphed):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
def test_a_run_with_graphs_and_noise_resumes(tmp_path: Path) -> None:
    world = World(torch.device("cuda"))

    def go(folder: Path, objective: ToyGan) -> None:
        torch.manual_seed(0)
        run = RunSettings(steps=11, log_every=1, save_every=4)
        train(objective, Source(world=world), run, folder, world, resume=True, say=lambda text: None)

    go(tmp_path / "whole", ToyGan(device="cuda"))
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path / "parts", InterruptedOnCard(device="cuda"))
    go(tmp_path / "parts", ToyGan(device="cuda"))
    for a, b in zip(rows_of(tmp_path / "whole"), rows_of(tmp_path / "parts")):
        for name in set(a) - {"seconds"}:
            assert float(a[name]) == pytest.approx(float(b[name]), rel=1e-2), name


class InterruptedOnCard(ToyGan):
    def advance(self, progress: float) -> None:
        if progress > 6 / 11:
            raise KeyboardInterrupt
        super().advance(progress)


# ---------------------------------------------------------------- names


class OnePlayer:
    name = "one"

    def __init__(self) -> None:
        self.model: nn.Module = nn.Linear(1, 1)
        self.batches = BatchSettings(clips=2, frames=1)
        self.players: tuple[Player, ...] = (Player("p", tuple(self.model.parameters()), FAST),)

    def advance(self, progress: float) -> None:
        pass

    def updates(self, batch: Batch) -> Iterator[tuple[str, Losses]]:
        yield "p", {"loss": self.model(batch.hq.mean((1, 2, 3, 4))[:, None]).square().mean()}


def test_one_player_needs_no_prefix(tmp_path: Path) -> None:
    train(OnePlayer(), Source(), RunSettings(steps=2, log_every=1), tmp_path, WORLD, say=lambda text: None)
    assert {"loss", "grad_norm"} <= set(rows_of(tmp_path)[0])
