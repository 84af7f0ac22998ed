"""The decoder streams: pieces equal the whole, with both heads."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recavsr import fused
from recavsr.attention import SpatialWindow
from recavsr.errors import InputError
from recavsr.geometry import Grid, frames_of_latents
from recavsr.layers import halved, unshuffled
from recavsr.models.decoder import ConvolutionalHead, DecoderConfig, FlashDecoder, _closed
from recavsr.models.folded_decoder import pack
from recavsr.models.presets import nano_decoder, recavsr_5b_decoder
from tiny import CHANNELS, DECODER, STRIDE, one_thread, tiny_decoder


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


ROWS, COLUMNS = 5, 6
HEADS = ("linear", "convolutional")


def clip(latents: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    torch.manual_seed(4)
    shape = (batch, 3, frames_of_latents(0, latents), STRIDE * ROWS, STRIDE * COLUMNS)
    return torch.randn(batch, CHANNELS, latents, ROWS, COLUMNS), torch.rand(shape) * 2 - 1


@torch.no_grad()
def decode(
    model: FlashDecoder, latents: Tensor, lr_frames: Tensor, sizes: list[int], in_place: bool = False
) -> Tensor:
    state, frames = model.start(), []
    for piece in latents.split(sizes, dim=2):
        first = frames_of_latents(0, state.next_position)
        count = frames_of_latents(state.next_position, piece.shape[2])
        state, out = model.step(state, piece, lr_frames[:, :, first : first + count], in_place=in_place)
        frames.append(out)
    return torch.cat(frames, dim=2)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("sizes", [[6, 2, 2], [1] * 10, [1, 9], [3, 5, 2]], ids=str)
@pytest.mark.parametrize("window_latents", [1, 2, 3])
def test_pieces_equal_the_whole(head: str, sizes: list[int], window_latents: int) -> None:
    model = tiny_decoder(head=head, window_latents=window_latents)
    latents, lr_frames = clip(10)
    whole = decode(model, latents, lr_frames, [10])
    assert whole.shape == lr_frames.shape
    assert whole.dtype == torch.float32
    torch.testing.assert_close(decode(model, latents, lr_frames, sizes), whole, atol=2e-6, rtol=0)


@pytest.mark.parametrize("head", HEADS)
def test_lr_frames_may_be_read_at_half_their_size(head: str) -> None:
    """Then only the means of 2 x 2 pixels count; what a convolutional head adds to is full size."""
    model = tiny_decoder(head=head, lr_halved=True)
    latents, lr_frames = clip(5)
    means = halved(lr_frames).repeat_interleave(2, 3).repeat_interleave(2, 4)
    made, wanted = (decode(model, latents, frames, [3, 2]) for frames in (lr_frames, means))
    if head == "convolutional":
        made, wanted = made - lr_frames, wanted - means
    assert made.std() > 0.01
    torch.testing.assert_close(made, wanted, atol=2e-6, rtol=0)
    torch.testing.assert_close(
        decode(model, latents, lr_frames, [5]), decode(model, latents, lr_frames, [3, 2])
    )


@pytest.mark.parametrize("changes", [{}, {"heads": 4, "groups": 2, "window_latents": 3}], ids=str)
def test_packed_products_change_nothing(changes: dict[str, int]) -> None:
    model, latents_and_frames = tiny_decoder(**changes), clip(7)
    wanted = decode(model, *latents_and_frames, [3, 4])
    packed = pack(copy.deepcopy(model))
    torch.testing.assert_close(decode(packed, *latents_and_frames, [3, 4]), wanted, atol=2e-6, rtol=0)
    assert sum(p.numel() for p in packed.parameters()) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("head", HEADS)
def test_the_first_latent_gives_one_frame(head: str) -> None:
    model = tiny_decoder(head=head)
    latents, lr_frames = clip(3)
    with torch.no_grad():
        state, first = model.step(model.start(), latents[:, :, :1], lr_frames[:, :, :1])
        assert first.shape[2] == 1
        state, second = model.step(state, latents[:, :, 1:2], lr_frames[:, :, 1:5])
        assert second.shape[2] == 4
    assert state.next_position == 2


@pytest.mark.parametrize("head", HEADS)
def test_the_first_frame_is_the_last_of_four_equal_ones(head: str) -> None:
    """Its three unseen copies have the LR frame of the first: no other LR frame is read."""
    model = tiny_decoder(head=head)
    latents, lr_frames = clip(1)
    seen = []
    handle = model.lr_stem.register_forward_hook(lambda _, given, out: seen.append(out))
    decode(model, latents, lr_frames, [1])
    handle.remove()
    (stem,) = seen  # B N F C
    assert stem.shape[2] == 4
    assert all(torch.equal(stem[:, :, 0], stem[:, :, i]) for i in range(1, 4))


@pytest.mark.parametrize("head", HEADS)
def test_the_past_reaches_one_latent_far_and_the_future_not_at_all(head: str) -> None:
    """Two layers see one latent before, so latent 3 is read by 3, 4 and 5 and, through layers, 6."""
    model = tiny_decoder(head=head)
    latents, lr_frames = clip(9)
    before = decode(model, latents, lr_frames, [6, 3])
    other = latents.clone()
    other[:, :, 3] += 1
    after = decode(model, other, lr_frames, [6, 3])
    changed = (before != after).flatten(3).any(-1)[0].any(0)
    first = frames_of_latents(0, 3)
    assert not changed[:first].any()
    assert changed[first : first + 8].all()
    # backbone of depth 2, then one refinement layer over 4 frames: 3 latents further at the most
    assert not changed[frames_of_latents(0, 7) :].any()


@pytest.mark.parametrize("head", HEADS)
def test_memory_is_bounded(head: str) -> None:
    model = tiny_decoder(head=head)
    latents, lr_frames = clip(12)
    sizes = set()
    with torch.no_grad():
        state, _ = model.step(model.start(), latents[:, :, :2], lr_frames[:, :, :5])
        for first in range(2, 12, 2):
            frames = slice(4 * first - 3, 4 * first + 5)
            state, _ = model.step(state, latents[:, :, first : first + 2], lr_frames[:, :, frames])
            sizes.add(state.nbytes)
    assert len(sizes) == 1


def test_a_batch_equals_its_clips() -> None:
    model = tiny_decoder()
    latents, lr_frames = clip(4, batch=2)
    both = decode(model, latents, lr_frames, [2, 2])
    for i in range(2):
        alone = decode(model, latents[i : i + 1], lr_frames[i : i + 1], [2, 2])
        torch.testing.assert_close(both[i : i + 1], alone, atol=2e-6, rtol=0)


def test_latents_are_denormalised() -> None:
    latents, lr_frames = clip(2)
    plain = tiny_decoder(latents_mean=(0.0,) * CHANNELS, latents_std=(1.0,) * CHANNELS)
    mean, std = (torch.tensor(x).view(1, -1, 1, 1, 1) for x in (DECODER.latents_mean, DECODER.latents_std))
    ours = decode(tiny_decoder(), latents, lr_frames, [2])
    torch.testing.assert_close(ours, decode(plain, latents * std + mean, lr_frames, [2]))


def test_the_convolutional_head_starts_from_the_lr_frames() -> None:
    torch.manual_seed(0)
    model = FlashDecoder(replace(DECODER, head="convolutional"))
    latents, lr_frames = clip(3)
    assert torch.equal(decode(model, latents, lr_frames, [3]), lr_frames)


@pytest.mark.parametrize("head", HEADS)
def test_bfloat16_is_near_float32(head: str) -> None:
    latents, lr_frames = clip(4)
    lr_frames = lr_frames.bfloat16()
    model = tiny_decoder(head=head).bfloat16()
    half = decode(model, latents, lr_frames, [2, 2])
    exact = decode(model.float(), latents, lr_frames.float(), [2, 2])
    assert half.dtype == torch.float32
    assert (half - exact).square().mean().sqrt() < 0.01 * exact.square().mean().sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head", HEADS)
def test_some_rows_at_a_time_change_nothing(
    head: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU what is wide exists for some cells at a time."""
    latents, lr_frames = clip(4)
    model, lr_frames = tiny_decoder(head=head).to(dtype), lr_frames.to(dtype)
    wanted = decode(model, latents, lr_frames, [2, 2])
    monkeypatch.setattr(fused, "CPU_ROWS", 7)
    monkeypatch.setattr(fused, "CPU_NORM_ROWS", 5)
    found = decode(model, latents, lr_frames, [2, 2])
    tolerance = 1e-5 if dtype == torch.float32 else 0.01
    assert (found - wanted).square().mean().sqrt() <= tolerance * wanted.square().mean().sqrt()


