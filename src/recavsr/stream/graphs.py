"""Steady blocks as CUDA graphs: what a block does on a card is recorded once, then replayed.

A graph reads and writes fixed addresses, so a stream's state stays in one place from block to block, and a
block that a graph makes writes the next state over the last. A shot that ends leaves its place to the next
one, graphs included. What changes from block to block in numbers only (noise, LR frames, the position) is
filled in before a replay; what is decided outside the card (which slots of the history are seen and written)
comes in a short cycle of patterns (`plan_histories`), with one graph for each.

A pattern is recorded when it comes for the second time: its kernels are compiled by then, and a short clip
records nothing. The block itself is then made by the very function that is recorded after it: every kernel of
it is loaded, and a recording that fails costs nothing but a warning. First and last blocks, and whatever can
not be recorded, run as they always do.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import replace
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor

from recavsr.models.generator import Generator, GeneratorState
from recavsr.models.kv_history import HistoryPlan, KVHistory
from recavsr.state import State

STREAMS = 4
"""Streams at once that get graphs; each has patterns of its own, about 20 MB of a card a graph."""

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
"""Records what a function does on the device, without doing it; returns what does it."""


class BlockState(Protocol):
    """What graphs need of a stream's state; it is a `State`."""

    generator: GeneratorState
    height: int
    width: int
    block: int


class RunBlock(Protocol):
    """Makes one block in the state's memory (see `ReCaVSR.run_block`)."""

    def __call__(
        self, state: Any, noise: Tensor, lr_frames: Tensor, position: Tensor | None = None
    ) -> tuple[Any, Tensor]:
        """Return the next state and the frames."""
        ...


class CudaCapture:
    """Records CUDA graphs. All of them share the memory of what lives only within a block."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool: Any = None
        self._graphs = weakref.WeakSet[Any]()

    def __call__(self, work: Callable[[], None]) -> Replay:
        """Record `work`; where it does something that can not be recorded, raise what was wrong first."""
        graph, stream = torch.cuda.CUDAGraph(), self._stream
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        if self._pool is None or not self._graphs:  # none may join a pool whose graphs are all gone
            self._pool = torch.cuda.graph_pool_handle()
        kept = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
        if torch.cuda.mem_get_info(index)[0] < kept:
            # What blocks that ran kernel by kernel left free is no use to graphs, and can not be given back
            # while one is recorded.
            torch.cuda.empty_cache()
        # A recording marks the card's random numbers as recorded; one that fails leaves them so, and every
        # later draw in this process would fail. It gets a copy to mark: no block draws on the card.
        random = torch.cuda.default_generators[index]
        numbers = random.graphsafe_get_state()
        random.graphsafe_set_state(numbers.clone_state())
        collects = gc.isenabled()
        gc.disable()  # what it might free meanwhile could call what may not be called
        try:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(stream):
                # Other threads go on meanwhile: they lock memory pages for noise, decode, encode.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                except BaseException:
                    self._abandon(graph, index)
                    raise
                self._end(graph, index)
        finally:
            random.graphsafe_set_state(numbers)
            if collects:
                gc.enable()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        self._graphs.add(graph)
        return graph.replay

    def _end(self, graph: torch.cuda.CUDAGraph, index: int) -> None:
        try:
            graph.capture_end()
        except RuntimeError:  # it then leaves the allocators as if they still recorded
            for undo in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
                with suppress(RuntimeError):
                    undo(index, self._pool)
            # That of page-locked memory can not be told: it refuses this pool from now on, and a recording
            # that is refused marks the random numbers after all.
            self._pool = None
            raise

    def _abandon(self, graph: torch.cuda.CUDAGraph, index: int) -> None:
        with suppress(RuntimeError):  # that it could not be recorded; why is known
            self._end(graph, index)


class BlockGraphs:
    """The graphs of a model's streams, and the places where these live; one block at a time."""

    def __init__(self, generator: Generator, capture: Capture) -> None:
        self._generator, self._capture = generator, capture
        self._places: list[_Place] = []
        self._lock = Lock()
        self._off = False

    def step(
        self, run: RunBlock, state: Any, noise: Tensor, lr_frames: Tensor, ending: bool = False
    ) -> tuple[Any, Tensor]:
        """Make the next block as `run` makes it: the state given is spent, the frames are the caller's.

        With `ending` the block is run as it is, and the state after it is not used again. May be called from
        any thread.
        """
        with self._lock:
            place = self._place_of(state)
            if place is not None and state.block == 0:
                state = place.emptied(state)
            if ending:
                return run(state, noise, lr_frames)
            plan = self._generator.plan_histories(state.generator, noise.shape[2])
            pattern = tuple((layer.held, layer.moves) for layer in plan)
            if place is not None and place.holds(state):
                if pattern in place.graphs:
                    return place.replay(place.graphs[pattern], state, plan, noise, lr_frames)
                if pattern in place.seen and not self._off:
                    return self._record(run, place, pattern, plan, state, noise, lr_frames)
            after, frames = run(state, noise, lr_frames)
            return self._settled(place, state, pattern, after, frames), frames

    def _place_of(self, state: BlockState) -> _Place | None:
        """Return where a state lives, or for the start of a shot a place that nothing uses."""
        for place in self._places:
            if place.tenant() is state:
                return place
        if state.block > 0:
            return None
        size = (state.height, state.width)
        self._places = [
            p for p in self._places if p.size == size or not p.free
        ]  # the others' memory is wanted
        return next((p for p in self._places if p.free), None)

    def _settled(
        self, place: _Place | None, before: Any, pattern: Hashable, after: Any, frames: Tensor
    ) -> Any:
        """Move the state after a block into its place, which it gets when its form no longer changes."""
        form = _form(after)
        steady = form == _form(before)
        if steady and (place is None or place.form != form):
            self._places = [p for p in self._places if p is not place]
            place = None
            if len(self._places) < STREAMS and not self._off:
                place = _Place(after, form)
                self._places.append(place)
        if place is None:
            return after
        if place.form == form:
            after = place.moved_in(after)
        if steady:
            place.seen[pattern] = torch.empty_like(frames, device="meta")
        place.tenant = weakref.ref(after)
        return after

    def _record(
        self,
        run: RunBlock,
        place: _Place,
        pattern: Hashable,
        plan: tuple[HistoryPlan, ...],
        state: Any,
        noise: Tensor,
        lr_frames: Tensor,
    ) -> tuple[Any, Tensor]:
        """Make a block, then record what made it; return the next state and the frames."""
        buffers = place.buffers_for(noise, lr_frames, place.seen[pattern])
        noise_in, lr_frames_in, position, frames_out = buffers

        def work() -> None:
            after, frames = run(state, noise_in, lr_frames_in, position)
            place.moved_in(after)
            frames_out.copy_(frames)

        made = place.replay(work, state, plan, noise, lr_frames)
        try:
            place.graphs[pattern] = self._capture(work)
        except Exception as error:
            self._off = True
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            warnings.warn(f"blocks run without CUDA graphs, which could not be made: {reason}", stacklevel=4)
        return made


