"""`recavsr upscale`: one video, picture or picture sequence, from file to file or through pipes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from recavsr.cli import options
from recavsr.cli.console import Console, FrameProgress, plain_bytes, plain_seconds
from recavsr.cli.models import resolve
from recavsr.errors import InputError

if TYPE_CHECKING:
    from recavsr.stream.batch import BatchReport, FileResult
    from recavsr.stream.engine import Progress, UpscaleReport


def command(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Argument(metavar="IN", help="Video, picture, folder or pattern of either, URL, or - (y4m)."),
    ],
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", help="File, folder, pattern, or - (y4m). Left out: beside the input."),
    ] = None,
    model: options.Model = "nano",
    scale: Annotated[float | None, typer.Option(help="Enlarge by this much; 4 if no size is given.")] = None,
    size: Annotated[str | None, typer.Option(help="Output size as WIDTHxHEIGHT, e.g. 1920x1080.")] = None,
    fit: Annotated[
        str | None, typer.Option(help="Largest size of the input's shape inside WIDTHxHEIGHT.")
    ] = None,
    height: Annotated[int | None, typer.Option(help="Output height; the width follows.")] = None,
    width: Annotated[int | None, typer.Option(help="Output width; the height follows.")] = None,
    start: Annotated[str | None, typer.Option(help="Begin here: seconds or a timecode like 1:30.5.")] = None,
    duration: Annotated[str | None, typer.Option(help="Do this much: seconds or a timecode.")] = None,
    frames: Annotated[int | None, typer.Option(help="Do at most this many frames.")] = None,
    deinterlace: Annotated[
        bool, typer.Option("--deinterlace", help="Make full frames of an interlaced video first.")
    ] = False,
    color_fix: Annotated[
        str, typer.Option(help="Hold the output's colours to the input's: none, wavelet, adain.")
    ] = "none",
    cuts: Annotated[
        str, typer.Option(help="Start afresh at scene cuts: auto, off, or a file of frame numbers or times.")
    ] = "auto",
    codec: Annotated[
        str | None, typer.Option(help="h264, hevc, av1, vp9, ffv1, prores; or an encoder: h264_nvenc.")
    ] = None,
    quality: Annotated[
        str | None,
        typer.Option(help="0 (best) to 51, the same for every codec; 17 if left out; or lossless."),
    ] = None,
    preset: Annotated[str | None, typer.Option(help="The encoder's preset, e.g. slow.")] = None,
    encoder: Annotated[
        str, typer.Option(help="software, or hardware: a graphics card's encoder where there is one.")
    ] = "software",
    direct: options.Direct = False,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    memory: Annotated[
        str | None, typer.Option(help="Use at most so much of the device's memory, e.g. 8GB.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the noise; the same seed gives the same output.")
    ] = 42,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where an interrupted run of this output ended.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done, and stop.")] = False,
    json_lines: options.JsonLines = False,
) -> int:
    """Upscale a video: every frame, at its time, at exactly the size asked for."""
    from recavsr.stream.batch import is_many

    if context.args:
        # Not taken as the output: a pattern of the shell that matches two videos looks the same.
        other = context.args[0]
        raise InputError(
            f"one input at a time, the output follows -o: `recavsr upscale {source} -o {other}`; "
            "many videos are a folder or a quoted pattern (see recavsr upscale --help)"
        )
    options.check_names(source, output)
    console = Console(json_lines)
    settings: dict[str, Any] = {
        "model": resolve(model),
        "scale": scale,
        "size": size,
        "fit": fit,
        "height": height,
        "width": width,
        "seed": seed,
        "start": start,
        "duration": duration,
        "frames": frames,
        "deinterlace": deinterlace,
        "color_fix": color_fix,
        "cuts": cuts,
        "codec": codec,
        "quality": int(quality) if quality is not None and quality.isdecimal() else quality,
        "preset": preset,
        "encoder": encoder,
        "direct": direct,
        "device": device,
        "precision": precision,
        "memory": memory,
        "overwrite": overwrite,
        "resume": resume,
        "dry_run": dry_run,
    }
    if source != "-" and is_many(source):
        return _folder(console, source, output, settings)
    return _file(console, source, output, settings)


def _file(console: Console, source: str, output: str | None, settings: dict[str, Any]) -> int:
    from recavsr.stream.engine import upscale

    with _ProgressDisplay(console, loading=settings["model"]) as show:
        report = upscale(source, output, progress=show, **settings)
    if report.dry_run:
        _say_plan(console, report)
        return 0
    for warning in report.warnings:
        console.say(f"note: {warning}")
    if report.cut_short:
        console.say(f"done in part: {report.source}: {report.cut_short}")
    console.result(_summary(report), **_facts(report))
    return report.exit_code


def _say_plan(console: Console, report: UpscaleReport) -> None:
    """Say the plan and what it will take: a line a fact, or one JSON object."""
    guess = report.estimate
    assert guess is not None
    if console.json_lines:
        seconds = None if guess.seconds is None else round(guess.seconds, 1)
        estimate = asdict(guess) | {"seconds": seconds}
        console.event("", event="plan", model=report.model, **report.plan.json(), estimate=estimate)
        return
    card = guess.device_memory_bytes
    memory = "" if card is None else f"{plain_bytes(card)} on the card, "
    figures = {
        "size": None if guess.output_bytes is None else plain_bytes(guess.output_bytes),
        "time": None if guess.seconds is None else plain_seconds(guess.seconds),
        "memory": f"{memory}{plain_bytes(guess.main_memory_bytes)} of main memory",
    }
    lines = report.plan.lines()
    if guess.detour is not None:
        lines.append(f"note: {guess.detour}")
    for line in lines:
        console.say(line)
    for name, figure in figures.items():
        how = guess.how[name]
        console.say(f"{name}: {how if figure is None else f'about {figure} (estimate: {how})'}")


def _folder(console: Console, source: str, output: str | None, settings: dict[str, Any]) -> int:
    from recavsr.stream.batch import upscale_many

    target = output or f"{_plain_folder(source).resolve()}_upscaled"
    with _ProgressDisplay(console, loading=None) as show:
        report = upscale_many(
            source, target, on_file=lambda result: say_file(console, result), progress=show, **settings
        )
    return say_batch(console, target, report)


def _plain_folder(source: str) -> Path:
    """Return a folder itself, and of a pattern the folder in which it begins."""
    folder = Path(source)
    while not folder.is_dir():
        folder = folder.parent
    return folder


def say_file(console: Console, result: FileResult) -> None:
    """Say how one file of many ended."""
    failed = result.status.value == "failed"  # then the reason names the file itself
    about = [] if failed else [f"{result.source} -> {result.output}"]
    about += [result.reason] if result.reason else []
    console.event(
        ": ".join([result.status.value, *about]),
        event="file",
        source=result.source,
        output=result.output,
        status=result.status.value,
        reason=result.reason,
    )


def say_batch(console: Console, target: str, report: BatchReport) -> int:
    """Say how many files ended how; return the exit code."""
    from recavsr.stream.batch import FileStatus

    counts = {status.value: report.count(status) for status in FileStatus}
    counts = {name: count for name, count in counts.items() if count or name != FileStatus.PLANNED.value}
    text = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    console.result(f"{target}: {text}", output=target, **counts)
    return report.exit_code


class _ProgressDisplay:
    """Takes the engine's progress and shows it, one display a file, from its first block on."""

    def __init__(self, console: Console, loading: str | None) -> None:
        self._console = console
        self._loading = loading
        self._shown: FrameProgress | None = None

    def __call__(self, state: Progress) -> None:
        if state.stage == "loading":
            if state.note:
                self._console.say(state.note)
            elif self._loading:
                self._console.say(f"loading {self._loading}")
            return
        if state.stage == "kept":
            self._close()
            self._console.say(
                f"{state.frames} frames are kept: the same command with --resume goes on from there"
            )
            return
        if self._shown is None:
            self._shown = self._console.progress(state.total)
        self._shown.update(state.frames, state.total, state.rate)
        if state.stage == "done":
            self._close()

    def __enter__(self) -> _ProgressDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        """Say the last count, and give the terminal back."""
        if self._shown is not None:
            self._shown.close()
            self._shown = None


