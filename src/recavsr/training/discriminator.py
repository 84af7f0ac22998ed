"""Multi-Scope Query (MSQ) discriminator: queries that judge a latent clip as a whole, in a window, in a tube.

A video DiT (the generator's layers, without LR frames or history) gives features of a clip at some
depths. At each depth learned queries attend to a support: all tokens, a window of one latent, or the
same window over consecutive latents. Their logits are averaged within a scope and the scopes count
alike (paper, Sec. 3.2 and appendix "Multi-Scope Query Discriminator").

Shapes: B batch, T latents, H W latent rows and columns, N tokens of a latent, M = N T tokens of a
clip, C width, S scopes, Q queries of a scope at one depth, K tokens of a support.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from recavsr.attention import SpatialWindow, plan_window
from recavsr.errors import InputError
from recavsr.geometry import Grid
from recavsr.layers import grid_cells
from recavsr.models.dit_block import DiTBlock
from recavsr.models.generator import Generator, GeneratorConfig, TimeTextEmbedding
from recavsr.rope import AxisSplit, rotation_table

Scope = Literal["global", "spatial", "temporal"]

Supports = tuple[tuple[Tensor | None, ...], ...]
"""For each depth and scope the token indices [B, Q, K] into a clip's M tokens; None: all of them."""


@dataclass(frozen=True)
class MSQConfig:
    """Depths, queries and supports of a discriminator; the defaults are the paper's."""

    layers: tuple[int, ...] = (8, 15, 22)
    """The backbone layers whose outputs are judged, counted from 1."""
    scopes: tuple[Scope, ...] = ("global", "spatial", "temporal")
    queries: int = 12
    """Queries of one depth, shared out evenly among the scopes, so that ablations match in number."""
    width: int = 512
    heads: int = 8
    window: tuple[int, int] = (8, 8)
    """Rows and columns of tokens that a spatial or a temporal query sees."""
    tube_latents: int = 4
    """Consecutive latents that a temporal query sees."""
    train_backbone: bool = False

    def __post_init__(self) -> None:
        if not self.layers or min(self.layers) < 1 or list(self.layers) != sorted(set(self.layers)):
            raise InputError(f"the discriminator's layers must ascend from 1 or more: {self.layers}")
        if not self.scopes or len(set(self.scopes)) < len(self.scopes):
            raise InputError(f"the discriminator needs scopes, each named once: {self.scopes}")
        if self.queries % len(self.scopes) or self.width % self.heads:
            raise InputError(
                f"{self.queries} queries must share out among {len(self.scopes)} scopes, "
                f"and a width of {self.width} among {self.heads} heads"
            )

    @property
    def scope_queries(self) -> int:
        """Return Q, the queries of one scope at one depth."""
        return self.queries // len(self.scopes)


NANO_MSQ = MSQConfig(layers=(2, 3, 5), width=128, heads=4)
"""nano's discriminator: depths at about 1/4, 1/2 and 3/4 of its 6 layers."""


