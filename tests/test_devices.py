"""One stream over several processes gives what one process gives; a lost worker is one clear line."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recavsr.attention import SpatialWindow
from recavsr.errors import InputError
from recavsr.models.generator import Generator, GeneratorState
from recavsr.stream.devices import GatheredState, SharedModel, open_shared
from recavsr.stream.graphs import BlockGraphs
from recavsr.stream.load import load
from recavsr.stream.step import ReCaVSR
from tiny import GENERATOR, STRIDE, one_thread, tiny_decoder, tiny_generator, tiny_prompt

SIZE = (11 * STRIDE, 6 * STRIDE)  # eleven rows: no number of processes divides them
CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


# --------------------------------------------------------------- what workers open, by name, in their process


def open_tiny(
    device: str, share: tuple[int, int], head: str = "linear", fails: str = "", graphs: bool = False
) -> ReCaVSR:
    torch.set_num_threads(1)
    if fails == "opening" and share[0]:
        raise InputError("the weights are of another model")
    halved = head == "convolutional"  # as in nano
    config = replace(GENERATOR, window=SpatialWindow(9, 3), lr_halved=halved)
    generator = tiny_generator(config).requires_grad_(False)
    decoder = tiny_decoder(head=head, lr_halved=halved).requires_grad_(False)
    model = ReCaVSR("tiny", generator, decoder, tiny_prompt(), share=tuple(share))
    if graphs:  # recorded is the function itself, with the addresses of that moment
        model.graphs = BlockGraphs(model.generator, lambda work: work)
    if fails == "second block" and share[0] == 1:
        model.generator = _FailsLater(model.generator)  # type: ignore[assignment]
    return model


class _FailsLater:
    """A generator that fails at its second block."""

    def __init__(self, generator: Generator) -> None:
        self._generator, self.config = generator, generator.config
        self.start = generator.start

    def step(self, state: GeneratorState, *arguments: Any) -> tuple[GeneratorState, Tensor]:
        if state.next_position:
            raise RuntimeError("out of memory: 3 GB asked for\nand much more text")
        return self._generator.step(state, *arguments)


@contextmanager
def shared_tiny(ranks: int, **arguments: str | bool) -> Iterator[SharedModel]:
    model = open_shared("test_devices:open_tiny", [CPU] * ranks, arguments)
    try:
        yield model
    finally:
        model.close()


def lr_block(model: ReCaVSR | SharedModel, index: int) -> Tensor:
    random = torch.Generator().manual_seed(index)
    return torch.rand(1, 3, model.blocks.frames(index), *SIZE, generator=random) * 2 - 1


# ------------------------------------------------------------------------------------------------------ tests


@pytest.mark.parametrize(("ranks", "head", "graphs"), [(2, "linear", True), (3, "convolutional", False)])
def test_several_processes_make_the_frames_of_one(ranks: int, head: str, graphs: bool) -> None:
    alone = open_tiny("cpu", (0, 1), head)
    with shared_tiny(ranks, head=head, graphs=graphs) as model:
        assert model.fingerprint != alone.fingerprint
        for shot in (0, 1):  # a new shot is a fresh state
            theirs, ours = (m.start(*SIZE, shot=shot) for m in (alone, model))
            for index in range(5 + 9 * graphs):
                lr_frames = lr_block(alone, index)
                theirs, wanted = alone.step(theirs, lr_frames)
                ours, frames = model.step(ours, lr_frames)
                torch.testing.assert_close(frames, wanted, atol=1e-5, rtol=1e-5)
        assert not graphs or model.graphs._places[0].graphs  # and blocks were replayed
        # The last frames of a shot.
        _, wanted = alone.step(theirs, lr_block(alone, 5), 3)
        _, frames = model.step(ours, lr_block(alone, 5), 3)
        torch.testing.assert_close(frames, wanted, atol=1e-5, rtol=1e-5)


def test_states_can_be_copied_saved_and_forgotten(tmp_path: Path) -> None:
    from recavsr.stream.session import Session  # PyAV may be missing where the tests of cards run

    frames = np.random.default_rng(0).integers(0, 256, (45, SIZE[0] // 2, SIZE[1] // 2, 3), np.uint8)
    with shared_tiny(2) as model:
        session = Session(model, frames.shape[1:3], SIZE)
        session.save(tmp_path / "fresh")
        session.push(frames[:29])
        session.save(tmp_path / "later")
        fork = session.fork()
        wanted = session.push(frames[29:])
        again = Session.load(tmp_path / "later", model)
        fresh = Session.load(tmp_path / "fresh", model)
        for other in (fork, again):
            assert all(map(np.array_equal, other.push(frames[29:]), wanted))
        assert np.array_equal(np.concatenate(fresh.push(frames))[29:], np.concatenate(wanted))
        (state,) = session._states
        model.step(state, lr_block(model, 1))
        with pytest.raises(ValueError, match="spent"):
            model.step(state, lr_block(model, 1))
    model.close()  # twice does no harm
    with pytest.raises(InputError, match="was closed"):
        session.push(frames)


def test_a_killed_worker_is_one_line(tmp_path: Path) -> None:
    with shared_tiny(3) as model:
        with pytest.raises(InputError, match="2 rows of tokens, too few for 3"):
            model.start(2 * STRIDE, STRIDE)
        alone = open_tiny("cpu", (0, 1))
        gathered = GatheredState(2 * (alone.step(alone.start(*SIZE), lr_block(alone, 0))[0],))
        with pytest.raises(InputError, match="saved on 2 devices; it can not go on with 3"):
            model.step(gathered, lr_block(model, 1))
        assert model.step(model.start(*SIZE), lr_block(model, 0))  # that did no harm
        state, _ = model.step(model.start(*SIZE), lr_block(model, 0))
        os.kill(model._workers[-1].process.pid, signal.SIGKILL)
        for _ in range(2):  # and stays that
            with pytest.raises(InputError, match=r"the worker on cpu was lost: ended by signal 9$"):
                model.step(state, lr_block(model, 1))


def test_a_worker_that_is_lost_before_a_saved_stream_goes_on_is_one_line() -> None:
    with shared_tiny(2) as model:
        alone = open_tiny("cpu", (0, 1))
        gathered = GatheredState(2 * (alone.step(alone.start(*SIZE), lr_block(alone, 0))[0],))
        worker, tell = model._workers[0].process, model._tell
        os.kill(worker.pid, signal.SIGSTOP)  # so that it does not answer

        def tell_and_kill(order: dict[str, Any]) -> None:
            tell(order)
            os.kill(worker.pid, signal.SIGKILL)

        model._tell = tell_and_kill  # type: ignore[method-assign]
        with pytest.raises(InputError, match=r"the worker on cpu was lost: ended by signal 9$"):
            model.step(gathered, lr_block(model, 1))


def test_a_failing_worker_says_why() -> None:
    with shared_tiny(3, fails="second block") as model:
        state, _ = model.step(model.start(*SIZE), lr_block(model, 0))
        with pytest.raises(InputError, match=r"was lost: RuntimeError: out of memory: 3 GB asked for$"):
            model.step(state, lr_block(model, 1))
    with pytest.raises(InputError, match="the weights are of another model"), shared_tiny(2, fails="opening"):
        pass


def test_what_can_not_be_shared_is_refused() -> None:
    with pytest.raises(InputError, match="identity computes nothing"):
        load("identity", device="cpu,cpu")
    with pytest.raises(InputError, match="choose auto, cpu"):
        load("nano", device="cpu,gpu")
    with pytest.raises(InputError, match="one kind work together, not cpu,meta"):
        open_shared("test_devices:open_tiny", [CPU, torch.device("meta")], {})
    card = torch.device("cuda:0")
    with pytest.raises(InputError, match="cuda:0,cuda:0: name each card once"):
        open_shared("test_devices:open_tiny", [card, card], {})


def test_a_file_over_two_processes(tmp_path: Path) -> None:
    from recavsr.stream.engine import upscale
    from recavsr.video.clips import read_clip, write_clip

    frames = np.random.default_rng(1).integers(0, 256, (24, 24, 32, 3), np.uint8)
    write_clip(tmp_path / "in.mkv", frames, 25)
    for name, device in (("one", "cpu"), ("two", "cpu,cpu")):
        upscale(
            tmp_path / "in.mkv", tmp_path / f"{name}.mkv", device=device, precision="fp32", quality="lossless"
        )
    one, two = (read_clip(tmp_path / f"{name}.mkv").astype(int) for name in ("one", "two"))
    assert one.shape == (24, 96, 128, 3)
    # Sums in another order round a few pixels' luma or chroma to the other side: 3 levels of red or blue.
    difference = np.abs(one - two)
    assert difference.max() <= 4
    assert (difference > 0).mean() < 0.01
    assert not torch.distributed.is_initialized()  # the workers ended with their model


@pytest.mark.gpu
def test_two_cards_make_the_frames_of_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one card only")
    size, random = (224, 320), torch.Generator().manual_seed(0)
    alone = load("nano", device="cuda:0", precision="bf16")
    model = load("nano", device="cuda:0,cuda:1", precision="bf16")
    assert isinstance(model, SharedModel)
    try:
        theirs, ours = alone.start(*size), model.start(*size)
        for index in range(6):
            lr_frames = torch.rand(1, 3, alone.blocks.frames(index), *size, generator=random).cuda() * 2 - 1
            theirs, wanted = alone.step(theirs, lr_frames)
            ours, frames = model.step(ours, lr_frames)
            assert (frames.float() - wanted.float()).norm() < 0.02 * wanted.float().norm()
        saved = ours.gathered()
        assert {tensor.device for tensor in saved.parts[1].tensors()} == {torch.device("cpu")}
        _, wanted = model.step(ours, lr_frames)
        again, frames = model.step(saved, lr_frames)
        assert torch.equal(frames, wanted)
        os.kill(model._workers[0].process.pid, signal.SIGKILL)
        with pytest.raises(InputError, match="the worker on cuda:1 was lost: ended by signal 9"):
            model.step(again, lr_frames)
    finally:
        model.close()  # type: ignore[union-attr]
