"""The MSQ discriminator: supports against brute force, what each scope sees, RSGAN and R1 by definition."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from recavsr.errors import InputError
from recavsr.training.adversarial import (
    GradientBalance,
    SharedNoise,
    discriminator_loss,
    feature_r1,
    generator_loss,
)
from recavsr.training.discriminator import MSQConfig, MSQDiscriminator, QueryHead, frozen
from tiny import CHANNELS, GENERATOR, lively, one_thread, tiny_generator, tiny_prompt

CONFIG = MSQConfig(layers=(1, 3), queries=6, width=16, heads=2, window=(2, 3), tube_latents=2)
CLIP = (4, 3, 5)  # latents, rows, columns: larger than the window and the tube on every axis


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


def discriminator(config: MSQConfig = CONFIG, seed: int = 0) -> MSQDiscriminator:
    torch.manual_seed(seed)
    made = MSQDiscriminator.of(tiny_generator(), tiny_prompt(), config)
    lively(made.heads)
    return made


def clips(batch: int = 2, clip: tuple[int, int, int] = CLIP) -> Tensor:
    return torch.randn(batch, CHANNELS, *clip, generator=torch.Generator().manual_seed(3))


def coordinates(support: Tensor, clip: tuple[int, int, int]) -> set[tuple[int, int, int]]:
    """Return the (t, y, x) of token indices, by the layout that features are said to have."""
    numbered = {}
    for index, (y, x, t) in enumerate(itertools.product(range(clip[1]), range(clip[2]), range(clip[0]))):
        numbered[index] = (t, y, x)
    assert len(set(support.tolist())) == len(support)
    return {numbered[index] for index in support.tolist()}


def boxes(size: tuple[int, int, int], clip: tuple[int, int, int]) -> list[frozenset[tuple[int, int, int]]]:
    """Return every box of a size inside a clip as a set of (t, y, x)."""
    starts = itertools.product(*(range(extent - side + 1) for side, extent in zip(size, clip)))
    return [
        frozenset(itertools.product(*(range(a, a + side) for a, side in zip(start, size))))
        for start in starts
    ]


# ---------------------------------------------------------------------------------------------- supports


def test_supports_are_boxes_of_the_clip_and_every_box_can_be_drawn() -> None:
    model = discriminator()
    spatial, temporal = boxes((1, 2, 3), CLIP), boxes((2, 2, 3), CLIP)
    drawn: tuple[set, set] = (set(), set())
    torch.manual_seed(0)
    for _ in range(60):
        supports = model.draw_supports(clips())
        assert len(supports) == 2
        for everything, window, tube in supports:
            assert everything is None
            assert window.shape == (2, 2, 6)
            assert tube.shape == (2, 2, 12)
            for seen, found in zip((window, tube), drawn):
                found |= {frozenset(coordinates(one, CLIP)) for one in seen.flatten(0, 1)}
    assert drawn[0] == set(spatial)
    assert drawn[1] == set(temporal)


@pytest.mark.parametrize("clip", [(1, 3, 5), (3, 1, 2), (1, 1, 1)])
def test_supports_are_cut_to_small_clips(clip: tuple[int, int, int]) -> None:
    _, window, tube = discriminator().draw_supports(clips(clip=clip))[0]
    height, width = min(2, clip[1]), min(3, clip[2])
    assert coordinates(window[0, 0], clip) in boxes((1, height, width), clip)
    assert coordinates(tube[0, 0], clip) in boxes((min(2, clip[0]), height, width), clip)


def test_evaluation_is_deterministic_and_looks_at_different_places() -> None:
    model = discriminator(replace(CONFIG, queries=12)).eval()
    once, again = model.draw_supports(clips()), model.draw_supports(clips(batch=1))
    for depth, other in zip(once, again):
        for scope, size in ((1, (1, 2, 3)), (2, (2, 2, 3))):
            assert torch.equal(depth[scope][:1], other[scope])
            seen = {frozenset(coordinates(x, CLIP)) for x in depth[scope][0]}
            assert len(seen) == 4
            assert seen <= set(boxes(size, CLIP))
    time = torch.full((2,), 7.0)
    logits = [model(clips(), time, model.draw_supports(clips())) for _ in range(2)]
    assert torch.equal(*logits)
    model.train()
    torch.manual_seed(0)
    draws = [model.draw_supports(clips())[0][1] for _ in range(2)]
    assert not torch.equal(*draws)


def test_a_query_sees_its_support_and_nothing_else() -> None:
    model = discriminator()
    torch.manual_seed(1)
    features = [torch.randn(2, 15, 4, GENERATOR.width, requires_grad=True) for _ in CONFIG.layers]
    supports = model.draw_supports(clips())
    logits = model.scope_logits(features, supports)
    assert logits.shape == (2, 3)
    for scope in range(3):
        gradients = torch.autograd.grad(logits[0, scope], features, retain_graph=True)
        for gradient, depth in zip(gradients, supports):
            touched = gradient.flatten(1, 2).abs().sum(-1) > 0
            assert not touched[1].any()  # another clip
            seen = depth[scope]
            wanted = set(range(60)) if seen is None else set(seen[0].flatten().tolist())
            assert set(touched[0].nonzero().flatten().tolist()) == wanted


def test_queries_attend_as_defined() -> None:
    """One head against a plain loop over queries, heads and tokens."""
    torch.manual_seed(2)
    head = QueryHead(GENERATOR.width, CONFIG)
    lively(head)
    features = torch.randn(2, 15, 4, GENERATOR.width)
    supports = discriminator().draw_supports(clips())[0]
    logits = head(features, supports)
    x = head.projection(head.feature_norm(features.flatten(1, 2)))
    keys, values = head.keys_values(x).split(16, dim=-1)

    def normed(v: Tensor) -> Tensor:
        return (v - v.mean()) / (v.var(unbiased=False) + 1e-5).sqrt()

    for batch, scope, query in itertools.product(range(2), range(3), range(2)):
        support = supports[scope]
        seen = range(60) if support is None else support[batch, query].tolist()
        parts = []
        for channels in (slice(0, 8), slice(8, 16)):
            asked = normed(head.queries[scope, query, channels])
            scores = torch.stack([asked @ normed(keys[batch, i, channels]) for i in seen]) / math.sqrt(8)
            parts.append(scores.softmax(0) @ values[batch, list(seen), channels])
        token = head.queries[scope, query] + head.output(torch.cat(parts))
        wanted = head.readout(token + head.ffn(token))
        assert logits[batch, scope, query].item() == pytest.approx(wanted.item(), abs=1e-5)


def test_scopes_count_alike_whatever_is_chosen() -> None:
    config = replace(CONFIG, scopes=("global", "temporal"))
    model = discriminator(config)
    assert [x.shape for x in model.draw_supports(clips())[0] if x is not None] == [(2, 3, 12)]
    time, supports = torch.full((2,), 7.0), model.draw_supports(clips())
    features = model.backbone(clips(), time)
    every_query = torch.stack([h(x, s) for h, x, s in zip(model.heads, features, supports)])
    assert every_query.shape == (2, 2, 2, 3)  # depths, batch, scopes, queries
    assert torch.allclose(model(clips(), time, supports), every_query.mean((0, 2, 3)), atol=1e-6)
    assert discriminator(replace(CONFIG, scopes=("global",))).draw_supports(clips()) == ((None,), (None,))


def test_real_and_generated_are_told_apart_by_paired_supports() -> None:
    model = discriminator()
    supports = model.draw_supports(clips())
    time = torch.full((2,), 1.0)
    assert torch.equal(model(clips(), time, supports), model(clips(), time, supports))


def test_a_wrong_config_is_refused() -> None:
    with pytest.raises(InputError, match="wants layer 5 of a backbone of 4"):
        discriminator(replace(CONFIG, layers=(1, 5)))
    with pytest.raises(InputError, match="must ascend"):
        MSQConfig(layers=(3, 2))
    with pytest.raises(InputError, match="7 queries must share out among 3 scopes"):
        MSQConfig(queries=7)
    with pytest.raises(InputError, match="each named once"):
        MSQConfig(scopes=("global", "global"))


def test_the_paper_has_36_queries() -> None:
    config = MSQConfig()
    assert len(config.layers) * len(config.scopes) * config.scope_queries == 36
    assert config.scope_queries == 4


# ---------------------------------------------------------------------------------------------- backbone


def test_features_attend_over_the_whole_clip_both_ways() -> None:
    backbone = discriminator().backbone
    latents = clips(1).requires_grad_()
    first, deep = backbone(latents, torch.full((1,), 3.0))
    assert first.shape == deep.shape == (1, 15, 4, GENERATOR.width)
    for corner in (deep[0, 0, 0], deep[0, 14, 3]):  # first token of the first latent, last of the last
        (gradient,) = torch.autograd.grad(corner.sum(), latents, retain_graph=True)
        assert gradient.ne(0).any(1).all()


def test_features_are_the_generators_layers() -> None:
    """With LR tokens and the recycled branch out of the way, the generator computes the same tokens."""
    generator = tiny_generator(replace(GENERATOR, window=replace(GENERATOR.window, height=9, width=9)))
    with torch.no_grad():
        for part in (generator.lr_projector.out_proj, generator.recycle_projection):
            for parameter in part.parameters():
                parameter.zero_()
    model = MSQDiscriminator.of(generator, tiny_prompt(), CONFIG)
    seen: list[Tensor] = []
    for index in (0, 2):
        generator.blocks[index].register_forward_hook(lambda _m, _i, out: seen.append(out[0]))
    condition = generator.condition(tiny_prompt(), torch.tensor([11.0]))
    generator.step(generator.start(), condition, clips(1), torch.zeros(1, 3, 13, 24, 40))
    features = model.backbone(clips(1), torch.tensor([11.0]))
    for wanted, got in zip(seen, features):
        assert torch.allclose(wanted, got, atol=1e-5)


def test_a_frozen_backbone_is_not_trained() -> None:
    model = discriminator()
    assert not any(p.requires_grad for p in model.backbone.parameters())
    trained = discriminator(replace(CONFIG, train_backbone=True))
    assert all(p.requires_grad for p in trained.parameters())
    with frozen(trained):
        logits = trained(clips().requires_grad_(), torch.ones(2), trained.draw_supports(clips()))
    logits.sum().backward()
    assert all(p.grad is None for p in trained.parameters())
    assert all(p.requires_grad for p in trained.parameters())


# ---------------------------------------------------------------------------------------------- losses


def test_rsgan_values() -> None:
    real, fake = torch.tensor([2.0, -1.0]), torch.tensor([0.5, 1.0])
    wanted_d = (math.log(1 + math.exp(-1.5)) + math.log(1 + math.exp(2.0))) / 2
    wanted_g = (math.log(1 + math.exp(1.5)) + math.log(1 + math.exp(-2.0))) / 2
    assert discriminator_loss(real, fake).item() == pytest.approx(wanted_d)
    assert generator_loss(real, fake).item() == pytest.approx(wanted_g)


def test_shared_noise() -> None:
    torch.manual_seed(0)
    latents = torch.full((4000, 1, 1, 1, 1), 3.0)
    noise = SharedNoise.draw(latents)
    steps, counts = (1000 * noise.sigma).round().unique(return_counts=True)
    assert steps.tolist() == list(range(1, 51))
    assert counts[0].item() == pytest.approx(2 * 4000 / 51, rel=0.3)  # t_D = 0 and 1 both give 1 / 1000
    assert counts[1:].float().mean().item() == pytest.approx(4000 / 51, rel=0.05)
    assert torch.allclose(noise.timestep, 1000 * noise.sigma)
    sigma = noise.sigma.view(-1, 1, 1, 1, 1)
    assert torch.allclose(noise.add_to(latents) - noise.add_to(0 * latents), 3 * (1 - sigma))
    assert torch.allclose(noise.add_to(0 * latents), sigma * noise.xi)


def double_case() -> tuple[MSQDiscriminator, list[Tensor], tuple]:
    model = discriminator().double()
    torch.manual_seed(4)
    features = [torch.randn(2, 6, 2, GENERATOR.width, dtype=torch.float64) for _ in CONFIG.layers]
    return model, features, model.draw_supports(clips(clip=(2, 2, 3)))


def finite_r1(model: MSQDiscriminator, features: list[Tensor], supports: tuple, eps: float = 1e-4) -> float:
    """Move every feature of every clip both ways, all moves of a clip and depth as one batch."""
    total = 0.0
    for clip, depth in itertools.product(range(2), range(len(features))):
        values = features[depth][clip].numel()
        repeated = [x[clip].repeat(2 * values, 1, 1, 1) for x in features]
        moves = eps * torch.eye(values, dtype=torch.float64)
        repeated[depth].view(2 * values, -1).add_(torch.cat([moves, -moves]))
        seen = tuple(
            tuple(None if s is None else s[clip].expand(2 * values, -1, -1) for s in scopes)
            for scopes in supports
        )
        with torch.no_grad():
            up, down = model.scope_logits(repeated, seen).mean(1).chunk(2)
        total += ((up - down) / (2 * eps)).square().sum().item() / 2  # the mean of two clips
    return total


def test_r1_by_finite_differences() -> None:
    model, features, supports = double_case()
    r1 = feature_r1(lambda x: model.scope_logits(x, supports).mean(1), features)
    assert r1.item() == pytest.approx(finite_r1(model, features, supports), rel=1e-4)
    assert r1.item() > 1e-6


def test_the_gradient_of_r1_by_finite_differences() -> None:
    """The double backward through projection, attention, feed-forward and readout."""
    model, features, supports = double_case()

    def r1() -> Tensor:
        return feature_r1(lambda x: model.scope_logits(x, supports).mean(1), features)

    r1().backward()
    head, eps = model.heads[1], 1e-5
    for parameter in (head.projection.weight, head.keys_values.weight, head.queries, head.ffn[1].weight):
        index = parameter.grad.abs().argmax()
        values = []
        for sign in (1, -1):
            with torch.no_grad():
                parameter.view(-1)[index] += sign * eps
            values.append(r1().item())
            with torch.no_grad():
                parameter.view(-1)[index] -= sign * eps
        wanted = (values[0] - values[1]) / (2 * eps)
        assert parameter.grad.view(-1)[index].item() == pytest.approx(wanted, rel=1e-3)


def test_r1_reaches_the_heads_and_never_the_backbone() -> None:
    model = discriminator(replace(CONFIG, train_backbone=True))
    supports = model.draw_supports(clips())
    features = model.backbone(clips(), torch.ones(2))
    assert features[0].requires_grad
    feature_r1(lambda x: model.scope_logits(x, supports).mean(1), features).backward()
    assert all(p.grad is None for p in model.backbone.parameters())
    for name, parameter in model.heads[0].named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


def test_it_learns_to_tell_two_kinds_of_latents_apart() -> None:
    """Pairs that differ only by a fine lattice; judged on pairs and supports that it never saw."""
    model = discriminator(replace(CONFIG, layers=(1,), width=32))
    optimizer = torch.optim.AdamW(model.heads.parameters(), lr=1e-3, betas=(0.0, 0.99))
    lattice = torch.tensor([[1.0, -1, 1, -1, 1], [-1, 1, -1, 1, -1], [1, -1, 1, -1, 1]])
    torch.manual_seed(5)

    def logits(batch: int) -> Tensor:
        real = torch.randn(batch, CHANNELS, *CLIP)
        noise, supports = SharedNoise.draw(real), model.draw_supports(real)
        both = [model.backbone(noise.add_to(x), noise.timestep) for x in (real, real + 0.7 * lattice)]
        return torch.stack([model.scope_logits(x, supports) for x in both])

    for _ in range(15):
        loss = discriminator_loss(*logits(4).mean(2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        real, fake = logits(32)
    assert ((real - fake).mean(0) > 0.5).all()  # every scope
    assert (real.mean(1) > fake.mean(1)).float().mean() > 0.95


# ---------------------------------------------------------------------------------------------- balance


def test_gradient_balance_measures_and_caps() -> None:
    balance = GradientBalance()
    latents = torch.zeros(4, requires_grad=True)

    def step(cap: float | None) -> Tensor:
        latents.grad = None
        judged, rebuilt = balance.split(latents, cap)
        (8 * judged.sum() + 2 * rebuilt[:1].sum()).backward()
        return latents.grad

    assert step(None).tolist() == [10, 8, 8, 8]
    assert balance.adversarial.item() == 16  # 8 in each of 4 places
    assert balance.reconstruction.item() == 2
    assert balance.share().item() == 8
    assert torch.allclose(step(0.5), torch.tensor([2.5, 0.5, 0.5, 0.5]))  # norm 1 = 0.5 x 2
    assert balance.share().item() == 8  # before the cap
    assert step(9.0).tolist() == [10, 8, 8, 8]