class LatentFeatures(nn.Module):
    """Features of latent clips: the first layers of a generator, with full attention over the clip.

    There is no mask and no LR or recycled input. Parameters have the generator's names.
    """

    prompt: Tensor

    def __init__(self, config: GeneratorConfig, layers: tuple[int, ...], prompt: Tensor) -> None:
        """Build the layers up to the last of `layers`; `prompt` [1, L, text] is kept as a constant."""
        super().__init__()
        if layers[-1] > config.layers:
            raise InputError(f"the discriminator wants layer {layers[-1]} of a backbone of {config.layers}")
        self.config, self.layers = config, layers
        patch = (1, config.patch, config.patch)
        self.patch_embedding = nn.Conv3d(config.latent_channels, config.width, patch, patch)
        self.embedding = TimeTextEmbedding(config)
        self.blocks = nn.ModuleList(
            DiTBlock(config.width, config.heads, config.head_width, config.ffn_width, config.eps)
            for _ in range(layers[-1])
        )
        self.register_buffer("prompt", prompt.detach().clone())

    @classmethod
    def of(
        cls, generator: Generator, layers: tuple[int, ...], prompt: Tensor, *, share: bool = False
    ) -> LatentFeatures:
        """Copy what is needed of a generator, on its device and in its dtype, without its adapters.

        With `share` they are the generator's own parameters, not copies: for those that are frozen.
        """
        parameters = dict(generator.named_parameters())
        dtype = generator.patch_embedding.weight.dtype
        with torch.device("meta"):
            features = cls(generator.config, layers, prompt.detach().to(dtype))
        found = {name: parameters[name] for name, _ in features.named_parameters()}
        if not share:
            found = {name: nn.Parameter(value.detach().clone()) for name, value in found.items()}
        features.load_state_dict({**found, "prompt": features.prompt}, assign=True)
        return features

    def grid(self, latents: Tensor) -> Grid:
        """Return the token grid of latents [B, C, T, H, W]."""
        return Grid(latents.shape[3] // self.config.patch, latents.shape[4] // self.config.patch)

    def forward(self, latents: Tensor, timestep: Tensor) -> tuple[Tensor, ...]:
        """Return the features [B, N, T, width] after each chosen layer.

        `latents` [B, C, T, H, W] carry the noise of `timestep` [B] in 0..1000.
        """
        config, grid = self.config, self.grid(latents)
        x = grid_cells(latents.to(self.patch_embedding.weight.dtype), config.patch)
        x = F.linear(x, self.patch_embedding.weight.flatten(1), self.patch_embedding.bias)
        positions = tuple(range(latents.shape[2]))
        turn = rotation_table(positions, grid, AxisSplit.wan(config.head_width), x.device)
        everything = plan_window(grid, SpatialWindow(grid.height, grid.width), x.device)
        _, projection, text = self.embedding(timestep, self.prompt)
        taps: list[Tensor] = []
        for number, block in enumerate(cast(Sequence[DiTBlock], self.blocks), start=1):
            x, _ = block(x, block.condition(projection, text), turn, None, everything)
            if number in self.layers:
                taps.append(x)
        return tuple(taps)


class QueryHead(nn.Module):
    """The queries of one depth: cross-attention to their supports, feed-forward, a logit each.

    Everything in it can be differentiated twice (attention is written out: fused kernels can not), and
    computes in the dtype of its own weights, float32, also under autocast.
    """

    def __init__(self, features: int, config: MSQConfig) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        self.feature_norm = nn.LayerNorm(features)
        self.projection = nn.Linear(features, width)
        self.queries = nn.Parameter(0.02 * torch.randn(len(config.scopes), config.scope_queries, width))
        self.keys_values = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, width)
        self.ffn = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        # No biases: they would cancel between a real and a generated clip.
        self.readout = nn.Sequential(nn.LayerNorm(width, bias=False), nn.Linear(width, 1, bias=False))

    def forward(self, features: Tensor, supports: tuple[Tensor | None, ...]) -> Tensor:
        """Return the logits [B, S, Q] of features [B, N, T, C_in] seen through one support a scope."""
        with torch.autocast(features.device.type, enabled=False):
            x = self.projection(self.feature_norm(features.flatten(1, 2).to(self.queries.dtype)))
            keys_values = self.keys_values(x)  # [B, M, 2 C]
            seen = [
                self._attend(queries, keys_values, support)
                for queries, support in zip(self.queries, supports)
            ]
            tokens = self.queries + self.output(torch.stack(seen, dim=1))
            return self.readout(tokens + self.ffn(tokens)).squeeze(-1)

    def _attend(self, queries: Tensor, keys_values: Tensor, support: Tensor | None) -> Tensor:
        """Let `queries` [Q, C] attend to their supports in `keys_values` [B, M, 2 C]; return [B, Q, C]."""
        batch, tokens, _ = keys_values.shape
        layout = "bkhd"  # every query sees the same tokens
        if support is not None:
            layout = "bqkhd"
            clip_start = tokens * torch.arange(batch, device=support.device)[:, None, None]
            rows = keys_values.flatten(0, 1).index_select(0, (support + clip_start).flatten())
            keys_values = rows.view(*support.shape, -1)
        keys, values = keys_values.unflatten(-1, (2, self.heads, -1)).unbind(-3)
        asked = queries.unflatten(-1, (self.heads, -1))
        # Normed queries and keys keep the softmax soft however large the features grow.
        asked, keys = (F.layer_norm(y, y.shape[-1:]) for y in (asked, keys))
        scores = torch.einsum(f"qhd,{layout}->bqhk", asked, keys) * keys.shape[-1] ** -0.5
        return torch.einsum(f"bqhk,{layout}->bqhd", scores.softmax(-1), values).flatten(2)


