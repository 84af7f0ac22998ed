"""The router: its prior, budget and entropy against definitions, its gradient, its export."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from recavsr.cache_policy import PAPER_ACTIONS, PAPER_SCHEDULE, AnchorRule, CacheAction, Schedule
from recavsr.geometry import BlockPlan
from recavsr.models.visibility import Visibility, schedule_visibility
from recavsr.training.router import DELTA, CacheRouter, entropy
from tiny import one_thread

MINUS = float("-inf")


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


def bias(visibility: Visibility, latents: int) -> Tensor:
    """Return what a layer adds to the score of each (query, key) pair of latents [T, T]."""
    matrix = torch.full((latents, latents), MINUS)
    for view in visibility:
        prior = torch.zeros(len(view.history)) if view.log_prior is None else view.log_prior
        for query in view.block:
            matrix[query, list(view.block)] = 0.0
            matrix[query, list(view.history)] = prior
    return matrix


def permits(action: CacheAction, rule: AnchorRule, start: int, key: int) -> bool:
    """Return 1_a(i, j) by its definition: `start` is the first latent of the query's block."""
    anchors = [p for p in range(start) if p >= rule.first and (p - rule.first) % rule.stride == 0]
    kept = anchors[len(anchors) - min(len(anchors), rule.capacity) :] if action.anchors else []
    return start - action.recent <= key < start or key in kept


def oracle(probabilities: Sequence[float], rule: AnchorRule, plan: BlockPlan, latents: int) -> Tensor:
    """Return Eq. 2's log(P(i, j) + delta) for every pair of latents, by brute force."""
    matrix = torch.full((latents, latents), MINUS)
    for query in range(latents):
        block = 0 if query < plan.first else 1 + (query - plan.first) // plan.rest
        start = plan.first_latent(block)
        for key in range(latents):
            permitted = [permits(action, rule, start, key) for action in PAPER_ACTIONS]
            if start <= key < start + plan.latents(block):
                matrix[query, key] = 0.0
            elif any(permitted):
                weight = sum(p for p, yes in zip(probabilities, permitted) if yes)
                matrix[query, key] = math.log(weight + DELTA)
    return matrix


