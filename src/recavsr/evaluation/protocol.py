"""The held-out protocol: x4 super-resolution of five clips, degraded mildly and heavily, in one table.

    python -m recavsr.evaluation.protocol --model bicubic,animevideov3,span,nano --data DIR -o FILE.json

Truth is the clip itself: its first 45 frames, centre-cropped so that both sides are multiples of 32 and the
short side is at most 720 (a larger clip loses both sides in proportion; nothing is scaled). The LR input is
made from truth with seed 0:

    mild    Gaussian blur 0.8, area x4, noise 1.5, JPEG quality 80
    heavy   Gaussian blur 1.8, bilinear x4, noise 7, JPEG quality 70, H.264 crf 27 at the clip's frame rate

Blur is in truth pixels, noise in LR levels of 0 to 255, independent per pixel, channel and frame; bilinear is
OpenCV's (two taps, no antialiasing). x264 runs with preset medium and without its macroblock tree, whose
result varies from run to run. Beside the moving clips, one still scene a clip (its first frame held)
shows flicker and lines at latent and block borders, which motion would hide.

Even bicubic has lines under heavy: x264 codes frames in groups of four. So that these are not taken for a
model's, a still scene is run four times, begun with its first, second, third and fourth frame; lines
(`still_latent_line`, `still_block_line`) are means over these, flicker and `still_*_border` are of the first
alone. `seconds_per_frame` is the run's own time on whatever the machine was doing; speed is measured
elsewhere.

Our training degradations cover these two; the peers' did not. `report` prints that beside every table.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from recavsr.data.degradation import FIXED_DEGRADATIONS as DEGRADATIONS
from recavsr.data.degradation import FixedDegradation as Degradation
from recavsr.errors import InputError, run_module
from recavsr.evaluation import metrics
from recavsr.evaluation.environment import environment
from recavsr.evaluation.lpips import LPIPS, weights_folder
from recavsr.evaluation.peers import PEERS, SCALE, Frames, Upscaler, find_peer, open_peer
from recavsr.stream.load import load, resolve_device
from recavsr.stream.session import Session
from recavsr.stream.step import BlockModel
from recavsr.video.frames import Frame
from recavsr.video.memory_codec import code_clip
from recavsr.video.output import PendingOutput, write_error
from recavsr.video.reader import Trim, open_reader

# Big Buck Bunny comes in three encodes. A_bbb_stereo is the one used: the largest (1230x704), with motion
# and without a cut in its first 45 frames (A_bbb1080_ffmpegwasm has one).
HELD_OUT = ("A2_sam2demo_08_driving", "A_bbb_stereo", "A_mdn_flower", "B_pexels_4511004", "B_pexels_5927704")
CROP_MULTIPLE = 32
CODEC_GROUP = 4  # frames that x264 codes together: a P-frame and what lies between it and the last
H264 = "libx264, preset medium, one thread, mbtree=0, at the clip's frame rate"


@dataclass(frozen=True)
class Protocol:
    """What is measured of each clip.

    frames: taken from the clip's start; short_side, long_side: largest crop (long_side None: in proportion);
    niqe_every: NIQE on every so many frames (0: never); still_side: side of the still scene's crop (0: none).
    """

    frames: int = 45
    short_side: int = 720
    long_side: int | None = None
    seed: int = 0
    niqe_every: int = 5
    still_side: int = 512


FULL = Protocol()
QUICK = Protocol(frames=29, short_side=320, long_side=320, niqe_every=0, still_side=0)


@dataclass(frozen=True)
class Pair:
    """Truth [N, H, W, 3] and its degraded input [N, H/4, W/4, 3], both uint8 RGB."""

    clip: str
    degradation: str
    truth: Frames
    lr_frames: Frames


# Clips --------------------------------------------------------------------------------------------------


def held_out_clips(data: str | os.PathLike[str]) -> list[Path]:
    """The five held-out clips below `data` (the folder itself or its `test_video`)."""
    folder = Path(data)
    if (folder / "test_video").is_dir():
        folder = folder / "test_video"
    clips = [folder / f"{name}.mp4" for name in HELD_OUT]
    missing = [path.name for path in clips if not path.is_file()]
    if missing:
        raise InputError(f"held-out clips missing in {folder}: {', '.join(missing)}")
    return clips


def choose_clips(clips: Sequence[Path], names: str | None) -> list[Path]:
    """The clips that a comma-separated list names; all where it is None. Raises InputError for others."""
    if not names:
        return list(clips)
    wanted = names.split(",")
    chosen = [clip for clip in clips if clip.stem in wanted]
    if len(chosen) != len(wanted):
        raise InputError(f"--clips must name some of {', '.join(clip.stem for clip in clips)}")
    return chosen


def crop_box(height: int, width: int, protocol: Protocol) -> tuple[int, int, int, int]:
    """Top, left, height and width of the centre crop of a frame of `height` x `width`."""
    shrink = min(1.0, protocol.short_side / min(height, width))
    limit = max(height, width) if protocol.long_side is None else protocol.long_side
    rows, columns = (
        min(math.floor(side * shrink), limit) // CROP_MULTIPLE * CROP_MULTIPLE for side in (height, width)
    )
    if rows == 0 or columns == 0:
        raise InputError(f"a clip of {width}x{height} is smaller than {CROP_MULTIPLE} pixels")
    return (height - rows) // 2, (width - columns) // 2, rows, columns


def read_truth(clip: Path, protocol: Protocol) -> tuple[Frames, Fraction]:
    """The cropped first frames of a clip [N, H, W, 3] uint8 RGB, and its frame rate."""
    with open_reader(clip, Trim(frames=protocol.frames)) as reader:
        frames = [_crop(item.pixels, protocol) for item in reader if isinstance(item, Frame)]
    if len(frames) < protocol.frames:
        raise InputError(f"{clip.name} has {len(frames)} frames, the protocol needs {protocol.frames}")
    if frames[0].dtype != np.uint8:
        raise InputError(f"{clip.name} has more than 8 bits; the protocol measures 8-bit clips")
    return np.stack(frames), reader.info.rate


def _crop(frame: Frames, protocol: Protocol) -> Frames:
    top, left, rows, columns = crop_box(frame.shape[0], frame.shape[1], protocol)
    return frame[top : top + rows, left : left + columns]


# Degradation --------------------------------------------------------------------------------------------


def degrade(truth: Frames, degradation: Degradation, rate: Fraction, seed: int) -> Frames:
    """Make LR frames: truth [N, H, W, 3] uint8, both sides multiples of 8 -> [N, H/4, W/4, 3] uint8."""
    cv2 = opencv()
    generator = np.random.default_rng(seed)
    interpolation = {"area": cv2.INTER_AREA, "bilinear": cv2.INTER_LINEAR}[degradation.resize]
    size = (truth.shape[2] // SCALE, truth.shape[1] // SCALE)
    output = []
    for frame in truth:
        blurred = cv2.GaussianBlur(frame.astype(np.float32), (0, 0), degradation.blur)
        small = cv2.resize(blurred, size, interpolation=interpolation)
        noisy = small + generator.normal(0, degradation.noise, small.shape)
        output.append(_jpeg(cv2, np.rint(noisy).clip(0, 255).astype(np.uint8), degradation.jpeg))
    lr_frames = np.stack(output)
    return lr_frames if degradation.crf is None else _h264(cv2, lr_frames, degradation.crf, rate)


def opencv() -> ModuleType:
    """The cv2 module; raises InputError with the remedy where it is not installed."""
    try:
        import cv2
    except ImportError:
        raise InputError("the held-out protocol needs OpenCV: `pip install opencv-python-headless`") from None
    return cv2


def _jpeg(cv2: ModuleType, frame: Frames, quality: int) -> Frames:
    """Encode and decode one RGB frame as JPEG (4:2:0)."""
    _, data = cv2.imencode(".jpg", frame[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, quality])
    return cv2.imdecode(data, cv2.IMREAD_COLOR)[..., ::-1].copy()


def planes_of(frames: Frames) -> NDArray[np.uint8]:
    """RGB frames [N, H, W, 3] as 4:2:0 planes of BT.601, [N, H*3/2, W]."""
    cv2 = opencv()
    return np.stack([cv2.cvtColor(np.ascontiguousarray(f), cv2.COLOR_RGB2YUV_I420) for f in frames])


def _h264(cv2: ModuleType, frames: Frames, crf: int, rate: Fraction) -> Frames:
    """Encode and decode a clip as `H264` says, BT.601 4:2:0. The frame rate matters to x264's crf."""
    coded = code_clip(planes_of(frames), "libx264", crf=crf, speed="medium", rate=rate)
    return np.stack([cv2.cvtColor(plane, cv2.COLOR_YUV2RGB_I420) for plane in coded])


