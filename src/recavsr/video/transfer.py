"""Linear light of code values, for files that hold light (EXR): 1.0 is the reference white of the source.

H.273 transfer codes. SDR is taken as a display shows it (BT.1886: a power of 2.4; sRGB where tagged, or where
nothing is tagged in a picture file), PQ as its cd/m2 over 203, HLG as the scene's light over that of 75 %
signal (both references are BT.2408's).
"""

from __future__ import annotations

import numpy as np

LINEAR, SRGB, PQ, HLG = 8, 13, 16, 18
PQ_WHITE = 203.0  # cd/m2
_POWERS = {4: 2.2, 5: 2.8}


def linear_light(pixels: np.ndarray, transfer: int) -> np.ndarray:
    """Return the float32 linear light of uint8 or uint16 (full scale) code values, any shape."""
    signal = np.arange(int(np.iinfo(pixels.dtype).max) + 1) / np.iinfo(pixels.dtype).max
    return _light(signal, transfer).astype(np.float32)[pixels]


def _light(signal: np.ndarray, transfer: int) -> np.ndarray:
    if transfer == LINEAR:
        return signal
    if transfer == SRGB:
        return np.where(signal <= 0.04045, signal / 12.92, ((signal + 0.055) / 1.055) ** 2.4)
    if transfer == PQ:
        m1, m2, c1, c2, c3 = 2610 / 16384, 2523 / 32, 3424 / 4096, 2413 / 128, 2392 / 128
        root = signal ** (1 / m2)
        return 10_000 * (np.maximum(root - c1, 0) / (c2 - c3 * root)) ** (1 / m1) / PQ_WHITE
    if transfer == HLG:
        return _hlg_scene(signal) / _hlg_scene(np.array(0.75))
    return signal ** _POWERS.get(transfer, 2.4)


def _hlg_scene(signal: np.ndarray) -> np.ndarray:
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    return np.where(signal <= 0.5, signal**2 / 3, (np.exp((signal - c) / a) + b) / 12)
