"""`recavsr batch`: many files over a Ray cluster, of this machine or of many."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from recavsr.cli import options, upscale
from recavsr.cli.console import Console, FrameProgress
from recavsr.cli.models import resolve

if TYPE_CHECKING:
    from recavsr.cluster.batch import BatchNote


def command(
    inputs: Annotated[
        list[str], typer.Argument(metavar="IN...", help="Videos, pictures, folders, patterns like 'a/*.mov'.")
    ],
    output: Annotated[str, typer.Option("--output", "-o", help="The folder for the results.")],
    address: Annotated[
        str | None,
        typer.Option(help="Of a running Ray cluster, e.g. auto or 10.0.0.1:6379. Left out: this machine."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="How many files at once; by the cluster's GPUs or cores.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads of each worker.")] = None,
    **settings: Any,
) -> int:
    """Upscale many files on many processes or machines; long ones are shared out shot by shot."""
    options.check_names(*inputs, output)
    console = Console(settings.pop("json_lines"))
    quality = settings["quality"]
    settings["model"] = resolve(settings["model"])
    settings["quality"] = int(quality) if quality is not None and quality.isdecimal() else quality

    def say_file(result: Any) -> None:
        upscale.say_file(console, result)

    if settings.pop("dry_run"):
        from recavsr.stream.batch import upscale_many

        del settings["resume"]
        report = upscale_many(inputs, output, dry_run=True, on_file=say_file, **settings)
        return upscale.say_batch(console, output, report)

    from recavsr.cluster.batch import run_batch

    shown: list[FrameProgress] = []

    def say_frames(frames: int, total: int) -> None:
        if not shown:
            shown.append(console.progress(total or None))
        shown[0].update(frames)

    try:
        report = run_batch(
            inputs,
            output,
            address=address,
            workers=workers,
            threads=threads,
            on_file=say_file,
            on_note=lambda note: _say_note(console, note),
            on_frames=say_frames,
            **settings,
        )
    finally:
        for progress in shown:
            progress.close()
    return upscale.say_batch(console, output, report)


def _say_note(console: Console, note: BatchNote) -> None:
    from recavsr.cluster.batch import Shared
    from recavsr.cluster.dispatch import ATTEMPTS, Retried

    if isinstance(note, Shared):
        job, status = note.job, "shared"
        text = f"shared out: {job.source}, {len(note.shots.starts)} shots in {len(note.shots.runs)} runs"
    elif isinstance(note, Retried):
        job, status = note.task.job, "retried"
        text = f"retried: {note.task}: {note.place} was lost; attempt {note.attempt} of {ATTEMPTS}"
    else:
        job, status, text = note.task.job, "started", f"started: {note.task} ({note.place})"
    console.event(text, event="file", source=job.source, output=job.output, status=status, reason=text)


def _with_options_of_upscale() -> None:
    """Give the command the options of `recavsr upscale` behind its own, whichever they are."""
    own = inspect.signature(command).parameters
    theirs = inspect.signature(upscale.command).parameters
    known = [own[name] for name in own if name != "settings"]
    known += [theirs[name] for name in theirs if name not in ("context", "source", *own)]
    hints = get_type_hints(upscale.command, include_extras=True) | get_type_hints(
        command, include_extras=True
    )
    command.__annotations__ = {parameter.name: hints[parameter.name] for parameter in known}
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [parameter.replace(annotation=hints[parameter.name]) for parameter in known]
    )


_with_options_of_upscale()