class MSQDiscriminator(nn.Module):
    """Tells real latent clips from generated ones: a backbone, frozen by default, and a head a depth."""

    def __init__(self, backbone: LatentFeatures, config: MSQConfig) -> None:
        """Raise InputError where the backbone gives other layers than `config` names."""
        super().__init__()
        if backbone.layers != config.layers:
            raise InputError(f"the backbone gives layers {backbone.layers}, the heads want {config.layers}")
        self.config = config
        self.backbone = backbone.requires_grad_(config.train_backbone)
        self.heads = nn.ModuleList(QueryHead(backbone.config.width, config) for _ in config.layers)

    @classmethod
    def of(
        cls, generator: Generator, prompt: Tensor, config: MSQConfig, *, share: bool = False
    ) -> MSQDiscriminator:
        """Build a discriminator on a copy of the generator's first layers, on its device.

        With `share` on these layers themselves (see `LatentFeatures.of`), which must be frozen.
        """
        backbone = LatentFeatures.of(generator, config.layers, prompt, share=share)
        return cls(backbone, config).to(prompt.device)

    def draw_supports(self, latents: Tensor) -> Supports:
        """Choose what every query sees of clips shaped like `latents` [B, C, T, H, W].

        At random in training, on the device; spread over the clip, always alike, in evaluation. A real
        and a generated clip are judged with the same supports. What is larger than the clip is cut to it.
        """
        config, grid = self.config, self.backbone.grid(latents)
        clip = (latents.shape[2], grid.height, grid.width)
        sizes = {"spatial": (1, *config.window), "temporal": (config.tube_latents, *config.window)}

        def draw(scope: Scope) -> Tensor | None:
            if scope == "global":
                return None
            t, h, w = (min(size, extent) for size, extent in zip(sizes[scope], clip))
            choices = (clip[0] - t + 1, clip[1] - h + 1, clip[2] - w + 1)
            starts = _random_starts if self.training else _spread_starts
            shape = (latents.shape[0], config.scope_queries)
            return _box_tokens(starts(choices, shape, latents.device), (t, h, w), clip)

        return tuple(tuple(draw(scope) for scope in config.scopes) for _ in config.layers)

    def scope_logits(self, features: Sequence[Tensor], supports: Supports) -> Tensor:
        """Return the mean logit of every scope [B, S] from the backbone's features, one a depth."""
        logits = [head(x, seen) for head, x, seen in zip(self.heads, features, supports)]
        return torch.stack(logits).mean(dim=(0, 3))

    def forward(self, latents: Tensor, timestep: Tensor, supports: Supports) -> Tensor:
        """Return the logit [B] of clips [B, C, T, H, W] that carry the noise of `timestep` [B]."""
        return self.scope_logits(self.backbone(latents, timestep), supports).mean(dim=1)


def _random_starts(choices: tuple[int, int, int], shape: tuple[int, int], device: torch.device) -> Tensor:
    """Draw (t, y, x), each uniform over its count of `choices`: [*shape, 3]."""
    return torch.stack([torch.randint(n, shape, device=device) for n in choices], dim=-1)


def _spread_starts(choices: tuple[int, int, int], shape: tuple[int, int], device: torch.device) -> Tensor:
    """Return the first points of a low-discrepancy sequence as starts: [*shape, 3], the same for a batch."""
    index = torch.arange(shape[1], device=device, dtype=torch.float64)
    ratio = 1.2207440846057596  # the real root of x^4 = x + 1: Roberts' R3 sequence
    axes = [((0.5 + index * ratio**-k) % 1 * n).long() for k, n in enumerate(choices, start=1)]
    return torch.stack(axes, dim=-1).expand(*shape, 3)


def _box_tokens(starts: Tensor, size: tuple[int, int, int], clip: tuple[int, int, int]) -> Tensor:
    """Return the indices [..., t h w] of the tokens of boxes at `starts` [..., 3] in a clip of (T, H, W)."""
    t, y, x = (starts[..., axis, None] + torch.arange(size[axis], device=starts.device) for axis in range(3))
    cells = y[..., :, None] * clip[2] + x[..., None, :]  # cells come before time, as in the features
    return (cells[..., None] * clip[0] + t[..., None, None, :]).flatten(-3)


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Let what is computed inside give no gradient to the module's parameters."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
