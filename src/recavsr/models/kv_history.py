"""The keys and values that one layer keeps of earlier blocks (paper, Appendix A.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from recavsr.cache_policy import AnchorRule, CacheAction
from recavsr.layers import copy_both
from recavsr.state import State


@dataclass(frozen=True)
class KVHistory(State):
    """Keys and values of the kept latents of one layer, in any order: it has no effect on attention.

    Keys are stored after their norm and their rotation by absolute position (see
    `rope.rotation_table` for why a stream has no length limit).
    """

    keys: Tensor  # [B, G, N, slots, D]; what lies behind the last position is unused
    values: Tensor  # [B, G, N, slots, D]
    positions: tuple[int, ...]  # absolute latent indices of the first slots

    def seen(self) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the kept latents [B, G, N, T, D], as views."""
        count = len(self.positions)
        return self.keys[..., :count, :], self.values[..., :count, :]


def extend(
    history: KVHistory | None,
    keys: Tensor,
    values: Tensor,
    positions: tuple[int, ...],
    action: CacheAction,
    rule: AnchorRule,
) -> KVHistory | None:
    """Return the history after a block: what `action` keeps of the old and the new latents.

    `keys` and `values` [B, G, N, T, D] come from the block's own single pass, at `positions`.
    Returns None where the action keeps nothing. The history given stays as it is.
    """
    known = (history.positions if history else ()) + positions
    kept = action.select(known, rule)
    if not kept:
        return None
    from_old = len(history.positions) if history else 0
    index = [known.index(position) for position in kept]

    old_keys, old_values = history.seen() if history else (None, None)

    def pick(old: Tensor | None, new: Tensor) -> Tensor:
        parts = [latents_at(old, [i for i in index if i < from_old])] if old is not None else []
        parts.append(latents_at(new, [i - from_old for i in index if i >= from_old]))
        parts = [part for part in parts if part.shape[3]]
        # A copy, also of a single part: the history must not keep the whole block alive.
        return torch.cat(parts, dim=3) if len(parts) > 1 else parts[0].clone()

    return KVHistory(pick(old_keys, keys), pick(old_values, values), kept)


class Move(NamedTuple):
    """Copy latents of the new block, or of the history itself, into slots from `target` on."""

    target: int
    source: int  # the first of them
    latents: int
    new: bool


@dataclass(frozen=True)
class HistoryPlan:
    """What a block does to a history that is written over in place: plain numbers, before any tensor."""

    held: int  # latents that the block sees there
    moves: tuple[Move, ...]  # in this order
    positions: tuple[int, ...]  # of the slots afterwards


def plan_overwrite(
    held: tuple[int, ...], positions: tuple[int, ...], action: CacheAction, rule: AnchorRule
) -> HistoryPlan:
    """Plan what `overwrite` does where slots hold latents `held`, after a block at `positions`.

    Only new latents move, into slots that fell free. Blocks of one length come to a cycle of plans that
    differ in their positions only.
    """
    kept = action.select(held + positions, rule)
    slots, moves = list(held), list[Move]()
    free = [slot for slot, position in enumerate(held) if position not in kept]
    for index, position in enumerate(positions):
        if position in kept:
            slot = free.pop(0) if free else len(slots)
            slots[slot : slot + 1] = [position]
            run = moves[-1] if moves else None
            if run and (run.target + run.latents, run.source + run.latents) == (slot, index):
                moves[-1] = run._replace(latents=run.latents + 1)
            else:
                moves.append(Move(slot, index, 1, new=True))
    while free:  # fewer are kept than before: the last ones move up
        slot, last = free[0], len(slots) - 1
        if last in free:
            free.remove(last)
        else:
            free.remove(slot)
            slots[slot] = slots[last]
            moves.append(Move(slot, last, 1, new=False))
        slots.pop()
    return HistoryPlan(len(held), tuple(moves), tuple(slots))


def overwrite(
    history: KVHistory | None,
    keys: Tensor,
    values: Tensor,
    positions: tuple[int, ...],
    action: CacheAction,
    rule: AnchorRule,
) -> KVHistory | None:
    """Do what `extend` does in the memory of the history given, which is spent: nothing else may hold it.

    Only new latents are copied, into slots that fell free. A layer's slots are allocated once, with its
    first history, and stay where they are.
    """
    plan = plan_overwrite(history.positions if history else (), positions, action, rule)
    if history is None and not plan.positions:
        return None
    history = _with_room(history, keys, values, action.capacity(rule))
    held = history.keys, history.values
    for move in plan.moves:
        _copy(held, move.target, (keys, values) if move.new else held, move.source, move.latents)
    return KVHistory(*held, plan.positions)


def _with_room(history: KVHistory | None, keys: Tensor, values: Tensor, slots: int) -> KVHistory:
    """Return the history with so many slots: itself, where it has them (one that `extend` made may not)."""
    if history is not None and history.keys.shape[3] >= slots:
        return history
    shape = (*keys.shape[:3], slots, keys.shape[4])
    made = KVHistory(keys.new_zeros(shape), values.new_zeros(shape), history.positions if history else ())
    if history is not None:
        for place, found in zip(made.seen(), history.seen()):
            place.copy_(found)
    return made


def _copy(
    targets: tuple[Tensor, Tensor], slot: int, sources: tuple[Tensor, Tensor], first: int, count: int
) -> None:
    """Copy `count` latents of keys and values [B, G, N, T, D], from `first` on, into slots from `slot` on."""
    (keys, values), (found_keys, found_values) = targets, sources
    copy_both(
        (keys[..., slot : slot + count, :], values[..., slot : slot + count, :]),
        (found_keys[..., first : first + count, :], found_values[..., first : first + count, :]),
    )


def latents_at(x: Tensor, index: Sequence[int]) -> Tensor:
    """Select latents of [B, G, N, T, D] by ascending index: a view where they are consecutive."""
    if not index:
        return x[..., :0, :]
    if index[-1] - index[0] + 1 == len(index):
        return x[..., index[0] : index[-1] + 1, :]
    return torch.cat([x[..., i : i + 1, :] for i in index], dim=3)