def make_pair(clip: Path, degradation: Degradation, protocol: Protocol, cache: Path | None = None) -> Pair:
    """Truth and LR input of a clip. LR frames are kept in `cache`, keyed by the clip's content."""
    truth, rate = read_truth(clip, protocol)
    return Pair(
        clip.stem, degradation.name, truth, _cached_lr(truth, degradation, rate, protocol.seed, cache)
    )


def make_still(clip: Path, degradation: Degradation, protocol: Protocol, cache: Path | None = None) -> Pair:
    """A still scene: the centre of the clip's first frame, held for all frames, degraded frame by frame."""
    side = protocol.still_side
    first, rate = read_truth(clip, replace(protocol, frames=1, short_side=side, long_side=side))
    truth = np.repeat(first, protocol.frames, axis=0)
    return Pair(
        clip.stem, degradation.name, truth, _cached_lr(truth, degradation, rate, protocol.seed, cache)
    )


def _cached_lr(
    truth: Frames, degradation: Degradation, rate: Fraction, seed: int, cache: Path | None
) -> Frames:
    if cache is None:
        return degrade(truth, degradation, rate, seed)
    recipe = json.dumps([asdict(degradation), H264, str(rate), seed, truth.shape])
    key = hashlib.sha256(recipe.encode() + np.ascontiguousarray(truth).tobytes()).hexdigest()[:24]
    path = cache / f"lr_{key}.npy"
    if path.is_file():
        return np.load(path)
    lr_frames = degrade(truth, degradation, rate, seed)
    cache.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    with partial.open("wb") as file:
        np.save(file, lr_frames)
    partial.replace(path)
    return lr_frames


