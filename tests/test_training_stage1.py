"""Stage 1: what the generator is given and asked for, who is trained, and that it learns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recavsr.cache_policy import PAPER_ACTIONS, CacheAction
from recavsr.geometry import BlockPlan
from recavsr.models.generator import Condition, Generator, teacher_forced_recycled
from recavsr.training.objective import Batch, BatchSettings, OptimizerSettings
from recavsr.training.rollout import roll_out
from recavsr.training.router import DELTA
from recavsr.training.stage1 import FixedScope, RouteLearning, Stage1Model, Stage1Objective, Stage1Settings
from tiny import CHANNELS, GENERATOR, STRIDE, one_thread, tiny_generator, tiny_prompt

PLAN = BlockPlan(2, 2)
SETTINGS = Stage1Settings(
    BatchSettings(clips=2, frames=29), PLAN, OptimizerSettings(1e-3), FixedScope(CacheAction(6))
)
ROUTING = replace(SETTINGS, phase=RouteLearning())


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


def encode(frames: Tensor) -> Tensor:
    """Return latents [B, C, T, 2, 3]: means over cells and over the 4 frames of a latent, mixed."""
    frames = torch.cat([frames[:, :, :1].expand(-1, -1, 3, -1, -1), frames], dim=2)
    cells = F.avg_pool3d(frames, (4, STRIDE, STRIDE))
    return 2 * torch.cat([cells, cells.flip(1)], dim=1)


def batch(clips: int = 2, latents: int = 8) -> Batch:
    """Return smooth random clips; the LR frames are the HQ frames with noise."""
    coarse = torch.randn(clips, 3, latents, 2, 3)
    hq = F.interpolate(coarse, (4 * latents - 3, 2 * STRIDE, 3 * STRIDE), mode="trilinear").clamp(-1, 1)
    return Batch(hq, (hq + 0.1 * torch.randn_like(hq)).clamp(-1, 1))


def objective(settings: Stage1Settings, generator: Generator | None = None) -> Stage1Objective:
    torch.manual_seed(0)
    model = Stage1Model(generator or tiny_generator(), nn.Parameter(tiny_prompt()))
    return Stage1Objective(model, encode, [*model.generator.parameters(), model.prompt], settings)


def losses(stage: Stage1Objective, given: Batch, seed: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    ((player, values),) = stage.updates(given)
    assert player == "generator"
    return dict(values)


class TrueVelocity(Generator):
    """A generator that knows the latents: z_t = z + t (noise - z)."""

    def __init__(self, latents: Tensor) -> None:
        super().__init__(GENERATOR)
        self.latents = latents

    def condition(self, prompt: Tensor, timestep: Tensor | float = 1000.0) -> Condition:
        assert isinstance(timestep, Tensor)
        assert timestep.shape == (self.latents.shape[0],)
        assert len(timestep.unique()) == len(timestep)
        self.times = timestep.view(-1, 1, 1, 1, 1) / 1000
        return super().condition(prompt, timestep)

    def forward(self, condition, noisy, lr_frames, recycled, plan, visibility=None):  # type: ignore[no-untyped-def]
        assert torch.equal(recycled[:, :, plan.first :], self.latents[:, :, : -plan.rest])
        assert not recycled[:, :, : plan.first].any()
        return (noisy - self.latents) / self.times


@pytest.mark.parametrize("settings", [SETTINGS, ROUTING], ids=["adaptation", "routing"])
def test_the_true_velocity_has_no_loss(settings: Stage1Settings) -> None:
    given = batch()
    stage = objective(settings, TrueVelocity(encode(given.hq)))
    assert losses(stage, given)["flow_matching"].item() == pytest.approx(0, abs=1e-8)


def test_adaptation_sees_six_latents_and_leaves_the_router_alone() -> None:
    stage, given = objective(SETTINGS), batch()
    assert stage.name == "stage1_adaptation"
    values = losses(stage, given)
    assert torch.equal(values["loss"], values["flow_matching"])
    values["loss"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in stage.players[0].parameters)
    assert all(p.grad is None and not p.requires_grad for p in stage.model.router.parameters())
    # The same loss by hand, under a schedule that remembers six latents (and one that remembers one).
    torch.manual_seed(0)
    latents = encode(given.hq)
    times, noise = torch.randn(2).sigmoid(), torch.randn_like(latents)
    path = latents + times.view(-1, 1, 1, 1, 1) * (noise - latents)
    for recent, same in ((6, True), (1, False)):
        schedule = replace(GENERATOR.schedule, actions=(CacheAction(recent),) * 4)
        generator = stage.model.generator.with_schedule(schedule)
        condition = generator.condition(stage.model.prompt, 1000 * times)
        velocity = generator(condition, path, given.lr, teacher_forced_recycled(latents, PLAN), PLAN)
        wanted = (velocity - noise + latents).square().mean()
        assert torch.allclose(values["loss"], wanted, rtol=1e-5) == same


def test_only_what_is_given_is_trained() -> None:
    model = Stage1Model(tiny_generator(), tiny_prompt())
    assert "prompt" in model.state_dict()
    stage = Stage1Objective(model, encode, list(model.generator.recycle_projection.parameters()), SETTINGS)
    losses(stage, batch())["loss"].backward()
    trained = [name for name, p in model.named_parameters() if p.grad is not None]
    assert trained == ["generator.recycle_projection.weight", "generator.recycle_projection.bias"]


def test_the_loss_of_route_learning() -> None:
    phase = RouteLearning(capacity=1.5, budget_weight=0.7, entropy_weight=0.3)
    stage = objective(replace(ROUTING, phase=phase))
    assert stage.name == "stage1_routing"
    stage.advance(0.25)
    values = {name: value.item() for name, value in losses(stage, batch()).items()}
    with torch.no_grad():
        router = stage.model.router
        weights = (router.mlp(router.layer_embedding) / (2 * 0.15**0.25)).softmax(-1)
    rows = weights.tolist()
    capacities = [sum(p * a.capacity(router.rule) for p, a in zip(row, PAPER_ACTIONS)) for row in rows]
    surprise = sum(-p * math.log(p) for row in rows for p in row) / 4
    mean = sum(capacities) / 4
    assert [values[f"capacity_{layer}"] for layer in range(1, 5)] == pytest.approx(capacities)
    assert values["capacity"] == pytest.approx(mean)
    assert values["budget"] == pytest.approx((mean - 1.5) ** 2, abs=1e-5)
    assert values["entropy"] == pytest.approx(surprise)
    assert values["exported_capacity"] == pytest.approx(stage.export_schedule().mean_slots)
    assert values["export_gap"] == pytest.approx(stage.export_schedule().mean_slots - mean, abs=1e-5)
    total = values["flow_matching"] + 0.7 * values["budget"] + 0.3 * values["entropy"]
    assert values["loss"] == pytest.approx(total)


def test_the_entropy_term_can_set_in_later() -> None:
    phase = RouteLearning(entropy_rise=(0.4, 0.8))
    assert [phase.weight_of_entropy(p) for p in (0, 0.4, 0.6, 0.8, 1)] == pytest.approx(
        [0, 0, 0.25, 0.5, 0.5]
    )
    assert RouteLearning().weight_of_entropy(0) == 0.5
    stage = objective(replace(ROUTING, phase=phase))
    stage.advance(0.3)
    values = losses(stage, batch())
    assert values["loss"].item() == pytest.approx((values["flow_matching"] + 0.5 * values["budget"]).item())


def test_the_temperature_falls_from_2_to_03() -> None:
    stage = objective(ROUTING)
    temperature = stage.model.router.temperature
    seen = []
    for progress in (0.0, 0.5, 1.0):
        stage.advance(progress)
        seen.append(temperature.item())
    assert seen == pytest.approx([2.0, math.sqrt(0.6), 0.3])
    assert stage.model.router.temperature is temperature  # written in place: captured graphs read it


def test_the_flow_matching_loss_reaches_the_router() -> None:
    """Along its gradient, by central differences through the whole generator."""
    phase = RouteLearning(budget_weight=0.0, entropy_weight=0.0)
    stage, given = objective(replace(ROUTING, phase=phase)), batch(latents=12)
    parameters = list(stage.model.router.parameters())
    gradients = torch.autograd.grad(losses(stage, given)["loss"], parameters)
    squared = sum(gradient.square().sum() for gradient in gradients).item()
    step = 0.05 / math.sqrt(squared)

    def moved(by: float) -> float:
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients):
                parameter.add_(gradient, alpha=by)
            value = losses(stage, given)["loss"].item()
            for parameter, gradient in zip(parameters, gradients):
                parameter.sub_(gradient, alpha=by)
        return value

    assert squared > 0
    assert (moved(step) - moved(-step)) / (2 * step) == pytest.approx(squared, rel=0.03)


def test_a_sharp_router_and_its_export_agree() -> None:
    """With the probability on one action a layer, soft routing is the exported schedule."""
    stage, given = objective(ROUTING), batch(latents=14)
    router = stage.model.router
    with torch.no_grad():
        router.mlp[2].weight.mul_(4000)
    exported = stage.model.export_generator()
    assert len(set(exported.config.schedule.actions)) > 1
    latents = encode(given.hq)
    recycled, noise = teacher_forced_recycled(latents, PLAN), torch.randn_like(latents)
    with torch.no_grad():
        logs = router.log_probabilities()
        assert (logs.amax(-1).exp() > 1 - DELTA).all()
        condition = exported.condition(tiny_prompt())
        soft = router.visibility(logs, PLAN.cut(14))
        velocities = [
            exported(condition, noise, given.lr, recycled, PLAN, visibility) for visibility in (soft, None)
        ]
        torch.testing.assert_close(velocities[0], velocities[1], atol=2e-5, rtol=0)
        uncertain = router.visibility(torch.full((4, 7), 1 / 7).log(), PLAN.cut(14))
        other = exported(condition, noise, given.lr, recycled, PLAN, uncertain)
        assert (other - velocities[1]).abs().max() > 1e-2


def test_the_exported_generator_streams_what_it_computes_at_once() -> None:
    stage, given = objective(ROUTING), batch(latents=14)
    generator = stage.model.export_generator()
    assert generator.config.schedule == stage.export_schedule()
    noise = torch.randn(2, CHANNELS, 14, 2, 3)
    with torch.no_grad():
        condition = generator.condition(tiny_prompt())
        streamed = torch.cat(roll_out(generator, condition, noise, given.lr, PLAN), dim=2)
        recycled = teacher_forced_recycled(streamed, PLAN)
        velocity = generator(condition, noise, given.lr, recycled, PLAN)
    torch.testing.assert_close(noise - velocity, streamed, atol=1e-5, rtol=0)


def test_images_have_neither_history_nor_recycled_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = objective(ROUTING)
    seen: list[Tensor] = []
    handle = stage.model.generator.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[3]))
    values = losses(stage, batch(clips=3, latents=1))
    handle.remove()
    assert seen[0].shape == (3, CHANNELS, 1, 2, 3)
    assert not seen[0].any()
    router = list(stage.model.router.parameters())
    from_images = torch.autograd.grad(values["flow_matching"], router, retain_graph=True, allow_unused=True)
    assert all(gradient is None or not gradient.any() for gradient in from_images)
    values["loss"].backward()
    assert all(parameter.grad.isfinite().all() for parameter in router)


def test_under_autocast_the_loss_is_nearly_the_same() -> None:
    stage, given = objective(ROUTING), batch()
    wanted = losses(stage, given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = losses(stage, given)
    assert got["flow_matching"].dtype == torch.float32
    torch.testing.assert_close(got["flow_matching"], wanted["flow_matching"], rtol=0.02, atol=0)
    assert torch.equal(got["budget"], wanted["budget"])
    parameters = list(stage.model.router.parameters())
    ours, theirs = (
        torch.cat([g.flatten() for g in torch.autograd.grad(values["flow_matching"], parameters)])
        for values in (got, wanted)
    )
    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.95


def test_a_layer_with_a_soft_prior_compiles() -> None:
    stage, given = objective(ROUTING), batch()
    wanted = losses(stage, given)["loss"]
    layer = stage.model.generator.blocks[1]
    layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False, backend="eager")
    got = losses(stage, given)["loss"]
    torch.testing.assert_close(got, wanted)
    got.backward()
    assert all(parameter.grad.isfinite().all() for parameter in stage.model.router.parameters())


def train(stage: Stage1Objective, steps: int, rate: float) -> list[dict[str, float]]:
    """Run an objective for some steps on fresh data: the loop in short."""
    (player,) = stage.players
    optimizer = torch.optim.AdamW(player.parameters, lr=rate, betas=player.optimizer.betas)
    rows = []
    for step in range(steps):
        torch.manual_seed(1000 + step)
        stage.advance(step / (steps - 1))
        optimizer.zero_grad()
        ((_, values),) = stage.updates(batch(clips=4, latents=6))
        values["loss"].backward()
        nn.utils.clip_grad_norm_(player.parameters, player.optimizer.clip_norm)
        optimizer.step()
        rows.append({name: value.item() for name, value in values.items()})
    return rows


def test_both_phases_learn() -> None:
    """Adaptation, then route learning on the same model: the loss falls, capacity meets the budget."""
    stage = objective(SETTINGS)
    rows = train(stage, 30, 1e-2)
    early, late = (sum(row["loss"] for row in part) / 5 for part in (rows[:5], rows[-5:]))
    assert late < 0.7 * early
    model = stage.model
    phase = RouteLearning(capacity=1.5, entropy_rise=(0.5, 1.0))
    trained = [*model.generator.parameters(), model.prompt]
    stage = Stage1Objective(model, encode, trained, replace(ROUTING, phase=phase))
    routed = train(stage, 50, 1e-2)
    assert routed[0]["capacity"] > 2
    assert routed[-1]["capacity"] == pytest.approx(1.5, rel=0.05)
    assert routed[-1]["entropy"] < 0.5 * routed[0]["entropy"]
    assert sum(row["flow_matching"] for row in routed[-5:]) / 5 < late
    assert model.export_generator().config.schedule == stage.export_schedule()
