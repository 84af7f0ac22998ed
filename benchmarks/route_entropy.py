"""What decides a learned route: the losses, or the router's random start?

Stands in for Stage 1: each (layer, action) has a small known cost in place of its effect on the
flow-matching loss, seen through noise ten times as large. The real router, budget, entropy and
temperature then learn a route, whose mean cost is compared with the best route within the budget (by
dynamic programming) and with a random one. No network is trained; a run takes seconds to minutes.

    python benchmarks/route_entropy.py --layers 6 --rate 5e-4 --steps 1500 --rise 0.5 1
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from recavsr.cache_policy import PAPER_ACTIONS, AnchorRule
from recavsr.training.router import CacheRouter, entropy
from recavsr.training.stage1 import RouteLearning

SCALE = 0.02
NOISE = 10.0
RULE = AnchorRule()
CAPACITIES = [action.capacity(RULE) for action in PAPER_ACTIONS]


def best_cost(costs: Tensor, slots: int) -> float:
    """Return the least mean cost of a route that reserves at most `slots` slots in all."""
    least = {0: 0.0}
    for row in costs.tolist():
        after: dict[int, float] = {}
        for used, cost in least.items():
            for capacity, extra in zip(CAPACITIES, row):
                total = used + capacity
                if total <= slots:
                    after[total] = min(after.get(total, float("inf")), cost + extra)
        least = after
    return min(least.values()) / len(costs)


def learn(phase: RouteLearning, layers: int, rate: float, steps: int, seed: int) -> tuple[float, ...]:
    """Return soft capacity, exported capacity, mean entropy and the route's, best and random mean cost."""
    torch.manual_seed(seed)
    router = CacheRouter(layers, RULE)
    optimizer = torch.optim.AdamW(router.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=1e-4)
    # More history helps, with falling returns, and differently in each layer.
    costs = SCALE * (torch.randn(layers, len(CAPACITIES)) - 0.5 * router.capacities.sqrt())
    for step in range(steps):
        progress = step / (steps - 1)
        router.temperature.fill_(phase.temperature(progress))
        logs = router.log_probabilities()
        capacity, sharpness = router.expected_capacity(logs).mean(), entropy(logs).mean()
        seen = costs + NOISE * SCALE * torch.randn_like(costs)
        loss = (
            (logs.exp() * seen).sum() / layers
            + phase.budget_weight * (capacity - phase.capacity).square()
            + phase.weight_of_entropy(progress) * sharpness
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    chosen = costs.gather(1, logs.argmax(-1, keepdim=True)).mean() / SCALE
    best = best_cost(costs / SCALE, int(phase.capacity * layers))
    return (
        capacity.item(),
        router.export().mean_slots,
        sharpness.item(),
        chosen.item(),
        best,
        costs.mean().item() / SCALE,
    )


def main() -> None:
    """Print one line a seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rate", type=float, default=5e-4, help="learning rate")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--budget-weight", type=float, default=0.5)
    parser.add_argument("--rise", type=float, nargs=2, default=(0.0, 0.0), help="entropy_rise; paper: 0 0")
    options = parser.parse_args()
    phase = RouteLearning(budget_weight=options.budget_weight, entropy_rise=tuple(options.rise))
    print(f"{phase}\nseed  soft  exported  entropy   cost   best  random")
    for seed in range(options.seeds):
        row = learn(phase, options.layers, options.rate, options.steps, seed)
        print(
            f"{seed:>4}  {row[0]:4.2f}  {row[1]:8.2f}  {row[2]:7.3f}",
            *(f" {x:5.2f}" for x in row[3:]),
            flush=True,
        )


if __name__ == "__main__":
    main()
