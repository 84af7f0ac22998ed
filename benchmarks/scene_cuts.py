"""Precision and recall of the scene-cut detector, on synthetic and on real footage, beside PySceneDetect's.

    python benchmarks/scene_cuts.py VIDEO_FOLDER [-o benchmarks/results/scene_cuts.json]

VIDEO_FOLDER holds the training clips. Those of one shot each are joined by hard cuts, and changed by what is
no cut: flashes, cross-fades, fades through black, shakes and pans. Real cuts are those listed in `CUTS`,
found by looking at every frame that any of the detectors named and at its neighbours. A detection counts as
right within the interval that the list gives; each right one once. Needs the extra `train` (scenedetect).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import av
import numpy as np
from scenedetect import AdaptiveDetector, FrameTimecode

from recavsr.stream import cuts
from recavsr.stream.session import Session
from recavsr.stream.step import IdentityModel

SIDE = 96  # pixels of the longer side: what the detectors see of a clip

# Frames that start a shot; (first, last) where a transition of some frames lies between two shots.
CUTS: dict[str, list[int | tuple[int, int]]] = {
    "A_tears_of_steel": [52, 122, 158, 221, 309, 715, 788, 872, 901, 987, 1127, 1157, 1203, 1234, 1246, 1284,
                         1345, 1378, 1430, 1472, 1525, 1571, 1618, 1650, 1689],
    "B_pexels_fastcut": [(27, 29), 48, 52, 55, 57, (59, 62), (129, 132), (142, 145), (160, 161)],
    "A_bikes_skv": [30, 76, 137],
    "A_city_cc0": [116],
}  # fmt: skip

Interval = tuple[int, int]
Detector = Callable[[np.ndarray], list[int]]


def read(path: Path) -> np.ndarray:
    """Return the clip's frames at `SIDE` pixels, [N, h, w, 3] uint8."""
    frames = []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        factor = SIDE / max(stream.width, stream.height)
        size = {"width": round(stream.width * factor), "height": round(stream.height * factor)}
        for frame in container.decode(stream):
            frames.append(frame.reformat(format="rgb24", interpolation="AREA", **size).to_ndarray())
    return np.stack(frames)


def ours(frames: np.ndarray) -> list[int]:
    """Return where a session cuts."""
    session = Session(IdentityModel(), frames.shape[1:3], (1, 1), detect_cuts=True)
    session.push(frames)
    session.flush()
    return session.cuts


def scenedetect_adaptive(frames: np.ndarray) -> list[int]:
    """Return where PySceneDetect's adaptive detector cuts: its defaults, but shots of one frame allowed."""
    detector, found = AdaptiveDetector(min_scene_len=1), []
    for number, frame in enumerate(frames):
        found += detector.process_frame(FrameTimecode(number, 25.0), np.ascontiguousarray(frame[..., ::-1]))
    found += detector.post_process(FrameTimecode(len(frames) - 1, 25.0))
    return sorted({int(cut.frame_num) for cut in found} - {0})


DETECTORS: dict[str, Detector] = {"recavsr": ours, "scenedetect adaptive": scenedetect_adaptive}


# -- synthetic sequences: frames, and where the cuts are -----------------------------------------------


