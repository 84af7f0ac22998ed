"""Causal convolutions and the LR projector stream: pieces equal the whole, the future changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from recavsr import causal_conv
from recavsr.causal_conv import CausalConv3d, ConvHistory, Method
from recavsr.layers import halved, packed, unshuffled
from recavsr.models import lr_projector
from recavsr.models.lr_projector import (
    LRProjector,
    LRProjectorState,
    unshuffle_frames,
)
from tiny import one_thread


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


FRAMES = 29
CUTS = [[29], [1] * 29, [21, 8], [1, 4, 8, 16], [2, 3, 5, 7, 11, 1], [3, 3, 3, 20]]


def conv_in_pieces(conv: CausalConv3d, x: Tensor, sizes: list[int]) -> Tensor:
    history, outputs = None, []
    for piece in x.split(sizes, dim=2):
        history, y = conv.step(history, piece)
        outputs.append(y)
    return torch.cat(outputs, dim=2)


def project(projector: LRProjector, x: Tensor, sizes: list[int]) -> Tensor:
    state, outputs = LRProjectorState(), []
    for piece in x.split(sizes, dim=2):
        state, tokens = projector.step(state, piece)
        outputs.append(tokens)
    return torch.cat(outputs, dim=2)


@pytest.fixture
def projector() -> LRProjector:
    torch.manual_seed(1)
    model = LRProjector((8, 12), 16, latent_stride=4, patch=2)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter)  # biases are zero at first, which would hide a wrong one
    return model.requires_grad_(False)


@pytest.mark.parametrize("stride", [(1, 1, 1), (2, 1, 1), (2, 2, 2), (3, 1, 2)])
@pytest.mark.parametrize("sizes", CUTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_pieces_equal_the_whole(stride: tuple[int, int, int], sizes: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    conv = CausalConv3d(3, 5, (4, 3, 3), stride).to(dtype).requires_grad_(False)
    x = torch.randn(2, 3, FRAMES, 6, 7).to(dtype)
    whole, pieces = conv_in_pieces(conv, x, [FRAMES]), conv_in_pieces(conv, x, sizes)
    assert whole.shape[2] == -(-FRAMES // stride[0])
    torch.testing.assert_close(pieces, whole, atol=1e-6 if dtype == torch.float32 else 2e-2, rtol=0)


def test_it_is_the_padded_convolution() -> None:
    """Its definition: the first frame repeated in front, zeros around each picture."""
    torch.manual_seed(0)
    conv = CausalConv3d(3, 5, (4, 3, 3), (2, 2, 2))
    nn.init.normal_(conv.bias)
    x = torch.randn(1, 3, 9, 6, 8)
    padded = torch.cat([x[:, :, :1].expand(-1, -1, 3, -1, -1), x], dim=2)
    wanted = nn.functional.conv3d(padded, conv.weight, conv.bias, (2, 2, 2), (0, 1, 1))
    _, out = conv.step(None, x)
    torch.testing.assert_close(out, wanted)


@pytest.mark.parametrize("changed", [1, 4, 5, 20, 28])
def test_the_future_never_changes_the_past(changed: int) -> None:
    torch.manual_seed(0)
    conv = CausalConv3d(3, 4, (4, 3, 3), (2, 1, 1)).requires_grad_(False)
    x = torch.randn(1, 3, FRAMES, 4, 4)
    other = x.clone()
    other[:, :, changed:] += 1
    a, b = conv_in_pieces(conv, x, [FRAMES]), conv_in_pieces(conv, other, [FRAMES])
    before = (changed + 1) // 2  # outputs stand at frames 0, 2, 4, ...
    assert torch.equal(a[:, :, :before], b[:, :, :before])
    assert not torch.equal(a[:, :, before:], b[:, :, before:])


def test_the_history_is_the_last_frames() -> None:
    conv = CausalConv3d(2, 2, (4, 3, 3), (2, 1, 1)).requires_grad_(False)
    x = torch.randn(1, 2, 7, 3, 3)
    history, _ = conv.step(None, x)
    assert torch.equal(history.frames, x[:, :, -3:])
    assert history.phase == 1  # frames 0, 2, 4, 6 gave outputs; one frame passes before frame 8
    history, out = conv.step(ConvHistory(history.frames, history.phase), x[:, :, :1])
    assert (out.shape[2], history.phase) == (0, 0)


@pytest.mark.parametrize("sizes", CUTS, ids=str)
def test_projector_pieces_equal_the_whole(projector: LRProjector, sizes: list[int]) -> None:
    x = torch.rand(2, 3, FRAMES, 16, 24) * 2 - 1
    whole = project(projector, x, [FRAMES])
    assert whole.shape == (2, 2 * 3, 8, 16)
    torch.testing.assert_close(project(projector, x, sizes), whole, atol=2e-6, rtol=0)


@pytest.mark.parametrize("changed", range(1, FRAMES, 3))
def test_projector_token_j_reads_frames_up_to_4j(projector: LRProjector, changed: int) -> None:
    x = torch.rand(1, 3, FRAMES, 16, 16) * 2 - 1
    other = x.clone()
    other[:, :, changed:] *= -1
    a, b = project(projector, x, [FRAMES]), project(projector, other, [FRAMES])
    before = (changed + 3) // 4
    assert torch.equal(a[:, :, :before], b[:, :, :before])
    assert not torch.equal(a[:, :, before], b[:, :, before])


@pytest.mark.parametrize("sizes", [[21, 8], [1, 4, 1, 1, 14, 8]], ids=str)
@pytest.mark.parametrize("gradients", [False, True])
def test_projector_in_bfloat16_is_near_float32(
    projector: LRProjector, sizes: list[int], gradients: bool
) -> None:
    """The two precisions run different code, without gradients in rooms."""
    x = (torch.rand(1, 3, FRAMES, 16, 24) * 2 - 1).bfloat16()
    exact = project(projector.bfloat16().float(), x.float(), [21, 8])
    with torch.set_grad_enabled(gradients):
        half = project(projector.bfloat16(), x, sizes)
    assert half.dtype == torch.bfloat16
    error = (half.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_frames_at_half_their_size_are_means_of_two_by_two(dtype: torch.dtype) -> None:
    x = torch.rand(2, 3, 5, 6, 8).to(dtype)
    wanted = x.float().unflatten(4, (4, 2)).unflatten(3, (3, 2)).mean((4, 6))
    torch.testing.assert_close(
        halved(x).float(), wanted, atol=1e-6 if dtype == torch.float32 else 4e-3, rtol=0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_a_projector_may_read_frames_at_half_their_size(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    model = LRProjector((8, 12), 16, latent_stride=4, patch=2, lr_halved=True).to(dtype)
    smaller = LRProjector((8, 12), 16, latent_stride=2, patch=2).to(dtype)
    smaller.load_state_dict(model.state_dict())
    x = (torch.rand(1, 3, FRAMES, 16, 24) * 2 - 1).to(dtype)
    with torch.no_grad():
        made, wanted = project(model, x, [21, 8]), project(smaller, halved(x), [21, 8])
    torch.testing.assert_close(made, wanted, atol=2e-6 if dtype == torch.float32 else 2e-2, rtol=0)


@pytest.mark.parametrize("unshuffle", [unshuffle_frames, unshuffled])
def test_unshuffle_order_is_channel_row_column(unshuffle: Callable[[Tensor, int], Tensor]) -> None:
    x = torch.arange(2 * 3 * 4 * 6.0).view(1, 2, 3, 4, 6)
    out = unshuffle(x, 2)
    assert out.shape == (1, 8, 3, 2, 3)
    for channel in range(2):
        for row in range(2):
            for column in range(2):
                part = x[0, channel, :, row::2, column::2]
                assert torch.equal(out[0, channel * 4 + row * 2 + column], part)


@pytest.mark.parametrize("passed", [21, 22, 23, 24])
def test_a_history_that_forgets_stays_in_phase(projector: LRProjector, passed: int) -> None:
    """As if all frames before had been the next one, whatever the phase of the strides."""
    x = torch.rand(1, 3, passed + 12, 16, 16) * 2 - 1
    state, _ = projector.step(LRProjectorState(), x[:, :, :passed])
    _, after = projector.step(state.forget(), x[:, :, passed:])
    conv = projector.conv1
    history, _ = conv.step(None, unshuffle_frames(x[:, :, :passed], 4))
    still = unshuffle_frames(x[:, :, passed : passed + 1].expand(-1, -1, passed, -1, -1), 4)
    stilled, _ = conv.step(None, still)
    rest = unshuffle_frames(x[:, :, passed:], 4)
    forgot, kept = conv.step(history.forget(), rest)[1], conv.step(history, rest)[1]
    assert torch.equal(forgot, conv.step(stilled, rest)[1])
    assert not torch.equal(forgot, kept)
    assert after.shape == projector.step(state, x[:, :, passed:])[1].shape


STRIDES = {
    "unfolded": [(1, 1, 1), (2, 1, 1), (2, 2, 2), (3, 1, 2)],
    "planes": [(2, 1, 1), (2, 2, 2)],
    "shifted": [(1, 1, 1), (2, 1, 1)],
}


@pytest.mark.parametrize(
    ("method", "stride"), [(method, stride) for method, strides in STRIDES.items() for stride in strides]
)
@pytest.mark.parametrize("piece", [1, 1 << 28], ids=["many-pieces", "one-piece"])
@pytest.mark.parametrize("arranged", [False, True])
def test_every_method_is_the_library_s_convolution(
    method: Method, stride: tuple[int, int, int], piece: int, arranged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr("recavsr.causal_conv._PIECE_BYTES", piece)
    conv = CausalConv3d(6, 5, (4, 3, 3), stride).requires_grad_(False)
    nn.init.normal_(conv.bias)
    x = torch.randn(2, 6, FRAMES, 5, 7)
    wanted = conv_in_pieces(conv, x, [21, 8])
    weight = conv.weight.clone()
    if arranged:
        conv.arrange_weight()
    assert torch.equal(conv.weight, weight)
    conv.method = method
    torch.testing.assert_close(conv_in_pieces(conv, x, [21, 8]), wanted, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(conv_in_pieces(conv, x, [1, 4, 16, 8]), wanted, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("method", ["library", "planes", "shifted", "unfolded"])
def test_frames_written_into_a_room_give_the_same(method: Method) -> None:
    torch.manual_seed(0)
    conv = CausalConv3d(6, 5, (4, 3, 3), (2, 1, 1)).requires_grad_(False)
    nn.init.normal_(conv.bias)
    x = torch.randn(2, 6, FRAMES, 5, 7)
    wanted = conv_in_pieces(conv, x, [21, 8])
    conv.method = method
    history, outputs = None, []
    for piece in x.split([21, 8], dim=2):
        seen, room = conv.room(x, piece.shape[2], 5, 7)
        room.copy_(piece)
        history, out = conv.step_in_room(history, seen, biased=piece.shape[2] == 8)
        outputs.append(out if piece.shape[2] == 8 else out + conv.bias[:, None, None, None])
        if method == "shifted":  # a product reads a cell's frames where they are
            assert seen.permute(0, 3, 4, 2, 1).is_contiguous()
    torch.testing.assert_close(torch.cat(outputs, dim=2), wanted, atol=2e-6, rtol=1e-5)


def test_an_arranged_weight_is_read_without_a_copy() -> None:
    conv = CausalConv3d(6, 5, (4, 3, 3), (2, 1, 1)).requires_grad_(False)
    conv.arrange_weight()
    assert conv.weight.permute(0, 3, 4, 2, 1).flatten(1).data_ptr() == conv.weight.data_ptr()
    planes = conv.weight.transpose(1, 2).flatten(1, 2)
    assert planes.is_contiguous(memory_format=torch.channels_last)
    assert planes.data_ptr() == conv.weight.data_ptr()


def test_a_history_holds_no_more_than_its_frames() -> None:
    conv = CausalConv3d(2, 2, (4, 3, 3), (2, 1, 1)).requires_grad_(False)
    history, _ = conv.step(None, torch.randn(1, 2, 21, 3, 3))
    assert history.frames.untyped_storage().nbytes() == history.nbytes


@pytest.mark.gpu
@pytest.mark.parametrize("method", [None, "planes", "unfolded"])
def test_the_wide_projector_on_a_card(method: Method | None) -> None:
    torch.manual_seed(0)
    projector = LRProjector((512, 1024), 64, 16, 2).cuda().requires_grad_(False)
    x = torch.rand(1, 3, FRAMES, 128, 192, device="cuda") * 2 - 1
    exact = project(projector, x, [21, 8])
    projector.bfloat16()
    for conv in (projector.conv1, projector.conv2):
        conv.arrange_weight()
        conv.method = method
    with torch.inference_mode():
        half = project(projector, x.bfloat16(), [21, 8])
    error = (half.float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert error < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("first", [0, 1, 8])
def test_packed_copies_bit_for_bit(dtype: torch.dtype, first: int) -> None:
    """Words or single numbers: what `packed` gives is what `contiguous` gives."""
    scattered = torch.randn(5, 3, 40).to(dtype).transpose(0, 1)[:, :, first : first + 16]
    copy = packed(scattered)
    assert copy.is_contiguous()
    assert copy.dtype == dtype
    assert torch.equal(copy.view(torch.uint8), scattered.contiguous().view(torch.uint8))


def test_packed_copies_can_be_compiled() -> None:
    """Where a tensor lies in memory a compiler can not see: training compiles layers that copy so."""
    compiled = torch.compile(packed, fullgraph=True, backend="eager")
    scattered = torch.randn(6, 4, 8).transpose(0, 1)
    assert torch.equal(compiled(scattered), scattered)
    assert compiled(scattered).is_contiguous()


def test_frames_written_behind_their_history_are_convolved_as_ever(
    projector: LRProjector, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a card does, without kernels: one memory for history and frames, biases added by the norms."""
    ours = copy.deepcopy(projector)
    x = torch.randn(1, 3, 37, 32, 48)
    for conv in (ours.conv1, ours.conv2):
        conv.method = "planes"
    results = []
    for in_rooms in (False, True):
        monkeypatch.setattr(lr_projector, "kernels_for", lambda _, there=in_rooms: there)
        monkeypatch.setattr(causal_conv, "_PIECE_BYTES", 1 if in_rooms else 1 << 29)
        state, tokens = LRProjectorState(), []
        with torch.no_grad():
            for piece in x.split([21, 8, 8], dim=2):
                place = state.first and state.first.frames
                state, made = ours.step(state, piece, in_place=in_rooms)
                tokens.append(made)
                assert not in_rooms or place is None or state.first.frames is place
        results.append((torch.cat(tokens, dim=2), *state.tensors()))
    for made, wanted in zip(*results, strict=True):
        torch.testing.assert_close(made, wanted, atol=1e-5, rtol=1e-5)
