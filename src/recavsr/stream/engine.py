"""The main job: `upscale` one video, picture or picture sequence from file to file."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from recavsr.errors import InputError
from recavsr.stream.color_fix import ColorFix, check_color_fix
from recavsr.stream.cuts import EditList
from recavsr.stream.drift import Drift
from recavsr.stream.estimate import Estimate, detour, estimate
from recavsr.stream.load import load
from recavsr.stream.pipeline import Hooks, Mark, Timing, run_pipeline
from recavsr.stream.plan import Plan, SizeRequest, make_plan
from recavsr.stream.resume import Work, input_identity
from recavsr.stream.session import Session
from recavsr.stream.step import BlockModel
from recavsr.video.frames import Stamp
from recavsr.video.reader import Reader, Trim, open_reader
from recavsr.video.writer import VideoWriter

FEW_THREADS = 4
"""With so few threads a model waits while its block is encoded by as many: with two, 5 % of a run.

Pictures are written by one thread; waiting for that would cost 11 %, and the more the more cores there are.
"""


@dataclass(frozen=True)
class Options:
    """What decides, with the model, what becomes of a source: see `upscale`."""

    scale: float | None = None
    size: tuple[int, int] | str | None = None
    fit: tuple[int, int] | str | None = None
    height: int | None = None
    width: int | None = None
    seed: int = 42
    start: float | str | None = None
    duration: float | str | None = None
    frames: int | None = None
    deinterlace: bool = False
    color_fix: ColorFix = "none"
    cuts: str | os.PathLike[str] = "auto"
    codec: str | None = None
    quality: int | str | None = None
    preset: str | None = None
    encoder: Literal["software", "hardware"] = "software"
    direct: bool = False


@dataclass(frozen=True)
class Run:
    """A source opened for reading, and the plan for it."""

    options: Options
    reader: Reader
    plan: Plan
    trim: Trim
    edit_list: EditList | None

    def session(self, model: BlockModel) -> Session:
        """Return a fresh session of the run's frames."""
        return Session(
            model,
            lr_size=self.plan.lr_size,
            out_size=self.plan.out_size,
            seed=self.options.seed,
            color_fix=self.options.color_fix,
            detect_cuts=self.options.cuts == "auto",
            direct=self.options.direct,
        )

    def starts_shot(self, stamp: Stamp) -> bool:
        """Say whether the edit list, if there is one, has a cut before the next frame of the source."""
        return self.edit_list is not None and self.edit_list.starts_shot(
            stamp, self.reader.shift + self.reader.info.origin
        )

    def unused_cuts(self) -> list[str]:
        """Return a line if the edit list, of a source that was read to its end, names places behind it."""
        if self.edit_list is None or not self.trim.whole or not self.edit_list.beyond():
            return []
        count, path = self.edit_list.beyond(), self.edit_list.path
        lie = "lies" if count == 1 else "lie"
        return [f"{count} of the cuts in {path} {lie} behind the last frame; is it the list of this video?"]

    def facts(self, model: BlockModel | None) -> dict[str, Any]:
        """Return all that decides what the output holds, by its name for the user; no model: all but that."""
        options, trim = self.options, self.trim
        return {
            "input": input_identity(self.reader.source) if self.plan.resumable else None,
            **_model_fact(model),
            "options": {"start": str(trim.start), "duration": str(trim.duration), "frames": trim.frames},
            "deinterlace": options.deinterlace,
            "seed": options.seed,
            "color_fix": options.color_fix,
            "direct": options.direct,
            "cuts": str(options.cuts) if self.edit_list is None else self.edit_list.entries(),
            **self.plan.facts(),
        }


def checked(options: Options) -> tuple[SizeRequest, Trim]:
    """Return the wanted size and part; InputError where an option can't be right for any source."""
    request = SizeRequest(options.scale, options.size, options.height, options.width, options.fit)
    request.resolve((64, 64))
    check_color_fix(options.color_fix)
    if options.encoder not in ("software", "hardware"):
        raise InputError(f"encoder is software or hardware, not {options.encoder}")
    if not isinstance(options.seed, int) or options.seed < 0:
        raise InputError(f"seed must be a whole number from 0 on, not {options.seed!r}")
    return request, Trim.parse(options.start, options.duration, options.frames)


