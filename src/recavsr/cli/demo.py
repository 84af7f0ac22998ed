"""`recavsr demo`: draws a street, degrades it, upscales it, shows input, result and truth side by side."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import recavsr
from recavsr.cli import options
from recavsr.cli.console import Console, FrameProgress
from recavsr.cli.models import resolve
from recavsr.errors import InputError

if TYPE_CHECKING:
    import numpy as np

    from recavsr.stream.step import BlockModel

SCALE = 4
# Left, top of the details shown: the bookshop's sign, the cafe's, the wheel and the tree, the taxi.
_DETAILS = ((110, 90), (400, 150), (600, 50), (380, 300))
_DETAIL_WIDTH, _DETAIL_HEIGHT, _DETAIL_ZOOM = 200, 120, 2
_SSIM_STEP = 7  # SSIM is slow and varies little from frame to frame
_BAR = 36


def command(
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for what the demo makes.")] = Path(
        "demo_out"
    ),
    model: options.Model = "nano",
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    frames: Annotated[int, typer.Option(min=2, help="Length of the clip.")] = 29,
    json_lines: options.JsonLines = False,
) -> None:
    """Make a small clip, upscale it, and write before and after side by side. Nothing is downloaded."""
    import numpy as np

    from recavsr.cli.demo_scene import FRAMES_PER_SECOND, HEIGHT, WIDTH
    from recavsr.cli.drawing import headings
    from recavsr.evaluation.metrics import psnr, ssim
    from recavsr.evaluation.peers import bicubic
    from recavsr.video.clips import read_clip, write_clip
    from recavsr.video.images import encode_picture

    console = Console(json_lines)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{output}: no folder can be made there ({error.strerror})") from error

    network = recavsr.load(resolve(model), device=device, precision=precision)
    console.say(f"drawing {frames} frames of {WIDTH}x{HEIGHT}")
    truth = _draw(console, frames)
    console.say("degrading them: blur, a quarter of the size, noise, JPEG, H.264")
    source = output / "demo_input.mp4"
    write_clip(source, _degrade(truth), FRAMES_PER_SECOND, crf=16)
    lr = read_clip(source)

    console.say(f"upscaling {source} with {model}")
    upscaled, seconds = _upscale(console, lr, network)
    before = bicubic(lr)

    shown = Path(model).name
    scores = {
        name: (float(psnr(clip, truth).mean()), float(ssim(clip[::_SSIM_STEP], truth[::_SSIM_STEP]).mean()))
        for name, clip in (("bicubic", before), (shown, upscaled))
    }
    titles = [f"{name}  {db:.2f} dB  SSIM {similar:.3f}" for name, (db, similar) in scores.items()] + [
        "truth"
    ]
    video, picture = output / "demo_before_after.mp4", output / "demo_before_after.png"
    heading = headings(titles, WIDTH * len(titles), _BAR)
    clips = (before, upscaled, truth)
    write_clip(
        video,
        (np.concatenate([heading, np.concatenate(trio, axis=1)]) for trio in zip(*clips)),
        FRAMES_PER_SECOND,
    )
    picture.write_bytes(encode_picture(_details(titles, [clip[frames // 2] for clip in clips]), ".png"))
    for name, (db, similar) in scores.items():
        console.say(f"{name}: PSNR {db:.2f} dB, SSIM {similar:.4f}")
    console.result(
        f"{frames} frames in {seconds:.1f} s ({frames / seconds:.1f} fps); look at {picture} and {video}",
        frames=frames,
        seconds=round(seconds, 2),
        scores={name: {"psnr": round(db, 3), "ssim": round(ss, 4)} for name, (db, ss) in scores.items()},
        picture=str(picture),
        video=str(video),
    )


def _draw(console: Console, frames: int) -> np.ndarray:
    """Return the truth, uint8 [N, HEIGHT, WIDTH, 3]; frames are drawn side by side, one thread each."""
    import numpy as np
    import torch

    from recavsr.cli.demo_scene import Street

    street = Street()
    drawn = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with ThreadPoolExecutor(threads) as pool, console.progress(frames) as progress:
        for frame in pool.map(street.frame, range(frames)):
            drawn.append(frame)
            progress.update(len(drawn))
    torch.set_num_threads(threads)
    return np.stack(drawn)


def _degrade(truth: np.ndarray) -> np.ndarray:
    """Return the frames at a quarter of the size, as a poor camera would give them: uint8 [N, h, w, 3]."""
    import torch

    from recavsr.data.degradation import apply_degradation, fixed_degradation

    clip = torch.from_numpy(truth).permute(0, 3, 1, 2).float() / 255
    degraded = apply_degradation(clip, fixed_degradation("mild", len(truth), SCALE))
    return degraded.permute(0, 2, 3, 1).contiguous().numpy()


def _upscale(console: Console, lr: np.ndarray, network: BlockModel) -> tuple[np.ndarray, float]:
    """Return the upscaled frames and the seconds it took."""
    import numpy as np

    height, width = lr.shape[1:3]
    session = recavsr.Session(network, (height, width), (height * SCALE, width * SCALE))
    done: list[np.ndarray] = []
    started = time.monotonic()
    with console.progress(len(lr)) as progress:
        for block in session.push(lr):
            _keep(done, block, progress)
        for block in session.flush():
            _keep(done, block, progress)
    return np.concatenate(done), time.monotonic() - started


def _keep(done: list[np.ndarray], block: np.ndarray, progress: FrameProgress) -> None:
    done.append(block)
    progress.update(sum(map(len, done)))


def _details(titles: list[str], pictures: list[np.ndarray]) -> np.ndarray:
    """Return one picture with enlarged details, a row each, and a column for each of the pictures."""
    import numpy as np

    from recavsr.cli.drawing import PAPER, headings

    width = _DETAIL_WIDTH * _DETAIL_ZOOM * len(pictures)
    gap = np.full((6, width, 3), PAPER, np.uint8)
    rows = [headings(titles, width, _BAR)]
    for left, top in _DETAILS:
        parts = [p[top : top + _DETAIL_HEIGHT, left : left + _DETAIL_WIDTH] for p in pictures]
        row = np.concatenate(parts, axis=1)
        rows += [row.repeat(_DETAIL_ZOOM, axis=0).repeat(_DETAIL_ZOOM, axis=1), gap]
    return np.concatenate(rows)