# Models -------------------------------------------------------------------------------------------------


def session_upscaler(model: BlockModel, name: str, seed: int = 42) -> Upscaler:
    """A BlockModel as an Upscaler: the whole clip through one streaming session."""

    def run(lr_frames: Frames) -> Frames:
        height, width = lr_frames.shape[1:3]
        session = Session(model, lr_size=(height, width), out_size=(SCALE * height, SCALE * width), seed=seed)
        return np.concatenate([*session.push(lr_frames), *session.flush()])

    return Upscaler(name, run, per_frame=False)


def open_upscaler(name: str, device: str = "cpu", precision: str = "auto") -> Upscaler:
    """Open a peer ("bicubic", "animevideov3", "span") or one of our models by name or folder."""
    if name == "bicubic" or name in PEERS:
        return open_peer(name, device=device)
    return session_upscaler(load(name, device=device, precision=precision), Path(name).name)


# Measuring ----------------------------------------------------------------------------------------------


def measure(output: Frames, pair: Pair, protocol: Protocol, lpips: LPIPS | None) -> dict[str, Any]:
    """All metrics of one output [N, H, W, 3] uint8 against its pair; None where one does not apply."""
    truth = pair.truth
    if output.shape != truth.shape or output.dtype != np.uint8:
        raise ValueError(f"expected uint8 {truth.shape}, the model gave {output.dtype} {output.shape}")
    psnr, td = metrics.psnr(output, truth), metrics.td(output, truth)
    distances = None if lpips is None else lpips_frames(output, truth, lpips)
    flicker = metrics.static_flicker(output, truth)
    first = metrics.FIRST_BLOCK_FRAMES
    niqe = metrics.niqe(output[:: protocol.niqe_every]) if protocol.niqe_every else np.array([np.nan])
    return {
        "psnr": _finite(psnr.mean()),
        "ssim": _finite(metrics.ssim(output, truth).mean()),
        "ssim_rgb": _finite(metrics.ssim(output, truth, "rgb").mean()),
        "lpips": None if distances is None else _finite(distances.mean()),
        "niqe": _finite(niqe.mean()),
        "td": _finite(td.mean()),
        "td_latent_border": metrics.border_excess(td, "latent"),
        "td_block_border": metrics.border_excess(td, "block"),
        "flicker": flicker.change,
        "static_share": flicker.static_share,
        # Of the frames that have blocks before them: what a stream remembers can help no others.
        "later_psnr": _mean(psnr[first:]),
        "later_lpips": None if distances is None else _mean(distances[first:]),
        "later_td": _mean(td[first - 1 :]),
        "later_flicker": metrics.static_flicker(output[first - 1 :], truth[first - 1 :]).change,
    }