@contextmanager
def open_run(
    source: str | os.PathLike[str], output: str | os.PathLike[str] | None, options: Options
) -> Iterator[Run]:
    """Open a source and plan its run; InputError (one line) where source, output or options won't do."""
    request, trim = checked(options)
    edit_list = _edit_list(options.cuts, trim)
    with open_reader(source, trim, deinterlace=options.deinterlace) as reader:
        plan = make_plan(
            reader,
            output,
            request,
            trim,
            codec=options.codec,
            quality=options.quality,
            preset=options.preset,
            encoder=options.encoder,
            deinterlace=options.deinterlace,
        )
        yield Run(options, reader, plan, trim, edit_list)


@dataclass(frozen=True)
class Progress:
    """Where a run stands; given to the `progress` callback from the calling thread after every block."""

    stage: Literal["loading", "upscaling", "done", "kept"]  # kept: it failed, but can be resumed from here
    frames: int
    total: int | None
    rate: float  # frames a second so far
    eta: float | None  # seconds left, None if unknown
    note: str | None = None  # something to tell the user, while loading


@dataclass(frozen=True)
class UpscaleReport:
    """What a run did. Sizes are (height, width); the three stage times overlap within `seconds`."""

    source: str
    output: str
    plan: Plan
    model: str
    frames: int
    resumed_at: int  # frames that an earlier, interrupted run had finished
    lr_size: tuple[int, int]
    out_size: tuple[int, int]
    seconds: float
    decode_seconds: float
    model_seconds: float
    encode_seconds: float
    starved: float  # share of the model's time in which it waited for frames or for room, 0 to 1
    drift: Drift  # of the mean colour against the LR frames, in 8-bit levels
    cuts: tuple[int, ...]  # frames that start a new shot, counted from 0 in the output
    warnings: tuple[str, ...]
    cut_short: str | None
    dry_run: bool
    estimate: Estimate | None = None  # of a dry run

    @property
    def truncated(self) -> bool:
        """Return whether the source broke off or was damaged; the output holds what could be decoded."""
        return self.cut_short is not None

    @property
    def fps(self) -> float:
        """Return frames a second over this whole run, input and output included."""
        return (self.frames - self.resumed_at) / self.seconds if self.seconds > 0 else 0.0

    @property
    def exit_code(self) -> int:
        """Return 0, or 1 if the result is partial."""
        return 1 if self.truncated else 0