class _Place:
    """The memory of one stream at fixed addresses, and the graphs that work on it."""

    def __init__(self, state: Any, form: Hashable) -> None:
        self.form, self.size = form, (state.height, state.width)
        self.graphs: dict[Hashable, Replay] = {}
        self.seen: dict[Hashable, Tensor] = {}  # patterns that ran, and the form of their frames
        self.tenant: Callable[[], Any] = lambda: None  # weak: a state that is dropped leaves the place free
        self._state = replace(state)  # what lies here, for its tensors; its numbers are of no account
        self._tensors = list(state.tensors())
        self._buffers: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        self._done: torch.cuda.Event | None = None

    @property
    def free(self) -> bool:
        """Return whether no stream lives here any more."""
        return self.tenant() is None

    def holds(self, state: State) -> bool:
        """Return whether all tensors of a state lie here."""
        return _form(state) == self.form and all(
            here is there for here, there in zip(self._tensors, state.tensors())
        )

    def emptied(self, state: Any) -> Any:
        """Return the state of a shot's start with this place's memory for all its histories."""
        here = self._state
        layers = tuple(
            None if history is None else KVHistory(history.keys, history.values, ())
            for history in here.generator.layers
        )
        projector = here.generator.lr_projector.emptied()
        generator = replace(state.generator, layers=layers, lr_projector=projector)
        return replace(state, generator=generator, decoder=here.decoder.emptied())

    def moved_in(self, state: Any) -> Any:
        """Copy what lies elsewhere of a state of this place's form; return it as it lies here."""
        tensors = iter(self._tensors)

        def settle(tensor: Tensor) -> Tensor:
            here = next(tensors)
            if here.data_ptr() != tensor.data_ptr():
                here.copy_(tensor)
            return here

        return state.map(settle)

    def buffers_for(
        self, noise: Tensor, lr_frames: Tensor, form: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return where graphs read noise, LR frames and the position, and where they write the frames."""
        if self._buffers is None:
            position = torch.zeros((), dtype=torch.int64, device=noise.device)
            given = torch.empty_like(lr_frames)
            # Frames are written last, when the LR frames have been read: one buffer may do for both.
            same = (form.shape, form.dtype) == (given.shape, given.dtype)
            frames = given if same else torch.empty_like(form, device=noise.device)
            self._buffers = torch.empty_like(noise), given, position, frames
        return self._buffers

    def replay(
        self, replay: Replay, state: Any, plan: tuple[HistoryPlan, ...], noise: Tensor, lr_frames: Tensor
    ) -> tuple[Any, Tensor]:
        """Make a block by a graph, or by what it will record; return the next state, a copy of the frames."""
        assert self._buffers is not None
        noise_in, lr_frames_in, position, frames_out = self._buffers
        on_cuda = noise_in.is_cuda
        if on_cuda and self._done is not None:  # made on another stream of the card, perhaps
            torch.cuda.current_stream(noise_in.device).wait_event(self._done)
        noise_in.copy_(noise, non_blocking=True)
        lr_frames_in.copy_(lr_frames)
        position.fill_(state.generator.next_position)
        replay()
        frames = frames_out.clone()
        if on_cuda:
            self._done = torch.cuda.current_stream(noise_in.device).record_event()
        latents, generator = noise.shape[2], state.generator
        layers = tuple(
            None if history is None else replace(history, positions=layer.positions)
            for history, layer in zip(generator.layers, plan, strict=True)
        )
        after = replace(
            state,
            generator=replace(generator, layers=layers, next_position=generator.next_position + latents),
            decoder=replace(state.decoder, next_position=state.decoder.next_position + latents),
            block=state.block + 1,
        )
        self.tenant = weakref.ref(after)
        return after, frames


def _form(state: Any) -> Hashable:
    """Return all of a state that a graph takes for granted, beside what is seen and kept of the history."""
    convolutions = (state.generator.lr_projector.first, state.generator.lr_projector.second)
    return (
        tuple((tensor.shape, tensor.dtype) for tensor in state.tensors()),
        tuple(history is None for history in state.generator.layers),
        tuple(history is None or history.empty for history in state.decoder.layers),
        tuple(history and history.phase for history in convolutions),
        state.generator.recycled is None,
    )