def measure_still(output: Frames, *shifted: Frames) -> dict[str, Any]:
    """Flicker of a still scene's output [N, H, W, 3], in 1/255, its excess at borders, and lines there.

    `shifted` are outputs of the same scene begun some frames later: lines are means over all of them.
    """
    change = _changes(output)
    everywhere = [change, *map(_changes, shifted)]

    def line(border: Literal["latent", "block"]) -> float | None:
        found = [metrics.border_line(changes, border) for changes in everywhere]
        return _mean(np.array([value for value in found if value is not None]))

    return {
        "still_flicker": _finite(change.mean()),
        "later_still_flicker": _mean(change[metrics.FIRST_BLOCK_FRAMES - 1 :]),
        "still_latent_border": metrics.border_excess(change, "latent"),
        "still_block_border": metrics.border_excess(change, "block"),
        "still_latent_line": line("latent"),
        "still_block_line": line("block"),
    }


def _changes(output: Frames) -> NDArray[np.float64]:
    """Mean absolute differences [N - 1] of neighbouring frames."""
    return np.array(
        [np.abs(metrics.frame_differences(output[t : t + 2])).mean() for t in range(len(output) - 1)]
    )


def lpips_frames(output: Frames, truth: Frames, lpips: LPIPS) -> NDArray[np.float64]:
    """LPIPS of each frame, [N, H, W, 3] uint8 x 2 -> [N], on the device of `lpips`."""

    def tensor(frame: Frames) -> torch.Tensor:
        image = torch.from_numpy(frame).to(lpips.mean.device)
        return image.permute(2, 0, 1)[None].float() / 127.5 - 1

    with torch.inference_mode():
        return np.array([float(lpips(tensor(a), tensor(b))) for a, b in zip(output, truth)])


