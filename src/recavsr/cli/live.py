"""`recavsr live`: a camera, stream or pipe, upscaled while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from recavsr.cli import options
from recavsr.cli.console import Console, plain_seconds
from recavsr.cli.models import resolve
from recavsr.errors import InputError

if TYPE_CHECKING:
    from recavsr.stream.live import LiveEvent, LiveReport


def command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="IN",
            help="camera, /dev/video0, avfoundation:0, dshow:NAME; a URL (rtmp, rtsp, srt, udp, tcp, http); "
            "- (y4m, MPEG-TS, ...); a file, in real time.",
        ),
    ],
    output: Annotated[
        str,
        typer.Argument(metavar="OUT", help="A URL (rtmp, srt, udp, tcp), a .m3u8 playlist, a file, - (y4m)."),
    ],
    model: options.Model = "nano",
    scale: Annotated[float | None, typer.Option(help="Enlarge by this much; 4 if no size is given.")] = None,
    size: Annotated[str | None, typer.Option(help="Output size as WIDTHxHEIGHT, e.g. 1920x1080.")] = None,
    fit: Annotated[
        str | None, typer.Option(help="Largest size of the input's shape inside WIDTHxHEIGHT.")
    ] = None,
    height: Annotated[int | None, typer.Option(help="Output height; the width follows.")] = None,
    width: Annotated[int | None, typer.Option(help="Output width; the height follows.")] = None,
    late: Annotated[
        str | None,
        typer.Option(
            help="Where the model is slower than the source: drop, wait, lower. "
            "Left out: pipes and files wait, else frames are dropped."
        ),
    ] = None,
    first_block: Annotated[
        int, typer.Option(help="Latents of a shot's first block, 1 to 6: 1, 5, 9, 13, 17 or 21 frames.")
    ] = 2,
    sound: Annotated[
        str, typer.Option(help="copy (encoded only where the output can't carry it), encode, none.")
    ] = "copy",
    reconnect: Annotated[
        float, typer.Option(help="Try for so many seconds to come back to a lost source or output.")
    ] = 60.0,
    timeout: Annotated[float, typer.Option(help="So many seconds without data are a drop-out.")] = 5.0,
    listen: Annotated[
        bool, typer.Option("--listen", help="Wait for the source to connect to us (rtmp, rtsp, tcp, srt).")
    ] = False,
    input_option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for FFmpeg's device or demuxer; may be repeated.")
    ] = None,
    output_option: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for FFmpeg's muxer; may be repeated.")
    ] = None,
    deinterlace: Annotated[
        bool, typer.Option("--deinterlace", help="Make full frames of an interlaced video first.")
    ] = False,
    color_fix: Annotated[
        str, typer.Option(help="Hold the output's colours to the input's: none, wavelet, adain.")
    ] = "none",
    cuts: Annotated[str, typer.Option(help="Start afresh at scene cuts: auto or off.")] = "auto",
    codec: Annotated[str | None, typer.Option(help="h264, hevc, and what the file can hold.")] = None,
    quality: Annotated[
        str | None, typer.Option(help="0 (best) to 51, the same for every codec; or lossless.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help="The encoder's preset, e.g. ultrafast.")] = None,
    bitrate: Annotated[str | None, typer.Option(help="At most so many bits a second, e.g. 6M.")] = None,
    direct: options.Direct = False,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    memory: Annotated[
        str | None, typer.Option(help="Use at most so much of the device's memory, e.g. 8GB.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the noise.")] = 42,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing output.")] = False,
    report_every: Annotated[float, typer.Option(help="Say the latency every so many seconds.")] = 5.0,
    json_lines: options.JsonLines = False,
) -> int:
    """Upscale a live source until it ends or Ctrl-C: low latency, sound in step, drop-outs survived."""
    options.check_names(source, output)
    rate = None if bitrate is None else _bits(bitrate)
    settings: dict[str, Any] = {
        "input_options": _pairs(input_option, "--input-option"),
        "output_options": _pairs(output_option, "--output-option"),
    }

    from recavsr.stream.live import live

    console = Console(json_lines)
    told = json_lines

    def show(event: LiveEvent) -> None:
        nonlocal told
        if not told:  # not before a refusal, which comes without an event
            told = True
            console.say("Ctrl-C ends it")
        facts = event.facts or {"text": event.text}
        console.event(event.text, event=event.kind, **facts)

    report = live(
        source,
        output,
        model=resolve(model),
        scale=scale,
        size=size,
        fit=fit,
        height=height,
        width=width,
        late=late,  # type: ignore[arg-type]
        first_block=first_block,
        sound=sound,  # type: ignore[arg-type]
        reconnect=reconnect,
        timeout=timeout,
        listen=listen,
        seed=seed,
        color_fix=color_fix,  # type: ignore[arg-type]
        cuts=cuts,  # type: ignore[arg-type]
        deinterlace=deinterlace,
        codec=codec,
        quality=int(quality) if quality is not None and quality.isdecimal() else quality,
        preset=preset,
        direct=direct,
        bitrate=rate,
        overwrite=overwrite,
        device=device,
        precision=precision,
        memory=memory,
        report_every=report_every,
        on_event=show,
        **settings,
    )
    console.result(_summary(report), **_facts(report))
    return report.exit_code


def _pairs(given: list[str] | None, option: str) -> dict[str, str]:
    """Return KEY=VALUE texts as a dictionary."""
    pairs = {}
    for text in given or ():
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise InputError(f"{option} must be KEY=VALUE, not {text!r}")
        pairs[key] = value
    return pairs


def _bits(text: str) -> int:
    """Return bits a second from "6000000", "6000k" or "6M"."""
    factor = {"k": 1_000, "m": 1_000_000}.get(text[-1:].lower(), 1)
    try:
        bits = int(float(text[:-1] if factor > 1 else text) * factor)
    except (ValueError, OverflowError):
        bits = 0
    if bits < 1000:
        raise InputError(f"--bitrate is bits a second like 6M or 800k, not {text!r}")
    return bits


def _summary(report: LiveReport) -> str:
    latency = report.latency.facts()
    height, width = report.out_size
    lost = [f"{report.dropped} dropped"]
    if report.undelivered:
        lost.append(f"{report.undelivered} not delivered")
    return (
        f"{report.output}: {report.frames} frames of {width}x{height} in {plain_seconds(report.seconds)}, "
        f"{', '.join(lost)}, {report.dropouts} drop-outs; "
        f"latency p50 {latency['p50_ms']:.0f}, p95 {latency['p95_ms']:.0f}, max {latency['max_ms']:.0f} ms"
    )


def _facts(report: LiveReport) -> dict[str, Any]:
    return {
        "source": report.source,
        "output": report.output,
        "model": report.model,
        "output_size": list(report.out_size),
        "seconds": round(report.seconds, 3),
        "frames": report.frames,
        "dropped": report.dropped,
        "undelivered": report.undelivered,
        "dropouts": report.dropouts,
        **report.latency.facts(),
        "cut_short": report.cut_short,
    }
