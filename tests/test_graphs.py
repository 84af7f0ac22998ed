"""Blocks replayed by graphs are those that run kernel by kernel, bit for bit, whatever the sessions do.

On a CPU a stand-in records: it keeps the function, which then runs with the numbers and addresses of the
moment of recording, as a graph does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recavsr.attention import SpatialWindow
from recavsr.geometry import BlockPlan
from recavsr.models.decoder import FlashDecoder
from recavsr.models.folded import fold
from recavsr.models.folded_decoder import pack
from recavsr.models.generator import Generator
from recavsr.stream.graphs import STREAMS, BlockGraphs
from recavsr.stream.session import Session
from recavsr.stream.step import ReCaVSR
from tiny import DECODER, GENERATOR, lively, one_thread, tiny_model

LR, OUT = (12, 18), (24, 40)


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


class Recorder:
    """Records on a CPU, and counts."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            work()

        return replay


def refuse(work: Callable[[], None]) -> Callable[[], None]:
    raise RuntimeError("operation not permitted when stream is capturing\nand more lines")


def models(blocks: BlockPlan = BlockPlan()) -> tuple[ReCaVSR, ReCaVSR, Recorder]:  # noqa: B008
    """Return a model with graphs, one without that writes its history in place too, and the recorder."""
    ours, plain, recorder = tiny_model(blocks), tiny_model(blocks), Recorder()
    ours.graphs = BlockGraphs(ours.generator, recorder)
    plain.graphs = BlockGraphs(plain.generator, refuse)
    plain.graphs._off = True
    return ours, plain, recorder


def frames(count: int, seed: int = 0, size: tuple[int, int] = LR) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *size, 3), np.uint8)


def session(model: Any, seed: int = 42, out: tuple[int, int] = OUT) -> Session:
    return Session(model, LR, out, seed=seed)


def run(of: Session, lr: np.ndarray, ending: bool = True) -> np.ndarray:
    return np.concatenate(of.push(lr) + (of.flush() if ending else []))


@pytest.mark.parametrize("blocks", [BlockPlan(), BlockPlan(1), BlockPlan(6, 3)], ids=str)
def test_a_long_stream(blocks: BlockPlan) -> None:
    ours, plain, recorder = models(blocks)
    lr = frames(270)
    assert np.array_equal(run(session(ours), lr), run(session(plain), lr))
    assert recorder.recorded <= 6
    assert recorder.replayed > 8


def test_a_short_clip_records_nothing_and_later_shots_use_the_same_place() -> None:
    ours, plain, recorder = models()
    assert np.array_equal(run(session(ours), frames(60)), run(session(plain), frames(60)))
    assert recorder.recorded == 0
    of_ours, of_plain = session(ours), session(plain)
    for shot, count in enumerate((180, 93, 5, 130)):
        lr = frames(count, seed=shot)
        assert np.array_equal(run(of_ours, lr), run(of_plain, lr))
    assert recorder.recorded <= 8  # one place: a cycle of six patterns, two on the way to it
    assert len(ours.graphs._places) == 1


def test_a_shot_begins_in_the_memory_of_the_one_before() -> None:
    """Its first block, the largest, makes no second set of histories beside those that lie there."""
    model, _, _ = models()
    of = session(model)
    run(of, frames(93))
    (place,) = model.graphs._places
    run_block, made = model.run_block, []

    def see(*given: Any, **options: Any) -> Any:
        made.append(run_block(*given, **options)[0])
        return made[-1], torch.zeros_like(given[2])

    model.run_block = see
    of.push(frames(21, seed=1))
    (after,) = made
    for part in ("generator.layers", "generator.lr_projector", "decoder"):
        here, there = (attrgetter(part)(state) for state in (place._state, after))
        pairs = list(zip(_tensors(here), _tensors(there), strict=True))
        assert pairs
        assert all(x.data_ptr() == y.data_ptr() for x, y in pairs)


def _tensors(part: Any) -> list[torch.Tensor]:
    states = part if isinstance(part, tuple) else (part,)
    return [tensor for state in states if state is not None for tensor in state.tensors()]


