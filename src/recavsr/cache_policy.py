"""What each layer remembers: actions, the anchor rule, schedules and their cost. No torch here.

Paper, Sec. 3.1 and Appendix A.2, B.1, C.3: the candidate actions are no history, a recent window
`W_r`, anchors `A`, and both. Positions are absolute latent indices of a stream.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from recavsr.errors import InputError


@dataclass(frozen=True)
class AnchorRule:
    """Which positions are anchors: `first + stride * m`, of which the latest `capacity` are kept.

    The paper's rule is 5 + 6m with capacity 2 (Appendix B.1).
    """

    capacity: int = 2
    first: int = 5
    stride: int = 6

    def is_anchor(self, position: int) -> bool:
        """Return whether a position is eligible as an anchor."""
        return position >= self.first and (position - self.first) % self.stride == 0


@dataclass(frozen=True)
class CacheAction:
    """One layer's choice: keep the latest `recent` latents, and the anchors or not."""

    recent: int = 0
    anchors: bool = False

    def __post_init__(self) -> None:
        if self.recent < 0:
            raise ValueError(f"a recent window can not be negative, got {self.recent}")

    @property
    def name(self) -> str:
        """Return the name used in schedule files: none, recent_2, anchor, recent_2_anchor."""
        parts = ([f"recent_{self.recent}"] if self.recent else []) + (["anchor"] if self.anchors else [])
        return "_".join(parts) or "none"

    @property
    def symbol(self) -> str:
        """Return the paper's notation: ∅, W2, A, W2+A."""
        parts = ([f"W{self.recent}"] if self.recent else []) + (["A"] if self.anchors else [])
        return "+".join(parts) or "∅"

    @staticmethod
    def parse(name: str) -> CacheAction:
        """Read an action from its name (the inverse of `name`); raise ValueError for anything else."""
        head, separator, tail = name.partition("_anchor") if name.startswith("recent_") else ("", "", name)
        digits = head.removeprefix("recent_")
        recent = int(digits) if digits.isdecimal() else 0
        action = CacheAction(recent, anchors=bool(separator) or tail == "anchor")
        if action.name != name:
            raise ValueError(
                f"unknown cache action {name!r}; known forms: none, recent_N, anchor, recent_N_anchor"
            )
        return action

    def capacity(self, rule: AnchorRule) -> int:
        """Return the reserved slots c(a) in latent positions: 0, r, c_A or r + c_A (Eq. 3)."""
        return self.recent + (rule.capacity if self.anchors else 0)

    def select(self, positions: Iterable[int], rule: AnchorRule) -> tuple[int, ...]:
        """Return which of the known positions this action keeps, ascending, overlap counted once."""
        known = sorted(set(positions))
        kept = set(known[-self.recent :] if self.recent else [])
        if self.anchors and rule.capacity:
            kept.update([p for p in known if rule.is_anchor(p)][-rule.capacity :])
        return tuple(sorted(kept))


NO_HISTORY = CacheAction()

PAPER_ACTIONS: tuple[CacheAction, ...] = (
    CacheAction(0),
    CacheAction(1),
    CacheAction(2),
    CacheAction(4),
    CacheAction(0, anchors=True),
    CacheAction(2, anchors=True),
    CacheAction(4, anchors=True),
)
"""The router's seven candidates (Appendix B.1)."""


@dataclass(frozen=True)
class Schedule:
    """The static route: one action a layer, and the anchor rule they share."""

    actions: tuple[CacheAction, ...]
    anchor_rule: AnchorRule = AnchorRule()

    @property
    def slots(self) -> int:
        """Return the reserved layer-latent slots of the whole network."""
        return sum(action.capacity(self.anchor_rule) for action in self.actions)

    @property
    def mean_slots(self) -> float:
        """Return the reserved slots a layer."""
        return self.slots / len(self.actions)

    @staticmethod
    def uniform(layers: int, action: CacheAction, rule: AnchorRule = AnchorRule()) -> Schedule:
        """Return a schedule with the same action in every layer."""
        return Schedule((action,) * layers, rule)

    def to_config(self) -> dict[str, Any]:
        """Return the `static_kv_router` entry of a released model_config.json."""
        return {
            "anchor": {
                "capacity_latents": self.anchor_rule.capacity,
                "initial_index": self.anchor_rule.first,
                "stride_latents": self.anchor_rule.stride,
            },
            "layer_actions": [action.name for action in self.actions],
        }

    @staticmethod
    def from_config(config: dict[str, Any]) -> Schedule:
        """Read a `static_kv_router` entry; raise InputError that names what is wrong."""
        try:
            unknown = set(config) - {"anchor", "layer_actions"}
            anchor = dict(config["anchor"])
            rule = AnchorRule(
                capacity=int(anchor.pop("capacity_latents")),
                first=int(anchor.pop("initial_index")),
                stride=int(anchor.pop("stride_latents")),
            )
            unknown |= set(anchor)
            if unknown:
                raise ValueError(f"unknown keys {sorted(unknown)}")
            return Schedule(tuple(CacheAction.parse(name) for name in config["layer_actions"]), rule)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"the cache schedule can not be read: {error}") from error

    def to_json(self) -> str:
        """Return the schedule as JSON text (the same keys as in model_config.json)."""
        return json.dumps(self.to_config(), indent=1)

    @staticmethod
    def from_json(text: str) -> Schedule:
        """Read what `to_json` wrote."""
        try:
            return Schedule.from_config(json.loads(text))
        except json.JSONDecodeError as error:
            raise InputError(f"the cache schedule is not JSON: {error}") from error