@settings(max_examples=30, deadline=None)
@given(
    st.builds(BlockPlan, st.integers(1, 7), st.integers(1, 3)),
    st.builds(AnchorRule, st.integers(0, 3), st.integers(0, 6), st.integers(1, 6)),
    st.integers(1, 24),
    st.integers(0, 2**16),
)
def test_the_prior_is_equation_2(plan: BlockPlan, rule: AnchorRule, latents: int, seed: int) -> None:
    torch.manual_seed(seed)
    router = CacheRouter(3, rule)
    log_probabilities = (3 * torch.randn(3, 7)).log_softmax(-1)
    visibilities = router.visibility(log_probabilities, plan.cut(latents))
    for visibility, logs in zip(visibilities, log_probabilities, strict=True):
        wanted = oracle(logs.exp().tolist(), rule, plan, latents)
        torch.testing.assert_close(bias(visibility, latents), wanted, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("plan", [BlockPlan(), BlockPlan(1, 1), BlockPlan(2, 3)], ids=str)
def test_a_certain_router_is_its_schedule(plan: BlockPlan) -> None:
    """With all probability on one action the prior is 0 where the action permits, log(delta) elsewhere."""
    rule, latents = AnchorRule(), 23
    schedule = Schedule(PAPER_ACTIONS, rule)
    certain = torch.eye(7).log()
    soft = CacheRouter(7, rule).visibility(certain, plan.cut(latents))
    for visibility, fixed in zip(soft, schedule_visibility(schedule, plan.cut(latents)), strict=True):
        got, wanted = bias(visibility, latents), bias(fixed, latents)
        assert torch.equal(got.exp() > 0.5, wanted == 0)
        torch.testing.assert_close(got[wanted == 0], torch.zeros(int((wanted == 0).sum())), atol=2e-6, rtol=0)
        weights = got[(wanted == MINUS) & (got > MINUS)].exp()
        torch.testing.assert_close(weights, torch.full_like(weights, DELTA))


def test_probabilities_and_temperature() -> None:
    torch.manual_seed(0)
    router = CacheRouter(30, AnchorRule())
    assert [tuple(p.shape) for p in router.parameters()] == [(30, 64), (128, 64), (128,), (7, 128), (7,)]
    logits = router.log_probabilities()
    assert torch.allclose(logits.exp().sum(-1), torch.ones(30))
    router.temperature.fill_(0.5)
    sharper = router.log_probabilities()
    torch.testing.assert_close(sharper, (2 * logits).log_softmax(-1))
    assert (entropy(sharper) < entropy(logits)).all()


def test_autocast_leaves_the_router_exact() -> None:
    router = CacheRouter(4, AnchorRule())
    wanted = router.log_probabilities()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = router.log_probabilities()
        visibility = router.visibility(got, BlockPlan().cut(10))
    assert torch.equal(got, wanted)
    assert visibility[0][1].log_prior.dtype == torch.float32


def test_capacity_and_entropy() -> None:
    router = CacheRouter(3, AnchorRule(capacity=2))
    assert router.capacities.tolist() == [0, 1, 2, 4, 2, 4, 6]
    uniform = torch.full((7,), 1 / 7)
    mixed = torch.tensor([0.5, 0, 0, 0, 0, 0, 0.5])
    certain = torch.tensor([0, 0, 0, 0, 0, 1.0, 0])
    logs = torch.stack([uniform, mixed, certain]).clamp(min=1e-30).log()
    assert router.expected_capacity(logs).tolist() == pytest.approx([19 / 7, 3.0, 4.0])
    assert entropy(logs).tolist() == pytest.approx([math.log(7), math.log(2), 0.0], abs=1e-6)
    assert router.exported_capacity(logs[2:]).tolist() == [4]


def test_the_entropy_of_a_certain_router_has_a_gradient() -> None:
    """Probabilities that underflow to zero must not turn 0 log 0 into nan."""
    router = CacheRouter(2, AnchorRule())
    with torch.no_grad():
        router.mlp[2].bias.copy_(torch.tensor([200.0, 0, 0, 0, 0, 0, 0]))
    value = entropy(router.log_probabilities()).sum()
    value.backward()
    assert value.item() == pytest.approx(0, abs=1e-6)
    assert all(parameter.grad.isfinite().all() for parameter in router.parameters())


def test_gradients_by_finite_differences() -> None:
    """Of prior, budget and entropy together, in float64, for the layer embeddings and the network."""
    torch.manual_seed(0)
    router = CacheRouter(2, AnchorRule(), embedding=3, hidden=4).double()
    blocks = BlockPlan(3, 2).cut(9)
    parameters = list(router.parameters())

    def value(*_: Tensor) -> Tensor:
        logs = router.log_probabilities()
        views = [view for visibility in router.visibility(logs, blocks) for view in visibility]
        priors = torch.cat([view.log_prior for view in views if view.log_prior is not None])
        weights = torch.linspace(-1, 1, len(priors), dtype=torch.float64)
        budget = (router.expected_capacity(logs).mean() - 2).square()
        return (weights * priors).sum() + budget + entropy(logs).mean()

    assert torch.autograd.gradcheck(value, parameters, eps=1e-6, atol=1e-7)


def test_export() -> None:
    torch.manual_seed(0)
    router = CacheRouter(30, PAPER_SCHEDULE.anchor_rule)
    with torch.no_grad():  # one hidden unit a layer: the network can be any table of logits
        router.layer_embedding.copy_(torch.eye(30, 64))
        router.mlp[0].weight.copy_(torch.eye(128, 64))
        router.mlp[0].bias.zero_()
        router.mlp[2].weight.normal_()
        for layer, action in enumerate(PAPER_SCHEDULE.actions):
            router.mlp[2].weight[PAPER_ACTIONS.index(action), layer] = 4.0
    assert router.export() == PAPER_SCHEDULE
    logs = router.log_probabilities()
    assert router.exported_capacity(logs).mean().item() == pytest.approx(2.2)
    router.temperature.fill_(0.01)  # the temperature never changes the choice
    assert router.export() == PAPER_SCHEDULE
