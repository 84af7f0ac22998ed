"""The generator streams: steps equal the masked whole, at any position, for any batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from recavsr.attention import SpatialWindow
from recavsr.cache_policy import PAPER_SCHEDULE, AnchorRule, CacheAction, Schedule, visible_after_blocks
from recavsr.errors import InputError
from recavsr.geometry import BlockPlan, frames_of_latents
from recavsr.models.generator import (
    Generator,
    GeneratorConfig,
    GeneratorState,
    teacher_forced_recycled,
)
from recavsr.models.kv_history import KVHistory, extend, overwrite, plan_overwrite
from recavsr.models.presets import nano, recavsr_5b
from recavsr.models.visibility import schedule_visibility
from recavsr.rope import AxisSplit, angles
from tiny import CHANNELS, GENERATOR, STRIDE, one_thread, tiny_generator, tiny_prompt


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


ROWS, COLUMNS = 4, 5


def clip(latents: int, batch: int = 1, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Return noise and LR frames of a clip from the start of a stream."""
    random = torch.Generator().manual_seed(seed)
    noise = torch.randn(batch, CHANNELS, latents, ROWS, COLUMNS, generator=random)
    shape = (batch, 3, frames_of_latents(0, latents), STRIDE * ROWS, STRIDE * COLUMNS)
    return noise, torch.rand(shape, generator=random) * 2 - 1


@torch.no_grad()
def stream(
    model: Generator,
    noise: Tensor,
    lr_frames: Tensor,
    plan: BlockPlan,
    prompt: Tensor | None = None,
    in_place: bool = False,
) -> tuple[GeneratorState, Tensor]:
    """Generate a clip block by block."""
    condition = model.condition(tiny_prompt() if prompt is None else prompt)
    state, blocks, block = model.start(), [], 0
    while state.next_position < noise.shape[2]:
        first, count = state.next_position, plan.latents(block)
        frames = plan.first_frame(block)
        state, latents = model.step(
            state,
            condition,
            noise[:, :, first : first + count],
            lr_frames[:, :, frames : frames + plan.frames(block)],
            in_place,
        )
        blocks.append(latents)
        block += 1
    return state, torch.cat(blocks, dim=2)


@pytest.mark.parametrize(
    ("plan", "latents"),
    [
        (BlockPlan(), 16),
        (BlockPlan(1, 1), 13),
        (BlockPlan(2, 2), 14),
        (BlockPlan(1, 3), 13),
        (BlockPlan(5, 4), 17),
    ],
)
@pytest.mark.parametrize("window", [SpatialWindow(2, 3), SpatialWindow(4, 4, stride=2), SpatialWindow(9, 9)])
def test_steps_equal_the_masked_whole(plan: BlockPlan, latents: int, window: SpatialWindow) -> None:
    """Streaming and Stage 1's parallel form are one function."""
    model = tiny_generator(replace(GENERATOR, window=window))
    noise, lr_frames = clip(latents)
    _, streamed = stream(model, noise, lr_frames, plan)
    recycled = teacher_forced_recycled(streamed, plan)
    with torch.no_grad():
        velocity = model(model.condition(tiny_prompt()), noise, lr_frames, recycled, plan)
    torch.testing.assert_close(noise - velocity, streamed, atol=1e-5, rtol=0)


def test_history_matters() -> None:
    """The test above could fail: without history the same blocks come out differently."""
    plan, (noise, lr_frames) = BlockPlan(), clip(12)
    _, streamed = stream(tiny_generator(), noise, lr_frames, plan)
    forgetful = tiny_generator(replace(GENERATOR, schedule=Schedule.uniform(4, CacheAction())))
    _, other = stream(forgetful, noise, lr_frames, plan)
    assert torch.equal(streamed[:, :, :6], other[:, :, :6])
    assert (streamed[:, :, 6:] - other[:, :, 6:]).abs().max() > 1e-3


def test_history_holds_what_the_schedule_says() -> None:
    model, plan = tiny_generator(), BlockPlan()
    noise, lr_frames = clip(16)
    state, _ = stream(model, noise, lr_frames, plan)
    blocks = [tuple(range(6)), *((n, n + 1) for n in range(6, 18, 2))]
    for action, history in zip(GENERATOR.schedule.actions, state.layers):
        wanted = visible_after_blocks(action, AnchorRule(), blocks)[6]
        assert (history.positions if history else ()) == wanted
        if history:
            assert history.keys.shape == history.values.shape == (1, 2, ROWS * COLUMNS, len(wanted), 12)
    assert state.layers[0] is None
    assert state.next_position == 16