class Synthetic:
    """Draws sequences from clips of one shot each, with a seed."""

    def __init__(self, clips: Sequence[np.ndarray], seed: int = 0) -> None:
        self._clips = clips
        self._random = np.random.default_rng(seed)
        self._latest: np.ndarray | None = None

    def piece(self, length: int, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """Return `length` frames of a random clip (of a frame shape), never of one twice in a row."""
        others = [clip for clip in self._clips if clip is not self._latest]
        fitting = [clip for clip in others if len(clip) >= length and shape in (None, clip.shape[1:])]
        self._latest = clip = fitting[self._random.integers(len(fitting))]
        start = self._random.integers(len(clip) - length + 1)
        return clip[start : start + length]

    def hard_cuts(self) -> tuple[np.ndarray, list[Interval]]:
        """Shots of 3 to 60 frames."""
        pieces = [self.piece(60)]
        for _ in range(8):
            pieces.append(self.piece(int(self._random.integers(3, 61)), pieces[0].shape[1:]))
        starts = np.cumsum([len(piece) for piece in pieces])[:-1]
        return np.concatenate(pieces), [(int(s), int(s)) for s in starts]

    def flashes(self) -> tuple[np.ndarray, list[Interval]]:
        """Four flashes of 1 or 2 frames, from brighter to white, some tinted."""
        frames = self.piece(75).astype(np.float32)
        for start in self._random.choice(np.arange(3, 72, 4), 4, replace=False):
            length = self._random.integers(1, 3)
            gain, strength = self._random.uniform(1.2, 3), self._random.uniform(40, 255)
            frames[start : start + length] *= gain
            frames[start : start + length] += strength * self._random.uniform(0.6, 1, 3)
        return frames.clip(0, 255).astype(np.uint8), []

    def cross_fades(self) -> tuple[np.ndarray, list[Interval]]:
        """A cross-fade of 6 to 30 frames between two shots."""
        length = int(self._random.integers(6, 31))
        first = self.piece(20 + length)
        second = self.piece(20 + length, first.shape[1:])
        share = np.linspace(0, 1, length + 2)[1:-1, None, None, None]
        mixed = first[20:] * (1 - share) + second[:length] * share
        return np.concatenate([first[:20], mixed.astype(np.uint8), second[length:]]), []

    def fades_through_black(self) -> tuple[np.ndarray, list[Interval]]:
        """A shot that goes to black and another that comes out of it, in 8 to 24 frames each."""
        length = int(self._random.integers(8, 25))
        first = self.piece(20 + length)
        second = self.piece(20 + length, first.shape[1:])
        down = np.concatenate([np.ones(20), np.linspace(1, 0, length)])[:, None, None, None]
        return np.concatenate([first * down, second * down[::-1]]).astype(np.uint8), []

    def pans(self) -> tuple[np.ndarray, list[Interval]]:
        """A still frame, panned at up to a tenth of the picture a frame, with shakes."""
        frame = self.piece(1)[0]
        height, width = frame.shape[:2]
        wide = np.concatenate([frame, frame[:, ::-1]] * 4, axis=1)  # mirrored: a strip without seams
        speed = self._random.uniform(0.02, 0.1) * width
        across = (speed * np.arange(45)).astype(int) % (6 * width)
        down = self._random.integers(0, height // 12, 45)
        rows, columns = height * 5 // 6, width * 5 // 6
        return np.stack([wide[y : y + rows, x : x + columns] for x, y in zip(across, down)]), []


# -- scoring -------------------------------------------------------------------------------------------


def score(found: Sequence[int], wanted: Sequence[Interval]) -> tuple[int, int, int]:
    """Return the numbers of right, false and missed detections; each wanted cut is found once at most."""
    right, open_cuts = 0, list(wanted)
    for frame in found:
        hit = next((cut for cut in open_cuts if cut[0] <= frame <= cut[1]), None)
        if hit is not None:
            open_cuts.remove(hit)
            right += 1
    return right, len(found) - right, len(open_cuts)


def row(right: int, false: int, missed: int, frames: int) -> dict[str, float | int | None]:
    """Return one row of the table."""
    return {
        "frames": frames,
        "cuts": right + missed,
        "found": right,
        "false": false,
        "precision": round(right / (right + false), 4) if right + false else None,
        "recall": round(right / (right + missed), 4) if right + missed else None,
    }


def table(sequences: Sequence[tuple[np.ndarray, Sequence[Interval]]]) -> dict[str, dict]:
    """Return a row for each detector over all sequences."""
    rows = {}
    for name, detect in DETECTORS.items():
        scores = [score(detect(frames), wanted) for frames, wanted in sequences]
        total = [int(n) for n in np.sum(scores, axis=0)]
        rows[name] = row(*total, sum(len(frames) for frames, _ in sequences))
    return rows


def sweep(sequences: Sequence[tuple[np.ndarray, Sequence[Interval]]]) -> list[dict]:
    """Return our row over all sequences for thresholds around the one in use."""
    chosen, rows = cuts.THRESHOLD, []
    try:
        for threshold in (2.5, 3.0, 4.0, 5.0):
            cuts.THRESHOLD = threshold
            total = np.sum([score(ours(frames), wanted) for frames, wanted in sequences], axis=0)
            rows.append({"threshold": threshold, **row(*map(int, total), sum(len(f) for f, _ in sequences))})
    finally:
        cuts.THRESHOLD = chosen
    return rows


def milliseconds_a_frame(frames: np.ndarray) -> float:
    """Return the detector's CPU time at 640x360, thumbnails included: median of 5 runs over `frames`."""
    side = (np.arange(360) * frames.shape[1] // 360)[:, None], np.arange(640) * frames.shape[2] // 640
    large = [np.ascontiguousarray(frame[side]) for frame in frames]
    seconds = []
    for _ in range(5):
        began = time.thread_time()
        memory = cuts.ShotMemory()
        for start in range(0, len(large), 8):
            block = [cuts.thumbnail(frame) for frame in large[start : start + 8]]
            memory.first_cut(block)
            memory = memory.after(block)
        seconds.append((time.thread_time() - began) / len(large))
    return round(1000 * float(np.median(seconds)), 3)


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("benchmarks/results/scene_cuts.json"))
    parser.add_argument("--sequences", type=int, default=20, help="synthetic sequences of each kind")
    arguments = parser.parse_args()
    clips = {path.stem: read(path) for path in sorted(arguments.folder.glob("*.mp4"))}
    single = [clip for name, clip in clips.items() if name not in CUTS]
    drawn = Synthetic(single)
    kinds = (drawn.hard_cuts, drawn.flashes, drawn.cross_fades, drawn.fades_through_black, drawn.pans)
    real = [
        (clips[name], [(c, c) if isinstance(c, int) else c for c in wanted]) for name, wanted in CUTS.items()
    ]
    sets = {
        **{
            f"synthetic: {k.__name__.replace('_', ' ')}": [k() for _ in range(arguments.sequences)]
            for k in kinds
        },
        **{f"real: {name}": [sequence] for name, sequence in zip(CUTS, real)},
        f"real: {len(single)} clips of one shot": [(clip, []) for clip in single],
    }
    result = {
        "threshold": cuts.THRESHOLD,
        "prominence": cuts.PROMINENCE,
        "flash_frames": cuts.FLASH_FRAMES,
        "side": SIDE,
        "cpu_milliseconds_a_frame_640x360": {
            "a calm clip": milliseconds_a_frame(clips["A2_openshot_run"]),
            "fast action": milliseconds_a_frame(clips["A_flutter_butterfly"]),
        },
        "sets": {name: table(sequences) for name, sequences in sets.items()},
        "sweep": sweep([sequence for sequences in sets.values() for sequence in sequences]),
    }
    for name, rows in result["sets"].items():
        print(name)
        for detector, facts in rows.items():
            print(f"  {detector:22}", facts)
    print(*result["sweep"], result["cpu_milliseconds_a_frame_640x360"], sep="\n")
    arguments.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
