"""Training: losses give gradients to all that is trained, rollouts detach, the loop keeps its promises."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from recavsr import attention
from recavsr.cache_policy import CacheAction
from recavsr.evaluation import metrics
from recavsr.evaluation.lpips import LPIPS
from recavsr.geometry import BlockPlan
from recavsr.training import losses, nano
from recavsr.training.losses import (
    charbonnier,
    latent_statistics_penalty,
    log_rms,
    perceptual,
    pixel_loss,
    psnr,
    structural_dissimilarity,
    temporal_difference,
)
from recavsr.training.rollout import decode_blocks, roll_out, split_blocks
from tiny import CHANNELS, STRIDE, one_thread, tiny_decoder, tiny_generator, tiny_prompt


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


def clip(latents: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    lr_frames = torch.rand(1, 3, 4 * latents - 3, 2 * STRIDE, 3 * STRIDE) * 2 - 1
    return torch.randn(1, CHANNELS, latents, 2, 3), lr_frames


def test_a_rollout_is_the_streaming_step() -> None:
    generator, plan = tiny_generator(), BlockPlan(2, 2)
    noise, lr_frames = clip(6)
    condition = generator.condition(tiny_prompt())
    blocks = roll_out(generator, condition, noise, lr_frames, plan)
    state = generator.start()
    for index, block in enumerate(blocks):
        first, frames = plan.first_frame(index), plan.frames(index)
        latents = noise[:, :, 2 * index : 2 * index + 2]
        state, wanted = generator.step(state, condition, latents, lr_frames[:, :, first : first + frames])
        assert torch.equal(block, wanted)


def test_gradients_reach_the_generator_but_not_the_block_before() -> None:
    generator = tiny_generator()
    noise, lr_frames = clip(6)
    noise.requires_grad_()
    blocks = roll_out(generator, generator.condition(tiny_prompt()), noise, lr_frames, BlockPlan(2, 2))
    (gradient,) = torch.autograd.grad(blocks[2].square().sum(), noise, retain_graph=True)
    assert not gradient[:, :, :4].any()  # neither through recycled latents nor through history
    assert gradient[:, :, 4:].any()
    blocks[1].square().sum().backward()
    without = [name for name, p in generator.named_parameters() if p.grad is None or not p.grad.any()]
    assert not without


def test_a_clip_must_end_with_a_block() -> None:
    generator = tiny_generator()
    noise, lr_frames = clip(7)
    with pytest.raises(ValueError, match="7 latents do not end at a block's end"):
        roll_out(generator, generator.condition(tiny_prompt()), noise, lr_frames, BlockPlan(2, 2))


def test_decoding_blocks_gives_gradients_to_every_block() -> None:
    decoder = tiny_decoder()
    latents, lr_frames = clip(4)
    blocks = [piece.clone().requires_grad_() for piece in latents.split(2, dim=2)]
    frames = decode_blocks(decoder, blocks, lr_frames, BlockPlan(2, 2))
    assert frames.shape == lr_frames.shape
    first, second = torch.autograd.grad(frames[:, :, 5:].square().sum(), blocks, allow_unused=True)
    assert first is None or not first.any()
    assert second.any()


@pytest.fixture(scope="module")
def model() -> nano.NanoTraining:
    torch.manual_seed(0)
    made = nano.NanoTraining()
    with torch.no_grad():  # the head starts at zero, which would stop the gradient to all before it
        made.decoder.head.outer.weight.normal_(std=0.01)
    return made


@pytest.mark.parametrize("name", ["autoencoder", "control", "generator", "teacher", "joint"])
def test_every_loss_trains_all_its_parameters(model: nano.NanoTraining, name: str) -> None:
    stage = replace(nano.STAGES[name](), latents=2, perceptual_weight=0.1, plan=BlockPlan(1, 1))
    torch.manual_seed(1)
    hq = torch.rand(2, 3, stage.frames, 64, 64) * 2 - 1
    lr = (hq + 0.1 * torch.randn_like(hq)).clamp(-1, 1)

    def distance(a: Tensor, b: Tensor) -> Tensor:
        return (a - b).square().mean((1, 2, 3))

    loss, trained = {
        "autoencoder": (nano.autoencoder_loss(model, stage), [model.encoder, model.decoder]),
        "control": (nano.control_loss(model, stage, distance), [model.decoder]),
        "generator": (nano.generator_loss(model, stage), [model.generator]),
        "teacher": (nano.teacher_loss(model, stage), [model.generator]),
        "joint": (nano.joint_loss(model, stage, distance), [model.generator, model.decoder]),
    }[name]
    model.zero_grad()
    losses = loss(hq, lr)
    losses["loss"].backward()
    assert all(math.isfinite(value.item()) for value in losses.values())
    for part in trained:
        for key, parameter in part.named_parameters():
            gradient = parameter.grad
            assert gradient is not None, key
            assert gradient.isfinite().all(), key
            # the control's latents are zero, so it can not learn what to do with them
            assert gradient.any() or (name == "control" and key == "latent_projection.weight"), key


def test_later_blocks_count_more(model: nano.NanoTraining) -> None:
    """The first block's frames have the base weight, later ones theirs on top."""
    stage = replace(nano.STAGES["joint"](), latents=3, plan=BlockPlan(1, 1), latent_weight=0.0)
    stage = replace(stage, difference_weight=0.0, structure_weight=0.0, hard_lr_share=0.0)
    hq = torch.rand(1, 3, 9, 32, 32) * 2 - 1
    lr = (hq + 0.1 * torch.randn_like(hq)).clamp(-1, 1)

    def losses(later_weight: float) -> dict[str, Tensor]:
        torch.manual_seed(3)
        return dict(nano.joint_loss(model, replace(stage, later_weight=later_weight), None)(hq, lr))

    with torch.no_grad():
        base, heavier = losses(0.0), losses(2.0)
        target = model.encode(hq)  # noise is drawn in its memory layout
        torch.manual_seed(3)
        noise = torch.randn_like(target)
        blocks = roll_out(model.generator, model.generator.condition(model.prompt), noise, lr, stage.plan)
        frames = decode_blocks(model.decoder, blocks, lr, stage.plan)
    later = charbonnier(frames[:, :, 1:], hq[:, :, 1:])
    torch.testing.assert_close(heavier["loss"], base["loss"] + 2 * later)