def test_autocast_chooses_types_for_all_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of a training in bfloat16 are drawn so."""
    monkeypatch.setattr(fused, "CPU_ROWS", 7)
    latents, lr_frames = clip(2)
    model = tiny_decoder()
    with torch.autocast("cpu", torch.bfloat16):
        half = decode(model, latents, lr_frames, [2])
    exact = decode(model, latents, lr_frames, [2])
    assert (half - exact).square().mean().sqrt() < 0.02 * exact.square().mean().sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pixels_move_as_in_the_library(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 8, 12).to(dtype)
    opened = unshuffled(x[:, :, None], 4).transpose(1, 2).flatten(0, 1)
    assert torch.equal(opened, F.pixel_unshuffle(x, 4))
    assert opened.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(_closed(opened, 4), x)
    assert torch.equal(_closed(opened.contiguous(), 4), x)


@pytest.mark.parametrize(("start", "frames"), [(0, 8), (0, 4), (0, 6), (2, 5), (2, 7), (2, 9)])
def test_another_frame_count_is_refused(start: int, frames: int) -> None:
    model = tiny_decoder()
    latents, lr_frames = clip(4)
    state = model.start()
    with torch.no_grad():
        if start:
            state, _ = model.step(state, latents[:, :, :2], lr_frames[:, :, :5])
        with pytest.raises(ValueError, match=f"{frames} LR frames do not fit 2 latents"):
            model.step(state, latents[:, :, :2], lr_frames[:, :, :frames])


@pytest.mark.parametrize(
    "config",
    [recavsr_5b_decoder(), nano_decoder(), DecoderConfig(lr_conditioning=False)],
    ids=["5B", "nano", "no LR"],
)
def test_released_config_round_trip(config: DecoderConfig) -> None:
    vae = {"latents_mean": [0.5] * 48, "latents_std": [2.0] * 48}
    wanted = replace(config, latents_mean=(0.5,) * 48, latents_std=(2.0,) * 48)
    assert DecoderConfig.from_released(config.to_released(), vae) == wanted
    assert DecoderConfig.from_released(config.to_released()) == config


def test_the_sizes_of_latents_are_those_of_the_vae() -> None:
    vae = {"latents_mean": [0.0] * 12, "latents_std": [1.0] * 12, "scale_factor_spatial": 8}
    config = DecoderConfig.from_released(nano_decoder().to_released(), vae)
    assert (config.latent_channels, config.latent_stride) == (12, 8)


def test_the_released_variant_needs_no_sizes() -> None:
    assert DecoderConfig.from_released({"variant": "S"}) == DecoderConfig()


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"variant": "XL"}, "XL"),
        ({"colour": 1}, "colour"),
        ({"spatial_window_size": [5, 5]}, "even sides"),
        ({"spatial_window_size": 24}, "malformed"),
    ],
)
def test_a_wrong_config_is_refused_by_name(config: dict, named: str) -> None:
    with pytest.raises(InputError, match=named):
        DecoderConfig.from_released(config)


def test_missing_latent_statistics_are_named() -> None:
    with pytest.raises(InputError, match="latents_mean"):
        DecoderConfig.from_released({}, {"latents_std": [1.0] * 48})


def test_a_window_of_tiles_streams_too() -> None:
    model = tiny_decoder(window=SpatialWindow(4, 4, stride=2))
    latents, lr_frames = clip(4)
    whole = decode(model, latents, lr_frames, [4])
    torch.testing.assert_close(decode(model, latents, lr_frames, [1, 3]), whole, atol=2e-6, rtol=0)


@pytest.mark.parametrize("window_latents", [1, 2, 3])
def test_states_written_in_place_change_nothing(window_latents: int) -> None:
    model = tiny_decoder(replace(DECODER, window_latents=window_latents))
    sizes = [6, 2, 2, 1, 1]
    assert torch.equal(decode(model, *clip(12), sizes, in_place=True), decode(model, *clip(12), sizes))


@torch.inference_mode()
@pytest.mark.parametrize("frames", [1, 3])
def test_channels_lie_last_through_the_whole_convolutional_head(frames: int) -> None:
    """One convolution that puts them first costs a sixth of the head's time, for it and its neighbours."""
    head = ConvolutionalHead(nano_decoder())
    convolutions = [layer for layer in head.modules() if isinstance(layer, nn.Conv2d)]
    last: list[bool] = []
    for layer in convolutions:
        layer.register_forward_hook(
            lambda _, given, made: last.append(given[0].stride(1) == made.stride(1) == 1)
        )
    lr_frames = torch.rand(1, 3, frames, 96, 80)
    head(torch.randn(1, 6 * 5, frames, 256), Grid(6, 5), lr_frames, halved(lr_frames))
    assert last == [True] * len(convolutions) * frames
