"""Stage 2 and decoder training: who is trained by what, in which order, with what in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from recavsr.errors import InputError
from recavsr.geometry import BlockPlan
from recavsr.models.presets import nano, recavsr_5b
from recavsr.training.decoder_stage import DecoderObjective, DecoderSettings, with_hard_share, with_noise
from recavsr.training.discriminator import NANO_MSQ, LatentFeatures, MSQConfig, MSQDiscriminator
from recavsr.training.losses import FrameLosses, charbonnier, perceptual, pick_frames, temporal_difference
from recavsr.training.objective import Batch, BatchSettings
from recavsr.training.recompute import recompute_layers
from recavsr.training.rollout import decode_blocks, fitted_plan, roll_out, split_blocks
from recavsr.training.stage2 import Stage2Model, Stage2Objective, Stage2Settings, nano_stage2
from tiny import CHANNELS, STRIDE, one_thread, tiny_decoder, tiny_generator, tiny_prompt

PLAN = BlockPlan(2, 1)
SETTINGS = Stage2Settings(
    batches=BatchSettings(clips=2, frames=13),
    plan=PLAN,
    frames=FrameLosses("mse", perceptual_weight=2.0, perceptual_frames=2),
)
MSQ = MSQConfig(layers=(1, 3), queries=3, width=16, heads=2, window=(1, 2), tube_latents=2)


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


def encode(frames: Tensor) -> Tensor:
    """Stand in for an encoder: means over cells and over each latent's frames."""
    lead = frames[:, :, :1].expand(-1, -1, 3, -1, -1)
    cells = F.avg_pool3d(torch.cat([lead, frames], dim=2), (4, STRIDE, STRIDE))
    return torch.cat([cells, cells.square()], dim=1)


def distance(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).abs().mean((1, 2, 3))


def pairs(frames: int = 13, clips: int = 2) -> Batch:
    generator = torch.Generator().manual_seed(1)
    hq = torch.rand(clips, 3, frames, 2 * STRIDE, 3 * STRIDE, generator=generator) * 2 - 1
    return Batch(hq, hq + 0.1 * torch.randn(hq.shape, generator=generator))


def stage2(settings: Stage2Settings = SETTINGS, msq: MSQConfig = MSQ) -> Stage2Objective:
    generator, decoder = tiny_generator(), tiny_decoder()
    prompt = nn.Parameter(tiny_prompt())
    discriminator = MSQDiscriminator.of(generator, prompt, msq)
    model = Stage2Model(generator, prompt, discriminator, decoder)
    return Stage2Objective(model, encode, partial(decode_blocks, decoder), distance, settings)


def gradients(parameters: Any) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in parameters]


# ---------------------------------------------------------------------------------------------- rollout


