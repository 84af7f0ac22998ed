"""What a stage leaves to look at: a CSV of its losses, TensorBoard events where installed, pictures."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from recavsr.video.images import encode_picture


class CsvLog:
    """Rows of a growing CSV file; a resumed run goes on after the rows up to its step."""

    def __init__(self, path: Path, *, after_step: int) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rows: list[dict[str, str]] = []
        if after_step and path.is_file():
            with path.open(newline="") as file:
                # A row may have been cut off when its run was killed.
                rows = [row for row in csv.DictReader(file) if None not in row.values()]
            self._rows = [row for row in rows if int(row["step"]) <= after_step]
        self._columns = list(self._rows[0]) if self._rows else []
        self._rewrite()

    def write(self, row: Mapping[str, object]) -> None:
        """Add a row, whose `step` is the number of steps done; columns that are new are added."""
        text = {name: str(value) for name, value in row.items()}
        self._rows.append(text)
        new = [name for name in text if name not in self._columns]
        if new:
            self._columns += new
            self._rewrite()
            return
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(text)

    def _rewrite(self) -> None:
        partial = self.path.with_suffix(".part")
        with partial.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns, restval="")
            if self._columns:
                writer.writeheader()
            writer.writerows(self._rows)
        partial.replace(self.path)


class StageLog:
    """Writes losses and pictures of a stage into its folder: `log.csv`, `tensorboard/`, `samples/`."""

    def __init__(self, folder: Path, *, after_step: int) -> None:
        self._samples = folder / "samples"
        self.csv = CsvLog(folder / "log.csv", after_step=after_step)
        self._board = _tensorboard(folder / "tensorboard", after_step)

    def losses(self, step: int, row: Mapping[str, float], **columns: object) -> None:
        """Log named numbers, and `columns` that go into the CSV as they are."""
        self.csv.write({"step": step, **columns, **{name: f"{value:.5g}" for name, value in row.items()}})
        if self._board is not None:
            for name, value in row.items():
                self._board.add_scalar(name, value, step)

    def sample(self, step: int, lr: Tensor, output: Tensor, hq: Tensor) -> None:
        """Write frames [B, 3, F, H, W] in [-1, 1] as a picture: input | output | truth, a row a frame."""
        picture = sample_sheet(lr, output, hq)
        self._samples.mkdir(parents=True, exist_ok=True)
        (self._samples / f"step_{step:08d}.png").write_bytes(encode_picture(picture, ".png"))
        if self._board is not None:
            self._board.add_image("input, output, truth", picture, step, dataformats="HWC")

    def close(self) -> None:
        """Finish the event file."""
        if self._board is not None:
            self._board.close()


def sample_sheet(lr: Tensor, output: Tensor, hq: Tensor, *, clips: int = 2, frames: int = 2) -> np.ndarray:
    """Return a picture uint8 [H', W', 3] of the first clips: input | output | truth, some frames each."""
    rows = []
    for clip in range(min(clips, len(hq))):
        for frame in sorted({round(x) for x in np.linspace(0, hq.shape[2] - 1, frames)}):
            rows.append(np.concatenate([_pixels(x[clip, :, frame]) for x in (lr, output, hq)], axis=1))
    return np.concatenate(rows)


def _pixels(frame: Tensor) -> np.ndarray:
    grey = frame.detach().float().clamp(-1, 1).add(1).mul(127.5).round()
    return grey.byte().permute(1, 2, 0).cpu().numpy()


def _tensorboard(folder: Path, after_step: int) -> Any:
    """Return a TensorBoard writer, or None where TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=after_step + 1 if after_step else None)