def test_forks_and_interleaved_sessions_and_sizes() -> None:
    ours, plain, recorder = models()

    def play(model: ReCaVSR) -> list[np.ndarray]:
        first, second, other = session(model), session(model, seed=7), session(model, out=(32, 48))
        made = [run(first, frames(150, 1), ending=False)]
        for step in range(20):
            made.append(run(first, frames(8, step), ending=False))
            made.append(run(second, frames(21 if step == 0 else 8, 50 + step), ending=False))
            made.append(run(other, frames(21 if step == 0 else 8, 90 + step), ending=False))
            if step == 9:
                fork = first.fork()
        made.append(run(fork, frames(170, 3)))
        made.append(run(first, frames(20, 4)))
        first.reset()
        made.append(run(first, frames(120, 5)))
        return made

    for mine, wanted in zip(play(ours), play(plain), strict=True):
        assert np.array_equal(mine, wanted)
    assert recorder.replayed > 40


def test_a_saved_session_goes_on(tmp_path: Path) -> None:
    ours, plain, recorder = models()
    whole = run(session(plain), frames(290))
    first = session(ours)
    made = [run(first, frames(290)[:125], ending=False)]
    first.save(tmp_path / "state")
    made.append(run(Session.load(tmp_path / "state", ours), frames(290)[125:]))
    assert np.array_equal(np.concatenate(made), whole)
    assert recorder.replayed > 3


def test_frames_given_out_are_not_written_again() -> None:
    ours, _, _ = models()
    state, kept = ours.start(*OUT), []
    for index in range(20):
        state, made = ours.step(state, torch.full((1, 3, ours.blocks.frames(index), *OUT), 0.01 * index))
        kept.append((made, made.clone()))
    assert all(torch.equal(*pair) for pair in kept)


def test_a_refused_recording_warns_once_and_runs_on() -> None:
    ours, plain, _ = models()
    ours.graphs = BlockGraphs(ours.generator, refuse)
    with pytest.warns(UserWarning, match="without CUDA graphs") as caught:
        made = run(session(ours), frames(200))
    assert len(caught) == 1
    assert np.array_equal(made, run(session(plain), frames(200)))


def test_no_more_places_than_allowed() -> None:
    ours, plain, _ = models()
    many = [session(ours, seed=seed) for seed in range(STREAMS + 2)]
    made = [run(one, frames(120), ending=False) for one in many]
    assert len(ours.graphs._places) == STREAMS
    for seed, mine in enumerate(made):
        assert np.array_equal(mine, run(session(plain, seed=seed), frames(120), ending=False))


# ------------------------------------------------------------------------------------------------- on a card


def card_model(float8: bool = False) -> ReCaVSR:
    """A small model whose shapes go through all kernels."""
    from recavsr.fp8 import FP8Linear
    from recavsr.models.folded import linear_in

    torch.manual_seed(0)
    config = replace(
        GENERATOR,
        heads=2,
        head_width=64,
        ffn_width=256,
        lr_hidden=(512, 512),
        window=SpatialWindow(6, 10),
        latent_channels=16,
    )
    decoder = replace(
        DECODER,
        width=256,
        heads=4,
        groups=1,
        window=SpatialWindow(6, 6, border="cut"),
        latent_channels=16,
        latents_mean=(0.0,) * 16,
        latents_std=(1.0,) * 16,
    )
    plain, decoding = Generator(config), FlashDecoder(decoder)
    lively(plain)
    lively(decoding)
    prompt = torch.randn(1, 3, config.text_width, device="cuda")
    weights = {name: tensor.detach() for name, tensor in plain.state_dict().items()}
    make = FP8Linear if float8 else linear_in(torch.bfloat16)
    generator = fold(config, weights.__getitem__, prompt, torch.bfloat16, make)
    decoding = decoding.cuda().eval().requires_grad_(False)
    for parameter in decoding.parameters():
        parameter.data = parameter.data.bfloat16()
    return ReCaVSR("card", generator, pack(decoding), prompt)


@pytest.fixture(scope="module", params=[False, True], ids=["bf16", "fp8"])
def card(request: pytest.FixtureRequest) -> tuple[ReCaVSR, ReCaVSR]:
    """A model with graphs, and the same one that runs kernel by kernel."""
    from copy import copy

    ours = card_model(request.param)
    plain = copy(ours)
    plain.graphs = None
    return ours, plain


