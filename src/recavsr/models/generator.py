"""The generator: a causal, streaming diffusion transformer that makes a block in one step (Eq. 1).

Shapes: B batch, T latents of a call, H W latent rows and columns, N tokens of a latent, C width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recavsr.attention import SpatialWindow, plan_window
from recavsr.cache_policy import Schedule
from recavsr.errors import InputError
from recavsr.geometry import BlockPlan, Grid, frames_of_latents
from recavsr.layers import grid_cells, modulation_table, sinusoid
from recavsr.models.dit_block import DiTBlock, LayerCondition
from recavsr.models.kv_history import HistoryPlan, KVHistory, extend, overwrite, plan_overwrite
from recavsr.models.lr_projector import LRProjector, LRProjectorState
from recavsr.models.row_parallel import Band
from recavsr.models.visibility import Visibility, schedule_visibility
from recavsr.rope import AxisSplit, following, rotation_table
from recavsr.state import State

ONE_STEP = 1000.0
"""The timestep of one-step generation: pure noise."""


@dataclass(frozen=True)
class GeneratorConfig:
    """Sizes of a generator. The names in a released model_config.json are mapped by `from_released`."""

    layers: int
    heads: int
    head_width: int
    ffn_width: int
    text_width: int
    lr_hidden: tuple[int, int]
    schedule: Schedule
    window: SpatialWindow
    time_frequencies: int = 256
    latent_channels: int = 48
    patch: int = 2
    latent_stride: int = 16
    eps: float = 1e-6
    recycling: bool = True
    """False feeds zeros in place of recycled latents, always (the paper's ablation)."""
    native_scale: float = 0.0
    """The enlargement that the model is good at: smaller ones are made by way of it. 0: any will do."""
    lr_halved: bool = False
    """True: the LR projector reads LR frames at half their size, by which x4 ones lose next to nothing."""

    def __post_init__(self) -> None:
        if len(self.schedule.actions) != self.layers:
            raise InputError(
                f"the cache schedule has {len(self.schedule.actions)} actions for {self.layers} layers"
            )
        if not 0 <= self.native_scale < float("inf"):
            raise InputError(f"native_scale must be a number from 0 on, not {self.native_scale}")

    @property
    def width(self) -> int:
        """Return the model width C."""
        return self.heads * self.head_width

    @property
    def token_stride(self) -> int:
        """Return the output pixels of one token's side."""
        return self.latent_stride * self.patch

    @property
    def lr_cell(self) -> int:
        """Return the pixels of a latent's side in the LR frames, as they are read."""
        return self.latent_stride // 2 if self.lr_halved else self.latent_stride

    def make_lr_projector(self) -> LRProjector:
        """Return a fresh LR projector of these sizes."""
        return LRProjector(self.lr_hidden, self.width, self.latent_stride, self.patch, self.lr_halved)

    @staticmethod
    def from_released(config: dict[str, Any]) -> GeneratorConfig:
        """Read a released `model_config.json`; raise InputError for unknown or missing fields."""
        known = dict(config)
        fixed = {
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
            "use_block_causal_attention": True,
        }
        try:
            for name, value in fixed.items():
                if known.pop(name, value) != value:
                    raise InputError(f"model_config.json: {name} must be {value!r}")
            _, patch, patch_w = known.pop("patch_size")
            channels = known.pop("in_channels")
            if patch != patch_w or known.pop("out_channels") != channels:
                raise InputError("model_config.json: patches must be square, in_channels equal out_channels")
            known.pop("rope_max_seq_len", None)  # our rotary tables are made as needed
            window = known.pop("spatial_window", {"height": 22, "width": 40})
            result = GeneratorConfig(
                layers=known.pop("num_layers"),
                heads=known.pop("num_attention_heads"),
                head_width=known.pop("attention_head_dim"),
                ffn_width=known.pop("ffn_dim"),
                text_width=known.pop("text_dim"),
                lr_hidden=(known.pop("lq_proj_hidden_dim1"), known.pop("lq_proj_hidden_dim2")),
                schedule=Schedule.from_config(known.pop("static_kv_router")),
                window=SpatialWindow(**window),
                time_frequencies=known.pop("freq_dim"),
                latent_channels=channels,
                patch=patch,
                eps=known.pop("eps"),
                recycling=known.pop("recycling", True),
                lr_halved=known.pop("lq_proj_halved", False),
                native_scale=float(known.pop("native_scale", 0.0)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"model_config.json: missing or malformed field {error}") from error
        if known:
            raise InputError(f"model_config.json: unknown fields {sorted(known)}")
        return result

    def to_released(self) -> dict[str, Any]:
        """Return the fields of a `model_config.json` that `from_released` reads back."""
        window = self.window
        return {
            "patch_size": [1, self.patch, self.patch],
            "num_attention_heads": self.heads,
            "attention_head_dim": self.head_width,
            "in_channels": self.latent_channels,
            "out_channels": self.latent_channels,
            "text_dim": self.text_width,
            "freq_dim": self.time_frequencies,
            "ffn_dim": self.ffn_width,
            "num_layers": self.layers,
            "cross_attn_norm": True,
            "qk_norm": "rms_norm_across_heads",
            "eps": self.eps,
            "rope_max_seq_len": 1024,
            "lq_proj_hidden_dim1": self.lr_hidden[0],
            "lq_proj_hidden_dim2": self.lr_hidden[1],
            "use_block_causal_attention": True,
            "static_kv_router": self.schedule.to_config(),
            "spatial_window": {"height": window.height, "width": window.width, "stride": window.stride},
            # Released configs have no such fields.
            **({} if self.recycling else {"recycling": False}),
            **({"native_scale": self.native_scale} if self.native_scale else {}),
            **({"lq_proj_halved": True} if self.lr_halved else {}),
        }


@dataclass(frozen=True)
class GeneratorState(State):
    """Everything the generator remembers of a stream."""

    lr_projector: LRProjectorState
    layers: tuple[KVHistory | None, ...]  # one a layer; None where nothing is kept
    recycled: Tensor | None  # [B, C, T, H, W]: the previous block's SR latents (normalised)
    next_position: int  # absolute index of the next latent


@dataclass(frozen=True)
class Condition:
    """What a stream is generated under: timestep and prompt, folded into constants (computed once)."""

    time_embedding: Tensor  # [B or 1, C], for the head
    layers: tuple[LayerCondition, ...] = field(repr=False)


class TimeTextEmbedding(nn.Module):
    """Embeds the timestep and projects the prompt to the model width."""

    def __init__(self, config: GeneratorConfig) -> None:
        super().__init__()
        self.frequencies = config.time_frequencies
        self.time_in = nn.Linear(config.time_frequencies, config.width)
        self.time_out = nn.Linear(config.width, config.width)
        self.time_projection = nn.Linear(config.width, 6 * config.width)
        self.text_in = nn.Linear(config.text_width, config.width)
        self.text_out = nn.Linear(config.width, config.width)

    def forward(self, timestep: Tensor, prompt: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the time embedding [B, C], its projection [B, 6, C] and the prompt [B', L, C]."""
        embedded = sinusoid(timestep, self.frequencies).to(self.time_in.weight.dtype)
        time = self.time_out(F.silu(self.time_in(embedded)))
        text = self.text_out(F.gelu(self.text_in(prompt), approximate="tanh"))
        return time, self.time_projection(F.silu(time)).unflatten(-1, (6, -1)), text


class Generator(nn.Module):
    """Predicts noise - latents for a block of latents from noise, LR frames, recycled latents, history."""

    def __init__(self, config: GeneratorConfig) -> None:
        super().__init__()
        self.config = config
        self._split = AxisSplit.wan(config.head_width)
        patch = (1, config.patch, config.patch)
        self.patch_embedding = nn.Conv3d(config.latent_channels, config.width, patch, patch)
        self.embedding = TimeTextEmbedding(config)
        self.lr_projector = config.make_lr_projector()
        self.recycle_projection = nn.Linear(config.width, config.width)
        self.blocks = nn.ModuleList(
            DiTBlock(config.width, config.heads, config.head_width, config.ffn_width, config.eps)
            for _ in range(config.layers)
        )
        self.modulation = modulation_table(2, config.width)
        self.head = nn.Linear(config.width, config.latent_channels * config.patch**2)

    def condition(self, prompt: Tensor, timestep: Tensor | float = ONE_STEP) -> Condition:
        """Compute the constants of a stream from the prompt [B, L, text] and the timestep [B] or a number."""
        if not isinstance(timestep, Tensor):
            timestep = torch.full((1,), timestep, dtype=torch.float32, device=prompt.device)
        time, projection, text = self.embedding(timestep, prompt)
        blocks = cast(Iterable[DiTBlock], self.blocks)
        return Condition(time, tuple(block.condition(projection, text) for block in blocks))

    def with_schedule(self, schedule: Schedule) -> Generator:
        """Return this generator under another schedule: the same weights, shared, not copied.

        Raises InputError where the schedule has another number of layers.
        """
        other = copy(self)
        other.config = replace(self.config, schedule=schedule)
        return other

    def start(self) -> GeneratorState:
        """Return the state before the first block of a stream (or after a scene cut)."""
        return GeneratorState(LRProjectorState(), (None,) * self.config.layers, None, 0)

    def step(
        self,
        state: GeneratorState,
        condition: Condition,
        noise: Tensor,
        lr_frames: Tensor,
        in_place: bool = False,
        position: Tensor | None = None,
        band: Band | None = None,
    ) -> tuple[GeneratorState, Tensor]:
        """Generate the next block in one pass (Eq. 1).

        `noise` is [B, C, T, H, W] in float32; `lr_frames` [B, 3, F, s H, s W] in [-1, 1] are the LR
        frames of the block at output size (F = 4 T, or 4 T - 3 at the start). Returns the next state
        and the SR latents [B, C, T, H, W] in float32: noise - prediction. The state given is spent: with
        `in_place` the next one lives in its memory, to half of what two histories need. `position` is the
        state's next position once more, on the device [], for a captured graph to read at each replay. With a
        `band` of the token rows, noise and latents are those of the band, LR frames those of its LR rows.
        Raises ValueError where the frames do not fit the latents.
        """
        config = self.config
        latents = noise.shape[2]
        positions = tuple(range(state.next_position, state.next_position + latents))
        if lr_frames.shape[2] != frames_of_latents(state.next_position, latents):
            raise ValueError(f"{lr_frames.shape[2]} LR frames do not fit {latents} latents")
        projector, lr_tokens = self.lr_projector.step(state.lr_projector, lr_frames, in_place)
        if band is not None:
            lr_tokens = band.cells_of_own(lr_tokens)
        recycled = _aligned(state.recycled if config.recycling else None, noise)
        x, grid = self._embed(noise, lr_tokens, recycled)
        dtype, device = lr_tokens.dtype, noise.device
        del lr_tokens

        if band is None:
            first_row, window = 0, plan_window(grid, config.window, device)
        else:
            first_row, window = band.own.start, band.plan(grid.width, config.window, device)
        turn = rotation_table(following(positions, position), grid, self._split, device, first_row)
        histories: list[KVHistory | None] = []
        rule, remember = config.schedule.anchor_rule, overwrite if in_place else extend
        for block, action, constants, history in zip(
            self.blocks, config.schedule.actions, condition.layers, state.layers
        ):
            keep = partial(remember, history, positions=positions, action=action, rule=rule)
            if in_place:  # at once: what a long block has of them is large
                x, kept = block(x, constants, turn, history, window, None, keep)
            else:
                x, made = block(x, constants, turn, history, window)
                kept = keep(*made)
            histories.append(kept)
        sr_latents = noise - self._predict(x, condition, grid).float()
        after = GeneratorState(
            projector, tuple(histories), sr_latents.to(dtype), state.next_position + latents
        )
        return after, sr_latents

    def plan_histories(self, state: GeneratorState, latents: int) -> tuple[HistoryPlan, ...]:
        """Return for each layer what the next block of so many latents does to its history in place."""
        schedule, first = self.config.schedule, state.next_position
        positions = tuple(range(first, first + latents))
        return tuple(
            plan_overwrite(history.positions if history else (), positions, action, schedule.anchor_rule)
            for history, action in zip(state.layers, schedule.actions, strict=True)
        )

    def forward(
        self,
        condition: Condition,
        noisy: Tensor,
        lr_frames: Tensor,
        recycled: Tensor,
        plan: BlockPlan,
        visibility: Sequence[Visibility] | None = None,
    ) -> Tensor:
        """Predict all blocks of a clip at once, each from what it may see (Stage 1, Appendix B.2).

        `noisy` and `recycled` are [B, C, T, H, W]; `recycled` holds for each block the latents of the
        block before (see `teacher_forced_recycled`). `visibility` gives for each layer the history of
        every block; by default that of the schedule. Returns the predicted velocity [B, C, T, H, W].
        Under a schedule it equals concatenated `step`s.
        """
        latents = noisy.shape[2]
        _, lr_tokens = self.lr_projector.step(LRProjectorState(), lr_frames)
        if not self.config.recycling:
            recycled = torch.zeros_like(recycled)
        x, grid = self._embed(noisy, lr_tokens, recycled)
        turn = rotation_table(tuple(range(latents)), grid, self._split, noisy.device)
        window = plan_window(grid, self.config.window, noisy.device)
        if visibility is None:
            visibility = schedule_visibility(self.config.schedule, plan.cut(latents))
        for block, constants, visible in zip(self.blocks, condition.layers, visibility, strict=True):
            x, _ = block(x, constants, turn, None, window, visible)
        return self._predict(x, condition, grid)

    def _embed(self, noisy: Tensor, lr_tokens: Tensor, recycled: Tensor) -> tuple[Any, Grid]:
        """Return P(noise) + C_LR(x) + S(P(r)) as tokens [B, N, T, C] for the layers, and their grid."""
        dtype = self.patch_embedding.weight.dtype
        grid = self._grid(noisy, lr_tokens)
        tokens = self._patch(noisy.to(dtype)) + lr_tokens
        return tokens + self.recycle_projection(self._patch(recycled.to(dtype))), grid

    def _grid(self, noisy: Tensor, lr_tokens: Tensor) -> Grid:
        """Return the token grid of latents [B, C, T, H, W]; raise ValueError where LR tokens do not fit."""
        patch = self.config.patch
        grid = Grid(noisy.shape[3] // patch, noisy.shape[4] // patch)
        if lr_tokens.shape[1:3] != (grid.cells, noisy.shape[2]):
            raise ValueError(
                f"LR frames give {lr_tokens.shape[2]} latents of {lr_tokens.shape[1]} tokens, "
                f"the noise has {noisy.shape[2]} of {grid.cells}"
            )
        return grid

    def _patch(self, latents: Tensor) -> Tensor:
        """Apply the patch embedding P as a matrix product: [B, C, T, H, W] -> [B, N, T, width]."""
        x = grid_cells(latents, self.config.patch)
        return F.linear(x, self.patch_embedding.weight.flatten(1), self.patch_embedding.bias)

    def _predict(self, x: Any, condition: Condition, grid: Grid) -> Tensor:
        """Apply the head: what layers gave [B, N, T, C] to the prediction [B, latent channels, T, H, W]."""
        # The head's shift and scale are values of the model's dtype, unlike the blocks' modulation.
        table = (self.modulation + condition.time_embedding[:, None]).to(x.dtype)
        shift, scale = table[:, 0, None, None], 1 + table[:, 1, None, None]
        normal = F.layer_norm(x.float(), x.shape[-1:], eps=self.config.eps)
        return self._unpatch(self.head((normal * scale + shift).to(x.dtype)), grid)

    def _unpatch(self, out: Tensor, grid: Grid) -> Tensor:
        """Open the head's outputs [B, N, T, p p C] into latents [B, C, T, H, W]."""
        p = self.config.patch
        out = out.unflatten(3, (p, p, -1)).unflatten(1, (grid.height, grid.width))  # B h w T p p C
        return out.permute(0, 6, 3, 1, 4, 2, 5).flatten(5).flatten(3, 4)


def _aligned(recycled: Tensor | None, noise: Tensor) -> Tensor:
    """Return the recurrent condition r_k in the shape of the block: its last latents, zeros in front."""
    if recycled is None:
        return torch.zeros_like(noise)
    want, have = noise.shape[2], recycled.shape[2]
    if have >= want:
        return recycled[:, :, have - want :]
    return F.pad(recycled, (0, 0, 0, 0, want - have, 0))


def teacher_forced_recycled(latents: Tensor, plan: BlockPlan) -> Tensor:
    """Return the recurrent condition of every block of a clip from its clean latents [B, C, T, H, W].

    Block k gets the latents of block k - 1, aligned as in streaming; the first block gets zeros.
    """
    blocks = latents.split([len(block) for block in plan.cut(latents.shape[2])], dim=2)
    return torch.cat([_aligned(old, new) for old, new in zip((None, *blocks), blocks)], dim=2)
