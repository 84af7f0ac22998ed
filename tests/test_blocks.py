"""LR frames to the output size and results to pictures: exact, whatever the piece of work in the cache."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from recavsr.geometry import padded_size
from recavsr.stream import blocks
from recavsr.stream.blocks import made_smaller, prepare_lr_frames, to_picture

UINT8, UINT16 = np.dtype(np.uint8), np.dtype(np.uint16)
SIZES = [
    ((18, 32), (72, 128)),  # x4
    ((17, 23), (51, 69)),  # x3: weights that are no round numbers
    ((15, 20), (30, 40)),  # x2
    ((30, 50), (91, 173)),  # an odd scale each way
    ((40, 41), (33, 29)),  # down
    ((1, 1), (5, 7)),
    ((1, 9), (4, 36)),
    ((9, 12), (9, 48)),  # one way only
    ((9, 12), (9, 12)),
]


def random_frames(count: int, size: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    rng = np.random.default_rng(size[0] * 1000 + size[1])
    return rng.integers(0, np.iinfo(dtype).max, (count, *size, 3), endpoint=True).astype(dtype)


@pytest.mark.parametrize("piece", [1, 3000, blocks.PIECE])
@pytest.mark.parametrize(("lr_size", "size"), SIZES)
def test_uint8_frames_are_resized_as_opencv_does(
    lr_size: tuple[int, int], size: tuple[int, int], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cv2 = pytest.importorskip("cv2")
    monkeypatch.setattr(blocks, "PIECE", piece)
    frames = random_frames(3, lr_size, UINT8)
    expected = [cv2.resize(frame, size[::-1], interpolation=cv2.INTER_LINEAR) for frame in frames]
    prepared = prepare_lr_frames(frames, size, 1)
    assert np.array_equal(to_picture(prepared, size, UINT8), np.stack(expected))
    values = torch.from_numpy(np.stack(expected)).float().mul(2.0 / 255).sub(1.0)
    assert torch.equal(prepared[0].permute(1, 2, 3, 0), values)


@pytest.mark.parametrize(("lr_size", "size"), SIZES)
def test_uint16_frames_are_resized_within_a_level(lr_size: tuple[int, int], size: tuple[int, int]) -> None:
    cv2 = pytest.importorskip("cv2")
    frames = random_frames(2, lr_size, UINT16)
    expected = [cv2.resize(x.astype(np.float64), size[::-1], interpolation=cv2.INTER_LINEAR) for x in frames]
    result = to_picture(prepare_lr_frames(frames, size, 1), size, UINT16)
    assert np.abs(result.astype(np.float64) - np.stack(expected)).max() <= 1


@pytest.mark.parametrize("dtype", [UINT8, UINT16])
@pytest.mark.parametrize(("size", "multiple"), [((40, 61), 16), ((5, 40), 16), ((6, 4), 32), ((32, 48), 16)])
def test_padding_reflects_or_repeats_the_last_line(
    size: tuple[int, int], multiple: int, dtype: np.dtype
) -> None:
    frames = random_frames(2, (7, 9), dtype)
    height, width = padded_size(*size, multiple)
    prepared = prepare_lr_frames(frames, size, multiple)
    assert prepared.shape == (1, 3, 2, height, width)
    assert prepared[0].transpose(0, 1).is_contiguous()
    expected = prepare_lr_frames(frames, size, 1)[0].numpy()
    for axis, beyond in ((3, width - size[1]), (2, height - size[0])):
        pad = [(0, 0)] * 4
        pad[axis] = (0, beyond)
        expected = np.pad(expected, pad, mode="reflect" if beyond < expected.shape[axis] else "edge")
    assert np.array_equal(prepared[0].numpy(), expected)


@pytest.mark.parametrize("dtype", [UINT8, UINT16])
def test_every_level_survives_the_way_in_and_out(dtype: np.dtype) -> None:
    levels = np.arange(np.iinfo(dtype).max + 1).astype(dtype)
    frames = np.repeat(levels.reshape(1, 16, -1, 1), 3, axis=3)
    size = frames.shape[1:3]
    assert np.array_equal(to_picture(prepare_lr_frames(frames, size, 16), size, dtype), frames)


@pytest.mark.parametrize("piece", [1, blocks.PIECE])
def test_pictures_round_half_to_even_and_clamp(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "PIECE", piece)
    values = torch.tensor([-9.0, -1.0, 0.0, 1.0, 1.5, 0.25, 2 / 255 - 1, 0.5 / 127.5 - 1, 2.5 / 127.5 - 1])
    frames = values.repeat(1, 3, 2, 4, 1)
    expected = [0, 0, 128, 255, 255, 159, 1, 0, 2]  # 127.5 to 128, 159.375, and 0.5 to 0, 2.5 to 2
    assert np.array_equal(to_picture(frames, (4, 9), UINT8)[1, 3, :, 2], expected)
    assert to_picture(frames.to(torch.bfloat16), (2, 3), UINT8).shape == (2, 2, 3, 3)


def test_channels_keep_their_order() -> None:
    frames = np.zeros((1, 8, 8, 3), np.uint8)
    frames[..., 0], frames[..., 2] = 200, 90
    picture = to_picture(prepare_lr_frames(frames, (32, 32), 16), (32, 32), UINT8)
    assert picture[0, 5, 6].tolist() == [200, 0, 90]


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="uint8 or uint16"):
        prepare_lr_frames(np.zeros((1, 4, 4, 3), np.float32), (8, 8), 8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card")
@pytest.mark.parametrize("dtype", [UINT8, UINT16])
def test_cuda_gives_what_the_cpu_gives(dtype: np.dtype) -> None:
    frames = random_frames(2, (17, 23), dtype)
    here, there = (prepare_lr_frames(frames, (64, 99), 32, device) for device in ("cpu", "cuda"))
    assert (there.cpu() - here).abs().max() <= (0 if dtype == UINT8 else 2.1 / 65535)
    assert np.array_equal(to_picture(here.cuda(), (64, 99), dtype), to_picture(here, (64, 99), dtype))
    smaller = (made_smaller(x[..., :64, :99], (40, 50)).cpu() for x in (here, there))
    assert torch.allclose(*smaller, atol=1e-4)


def test_frames_are_made_smaller_without_aliases() -> None:
    rows = torch.arange(64.0)
    fine = torch.cos(rows * 3.0).expand(1, 3, 2, 48, 64)  # above what half as many columns can hold
    coarse = torch.cos(rows * 0.2).expand(1, 3, 2, 48, 64)
    small = made_smaller(fine.to(torch.bfloat16), (24, 32))
    assert (small.shape, small.dtype) == ((1, 3, 2, 24, 32), torch.float32)
    assert small[..., 4:-4].abs().max() < 0.05
    expected = torch.cos((2 * torch.arange(32.0) + 0.5) * 0.2)
    assert (made_smaller(coarse, (24, 32)) - expected)[..., 4:-4].abs().max() < 0.02
    assert made_smaller(fine, (48, 64)) is fine


@pytest.mark.parametrize("size", [(100, 77), (33, 200), (1, 1)])
def test_making_smaller_is_lanczos_of_three_lobes(size: tuple[int, int]) -> None:
    picture = np.random.default_rng(1).uniform(-1, 1, (101, 200)).astype(np.float32)
    made = made_smaller(torch.from_numpy(picture).expand(1, 3, 1, -1, -1), size)

    def filtered(x: np.ndarray, target: int) -> np.ndarray:  # down
        step = len(x) / target
        away = (np.arange(len(x)) + 0.5 - (np.arange(target)[:, None] + 0.5) * step) / step
        weights = np.where(np.abs(away) < 3, np.sinc(away) * np.sinc(away / 3), 0)
        return weights / weights.sum(axis=1, keepdims=True) @ x

    expected = filtered(filtered(picture, size[0]).T, size[1]).T
    assert np.abs(made[0, 2, 0].numpy() - expected).max() < 2e-6
