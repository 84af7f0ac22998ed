"""The cache router: learns which history each layer keeps (paper, Sec. 3.1, Appendix B.1, B.2).

Shapes: L layers, A candidate actions, K latents of a block's history.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn

from recavsr.cache_policy import PAPER_ACTIONS, AnchorRule, CacheAction, Schedule, visible_after_blocks
from recavsr.models.visibility import BlockVisibility, Visibility

DELTA = 1e-6
"""The small constant of Eq. 2: what no action permits keeps a millionth of its weight."""


class CacheRouter(nn.Module):
    """A distribution over candidate actions for every layer, from the layer's identity alone.

    pi_l = softmax(MLP(e_l) / temperature). Everything is computed in float32, also under autocast.
    """

    temperature: Tensor
    capacities: Tensor

    def __init__(
        self,
        layers: int,
        rule: AnchorRule,
        actions: tuple[CacheAction, ...] = PAPER_ACTIONS,
        embedding: int = 64,
        hidden: int = 128,
    ) -> None:
        super().__init__()
        self.actions, self.rule = actions, rule
        self.layer_embedding = nn.Parameter(torch.randn(layers, embedding))
        self.mlp = nn.Sequential(nn.Linear(embedding, hidden), nn.SiLU(), nn.Linear(hidden, len(actions)))
        self.register_buffer("temperature", torch.tensor(1.0))
        capacities = torch.tensor([float(action.capacity(rule)) for action in actions])
        self.register_buffer("capacities", capacities, persistent=False)

    def log_probabilities(self) -> Tensor:
        """Return log pi [L, A]."""
        with torch.autocast(self.temperature.device.type, enabled=False):
            return (self.mlp(self.layer_embedding) / self.temperature).log_softmax(-1)

    def expected_capacity(self, log_probabilities: Tensor) -> Tensor:
        """Return each layer's expected capacity [L], in latents; its mean is the c of Eq. 3."""
        return (log_probabilities.exp() * self.capacities).sum(-1)

    def exported_capacity(self, log_probabilities: Tensor) -> Tensor:
        """Return the capacity [L] of each layer's most probable action."""
        return self.capacities[log_probabilities.argmax(-1)]

    def visibility(self, log_probabilities: Tensor, blocks: Sequence[tuple[int, ...]]) -> list[Visibility]:
        """Return what each layer lets the blocks of a clip see: the soft prior of Eq. 2.

        Every block sees the union of what the candidate actions permit, with the log prior
        log(P_l + delta), where P_l is the probability of the actions that permit a latent.
        """
        histories, permits = _candidates(self.actions, self.rule, tuple(blocks), self.temperature.device)
        with torch.autocast(permits.device.type, enabled=False):
            priors = (log_probabilities.exp() @ permits.to(log_probabilities) + DELTA).log()
        sizes = [len(history) for history in histories]
        return [
            tuple(
                BlockVisibility(block, history, prior if history else None)
                for block, history, prior in zip(blocks, histories, layer.split(sizes))
            )
            for layer in priors.unbind()
        ]

    @torch.no_grad()
    def export(self) -> Schedule:
        """Return the schedule of each layer's most probable action."""
        choices = self.log_probabilities().argmax(-1).tolist()
        return Schedule(tuple(self.actions[choice] for choice in choices), self.rule)


def entropy(log_probabilities: Tensor) -> Tensor:
    """Return the categorical entropy H [L] of log probabilities [L, A], in nats."""
    return -(log_probabilities.exp() * log_probabilities).sum(-1)


@lru_cache(maxsize=32)
def _candidates(
    actions: tuple[CacheAction, ...],
    rule: AnchorRule,
    blocks: tuple[tuple[int, ...], ...],
    device: torch.device,
) -> tuple[list[tuple[int, ...]], Tensor]:
    """Return each block's union of candidate histories, and which action permits what.

    The second result is [A, all K together], 1 or 0. It is made once a plan, so that captured graphs
    find it on the device.
    """
    permitted = [visible_after_blocks(action, rule, blocks) for action in actions]
    histories = [tuple(sorted(set().union(*seen))) for seen in zip(*permitted)]
    permits = [
        [float(latent in seen) for seen, history in zip(views, histories) for latent in history]
        for views in permitted
    ]
    return histories, torch.tensor(permits, device=device)
