"""Actions, the anchor rule, schedules and their cost, against the paper's figures."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recavsr.cache_policy import (
    NO_HISTORY,
    PAPER_ACTIONS,
    PAPER_SCHEDULE,
    AnchorRule,
    CacheAction,
    Schedule,
    account,
    visible_after_blocks,
)
from recavsr.errors import InputError
from recavsr.geometry import BlockPlan

MIB = 2**20
actions = st.builds(CacheAction, st.integers(0, 9), st.booleans())
rules = st.builds(AnchorRule, st.integers(0, 3), st.integers(0, 7), st.integers(1, 7))


def blocks_of(count: int, plan: BlockPlan = BlockPlan()) -> list[tuple[int, ...]]:  # noqa: B008
    return [tuple(range(plan.first_latent(i), plan.first_latent(i) + plan.latents(i))) for i in range(count)]


def held_after(action: CacheAction, blocks: int) -> tuple[int, ...]:
    """Return what a layer holds after some blocks of the paper's plan: what the next one sees."""
    return visible_after_blocks(action, AnchorRule(), blocks_of(blocks + 1))[blocks]


def test_the_papers_account() -> None:
    """Appendix C.3 at 704 x 1280: 22 x 40 tokens, width 3072, bfloat16."""
    cost = account(PAPER_SCHEDULE, tokens_per_latent=22 * 40, width=3072)
    assert (cost.layers, cost.slots, cost.uniform_slots) == (30, 66, 120)
    assert cost.mean_slots == pytest.approx(2.2)
    assert cost.saving == pytest.approx(0.45)
    assert cost.bytes_per_slot / MIB == 10.3125
    assert cost.bytes / MIB == 680.625
    assert cost.uniform_bytes / MIB == 1237.5


def test_the_papers_route_counts() -> None:
    symbols = [action.symbol for action in PAPER_SCHEDULE.actions]
    counts = {symbol: symbols.count(symbol) for symbol in set(symbols)}
    assert counts == {"∅": 10, "W1": 2, "W2": 7, "W4": 3, "A": 1, "W2+A": 3, "W4+A": 4}


@pytest.mark.parametrize(
    ("name", "blocks", "held"),
    [
        ("recent_4", 1, (2, 3, 4, 5)),
        ("recent_4_anchor", 1, (2, 3, 4, 5)),  # 5 is recent and an anchor: held once
        ("recent_4_anchor", 4, (5, 8, 9, 10, 11)),
        ("recent_4_anchor", 7, (11, 14, 15, 16, 17)),  # 5 went when 17 came
        ("recent_4_anchor", 10, (17, 20, 21, 22, 23)),
        ("anchor", 1, (5,)),
        ("anchor", 4, (5, 11)),
        ("none", 4, ()),
        ("recent_1", 2, (7,)),
    ],
)
def test_what_is_held(name: str, blocks: int, held: tuple[int, ...]) -> None:
    assert held_after(CacheAction.parse(name), blocks) == held


@pytest.mark.parametrize("action", PAPER_ACTIONS, ids=lambda action: action.name)
def test_actions_never_hold_more_than_their_slots(action: CacheAction) -> None:
    sizes = [len(held_after(action, n)) for n in range(12)]
    assert max(sizes) == action.capacity(AnchorRule())


def test_the_first_block_sees_no_history() -> None:
    assert held_after(CacheAction(4, anchors=True), 0) == ()


@given(actions, rules, st.lists(st.integers(0, 60)))
def test_select_by_its_definition(action: CacheAction, rule: AnchorRule, positions: list[int]) -> None:
    known = sorted(set(positions))
    eligible = [p for p in known if p >= rule.first and (p - rule.first) % rule.stride == 0]
    wanted = {p for p in known if sum(q > p for q in known) < action.recent}
    if action.anchors:
        wanted |= {p for p in eligible if sum(q > p for q in eligible) < rule.capacity}
    assert action.select(positions, rule) == tuple(sorted(wanted))


@given(actions, rules, st.integers(1, 6), st.integers(1, 4), st.integers(1, 20))
def test_block_by_block_equals_selecting_from_everything(
    action: CacheAction, rule: AnchorRule, first: int, rest: int, count: int
) -> None:
    """Nothing that is wanted later is ever dropped early, so a streaming history loses nothing."""
    blocks = blocks_of(count, BlockPlan(first, rest))
    visible = visible_after_blocks(action, rule, blocks)
    for index, held in enumerate(visible):
        past = [p for block in blocks[:index] for p in block]
        assert held == action.select(past, rule)


@given(actions)
def test_names_round_trip(action: CacheAction) -> None:
    assert CacheAction.parse(action.name) == action


@pytest.mark.parametrize(
    "name",
    [
        "",
        "recent",
        "recent_",
        "recent_0",
        "recent_02",
        "recent_-1",
        "recent_2_",
        "recent_2_anchors",
        "recent_2_anchor_anchor",
        "anchor_recent_2",
        "_anchor",
        "None",
        "recent_²",
        "recent_two",
        "recent_0_anchor",
    ],
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unknown cache action"):
        CacheAction.parse(name)


def test_names_and_symbols() -> None:
    assert [a.name for a in PAPER_ACTIONS] == [
        "none",
        "recent_1",
        "recent_2",
        "recent_4",
        "anchor",
        "recent_2_anchor",
        "recent_4_anchor",
    ]
    assert [a.symbol for a in PAPER_ACTIONS] == ["∅", "W1", "W2", "W4", "A", "W2+A", "W4+A"]
    assert PAPER_ACTIONS[0] == NO_HISTORY
    assert [a.capacity(AnchorRule()) for a in PAPER_ACTIONS] == [0, 1, 2, 4, 2, 4, 6]


def test_a_negative_window_is_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        CacheAction(-1)


@given(st.lists(actions, min_size=1, max_size=6), rules)
def test_schedules_round_trip_through_json(chosen: list[CacheAction], rule: AnchorRule) -> None:
    schedule = Schedule(tuple(chosen), rule)
    assert Schedule.from_json(schedule.to_json()) == schedule


def test_uniform_schedule() -> None:
    schedule = Schedule.uniform(30, CacheAction(4))
    assert (schedule.slots, schedule.mean_slots) == (120, 4.0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: c.pop("anchor"), "anchor"),
        (lambda c: c["anchor"].pop("stride_latents"), "stride_latents"),
        (lambda c: c["anchor"].update(colour=1), "colour"),
        (lambda c: c.update(colour=1), "colour"),
        (lambda c: c["layer_actions"].append("recent_x"), "recent_x"),
        (lambda c: c.update(layer_actions=3), "iterable"),
        (lambda c: c["anchor"].update(capacity_latents="two"), "two"),
    ],
)
def test_a_wrong_schedule_is_refused_by_name(change, named: str) -> None:
    config = json.loads(PAPER_SCHEDULE.to_json())
    change(config)
    with pytest.raises(InputError, match=named):
        Schedule.from_config(config)


def test_text_that_is_not_json_is_refused() -> None:
    with pytest.raises(InputError, match="not JSON"):
        Schedule.from_json("{")
