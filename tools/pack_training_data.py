"""Pack clips and photos for training: `python tools/pack_training_data.py --data FOLDER -o pack`.

The folder holds `manifest.tsv`, `train_video/` and `photos/`. Files are copied as they are into parts of a
limited size; `index.json` names shots, sizes, licences and the validation items.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from recavsr.data.pack import build_pack
from recavsr.errors import run_module

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def _bytes(text: str) -> int:
    for unit, factor in _UNITS.items():
        if text.upper().endswith(unit):
            return int(float(text[: -len(unit)]) * factor)
    return int(text)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder with manifest.tsv")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to create")
    parser.add_argument("--part-size", type=_bytes, default="45MB", help="largest part, such as 45MB")
    options = parser.parse_args()
    index = build_pack(options.data, options.output, part_bytes=options.part_size)
    for part in sorted(options.output.glob("part*")):
        files = [file.stat().st_size for file in part.iterdir()]
        print(f"{part.name}: {len(files)} files, {sum(files) / 1e6:.1f} MB")
    shots = [count for video in index.videos for _, count in video.shots]
    print(f"{len(index.videos)} videos, {len(shots)} shots, {sum(shots)} frames, {len(index.photos)} photos")


if __name__ == "__main__":
    run_module(main, before="")