def test_switches_and_schedule_are_saved_with_the_weights(tmp_path: Path) -> None:
    schedule = replace(nano.nano().schedule, actions=(CacheAction(3),) * 6)
    generator = replace(nano.nano(), schedule=schedule, recycling=False)
    decoder = replace(nano.nano_decoder(), lr_conditioning=False)
    made = nano.NanoTraining(generator, decoder)
    made.save(tmp_path / "weights.safetensors")
    made.export(tmp_path / "folder")
    for saved in ("weights.safetensors", "folder"):
        again = nano.NanoTraining.starting_from(tmp_path / saved)
        assert again.generator.config == generator
        assert not again.decoder.config.lr_conditioning
        torch.testing.assert_close(again.generator.head.weight, made.generator.head.weight, atol=1e-3, rtol=0)
    fresh = nano.NanoTraining.on_autoencoder_of(tmp_path / "folder", decoder=nano.nano_decoder())
    assert fresh.generator.config == generator
    assert fresh.decoder.config.lr_conditioning


def test_latent_statistics_are_shared_and_saved(model: nano.NanoTraining, tmp_path: Path) -> None:
    mean, std = torch.linspace(-1, 1, 48), torch.linspace(0.5, 2, 48)
    model.set_statistics(mean, std)
    model.save(tmp_path / "weights.safetensors")
    other = nano.NanoTraining()
    other.load(tmp_path / "weights.safetensors")
    assert torch.equal(other.decoder.latents_mean.flatten(), mean)
    assert torch.equal(other.decoder.latents_std.flatten(), std)
    assert not (tmp_path / "weights.part").exists()
    model.set_statistics(torch.zeros(48), torch.ones(48))


def test_losses() -> None:
    x, y = torch.zeros(1, 3, 4, 2, 2), torch.full((1, 3, 4, 2, 2), 0.5)
    assert charbonnier(x, y).item() == pytest.approx(0.5, abs=1e-5)
    assert charbonnier(x, x).item() == pytest.approx(1e-3)
    assert temporal_difference(x, y).item() == pytest.approx(1e-3)  # a constant error does not flicker
    flicker = y * torch.tensor([1.0, -1, 1, -1]).view(1, 1, 4, 1, 1)
    assert temporal_difference(flicker, x).item() == pytest.approx(1.0, abs=1e-5)
    assert psnr(x, y).item() == pytest.approx(-10 * math.log10(0.25**2))
    picked = perceptual(flicker, x, lambda a, b: (a - b).mean((1, 2, 3)), torch.tensor([0, 2]))
    assert picked.item() == pytest.approx(0.5)