def _paper_schedule() -> Schedule:
    layers = {
        "none": (1, 2, 4, 6, 9, 22, 25, 27, 29, 30),
        "recent_1": (3, 28),
        "recent_2": (5, 7, 13, 17, 21, 24, 26),
        "recent_4": (8, 11, 20),
        "anchor": (15,),
        "recent_2_anchor": (10, 19, 23),
        "recent_4_anchor": (12, 14, 16, 18),
    }
    by_layer = {layer: CacheAction.parse(name) for name, group in layers.items() for layer in group}
    return Schedule(tuple(by_layer[layer] for layer in range(1, 31)))


PAPER_SCHEDULE = _paper_schedule()
"""The deployed route of the paper's Table D.2: 66 slots over 30 layers."""


def route_table(schedule: Schedule) -> str:
    """Return a schedule as the paper's table of the instantiated route (Table D.2): a row an action.

    Layers are counted from 1; rows go from no history over recent windows to anchors and both.
    """
    layers: dict[CacheAction, list[int]] = {}
    for layer, action in enumerate(schedule.actions, start=1):
        layers.setdefault(action, []).append(layer)
    order = sorted(layers, key=lambda action: (action.anchors, action.recent))
    rows = [("action", "layers", "count", "slots a layer")]
    for action in order:
        names = ", ".join(map(str, layers[action]))
        slots = action.capacity(schedule.anchor_rule)
        rows.append((action.symbol, names, str(len(layers[action])), str(slots)))
    first, second, third, fourth = (max(map(len, column)) for column in zip(*rows))
    lines = [f"{a:<{first}}  {b:<{second}}  {c:>{third}}  {d:>{fourth}}" for a, b, c, d in rows]
    return "\n".join(lines)


@dataclass(frozen=True)
class HistoryAccount:
    """What a schedule reserves at one size (Appendix C.3)."""

    layers: int
    tokens_per_latent: int
    slots: int
    mean_slots: float
    bytes_per_slot: int
    uniform_slots: int
    """Slots of a uniform W4 policy, the paper's yardstick."""

    @property
    def bytes(self) -> int:
        """Return the bytes of all reserved K/V slots."""
        return self.slots * self.bytes_per_slot

    @property
    def uniform_bytes(self) -> int:
        """Return the bytes that a uniform W4 policy would reserve."""
        return self.uniform_slots * self.bytes_per_slot

    @property
    def saving(self) -> float:
        """Return the share of slots saved against uniform W4."""
        return 1 - self.slots / self.uniform_slots


def account(
    schedule: Schedule, tokens_per_latent: int, width: int, bytes_per_value: int = 2
) -> HistoryAccount:
    """Count the slots and bytes of a schedule: keys and values of `width` channels a token."""
    layers = len(schedule.actions)
    return HistoryAccount(
        layers=layers,
        tokens_per_latent=tokens_per_latent,
        slots=schedule.slots,
        mean_slots=schedule.mean_slots,
        bytes_per_slot=2 * tokens_per_latent * width * bytes_per_value,
        uniform_slots=4 * layers,
    )


def visible_after_blocks(
    action: CacheAction, rule: AnchorRule, blocks: Sequence[Sequence[int]]
) -> list[tuple[int, ...]]:
    """Return what a layer's history holds when each block starts, for positions block by block.

    This is the reference that the streaming history and the training mask must both equal.
    """
    visible: list[tuple[int, ...]] = []
    held: tuple[int, ...] = ()
    for positions in blocks:
        visible.append(held)
        held = action.select((*held, *positions), rule)
    return visible
