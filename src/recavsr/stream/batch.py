"""Many videos: files, folders, patterns, each file on its own; bad ones are listed, finished ones skipped."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any

from recavsr.errors import InputError
from recavsr.stream.engine import Options, UpscaleReport, checked, upscale
from recavsr.stream.load import load
from recavsr.stream.step import BlockModel
from recavsr.video.formats import CONTAINERS
from recavsr.video.images import WRITABLE_SUFFIXES
from recavsr.video.source import is_picture, is_still, is_video_folder, matches, natural_order, resolve

__all__ = [
    "BatchReport",
    "FileResult",
    "FileStatus",
    "Job",
    "failure",
    "find_jobs",
    "is_many",
    "skipped",
    "upscale_job",
    "upscale_many",
]

# fmt: off
_BESIDE_VIDEOS = frozenset({
    ".ass", ".csv", ".db", ".htm", ".html", ".idx", ".ini", ".json", ".log", ".md", ".nfo", ".pdf", ".srt",
    ".ssa", ".sub", ".txt", ".url", ".vtt", ".xml", ".yaml", ".yml",
})
# fmt: on


class FileStatus(Enum):
    """How one file of a batch ended."""

    DONE = "done"
    PARTIAL = "partial"
    SKIPPED = "skipped"
    FAILED = "failed"
    PLANNED = "planned"  # in a dry run


@dataclass(frozen=True)
class Job:
    """One file of a batch, and what it becomes; `found`: in a folder that was named, not named itself."""

    source: str
    output: str
    found: bool = field(default=False, compare=False)


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


def upscale_many(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    model: str | os.PathLike[str] | BlockModel = "nano",
    device: str = "auto",
    precision: str = "auto",
    memory: int | str | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    on_file: Callable[[FileResult], None] | None = None,
    **options: Any,
) -> BatchReport:
    """Upscale files, folders of files and patterns into the folder `output`, each under its own name.

    Files whose output exists are skipped (unless `overwrite`); those that fail, for any reason, are listed
    with it, and the rest goes on. `on_file` is called after each file; `options` are those of `upscale`.
    Raises InputError if there is no file, or if the output or the options can't be used at all.
    """
    known = {option.name for option in fields(Options)}
    checked(Options(**{name: value for name, value in options.items() if name in known}))
    fresh = not os.path.exists(output)
    jobs = find_jobs(inputs, output)
    if not dry_run and isinstance(model, (str, os.PathLike)):
        model = load(os.fspath(model), device=device, precision=precision, memory=memory)
    results = []
    for job in jobs:
        result = None if overwrite else skipped(job)
        if result is None:
            result = upscale_job(job, model=model, overwrite=overwrite, dry_run=dry_run, **options)
        results.append(result)
        if on_file is not None:
            on_file(result)
    if dry_run and fresh:
        for folder, _, _ in os.walk(output, topdown=False):  # empty ones, to which the plans were held
            with suppress(OSError):  # somebody uses it meanwhile
                os.rmdir(folder)
    return BatchReport(tuple(results))


def upscale_job(job: Job, **options: Any) -> FileResult:
    """Upscale one file of a batch; whatever fails becomes a result with a reason."""
    try:
        report = upscale(job.source, job.output, **options)
    except Exception as error:
        return failure(job, error)
    status = FileStatus.PARTIAL if report.truncated else FileStatus.DONE
    status = FileStatus.PLANNED if report.dry_run else status
    return FileResult(job.source, job.output, status, report.cut_short, report)


def skipped(job: Job) -> FileResult | None:
    """Return the result of a file whose output is there already, or None."""
    if not os.path.exists(job.output):
        return None
    return FileResult(job.source, job.output, FileStatus.SKIPPED, "done already", None)


def failure(job: Job, error: Exception) -> FileResult:
    """Return the result of a file that failed, with the reason in one line that names it.

    What lies beside videos in a folder (notes, subtitles, lists) is skipped instead.
    """
    reason = str(error)
    if not isinstance(error, InputError):  # whatever it is: one bad file must not end a night's work
        reason = " ".join(f"{job.source}: unexpected {type(error).__name__}: {error}".split())
    elif job.found and Path(job.source).suffix.lower() in _BESIDE_VIDEOS:
        reason = reason.removeprefix(f"{job.source}: ")
        return FileResult(job.source, job.output, FileStatus.SKIPPED, reason, None)
    return FileResult(job.source, job.output, FileStatus.FAILED, reason, None)


def is_many(text: str) -> bool:
    """Return whether `text` names several videos: a folder with some, or a pattern like `clips/*.mov`.

    A file of exactly this name is one file. A pattern of pictures alone is a video, as is a folder of them.
    """
    if os.path.lexists(text):
        return is_video_folder(text)
    return any(not is_picture(path) for path in _matches(text))


def find_jobs(
    inputs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
) -> list[Job]:
    """Return the files that `inputs` name, each once, and where in the folder `output` each one goes.

    The folders for them are made. An input is a file, a folder of videos (all its files), a folder of
    pictures (one video), or a pattern; a file of exactly that name comes before a pattern. Files of one name
    from several folders keep their folders, as seen from the one that holds them all. Raises InputError if
    no input is there, or if the output can't be such a folder; no folder is made then.
    """
    named = [inputs] if isinstance(inputs, (str, os.PathLike)) else list(inputs)
    files = [file for name in named for file in _files_of(os.fspath(name))]
    sources = list({os.path.abspath(path): path for path, _ in files}.values())
    in_folders = {path for path, found in files if found}
    if not sources:
        raise InputError("there is no file to upscale: name files, folders or patterns like 'clips/*.mov'")
    missing = [reason for source in sources if (reason := _why_missing(source)) is not None]
    if len(missing) == len(sources):
        more = f" (nor are the other {len(missing) - 1} inputs there)" if missing[1:] else ""
        raise InputError(f"{missing[0]}{more}")
    target = Path(output)
    if target.exists() and not target.is_dir():
        raise InputError(f"{target}: exists and is not a folder")
    if target.exists() and any(p.exists() and os.path.samefile(p, target) for p in _parents(sources)):
        raise InputError(f"{target}: is the source folder itself; choose another one")
    outputs = [target / name for name in _output_names(sources)]
    for folder in _parents([target / "any", *outputs]):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"{folder}: can't be made ({error.strerror})") from None
    return [
        Job(str(source), str(out), source in in_folders) for source, out in zip(sources, outputs, strict=True)
    ]


def _why_missing(source: Path) -> str | None:
    if source.exists():
        return None
    try:
        resolve(source)  # a pattern of numbered pictures has no file of its name either
    except InputError as error:
        return str(error)
    return None


def _parents(paths: Sequence[Path]) -> list[Path]:
    return list(dict.fromkeys(path.parent for path in paths))


def _files_of(name: str) -> list[tuple[Path, bool]]:
    """Return the files that one input names, and which were found in a folder; a missing one as it is."""
    matches = [Path(name)] if os.path.lexists(name) or not glob.has_magic(name) else _matches(name)
    files: list[tuple[Path, bool]] = []
    for path in matches:
        files += [(file, True) for file in _files_in(path)] if is_video_folder(path) else [(path, False)]
    return files or [(Path(name), False)]


def _files_in(folder: Path) -> list[Path]:
    files = [path for path in folder.iterdir() if not path.name.startswith(".") and _is_file(path)]
    return sorted(files, key=natural_order)


def _is_file(path: Path) -> bool:
    """Say whether a name in a folder is that of a file, or of one that is missing behind a link.

    Pipes and sockets lie in folders for others: reading them would wait for somebody, or take what is theirs.
    """
    return path.is_file() or not path.exists()


def _matches(pattern: str) -> list[Path]:
    """Return the files, and the folders of videos, that a pattern finds."""
    return sorted((p for p in matches(pattern) if _is_file(p) or is_video_folder(p)), key=natural_order)


def _output_names(sources: list[Path]) -> list[str]:
    """Return each output's name: the source's, with an ending that can be written; never two alike."""
    in_folders: dict[Path, list[Path]] = {}
    for source in sources:
        in_folders.setdefault(Path(os.path.abspath(source)).parent, []).append(source)
    names = {
        source: name
        for files in in_folders.values()
        for source, name in zip(files, _names_in_folder(files), strict=True)
    }
    root = os.path.commonpath(list(in_folders))
    count = Counter(names.values())
    result = [
        name
        if count[name] == 1
        else os.path.normpath(os.path.join(os.path.relpath(os.path.abspath(source.parent), root), name))
        for source, name in names.items()
    ]
    twice = next((name for name, times in Counter(result).items() if times > 1), None)
    if twice is not None:
        raise InputError(f"two inputs would both become {twice}; rename one of them")
    return result


def _names_in_folder(sources: list[Path]) -> list[str]:
    names = []
    for source in sources:
        still = is_still(source)
        writable = WRITABLE_SUFFIXES if still else tuple(CONTAINERS)
        keep = source.suffix.lower() in writable or source.is_dir()
        names.append(source.name if keep else f"{source.stem}{'.png' if still else '.mp4'}")
    count = Counter(names)
    return [
        name if count[name] == 1 or name == source.name else f"{source.name}{Path(name).suffix}"
        for source, name in zip(sources, names, strict=True)
    ]
