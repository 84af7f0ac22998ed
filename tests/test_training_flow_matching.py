"""Flow matching: times, path and loss."""

from __future__ import annotations

import pytest
import torch

from recavsr.training.flow_matching import flow_matching_loss, logit_normal_times, noised

CPU = torch.device("cpu")


def test_times_are_logit_normal() -> None:
    torch.manual_seed(0)
    logits = logit_normal_times(40_000, CPU).double().logit()
    assert logits.mean().item() == pytest.approx(0, abs=0.02)
    assert logits.std().item() == pytest.approx(1, abs=0.02)
    quantiles = logits.quantile(torch.tensor([0.02275, 0.84134], dtype=torch.float64))
    assert quantiles.tolist() == pytest.approx([-2, 1], abs=0.06)


def test_a_share_of_the_times_can_be_one() -> None:
    torch.manual_seed(0)
    times = logit_normal_times(20_000, CPU, one_step_share=0.3)
    ones = times == 1
    assert ones.float().mean().item() == pytest.approx(0.3, abs=0.015)
    assert times[~ones].logit().mean().item() == pytest.approx(0, abs=0.03)
    assert not (logit_normal_times(20_000, CPU) == 1).any()


def test_the_path_leads_from_latents_to_noise() -> None:
    latents, noise = torch.randn(2, 3, 4, 1, 2, 2).unbind()
    path = noised(latents, noise, torch.tensor([0.0, 1.0, 0.25]))
    assert torch.equal(path[0], latents[0])
    assert torch.equal(path[1], noise[1])
    torch.testing.assert_close(path[2], 0.75 * latents[2] + 0.25 * noise[2])


def test_the_loss_is_the_error_of_the_velocity() -> None:
    latents, noise = torch.randn(2, 3, 4, 1, 2, 2).unbind()
    assert flow_matching_loss(noise - latents, latents, noise) == 0
    assert flow_matching_loss(noise - latents + 2, latents, noise).item() == pytest.approx(4)
    # the velocity is the path's derivative
    times = torch.full((3,), 0.5)
    slope = (noised(latents, noise, times + 0.01) - noised(latents, noise, times - 0.01)) / 0.02
    assert flow_matching_loss(slope, latents, noise).item() == pytest.approx(0, abs=1e-8)