def _mean(values: NDArray[np.float64]) -> float | None:
    return _finite(values.mean()) if len(values) else None


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def evaluate(
    upscalers: Sequence[Upscaler],
    clips: Iterable[Path],
    protocol: Protocol = FULL,
    degradations: Sequence[str] = tuple(DEGRADATIONS),
    *,
    lpips: LPIPS | None = None,
    cache: Path | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Run every upscaler on every degraded clip; one row per (model, degradation, clip).

    Raises InputError where two upscalers have one name: their rows could not be told apart.
    """
    names = [upscaler.name for upscaler in upscalers]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"two models are called {twice[0]}: rename one of the folders")
    rows = []
    for clip in clips:
        for name in degradations:
            pair = make_pair(clip, DEGRADATIONS[name], protocol, cache)
            still = make_still(clip, DEGRADATIONS[name], protocol, cache) if protocol.still_side else None
            for upscaler in upscalers:
                started = time.perf_counter()
                output = upscaler.run(pair.lr_frames)
                seconds = time.perf_counter() - started
                row: dict[str, Any] = {"model": upscaler.name, "degradation": name, "clip": pair.clip}
                row |= {"frames": len(output), "height": output.shape[1], "width": output.shape[2]}
                row |= measure(output, pair, protocol, lpips)
                if still is not None:
                    row |= measure_still(*_in_every_phase(upscaler, still.lr_frames))
                row["seconds_per_frame"] = seconds / len(output)
                rows.append(row)
                progress(_line(row))
    return rows


def _in_every_phase(upscaler: Upscaler, lr_frames: Frames) -> list[Frames]:
    """Outputs of a still scene begun with each frame of the codec's first group."""
    if upscaler.per_frame:  # what came before changes nothing
        output = upscaler.run(lr_frames)
        return [output[first:] for first in range(CODEC_GROUP)]
    return [upscaler.run(lr_frames[first:]) for first in range(CODEC_GROUP)]


def _line(row: dict[str, Any]) -> str:
    values = [
        f"{key} {row[key]:.4g}" for key in ("psnr", "ssim", "lpips", "td", "seconds_per_frame") if row[key]
    ]
    return f"{row['model']:14} {row['degradation']:6} {row['clip']:24} " + "  ".join(values)


# Result file --------------------------------------------------------------------------------------------


def peer_versions(names: Iterable[str]) -> dict[str, Any]:
    """For each peer: its package, the version where known, and the sha256 of its weights."""
    found = {}
    for name in names:
        if name in PEERS:
            param, weights = find_peer(name)
            stem = PEERS[name].package
            info = sorted(p for root in param.parents[1:4] for p in root.glob(f"{stem}-*.dist-info"))
            found[name] = {
                "package": PEERS[name].distribution,
                "version": info[0].name.removesuffix(".dist-info").split("-")[-1] if info else None,
                "weights_sha256": hashlib.sha256(weights.read_bytes()).hexdigest(),
            }
    return found


@contextmanager
def result_file(path: Path) -> Iterator[Path]:
    """Yield where to write a result file; it gets its name at the end of the `with` block.

    Raises InputError at once, not after the measuring, where it can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(path.parent, error) from None
    pending = PendingOutput(path, overwrite=True)
    try:
        yield pending.path
        pending.commit()
    finally:
        pending.discard()


def main(argv: Sequence[str] | None = None) -> int:
    """Command line: `python -m recavsr.evaluation.protocol --model A,B --data DIR -o FILE.json`."""
    parser = argparse.ArgumentParser(prog="recavsr.evaluation.protocol", description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="comma-separated: bicubic, animevideov3, span, ours")
    parser.add_argument("--data", required=True, help="folder of the held-out clips")
    parser.add_argument("-o", "--output", required=True, type=Path, help="result file (JSON)")
    parser.add_argument("--degradation", default="mild,heavy", help="comma-separated: mild, heavy")
    parser.add_argument("--clips", help="comma-separated names of some of the clips")
    parser.add_argument("--quick", action="store_true", help="29 frames of 320x320, no NIQE, no still scene")
    parser.add_argument("--no-lpips", action="store_true", help="leave LPIPS out")
    parser.add_argument("--weights", help="folder of the LPIPS weights")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--cache", type=Path, default=weights_folder() / "evaluation")
    options = parser.parse_args(argv)
    with result_file(options.output) as path:
        result = _run(options) | {"command": _command(options)}
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def _command(options: argparse.Namespace) -> str:
    """The command to repeat the run, without this machine's folders."""
    words = ["python", "-m", "recavsr.evaluation.protocol", "--model", options.model, "--data", "DIR"]
    words += ["--degradation", options.degradation, "--device", options.device]
    words += ["--precision", options.precision]
    words += ["--clips", options.clips] if options.clips else []
    words += ["--quick"] if options.quick else []
    words += ["--no-lpips"] if options.no_lpips else []
    return shlex.join([*words, "-o", options.output.name])


def described(
    protocol: Protocol, clips: Sequence[Path], degradations: Sequence[str] = tuple(DEGRADATIONS)
) -> dict[str, Any]:
    """A protocol as result files have it: rows whose descriptions are equal may stand in one table."""
    return {
        **asdict(protocol),
        "scale": SCALE,
        "clips": [clip.stem for clip in clips],
        "degradations": [asdict(DEGRADATIONS[name]) for name in degradations],
        "h264": H264,
        "lpips": "alex v0.1",
        "ssim": "luma; ssim_rgb: mean over channels",
    }


def _run(options: argparse.Namespace) -> dict[str, Any]:
    protocol = QUICK if options.quick else FULL
    names = options.model.split(",")
    degradations = options.degradation.split(",")
    unknown = [name for name in degradations if name not in DEGRADATIONS]
    if unknown:
        raise InputError(f"unknown degradation {unknown[0]!r}; choose of {', '.join(DEGRADATIONS)}")
    clips = choose_clips(held_out_clips(options.data), options.clips)
    device = str(resolve_device(options.device))
    upscalers = [open_upscaler(name, device, options.precision) for name in names]
    lpips = None if options.no_lpips else LPIPS("alex", options.weights).to(device)
    measured_with = environment(device)
    rows = evaluate(
        upscalers,
        clips,
        protocol,
        degradations,
        lpips=lpips,
        cache=options.cache,
        progress=lambda line: print(line, file=sys.stderr, flush=True),
    )
    return {
        "protocol": described(protocol, clips, degradations),
        "environment": measured_with,
        "peers": peer_versions(names),
        "rows": rows,
    }


if __name__ == "__main__":
    run_module(main)