SIZE = (128, 192)


@pytest.mark.gpu
def test_graphs_on_a_card(card: tuple[ReCaVSR, ReCaVSR]) -> None:
    """Some forty blocks, bit for bit; two sessions in turns, a fork, a new shot."""

    def play(model: ReCaVSR) -> list[np.ndarray]:
        small = (SIZE[0] // 4, SIZE[1] // 4)
        first, second = (Session(model, small, SIZE, seed=seed) for seed in (1, 2))
        made = [run(first, frames(21 + 8 * 22, 1, small), ending=False)]
        for step in range(16):
            for index, one in enumerate((first, second)):
                count = 8 if step or index == 0 else 21
                made.append(run(one, frames(count, 2 * step + index, small), ending=False))
            if step == 7:
                fork = second.fork()
        made.append(run(fork, frames(160, 3, small)))
        made.append(run(first, frames(20, 4, small)))
        first.reset()
        made.append(run(first, frames(150, 5, small)))
        made.append(run(second, frames(100, 7, small)))
        return made

    ours, plain = card
    for index, (mine, wanted) in enumerate(zip(play(ours), play(plain), strict=True)):
        assert np.array_equal(mine, wanted), index
    assert ours.graphs is not None
    assert not ours.graphs._off
    assert any(place.graphs for place in ours.graphs._places)


@pytest.mark.gpu
def test_a_saved_session_goes_on_on_a_card(card: tuple[ReCaVSR, ReCaVSR], tmp_path: Path) -> None:
    ours, plain = card
    small, lr = (SIZE[0] // 4, SIZE[1] // 4), frames(300, 8, (SIZE[0] // 4, SIZE[1] // 4))
    first = Session(ours, small, SIZE)
    made = [run(first, lr[:181], ending=False)]
    first.save(tmp_path / "state")
    del first
    made.append(run(Session.load(tmp_path / "state", ours), lr[181:]))
    assert np.array_equal(np.concatenate(made), run(Session(plain, small, SIZE), lr))


@pytest.mark.gpu
def test_graphs_are_made_again_when_all_are_gone(card: tuple[ReCaVSR, ReCaVSR]) -> None:
    """Another size takes the place of the last one, whose graphs leave their memory behind."""
    ours, plain = card
    assert ours.graphs is not None
    for height, width in ((128, 192), (160, 224), (128, 192)):
        small, lr = (height // 4, width // 4), frames(21 + 8 * 17, 9, (height // 4, width // 4))
        made = run(Session(ours, small, (height, width)), lr)
        assert np.array_equal(made, run(Session(plain, small, (height, width)), lr))
        assert not ours.graphs._off
        assert max(len(place.graphs) for place in ours.graphs._places if place.size == (height, width)) >= 6
    torch.randn(4, device="cuda")


@pytest.mark.gpu
def test_a_recording_that_fails_on_a_card_costs_a_warning(card: tuple[ReCaVSR, ReCaVSR]) -> None:
    from copy import copy

    ours, plain = copy(card[0]), card[1]
    assert ours.graphs is not None
    capture, small = ours.graphs._capture, (SIZE[0] // 4, SIZE[1] // 4)
    ours.graphs = BlockGraphs(
        ours.generator, lambda work: capture(lambda: (work(), torch.cuda.synchronize()))
    )  # type: ignore[arg-type]
    lr, before = frames(21 + 8 * 17, 11, small), torch.cuda.get_rng_state()
    with pytest.warns(UserWarning, match="without CUDA graphs.*captur") as caught:
        made = run(Session(ours, small, SIZE), lr)
    assert len(caught) == 1
    assert np.array_equal(made, run(Session(plain, small, SIZE), lr))
    assert torch.equal(before, torch.cuda.get_rng_state())
    torch.randn(4, device="cuda")
    ours.graphs = BlockGraphs(ours.generator, capture)  # the next recordings are sound
    assert np.array_equal(run(Session(ours, small, SIZE), lr), made)
    assert not ours.graphs._off
    assert any(place.graphs for place in ours.graphs._places)
