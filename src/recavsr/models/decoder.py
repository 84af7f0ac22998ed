"""LR-conditioned FlashDecoder: latents and LR frames to RGB frames, streaming (paper, Sec. 3.3).

A transformer on the latent grid, one latent at a time: a backbone that sees the latent before, an
expansion of each latent to 4 frames, refinement layers that see the 4 frames before, and a head
that opens each grid cell into pixels.

Shapes: B batch, T latents, F frames, H W latent rows and columns, N cells, C width, G key/value
groups, R query heads of a group, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recavsr.attention import SpatialWindow, WindowPlan, plan_window, windowed_attention
from recavsr.errors import InputError
from recavsr.fused import Residual, in_pieces, linear, silu_linear, swiglu_linear
from recavsr.geometry import FRAMES_PER_LATENT, Grid, frames_of_latents
from recavsr.layers import RMSNorm, copy_both, grid_cells, halved, packed, unshuffled
from recavsr.models.row_parallel import Band
from recavsr.rope import AxisSplit, following, rotate, rotation_table
from recavsr.state import State

PIECE_LATENTS = 2
"""Latents that are decoded at once without gradients: those of a steady block."""

CARD_PIECE_LATENTS = 1
"""The same of a longer block on a card, which one latent fills: its memory is what counts."""

PIECE_ROWS = 16_384
"""Cells of frames that are widened at once, on a card: a quarter of those of a steady block at 1080p."""


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a decoder; the defaults are the released variant S (57,173,552 parameters)."""

    width: int = 512
    depth: int = 12
    heads: int = 8
    groups: int = 2
    refinement_depth: int = 2
    ffn_ratio: float = 4.0
    window_latents: int = 2
    window: SpatialWindow = SpatialWindow(24, 24, border="cut")  # noqa: RUF009
    latent_channels: int = 48
    latent_stride: int = 16
    lr_channels: int = 48
    eps: float = 1e-5
    head: Literal["linear", "convolutional"] = "linear"
    """How a cell becomes pixels: an MLP and a pixel shuffle (released), or `ConvolutionalHead`."""
    head_channels: int = 48
    lr_halved: bool = False
    """True reads the LR frames at half their size; what a convolutional head adds to is full size."""
    lr_conditioning: bool = True
    """False decodes with zeros in place of the LR frames (the paper's ablation)."""
    latents_mean: tuple[float, ...] = (0.0,) * 48
    latents_std: tuple[float, ...] = (1.0,) * 48

    @property
    def lr_cell(self) -> int:
        """Return the pixels of a latent's side in the LR frames, as they are read."""
        return self.latent_stride // 2 if self.lr_halved else self.latent_stride

    @staticmethod
    def from_released(config: dict[str, Any], vae: dict[str, Any] | None = None) -> DecoderConfig:
        """Read a released `flashdecoder_config.json`, and what `vae_config.json` says of latents.

        Raises InputError for unknown fields or another variant than S.
        """
        known = dict(config)
        if known.pop("variant", "S") != "S":
            raise InputError(f"flashdecoder_config.json: variant {config['variant']!r} is unknown; only S is")
        names = {
            "dim": "width",
            "depth": "depth",
            "num_heads": "heads",
            "num_kv_groups": "groups",
            "refinement_depth": "refinement_depth",
            "mlp_ratio": "ffn_ratio",
            "window_size": "window_latents",
            "head": "head",
            "head_channels": "head_channels",
            "lr_halved": "lr_halved",
            "lr_conditioning": "lr_conditioning",
        }
        try:
            fields = {ours: known.pop(name) for name, ours in names.items() if name in known}
            if "spatial_window_size" in known:
                height, width = known.pop("spatial_window_size")
                stride = known.pop("spatial_window_stride", 1)
                border = known.pop("spatial_window_border", "cut")
                fields["window"] = SpatialWindow(height, width, stride, border)
            if vae is not None:
                fields["latents_mean"] = tuple(vae["latents_mean"])
                fields["latents_std"] = tuple(vae["latents_std"])
                fields["latent_channels"] = len(fields["latents_mean"])
                fields["latent_stride"] = vae.get("scale_factor_spatial", DecoderConfig.latent_stride)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"flashdecoder_config.json: missing or malformed field {error}") from error
        if known:
            raise InputError(f"flashdecoder_config.json: unknown fields {sorted(known)}")
        return DecoderConfig(**fields)

    def to_released(self) -> dict[str, Any]:
        """Return the fields of a `flashdecoder_config.json` that `from_released` reads back."""
        window = self.window
        return {
            "dim": self.width,
            "depth": self.depth,
            "num_heads": self.heads,
            "num_kv_groups": self.groups,
            "refinement_depth": self.refinement_depth,
            "mlp_ratio": self.ffn_ratio,
            "window_size": self.window_latents,
            "spatial_window_size": [window.height, window.width],
            "spatial_window_stride": window.stride,
            "spatial_window_border": window.border,
            "head": self.head,
            "head_channels": self.head_channels,
            # Released configs have no such fields.
            **({"lr_halved": True} if self.lr_halved else {}),
            **({} if self.lr_conditioning else {"lr_conditioning": False}),
        }


