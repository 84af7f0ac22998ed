"""A stream of frames through a model: push LR frames in any pieces, get SR frames by the block."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recavsr.errors import InputError
from recavsr.geometry import padded_size
from recavsr.state import State
from recavsr.stream.blocks import prepare_lr_frames, to_picture
from recavsr.stream.color_fix import ColorFix, adain, wavelet
from recavsr.stream.step import BlockModel


@dataclass(frozen=True)
class SessionState(State):
    """A whole session: the model's state and the LR frames that wait for their block."""

    model: State
    pending: Tensor  # [n, h, w, 3] as int32, frames not yet in a block
    block: int
    uint16: bool


class Session:
    """One stream. Output depends on the frames alone, never on how they were cut into pushes.

    Frames are [N, h, w, 3] RGB, uint8 or uint16; results are [M, H, W, 3] of the same dtype.
    """

    def __init__(
        self,
        model: BlockModel,
        lr_size: tuple[int, int],
        out_size: tuple[int, int],
        *,
        seed: int = 42,
        shot: int = 0,
        color_fix: ColorFix = "none",
    ) -> None:
        if min(*lr_size, *out_size) < 1:
            raise InputError(f"sizes must be positive, got {lr_size} -> {out_size}")
        if color_fix not in ("none", "adain", "wavelet"):
            raise InputError(f"color fix {color_fix!r} is unknown; choose none, adain or wavelet")
        self.model, self.lr_size, self.out_size = model, lr_size, out_size
        self.seed, self.color_fix = seed, color_fix
        self._start(shot)

    def _start(self, shot: int) -> None:
        height, width = padded_size(*self.out_size, self.model.size_multiple)
        self.shot = shot
        self._state: Any = self.model.start(height, width, seed=self.seed, shot=shot)
        self._pending: list[np.ndarray] = []
        self._block = 0

    @property
    def frames_wanted(self) -> int:
        """Return how many more LR frames complete the next block."""
        return self.model.blocks.frames(self._block) - sum(len(piece) for piece in self._pending)

    def push(self, frames: np.ndarray) -> list[np.ndarray]:
        """Take the next LR frames; return the SR frames of every block that they complete."""
        if frames.ndim != 4 or frames.shape[1:] != (*self.lr_size, 3):
            raise InputError(
                f"frames must be [N, {self.lr_size[0]}, {self.lr_size[1]}, 3], got {frames.shape}"
            )
        if self._pending and self._pending[0].dtype != frames.dtype:
            raise InputError(f"the stream holds {self._pending[0].dtype} frames, got {frames.dtype}")
        done = []
        while len(frames):
            take = min(self.frames_wanted, len(frames))
            self._pending.append(frames[:take].copy())  # the caller may fill its array again
            frames = frames[take:]
            if self.frames_wanted == 0:
                done.append(self._run_block(np.concatenate(self._pending)))
        return done

    def flush(self) -> list[np.ndarray]:
        """End the stream: pad the last block by repeating its last frame, trim to the true count.

        The session then stands at the start of a fresh stream.
        """
        done = []
        if self._pending:
            frames = np.concatenate(self._pending)
            padded = np.concatenate([frames, np.repeat(frames[-1:], self.frames_wanted, axis=0)])
            done.append(self._run_block(padded)[: len(frames)])
        self._start(self.shot)
        return done

    def reset(self, shot: int | None = None) -> None:
        """Start afresh, as after a scene cut; frames that wait for their block are dropped."""
        self._start(self.shot if shot is None else shot)

    def fork(self) -> Session:
        """Return an independent session that continues from here."""
        other = Session(
            self.model,
            self.lr_size,
            self.out_size,
            seed=self.seed,
            shot=self.shot,
            color_fix=self.color_fix,
        )
        # States are never written to, so both sessions may hold the same one.
        other._state, other._pending, other._block = self._state, list(self._pending), self._block
        return other

    def save(self, path: str | Path) -> None:
        """Write the session to a file that `load` continues from, bit for bit on a CPU."""
        empty = np.zeros((0, *self.lr_size, 3), np.uint8)
        pending = np.concatenate(self._pending) if self._pending else empty
        state = SessionState(
            self._state,
            torch.from_numpy(pending.astype(np.int32)),
            self._block,
            pending.dtype == np.uint16,
        )
        state.save(
            path,
            model=self.model.name,
            lr_size=self.lr_size,
            out_size=self.out_size,
            seed=self.seed,
            shot=self.shot,
            color_fix=self.color_fix,
        )

    @classmethod
    def load(cls, path: str | Path, model: BlockModel) -> Session:
        """Continue a saved session; raise InputError where it was made with another model."""
        state, about = SessionState.load(path, model.device)
        if about["model"] != model.name:
            raise InputError(f"{path} was saved with model {about['model']!r}, not {model.name!r}")
        session = cls(
            model,
            tuple(about["lr_size"]),
            tuple(about["out_size"]),
            seed=about["seed"],
            shot=about["shot"],
            color_fix=about["color_fix"],
        )
        session._state, session._block = state.model, state.block
        pending = state.pending.cpu().numpy().astype(np.uint16 if state.uint16 else np.uint8)
        session._pending = [pending] if len(pending) else []
        return session

    def _run_block(self, frames: np.ndarray) -> np.ndarray:
        lr_frames = prepare_lr_frames(frames, self.out_size, self.model.size_multiple, self.model.device)
        self._state, sr_frames = self.model.step(self._state, lr_frames)
        height, width = self.out_size
        if self.color_fix == "adain":
            sr_frames = adain(sr_frames.float().clamp(-1, 1), lr_frames)
        elif self.color_fix == "wavelet":
            sr_frames = wavelet(sr_frames[..., :height, :width], frames)
        self._pending, self._block = [], self._block + 1
        return to_picture(sr_frames, self.out_size, frames.dtype)
