"""Kill a run at random moments, resume it, and compare: frames, times and sound as in a run in one piece.

    python benchmarks/resume_kills.py [--points 50] [--model nano] [-o benchmarks/results/resume_kills.json]

The command runs in a process of its own and gets SIGKILL after a random share of the time that a whole run
takes; it is started again with `--resume` until it ends by itself. Checkpoints are made as often as possible.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

RUN = """
import sys
from recavsr.stream import pipeline, resume
from recavsr.stream.engine import upscale
pipeline.MARK_FRAMES, resume.CHECKPOINT_SECONDS = 16, 0.0
report = upscale(sys.argv[1], sys.argv[2], model=sys.argv[3], scale=2, resume=True, device="cpu")
print(report.resumed_at)
"""


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
    chance = random.Random(0)
    points = []
    with tempfile.TemporaryDirectory() as folder:
        source, whole, out = (Path(folder) / name for name in ("in.mp4", "whole.mp4", "out.mp4"))
        make_source(source, arguments.frames)

        def start(target: Path) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", RUN, str(source), str(target), arguments.model]
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

        began = time.monotonic()
        _, errors = start(whole).communicate()
        length = time.monotonic() - began
        wanted = digest(whole)
        assert sum(kind == "picture" for kind, *_ in wanted) == arguments.frames, errors
        kills, resumed_at, partial = 0, [], 0
        while kills < arguments.points:
            process, after = start(out), chance.uniform(0, 1.1) * length
            try:
                said, errors = process.communicate(timeout=after)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.communicate()
                kills += 1
                partial += out.exists() and digest(out) != wanted
                points.append(round(after, 2))
                print(f"{kills}: killed after {after:.2f} s", flush=True)
                if not out.exists():
                    continue
            else:
                assert process.returncode == 0, errors
                resumed_at.append(int(said))
            same = digest(out) == wanted
            print(f"ended: {'the same' if same else 'NOT THE SAME'}", flush=True)
            assert same
            out.unlink()
        process = start(out)
        said, errors = process.communicate()
        assert process.returncode == 0, errors
        assert digest(out) == wanted
        resumed_at.append(int(said))
        left = sorted(path.name for path in Path(folder).iterdir())
    result = {
        "model": arguments.model,
        "frames": arguments.frames,
        "whole_run_s": round(length, 2),
        "kills": kills,
        "killed_after_s": points,
        "finished_runs": len(resumed_at),
        "finished_runs_resumed_at_frame": resumed_at,
        "finished_runs_identical": len(resumed_at),
        "partial_files_under_the_final_name": partial,
        "left_in_the_folder": left,
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