def upscale(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    model: str | os.PathLike[str] | BlockModel = "nano",
    scale: float | None = None,
    size: tuple[int, int] | str | None = None,
    fit: tuple[int, int] | str | None = None,
    height: int | None = None,
    width: int | None = None,
    seed: int = 42,
    start: float | str | None = None,
    duration: float | str | None = None,
    frames: int | None = None,
    deinterlace: bool = False,
    color_fix: ColorFix = "none",
    cuts: str | os.PathLike[str] = "auto",
    codec: str | None = None,
    quality: int | str | None = None,
    preset: str | None = None,
    encoder: Literal["software", "hardware"] = "software",
    direct: bool = False,
    overwrite: bool = False,
    resume: bool = False,
    progress: Callable[[Progress], None] | None = None,
    dry_run: bool = False,
    device: str = "auto",
    precision: str = "auto",
    memory: int | str | None = None,
) -> UpscaleReport:
    """Upscale `source` into `output`: every frame once, at its own time, at exactly the asked size.

    source: video file, picture, folder or pattern of pictures, "-" (y4m on standard input) or URL.
    output: video file (.mp4 .mkv .mov .webm .y4m), "-" (y4m on standard output), a folder or pattern
        (frame_%05d.png) of pictures, a picture for a picture; None: a name beside the source.
    model: a name, a model folder, or a loaded BlockModel.
    scale, size, fit, height, width: at most one; scale (default 4) gives floor(side x scale + 0.5) for each
        side, size is (width, height) or "1920x1080"; fit is a box, given like a size, that holds the output;
        a height or width alone keeps the shape, as fit does.
    seed: of the noise; the same seed gives the same frames.
    start, duration: seconds or timecodes ("1:30.5"); frames: at most so many frames.
    deinterlace: make full frames of an interlaced source first (bwdif), as many as it has.
    color_fix: hold the colours of the output to the input's: "wavelet" (those of large areas), "adain" (mean
        and contrast of each frame), or "none".
    cuts: where the model starts afresh, as with a new video: "auto" (at the scene cuts that it finds),
        "off", or an edit list (a text file with a frame number or a time a line; see `stream.cuts.EditList`).
    codec, quality, preset: of the video encoder. quality is a number from 0 (best) to 51 with one meaning for
        all codecs (17 is the default), or "lossless". encoder: "hardware" takes a graphics card's where one
        opens; `codec` may also name one, like "h264_nvenc", which is refused where it does not open.
    direct: make an output that is smaller than the model's native scale (nano: x4) asks for at its own size:
        faster, and worse. Otherwise frames are made at that scale and then made smaller.
    overwrite: replace an existing output. resume: where an earlier run of this output was interrupted, go on
        behind the frames that it finished; the result has the same frames as one run in one piece.
    device: "auto" (a CUDA card if there is one), "cpu", "cuda:1"; "cuda:0,cuda:1" share the stream.
    precision: "auto" (bfloat16 where the device computes in it), "fp32", "bf16" or "fp8".
    memory: at most so much of the device's memory ("8GB"): layers that do not fit travel from main memory.
    progress: called with a Progress after every block. dry_run: only plan and estimate; nothing is written,
        and what would be refused is refused.

    Sound, subtitles, chapters and metadata are copied; what the output can't hold is named in `warnings`.
    The output gets its name only when it is complete. A source that breaks off gives what could be
    decoded and a report with `truncated` set.

    Raises InputError (one line) for bad input, options or output; nothing is left under the output's name.
    """
    options = Options(
        scale, size, fit, height, width, seed, start, duration, frames,
        deinterlace, color_fix, cuts, codec, quality, preset, encoder, direct,
    )  # fmt: skip
    began = time.perf_counter()
    with open_run(source, output, options) as run:
        plan, reader = run.plan, run.reader
        if resume and not plan.resumable and not reader.info.still:
            raise InputError("only a file that is made from files can be resumed, not a pipe, a URL or y4m")
        work = Work(Path(plan.output) if plan.resumable else None)
        watch = _Watch(plan.frames, progress)
        with work, plan.writer(reader, overwrite=overwrite, folder=work.folder) as writer:
            settings: dict[str, Any] = {"device": device, "precision": precision, "memory": memory}
            if dry_run:
                guess, small = estimate(plan, reader.info, model, quality=quality, direct=direct, **settings)
                work.check(run.facts(small), resume=resume, overwrite=overwrite)
                name = str(model) if small is None else small.name
                return _report(plan, reader, name, Timing(), 0.0, guess=guess)
            watch.say("loading", 0)
            sizes = plan.sizes(direct=direct)
            block_model, notes = _loaded(model, **sizes, tell=watch.tell, **settings)
            work.begin(run.facts(block_model), resume=resume, overwrite=overwrite)
            session = work.session(block_model) or run.session(block_model)
            line = detour(plan.lr_size, plan.out_size, block_model.native_scale, direct=direct)
            if line is not None:
                watch.tell(line)
            reader.passed, reader.keep_alpha = work.frames, plan.keeps_alpha
            writer.resume(work.log_size)

            def on_mark(mark: Mark) -> None:
                if mark.session is not None:
                    work.save(mark.session, mark.frames, writer)

            watch.begin(work.frames)
            marks = on_mark if plan.resumable else None
            beside = block_model.device.type == "cpu"
            hooks = Hooks(
                watch.frames,
                run.starts_shot,
                marks,
                lambda: work.due,
                writing_gives_way=beside,
                writes_between_blocks=beside
                and torch.get_num_threads() <= FEW_THREADS
                and isinstance(writer, VideoWriter),
            )
            try:
                timing = run_pipeline(reader, session, writer, hooks)
            except BaseException:
                if work.kept:
                    watch.say("kept", work.kept)
                raise
            work.finish()
            notes += run.unused_cuts()
            watch.say("done", timing.frames_passed + timing.frames_written)
            seconds = time.perf_counter() - began
            return _report(
                plan,
                reader,
                block_model.name,
                timing,
                seconds,
                cuts=session.cuts,
                drift=session.drift,
                warnings=[*notes, *writer.warnings],
            )


