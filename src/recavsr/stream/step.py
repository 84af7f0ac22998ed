"""One block of streaming super-resolution: the paper's Eq. 1 and Figure 1 on a page.

LR frames --> generator.step --> SR latents --> decoder.step --> frames
               |  ^                 |  ^
               state (recycled latents, history, LR projector)    state (decoder history)
"""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from threading import Lock
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from recavsr.errors import InputError
from recavsr.geometry import PLAN, BlockPlan, frames_of_latents
from recavsr.models.decoder import DecoderState, FlashDecoder
from recavsr.models.generator import Generator, GeneratorState
from recavsr.models.offload import StreamedLayers
from recavsr.models.row_parallel import Band
from recavsr.state import State
from recavsr.stream.graphs import BlockGraphs, CudaCapture


class BlockModel(Protocol):
    """What a session needs of a model."""

    name: str
    fingerprint: str  # other weights, or another precision: another fingerprint
    size_multiple: int  # the padded working size is a multiple of this many pixels
    native_scale: float  # smaller enlargements go by way of it (see `geometry.working_size`); 0: none do
    blocks: BlockPlan
    device: torch.device
    dtype: torch.dtype  # of the LR frames that it takes; others are converted

    def start(self, height: int, width: int, *, seed: int = 42, shot: int = 0) -> Any:
        """Return the state at the start of a shot, for a padded working size."""
        ...

    def step(self, state: Any, lr_frames: Tensor, wanted: int | None = None) -> tuple[Any, Tensor]:
        """Turn the LR frames [1, 3, F, H, W] of the next block into SR frames, both in [-1, 1].

        At a shot's end only its first `wanted` frames may be asked for: as many come at least, and the
        state is not used again.
        """
        ...


@dataclass(frozen=True)
class StreamState(State):
    """Everything that a stream remembers between blocks."""

    generator: GeneratorState
    decoder: DecoderState
    height: int
    width: int
    seed: int
    shot: int
    block: int