@pytest.mark.parametrize("plan", [BlockPlan(), BlockPlan(1, 1), BlockPlan(2, 5)], ids=str)
@pytest.mark.parametrize("name", ["none", "recent_1", "recent_2", "anchor", "recent_4_anchor"])
def test_a_history_written_in_place_holds_the_same(name: str, plan: BlockPlan) -> None:
    """Whatever the slots' order; and its memory stays where it was first allocated."""
    action, rule, random = CacheAction.parse(name), AnchorRule(), torch.Generator().manual_seed(0)
    copied: KVHistory | None = None
    written: KVHistory | None = None
    places = set()
    for positions in plan.cut(31):
        keys, values = torch.randn(2, 1, 2, 3, len(positions), 4, generator=random)
        copied = extend(copied, keys, values, positions, action, rule)
        written = overwrite(written, keys, values, positions, action, rule)
        if copied is None or written is None:
            assert copied is written
            continue
        order = sorted(range(len(written.positions)), key=written.positions.__getitem__)
        assert tuple(written.positions[i] for i in order) == copied.positions
        for ours, wanted in zip(written.seen(), copied.seen()):
            assert torch.equal(ours[..., order, :], wanted)
        assert written.keys.shape[3] == action.capacity(rule)
        places.add((written.keys.data_ptr(), written.values.data_ptr()))
    assert len(places) <= 1


def test_latents_that_go_into_neighbouring_slots_move_together() -> None:
    """Each move is one kernel on a card: under the paper's route fewer than one a layer and block."""
    rule, moves = PAPER_SCHEDULE.anchor_rule, []
    for action in PAPER_SCHEDULE.actions:
        held: tuple[int, ...] = ()
        for positions in BlockPlan().cut(46):
            plan = plan_overwrite(held, positions, action, rule)
            held, found = plan.positions, plan.moves
            moves += found if positions[0] >= 10 else ()
    assert len(moves) / 18 < len(PAPER_SCHEDULE.actions)
    assert sum(move.latents for move in moves) > 1.4 * len(moves)


def test_steps_in_place_give_the_same_latents() -> None:
    model, plan = tiny_generator(), BlockPlan()
    noise, lr_frames = clip(20)
    _, wanted = stream(model, noise, lr_frames, plan)
    _, ours = stream(model, noise, lr_frames, plan, in_place=True)
    torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=0)  # another order of keys


def test_memory_is_bounded() -> None:
    model, plan = tiny_generator(), BlockPlan()
    sizes = [stream(model, *clip(latents), plan)[0].nbytes for latents in (20, 26)]
    assert sizes[0] == sizes[1]