@pytest.mark.parametrize("by", ["block", "layer"])
def test_gradients_are_the_same_when_a_rollout_is_computed_again(by: str) -> None:
    def trained(checkpoint: bool) -> list[Tensor | None]:
        generator, decoder = tiny_generator(), tiny_decoder()
        if checkpoint and by == "layer":
            recompute_layers(generator.blocks)
        again = checkpoint and by == "block"
        batch, prompt = pairs(), nn.Parameter(tiny_prompt())
        noise = torch.randn(2, CHANNELS, 4, 2, 3, generator=torch.Generator().manual_seed(2))
        condition = generator.condition(prompt)
        blocks = roll_out(generator, condition, noise, batch.lr, PLAN, checkpoint=again)
        frames = decode_blocks(decoder, blocks, batch.lr, PLAN, checkpoint=again)
        (F.mse_loss(frames, batch.hq) + torch.cat(blocks, 2).square().mean()).backward()
        return gradients([*generator.parameters(), *decoder.parameters(), prompt])

    plain, again = trained(False), trained(True)
    assert all(x is not None and x.any() for x in plain)
    for wanted, got in zip(plain, again):
        assert got is not None
        assert torch.allclose(wanted, got, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("through", [False, True])
def test_gradients_flow_through_history_if_asked_to(through: bool, checkpoint: bool) -> None:
    generator, decoder = tiny_generator(), tiny_decoder()
    condition, ways = (
        generator.condition(tiny_prompt()),
        {"checkpoint": checkpoint, "through_history": through},
    )
    lr, noise = pairs().lr, torch.randn(2, CHANNELS, 4, 2, 3)
    first = noise[:, :, :2].clone().requires_grad_()
    blocks = roll_out(generator, condition, torch.cat([first, noise[:, :, 2:]], 2), lr, PLAN, **ways)
    (gradient,) = torch.autograd.grad(blocks[-1].sum(), first, allow_unused=True, retain_graph=True)
    assert (gradient is not None and bool(gradient.any())) == through
    latents = [block.detach().requires_grad_() for block in blocks]
    frames = decode_blocks(decoder, latents, lr, PLAN, **ways)
    (gradient,) = torch.autograd.grad(frames[:, :, -1].sum(), latents[0], allow_unused=True)
    assert (gradient is not None and bool(gradient.any())) == through


def test_a_checkpointed_rollout_keeps_less() -> None:
    """Counted by what autograd saves, which is what fills a card."""

    def saved(checkpoint: bool) -> int:
        kept: set[int] = set()
        count = 0

        def pack(x: Tensor) -> Tensor:
            nonlocal count
            if x.untyped_storage().data_ptr() not in kept:
                kept.add(x.untyped_storage().data_ptr())
                count += x.numel()
            return x

        generator, batch = tiny_generator(), pairs()
        condition = generator.condition(tiny_prompt())
        noise = torch.randn(2, CHANNELS, 4, 2, 3)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            roll_out(generator, condition, noise, batch.lr, PLAN, checkpoint=checkpoint)
        return count

    assert saved(True) < saved(False) / 10


def test_blocks_of_a_plan() -> None:
    latents = torch.arange(7.0).view(1, 1, 7, 1, 1)
    assert [x.flatten().tolist() for x in split_blocks(latents, PLAN)] == [[0, 1], [2], [3], [4], [5], [6]]
    assert [x.shape[2] for x in split_blocks(latents, BlockPlan(3, 3))] == [3, 3, 1]
    assert fitted_plan(BlockPlan(), 1) == BlockPlan(1, 2)
    assert fitted_plan(BlockPlan(), 6) == fitted_plan(BlockPlan(), 22) == BlockPlan()


# ---------------------------------------------------------------------------------------------- stage 2


@pytest.mark.parametrize("frames", [13, 1])
@pytest.mark.parametrize("train_backbone", [False, True])
@pytest.mark.parametrize("train_decoder", [False, True])
def test_each_player_gets_its_gradients(frames: int, train_backbone: bool, train_decoder: bool) -> None:
    settings = replace(SETTINGS, train_decoder=train_decoder)
    objective = stage2(settings, replace(MSQ, train_backbone=train_backbone))
    model = objective.model
    players = {player.name: player.parameters for player in objective.players}
    assert set(players["discriminator"]) == set(
        (model.discriminator if train_backbone else model.discriminator.heads).parameters()
    )
    wanted = {*model.generator.parameters(), model.prompt}
    wanted |= set(model.decoder.parameters()) if train_decoder else set()
    assert set(players["generator"]) == wanted

    torch.manual_seed(0)
    updates = objective.updates(pairs(frames))
    name, losses = next(updates)
    assert name == "discriminator"
    losses["loss"].backward()
    assert all(p.grad is None for p in players["generator"])
    assert all(p.grad is not None and p.grad.any() for p in model.discriminator.heads.parameters())
    before = gradients(players["discriminator"])

    name, losses = next(updates)
    assert name == "generator"
    losses["loss"].backward()
    for old, now in zip(before, gradients(players["discriminator"])):
        assert old is None or torch.equal(old, now)
    assert all(p.grad is not None and p.grad.any() for p in players["generator"])
    if not train_decoder:
        assert all(p.grad is None for p in model.decoder.parameters())
    assert list(updates) == []
    assert all(value.isfinite() for value in losses.values())
    assert losses["perceptual"] > 0
    assert (losses["difference"] > 0) == (frames > 1)


@pytest.mark.parametrize("train_backbone", [False, True])
def test_the_generator_meets_the_updated_discriminator(train_backbone: bool) -> None:
    """Its gradient is that of a fresh step whose discriminator was so from the start."""

    def generator_gradient(change_first: bool) -> list[Tensor | None]:
        objective = stage2(SETTINGS, replace(MSQ, train_backbone=train_backbone))
        parameters = objective.players[0].parameters

        def change() -> None:
            with torch.no_grad():
                for index, parameter in enumerate(parameters):
                    parameter.add_(
                        0.1 * torch.cos(torch.arange(parameter.numel()) + index).view_as(parameter)
                    )

        torch.manual_seed(0)
        if change_first:
            change()
        updates = objective.updates(pairs())
        next(updates)
        if not change_first:
            change()
        _, losses = next(updates)
        losses["adversarial"].backward()
        return gradients(objective.model.generator.parameters())

    for early, late in zip(generator_gradient(True), generator_gradient(False)):
        assert torch.allclose(early, late, rtol=1e-4, atol=1e-7)


def test_the_losses_are_the_papers() -> None:
    """Weights 1, 0.1, 1, 2 and 1000, each term recomputed from the latents and frames it is of."""
    seen: list[Tensor] = []
    objective = stage2()
    decode = objective.decode

    def spy(blocks: list[Tensor], lr: Tensor, plan: BlockPlan) -> Tensor:
        assert [x.shape[2] for x in blocks] == [2, 1, 1]
        seen.append(torch.cat(blocks, 2))
        seen.append(decode(blocks, lr, plan))
        return seen[-1]

    objective.decode = spy
    objective.settings = replace(SETTINGS, frames=FrameLosses("mse", perceptual_weight=2.0))
    batch = pairs()
    (_, of_d), (_, of_g) = objective.updates(batch)
    latents, frames = seen
    latent = F.mse_loss(latents, encode(batch.hq))
    pixel = F.mse_loss(frames, batch.hq)
    lpips = (frames.clamp(-1, 1) - batch.hq).abs().mean()  # of all 13 frames
    assert of_g["loss"].item() == pytest.approx(
        (latent + 0.1 * of_g["adversarial"] + pixel + 2 * lpips).item(), rel=1e-5
    )
    assert of_d["loss"].item() == pytest.approx((of_d["adversarial"] + 1000 * of_d["r1"]).item(), rel=1e-5)
    assert {"margin_global", "margin_spatial", "margin_temporal"} <= set(of_d)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_hard_lr_frames_are_for_the_decoder_alone(share: float) -> None:
    objective = stage2(replace(SETTINGS, train_decoder=True, hard_lr_share=share))
    generator, decode, batch = objective.model.generator, objective.decode, pairs()
    given: dict[str, list[Tensor]] = {"generator": [], "decoder": []}
    step = generator.step

    def see_step(state: Any, condition: Any, noise: Tensor, lr: Tensor) -> Any:
        given["generator"].append(lr)
        return step(state, condition, noise, lr)

    def see_decode(blocks: list[Tensor], lr: Tensor, plan: BlockPlan) -> Tensor:
        given["decoder"].append(lr)
        return decode(blocks, lr, plan)

    generator.step, objective.decode = see_step, see_decode
    list(objective.updates(batch))
    assert torch.equal(torch.cat(given["generator"], dim=2), batch.lr)
    assert torch.equal(given["decoder"][0], batch.lr) == (share == 0.0)


def test_real_and_generated_clips_share_all_but_the_latents() -> None:
    """A perfect generator can not be told from the truth: RSGAN is log 2 for both players."""
    objective = stage2()
    batch = pairs()
    step = objective.model.generator.step

    def perfect(state: Any, condition: Any, noise: Tensor, lr: Tensor) -> Any:
        first = state.next_position
        state, latents = step(state, condition, noise, lr)
        return state, 0 * latents + encode(batch.hq)[:, :, first : first + latents.shape[2]]

    objective.model.generator.step = perfect
    for _, losses in objective.updates(batch):
        assert losses["adversarial"].item() == pytest.approx(0.693147, abs=1e-5)


def test_training_lowers_the_losses() -> None:
    objective = stage2(replace(SETTINGS, adversarial_cap=0.3))
    optimizers = {
        player.name: torch.optim.AdamW(player.parameters, lr=3e-3, betas=player.optimizer.betas)
        for player in objective.players
    }
    torch.manual_seed(0)
    latent = []
    for _ in range(12):
        objective.advance(0.0)
        for name, losses in objective.updates(pairs()):
            optimizers[name].zero_grad()
            losses["loss"].backward()
            optimizers[name].step()
            if name == "generator":
                latent.append(losses["latent"].item())
                share = losses["adversarial_share"]
    assert latent[-1] < 0.7 * latent[0]
    assert 0 < share.item() < 100
    assert objective.model.balance.reconstruction > 0


def test_bfloat16_leaves_the_heads_in_float32() -> None:
    objective = stage2(replace(SETTINGS, checkpoint=True, train_decoder=True))
    logits: list[torch.dtype] = []
    for head in objective.model.discriminator.heads:
        head.register_forward_hook(lambda _m, _i, out: logits.append(out.dtype))
    updates = objective.updates(Batch(pairs().hq, pairs().lr.bfloat16()))
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            name, losses = next(updates)
        losses["loss"].backward()
        assert losses["loss"].dtype == torch.float32
    assert name == "generator"
    assert set(logits) == {torch.float32}
    for player in objective.players:
        assert all(p.grad is not None and p.grad.isfinite().all() for p in player.parameters)


class NothingComesBack(TorchDispatchMode):
    """Refuses what would make the host wait for a device, and shapes that hang on values."""

    forbidden = ("_local_scalar_dense", "nonzero", "masked_select", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(name in str(func) for name in self.forbidden), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [lambda: stage2(), lambda: decoder_objective()])
def test_a_step_can_be_captured(make: Callable[[], Any]) -> None:
    objective = make()
    with NothingComesBack():
        for _, losses in objective.updates(pairs()):
            losses["loss"].backward()
    with pytest.raises(AssertionError), NothingComesBack():
        torch.ones(1).item()


def test_settings_are_checked() -> None:
    with pytest.raises(InputError, match="clips of 12 frames do not end at a block's end: take 13"):
        replace(SETTINGS, batches=BatchSettings(clips=1, frames=12))
    model = stage2().model
    with pytest.raises(InputError, match="wants a perceptual distance"):
        Stage2Objective(model, encode, partial(decode_blocks, model.decoder), None, SETTINGS)
    bare = Stage2Model(model.generator, model.prompt, model.discriminator)
    with pytest.raises(InputError, match="train the decoder along"):
        Stage2Objective(bare, encode, lambda *_: _[1], distance, replace(SETTINGS, train_decoder=True))
    hard = replace(SETTINGS, hard_lr_share=0.1)
    with pytest.raises(InputError, match="set train_decoder, or 0"):
        Stage2Objective(model, encode, partial(decode_blocks, model.decoder), distance, hard)


def test_the_papers_numbers() -> None:
    settings = Stage2Settings()
    generator, discriminator = settings.generator, settings.discriminator
    assert (generator.learning_rate, generator.betas, generator.weight_decay) == (1e-5, (0.5, 0.99), 1e-4)
    assert (generator.first_step, generator.average_decay) == (20, 0.999)
    assert (discriminator.betas, discriminator.warm_up_steps) == ((0.0, 0.99), 20)
    assert discriminator.first_step == 0
    assert discriminator.average_decay is None
    assert settings.batches == BatchSettings(clips=16, frames=85, images=64, image_fraction=0.2)
    decoder = DecoderSettings()
    assert decoder.optimizer.average_decay == 0.9995
    assert decoder.frames.perceptual_weight == 0.4
    nano_stage2()


def test_discriminators_fit_their_models() -> None:
    with torch.device("meta"):
        paper = LatentFeatures(recavsr_5b(), MSQConfig().layers, torch.zeros(1, 4, 4096))
        MSQDiscriminator(paper, MSQConfig())
        MSQDiscriminator(LatentFeatures(nano(), NANO_MSQ.layers, torch.zeros(1, 4, 32)), NANO_MSQ)
    assert len(paper.blocks) == 22


# ---------------------------------------------------------------------------------------------- decoder


def decoder_objective(**changes: Any) -> DecoderObjective:
    defaults = {"batches": BatchSettings(clips=2, frames=13), "plan": BlockPlan(1, 2)}
    return DecoderObjective(tiny_decoder(), encode, distance, DecoderSettings(**(defaults | changes)))


@pytest.mark.parametrize("frames", [13, 1])
def test_the_decoder_is_trained_by_its_stream(frames: int) -> None:
    objective = decoder_objective()
    batch = pairs(frames)
    ((name, losses),) = objective.updates(batch)
    assert name == "decoder"
    decoder = tiny_decoder()
    _, wanted = decoder.step(decoder.start(), encode(batch.hq), batch.lr)  # pieces give what the whole gives
    l1 = (wanted - batch.hq).abs().mean()
    lpips = (wanted.clamp(-1, 1) - batch.hq).abs().mean()
    assert losses["loss"].item() == pytest.approx((l1 + 0.4 * lpips).item(), rel=1e-5)
    losses["loss"].backward()
    assert all(p.grad is not None and p.grad.any() for p in objective.players[0].parameters)


def test_the_decoder_can_go_without_lr_frames() -> None:
    def loss(objective: DecoderObjective, batch: Batch) -> float:
        ((_, losses),) = objective.updates(batch)
        return losses["loss"].item()

    batch = pairs()
    other = Batch(batch.hq, batch.lr.flip(-1))
    assert loss(decoder_objective(), batch) != loss(decoder_objective(), other)

    def without() -> DecoderObjective:
        return DecoderObjective(tiny_decoder(lr_conditioning=False), encode, distance, DecoderSettings())

    assert loss(without(), batch) == loss(without(), other)


def test_noise_and_hard_lr_frames_fall_on_their_share() -> None:
    torch.manual_seed(0)
    noisy = with_noise(torch.zeros(400, 2, 1, 8, 8), 0.3)
    deviations = noisy.flatten(1).std(1)
    assert deviations.gt(0).float().mean().item() == pytest.approx(0.5, abs=0.1)
    assert deviations[deviations > 0].mean().item() == pytest.approx(0.3, rel=0.02)
    frames = torch.rand(300, 3, 1, 32, 32)
    given, hard = with_hard_share(frames, 0.4)
    changed = given.ne(frames).flatten(1).any(1)
    assert torch.equal(changed, hard.flatten())
    assert changed.float().mean().item() == pytest.approx(0.4, abs=0.1)
    flat = given[changed].flatten(1)
    assert flat.std(1).mean() < 0.05  # nothing but the mean of 16 x 16 pixels is left
    assert torch.allclose(flat.mean(1), frames[changed].flatten(1).mean(1), atol=0.02)
    assert with_hard_share(frames, 0.0)[0] is frames
    assert with_noise(frames, 0.0) is frames


# ---------------------------------------------------------------------------------------------- losses


def test_frame_losses() -> None:
    batch = pairs(5)
    batch.hq[:, :, 2] = batch.hq[:, :, 1]  # a still moment
    frames = (batch.lr * 0.9).requires_grad_()
    losses = FrameLosses("charbonnier", 0.5, pixel_weight=3.0, difference_weight=0.25, still_weight=2.0)
    total, terms = losses(frames, batch.hq, batch.lr, distance)
    clamped = (frames.clamp(-1, 1) - batch.hq).abs().mean()
    wanted = (
        3 * charbonnier(frames, batch.hq) + 0.25 * temporal_difference(frames, batch.hq, 2.0) + 0.5 * clamped
    )
    assert total.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert set(terms) == {"pixel", "difference", "perceptual", "gain_db"}
    again, _ = losses(frames, batch.hq, batch.lr, distance, checkpoint=True)
    plain, other = (torch.autograd.grad(x, frames)[0] for x in (total, again))
    assert torch.allclose(plain, other, atol=1e-7)


def test_frames_are_picked_without_repeats() -> None:
    device = torch.device("cpu")
    torch.manual_seed(0)
    picks = [pick_frames(5, 3, device) for _ in range(20)]
    assert all(len(set(p.tolist())) == 3 for p in picks)
    assert {i for p in picks for i in p.tolist()} == set(range(5))
    assert pick_frames(5, None, device).tolist() == pick_frames(5, 9, device).tolist() == [0, 1, 2, 3, 4]
    x = torch.zeros(1, 3, 4, 2, 2)
    assert perceptual(x, x + 0.5, distance, torch.tensor([1]), checkpoint=True).item() == 0.5
    assert temporal_difference(x[:, :, :1], x[:, :, :1] + 1).item() == 0