def _model_fact(model: BlockModel | None) -> dict[str, Any]:
    return {} if model is None else {"model": f"{model.name} {model.fingerprint} on {model.device.type}"}


def _edit_list(cuts: str | os.PathLike[str], trim: Trim) -> EditList | None:
    if cuts in ("auto", "off"):
        return None
    edit_list = EditList(cuts)
    if edit_list.frames and trim.start is not None:
        raise InputError(
            f"{edit_list.path}: frame numbers count from the source's first frame; with a start, give times"
        )
    return edit_list


def _loaded(model: str | os.PathLike[str] | BlockModel, **settings: Any) -> tuple[BlockModel, list[str]]:
    """Return the model, and what its loading warned of."""
    if not isinstance(model, (str, os.PathLike)):
        return model, []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        loaded = load(os.fspath(model), **settings)
    return loaded, [str(warning.message) for warning in caught if warning.category is UserWarning]


class _Watch:
    """Turns timing into Progress events."""

    def __init__(self, total: int | None, callback: Callable[[Progress], None] | None) -> None:
        self._total = total
        self._callback = callback
        self._began = time.perf_counter()
        self._passed = 0

    def begin(self, passed: int) -> None:
        self._began, self._passed = time.perf_counter(), passed

    def frames(self, timing: Timing) -> None:
        self.say("upscaling", timing.frames_passed + timing.frames_written)

    def tell(self, note: str) -> None:
        if self._callback is not None:
            self._callback(Progress("loading", 0, self._total, 0.0, None, note))

    def say(self, stage: Literal["loading", "upscaling", "done", "kept"], frames: int) -> None:
        if self._callback is None:
            return
        elapsed = time.perf_counter() - self._began
        rate = max(0, frames - self._passed) / elapsed if elapsed > 0 else 0.0
        left = None if self._total is None or not rate else max(0, self._total - frames) / rate
        total = frames if stage == "done" else self._total
        self._callback(Progress(stage, frames, total, rate, 0.0 if stage == "done" else left))


def _report(
    plan: Plan,
    reader: Reader,
    model: str,
    timing: Timing,
    seconds: float,
    *,
    cuts: Sequence[int] = (),
    drift: Drift = Drift(),  # noqa: B008
    warnings: Sequence[str] = (),
    guess: Estimate | None = None,
) -> UpscaleReport:
    all_warnings = dict.fromkeys([*plan.warnings, *reader.warnings, *warnings])
    return UpscaleReport(
        source=plan.source,
        output=plan.output,
        plan=plan,
        model=model,
        frames=timing.frames_passed + timing.frames_written,
        resumed_at=timing.frames_passed,
        lr_size=plan.lr_size,
        out_size=plan.out_size,
        seconds=seconds,
        decode_seconds=timing.decode,
        model_seconds=timing.model,
        encode_seconds=timing.encode,
        starved=timing.starved,
        drift=drift,
        cuts=tuple(cuts),
        warnings=tuple(all_warnings),
        cut_short=reader.cut_short,
        dry_run=guess is not None,
        estimate=guess,
    )
