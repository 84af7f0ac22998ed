"""The training loop: runs an objective's steps within a budget, with logs, checkpoints and exact resume.

The loop knows nothing of networks. A step is `training.step`, one CUDA graph on a card; the next
batch is drawn while it runs.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from recavsr.errors import InputError
from recavsr.training.batches import BatchSource, Prefetch
from recavsr.training.checkpoints import Checkpoints, Position
from recavsr.training.distributed import World, is_sharded
from recavsr.training.logs import StageLog
from recavsr.training.objective import Batch, Objective
from recavsr.training.step import Precision, StateBytes, TrainingStep

Sample = Callable[[Batch], Tensor]
"""A batch to the model's frames [B, 3, F, H, W], for pictures."""


class TrainingError(InputError):
    """Training can't go on: the message says at which step, and why. Its checkpoints are kept."""


@dataclass(frozen=True)
class RunSettings:
    """How long and how a stage trains. It ends at `steps` or `seconds`, whichever is first.

    By `seconds` the learning rate depends on the clock; only a run by `steps` alone repeats exactly.
    `steps` counts from the stage's beginning, over all its resumed runs.
    """

    steps: int | None = None
    seconds: float | None = None
    rate: float = 1.0  # times the learning rates of all players
    precision: Precision = "fp32"  # bf16: autocast, on a card only
    micro_batches: int = 1
    clips_a_pass: int | None = None  # clips of a micro-batch, instead of their number
    graphs: bool = True  # one CUDA graph a step, on a card and unless FSDP shards the model
    log_every: int = 50
    save_every: int = 500
    sample_every: int = 0  # 0: no pictures
    keep: int = 2

    def __post_init__(self) -> None:
        if self.steps is None and self.seconds is None:
            raise InputError("a stage needs a number of steps or of seconds")

    def passes(self, clips: int) -> int:
        """Return into how many micro-batches a process splits its `clips` clips, and its images."""
        return self.micro_batches if self.clips_a_pass is None else max(1, clips // self.clips_a_pass)

    def progress(self, step: int, seconds: float) -> float:
        """Return the done share of the stage after `step` steps and `seconds`, at most 1."""
        by_steps = step / self.steps if self.steps else 0.0
        by_time = seconds / self.seconds if self.seconds else 0.0
        return min(1.0, max(by_steps, by_time))


def train(
    objective: Objective,
    source: BatchSource,
    run: RunSettings,
    folder: Path,
    world: World,
    *,
    resume: bool = False,
    sample: Sample | None = None,
    facts: Mapping[str, str] | None = None,
    say: Callable[[str], None] = print,
) -> int:
    """Train one stage and leave the averaged weights in its parameters. Returns the steps done.

    `folder` gets `log.csv`, `checkpoints/`, `samples/` and `tensorboard/`. With `resume` the run goes
    on from the newest checkpoint there, if any: by `steps` and with a source of exact position as if
    it had never stopped. SIGINT, SIGTERM or SIGHUP ends it after the step that is being made, with a
    checkpoint, as KeyboardInterrupt; a second one at once. Raises TrainingError where a loss stops being
    finite, with the step and what rebuilds its batch; InputError where the checkpoint is of another stage
    or schedule.
    """
    on_card = world.device.type == "cuda"
    graphs = run.graphs and on_card and not is_sharded(objective.model)
    passes = run.passes(world.share(objective.batches.clips, "clips of a batch"))
    step_function = TrainingStep(
        objective,
        world,
        rate=run.rate,
        precision=run.precision if on_card else "fp32",
        micro_batches=passes,
        graphs=graphs,
    )
    for count in sorted({objective.batches.clips, objective.batches.images} - {0}):
        if world.share(count, "clips of a batch") % passes:
            raise InputError(f"{count} clips can't be split into {passes} micro-batches a process")
    checkpoints = Checkpoints(
        folder / "checkpoints",
        objective.model,
        step_function.players,
        world,
        facts={"stage": objective.name, **(facts or {})},
        keep=run.keep,
    )
    feed = Prefetch(source, objective.batches, world.device)
    step, before = 0, 0.0
    if resume and (path := checkpoints.latest()) is not None:
        position = checkpoints.load(path)
        feed.load_state_dict(position.data)
        step, before = position.step, position.seconds
        say(f"{objective.name}: goes on from step {step} ({path})")
    _estimate(step_function, feed, run, step, before, say if world.leads else _silent)
    full = _first_full_step(step_function, step)

    with ExitStack() as stack:
        log = StageLog(folder, after_step=step) if world.leads else None
        if log is not None:
            stack.callback(log.close)
        asked_to_stop = stack.enter_context(_stop_signals())
        started = time.monotonic() - before

        def clock() -> tuple[float, bool]:
            """Return the seconds of the stage, and whether it is asked to stop: the same on every rank."""
            return world.agree((time.monotonic() - started, asked_to_stop()))

        elapsed, _ = clock()
        full_since = elapsed
        while (progress := run.progress(step, elapsed)) < 1:
            if step == full:
                full_since = elapsed
            batch = feed.take()
            losses = step_function(batch, step, progress)
            step += 1
            elapsed, stops = clock()
            if step == full + 2 and not on_card and run.steps is not None and world.leads:
                left = (run.steps - step) * (elapsed - full_since) / 2
                say(f"{objective.name}: {_duration(left)} for the steps left, by the last two")
            last = run.steps is not None and step == run.steps
            logs, saves = last or step % run.log_every == 0, last or stops or step % run.save_every == 0
            if logs or saves or not on_card:
                _stop_if_not_finite(step_function, source, folder)
            if logs:
                values = _values(losses, world)
                if log is not None:
                    columns = {"seconds": round(elapsed, 2), "frames": batch.hq.shape[2]}
                    log.losses(step, values, **columns, progress=f"{progress:.4f}")
            if sample is not None and run.sample_every and step % run.sample_every == 0:
                output = _sample(sample, step_function, batch)
                if log is not None:
                    log.sample(step, batch.lr, output, batch.hq)
            if saves:
                checkpoints.save(Position(step, elapsed, feed.state_dict()))
            if stops:
                if world.leads:
                    say(f"{objective.name}: stopped after step {step}; --resume goes on from there")
                raise KeyboardInterrupt
            if run.progress(step, elapsed) < 1:
                feed.prepare()  # while the card is still busy with the step
        _stop_if_not_finite(step_function, source, folder)
    for player in step_function.players.values():
        if player.averages is not None and not player.rests(step):
            player.averages.copy_to_parameters()
    return step


@contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """Make the first signal to stop a note, and the second one KeyboardInterrupt; yields what has been noted.

    A note that nobody has acted on is KeyboardInterrupt at the end: no signal is lost. Signals that are
    ignored stay so. Only the main thread gets any.
    """
    noted: list[int] = []

    def note(number: int, frame: object) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    replaced = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number is not None and signal.getsignal(number) not in (signal.SIG_IGN, None):
                replaced[number] = signal.signal(number, note)
    try:
        yield lambda: bool(noted)
    finally:
        for number, old in replaced.items():
            signal.signal(number, old)
    if noted:
        raise KeyboardInterrupt


def _stop_if_not_finite(step_function: TrainingStep, source: BatchSource, folder: Path) -> None:
    bad = step_function.first_bad_step()
    if bad is not None:
        raise TrainingError(
            f"the loss stopped being finite at step {bad + 1} ({source.describe(bad)}); the log is "
            f"{folder / 'log.csv'}. Resume from the last checkpoint with lower rates: --resume --rate 0.5"
        )


def _values(losses: Mapping[str, Tensor], world: World) -> dict[str, float]:
    """Return the mean of each loss over all ranks."""
    stacked = world.mean(torch.stack([value.float().reshape(()) for value in losses.values()]))
    return dict(zip(losses, stacked.tolist()))


def _sample(sample: Sample, step_function: TrainingStep, batch: Batch) -> Tensor:
    """Run `sample` on a batch as in training, but with the averaged weights; random numbers stay."""
    device = step_function.world.device
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        stack.enter_context(torch.no_grad())
        stack.enter_context(step_function.autocast())
        for player in step_function.players.values():
            if player.averages is not None:
                stack.enter_context(player.averages.in_place_of_parameters())
        with torch.compiler.set_stance("force_eager"):  # what is compiled for training is not traced anew
            return sample(batch)


def _estimate(
    step_function: TrainingStep,
    feed: Prefetch,
    run: RunSettings,
    step: int,
    before: float,
    say: Callable[[str], None],
) -> None:
    """Say what the stage will need: state counted exactly, and on a card what a trial step takes."""
    if run.progress(step, before) >= 1:
        return
    name, held = step_function.objective.name, step_function.bytes()
    say(f"{name}: {describe_bytes(held)}")
    if step_function.world.device.type != "cuda":
        return
    batch = feed.peek()
    cost = step_function.rehearse(batch, _first_full_step(step_function, step), run.progress(step, before))
    count, _, frames, height, width = batch.hq.shape
    total = (
        "" if run.steps is None else f", {_duration((run.steps - step) * cost.seconds)} for the steps left"
    )
    say(
        f"{name}: a step of {count} clips of {frames} x {height} x {width} takes "
        f"{cost.seconds * 1000:.0f} ms, {cost.peak_bytes / 1e9:.2f} GB at its peak{total}"
    )


def _first_full_step(step_function: TrainingStep, step: int) -> int:
    """Return the first step, from `step` on, in which every player is trained: what takes time and memory."""
    return max(step, *(player.settings.first_step for player in step_function.players.values()))


def describe_bytes(held: StateBytes) -> str:
    """Return the memory of a stage's state in words."""
    parts = {
        "parameters": held.parameters,
        "gradients": held.gradients,
        "optimiser": held.optimizer,
        "averages": held.averages,
    }
    listed = " + ".join(f"{size / 1e6:.1f} MB {name}" for name, size in parts.items())
    return f"{listed} = {held.total / 1e6:.1f} MB before activations, a process"


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds) or seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _silent(text: str) -> None:
    pass
