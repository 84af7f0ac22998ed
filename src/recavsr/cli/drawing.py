"""Antialiased drawing for demo and titles: masks from signed distances, a stroke font, fractal noise.

Pictures are float32 arrays [H, W, C] in [0, 1]; distances are in pixels; points are (x, y) with the centre of
the top left pixel at (0.5, 0.5). Nothing is read from disk, so that the demo looks the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Picture = NDArray[np.floating[Any]]
Colour = Sequence[float]
Point = tuple[float, float]

# A plotter alphabet on a grid of 5 columns and 7 rows. A glyph is polylines parted by commas; a point is its
# column and row as two digits, row 0 at the top.
_GLYPHS = {
    "A": "06 01 10 30 41 46,03 43",
    "B": "00 06 36 45 44 33 03,00 30 41 42 33",
    "C": "41 30 10 01 05 16 36 45",
    "D": "00 06 26 44 42 20 00",
    "E": "40 00 06 46,03 33",
    "F": "40 00 06,03 33",
    "G": "41 30 10 01 05 16 36 45 43 23",
    "H": "00 06,40 46,03 43",
    "I": "10 30,20 26,16 36",
    "J": "40 45 36 16 05",
    "K": "00 06,40 04,22 46",
    "L": "00 06 46",
    "M": "06 00 23 40 46",
    "N": "06 00 46 40",
    "O": "10 01 05 16 36 45 41 30 10",
    "P": "06 00 30 41 42 33 03",
    "Q": "10 01 05 16 36 45 41 30 10,24 46",
    "R": "06 00 30 41 42 33 03,23 46",
    "S": "41 30 10 01 02 13 33 44 45 36 16 05",
    "T": "00 40,20 26",
    "U": "00 05 16 36 45 40",
    "V": "00 26 40",
    "W": "00 16 23 36 40",
    "X": "00 46,40 06",
    "Y": "00 23 40,23 26",
    "Z": "00 40 06 46",
    "0": "10 01 05 16 36 45 41 30 10,05 41",
    "1": "11 20 26,16 36",
    "2": "01 10 30 41 42 06 46",
    "3": "00 40 23 33 44 45 36 16 05",
    "4": "36 30 04 44",
    "5": "40 00 03 33 44 45 36 06",
    "6": "41 30 10 01 05 16 36 45 44 33 03",
    "7": "00 40 16",
    "8": "13 02 01 10 30 41 42 33 13 04 05 16 36 45 44 33",
    "9": "43 13 02 01 10 30 41 45 36 16 05",
    ".": "26 26",
    ",": "25 16",
    ":": "22 22,25 25",
    "-": "13 33",
    "+": "03 43,21 25",
    "=": "02 42,04 44",
    "/": "06 40",
    "_": "06 46",
    "(": "20 11 15 26",
    ")": "20 31 35 26",
    " ": "",
}
_UNKNOWN = "00 40 46 06 00"
PAPER = 24  # of 255: what lies around pictures and behind their titles
_INK = (0.93, 0.93, 0.93)
_GLYPH_HEIGHT = 6
_GLYPH_ADVANCE = 6.2


def pixel_grid(height: int, width: int) -> tuple[Picture, Picture]:
    """Return the x [1, W] and y [H, 1] coordinates of the pixel centres."""
    x = np.arange(width, dtype=np.float32)[None, :] + np.float32(0.5)
    y = np.arange(height, dtype=np.float32)[:, None] + np.float32(0.5)
    return x, y


def coverage(distance: Picture) -> Picture:
    """Return how much of each pixel lies inside a shape, from its signed distance (negative inside)."""
    return np.clip(np.float32(0.5) - distance, 0, 1)


def blend(picture: Picture, mask: Picture, colour: Colour | Picture, opacity: float = 1.0) -> None:
    """Paint a colour [C] or picture [H, W, C] over `picture` in place where `mask` [H, W] says so.

    A picture with four channels holds premultiplied RGB and alpha; its colours are then given as RGB.
    """
    alpha = (mask * np.float32(opacity))[..., None]
    paint = np.asarray(colour, dtype=np.float32)
    if picture.shape[-1] == 4 and paint.shape[-1] == 3:
        paint = np.concatenate([paint, np.ones((*paint.shape[:-1], 1), np.float32)], axis=-1)
    picture *= 1 - alpha
    picture += alpha * paint


def over(picture: Picture, layer: Picture, top: int, left: int) -> None:
    """Composite a premultiplied RGBA layer [h, w, 4] over an RGB picture in place; what sticks out is cut."""
    height, width = picture.shape[:2]
    y0, x0 = max(0, top), max(0, left)
    y1, x1 = min(height, top + layer.shape[0]), min(width, left + layer.shape[1])
    if y0 >= y1 or x0 >= x1:
        return
    part = layer[y0 - top : y1 - top, x0 - left : x1 - left]
    target = picture[y0:y1, x0:x1]
    target *= 1 - part[..., 3:]
    target += part[..., :3]


def box_distance(x: Picture, y: Picture, left: float, top: float, right: float, bottom: float) -> Picture:
    """Return the signed distance to an axis-aligned box."""
    dx = np.abs(x - (left + right) / 2) - (right - left) / 2
    dy = np.abs(y - (top + bottom) / 2) - (bottom - top) / 2
    return np.hypot(np.maximum(dx, 0), np.maximum(dy, 0)) + np.minimum(np.maximum(dx, dy), 0)


def segment_distance(x: Picture, y: Picture, start: Point, end: Point) -> Picture:
    """Return the distance to a line segment; a segment of length 0 is a dot."""
    (ax, ay), (bx, by) = start, end
    length2 = (bx - ax) ** 2 + (by - ay) ** 2
    along = ((x - ax) * (bx - ax) + (y - ay) * (by - ay)) / length2 if length2 else np.zeros_like(x + y)
    along = np.clip(along, 0, 1)
    return np.hypot(x - ax - along * (bx - ax), y - ay - along * (by - ay)).astype(np.float32)


def polygon_distance(x: Picture, y: Picture, points: Sequence[Point]) -> Picture:
    """Return the signed distance to a simple polygon (negative inside)."""
    distance = np.full(np.broadcast_shapes(x.shape, y.shape), np.inf, np.float32)
    inside = np.zeros(distance.shape, bool)
    for (ax, ay), (bx, by) in zip(points, (*points[1:], points[0])):
        distance = np.minimum(distance, segment_distance(x, y, (ax, ay), (bx, by)))
        if ay != by:
            crosses = (ay > y) != (by > y)
            inside ^= crosses & (x < (bx - ax) * (y - ay) / (by - ay) + ax)
    return np.where(inside, -distance, distance)


def stroke(
    picture: Picture, points: Sequence[Point], width: float, colour: Colour, opacity: float = 1.0
) -> None:
    """Draw a polyline with round caps; only its surroundings are touched."""
    height, columns = picture.shape[:2]
    reach = width / 2 + 1
    x0 = int(max(0, min(p[0] for p in points) - reach))
    y0 = int(max(0, min(p[1] for p in points) - reach))
    x1 = int(min(columns, max(p[0] for p in points) + reach + 1))
    y1 = int(min(height, max(p[1] for p in points) + reach + 1))
    if x0 >= x1 or y0 >= y1:
        return
    x, y = pixel_grid(y1 - y0, x1 - x0)
    x, y = x + x0, y + y0
    distance = np.full((y1 - y0, x1 - x0), np.inf, np.float32)
    for start, end in pairwise(points):
        distance = np.minimum(distance, segment_distance(x, y, start, end))
    blend(picture[y0:y1, x0:x1], coverage(distance - width / 2), colour, opacity)


def text_width(text: str, size: float) -> float:
    """Return the width in pixels of a line of text whose capitals are `size` pixels high."""
    return (len(text) * _GLYPH_ADVANCE - (_GLYPH_ADVANCE - 4)) * size / _GLYPH_HEIGHT


def write(
    picture: Picture, text: str, left: float, top: float, size: float, colour: Colour, weight: float = 0.13
) -> None:
    """Write a line of capitals `size` pixels high, strokes `weight` x size wide; a box for unknown ones."""
    unit = size / _GLYPH_HEIGHT
    for index, character in enumerate(text.upper()):
        origin = left + index * _GLYPH_ADVANCE * unit
        for line in filter(None, _GLYPHS.get(character, _UNKNOWN).split(",")):
            points = [(origin + int(at[0]) * unit, top + int(at[1]) * unit) for at in line.split(" ")]
            stroke(picture, points, max(1.0, weight * size), colour)


def headings(titles: Sequence[str], width: int, height: int) -> NDArray[np.uint8]:
    """Return a bar [height, width, 3] with the titles side by side, each in the middle of its column."""
    bar = np.full((height, width, 3), PAPER / 255, np.float32)
    column = width / len(titles)
    for number, title in enumerate(titles):
        size = height * 0.45
        size = min(size, size * 0.88 * column / max(text_width(title, size), 1))
        left = number * column + (column - text_width(title, size)) / 2
        write(bar, title, left, (height - size) / 2, size, _INK)
    return np.round(bar * 255).astype(np.uint8)


def smooth_noise(height: int, width: int, cells: int, rng: np.random.Generator) -> Picture:
    """Return periodic value noise [H, W] in [0, 1] with `cells` grid cells along the longer side."""
    rows, columns = (max(1, round(cells * side / max(height, width))) for side in (height, width))
    lattice = rng.random((rows, columns), dtype=np.float32)

    def axis(length: int, count: int) -> tuple[NDArray[np.intp], NDArray[np.intp], Picture]:
        position = (np.arange(length, dtype=np.float32) + 0.5) * (count / length)
        low = position.astype(np.intp) % count
        share = position - np.floor(position)
        return low, (low + 1) % count, (share * share * (3 - 2 * share)).astype(np.float32)

    y0, y1, fy = axis(height, rows)
    x0, x1, fx = axis(width, columns)
    lines = lattice[y0] * (1 - fy[:, None]) + lattice[y1] * fy[:, None]
    return lines[:, x0] * (1 - fx) + lines[:, x1] * fx


def fractal_noise(
    height: int, width: int, cells: int, octaves: int, seed: int, gain: float = 0.55
) -> Picture:
    """Return periodic fractal noise [H, W] in [0, 1]: each octave doubles the cells and shrinks by `gain`."""
    rng = np.random.default_rng(seed)
    total = np.zeros((height, width), np.float32)
    norm = 0.0
    for octave in range(octaves):
        total += gain**octave * smooth_noise(height, width, cells * 2**octave, rng)
        norm += gain**octave
    return total / np.float32(norm)


def halves(picture: Picture, levels: int) -> Iterator[Picture]:
    """Yield a picture and `levels - 1` copies, each the 2 x 2 mean of the one before (sides even)."""
    for _ in range(levels):
        yield picture
        height, width = picture.shape[:2]
        picture = picture.reshape(height // 2, 2, width // 2, 2, -1).mean(axis=(1, 3), dtype=np.float32)
