"""Folders of videos: each file on its own, bad ones listed with a reason, finished ones skipped."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from recavsr.errors import InputError
from recavsr.stream.engine import UpscaleReport, upscale
from recavsr.stream.load import load
from recavsr.stream.step import BlockModel
from recavsr.video.formats import CONTAINERS
from recavsr.video.images import WRITABLE_SUFFIXES
from recavsr.video.source import is_picture, is_video_folder, natural_order

__all__ = ["BatchReport", "FileResult", "FileStatus", "is_video_folder", "upscale_folder"]


class FileStatus(Enum):
    """How one file of a batch ended."""

    DONE = "done"
    PARTIAL = "partial"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True)
class FileResult:
    """One file of a batch: its output, how it ended, why (if not simply done), and its report."""

    source: str
    output: str
    status: FileStatus
    reason: str | None
    report: UpscaleReport | None


@dataclass(frozen=True)
class BatchReport:
    """What a batch did, file by file."""

    files: tuple[FileResult, ...]

    def count(self, status: FileStatus) -> int:
        """Return how many files ended so."""
        return sum(result.status is status for result in self.files)

    @property
    def exit_code(self) -> int:
        """Return 0 if everything is done, 1 if a file failed or is partial."""
        return int(self.count(FileStatus.FAILED) + self.count(FileStatus.PARTIAL) > 0)


def upscale_folder(
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | BlockModel = "nano",
    device: str = "auto",
    precision: str = "auto",
    overwrite: bool = False,
    dry_run: bool = False,
    on_file: Callable[[FileResult], None] | None = None,
    **options: Any,
) -> BatchReport:
    """Upscale every file of `folder` into the folder `output`, under its own name; pictures stay pictures.

    Files whose output exists are skipped (unless `overwrite`); those that fail, for any reason, are listed
    with it, and the rest goes on. `on_file` is called after each file; `options` are those of `upscale`.
    Raises InputError if there is no file, or if the folder or the options can't be used at all.
    """
    sources = _files(Path(folder))
    target = Path(output)
    if target.exists() and not target.is_dir():
        raise InputError(f"{target}: exists and is not a folder")
    if target.exists() and os.path.samefile(folder, target):
        raise InputError(f"{target}: is the source folder itself; choose another one")
    if not dry_run:
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{target}: can't be made ({error.strerror})") from None
        if isinstance(model, (str, os.PathLike)):
            model = load(os.fspath(model), device=device, precision=precision)
    results = []
    for source, name in zip(sources, _output_names(sources), strict=True):
        out = target / name
        if out.exists() and not overwrite:
            result = FileResult(str(source), str(out), FileStatus.SKIPPED, "done already", None)
        else:
            result = _one(source, out, model=model, overwrite=overwrite, dry_run=dry_run, **options)
        results.append(result)
        if on_file is not None:
            on_file(result)
    return BatchReport(tuple(results))


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise InputError(f"{folder}: not a folder")
    files = [path for path in folder.iterdir() if not path.name.startswith(".") and not path.is_dir()]
    if not files:
        raise InputError(f"{folder}: the folder is empty")
    return sorted(files, key=natural_order)


def _output_names(sources: list[Path]) -> list[str]:
    """Return each output's name: the source's, with an ending that can be written; never two alike."""
    names = []
    for source in sources:
        writable = WRITABLE_SUFFIXES if is_picture(source) else tuple(CONTAINERS)
        keep = source.suffix.lower() in writable
        names.append(source.name if keep else f"{source.stem}{'.png' if is_picture(source) else '.mp4'}")
    count = Counter(names)
    return [
        name if count[name] == 1 or name == source.name else f"{source.name}{Path(name).suffix}"
        for source, name in zip(sources, names, strict=True)
    ]


def _one(source: Path, out: Path, **options: Any) -> FileResult:
    try:
        report = upscale(source, out, **options)
    except InputError as error:
        return FileResult(str(source), str(out), FileStatus.FAILED, str(error), None)
    except Exception as error:  # whatever it is: one bad file must not end a night's work
        reason = " ".join(f"{source}: unexpected {type(error).__name__}: {error}".split())
        return FileResult(str(source), str(out), FileStatus.FAILED, reason, None)
    status = FileStatus.PARTIAL if report.truncated else FileStatus.DONE
    return FileResult(str(source), str(out), status, report.cut_short, report)
