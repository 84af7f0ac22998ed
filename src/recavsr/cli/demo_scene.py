"""The demo's truth: a street, drawn in perspective, with what is hard to upscale.

Fine texture (brick, paving, leaves, cladding), text from large to tiny, thin lines that turn (the spokes of
a Ferris wheel and of a car), a camera that moves so that near things pass far ones, and soft shadows. Lengths
in the world are metres: x to the right, y up, z away from the camera. The picture is drawn at twice its size
and averaged down. u and v are columns and rows of that larger picture.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from recavsr.cli.drawing import (
    Colour,
    Picture,
    blend,
    box_distance,
    coverage,
    fractal_noise,
    halves,
    over,
    pixel_grid,
    polygon_distance,
    stroke,
    text_width,
    write,
)

WIDTH, HEIGHT = 960, 544
FRAMES_PER_SECOND = 24

_U, _V = 2 * WIDTH, 2 * HEIGHT
_FOCAL = 1560.0
_HORIZON = 500.0
_EYE_HEIGHT = 1.6
_WALL_X, _WALL_NEAR, _WALL_FAR, _WALL_HEIGHT = -4.0, 5.0, 16.0, 5.0
_ROAD_NEAR, _ROAD_FAR = 6.2, 10.2
_CAR_Z, _WHEEL_RADIUS = 7.6, 0.34
_INK = (0.12, 0.13, 0.16)
_CREAM = (0.95, 0.93, 0.86)


@dataclass(frozen=True)
class Camera:
    """Where the camera stands; it looks along z from a fixed height."""

    x: float
    z: float

    def column(self, x: float, z: float) -> float:
        """Return the column u of a world point."""
        return _U / 2 + (x - self.x) * _FOCAL / (z - self.z)

    def row(self, y: float, z: float) -> float:
        """Return the row v of a world point."""
        return _HORIZON - (y - _EYE_HEIGHT) * _FOCAL / (z - self.z)

    def scale(self, z: float) -> float:
        """Return pixels a metre at depth z."""
        return _FOCAL / (z - self.z)


@dataclass(frozen=True)
class Billboard:
    """An upright picture that faces the camera; `texture` is [1, 4, h, w], premultiplied."""

    texture: Tensor
    left: float
    bottom: float
    z: float
    metres_high: float

    def draw(self, picture: Picture, camera: Camera) -> None:
        """Composite it over the picture, resampled to its size at this distance."""
        rows, columns = self.texture.shape[-2:]
        scale = camera.scale(self.z) * self.metres_high / rows
        u0, v1 = camera.column(self.left, self.z), camera.row(self.bottom, self.z)
        v0 = v1 - rows * scale
        first_u, last_u = max(0, math.floor(u0)), min(_U, math.ceil(u0 + columns * scale))
        first_v, last_v = max(0, math.floor(v0)), min(_V, math.ceil(v1))
        if first_u >= last_u or first_v >= last_v:
            return
        x = (torch.arange(first_u, last_u) + 0.5 - u0) / (columns * scale) * 2 - 1
        y = (torch.arange(first_v, last_v) + 0.5 - v0) / (rows * scale) * 2 - 1
        over(picture, _sample(self.texture, x[None, :], y[:, None]), first_v, first_u)


def _sample(texture: Tensor, x: Tensor, y: Tensor) -> Picture:
    """Sample [1, C, h, w] bilinearly at x, y in -1..1 (broadcast to [H, W]); outside is transparent."""
    grid = torch.stack(torch.broadcast_tensors(x, y), dim=-1)[None].float()
    sampled = F.grid_sample(texture, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return sampled[0].permute(1, 2, 0).numpy()


def _texture(picture: Picture) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(picture)).permute(2, 0, 1)[None].contiguous()


def _blank(rows: int, columns: int, colour: Colour | None = None) -> Picture:
    picture = np.zeros((rows, columns, 4), np.float32)
    if colour is not None:
        picture[..., :3] = colour
        picture[..., 3] = 1
    return picture


def _box(picture: Picture, left: float, top: float, right: float, bottom: float, colour: Colour) -> None:
    y0, y1 = max(0, int(top) - 1), min(picture.shape[0], int(bottom) + 2)
    x0, x1 = max(0, int(left) - 1), min(picture.shape[1], int(right) + 2)
    x, y = pixel_grid(y1 - y0, x1 - x0)
    blend(picture[y0:y1, x0:x1], coverage(box_distance(x + x0, y + y0, left, top, right, bottom)), colour)


def _sign(lines: list[tuple[str, float]], width: float, paper: Colour, ink: Colour, margin: float) -> Picture:
    """Return a sign: centred lines of (text, size in pixels) on paper with a frame."""
    height = sum(size * 1.55 for _, size in lines) + 2 * margin
    sign = _blank(round(height), round(width), paper)
    top = margin + lines[0][1] * 0.25
    for text, size in lines:
        write(sign, text, (width - text_width(text, size)) / 2, top, size, ink)
        top += size * 1.55
    inset = margin * 0.35
    corners = [
        (inset, inset),
        (width - inset, inset),
        (width - inset, height - inset),
        (inset, height - inset),
    ]
    stroke(sign, [*corners, corners[0]], max(1.5, margin * 0.12), ink)
    return sign


def _paste(picture: Picture, part: Picture, left: float, top: float) -> None:
    y, x = round(top), round(left)
    target = picture[y : y + part.shape[0], x : x + part.shape[1]]
    target *= 1 - part[..., 3:]
    target += part


def _sky() -> Picture:
    """Return the sky with clouds, wider than the picture so that it can pass behind it, [V, U + 200, 3]."""
    rows, columns = int(_HORIZON) + 60, _U + 200
    _, y = pixel_grid(rows, columns)
    height = np.clip(y / rows, 0, 1)[..., None]
    sky = (1 - height) * np.array((0.27, 0.47, 0.78), np.float32) + height * np.array(
        (0.90, 0.86, 0.80), np.float32
    )
    sky = np.broadcast_to(sky, (rows, columns, 3)).copy()
    noise = fractal_noise(rows, columns, 9, 7, seed=5)
    cloud = np.clip((noise - 0.46) * 4.5, 0, 1) * np.clip(1.3 - 0.9 * y / rows, 0, 1)
    lit = 0.82 + 0.18 * np.clip((noise - np.roll(noise, 6, axis=0)) * 14 + 0.5, 0, 1)
    blend(sky, cloud, lit[..., None] * np.array((1.0, 0.98, 0.95), np.float32), 0.92)
    return sky


def _hills() -> Picture:
    """Return a wooded ridge [260, U + 500, 4], hazy above and darker below."""
    rows, columns = 260, _U + 500
    _, y = pixel_grid(rows, columns)
    ridge = 60 + 90 * fractal_noise(8, columns, 6, 7, seed=9, gain=0.5)[0][None, :]
    picture = _blank(rows, columns)
    leaves = fractal_noise(rows, columns, 60, 5, seed=10, gain=0.8)
    shade = (0.55 + 0.9 * leaves)[..., None] * np.array((0.30, 0.41, 0.33), np.float32)
    haze = np.clip((y - ridge) / 120, 0, 1)[..., None]
    blend(picture, coverage(ridge - y), shade * (0.6 + 0.4 * haze) + 0.16 * (1 - haze))
    return picture


def _hedge(metre: int) -> Picture:
    """Return a clipped hedge [1.3 m, 14 m, 4]."""
    rows, columns = round(1.3 * metre), 14 * metre
    _, y = pixel_grid(rows, columns)
    top = 0.12 * metre * fractal_noise(8, columns, 40, 5, seed=12, gain=0.7)[0][None, :]
    leaves = np.clip(2.2 * fractal_noise(rows, columns, 260, 3, seed=13, gain=0.9) - 0.6, 0, 1)
    hedge = _blank(rows, columns)
    shade = (0.35 + 0.9 * leaves) * (1.1 - 0.5 * y / rows)
    blend(hedge, coverage(top - y), shade[..., None] * np.array((0.24, 0.37, 0.15), np.float32))
    return hedge


def _brick_wall(metre: int) -> Picture:
    """Return the left wall: bricks, windows with lattices, two signs. Columns are z, rows are y down."""
    rows, columns = round(_WALL_HEIGHT * metre), round((_WALL_FAR - _WALL_NEAR) * metre)
    wall = _blank(rows, columns, (0.70, 0.67, 0.62))
    wall[..., :3] *= (0.85 + 0.3 * fractal_noise(rows, columns, 200, 4, seed=21, gain=0.8))[..., None]
    rng = np.random.default_rng(22)
    brick_h, brick_w, joint = 0.075 * metre, 0.24 * metre, 0.011 * metre
    x, y = pixel_grid(rows, columns)
    row = np.floor(y / brick_h).astype(int)
    shifted = x + (row % 2) * brick_w / 2
    column = np.floor(shifted / brick_w).astype(int)
    inside = np.minimum(
        np.minimum(shifted % brick_w, brick_w - shifted % brick_w),
        np.minimum(y % brick_h, brick_h - y % brick_h),
    )
    tint = rng.random((row.max() + 1, column.max() + 2), dtype=np.float32)[row, column]
    grain = fractal_noise(rows, columns, 260, 4, seed=23, gain=0.9)
    brick = np.array((0.60, 0.27, 0.20), np.float32) * (0.62 + 0.5 * tint + 0.45 * (grain - 0.5))[..., None]
    brick += np.array((0.02, 0.06, 0.05), np.float32) * tint[..., None]
    blend(wall, coverage(joint / 2 + 0.5 - inside), brick)
    for start in (0.9, 3.6, 7.9):
        _window(wall, start * metre, 0.8 * metre, 1.5 * metre, 2.3 * metre, panes=(3, 4))
    lines = [("BOOKS", 0.36), ("OLD AND NEW", 0.15), ("MON - SAT 9:30 - 18:00", 0.07)]
    sizes = [(text, size * metre) for text, size in lines]
    sign = _sign(sizes, 2.1 * metre, _CREAM, (0.45, 0.10, 0.08), 0.12 * metre)
    _paste(wall, sign, 5.45 * metre, 1.5 * metre)
    plate = _sign([("NO 66", 0.16 * metre)], 0.85 * metre, (0.10, 0.23, 0.42), _CREAM, 0.06 * metre)
    _paste(wall, plate, 2.6 * metre, 2.4 * metre)
    wall[..., :3] *= np.clip(0.72 + 0.28 * (x / columns), 0, 1)[..., None]
    return wall


def _window(
    wall: Picture, left: float, top: float, width: float, height: float, panes: tuple[int, int]
) -> None:
    """Draw a window with a frame, a lattice and a reflection of the sky."""
    frame = width * 0.05
    _box(wall, left - frame, top - frame, left + width + frame, top + height + frame, (0.90, 0.88, 0.82))
    _box(
        wall,
        left - 2 * frame,
        top + height + frame,
        left + width + 2 * frame,
        top + height + 2.5 * frame,
        (0.6, 0.58, 0.55),
    )
    y0, y1, x0, x1 = (round(edge) for edge in (top, top + height, left, left + width))
    x, y = pixel_grid(y1 - y0, x1 - x0)
    glass = 0.16 + 0.35 * np.clip(1 - (y / (y1 - y0)) - 0.4 * x / (x1 - x0), 0, 1)
    cloud = fractal_noise(y1 - y0, x1 - x0, 4, 5, seed=31)
    pane = (glass * (0.7 + 0.6 * cloud))[..., None] * np.array((0.80, 0.95, 1.15), np.float32)
    blend(wall[y0:y1, x0:x1], np.ones((y1 - y0, x1 - x0), np.float32), np.clip(pane, 0, 1))
    for i in range(1, panes[0]):
        u = left + width * i / panes[0]
        stroke(wall, [(u, top), (u, top + height)], frame * 0.45, (0.88, 0.86, 0.80))
    for j in range(1, panes[1]):
        v = top + height * j / panes[1]
        stroke(wall, [(left, v), (left + width, v)], frame * 0.45, (0.88, 0.86, 0.80))


def _cafe(metre: int) -> Picture:
    """Return the front of the cafe: cladding, windows, a striped awning, signs with ever smaller text."""
    rows, columns = round(4.3 * metre), round(7.4 * metre)
    front = _blank(rows, columns, (0.80, 0.77, 0.68))
    x, y = pixel_grid(rows, columns)
    board = 0.11 * metre
    front[..., :3] *= (1 - 0.28 * np.exp(-(((y % board) / (0.12 * board)) ** 2)))[..., None]
    front[..., :3] *= (0.90 + 0.2 * fractal_noise(rows, columns, 120, 4, seed=41, gain=0.8))[..., None]
    for start in (0.5, 2.2, 3.9, 5.6):
        _window(front, start * metre, 0.35 * metre, 1.0 * metre, 0.85 * metre, panes=(3, 3))
    _box(front, 0.2 * metre, 2.05 * metre, 7.2 * metre, 2.15 * metre, (0.35, 0.16, 0.12))
    sign = _sign([("CAFE RECAVSR", 0.26 * metre)], 3.6 * metre, (0.13, 0.30, 0.25), _CREAM, 0.08 * metre)
    _paste(front, sign, 1.9 * metre, 1.45 * metre)
    for left, width in ((0.5, 2.4), (4.5, 2.4)):
        _window(front, left * metre, 2.75 * metre, width * metre, 1.2 * metre, panes=(4, 1))
        stripes = np.sin(x * (2 * np.pi / (0.24 * metre))) * 0.12 * metre
        awning = np.maximum(
            box_distance(x, y, left * metre, 2.3 * metre, (left + width) * metre, 2.72 * metre), -stripes / 6
        )
        _box(front, left * metre, 2.3 * metre, (left + width) * metre, 2.72 * metre, _CREAM)
        blend(front, coverage(awning), (0.74, 0.20, 0.16))
    _box(front, 3.2 * metre, 2.6 * metre, 4.2 * metre, 4.3 * metre, (0.20, 0.26, 0.30))
    lines = [("MENU", 0.10), ("SOUP 4.20", 0.065), ("TEA 2.50", 0.05), ("CAKE 3.75", 0.04)]
    sizes = [(text, size * metre) for text, size in lines]
    menu = _sign(sizes, 0.72 * metre, (0.16, 0.17, 0.18), _CREAM, 0.05 * metre)
    _paste(front, menu, 3.34 * metre, 2.85 * metre)
    return front


def _tree(metre: int) -> Picture:
    """Return a tree: branches that split, and leaves whose lower ones are in shade."""
    rows, columns = round(5.2 * metre), round(5.0 * metre)
    tree = _blank(rows, columns)
    rng = np.random.default_rng(51)
    tips: list[tuple[float, float]] = []

    def grow(x: float, y: float, angle: float, length: float, width: float) -> None:
        end = (x + length * math.sin(angle), y - length * math.cos(angle))
        stroke(tree, [(x, y), end], width, (0.30, 0.23, 0.17))
        if length < 0.16 * metre:
            tips.append(end)
            return
        for turn in rng.normal((-0.5, 0.0, 0.5), 0.15) - 0.25 * angle * abs(angle):
            grow(*end, angle + turn, length * rng.uniform(0.62, 0.8), max(1.0, width * 0.62))

    grow(columns * 0.5, rows, 0.0, 1.15 * metre, 0.16 * metre)
    leaf = 0.052 * metre
    x, y = pixel_grid(2 * math.ceil(leaf) + 3, 2 * math.ceil(leaf) + 3)
    centre = x.shape[1] / 2
    for tip_x, tip_y in tips:
        for _ in range(11):
            px, py = rng.normal((tip_x, tip_y), 0.16 * metre)
            left, top = int(px - centre), int(py - centre)
            if left < 0 or top < 0 or left + x.shape[1] > columns or top + y.shape[0] > rows:
                continue
            angle, light = rng.uniform(0, np.pi), rng.uniform(0.55, 1.25) * (1.15 - 0.45 * py / (0.8 * rows))
            dx, dy = x - centre - (px % 1), y - centre - (py % 1)
            along, across = (
                dx * math.cos(angle) + dy * math.sin(angle),
                dy * math.cos(angle) - dx * math.sin(angle),
            )
            shape = np.hypot(along, across * 2.1) - leaf
            green = np.array((0.30, 0.50, 0.16), np.float32) + rng.normal(0, 0.03, 3).astype(np.float32)
            blend(
                tree[top : top + y.shape[0], left : left + x.shape[1]],
                coverage(shape),
                np.clip(green * light, 0, 1),
            )
    return tree


def _car(metre: int) -> Picture:
    """Return a car from its side, without wheels: [1.5 m, 4.2 m, 4], the ground at the bottom."""
    rows, columns = round(1.5 * metre), round(4.2 * metre)
    car = _blank(rows, columns)
    x, y = pixel_grid(rows, columns)

    def outline(points: list[tuple[float, float]]) -> Picture:
        return polygon_distance(x, y, [(px * metre, rows - py * metre) for px, py in points])

    bonnet = [(2.75, 1.30), (3.25, 0.90), (3.95, 0.78), (4.08, 0.40), (3.95, 0.30)]
    boot = [(0.25, 0.28), (0.1, 0.34), (0.12, 0.72), (0.45, 0.84), (1.1, 0.88), (1.55, 1.28)]
    body = outline(boot + bonnet) - 0.05 * metre
    shine = np.clip(1.12 - 0.55 * (y / rows), 0, 1.2)[..., None] * np.array((0.86, 0.62, 0.10), np.float32)
    blend(car, coverage(body), np.clip(shine, 0, 1))
    for pane in (
        [(1.24, 0.92), (1.60, 1.22), (2.12, 1.23), (2.12, 0.92)],
        [(2.20, 0.92), (2.20, 1.23), (2.70, 1.23), (3.08, 0.92)],
    ):
        sky = np.clip(0.18 + 0.5 * (1 - y / rows), 0, 1)[..., None] * np.array((0.75, 0.9, 1.0), np.float32)
        blend(car, coverage(outline(pane)), sky)
    for door in (1.16, 2.16, 3.05):
        stroke(
            car,
            [(door * metre, rows - 0.9 * metre), (door * metre, rows - 0.36 * metre)],
            1.6,
            (0.35, 0.24, 0.05),
        )
    for handle in (1.98, 2.9):
        _box(car, (handle - 0.1) * metre, rows - 0.81 * metre, handle * metre, rows - 0.77 * metre, _INK)
    write(car, "TAXI 42", 1.30 * metre, rows - 0.70 * metre, 0.12 * metre, _INK)
    write(car, "CITY CABS 555-0166", 1.30 * metre, rows - 0.50 * metre, 0.043 * metre, _INK)
    _box(car, 3.98 * metre, rows - 0.7 * metre, 4.12 * metre, rows - 0.58 * metre, (1.0, 0.97, 0.80))
    _box(car, 0.06 * metre, rows - 0.74 * metre, 0.16 * metre, rows - 0.6 * metre, (0.75, 0.08, 0.06))
    for wheel in (0.85, 3.3):
        arch = np.hypot(x - wheel * metre, y - (rows - _WHEEL_RADIUS * metre)) - 0.41 * metre
        blend(car, coverage(arch) * car[..., 3], (0.05, 0.05, 0.06))
    return car


def _paving(metre: int) -> list[Tensor]:
    """Return paving of 2 m period as a pyramid of halved pictures, [1, 3, 2 m, 2 m] each."""
    side = 2 * metre
    x, y = pixel_grid(side, side)
    tile = 0.5 * metre
    row = np.floor(y / tile).astype(int)
    shifted = x + (row % 2) * tile / 2
    column = np.floor(shifted / tile).astype(int) % 4
    edge = np.minimum(
        np.minimum(shifted % tile, tile - shifted % tile), np.minimum(y % tile, tile - y % tile)
    )
    tint = np.random.default_rng(61).random((4, 4), dtype=np.float32)[row, column]
    grain = fractal_noise(side, side, 90, 4, seed=62, gain=0.95)
    stone = (0.58 + 0.16 * tint + 0.5 * (grain - 0.5))[..., None] * np.array((1.0, 0.96, 0.90), np.float32)
    blend(stone, coverage(edge - 0.012 * metre), (0.30, 0.29, 0.28))
    return [_texture(level) for level in halves(np.clip(stone, 0, 1), 5)]


def _spoked_wheel(radius: float, turn: float, spokes: int, rim: Colour, tyre: Colour) -> Picture:
    """Return a car wheel of `radius` pixels turned by `turn` radians, premultiplied [2r + 4, 2r + 4, 4]."""
    side = 2 * math.ceil(radius) + 4
    x, y = pixel_grid(side, side)
    dx, dy = x - side / 2, y - side / 2
    r, angle = np.hypot(dx, dy), np.arctan2(dy, dx) - turn
    wheel = _blank(side, side)
    blend(wheel, coverage(r - radius), tyre)
    blend(wheel, coverage(np.abs(r - 0.66 * radius) - 0.06 * radius), rim)
    pitch = 2 * np.pi / spokes
    off = np.abs((angle + pitch / 2) % pitch - pitch / 2) * r
    blend(wheel, coverage(np.maximum(off - 0.035 * radius, r - 0.66 * radius)), rim)
    blend(wheel, coverage(r - 0.13 * radius), rim)
    return wheel


def _ferris_wheel(radius: float, turn: float) -> Picture:
    """Return the Ferris wheel: thin spokes, three rims, cabins that hang upright; [2.3 r, 2.3 r, 4]."""
    side = round(2.3 * radius)
    x, y = pixel_grid(side, side)
    centre = side / 2
    dx, dy = x - centre, y - centre
    r, angle = np.hypot(dx, dy), np.arctan2(dy, dx) - turn
    wheel = _blank(side, side)
    lines = np.full_like(r, np.inf)  # signed distance to the nearest of all rims and spokes
    for share, width in ((1.0, 2.6), (0.93, 1.6), (0.5, 1.6)):
        lines = np.minimum(lines, np.abs(r - share * radius) - width / 2)
    for spokes, phase, width in ((24, 0.0, 1.5), (48, 0.065, 0.8)):
        pitch = 2 * np.pi / spokes
        off = np.abs((angle + phase + pitch / 2) % pitch - pitch / 2) * r
        reach = np.maximum(r - radius, (0.0 if spokes == 24 else 0.5 * radius) - r)
        lines = np.minimum(lines, np.maximum(off - width / 2, reach))
    blend(wheel, coverage(lines), (0.93, 0.93, 0.95))
    blend(wheel, coverage(r - 0.07 * radius), (0.80, 0.22, 0.18))
    colours = ((0.82, 0.24, 0.20), (0.20, 0.42, 0.70), (0.92, 0.75, 0.25), (0.28, 0.56, 0.36))
    for cabin in range(16):
        a = turn + cabin * 2 * math.pi / 16
        cx, cy = centre + radius * math.cos(a), centre + radius * math.sin(a)
        size = 0.05 * radius
        _box(wheel, cx - size, cy, cx + size, cy + 1.7 * size, colours[cabin % 4])
        _box(wheel, cx - 0.7 * size, cy + 0.3 * size, cx + 0.7 * size, cy + 0.9 * size, (0.85, 0.92, 0.96))
    return wheel


def _ball(radius: float, turn: float) -> Picture:
    """Return a striped ball of `radius` pixels, lit from the upper right."""
    side = 2 * math.ceil(radius) + 4
    x, y = pixel_grid(side, side)
    dx, dy = (x - side / 2) / radius, (y - side / 2) / radius
    r = np.hypot(dx, dy)
    depth = np.sqrt(np.clip(1 - r * r, 0, 1))
    along = np.arctan2(dx * math.sin(turn) - dy * math.cos(turn), depth)
    stripe = np.clip(np.sin(along * 4) * radius * 0.25 + 0.5, 0, 1)[..., None]
    paint = stripe * np.array((0.86, 0.16, 0.14), np.float32) + (1 - stripe) * np.array(_CREAM, np.float32)
    light = np.clip(0.45 + 0.6 * (0.45 * dx - 0.55 * dy + 0.7 * depth), 0.2, 1.15)[..., None]
    ball = _blank(side, side)
    blend(ball, coverage((r - 1) * radius), np.clip(paint * light, 0, 1))
    return ball


class Street:
    """The scene: what does not change is drawn once, `frame` draws the rest."""

    def __init__(self) -> None:
        self._sky = _sky()
        self._hills = _texture(_hills())
        self._wall = _texture(_brick_wall(metre=190))
        self._cafe = Billboard(
            _texture(_cafe(metre=150)), left=-4.0, bottom=0.0, z=_WALL_FAR, metres_high=4.3
        )
        self._hedge = Billboard(_texture(_hedge(metre=90)), left=3.0, bottom=0.0, z=19.0, metres_high=1.3)
        self._tree = Billboard(_texture(_tree(metre=150)), left=1.9, bottom=0.0, z=12.0, metres_high=5.2)
        self._car = _car(metre=215)
        self._paving = _paving(metre=256)
        # The asphalt repeats every 4 m.
        asphalt = np.repeat(fractal_noise(512, 512, 170, 3, seed=71, gain=0.9)[..., None], 3, axis=-1)
        self._asphalt = _texture(np.clip(0.30 + 0.35 * (asphalt - 0.5), 0, 1))

    def frame(self, index: int) -> np.ndarray:
        """Return one frame, uint8 [HEIGHT, WIDTH, 3]."""
        seconds = index / FRAMES_PER_SECOND
        camera = Camera(x=-0.9 + 0.42 * seconds, z=0.16 * seconds)
        picture = np.zeros((_V, _U, 3), np.float32)
        self._draw_far(picture, camera, seconds)
        self._draw_ground(picture, camera)
        self._hedge.draw(picture, camera)
        self._cafe.draw(picture, camera)
        self._draw_wall(picture, camera)
        _shadow(picture, camera, x=4.4, z=12.0, width=2.0, depth=0.8, strength=0.45)
        self._tree.draw(picture, camera)
        self._draw_car(picture, camera, seconds)
        self._draw_ball(picture, camera, seconds)
        rows = picture[0::2] + picture[1::2]
        small = (rows[:, 0::2] + rows[:, 1::2]) * np.float32(255 / 4)
        return np.clip(small + 0.5, 0, 255).astype(np.uint8)

    def _draw_far(self, picture: Picture, camera: Camera, seconds: float) -> None:
        shift = 60 + round(3 * seconds)
        picture[: self._sky.shape[0]] = self._sky[:, shift : shift + _U]
        u0 = -200 - 14 * camera.x
        columns = self._hills.shape[-1]
        x = (torch.arange(_U) + 0.5 - u0) / columns * 2 - 1
        y = (torch.arange(260) + 0.5) / 260 * 2 - 1
        over(picture, _sample(self._hills, x[None, :], y[:, None]), int(_HORIZON) - 200, 0)
        z, centre = 46.0, (9.6, 8.6)
        radius = 7.4 * camera.scale(z)
        wheel = _ferris_wheel(radius, turn=0.22 * seconds)
        u, v = camera.column(centre[0], z), camera.row(centre[1], z)
        for foot in (-3.4, 3.4):
            base = (camera.column(centre[0] + foot, z), camera.row(0.0, z))
            stroke(picture, [(u, v), base], 5.0, (0.88, 0.88, 0.90))
        over(picture, wheel, round(v - wheel.shape[0] / 2), round(u - wheel.shape[1] / 2))

    def _draw_ground(self, picture: Picture, camera: Camera) -> None:
        first = int(_HORIZON) + 2
        distance = _FOCAL * _EYE_HEIGHT / (torch.arange(first, _V) + 0.5 - _HORIZON)
        x = camera.x + (torch.arange(_U) + 0.5 - _U / 2)[None, :] * distance[:, None] / _FOCAL
        z = (distance + camera.z)[:, None]
        ground = picture[first:]
        self._pave(ground, x, z, distance)
        road = _rows(((z > _ROAD_NEAR) & (z < _ROAD_FAR))[:, 0])
        ground[road] = _wrap(self._asphalt, x[road], z[road], 4.0)
        dash = (z - 8.9).abs().lt(0.06) & ((x % 2.4) < 1.3)
        ground[dash.numpy()] = (0.86, 0.85, 0.80)
        for edge in (_ROAD_NEAR, _ROAD_FAR):
            ground[_rows(((z - edge).abs() < 0.09)[:, 0])] = (0.66, 0.65, 0.62)
        lawn = _rows((z > _WALL_FAR)[:, 0])
        ground[lawn] = np.array((0.36, 0.44, 0.24), np.float32) * (0.8 + 0.4 * ground[lawn][..., 1:2])
        haze = np.clip((distance.numpy()[lawn] - 14) / 60, 0, 0.75)[:, None, None]
        ground[lawn] = ground[lawn] * (1 - haze) + haze * np.array((0.80, 0.82, 0.80), np.float32)

    def _pave(self, ground: Picture, x: Tensor, z: Tensor, distance: Tensor) -> None:
        """Add the paving, each row from the two levels of the pyramid that fit its distance."""
        texels = self._paving[0].shape[-1] / 2.0 * distance / _FOCAL * (distance / _EYE_HEIGHT).sqrt()
        level = texels.log2().clamp(0, len(self._paving) - 1.001)
        for index, texture in enumerate(self._paving):
            weight = (1 - (level - index).abs()).clamp(min=0)
            if weight.any():
                band = _rows(weight > 0)
                ground[band] += weight[band].numpy()[:, None, None] * _wrap(texture, x[band], z[band], 2.0)

    def _draw_wall(self, picture: Picture, camera: Camera) -> None:
        last = min(_U, math.ceil(camera.column(_WALL_X, _WALL_FAR)))
        if last <= 0:
            return
        u = torch.arange(last) + 0.5
        distance = (_WALL_X - camera.x) * _FOCAL / (u - _U / 2)
        along = (distance + camera.z - _WALL_NEAR) / (_WALL_FAR - _WALL_NEAR) * 2 - 1
        v = torch.arange(_V)[:, None] + 0.5
        y = _EYE_HEIGHT - (v - _HORIZON) * distance[None, :] / _FOCAL
        over(picture, _sample(self._wall, along[None, :], 1 - 2 * y / _WALL_HEIGHT), 0, 0)

    def _draw_car(self, picture: Picture, camera: Camera, seconds: float) -> None:
        left = -4.3 + 1.5 * seconds
        _shadow(picture, camera, x=left + 2.1, z=_CAR_Z, width=2.5, depth=0.55, strength=0.75)
        car = Billboard(_texture(self._car), left, 0.06, _CAR_Z, self._car.shape[0] / 215)
        car.draw(picture, camera)
        radius = _WHEEL_RADIUS * camera.scale(_CAR_Z)
        for place in (0.85, 3.3):
            wheel = _spoked_wheel(
                radius, (left + 4) / _WHEEL_RADIUS, 10, (0.82, 0.83, 0.85), (0.09, 0.09, 0.10)
            )
            u, v = camera.column(left + place, _CAR_Z), camera.row(_WHEEL_RADIUS, _CAR_Z)
            over(picture, wheel, round(v - wheel.shape[0] / 2), round(u - wheel.shape[1] / 2))

    def _draw_ball(self, picture: Picture, camera: Camera, seconds: float) -> None:
        x, z, radius = 1.9 - 0.7 * seconds, 5.2, 0.17
        height = radius + 0.75 * abs(math.sin(2.6 * seconds + 0.9))
        _shadow(
            picture, camera, x=x, z=z, width=0.2 + 0.15 * height, depth=0.09, strength=0.6 - 0.35 * height
        )
        ball = _ball(radius * camera.scale(z), turn=3.1 * seconds)
        u, v = camera.column(x, z), camera.row(height, z)
        over(picture, ball, round(v - ball.shape[0] / 2), round(u - ball.shape[1] / 2))


def _rows(chosen: Tensor) -> slice:
    """Return the band of rows from the first to the last chosen one."""
    places = chosen.nonzero()[:, 0]
    return slice(int(places[0]), int(places[-1]) + 1)


def _wrap(texture: Tensor, x: Tensor, z: Tensor, period: float) -> Picture:
    """Sample a texture [1, 3, n, n] that repeats every `period` metres."""
    padded = F.pad(texture, (1, 1, 1, 1), mode="circular")
    shrink = texture.shape[-1] / padded.shape[-1]
    return _sample(padded, (x / period % 1 * 2 - 1) * shrink, (z / period % 1 * 2 - 1) * shrink)


def _shadow(
    picture: Picture, camera: Camera, *, x: float, z: float, width: float, depth: float, strength: float
) -> None:
    """Darken the ground softly under something: an ellipse of `width` and `depth` metres around (x, z)."""
    u, v = camera.column(x, z), camera.row(0.0, z)
    half_u = width * camera.scale(z)
    half_v = depth * camera.scale(z) * _EYE_HEIGHT / (z - camera.z)
    v0, v1 = max(0, int(v - 2 * half_v)), min(_V, int(v + 2 * half_v) + 1)
    u0, u1 = max(0, int(u - 2 * half_u)), min(_U, int(u + 2 * half_u) + 1)
    if u0 >= u1 or v0 >= v1:
        return
    px, py = pixel_grid(v1 - v0, u1 - u0)
    away = np.hypot((px + u0 - u) / half_u, (py + v0 - v) / half_v)
    picture[v0:v1, u0:u1] *= (1 - strength * np.clip(1.5 - away, 0, 1) ** 2 / 2.25 * 1.6).clip(0.15, 1)[
        ..., None
    ]