def test_latent_statistics_penalty() -> None:
    torch.manual_seed(0)
    normal = torch.randn(4, 2, 10, 20, 20)
    assert latent_statistics_penalty(normal) < 1e-3
    assert latent_statistics_penalty(normal + 1).item() == pytest.approx(1, abs=0.05)
    assert latent_statistics_penalty(3 * normal).item() == pytest.approx(4, abs=0.1)


def test_log_rms_is_the_mean_psnr_of_frames() -> None:
    truth = (torch.rand(2, 3, 5, 24, 24) * 255).round()
    errors = torch.tensor([2.0, 5.0, 12.0, 30.0, 60.0]).reshape(5, 1, 1)
    output = (truth + errors * torch.randn_like(truth)).round().clamp(0, 255)
    pictures = [x.permute(0, 2, 3, 4, 1).flatten(0, 1).byte().numpy() for x in (output, truth)]
    x, y = (frames / 127.5 - 1 for frames in (output, truth))
    # [-1, 1] is twice as wide as [0, 1].
    expected = np.log(2) - metrics.psnr(*pictures).mean() * np.log(10) / 20
    assert log_rms(x, y, floor=0).item() == pytest.approx(expected, abs=1e-4)
    assert log_rms(y, y).item() == pytest.approx(np.log(2 / 255), abs=1e-5)
    # Where the truth is one of three values, an L1 rests at their median, this at their mean.
    values = torch.tensor([0.0, 0.0, 0.9]).reshape(1, 1, 1, 1, 3)
    mean, median = torch.full_like(values, 0.3), torch.zeros_like(values)
    assert log_rms(mean, values) < log_rms(median, values)
    assert pixel_loss("l1", median, values) < pixel_loss("l1", mean, values)


def test_structural_dissimilarity_is_that_of_the_metric() -> None:
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 256, (3, 24, 30, 3)).astype(np.uint8)
    output = np.clip(truth + rng.normal(0, 20, truth.shape), 0, 255).astype(np.uint8)
    x, y = (torch.from_numpy(v).permute(3, 0, 1, 2)[None] / 127.5 - 1 for v in (output, truth))
    x = x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = structural_dissimilarity(x, y)
    # The metric rounds luma to 8 bits.
    assert loss.item() == pytest.approx(1 - metrics.ssim(output, truth).mean(), abs=3e-4)
    assert structural_dissimilarity(y, y).item() == pytest.approx(0, abs=1e-6)
    (gradient,) = torch.autograd.grad(loss, x)
    nearer = structural_dissimilarity(x - 100 * gradient, y)
    assert nearer < loss


def test_a_decoder_with_blurred_frames_has_only_its_latents(model: nano.NanoTraining) -> None:
    """Frames with the same means of 16 x 16 pixels are one to it; the generator still sees the difference."""
    deaf = copy.deepcopy(model)
    torch.nn.init.zeros_(deaf.decoder.latent_projection.weight)
    hq = torch.rand(1, 3, 5, 32, 32) * 2 - 1
    turned = hq.unfold(3, 16, 16).unfold(4, 16, 16).flip(5).transpose(4, 5).flatten(3, 4).flatten(4, 5)

    def pixel(model: nano.NanoTraining, hard_share: float, lr: Tensor) -> float:
        torch.manual_seed(0)
        changes = {"latents": 2, "plan": BlockPlan(1, 1), "hard_lr_share": hard_share}
        losses = nano.joint_loss(model, replace(nano.STAGES["joint"](), **changes), None)(hq, lr)
        return losses["pixel"].item()

    assert pixel(deaf, 1.0, hq) == pytest.approx(pixel(deaf, 1.0, turned), rel=1e-6)
    assert pixel(deaf, 0.0, hq) != pytest.approx(pixel(deaf, 0.0, turned), rel=1e-4)
    assert pixel(model, 1.0, hq) != pytest.approx(pixel(model, 1.0, turned), rel=1e-6)