@dataclass(frozen=True)
class GroupHistory(State):
    """Keys and values of one layer's earlier groups of frames."""

    keys: Tensor  # [B, G, N, frames, D] after norm and rotation by absolute position
    values: Tensor
    empty: bool = False  # both are memory of an earlier stream, for the next history to be written into


@dataclass(frozen=True)
class DecoderState(State):
    """What the decoder remembers: one history a layer, None at the start of a stream."""

    layers: tuple[GroupHistory | None, ...]
    next_position: int  # absolute index of the next latent

    def emptied(self) -> DecoderState:
        """Return the start of another stream in this one's memory."""
        return DecoderState(tuple(layer and replace(layer, empty=True) for layer in self.layers), 0)


class GroupedAttention(nn.Module):
    """Grouped-query attention of each group of frames over itself and the groups before it.

    A group is one latent in the backbone and its 4 frames in the refinement. Keys and values are
    normed, queries are not. Inside a group attention is bidirectional.
    """

    def __init__(self, config: DecoderConfig, group_frames: int) -> None:
        super().__init__()
        head_width = config.width // config.heads
        self.config, self.group_frames = config, group_frames
        self.split = AxisSplit.flash_decoder(head_width)
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.groups * head_width)
        self.value = nn.Linear(config.width, config.groups * head_width)
        self.output = nn.Linear(config.width, config.width)
        self.key_norm = RMSNorm(head_width, config.eps)
        self.value_norm = RMSNorm(head_width, config.eps)

    def heads_of(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [B, N, F, H, D], keys and values [B, N, F, G, D] of `x` [B, N, F, C]."""

        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.config.width // self.config.heads))

        query = rotate(heads(linear(self.query, x)), rotation).to(x.dtype)
        key = rotate(self.key_norm.in_float32(heads(linear(self.key, x))), rotation).to(x.dtype)
        return query, key, self.value_norm(heads(linear(self.value, x)))

    def step(
        self,
        history: GroupHistory | None,
        x: Tensor,
        rotation: Tensor,
        window: WindowPlan,
        in_place: bool = False,
    ) -> tuple[GroupHistory, Tensor]:
        """Attend for the next frames `x` [B, N, F, C], F a multiple of the group size.

        With `in_place` the history given is spent: the next one is written over it.
        """
        config, size = self.config, self.group_frames
        frames = x.shape[2]
        query, key, value = self.heads_of(x, rotation)
        del x
        # Results lie in the order that the next product reads. With gradients they are joined afterwards.
        out = None if torch.is_grad_enabled() else query.new_empty(query.shape)

        def grouped(y: Tensor) -> Sequence[Tensor]:
            """Return each group's part [B, G, N, size, R, D] of [B, N, F, H, D]."""
            return y.unflatten(3, (config.groups, -1)).permute(0, 3, 1, 2, 4, 5).split(size, dim=3)

        key, value = window.with_borrowed(*(y.permute(0, 3, 1, 2, 4) for y in (key, value)))
        reach = (config.window_latents - 1) * size
        room, history = history, None if history is None or history.empty else history
        held = 0 if history is None else history.keys.shape[3]
        results = []
        starts, queries = range(0, frames, size), grouped(query)
        places = [None] * len(queries) if out is None else grouped(out)
        for start, asked, place in zip(starts, queries, places):
            own, missing = slice(max(0, start - reach), start + size), min(held, max(0, reach - start))
            earlier = None
            if history is not None and missing:
                past = slice(held - missing, held)
                earlier = history.keys[..., past, :], history.values[..., past, :]
            seen = key[..., own, :], value[..., own, :]
            results.append(windowed_attention(asked, *seen, window, earlier=earlier, out=place))
        if out is None:
            out = torch.cat([result.permute(0, 2, 3, 1, 4, 5) for result in results], dim=2).flatten(3, 4)
        kept = GroupHistory(key[..., max(0, frames - reach) :, :], value[..., max(0, frames - reach) :, :])
        if history is not None and frames < reach:
            before = history.map(lambda old: old[..., max(0, held + frames - reach) :, :])
            keys, values = (torch.cat(pair, dim=3) for pair in zip(before.tensors(), kept.tensors()))
            kept = GroupHistory(keys, values)
        if in_place and room is not None and room.keys.shape == kept.keys.shape:
            copy_both((room.keys, room.values), (kept.keys, kept.values))
            kept = replace(room, empty=False)
        else:  # a copy: the history must not keep the whole block alive
            kept = kept.clone()
        del query, key, value, queries, asked, seen, results
        return kept, linear(self.output, out.flatten(3))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to [..., C]."""
        return in_pieces(self._hidden, self.down, x, PIECE_ROWS)

    def _hidden(self, x: Tensor) -> Tensor:
        return swiglu_linear(self.gate, self.up, x)


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward on a grid of frames."""

    def __init__(self, config: DecoderConfig, group_frames: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, config.eps)
        self.attention = GroupedAttention(config, group_frames)
        self.feed_forward_norm = RMSNorm(config.width, config.eps)
        self.feed_forward = SwiGLU(config.width, int(config.width * config.ffn_ratio))

    def step(
        self,
        history: GroupHistory | None,
        x: Residual,
        rotation: Tensor,
        window: WindowPlan,
        in_place: bool = False,
    ) -> GroupHistory:
        """Apply to the next frames `x` [B, N, F, C], which is changed; `rotation` is that of their positions.

        Returns the next history, which with `in_place` is written over the one given.
        """

        def normed(norm: RMSNorm) -> Tensor:
            return x.rms_norm(norm.weight, norm.eps)

        after, x.update = self.attention.step(
            history, normed(self.attention_norm), rotation, window, in_place
        )
        x.update = self.feed_forward(normed(self.feed_forward_norm))
        return after


class LinearHead(nn.Module):
    """Two linear layers and a pixel shuffle: absolute RGB (the released decoder)."""

    reach = 0  # rows of cells around that a cell's pixels depend on

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.stride = config.latent_stride
        hidden = int(config.width * config.ffn_ratio)
        self.inner = nn.Linear(config.width, hidden)
        self.outer = nn.Linear(hidden, 3 * config.latent_stride**2)

    def forward(self, x: Tensor, grid: Grid, lr_frames: Tensor, read: Tensor) -> Tensor:
        """Turn cells [B, N, F, C] into frames [B, 3, F, s H, s W]; LR frames are not looked at."""
        pixels = in_pieces(self._hidden, self.outer, x, PIECE_ROWS).unflatten(1, (grid.height, grid.width))
        cells = pixels.unflatten(4, (3, self.stride, self.stride))  # B H W F 3 s s
        return packed(cells.permute(0, 4, 3, 1, 5, 2, 6)).flatten(5).flatten(3, 4)

    def _hidden(self, x: Tensor) -> Tensor:
        return silu_linear(self.inner, x)


class ConvolutionalHead(nn.Module):
    """Opens cells to a quarter of the output size, adds the LR picture there, convolves, opens again.

    At small widths it has no seams between cells. The result is a residual over the LR frames.
    """

    factor = 4

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        channels, self.opening = config.head_channels, config.latent_stride // self.factor
        self.reach = -(-4 // self.opening)  # four convolutions, one after the other
        pixels = 3 * self.factor**2
        self.lr_factor = config.lr_cell // self.opening
        self.inner = nn.Linear(config.width, channels * self.opening**2)
        self.stem = nn.Conv2d(3 * self.lr_factor**2, channels, 3, padding=1)
        self.mix = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.outer = nn.Conv2d(channels, pixels, 3, padding=1)
        # Training starts from the LR frames themselves.
        nn.init.zeros_(self.outer.weight)
        assert self.outer.bias is not None
        nn.init.zeros_(self.outer.bias)

    def forward(self, x: Tensor, grid: Grid, lr_frames: Tensor, read: Tensor) -> Tensor:
        """Turn cells [B, N, F, C] and LR frames [B, 3, F, s H, s W] into frames of that size, in float32.

        `read` are the LR frames once more as the convolutions read them: the same, or at half their size.
        On a CPU without gradients they go through one by one: that bounds the memory, and takes no longer.
        """
        # The sum is float32: a bfloat16 base would show bands.
        if x.is_cuda or torch.is_grad_enabled():
            return lr_frames.float() + self._detail(x, grid, read).float()
        out = torch.empty_like(lr_frames, dtype=torch.float32)
        for index in range(x.shape[2]):
            one = slice(index, index + 1)
            out[:, :, one].copy_(lr_frames[:, :, one]).add_(self._detail(x[:, :, one], grid, read[:, :, one]))
        return out

    def _detail(self, x: Tensor, grid: Grid, read: Tensor) -> Tensor:
        """Return what is added to the LR frames, of their shape."""
        batch, _, frames, _ = x.shape
        n = self.opening
        # Channels stay last in memory from the linear layer to the last convolution: no reordering.
        cells = self.inner(x.transpose(1, 2).contiguous()).unflatten(2, (grid.height, grid.width))
        cells = cells.unflatten(4, (n, -1)).transpose(3, 4)  # B F H n W (n c)
        cells = cells.flatten(0, 1).flatten(1, 2).unflatten(3, (n, -1)).flatten(2, 3)
        # Joined while channels are last in shape too: strides of one picture alone must tell that they are.
        picture = unshuffled(read.to(x.dtype), self.lr_factor).permute(0, 2, 3, 4, 1).flatten(0, 1)
        hidden = cells.permute(0, 3, 1, 2) + self.stem(picture.permute(0, 3, 1, 2))
        for mix in self.mix:
            hidden = hidden + mix(F.silu(hidden))
        detail = _closed(self.outer(F.silu(hidden)), self.factor)
        return detail.unflatten(0, (batch, frames)).transpose(1, 2)


def _closed(x: Tensor, factor: int) -> Tensor:
    """Shuffle the pixels of [B, C f f, H, W] as `F.pixel_shuffle` does; channels best lie last in memory."""
    cells = x.permute(0, 2, 3, 1).unflatten(3, (-1, factor, factor))  # B H W C f f
    return packed(cells.permute(0, 3, 1, 4, 2, 5)).flatten(4).flatten(2, 3)


class FlashDecoder(nn.Module):
    """Decodes latents to frames with LR frames as a second input."""

    latents_mean: Tensor
    latents_std: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        width, lr = config.width, config.lr_channels
        self.latent_projection = nn.Linear(config.latent_channels, width)
        self.lr_stem = nn.Linear(3 * config.lr_cell**2, lr)
        self.lr_early_projection = nn.Linear(FRAMES_PER_LATENT * lr, width, bias=False)
        self.lr_late_projection = nn.Linear(lr, width, bias=False)
        self.backbone = nn.ModuleList(DecoderLayer(config, 1) for _ in range(config.depth))
        self.temporal_projection = nn.Linear(width, FRAMES_PER_LATENT * width)
        self.refinement = nn.ModuleList(
            DecoderLayer(config, FRAMES_PER_LATENT) for _ in range(config.refinement_depth)
        )
        self.head = LinearHead(config) if config.head == "linear" else ConvolutionalHead(config)
        shape = (1, config.latent_channels, 1, 1, 1)
        mean, std = (
            torch.tensor(values, dtype=torch.float32) for values in (config.latents_mean, config.latents_std)
        )
        self.register_buffer("latents_mean", mean.view(shape), persistent=False)
        self.register_buffer("latents_std", std.view(shape), persistent=False)

    def start(self) -> DecoderState:
        """Return the state before the first latent of a stream."""
        return DecoderState((None,) * (self.config.depth + self.config.refinement_depth), 0)

    def step(
        self,
        state: DecoderState,
        sr_latents: Tensor,
        lr_frames: Tensor,
        dtype: torch.dtype | None = torch.float32,
        position: Tensor | None = None,
        band: Band | None = None,
        in_place: bool = False,
    ) -> tuple[DecoderState, Tensor]:
        """Decode the next latents.

        `sr_latents` [B, C, T, H, W] are normalised; `lr_frames` [B, 3, F, s H, s W] in [-1, 1] are
        their LR frames, F = 4 T, or 4 T - 3 at the start of a stream. Returns the frames
        [B, 3, F, s H, s W], not clamped, in `dtype`; None: in that of the head's last step, which holds all
        that they are. Without gradients a long first block goes through in pieces, which bounds its memory.
        `position` is the state's next position on the device [], for a captured graph. With a `band` of the
        latent rows, latents and results are those of the band, LR frames those of its LR rows. With
        `in_place` the state given is spent: the next one is written over it.
        """
        if torch.is_grad_enabled() or sr_latents.shape[2] <= PIECE_LATENTS:
            return self._step(state, sr_latents, lr_frames, dtype, position, band, in_place)
        _check_counts(state, sr_latents, lr_frames)
        frames, first = lr_frames.new_empty(0), 0
        at_once = CARD_PIECE_LATENTS if sr_latents.is_cuda else PIECE_LATENTS
        for piece in sr_latents.split(at_once, dim=2):
            count = frames_of_latents(state.next_position, piece.shape[2])
            given = lr_frames[:, :, first : first + count]
            state, made = self._step(state, piece, given, dtype, position, band, in_place)
            position = None if position is None else position + piece.shape[2]
            if first == 0:
                frames = made.new_empty(*lr_frames.shape[:3], *made.shape[3:])
            frames[:, :, first : first + count] = made
            del made
            first += count
        return state, frames

    def _step(
        self,
        state: DecoderState,
        sr_latents: Tensor,
        lr_frames: Tensor,
        frames_dtype: torch.dtype | None,
        position: Tensor | None,
        band: Band | None,
        in_place: bool,
    ) -> tuple[DecoderState, Tensor]:
        dtype = self.latent_projection.weight.dtype
        latents, height, width = sr_latents.shape[2:]
        grid = Grid(height, width)
        _check_counts(state, sr_latents, lr_frames)
        lead = FRAMES_PER_LATENT - 1 if state.next_position == 0 else 0
        if not self.config.lr_conditioning:
            lr_frames = torch.zeros_like(lr_frames)
        if lead:  # the first latent stands for one frame, shown as the last of its four
            lr_frames = torch.cat([lr_frames[:, :, :1].expand(-1, -1, lead, -1, -1), lr_frames], dim=2)

        read = halved(lr_frames) if self.config.lr_halved else lr_frames
        own = read if band is None else band.lr_frames_around(read, 0)
        stem = linear(self.lr_stem, grid_cells(own.to(dtype), self.config.lr_cell))  # B N F lr
        x = (sr_latents * self.latents_std + self.latents_mean).to(dtype)
        x = x.flatten(3).permute(0, 3, 2, 1).contiguous()
        early = stem.unflatten(2, (latents, FRAMES_PER_LATENT)).flatten(3)
        tokens = Residual(self.latent_projection(x), self.lr_early_projection(early))

        first = state.next_position
        split = AxisSplit.flash_decoder(self.config.width // self.config.heads)
        histories: list[GroupHistory | None] = []
        past = iter(state.layers)
        if band is None:
            first_row, window = 0, plan_window(grid, self.config.window, x.device)
        else:
            first_row, window = band.own.start, band.plan(width, self.config.window, x.device)
        times = following(range(first, first + latents), position)
        turn = rotation_table(times, grid, split, x.device, first_row)
        for layer in cast(Iterable[DecoderLayer], self.backbone):
            histories.append(layer.step(next(past), tokens, turn, window, in_place))
        opened = (
            linear(self.temporal_projection, tokens.sum()).unflatten(3, (FRAMES_PER_LATENT, -1)).flatten(2, 3)
        )
        tokens = Residual(opened, linear(self.lr_late_projection, stem))
        del opened
        times = range(FRAMES_PER_LATENT * first, FRAMES_PER_LATENT * (first + latents))
        frames_at = following(times, None if position is None else FRAMES_PER_LATENT * position)
        turn = rotation_table(frames_at, grid, split, x.device, first_row)
        for layer in cast(Iterable[DecoderLayer], self.refinement):
            histories.append(layer.step(next(past), tokens, turn, window, in_place))
        x, lr_frames, read = (frames[:, :, lead:] for frames in (tokens.sum(), lr_frames, read))
        if band is None:
            frames = self.head(x, grid, lr_frames, read)
        else:
            frames = _head_of_band(self.head, x, (lr_frames, read), band)
        return DecoderState(tuple(histories), first + latents), frames.to(frames_dtype or frames.dtype)


def _head_of_band(
    head: LinearHead | ConvolutionalHead, x: Tensor, lr_frames: tuple[Tensor, Tensor], band: Band
) -> Tensor:
    """Apply a head to the cells `x` [B, N, F, C] of a band: those around that it reads are borrowed."""
    around = band.around(head.reach)
    rows, own = around[band.rank], band.own
    grid = Grid(len(rows), x.shape[1] // len(own))
    if head.reach:
        x = band.with_borrowed(x, around)
    frames = head(x, grid, *(band.lr_frames_around(given, head.reach) for given in lr_frames))
    pixels = frames.shape[3] // len(rows)
    return frames[:, :, :, (own.start - rows.start) * pixels : (own.stop - rows.start) * pixels]


def _check_counts(state: DecoderState, sr_latents: Tensor, lr_frames: Tensor) -> None:
    latents = sr_latents.shape[2]
    if lr_frames.shape[2] != frames_of_latents(state.next_position, latents):
        raise ValueError(f"{lr_frames.shape[2]} LR frames do not fit {latents} latents")