def _summary(report: UpscaleReport) -> str:
    height, width = report.out_size
    shots = f" in {len(report.cuts) + 1} shots" if report.cuts else ""
    return (
        f"{report.output}: {report.frames} frames of {width}x{height}{shots} "
        f"in {plain_seconds(report.seconds)} ({report.fps:.1f} fps); "
        f"colour drift {report.drift.mean:.2f} levels of 255, at most {report.drift.largest:.2f} in a block"
    )


def _facts(report: UpscaleReport) -> dict[str, Any]:
    return {
        "source": report.source,
        "output": report.output,
        "model": report.model,
        "frames": report.frames,
        "resumed_at": report.resumed_at,
        "input_size": list(report.lr_size),
        "output_size": list(report.out_size),
        "seconds": round(report.seconds, 3),
        "fps": round(report.fps, 3),
        "decode_seconds": round(report.decode_seconds, 3),
        "model_seconds": round(report.model_seconds, 3),
        "encode_seconds": round(report.encode_seconds, 3),
        "starved_percent": round(100 * report.starved, 2),
        "color_drift": {
            "mean": round(report.drift.mean, 3),
            "largest": round(report.drift.largest, 3),
            "unit": "8-bit levels",
        },
        "cuts": list(report.cuts),
        "warnings": list(report.warnings),
        "cut_short": report.cut_short,
    }
