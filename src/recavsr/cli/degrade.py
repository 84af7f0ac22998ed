"""`recavsr degrade`: videos and pictures to their LR versions, with records that make them again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recavsr.cli import options
from recavsr.cli.console import Console
from recavsr.errors import InputError

if TYPE_CHECKING:
    from recavsr.data.degrade_files import DegradeSettings, FileRecord, Targets


def command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="IN",
            help="Video, picture, pattern of pictures (frame_%04d.png), or a folder: each file in it, and "
            "each subfolder of numbered pictures as a clip.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="Video or picture file, or a folder (for folders and --pairs)."),
    ],
    preset: Annotated[
        str,
        typer.Option(
            help="clean, mild, medium, heavy (RealBasicVSR with more shot noise), realbasicvsr, realesrgan; "
            "or the fixed ones of the result tables: test_mild, test_heavy."
        ),
    ] = "medium",
    scale: Annotated[int, typer.Option(min=1, help="How many times smaller the sides get.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Seed; each file draws by seed and its own name.")] = 0,
    sharpen: Annotated[
        float, typer.Option(min=0, help="Sharpen the HQ side first (unsharp mask), e.g. 0.5.")
    ] = 0.0,
    frames: Annotated[int | None, typer.Option(help="Do at most this many frames of each video.")] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="Where the JSON record goes (a folder, for a folder). Left out: beside OUT."),
    ] = None,
    from_record: Annotated[
        Path | None,
        typer.Option(
            help="Do again what this record says (a folder of NAME.json, for a folder); preset, scale, seed "
            "and sharpen are then not used."
        ),
    ] = None,
    pairs: Annotated[
        bool, typer.Option("--pairs", help="Lossless pairs: OUT/LR, OUT/HQ, OUT/records (PNG).")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing outputs.")] = False,
    json_lines: options.JsonLines = False,
) -> int:
    """Degrade: make low-resolution videos and pictures the way training data is made."""
    from recavsr.data.degrade_files import DegradeSettings, FileRecord

    console = Console(json_lines)
    settings = DegradeSettings(preset, scale, seed, sharpen)
    many = source.is_dir()
    if many and from_record is not None and not from_record.is_dir():
        raise InputError(f"{from_record}: for a folder, --from-record names the folder of its records")
    targets = _targets(source, output, record, pairs=pairs)
    failed = 0
    for target in targets:
        try:
            what: DegradeSettings | FileRecord = settings
            if from_record is not None:
                what = FileRecord.load(from_record / target.record.name if many else from_record)
            done = _one(console, target, what, frames, overwrite)
        except InputError as error:
            if not many:
                raise
            failed += 1
            facts = {"source": str(target.source), "output": str(target.lr), "reason": str(error)}
            console.event(f"failed: {error}", event="file", status="failed", **facts)
            continue
        text = f"{target.source} -> {target.lr}"
        facts = {"source": str(target.source), "output": str(target.lr), "record": str(target.record)}
        shown = {"preset": done.degradation.preset, "frames": done.degradation.frames}
        console.event(f"{text} ({shown['preset']}, {shown['frames']} frames)", event="file", **facts, **shown)
    count = len(targets) - failed
    if failed == len(targets):
        raise InputError(f"{source}: none of its {failed} files could be degraded")
    console.result(f"{output}: {count} degraded, {failed} failed", done=count, failed=failed)
    return int(failed > 0)


def _targets(source: Path, output: Path, record: Path | None, *, pairs: bool) -> list[Targets]:
    """Where everything goes, and the folders for it."""
    from dataclasses import replace

    from recavsr.data.degrade_files import Targets, folder_targets, source_targets
    from recavsr.video.source import resolve

    if not source.is_dir():
        resolve(source)  # refuses what is not there before any folder is made
    if source.is_dir() and output.exists() and output.resolve() == source.resolve():
        raise InputError(f"{output}: is the source folder itself; choose another one")
    if source.is_dir() or pairs:
        if output.exists() and not output.is_dir():
            raise InputError(f"{output}: exists and is not a folder")
        if source.is_dir():
            targets = folder_targets(source, output, pairs=pairs)
        else:
            targets = [source_targets(source, output, pairs=pairs)]
        if record is not None and source.is_dir():
            targets = [replace(target, record=record / target.record.name) for target in targets]
        elif record is not None:
            targets = [replace(targets[0], record=record)]
    else:
        targets = [Targets(source, output, record or output.with_name(f"{output.name}.json"))]
    for target in targets:
        if target.record.resolve() in [p.resolve() for p in (target.source, target.lr, target.hq) if p]:
            raise InputError(f"{target.record}: is a source or an output; choose another --record")
    if source.is_dir() or pairs:
        for target in targets:
            for path in filter(None, (target.lr, target.hq, target.record)):
                try:
                    path.parent.mkdir(parents=True, exist_ok=True)
                except OSError as error:
                    raise InputError(f"{path.parent}: can't be made ({error.strerror})") from None
    return targets


def _one(
    console: Console,
    target: Targets,
    what: DegradeSettings | FileRecord,
    frames: int | None,
    overwrite: bool,
) -> FileRecord:
    from recavsr.data.degrade_files import degrade_file
    from recavsr.video.output import PendingOutput

    # Made before the long part, so that a record that can't be written is refused at once.
    pending = PendingOutput(target.record, overwrite=overwrite)
    try:
        with console.progress(None) as shown:
            record = degrade_file(
                target.source,
                target.lr,
                what,
                hq_output=target.hq,
                frames=frames,
                overwrite=overwrite,
                progress=shown.update,
            )
        pending.path.write_text(record.to_json() + "\n", encoding="utf-8")
        pending.commit()
    finally:
        pending.discard()
    return record
