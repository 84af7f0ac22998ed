"""What the blocks of a clip see of earlier latents, where a whole clip is computed at once (Stage 1).

Streaming needs none of this: there, what a layer's history holds is what its next block sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from recavsr.cache_policy import CacheAction, Schedule, visible_after_blocks


@dataclass(frozen=True)
class BlockVisibility:
    """What the latents of one block see in one layer: one another, and a history."""

    block: tuple[int, ...]  # consecutive latents of the clip
    history: tuple[int, ...]  # earlier latents, ascending
    log_prior: Tensor | None = None  # [len(history)], added to the scores of these latents (Eq. 2)


Visibility = tuple[BlockVisibility, ...]
"""What every block of a clip sees in one layer."""


def schedule_visibility(schedule: Schedule, blocks: Sequence[tuple[int, ...]]) -> tuple[Visibility, ...]:
    """Return what each layer lets a clip's blocks see (`BlockPlan.cut`) under a fixed schedule."""

    def visibility(action: CacheAction) -> Visibility:
        histories = visible_after_blocks(action, schedule.anchor_rule, blocks)
        return tuple(BlockVisibility(block, history) for block, history in zip(blocks, histories))

    known = {action: visibility(action) for action in set(schedule.actions)}
    return tuple(known[action] for action in schedule.actions)
