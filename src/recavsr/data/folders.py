"""Training data from folders as they are: videos cut into shots, photos, listed in an index without copies.

`index_folders` makes the `PackIndex` that `data.clips.ClipSource` opens; its files stay where they are.
Shots end at the cuts that `data.pack.find_cuts` finds and, where it is installed
(`pip install recavsr[train]`), at those of PySceneDetect too. Each finds cuts that the other misses, and a
cut too many costs little: a shot becomes two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from recavsr.data.pack import (
    SHORTEST_SHOT,
    PackedPhoto,
    PackedVideo,
    PackIndex,
    _spread,
    find_cuts,
    keyframes_of,
    thumbnail,
)
from recavsr.data.processes import spread_over
from recavsr.errors import InputError
from recavsr.video.memory_codec import decode_planes
from recavsr.video.source import VIDEO_SUFFIXES, is_picture, natural_order

ShotMethod = Literal["auto", "scenedetect", "builtin"]
SHOT_METHODS = ("auto", "scenedetect", "builtin")


def has_scenedetect() -> bool:
    """Whether PySceneDetect can be imported."""
    try:
        import scenedetect  # noqa: F401
    except ImportError:
        return False
    return True


def scenedetect_cuts(path: Path) -> tuple[list[int], int]:
    """First frames of new shots by PySceneDetect's adaptive detector, and the frames it counted.

    Raises InputError if PySceneDetect is not installed or can't read the file.
    """
    try:
        from scenedetect import AdaptiveDetector, detect
    except ImportError:
        raise InputError("finding shots so needs PySceneDetect: `pip install recavsr[train]`") from None
    try:
        scenes = detect(str(path), AdaptiveDetector(min_scene_len=SHORTEST_SHOT), start_in_scene=True)
    except Exception as error:  # its back ends raise errors of many kinds
        raise InputError(f"{path}: PySceneDetect can't read it ({error})") from error
    frames = [(_number(start), _number(end)) for start, end in scenes]
    return [start for start, _ in frames[1:]], frames[-1][1] if frames else 0


def _number(timecode) -> int:  # type: ignore[no-untyped-def]
    # A property since 0.7, a method before.
    return int(timecode.frame_num if hasattr(timecode, "frame_num") else timecode.get_frames())


def video_files(folder: Path) -> list[Path]:
    """The videos below a folder: video files, and folders of pictures (numbered frames), in natural order."""
    found = [p for p in _below(folder) if p.suffix.lower() in VIDEO_SUFFIXES]
    found += {p.parent for p in _below(folder) if is_picture(p)}
    return sorted(found, key=lambda path: (natural_order(path), str(path)))


def photo_files(folder: Path) -> list[Path]:
    """The pictures below a folder, in natural order."""
    return sorted(filter(is_picture, _below(folder)), key=lambda path: (natural_order(path), str(path)))


def _below(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise InputError(f"{folder}: not a folder")
    inside = (p for p in folder.rglob("*") if not any(n.startswith(".") for n in p.relative_to(folder).parts))
    return [path for path in inside if path.is_file()]


def index_folders(
    videos: Path | None = None,
    photos: Path | None = None,
    *,
    shots: ShotMethod = "auto",
    smallest_side: int = 256,
    held_out: int = 0,
    leave_out: Collection[Path] = (),
    on_skip: Callable[[Path, str], None] = lambda path, reason: None,
    workers: int = 0,
) -> PackIndex:
    """Index a folder of videos and one of photos, at their own sizes, by absolute paths.

    videos: video files, and folders of numbered pictures, at any depth. smallest_side: in pixels; smaller
    ones are skipped, and so are shots of fewer than 10 frames. held_out: so many of each, spread over the
    list, are for validation. leave_out: files not to use (resolved paths, such as those a quality report
    flags). on_skip(path, reason) hears of everything not used. workers: processes that read files; with 0
    they are read in this one. A longer video counts more, by the square root of its shots. Raises InputError
    if nothing is left.
    """
    if videos is None and photos is None:
        raise InputError("name a folder of videos or one of photos")
    if shots not in SHOT_METHODS:
        raise InputError(f"shots are found by one of {', '.join(SHOT_METHODS)}, not {shots}")

    found_videos = [] if videos is None else video_files(videos)
    found_photos = [] if photos is None else photo_files(photos)
    with spread_over(workers) as spread:

        def entries(read: Callable[[Path], Any], paths: list[Path]) -> list:
            given = [path.resolve() for path in paths]
            wanted = [path for path in given if path not in leave_out]
            entry_of = dict(zip(wanted, spread(partial(_entry, read), wanted)))
            found = []
            for path in given:
                entry = entry_of.get(path, "left out")
                if isinstance(entry, str):
                    on_skip(path, entry)
                else:
                    found.append(entry)
            return found

        packed_videos: list[PackedVideo] = entries(
            partial(_video, method=shots, smallest_side=smallest_side), found_videos
        )
        packed_photos: list[PackedPhoto] = entries(partial(_photo, smallest_side=smallest_side), found_photos)
    if not packed_videos and not packed_photos:
        raise InputError(f"{videos or photos}: nothing in it can be used for training")
    return PackIndex(_split(packed_videos, held_out), _split(packed_photos, held_out))


def _split(items: list, held_out: int) -> tuple:
    kept = _spread([item.file for item in items], held_out)
    return tuple(replace(item, split="validation" if item.file in kept else "train") for item in items)


class _Skip(Exception):
    """Why a file is not used."""


def _entry(read: Callable[[Path], Any], path: Path) -> Any:
    """What `read` makes of a file, or why it is not used."""
    try:
        return read(path)
    except _Skip as skip:
        return str(skip)
    except InputError as error:
        return str(error).removeprefix(f"{path}: ")


def _video(path: Path, method: ShotMethod, smallest_side: int) -> PackedVideo:
    size, thumbnails, marks = (0, 0), [], []
    for planes in decode_planes(path):
        height, width = planes.luma.shape
        if size != (0, 0) and size != (height, width):
            raise _Skip("its frames differ in size")
        size = (height, width)
        if min(size) < smallest_side:
            raise _Skip(f"{width}x{height} is smaller than {smallest_side} pixels")
        thumbnails.append(thumbnail(planes))
        marks.append((planes.pts, planes.is_keyframe))
    shots = cut_at(_cuts(path, method, thumbnails), len(thumbnails))
    if not shots:
        raise _Skip(f"no shot of {SHORTEST_SHOT} frames or more")
    weight = round(len(shots) ** 0.5, 4)
    keyframes = () if path.is_dir() else keyframes_of(marks)
    return PackedVideo(
        path.stem, str(path), "", len(thumbnails), size, size, weight, "train", shots, keyframes
    )


def _cuts(path: Path, method: ShotMethod, thumbnails: list) -> list[int]:
    ours = [] if method == "scenedetect" else find_cuts(thumbnails)
    if method == "builtin" or path.is_dir() or (method == "auto" and not has_scenedetect()):
        return ours or find_cuts(thumbnails)
    theirs, counted = scenedetect_cuts(path)
    if counted != len(thumbnails):
        # It reads files by other means and may drop frames; its numbers would then name others than ours.
        return ours or find_cuts(thumbnails)
    return sorted({*ours, *theirs})


def cut_at(cuts: list[int], frames: int) -> tuple[tuple[int, int], ...]:
    """Shots (first frame, frames) between cuts, those of fewer than 10 frames left out."""
    edges = [0, *cuts, frames]
    return tuple((first, end - first) for first, end in pairwise(edges) if end - first >= SHORTEST_SHOT)


def _photo(path: Path, smallest_side: int) -> PackedPhoto:
    height, width = next(iter(decode_planes(path))).luma.shape
    if min(height, width) < smallest_side:
        raise _Skip(f"{width}x{height} is smaller than {smallest_side} pixels")
    return PackedPhoto(path.stem, str(path), "", (height, width), "train")