class ReCaVSR:
    """Generator and decoder as one block model."""

    def __init__(
        self,
        name: str,
        generator: Generator,
        decoder: FlashDecoder,
        prompt: Tensor,
        blocks: BlockPlan = PLAN,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        """Take the parts. With a `share` (rank, ranks) this is one of several processes of one stream.

        Each then takes the LR frames of its band's LR rows, and makes the frames of its band (see `bands`).
        """
        self.name, self.blocks = name, blocks
        self.rank, self.ranks = share
        self.generator, self.decoder = generator, decoder
        self.size_multiple = generator.config.token_stride
        self.native_scale = generator.config.native_scale
        self.device, self.dtype = prompt.device, generator.head.weight.dtype
        with torch.inference_mode():
            self.condition = generator.condition(prompt)  # the same for every block of every stream
        self.fingerprint = _fingerprint(generator, decoder)
        on_card = self.device.type == "cuda"
        self._noise = NoiseAhead(self.device) if on_card else block_noise
        travelling = isinstance(generator.blocks, StreamedLayers)  # graphs would fix where layers lie
        self.graphs: BlockGraphs | None = None
        """How steady blocks are issued; None: kernel by kernel."""
        if on_card and not travelling and self.ranks == 1:
            self.graphs = BlockGraphs(generator, CudaCapture(self.device))
        # Layers that travel have places for one stream's block at a time.
        self._turn = Lock() if travelling else nullcontext()

    def start(self, height: int, width: int, *, seed: int = 42, shot: int = 0) -> StreamState:
        """Return the state before the first block of a shot; sizes are padded output pixels."""
        self.bands(height)  # refused where it can not be shared
        return StreamState(self.generator.start(), self.decoder.start(), height, width, seed, shot, 0)

    @torch.inference_mode()
    def step(
        self, state: StreamState, lr_frames: Tensor, wanted: int | None = None
    ) -> tuple[StreamState, Tensor]:
        """Make the next block: LR frames [1, 3, F, H, W] to SR frames [1, 3, F, H, W], in [-1, 1].

        Frames are not clamped; their type is that of the decoder's last step. The state given is spent. With
        `wanted` only the latents of the first so many frames are decoded, and the state returned serves no
        further block. Blocks of different streams may be made from several threads.
        """
        lr_frames, noise = lr_frames.to(self.dtype), self.noise(state)
        run = partial(self.run_block, wanted=wanted)
        if self.graphs is not None:
            return self.graphs.step(run, state, noise, lr_frames, ending=wanted is not None)
        with self._turn:
            return run(state, noise, lr_frames)

    def run_block(
        self,
        state: StreamState,
        noise: Tensor,
        lr_frames: Tensor,
        position: Tensor | None = None,
        wanted: int | None = None,
    ) -> tuple[StreamState, Tensor]:
        """Make a block from its noise: what `step` does, kernel by kernel.

        `position` is that of the block's first latent once more, on the device (see `Generator.step`).
        """
        generator, sr_latents = self.generate(state, lr_frames, noise, position)
        if wanted is not None:  # the decoder looks back only: later latents change nothing
            first = self.blocks.first_latent(state.block)
            latents = next(n for n in count(1) if frames_of_latents(first, n) >= wanted)
            sr_latents = sr_latents[:, :, :latents]
            lr_frames = lr_frames[:, :, : frames_of_latents(first, latents)]
        band = self._band(state.height)
        if band is not None:
            band = band.finer(self.generator.config.patch)
        decoder, frames = self.decoder.step(
            state.decoder, sr_latents, lr_frames, None, position, band, self._in_place
        )
        return replace(state, generator=generator, decoder=decoder, block=state.block + 1), frames

    def generate(
        self,
        state: StreamState,
        lr_frames: Tensor,
        noise: Tensor | None = None,
        position: Tensor | None = None,
    ) -> tuple[GeneratorState, Tensor]:
        """Make the SR latents [1, C, T, H, W] of the next block from its noise and LR frames (Eq. 1).

        The state given is spent; on a card its history is written over.
        """
        noise = self.noise(state) if noise is None else noise
        arguments = (state.generator, self.condition, noise, lr_frames, self._in_place, position)
        return self.generator.step(*arguments, self._band(state.height))

    def noise(self, state: StreamState) -> Tensor:
        """Return the noise [1, C, T, H, W] of the next block, or of this process's rows, on the device."""
        config = self.generator.config
        stride, latents = config.latent_stride, self.blocks.latents(state.block)
        shape = (1, config.latent_channels, latents, state.height // stride, state.width // stride)
        noise = self._noise(shape, state.seed, state.shot, state.block)
        band = self._band(state.height)
        if band is None:
            return noise
        rows = band.finer(config.patch).own
        return noise[:, :, :, rows.start : rows.stop]

    def bands(self, height: int) -> tuple[Band, ...]:
        """Return the rows of tokens that each process computes of a picture of that many pixels.

        Raises InputError where there are fewer rows than processes.
        """
        rows = height // self.size_multiple
        if rows < self.ranks:
            raise InputError(
                f"a height of {height} is {rows} rows of tokens, too few for {self.ranks} devices"
            )
        return Band.split(rows, self.ranks, self.generator.config.patch)

    @property
    def _in_place(self) -> bool:
        """Return whether the state given to a step is written over."""
        return self.graphs is not None or self.device.type == "cuda"

    def _band(self, height: int) -> Band | None:
        return None if self.ranks == 1 else self.bands(height)[self.rank]


def _fingerprint(*parts: nn.Module) -> str:
    """Return a short digest of names, types and the first values of all parameters."""
    digest = hashlib.sha256()
    for part in parts:
        for name, parameter in part.named_parameters():
            head = parameter.detach().flatten()[:8].float().cpu().numpy()
            digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode() + head.tobytes())
    return digest.hexdigest()[:16]


def block_noise(shape: tuple[int, ...], seed: int, shot: int, block: int) -> Tensor:
    """Return float32 normal noise as a pure function of (seed, shot, block), the same on every device."""
    mixed = int(np.random.SeedSequence((seed, shot, block)).generate_state(1, np.uint64)[0])
    generator = torch.Generator().manual_seed(mixed & (2**63 - 1))
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


class NoiseAhead:
    """Gives a card what `block_noise` gives, and makes that of the next block while the card computes."""

    def __init__(self, device: torch.device) -> None:
        # On its own card: memory is locked through the context of the thread's current one.
        self._device = device
        self._worker = ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,))
        self._ahead: tuple[tuple[Any, ...], Future[Tensor]] | None = None

    def __call__(self, shape: tuple[int, ...], seed: int, shot: int, block: int) -> Tensor:
        """Return the noise of a block, on the device."""
        asked = (shape, seed, shot, block)
        ahead = self._ahead  # once: another thread may put its own there
        noise = ahead[1].result() if ahead and ahead[0] == asked else self._make(*asked)
        following = (shape, seed, shot, block + 1)
        self._ahead = following, self._worker.submit(self._make, *following)
        return noise.to(self._device, non_blocking=True)

    @staticmethod
    def _make(shape: tuple[int, ...], seed: int, shot: int, block: int) -> Tensor:
        # Page-locked: a copy from other memory would wait for all work before it.
        return block_noise(shape, seed, shot, block).pin_memory()


@dataclass(frozen=True)
class IdentityState(State):
    """The identity model remembers only how many blocks went by."""

    block: int


class IdentityModel:
    """Only resizes (bilinear): proves the media path and serves as a baseline."""

    name = "identity"
    fingerprint = ""
    size_multiple = 1
    native_scale = 0.0
    dtype = torch.float32

    def __init__(self, device: torch.device | str = "cpu", blocks: BlockPlan = PLAN) -> None:
        self.device, self.blocks = torch.device(device), blocks

    def start(self, height: int, width: int, *, seed: int = 42, shot: int = 0) -> IdentityState:
        """Return the state before the first block."""
        return IdentityState(0)

    def step(
        self, state: IdentityState, lr_frames: Tensor, wanted: int | None = None
    ) -> tuple[IdentityState, Tensor]:
        """Return the LR frames, which are already at the output size."""
        return IdentityState(state.block + 1), lr_frames
