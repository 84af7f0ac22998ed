"""`recavsr compare`: videos side by side, or one wiped over the other, and scores against a reference."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recavsr.cli import options
from recavsr.cli.console import Console
from recavsr.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from recavsr.video.frames import Frame
    from recavsr.video.reader import Reader

_GAP = 4  # pixels between two pictures
_WIPE_SECONDS = 6.0  # to and fro


def command(
    videos: Annotated[
        list[str], typer.Argument(metavar="A B...", help="Two or more; A gives the times and the sound.")
    ],
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="File or folder. Left out: beside A.")
    ] = None,
    wipe: Annotated[bool, typer.Option("--wipe", help="One picture, B behind A, the border moves.")] = False,
    region: Annotated[
        str | None, typer.Option(help="Only this part of the largest: X,Y,WIDTHxHEIGHT in its pixels.")
    ] = None,
    height: Annotated[
        int | None, typer.Option(min=16, help="Height of each picture; else as the largest.")
    ] = None,
    names: Annotated[str | None, typer.Option(help="Titles, by commas; else the files' names.")] = None,
    reference: Annotated[
        str | None, typer.Option(help="The truth: say PSNR and SSIM of each video against it.")
    ] = None,
    start: Annotated[str | None, typer.Option(help="Begin here: seconds or a timecode like 1:30.5.")] = None,
    duration: Annotated[str | None, typer.Option(help="Do this much: seconds or a timecode.")] = None,
    frames: Annotated[int | None, typer.Option(help="Do at most this many frames.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")] = False,
    json_lines: options.JsonLines = False,
) -> int:
    """Put videos (or pictures) next to one another, each frame beside those shown at the same time.

    Smaller ones are enlarged to the largest (bicubic), so an input can stand beside its upscaled output.
    """
    import numpy as np

    from recavsr.stream.plan import SizeRequest, default_output, make_plan
    from recavsr.video.frames import Frame, Packet, same_depth
    from recavsr.video.reader import Trim, open_reader

    options.check_names(*videos, output, reference)
    console = Console(json_lines)
    if len(videos) < 2:
        raise InputError("name two videos or more: recavsr compare A B")
    if wipe and len(videos) != 2:
        raise InputError(f"a wipe is between two videos, not {len(videos)}")
    titles = [_shown(name) for name in videos] if names is None else names.split(",")
    if len(titles) != len(videos):
        raise InputError(f"--names: {len(titles)} titles for {len(videos)} videos")
    trim = Trim.parse(start, duration, frames)
    rest = replace(trim, frames=None)  # others may have more frames in the same time
    with ExitStack() as stack:
        first = stack.enter_context(open_reader(videos[0], trim))
        tracks = [_Track(stack.enter_context(open_reader(name, rest))) for name in videos[1:]]
        truth = None if reference is None else _Track(stack.enter_context(open_reader(reference, rest)))
        readers = [first, *(track.reader for track in tracks)]
        largest = max((reader.info for reader in readers), key=lambda info: math.prod(info.size))
        if len({reader.info.still for reader in readers}) > 1:
            raise InputError("compare videos with videos, or pictures with pictures")
        crop = _Region.parse(region, largest.size)
        sheet = _Sheet.plan(titles, crop.size, height, wipe=wipe)
        size = SizeRequest(size=sheet.size[::-1])
        made = make_plan(first, output or default_output(first.info, "_compare"), size, trim)
        made = replace(made, sample_aspect=largest.sample_aspect)
        scores = [_Score(title) for title in titles] if truth else []
        with made.writer(first, overwrite=overwrite) as writer, console.progress(made.frames) as progress:
            done = 0
            for item in first:
                if isinstance(item, Packet):
                    writer.copy(item)
                if not isinstance(item, Frame):
                    continue
                middle = (item.stamp.time + item.stamp.end) / 2
                shown = [item.pixels, *(track.at(middle).pixels for track in tracks)]
                if truth:
                    true = same_depth(truth.at(middle).pixels, deep=False)
                    for score, picture in zip(scores, shown):
                        score.add(_resized(same_depth(picture, deep=False), true.shape[:2]), true)
                deep = item.pixels.dtype == np.uint16
                shown = [same_depth(picture, deep=deep) for picture in shown]
                pictures = [crop.of(_resized(picture, largest.size)) for picture in shown]
                pixels = sheet.draw(pictures, float(item.stamp.time))
                writer.write(replace(item, pixels=pixels, alpha=None))
                done += 1
                progress.update(done)
            writer.finish()
        notes = [*first.warnings, *made.lost, *writer.warnings]
        rows, columns = largest.size
        for name, reader in zip(videos, readers):
            if abs(reader.info.size[1] * rows - reader.info.size[0] * columns) > max(rows, columns):
                notes.append(f"{name} has another shape than the largest: it is stretched")
            if reader.info.color_used.transfer != first.info.color_used.transfer:
                notes.append(f"{name} has another transfer curve than {videos[0]}: it is shown by that one")
        notes += [note for track, name in zip(tracks, videos[1:]) if (note := track.note(name, videos[0]))]
    for note in notes:
        console.say(f"note: {note}")
    broken = [(name, reader.cut_short) for name, reader in zip(videos, readers) if reader.cut_short]
    for name, reason in broken:
        console.say(f"done in part: {name}: {reason}")
    for score in scores:
        console.say(score.text)
    console.result(
        f"{made.output}: {done} frames of {sheet.size[1]}x{sheet.size[0]}",
        output=made.output,
        frames=done,
        size=list(sheet.size),
        scores={score.title: score.means for score in scores},
    )
    return int(bool(broken))


def _shown(name: str) -> str:
    return Path(name).stem or name


class _Track:
    """The frames of a video by time: `at` gives the one that is shown at a moment; moments rise."""

    def __init__(self, reader: Reader) -> None:
        from recavsr.video.frames import Frame

        self.reader = reader
        self._frames = (item for item in reader if isinstance(item, Frame))
        self._now = self._next = next(self._frames, None)
        self._missed = Fraction(0)

    def at(self, moment: Fraction) -> Frame:
        while self._next is not None and self._next.stamp.time <= moment:
            self._now, self._next = self._next, next(self._frames, None)
        assert self._now is not None, "a reader gives a frame or refuses the source"
        if self._next is None:
            self._missed = max(self._missed, moment - self._now.stamp.end)
        return self._now

    def note(self, name: str, first: str) -> str | None:
        """Return what is to be said about lengths, after the last frame."""
        assert self._now is not None
        if self._missed > self._now.stamp.end - self._now.stamp.time:
            return f"{name} ends before {first}: its last frame stands for {float(self._missed):.2f} s"
        more = self._next is not None and next(self._frames, None) is not None
        return f"{name} goes on after the end of {first}" if more else None


@dataclass
class _Score:
    """PSNR and SSIM of one video, frame by frame."""

    title: str
    psnr: list[float] = field(default_factory=list)
    ssim: list[float] = field(default_factory=list)

    def add(self, picture: np.ndarray, truth: np.ndarray) -> None:
        from recavsr.evaluation.metrics import psnr, ssim

        self.psnr += psnr(picture[None], truth[None]).tolist()
        self.ssim += ssim(picture[None], truth[None]).tolist()

    @property
    def means(self) -> dict[str, float]:
        count = len(self.psnr)
        return {"psnr": round(sum(self.psnr) / count, 3), "ssim": round(sum(self.ssim) / count, 4)}

    @property
    def text(self) -> str:
        means = self.means
        return f"{self.title}: PSNR {means['psnr']:.2f} dB, SSIM {means['ssim']:.4f}"


@dataclass(frozen=True)
class _Region:
    """A part of a picture: first row and column, rows and columns."""

    top: int
    left: int
    size: tuple[int, int]

    @staticmethod
    def parse(text: str | None, whole: tuple[int, int]) -> _Region:
        if text is None:
            return _Region(0, 0, whole)
        found = re.fullmatch(r"(\d+),(\d+),(\d+)[xX](\d+)", text.replace(" ", ""))
        if not found:
            raise InputError(f"--region must look like 400,200,256x192 (X,Y,WIDTHxHEIGHT), not {text!r}")
        left, top, columns, rows = map(int, found.groups())
        if not rows or not columns or top + rows > whole[0] or left + columns > whole[1]:
            raise InputError(f"--region {text} does not lie inside the picture of {whole[1]}x{whole[0]}")
        return _Region(top, left, (rows, columns))

    def of(self, picture: np.ndarray) -> np.ndarray:
        rows, columns = self.size
        return picture[self.top : self.top + rows, self.left : self.left + columns]


@dataclass(frozen=True)
class _Sheet:
    """How pictures are laid out under their titles; sizes are (rows, columns), the whole's are even."""

    heading: np.ndarray
    cell: tuple[int, int]
    size: tuple[int, int]
    wipe: bool

    @staticmethod
    def plan(titles: Sequence[str], picture: tuple[int, int], height: int | None, *, wipe: bool) -> _Sheet:
        from recavsr.cli.drawing import headings

        rows, columns = picture
        if height is not None:
            rows, columns = height, max(1, round(columns * height / rows))
        width = columns if wipe else len(titles) * (columns + _GAP) - _GAP
        heading = headings(titles, width, min(64, max(20, 2 * (rows // 40))))
        return _Sheet(heading, (rows, columns), _even(len(heading) + rows, width), wipe)

    def draw(self, pictures: Sequence[np.ndarray], seconds: float) -> np.ndarray:
        import numpy as np

        from recavsr.cli.drawing import PAPER
        from recavsr.video.frames import same_depth

        cells = [_resized(picture, self.cell) for picture in pictures]
        deep = cells[0].dtype == np.uint16
        sheet = np.full((*self.size, 3), PAPER * 257 if deep else PAPER, cells[0].dtype)
        top, (rows, columns) = len(self.heading), self.cell
        sheet[:top, : self.heading.shape[1]] = same_depth(self.heading, deep=deep)
        if not self.wipe:
            for number, cell in enumerate(cells):
                left = number * (columns + _GAP)
                sheet[top : top + rows, left : left + columns] = cell
            return sheet
        border = round(columns * (0.5 + 0.45 * math.sin(2 * math.pi * seconds / _WIPE_SECONDS)))
        sheet[top : top + rows, :border] = cells[0][:, :border]
        sheet[top : top + rows, border:columns] = cells[1][:, border:]
        sheet[top : top + rows, max(0, border - 1) : border + 1] = np.iinfo(sheet.dtype).max
        return sheet


def _even(rows: int, columns: int) -> tuple[int, int]:
    return rows + rows % 2, columns + columns % 2


def _resized(picture: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return a picture [H, W, 3] at a size (rows, columns): bicubic, antialiased where it gets smaller."""
    import numpy as np
    import torch
    from torch.nn import functional

    if picture.shape[:2] == size:
        return picture
    values = torch.from_numpy(picture.astype(np.float32)).permute(2, 0, 1)[None]
    values = functional.interpolate(values, size, mode="bicubic", antialias=True, align_corners=False)
    limit = np.iinfo(picture.dtype).max
    return values[0].permute(1, 2, 0).round().clamp(0, limit).numpy().astype(picture.dtype)
