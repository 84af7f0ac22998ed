"""Adversarial losses of Stage 2: paired relativistic logits, feature R1, shared noise, a measured share.

Shapes: B batch, T latents, H W latent rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F


def discriminator_loss(real: Tensor, fake: Tensor) -> Tensor:
    """Return E[softplus(c_f - c_r)] of paired logits [B] (RSGAN, Eq. 4)."""
    return F.softplus(fake - real).mean()


def generator_loss(real: Tensor, fake: Tensor) -> Tensor:
    """Return E[softplus(c_r - c_f)] of paired logits [B] (RSGAN, Eq. 4)."""
    return F.softplus(real - fake).mean()


def feature_r1(score: Callable[[Sequence[Tensor]], Tensor], features: Sequence[Tensor]) -> Tensor:
    """Return the squared norm of d logit / d features of a clip, averaged over the batch (Eq. 5).

    `score` turns the features of real clips into logits [B]. The features are cut from whatever made
    them, so that second derivatives stay inside `score`: the heads, not the backbone.
    """
    leaves = [x.detach().to(torch.promote_types(x.dtype, torch.float32)) for x in features]
    for leaf in leaves:
        leaf.requires_grad_()
    with torch.enable_grad():
        gradients = torch.autograd.grad(score(leaves).sum(), leaves, create_graph=True)
    return torch.stack([g.flatten(1).square().sum(dim=1) for g in gradients]).sum(dim=0).mean()


@dataclass(frozen=True)
class SharedNoise:
    """The noise under which a real and a generated clip are compared: the same xi and sigma for both."""

    xi: Tensor  # [B, C, T, H, W]
    sigma: Tensor  # [B]

    @staticmethod
    def draw(latents: Tensor, steps: int = 50) -> SharedNoise:
        """Draw xi ~ N(0, I) like `latents` and sigma_D = max(t_D, 1) / 1000, t_D ~ Unif{0..steps}."""
        step = torch.randint(steps + 1, (latents.shape[0],), device=latents.device)
        return SharedNoise(torch.randn_like(latents), step.clamp_min(1) / 1000)

    @property
    def timestep(self) -> Tensor:
        """Return 1000 sigma [B]: the backbone's timestep for this noise."""
        return 1000 * self.sigma

    def add_to(self, latents: Tensor) -> Tensor:
        """Return (1 - sigma) z + sigma xi, the flow's own mixture (the paper leaves the form open)."""
        sigma = self.sigma.view(-1, 1, 1, 1, 1)
        return (1 - sigma) * latents + sigma * self.xi


class GradientBalance(nn.Module):
    """Measures the adversarial gradient against the reconstruction's at the generated latents; may cap it.

    Both norms are taken during `backward`, for the price of two reductions, and kept in buffers.
    """

    adversarial: Tensor
    reconstruction: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adversarial", torch.zeros(()))
        self.register_buffer("reconstruction", torch.ones(()))

    def share(self) -> Tensor:
        """Return the last step's adversarial norm over the reconstruction's, before any cap."""
        return self.adversarial / self.reconstruction.clamp_min(1e-20)

    def split(self, latents: Tensor, cap: float | None = None) -> tuple[Tensor, Tensor]:
        """Return `latents` twice: for the adversarial loss, and for all other losses.

        With a `cap` the adversarial gradient is scaled down to at most `cap` times the other one, going
        by the norms of the step before (the paper has no cap).
        """
        judged, rebuilt = latents.view_as(latents), latents.view_as(latents)
        scale = None if cap is None else (cap / self.share().clamp_min(1e-20)).clamp(max=1)

        def of_adversarial(gradient: Tensor) -> Tensor | None:
            self.adversarial.copy_(gradient.norm())
            return None if scale is None else gradient * scale

        def of_reconstruction(gradient: Tensor) -> None:
            self.reconstruction.copy_(gradient.norm())

        judged.register_hook(of_adversarial)
        rebuilt.register_hook(of_reconstruction)
        return judged, rebuilt

    @torch.no_grad()
    def agree(self) -> None:
        """Make both norms those of the whole batch where several processes share it (root mean squares).

        Every process must call it, after `backward`. Else each would cap its own part by its own share, and
        a resumed run go on with the first one's.
        """
        if not (dist.is_available() and dist.is_initialized()):
            return
        squares = torch.stack([self.adversarial, self.reconstruction]).square()
        dist.all_reduce(squares)
        for norm, square in zip((self.adversarial, self.reconstruction), squares / dist.get_world_size()):
            norm.copy_(square.sqrt())