def shifted(state: GeneratorState, by: int) -> GeneratorState:
    """Return a state as if the stream had started `by` latents later: keys turn with their positions.

    The temporal rotation of stored keys is undone and done again through the complex exponential.
    """
    channels = AxisSplit.wan(12).time
    turn = torch.polar(
        torch.ones(channels // 2, dtype=torch.float64), angles(torch.tensor([by]), channels)[0]
    )

    def move(keys: Tensor) -> Tensor:
        pairs = torch.view_as_complex(keys[..., :channels].double().unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(pairs * turn).flatten(-2).float()
        return torch.cat([turned, keys[..., channels:]], dim=-1)

    layers = tuple(
        h and replace(h, keys=move(h.keys), positions=tuple(p + by for p in h.positions))
        for h in state.layers
    )
    return replace(state, layers=layers, next_position=state.next_position + by)


@pytest.mark.parametrize("by", [6, 6 * 1000, 6 * 166_666])
def test_a_stream_has_no_length_limit(by: int) -> None:
    """Position 10^6 gives what position 0 gives; shifts by 6 keep the anchors where they are."""
    model, plan = tiny_generator(), BlockPlan()
    noise, lr_frames = clip(20)
    near, _ = stream(model, noise[:, :, :12], lr_frames, plan)
    far = shifted(near, by)
    condition = model.condition(tiny_prompt())
    for first in range(12, 20, 2):
        frames = lr_frames[:, :, 4 * first - 3 : 4 * first + 5]
        with torch.no_grad():
            near, here = model.step(near, condition, noise[:, :, first : first + 2], frames)
            far, there = model.step(far, condition, noise[:, :, first : first + 2], frames)
        torch.testing.assert_close(there, here, atol=2e-5, rtol=0)
        for a, b in zip(near.layers, far.layers):
            assert (a is None) == (b is None)
            if a is not None:
                assert tuple(p + by for p in a.positions) == b.positions


def test_a_batch_equals_its_clips() -> None:
    model, plan = tiny_generator(), BlockPlan()
    noise, lr_frames = clip(10, batch=2)
    prompts = torch.cat([tiny_prompt(), tiny_prompt() + 1])
    _, both = stream(model, noise, lr_frames, plan, prompts)
    for i in range(2):
        one = slice(i, i + 1)
        _, alone = stream(model, noise[one], lr_frames[one], plan, prompts[one])
        torch.testing.assert_close(both[one], alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("patch", [1, 2])
def test_what_enters_the_first_layer(patch: int) -> None:
    """Eq. 6: P(noise) + C_LR(x) + S(P(r)), with P as the convolution that it is in the paper."""
    model = tiny_generator(replace(GENERATOR, patch=patch))
    noise = torch.randn(2, CHANNELS, 3, 4, 6)
    recycled = torch.randn_like(noise)
    lr_frames = torch.rand(2, 3, 9, 4 * STRIDE, 6 * STRIDE) * 2 - 1
    entered: list[Tensor] = []
    model.blocks[0].register_forward_pre_hook(lambda layer, given: entered.append(given[0]))

    def embedded(latents: Tensor) -> Tensor:
        tokens = model.patch_embedding(latents)  # [B, C, T, h, w]
        return tokens.flatten(3).permute(0, 3, 2, 1)

    with torch.no_grad():
        model(model.condition(tiny_prompt()), noise, lr_frames, recycled, BlockPlan(2, 1))
        _, lr_tokens = model.lr_projector.step(model.start().lr_projector, lr_frames)
        wanted = embedded(noise) + lr_tokens + model.recycle_projection(embedded(recycled))
    torch.testing.assert_close(entered[0], wanted, atol=1e-5, rtol=0)


def test_without_recycling_zeros_are_fed_by_step_and_by_forward() -> None:
    """The oracle is the whole generator whose recycled latents are taken away before every step."""
    plan, (noise, lr_frames) = BlockPlan(2, 2), clip(6)
    whole, without = tiny_generator(), tiny_generator(replace(GENERATOR, recycling=False))
    condition, state, wanted = whole.condition(tiny_prompt()), whole.start(), []
    with torch.no_grad():
        for index, block in enumerate(plan.cut(6)):
            first = plan.first_frame(index)
            state, latents = whole.step(
                replace(state, recycled=None),
                condition,
                noise[:, :, list(block)],
                lr_frames[:, :, first : first + plan.frames(index)],
            )
            wanted.append(latents)
        _, streamed = stream(without, noise, lr_frames, plan)
        assert torch.equal(streamed, torch.cat(wanted, dim=2))
        assert not torch.equal(streamed, stream(whole, noise, lr_frames, plan)[1])
        at_once = [without(condition, noise, lr_frames, factor * noise, plan) for factor in (0, 1)]
    assert torch.equal(*at_once)
    torch.testing.assert_close(noise - at_once[0], streamed, atol=1e-5, rtol=0)


def test_later_frames_never_change_earlier_latents() -> None:
    model, plan = tiny_generator(), BlockPlan()
    noise, lr_frames = clip(10)
    _, before = stream(model, noise, lr_frames, plan)
    other, other_noise = lr_frames.clone(), noise.clone()
    other[:, :, 29:] *= -1
    other_noise[:, :, 8:] *= -1
    _, after = stream(model, other_noise, other, plan)
    assert torch.equal(before[:, :, :8], after[:, :, :8])
    assert not torch.equal(before[:, :, 8:], after[:, :, 8:])


def test_the_state_given_is_not_written_to() -> None:
    model = tiny_generator()
    noise, lr_frames = clip(8)
    condition = model.condition(tiny_prompt())
    with torch.no_grad():
        state, _ = model.step(model.start(), condition, noise[:, :, :6], lr_frames[:, :, :21])
        copy = state.clone()
        _, first = model.step(state, condition, noise[:, :, 6:], lr_frames[:, :, 21:])
        assert all(torch.equal(a, b) for a, b in zip(state.tensors(), copy.tensors(), strict=True))
        _, again = model.step(state, condition, noise[:, :, 6:], lr_frames[:, :, 21:])
    assert torch.equal(first, again)


@pytest.mark.parametrize(("start", "frames"), [(0, 6), (0, 8), (0, 1), (2, 7), (2, 5), (2, 9), (2, 0)])
def test_frames_that_do_not_fit_the_latents_are_refused(start: int, frames: int) -> None:
    """The frames of 2 latents are 5 at the start and 8 later; 6 would shift all that follows."""
    model, condition = tiny_generator(), tiny_generator().condition(tiny_prompt())
    noise, lr_frames = clip(4)
    state = model.start()
    with torch.no_grad():
        if start:
            state, _ = model.step(state, condition, noise[:, :, :2], lr_frames[:, :, :5])
        with pytest.raises(ValueError, match=f"{frames} LR frames do not fit 2 latents"):
            model.step(state, condition, noise[:, :, :2], lr_frames[:, :, :frames])


def test_recycled_latents_of_teacher_forcing() -> None:
    latents = torch.arange(1.0, 11).view(1, 1, 10, 1, 1)
    recycled = teacher_forced_recycled(latents, BlockPlan())
    assert recycled.flatten().tolist() == [0] * 6 + [5, 6, 7, 8]  # the last two of the block before
    recycled = teacher_forced_recycled(latents, BlockPlan(1, 3))
    assert recycled.flatten().tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 6, 7]


def test_visibility_of_the_schedule() -> None:
    schedule = Schedule((CacheAction(0), CacheAction(2), CacheAction(0, anchors=True)))
    none, recent, anchor = schedule_visibility(schedule, BlockPlan().cut(11))
    blocks = [(0, 1, 2, 3, 4, 5), (6, 7), (8, 9), (10,)]
    for visibility in (none, recent, anchor):
        assert [view.block for view in visibility] == blocks
        assert all(view.log_prior is None for view in visibility)
    assert [view.history for view in none] == [(), (), (), ()]
    assert [view.history for view in recent] == [(), (4, 5), (6, 7), (8, 9)]
    assert [view.history for view in anchor] == [(), (5,), (5,), (5,)]


def test_another_schedule_on_the_same_weights() -> None:
    model, plan = tiny_generator(), BlockPlan()
    schedule = Schedule.uniform(4, CacheAction(1))
    other, wanted = model.with_schedule(schedule), tiny_generator(replace(GENERATOR, schedule=schedule))
    noise, lr_frames = clip(10)
    assert torch.equal(stream(other, noise, lr_frames, plan)[1], stream(wanted, noise, lr_frames, plan)[1])
    assert model.config.schedule == GENERATOR.schedule
    assert all(a is b for a, b in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(InputError, match="30 actions for 4 layers"):
        model.with_schedule(PAPER_SCHEDULE)


def test_every_clip_of_a_batch_has_its_own_timestep() -> None:
    model, plan = tiny_generator(), BlockPlan()
    noise, lr_frames = clip(8, batch=3)
    times = torch.tensor([1000.0, 431.5, 7.25])
    recycled = teacher_forced_recycled(noise.flip(0), plan)
    with torch.no_grad():
        condition = model.condition(tiny_prompt(), times)
        together = model(condition, noise, lr_frames, recycled, plan)
        for i in range(3):
            one = slice(i, i + 1)
            condition = model.condition(tiny_prompt(), float(times[i]))
            alone = model(condition, noise[one], lr_frames[one], recycled[one], plan)
            torch.testing.assert_close(together[one], alone, atol=1e-5, rtol=0)
            if i:
                first = model(model.condition(tiny_prompt()), noise[one], lr_frames[one], recycled[one], plan)
                assert (first - alone).abs().max() > 1e-2


def test_a_schedule_of_another_length_is_refused() -> None:
    with pytest.raises(InputError, match="30 actions for 4 layers"):
        replace(GENERATOR, schedule=PAPER_SCHEDULE)


@pytest.mark.parametrize(
    "config",
    [recavsr_5b(), nano(), replace(nano(), recycling=False), replace(GENERATOR, latent_stride=16)],
    ids=str,
)
def test_released_config_round_trip(config: GeneratorConfig) -> None:
    assert GeneratorConfig.from_released(config.to_released()) == config


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"colour": 1}, "colour"),
        ({"qk_norm": "layer_norm"}, "qk_norm"),
        ({"patch_size": [1, 2, 3]}, "square"),
        ({"out_channels": 3}, "out_channels"),
        ({"spatial_window": {"height": 2, "width": 2, "depth": 1}}, "depth"),
        ({"spatial_window": {"height": 0, "width": 2}}, "at least one cell"),
        ({"num_layers": 5}, "4 actions for 5 layers"),
        ({"native_scale": "four"}, "malformed field .* 'four'"),
        ({"native_scale": float("inf")}, "native_scale must be a number from 0 on, not inf"),
        ({"native_scale": -3}, "native_scale must be"),
    ],
)
def test_a_wrong_config_is_refused_by_name(change: dict, named: str) -> None:
    with pytest.raises(InputError, match=named):
        GeneratorConfig.from_released(GENERATOR.to_released() | change)


def test_a_missing_field_is_named() -> None:
    config = GENERATOR.to_released()
    del config["ffn_dim"]
    with pytest.raises(InputError, match="ffn_dim"):
        GeneratorConfig.from_released(config)
