"""The keys and values that one layer keeps of earlier blocks (paper, Appendix A.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recavsr.cache_policy import AnchorRule, CacheAction
from recavsr.state import State


@dataclass(frozen=True)
class KVHistory(State):
    """Keys and values of the kept latents of one layer, ascending by position.

    Keys are stored after their norm and their rotation by absolute position (see
    `rope.rotation_table` for why a stream has no length limit).
    """

    keys: Tensor  # [B, G, N, T, D]
    values: Tensor  # [B, G, N, T, D]
    positions: tuple[int, ...]  # absolute latent indices, T of them


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
    Returns None where the action keeps nothing.
    """
    known = (history.positions if history else ()) + positions
    kept = action.select(known, rule)
    if not kept:
        return None
    from_old = len(history.positions) if history else 0
    index = [known.index(position) for position in kept]

    def pick(old: Tensor | None, new: Tensor) -> Tensor:
        parts = [latents_at(old, [i for i in index if i < from_old])] if old is not None else []
        parts.append(latents_at(new, [i - from_old for i in index if i >= from_old]))
        parts = [part for part in parts if part.shape[3]]
        # A copy, also of a single part: the history must not keep the whole block alive.
        return torch.cat(parts, dim=3) if len(parts) > 1 else parts[0].clone()

    return KVHistory(
        pick(history.keys if history else None, keys), pick(history.values if history else None, values), kept
    )


def latents_at(x: Tensor, index: Sequence[int]) -> Tensor:
    """Select latents of [B, G, N, T, D] by ascending index: a view where they are consecutive."""
    if not index:
        return x[..., :0, :]
    if index[-1] - index[0] + 1 == len(index):
        return x[..., index[0] : index[-1] + 1, :]
    return torch.cat([x[..., i : i + 1, :] for i in index], dim=3)