def test_compiled_layers_train_on_grids_that_their_windows_do_not_cover(model: nano.NanoTraining) -> None:
    decoder = copy.deepcopy(model.decoder)
    size = 16 * (decoder.config.window.height + 4)
    latents, lr = torch.randn(1, 48, 1, size // 16, size // 16), torch.rand(1, 3, 1, size, size)
    attention._plan_window.cache_clear()
    wanted = decoder.step(decoder.start(), latents, lr)[1]
    attention._plan_window.cache_clear()
    for layer in [*decoder.backbone, *decoder.refinement]:
        layer.step = torch.compile(layer.step, fullgraph=True, dynamic=False, backend="eager")
    got = decoder.step(decoder.start(), latents, lr)[1]
    torch.testing.assert_close(got, wanted)
    got.sum().backward()


def test_a_soft_loss_of_still_pixels_wants_changes_spread_out() -> None:
    target = torch.zeros(1, 3, 9, 4, 4)
    pulse, ramp = target.clone(), target.clone()
    pulse[:, :, 4:] = 0.02
    ramp += 0.02 * (torch.arange(9) / 4).clamp(max=1).view(9, 1, 1)
    hard = [float(temporal_difference(x, target, 4.0)) for x in (pulse, ramp)]
    soft = [float(temporal_difference(x, target, 4.0, still_softness=0.02)) for x in (pulse, ramp)]
    assert hard[1] / hard[0] > 0.8
    assert soft[1] / soft[0] < 0.6
    # of the pulse's one change of 8: the plain part, and 4 times sqrt(.02^2 + .02^2) - .02
    wanted = (0.020025 + 7e-3 + 4 * (8e-4**0.5 - 0.02)) / 8
    assert soft[0] == pytest.approx(wanted, rel=1e-3)


def test_differences_across_latent_borders_count_more() -> None:
    target = torch.zeros(1, 3, 9, 4, 4)
    inside, across = target.clone(), target.clone()
    inside[:, :, 3:] = 0.5  # changes from frame 2 to 3, inside the latent of frames 1 to 4
    across[:, :, 5:] = 0.5  # changes from frame 4 to 5, where the next latent begins
    plain = [float(temporal_difference(frames, target)) for frames in (inside, across)]
    assert plain[0] == pytest.approx(plain[1])
    inner, outer = (float(temporal_difference(f, target, border_weight=2.0)) for f in (inside, across))
    # the smooth L1 of no difference is 1e-3; borders follow frames 0 and 4
    assert inner == pytest.approx((0.5 + 5 * 1e-3 + 2 * 3e-3) / 8, rel=1e-3)
    assert outer == pytest.approx((3 * 0.5 + 6 * 1e-3 + 3e-3) / 8, rel=1e-3)


def test_a_clip_from_inside_a_stream_has_the_borders_of_its_stream() -> None:
    target = torch.zeros(1, 3, 9, 4, 4)
    frames = target.clone()
    frames[:, :, 2:] = 0.5  # from frame 1 to 2 of the clip: 4 to 5 of a stream whose frame 3 it begins with
    inner, outer = (
        float(temporal_difference(frames, target, border_weight=2.0, first_frame=first)) for first in (0, 3)
    )
    assert inner == pytest.approx((0.5 + 7e-3 + 2 * 2e-3) / 8, rel=1e-3)
    assert outer == pytest.approx((3 * 0.5 + 7e-3 + 2e-3) / 8, rel=1e-3)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_compiled_losses_are_the_same(checkpoint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_ = partial(torch.compile, fullgraph=True, dynamic=False, backend="aot_eager")
    monkeypatch.setattr(losses, "_compiled", compile_)
    measure = nano.polish_stage().frame_losses
    hq = torch.rand(1, 3, 5, 32, 32) * 2 - 1
    frames = (hq + 0.1 * torch.randn_like(hq)).clamp(-1, 1).requires_grad_()
    results = []
    for compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        lpips = LPIPS("vgg", pretrained=False)
        distance = compile_(lpips) if compiled else lpips
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            ways = {"checkpoint": checkpoint, "compiled": compiled}
            total, terms = measure(frames, hq, hq, distance, **ways)
        (gradient,) = torch.autograd.grad(total, frames)
        results.append((total.detach(), terms, gradient))
    torch.testing.assert_close(*results)
    assert set(results[0][1]) == {"pixel", "difference", "structure", "perceptual", "gain_db"}


def test_a_clip_decoded_at_once_is_that_of_its_blocks(model: nano.NanoTraining) -> None:
    """Values and gradients: a decoder's latents see none after them."""
    decoder, plan = copy.deepcopy(model.decoder), BlockPlan(2, 1)
    latents, lr = torch.randn(1, 48, 4, 2, 2), torch.rand(1, 3, 13, 32, 32) * 2 - 1
    blocks = split_blocks(latents, plan)
    state, pieces, first = decoder.start(), [], 0
    for index, block in enumerate(blocks):
        count = plan.frames(index)
        state, piece = decoder.step(state, block, lr[:, :, first : first + count])
        pieces.append(piece)
        first += count
    parameters = list(decoder.parameters())
    wanted = torch.cat(pieces, dim=2)
    got = decode_blocks(decoder, blocks, lr, plan, through_history=True)
    torch.testing.assert_close(got, wanted)
    gradients = (torch.autograd.grad(x.square().sum(), parameters) for x in (got, wanted))
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
