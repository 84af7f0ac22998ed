"""A stream of frames through a model: push LR frames in any pieces, get SR frames by the block."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recavsr.errors import InputError
from recavsr.geometry import padded_size, strips_of, working_size
from recavsr.state import State
from recavsr.stream.blocks import made_smaller, prepare_lr_frames, to_picture
from recavsr.stream.color_fix import ColorFix, adain, check_color_fix, wavelet
from recavsr.stream.cuts import ShotMemory, Thumbnail, thumbnail
from recavsr.stream.drift import Drift, color_difference
from recavsr.stream.step import BlockModel


@dataclass(frozen=True)
class SessionState(State):
    """A whole session: the model's states, one a strip, and the LR frames that wait for their block."""

    model: tuple[State, ...]
    seen: ShotMemory
    pending: Tensor  # [n, h, w, 3] as int32, frames not yet in a block
    block: int
    uint16: bool


class Session:
    """One stream. Output depends on the frames alone, never on how they were cut into pushes.

    Frames are [N, h, w, 3] RGB, uint8 or uint16; results are [M, H, W, 3] of the same dtype. `lr_size` is
    (h, w), `out_size` (H, W). Noise is a function of `seed`, `shot` and block. `color_fix` holds colours to
    the input's: "wavelet", "adain" or "none". With `detect_cuts` each shot is a stream of its own: it comes
    out as it would alone; `cuts` says where shots began. What is smaller than the model's native scale asks
    for is made at that scale (`work_size`) and then made smaller, in `strips` where that is large; with
    `direct` it is made at its own size: faster, and worse. Raises InputError where sizes or options won't do.
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
        detect_cuts: bool = False,
        direct: bool = False,
    ) -> None:
        if isinstance(model, (str, os.PathLike)):
            raise InputError(f"a session takes a loaded model: recavsr.load({os.fspath(model)!r})")
        if min(*lr_size, *out_size) < 1:
            raise InputError(f"sizes must be positive, got {lr_size} -> {out_size}")
        check_color_fix(color_fix)
        self.model, self.lr_size, self.out_size = model, lr_size, out_size
        self.seed, self.color_fix, self.detect_cuts, self.direct = seed, color_fix, detect_cuts, direct
        self.work_size = working_size(lr_size, out_size, model.native_scale, direct=direct)
        """The size (height, width) at which the model makes the frames."""
        self.strips = strips_of(lr_size, out_size, model.native_scale, direct=direct)
        """Which rows it makes as streams of their own: all, or what fits at that size."""
        self.cuts: list[int] = []
        """Where a new shot began, as a count of the frames before it since the session was made."""
        self.pushed = 0
        """Frames that came in since the session was made."""
        self.drift = Drift()
        """How far the colours of what was made so far lie from those of the LR frames."""
        self._start(shot)

    def _start(self, shot: int) -> None:
        self.shot = shot
        sizes = [padded_size(*strip.work_size, self.model.size_multiple) for strip in self.strips]
        self._states: list[Any] = [self.model.start(*size, seed=self.seed, shot=shot) for size in sizes]
        self._pending: list[np.ndarray] = []
        self._thumbnails: list[Thumbnail] = []
        self._seen = ShotMemory()
        self._block = 0

    @property
    def frames_wanted(self) -> int:
        """Return how many more LR frames complete the next block."""
        return self.model.blocks.frames(self._block) - sum(len(piece) for piece in self._pending)

    def push(self, frames: np.ndarray) -> list[np.ndarray]:
        """Take the next LR frames; return the SR frames of every block that they complete.

        Raises InputError, and takes none, where they are of another size or type than the stream's.
        """
        if not isinstance(frames, np.ndarray) or frames.dtype not in (np.uint8, np.uint16):
            given = getattr(frames, "dtype", type(frames).__name__)
            raise InputError(f"frames must be uint8 or uint16 (numpy), got {given}")
        if frames.ndim != 4 or frames.shape[1:] != (*self.lr_size, 3):
            raise InputError(
                f"frames must be [N, {self.lr_size[0]}, {self.lr_size[1]}, 3], got {frames.shape}"
            )
        if self._pending and self._pending[0].dtype != frames.dtype:
            raise InputError(f"the stream holds {self._pending[0].dtype} frames, got {frames.dtype}")
        done = []
        while len(frames):
            take = min(self.frames_wanted, len(frames))
            self._add(frames[:take].copy())  # the caller may fill its array again
            frames = frames[take:]
            done += self._ready()
        return done

    def flush(self) -> list[np.ndarray]:
        """End the stream: pad the last block by repeating its last frame, trim to the true count.

        The session then stands at the start of a fresh stream.
        """
        done = self._ready(ending=True)
        self._start(self.shot)
        return done

    def cut(self) -> list[np.ndarray]:
        """End the shot as `flush` does: the next frame starts a new one."""
        done = self.flush()
        if self.pushed and self.cuts[-1:] != [self.pushed]:
            self.cuts.append(self.pushed)
        return done

    def reset(self, shot: int | None = None) -> None:
        """Start afresh, as after a scene cut; frames that wait for their block are dropped."""
        self._start(self.shot if shot is None else shot)

    def fork(self) -> Session:
        """Return an independent session that continues from here: it gets a copy of the whole state."""
        other = self.at_cut(self.pushed)
        other._states = [state.clone() for state in self._states]
        other._pending, other._block = list(self._pending), self._block
        other._seen, other._thumbnails = self._seen, list(self._thumbnails)
        return other

    def at_cut(self, cut: int) -> Session:
        """Return an independent session that stands at one of the `cuts` so far, before its shot."""
        other = Session(
            self.model,
            self.lr_size,
            self.out_size,
            seed=self.seed,
            shot=self.shot,
            color_fix=self.color_fix,
            detect_cuts=self.detect_cuts,
            direct=self.direct,
        )
        other.cuts, other.pushed = [known for known in self.cuts if known <= cut], cut
        other.drift = self.drift
        return other

    def save(self, path: str | Path) -> None:
        """Write the session to a file that `load` continues from, bit for bit on a CPU."""
        empty = np.zeros((0, *self.lr_size, 3), np.uint8)
        pending = np.concatenate(self._pending) if self._pending else empty
        state = SessionState(
            tuple(state.gathered() for state in self._states),
            self._seen,
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
            detect_cuts=self.detect_cuts,
            direct=self.direct,
            cuts=self.cuts,
            pushed=self.pushed,
            drift=astuple(self.drift),
        )

    @classmethod
    def load(cls, path: str | Path, model: BlockModel) -> Session:
        """Continue a saved session; raise InputError where another model, or version, made it."""
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
            detect_cuts=about["detect_cuts"],
            direct=about["direct"],
        )
        if not isinstance(state.model, tuple) or len(state.model) != len(session.strips):
            raise InputError(f"{path} was saved by another version of recavsr: start afresh")
        session._states, session._seen, session._block = list(state.model), state.seen, state.block
        pending = state.pending.cpu().numpy().astype(np.uint16 if state.uint16 else np.uint8)
        if len(pending):
            session._add(pending)
        session.cuts, session.pushed = about["cuts"], about["pushed"]
        session.drift = Drift(*about["drift"])
        return session

    def _add(self, frames: np.ndarray) -> None:
        self._pending.append(frames)
        self.pushed += len(frames)
        if self.detect_cuts:
            self._thumbnails += map(thumbnail, frames)

    def _ready(self, *, ending: bool = False) -> list[np.ndarray]:
        """Run the blocks that the waiting frames complete; at the end, or at a cut, also a short one."""
        done = []
        while self._pending and (ending or self.frames_wanted <= 0):  # less: left over from before a cut
            frames, thumbnails = np.concatenate(self._pending), self._thumbnails
            wanted = self.model.blocks.frames(self._block)
            cut = self._seen.first_cut(thumbnails[:wanted]) if self.detect_cuts else None
            taken = min(wanted, len(frames)) if cut is None else cut
            if taken:
                # The model has a precision of its own, whatever the caller computes in.
                with torch.autocast(self.model.device.type, enabled=False):
                    done.append(self._run_block(frames[:taken], wanted))
            if self.detect_cuts and cut is None:
                self._seen = self._seen.after(thumbnails[:taken])
            if cut is not None:
                self._start(self.shot)
                self.cuts.append(self.pushed - len(frames) + cut)
            self._pending = [frames[taken:]] if len(frames) > taken else []
            self._thumbnails = thumbnails[taken:]
        return done

    def _run_block(self, frames: np.ndarray, wanted: int) -> np.ndarray:
        """Run a block of `wanted` frames; where there are fewer, the last one is repeated and trimmed."""
        count = len(frames)
        if count < wanted:
            frames = np.concatenate([frames, np.repeat(frames[-1:], wanted - count, axis=0)])
        ending = count if count < wanted else None
        parts = (self._run_strip(index, frames, count, ending) for index in range(len(self.strips)))
        sr_frames = next(parts) if len(self.strips) == 1 else self._joined(parts, count)
        self._block += 1
        difference = color_difference(sr_frames, frames[:count])
        picture = to_picture(sr_frames, self.out_size, frames.dtype)
        self.drift = self.drift.with_block(difference.tolist())  # the device has come so far by now
        return picture

    def _run_strip(self, index: int, frames: np.ndarray, count: int, ending: int | None) -> Tensor:
        """Run a strip's block; return its `count` frames at the output's size."""
        strip = self.strips[index]
        frames = frames[:, strip.rows.start : strip.rows.stop]
        dtype = torch.float32 if self.color_fix == "adain" else self.model.dtype
        lr_frames = prepare_lr_frames(
            frames, strip.work_size, self.model.size_multiple, self.model.device, dtype
        )
        self._states[index], sr_frames = self.model.step(self._states[index], lr_frames, ending)
        lr_frames = lr_frames[:, :, : sr_frames.shape[2]]
        height, width = strip.work_size
        if self.color_fix == "adain":
            sr_frames = adain(sr_frames.float().clamp(-1, 1), lr_frames)
        elif self.color_fix == "wavelet":
            sr_frames = wavelet(sr_frames[..., :height, :width], frames[: sr_frames.shape[2]])
        out_size = len(strip.out_rows), self.out_size[1]
        return made_smaller(sr_frames[:, :, :count, :height, :width], out_size)

    def _joined(self, parts: Iterable[Tensor], count: int) -> Tensor:
        """Return the strips' `count` frames as whole ones, in float32."""
        shape = (1, 3, count, *self.out_size)
        whole = torch.zeros(shape, dtype=torch.float32, device=self.model.device)
        for index, part in enumerate(parts):
            rows = self.strips[index].out_rows
            whole[..., rows.start : rows.stop, :] += part * self._share(index)
        return whole

    def _share(self, index: int) -> Tensor:
        """Return how much of each output row [rows, 1] a strip gives: less towards its neighbours' middle."""
        own = self.strips[index].out_rows
        share = np.ones(len(own), np.float32)
        if index:
            shared = self.strips[index - 1].out_rows.stop - own.start
            share[:shared] = (np.arange(shared) + 0.5) / shared
        if index + 1 < len(self.strips):
            shared = own.stop - self.strips[index + 1].out_rows.start
            share[-shared:] = 1 - (np.arange(shared) + 0.5) / shared
        return torch.from_numpy(share)[:, None].to(self.model.device)
