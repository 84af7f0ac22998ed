"""A toy objective for tests of the loop, and processes that train it: killed, resumed, or several at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recavsr.training.adversarial import GradientBalance
from recavsr.training.distributed import World, join, mesh, shard, whole_state
from recavsr.training.loop import RunSettings, train
from recavsr.training.objective import Batch, BatchSettings, Losses, OptimizerSettings, Player
from tiny import CHANNELS, STRIDE, tiny_generator, tiny_prompt

BATCHES = BatchSettings(clips=4, frames=3, images=8, image_fraction=0.3)
FAST = OptimizerSettings(0.05, warm_up_steps=3, weight_decay=0.01, cool_down=0.5, average_decay=0.9)


class Source:
    """Batches that depend on seed and number alone, and only this rank's share of them."""

    def __init__(self, seed: int = 0, world: World = World(torch.device("cpu"))) -> None:  # noqa: B008
        self.seed, self.world, self.number = seed, world, 0

    def batch(self, settings: BatchSettings) -> Batch:
        draw = torch.Generator().manual_seed(1000 * self.seed + self.number)
        image = settings.images and torch.rand((), generator=draw).item() < settings.image_fraction
        count, frames = (settings.images, 1) if image else (settings.clips, settings.frames)
        hq = torch.rand(count, 3, frames, 4, 6, generator=draw) * 2 - 1
        self.number += 1
        share = self.world.share(count, "clips")
        own = hq[self.world.rank * share : (self.world.rank + 1) * share].to(self.world.device)
        return Batch(own, 0.8 * own + 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]

    def describe(self, number: int) -> str:
        return f"batch seed ({self.seed}, {number})"


class ToyGan:
    """Two players: a generator of pixels and a discriminator that it must please. With noise or without."""

    name = "toy"

    def __init__(
        self, noise: float = 0.1, first_step: int = 0, device: str = "cpu", **changes: object
    ) -> None:
        torch.manual_seed(3)
        self.generator = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 3))
        self.discriminator = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 1))
        self.model: nn.Module = nn.ModuleDict({"g": self.generator, "d": self.discriminator}).to(device)
        self.batches = BATCHES
        self.noise = noise
        self.progress: list[float] = []
        settings = OptimizerSettings(**(FAST.__dict__ | {"first_step": first_step} | changes))
        self.players: tuple[Player, ...] = (
            Player("d", tuple(self.discriminator.parameters()), FAST),
            Player("g", tuple(self.generator.parameters()), settings),
        )

    def advance(self, progress: float) -> None:
        self.progress.append(progress)

    def updates(self, batch: Batch) -> Iterator[tuple[str, Losses]]:
        hq, lr = (x.movedim(1, -1) for x in batch)
        made = self.generator(lr + self.noise * torch.randn_like(lr))
        real, fake = self.discriminator(hq), self.discriminator(made.detach())
        yield "d", {"loss": (real - 1).square().mean() + fake.square().mean()}
        pixel = (made - hq).square().mean()
        # The discriminator is not frozen here: the loop must keep this loss out of its gradients.
        yield "g", {"loss": pixel + 0.1 * (self.discriminator(made) - 1).square().mean(), "pixel": pixel}

    def sample(self, batch: Batch) -> Tensor:
        return self.generator(batch.lr.movedim(1, -1)).movedim(-1, 1)


class CappedGan(ToyGan):
    """The same with a cap on the discriminator's gradient, going by the step before."""

    def __init__(self) -> None:
        super().__init__(noise=0.0)
        self.balance = GradientBalance()

    def updates(self, batch: Batch) -> Iterator[tuple[str, Losses]]:
        hq, lr = (x.movedim(1, -1) for x in batch)
        judged, rebuilt = self.balance.split(self.generator(lr), cap=0.02)
        yield "d", {"loss": (self.discriminator(hq) - 1).square().mean()}
        pixel, share = (rebuilt - hq).square().mean(), self.balance.share()
        weights = (40 * hq.mean((1, 2, 3, 4), keepdim=True)).exp()  # clips differ, and so do processes' parts
        adversarial = (weights * (self.discriminator(judged) - 1).square()).mean()
        yield "g", {"loss": pixel + adversarial, "share": share}
        self.balance.agree()


class TinyRollout:
    """Self-rollout of the tiny generator, for sharding: it is entered by `condition` and `step`."""

    name = "rollout"

    def __init__(self, world: World, sharded: bool) -> None:
        from recavsr.geometry import BlockPlan
        from recavsr.models.dit_block import LayerCondition
        from recavsr.models.generator import Condition

        self.plan = BlockPlan(2, 2)
        self.generator = tiny_generator().requires_grad_(True)
        self.model: nn.Module = nn.ModuleDict({"generator": self.generator})
        self.prompt = nn.Parameter(tiny_prompt())  # stays whole beside the sharded parameters
        self.model.register_parameter("prompt", self.prompt)
        if sharded:
            shard(
                self.generator,
                list(self.generator.blocks),
                mesh(world),
                methods=("condition", "step"),
                outputs=(Condition, LayerCondition),
                precision=None,
            )
        self.batches = BatchSettings(clips=2, frames=13)
        parameters = (*self.generator.parameters(), self.prompt)
        self.players: tuple[Player, ...] = (Player("generator", parameters, FAST),)

    def advance(self, progress: float) -> None:
        pass

    def updates(self, batch: Batch) -> Iterator[tuple[str, Losses]]:
        from recavsr.training.rollout import roll_out

        frames = torch.nn.functional.interpolate(batch.lr, (13, 2 * STRIDE, 2 * STRIDE))
        noise = frames[:, :1, ::4, ::STRIDE, ::STRIDE].repeat(1, CHANNELS, 1, 1, 1)
        condition = self.generator.condition(self.prompt)
        latents = torch.cat(roll_out(self.generator, condition, noise, frames, self.plan), dim=2)
        yield "generator", {"loss": (latents - 0.5 * noise).square().mean()}


def main(kinds: str, out: Path, steps: int) -> None:
    """Train in this process, or as one of torchrun's; each kind writes its log and weights in a folder."""
    torch.set_num_threads(1)
    with join(torch.device("cpu")) as world:
        for kind in kinds.split(","):
            objective: Any = ToyGan(noise=0.1 if kind == "noisy" else 0.0)
            if kind == "capped":
                objective = CappedGan()
            if kind.startswith("rollout"):
                objective = TinyRollout(world, sharded=kind == "rollout_sharded" and world.size > 1)
            torch.manual_seed(world.rank)
            run, folder = RunSettings(steps=steps, log_every=1, save_every=3), out / kind
            train(objective, Source(world=world), run, folder, world, resume=True, say=lambda text: None)
            weights = {name: value.double().tolist() for name, value in whole_state(objective.model).items()}
            if world.leads:
                (folder / "weights.json").write_text(json.dumps(weights))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
