"""An hour at 30000/1001 frames a second through the whole path: is every time exact, is no frame lost?

    python benchmarks/ntsc_hour.py [-o benchmarks/results/ntsc_hour.json]

107,892 frames of 16x16 pixels with sound, upscaled x1 by the identity model; each time of the output is
compared with frame number / rate, as a fraction, and the sound's packets with the source's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from recavsr.evaluation.environment import environment
from recavsr.stream.engine import upscale
from recavsr.stream.step import IdentityModel

RATE, SIDE, SOUND_RATE = Fraction(30000, 1001), 16, 8000
FRAMES = int(3600 * RATE)


def make_source(path: Path) -> None:
    """Write frames of changing grey, and a tone of an hour."""
    with av.open(str(path), "w") as container:
        video = container.add_stream("libx264", rate=RATE, options={"preset": "ultrafast"})
        video.width, video.height, video.pix_fmt = SIDE, SIDE, "yuv420p"
        sound = container.add_stream("aac", rate=SOUND_RATE)
        samples_done = 0
        for number in range(FRAMES):
            grey = np.full((SIDE * 3 // 2, SIDE), 16 + number % 200, np.uint8)
            container.mux(video.encode(av.VideoFrame.from_ndarray(grey, format="yuv420p")))
            while samples_done < (number + 1) / RATE * SOUND_RATE:
                tone = np.sin((samples_done + np.arange(1024)) * 0.3).astype(np.float32)[None]
                samples = av.AudioFrame.from_ndarray(tone, format="fltp", layout="mono")
                samples.sample_rate, samples.pts = SOUND_RATE, samples_done
                samples.time_base = Fraction(1, SOUND_RATE)
                container.mux(sound.encode(samples))
                samples_done += 1024
        for stream in (video, sound):
            container.mux(stream.encode(None))


def contents(path: Path) -> tuple[list[Fraction], str]:
    """Return the times of the picture in order, and a checksum of the sound with its times."""
    found, sound = [], hashlib.sha256()
    with av.open(str(path)) as container:
        for packet in container.demux():
            if packet.size and packet.stream.type == "video":
                found.append(packet.pts * packet.time_base)
            elif packet.size:
                sound.update(f"{packet.pts * packet.time_base}".encode() + bytes(packet))
    return sorted(found), sound.hexdigest()


def main() -> None:
    """Run and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/ntsc_hour.json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "in.mp4", Path(folder) / "out.mp4"
        make_source(source)
        report = upscale(source, target, model=IdentityModel(), scale=1, preset="ultrafast")
        (times, sound), (_, sound_before) = contents(target), contents(source)
    wanted = [number / RATE for number in range(FRAMES)]
    result = {
        "rate": str(RATE),
        "frames": report.frames,
        "frames_wanted": FRAMES,
        "every_time_exact": times == wanted,
        "last_time": str(times[-1]),
        "last_time_wanted": str(wanted[-1]),
        "sound_identical": sound == sound_before,
        "environment": environment(),
    }
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(result)


if __name__ == "__main__":
    main()
