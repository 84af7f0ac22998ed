"""Kill a run at random moments, resume it, and compare: frames, times and sound as in a run in one piece.

    python benchmarks/resume_kills.py [--points 50] [--model nano] [-o benchmarks/results/resume_kills.json]

Each run is a process of its own, forked when the model is loaded: the random moments fall into the work,
not into the start. At each point one run gets SIGKILL, and one more with `resume` goes on to the end.
Checkpoints are made as often as possible.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import random
import tempfile
import time
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from recavsr.stream import pipeline, resume
from recavsr.stream.engine import upscale
from recavsr.stream.load import load

pipeline.MARK_FRAMES, resume.CHECKPOINT_SECONDS = 16, 0.0
_fork = multiprocessing.get_context("fork")


def make_source(path: Path, frames: int) -> None:
    """Write a film with two cuts and a sound track."""
    random_state = np.random.default_rng(0)
    textures = [
        random_state.integers(0, 256, (8, 40, 3), np.uint8).repeat(6, 0).repeat(6, 1) for _ in range(3)
    ]
    with av.open(str(path), "w") as container:
        video = container.add_stream("libx264", rate=25, options={"crf": "20"})
        video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
        sound = container.add_stream("aac", rate=8000)
        for number in range(frames):
            texture = textures[3 * number // frames]
            picture = np.ascontiguousarray(texture[:, number % 100 : number % 100 + 64])
            container.mux(video.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            tone = np.sin(np.arange(320) * 0.3).astype(np.float32)[None]
            samples = av.AudioFrame.from_ndarray(tone, format="fltp", layout="mono")
            samples.sample_rate, samples.pts, samples.time_base = 8000, 320 * number, Fraction(1, 8000)
            container.mux(sound.encode(samples))
        for stream in (video, sound):
            container.mux(stream.encode(None))


def digest(path: Path) -> list[tuple[str, Fraction | None, str]]:
    """Return (stream, time, checksum) of every decoded frame and every sound packet."""
    found: list[tuple[str, Fraction | None, str]] = []
    with av.open(str(path)) as container:
        for packet in container.demux():
            base = packet.time_base
            if packet.stream.type == "audio" and packet.size:
                time_of = None if packet.pts is None else packet.pts * base
                found.append(("sound", time_of, hashlib.sha256(bytes(packet)).hexdigest()))
            elif packet.stream.type == "video":
                for frame in packet.decode():
                    checksum = hashlib.sha256(frame.to_ndarray().tobytes()).hexdigest()
                    found.append(("picture", frame.pts * frame.time_base, checksum))
    return sorted(found, key=lambda entry: (entry[0], entry[1]))


def main() -> None:
    """Run, print each point, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", type=int, default=50)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--frames", type=int, default=150)
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/resume_kills.json"))
    arguments = parser.parse_args()
    model, chance = load(arguments.model, device="cpu"), random.Random(0)

    def run(source: Path, target: Path, answers: multiprocessing.Queue) -> None:
        answers.put(upscale(source, target, model=model, scale=2, resume=True).resumed_at)

    with tempfile.TemporaryDirectory() as folder:
        source, whole, out = (Path(folder) / name for name in ("in.mp4", "whole.mp4", "out.mp4"))
        make_source(source, arguments.frames)
        answers = _fork.Queue()

        def start(target: Path) -> multiprocessing.process.BaseProcess:
            process = _fork.Process(target=run, args=(source, target, answers))
            process.start()
            return process

        began = time.monotonic()
        start(whole).join()
        length = time.monotonic() - began
        wanted = digest(whole)
        assert answers.get() == 0
        assert sum(kind == "picture" for kind, *_ in wanted) == arguments.frames
        points = []
        while len(points) < arguments.points:
            process, after = start(out), chance.uniform(0, length)
            process.join(after)
            if process.exitcode is not None:  # it was quicker than the first one: no point of this list
                answers.get()
                out.unlink()
                continue
            process.kill()
            process.join()
            under_final_name = out.exists()
            partial = under_final_name and digest(out) != wanted
            if under_final_name:
                out.unlink()  # killed between the last rename and its end
            start(out).join()
            point = {
                "killed_after_s": round(after, 2),
                "resumed_at_frame": answers.get(),
                "partial_file_under_the_final_name": partial,
                "identical": digest(out) == wanted,
            }
            points.append(point)
            print(len(points), point, flush=True)
            out.unlink()
        left = sorted(path.name for path in Path(folder).iterdir())
    result = {
        "model": arguments.model,
        "frames": arguments.frames,
        "whole_run_s": round(length, 2),
        "points": len(points),
        "identical": sum(point["identical"] for point in points),
        "partial_files_under_the_final_name": sum(p["partial_file_under_the_final_name"] for p in points),
        "left_in_the_folder": left,
        "every_point": points,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
