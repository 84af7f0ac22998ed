"""`recavsr data`: look at training data, and list folders of it for training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recavsr.cli import options
from recavsr.cli.console import Console
from recavsr.errors import InputError

if TYPE_CHECKING:
    from recavsr.data.quality import Quality

app = typer.Typer(help="Check training data, and list it for training.")


@app.command("check")
def check(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Videos and pictures, at any depth.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write all measures and flags there (JSON).")
    ] = None,
    blur: Annotated[
        float | None, typer.Option(help="Flag as blurred above this: 0 sharp, 1 nothing to see.")
    ] = None,
    block_step: Annotated[
        float | None,
        typer.Option(help="Flag as blocky above this: steps on an 8-pixel grid, in grey levels."),
    ] = None,
    clipped: Annotated[
        float | None, typer.Option(help="Flag above this share of black, or of white, pixels.")
    ] = None,
    side: Annotated[int | None, typer.Option(help="Flag as small below this many pixels.")] = None,
    frames: Annotated[int, typer.Option(min=1, help="Frames measured of each video.")] = 5,
    json_lines: options.JsonLines = False,
) -> int:
    """Measure blur, exposure and compression blocks of HQ material; name what misses a limit.

    Exit code 1 if a file can't be read. Flagged files are for a person to look at: night scenes and flat
    graphics are flagged too.
    """
    from dataclasses import asdict, replace

    from recavsr.data.quality import Limits, check_folder
    from recavsr.video.output import PendingOutput

    console = Console(json_lines)
    wanted = {"blur": blur, "block_step": block_step, "clipped": clipped, "side": side}
    limits = replace(Limits(), **{name: value for name, value in wanted.items() if value is not None})  # type: ignore[arg-type]

    def show(quality: Quality) -> None:
        if quality.flags or json_lines:
            console.event(_line(quality), event="file", **asdict(quality))

    # Made before the long part, so that a report that can't be written is refused at once.
    pending = None if output is None else PendingOutput(output, overwrite=True)
    try:
        report = check_folder(folder, limits=limits, frames=frames, on_file=show)
        if pending is not None:
            pending.path.write_text(report.to_json() + "\n", encoding="utf-8")
            pending.commit()
    finally:
        if pending is not None:
            pending.discard()
    for file, reason in report.unreadable:
        console.event(f"unreadable: {file}: {reason}", event="file", file=file, reason=reason)
    console.result(
        f"{folder}: {len(report.files)} measured, {len(report.flagged)} flagged, "
        f"{len(report.unreadable)} unreadable",
        measured=len(report.files),
        flagged=len(report.flagged),
        unreadable=len(report.unreadable),
        report=None if output is None else str(output),
    )
    return int(bool(report.unreadable))


def _line(quality: Quality) -> str:
    measures = (
        f"blur {quality.blur:.2f}, blocks {quality.block_step:.1f} (x{quality.blockiness:.2f}), "
        f"mean {quality.mean:.2f}, black {quality.black:.0%}, white {quality.white:.0%}, "
        f"{quality.width}x{quality.height}"
    )
    return f"{', '.join(quality.flags) or 'good'}: {quality.file} ({measures})"


@app.command("index")
def index(
    output: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for index.json; training opens it.")],
    videos: Annotated[
        Path | None, typer.Option(help="Folder of videos: files, and folders of numbered pictures.")
    ] = None,
    photos: Annotated[Path | None, typer.Option(help="Folder of photos.")] = None,
    shots: Annotated[
        str, typer.Option(help="How shots are found: builtin, scenedetect, or auto: both, if installed.")
    ] = "auto",
    held_out: Annotated[int, typer.Option(min=0, help="So many videos and photos for validation.")] = 0,
    side: Annotated[int, typer.Option(min=1, help="Leave out what has a side below this.")] = 256,
    quality: Annotated[
        Path | None, typer.Option(help="Report of `recavsr data check`: leave out what it flags.")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that read the files; 0: this one.")] = 0,
    json_lines: options.JsonLines = False,
) -> int:
    """List folders of videos and photos as a training set, cut at shots; nothing is copied."""
    from recavsr.data.folders import SHOT_METHODS, index_folders
    from recavsr.data.pack import PackIndex
    from recavsr.data.quality import QualityReport
    from recavsr.video.output import PendingOutput, write_error

    console = Console(json_lines)
    if shots not in SHOT_METHODS:
        raise InputError(f"--shots is one of {', '.join(SHOT_METHODS)}, not {shots}")
    rejected: frozenset[Path] = frozenset()
    if quality is not None:
        try:
            rejected = QualityReport.from_json(quality.read_text(encoding="utf-8")).rejected
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{quality}: can't be read ({error})") from None
        except InputError as error:
            raise InputError(f"{quality}: {error}") from None

    def skip(path: Path, reason: str) -> None:
        console.event(
            f"not used: {path}: {reason}", event="file", status="skipped", file=str(path), reason=reason
        )

    listed = output / "index.json"
    if listed.is_file() and not all(Path(file).is_absolute() for file in PackIndex.load(output).files):
        raise InputError(f"{output}: is a pack with files of its own; choose another folder for the index")
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(output, error) from None
    # Made before the long part, so that an index that can't be written is refused at once.
    pending = PendingOutput(listed, overwrite=True)
    try:
        made = index_folders(
            videos,
            photos,
            shots=shots,  # type: ignore[arg-type]
            smallest_side=side,
            held_out=held_out,
            leave_out=rejected,
            on_skip=skip,
            workers=workers,
        )
        pending.path.write_text(made.to_json())
        pending.commit()
    finally:
        pending.discard()
    cuts = [count for video in made.videos for _, count in video.shots]
    console.result(
        f"{listed}: {len(made.videos)} videos, {len(cuts)} shots, {sum(cuts)} frames, "
        f"{len(made.photos)} photos",
        output=str(listed),
        videos=len(made.videos),
        shots=len(cuts),
        frames=sum(cuts),
        photos=len(made.photos),
    )
    return 0
