"""Counted memory of the paper's 5B recipe on the GPUs of one host: what lies on each of them, in bytes.

Weights, gradients and optimiser states are counted from the networks themselves, built without values.
Activations are counted from what each operation keeps for its backward pass; a test compares that with
what autograd really keeps. Temporary buffers inside one operation, kernels' work spaces and
fragmentation are not counted: leave a tenth of the card for them.

Precision (see `models.lora`): frozen weights bfloat16, trained ones float32 with float32 gradients and
two float32 moments; activations bfloat16, norms float32. FSDP2 shards all of these over the GPUs and
gathers one layer at a time in bfloat16. Words: a *pass* is one clip through the generator; larger
batches accumulate gradients over passes. In Stage 1 a pass is forgotten before the next one; in Stage 2
the generator's update follows the discriminator's of all passes, whose rollouts are held until then.

Shapes: N tokens of a latent, C width of the generator, L prompt tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from recavsr.cache_policy import CacheAction, Schedule, visible_after_blocks
from recavsr.geometry import PLAN, BlockPlan
from recavsr.models.generator import Generator, GeneratorConfig
from recavsr.models.lora import attach
from recavsr.models.presets import recavsr_5b

BF16, FP32 = 2, 4

WAN_DECODER_BYTES, WAN_DECODER_BYTES_RECOMPUTED = 32_537, 7_512 + 7_973
"""What the Wan2.2 decoder keeps of one latent (4 frames), bfloat16, a pixel of the picture.

Counted by autograd's saved tensors at full width and 704 x 1280, without values. Recomputed: what is kept
outside of the residual blocks with their inputs, and the inside of the largest of them.
"""
WAN_DECODER_HISTORY = 3_569
"""What the Wan2.2 decoder remembers from latent to latent, bfloat16, a pixel; counted at full width."""
LPIPS_BYTES = {"alex": 113, "vgg": 1956}
"""What LPIPS keeps of one frame, float32, a pixel; counted by autograd's saved tensors up to 256 x 256."""
WAN_ENCODER_PARAMETERS, WAN_DECODER_PARAMETERS = 149_627_776 + 9_312, 555_049_228 + 2_352
MSQ_LAYERS, MSQ_WIDTH, MSQ_QUERIES = (8, 15, 22), 512, 12


@dataclass(frozen=True)
class TrainingSetup:
    """Sizes that decide the memory; the defaults are the paper's recipe on eight GPUs."""

    generator: GeneratorConfig = field(default_factory=recavsr_5b)
    rank: int = 512
    gpus: int = 8
    frames: int = 85
    height: int = 704
    width: int = 1280
    clips: int = 1  # clips of one pass on one GPU
    passes: int = 1  # of one step on one GPU
    plan: BlockPlan = PLAN
    prompt_tokens: int = 512
    recompute: bool = True  # layers, LR projector, the VAE decoder's blocks: kept inputs, inside again
    perceptual: str = "vgg"  # the backbone of LPIPS in Stage 2
    autoencoder: bool = True  # encode HQ frames, and in Stage 2 compare decoded ones

    @property
    def cells(self) -> int:
        """Return N."""
        stride = self.generator.token_stride
        return (self.height // stride) * (self.width // stride)

    @property
    def blocks(self) -> list[tuple[int, ...]]:
        """Return the latent positions of every block of a clip."""
        count = self.plan.block_count(self.frames)
        starts = [self.plan.first_latent(i) for i in range(count)]
        return [tuple(range(s, s + self.plan.latents(i))) for i, s in enumerate(starts)]

    @property
    def tokens(self) -> int:
        """Return the tokens of a pass."""
        return self.clips * self.cells * sum(map(len, self.blocks))


STAGE1 = TrainingSetup(passes=4)
STAGE2 = TrainingSetup(passes=2)
"""The paper's batches of 32 and 16 clips on eight GPUs (its images take no more)."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one GPU: what is held during a whole step, and moments of which the largest counts."""

    held: dict[str, int]
    moments: dict[str, int]

    @property
    def peak(self) -> int:
        """Return the counted peak."""
        return sum(self.held.values()) + max(self.moments.values(), default=0)

    def table(self) -> str:
        """Return the plan as a Markdown table in decimal GB."""
        rows = [f"| {name} | {size / 1e9:.2f} |" for name, size in self.held.items()]
        rows += [f"| *moment:* {name} | {size / 1e9:.2f} |" for name, size in self.moments.items()]
        return "\n".join(
            ["| on each GPU | GB |", "| --- | --- |", *rows, f"| **peak** | **{self.peak / 1e9:.1f}** |"]
        )


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a generator with adapters: frozen and trained, in one layer and outside of layers."""

    layers: int
    frozen_layer: int
    trained_layer: int
    frozen_rest: int
    trained_rest: int

    @property
    def frozen(self) -> int:
        """Return all frozen parameters."""
        return self.layers * self.frozen_layer + self.frozen_rest

    @property
    def trained(self) -> int:
        """Return all trained parameters."""
        return self.layers * self.trained_layer + self.trained_rest

    @staticmethod
    def of(config: GeneratorConfig, rank: int) -> ParameterCount:
        """Count the parameters of a generator with adapters of `rank`, without allocating any."""
        with torch.device("meta"):
            generator = Generator(config)
            attach(generator, rank)

        def count(module: nn.Module, trained: bool) -> int:
            return sum(p.numel() for p in module.parameters() if p.requires_grad == trained)

        layer = generator.blocks[0]
        in_layers = [config.layers * count(layer, trained) for trained in (False, True)]
        return ParameterCount(
            config.layers,
            count(layer, False),
            count(layer, True),
            count(generator, False) - in_layers[0],
            count(generator, True) - in_layers[1],
        )


def layer_activations(
    config: GeneratorConfig, rank: int, tokens: int, seen: int, *, joined: bool = False
) -> int:
    """Return what one layer keeps of `tokens` tokens whose self-attention reads `seen` keys in all.

    Where blocks attend apart, `seen` sums over them what each block reads, history and itself, and
    `joined` says that their results are joined afterwards. `rank` 0 stands for a frozen layer without
    adapters, which keeps no inputs of linear layers. The layer's own input is not counted.
    """
    width, ffn = config.width, config.ffn_width
    norms = FP32 * 6 * width  # inputs of three layer norms, of the norms of q, k and the prompt's q
    statistics = FP32 * (3 * 2 + 3 + 2 * config.heads)
    attention = BF16 * 4 * width  # q and result, of self- and of cross-attention
    gelu = BF16 * ffn
    # Inputs of adapted layers, those of the two output projections being attention's results.
    linear = BF16 * (3 * width + ffn + 8 * rank) if rank else 0
    joined_result = BF16 * width if joined and rank else 0
    return tokens * (norms + statistics + attention + gelu + linear + joined_result) + seen * BF16 * 2 * width


def adapter_casts(config: GeneratorConfig, rank: int) -> int:
    """Return the bfloat16 copies of one layer's adapters that a pass keeps where FSDP2 makes none."""
    width, ffn = config.width, config.ffn_width
    return BF16 * rank * (6 * 2 * width + 2 * (width + ffn))  # the prompt's k and v are computed apart


def projector_activations(config: GeneratorConfig, clips: int, frames: int, height: int, width: int) -> int:
    """Return what the LR projector keeps of a clip of `frames` (4 T - 3) frames."""
    first, second = config.lr_hidden
    cells = clips * (height // config.latent_stride) * (width // config.latent_stride)
    half, latents = (frames + 1) // 2, (frames + 3) // 4
    tokens = cells // config.patch**2 * latents
    inside = FP32 * 2 + BF16  # the norm's input and result, and the input of SiLU
    taps = 4  # of both convolutions in time: their inputs are written out once a tap
    return (
        cells * half * (taps * 3 * config.latent_stride**2 * BF16 + first * inside + FP32)
        + cells * latents * taps * first * BF16
        + tokens * (second * inside + FP32 + second * BF16)
    )


def seen_keys(schedule: Schedule, blocks: Sequence[Sequence[int]]) -> list[int]:
    """Return for every layer the latents that all blocks of a clip read: their history and themselves."""
    own = sum(map(len, blocks))
    return [own + _history(action, schedule, blocks) for action in schedule.actions]


def _history(action: CacheAction, schedule: Schedule, blocks: Sequence[Sequence[int]]) -> int:
    return sum(map(len, visible_after_blocks(action, schedule.anchor_rule, blocks)))


def plan_stage1(setup: TrainingSetup, action: CacheAction = CacheAction(6)) -> MemoryPlan:  # noqa: B008
    """Count a step of Stage 1: one pass over all blocks of a clip, every layer with the same history."""
    config, count = setup.generator, ParameterCount.of(setup.generator, setup.rank)
    schedule = Schedule.uniform(config.layers, action, config.schedule.anchor_rule)
    held = _states(setup, count, average=False)
    held |= _frames(setup) | _pass(setup)
    inside = [
        layer_activations(config, setup.rank, setup.tokens, setup.clips * setup.cells * latents, joined=True)
        for latents in seen_keys(schedule, setup.blocks)
    ]
    held |= _insides(setup, inside)
    if setup.autoencoder:
        held["Wan encoder, bf16, whole"] = BF16 * WAN_ENCODER_PARAMETERS
    moments = _moments(setup, count, setup.frames)
    if setup.recompute:
        moments["backward of a layer: its inside again"] = max(inside) + _backward_buffers(setup)
    return MemoryPlan(held, moments)


def plan_stage2(setup: TrainingSetup) -> MemoryPlan:
    """Count a step of Stage 2: rollout under the schedule, MSQ discriminator, decoder a latent at a time."""
    config, count = setup.generator, ParameterCount.of(setup.generator, setup.rank)
    tokens, width, pixels = setup.tokens, config.width, setup.clips * setup.height * setup.width
    held = _states(setup, count, average=True)
    judged = msq_layers(config.layers)[-1]
    backbone = judged * count.frozen_layer + count.frozen_rest
    heads = msq_parameters(width)
    if setup.gpus > 1:  # one GPU has the generator's own
        held["discriminator: frozen backbone, bf16, sharded"] = BF16 * backbone // setup.gpus
    held["discriminator: heads, gradients, moments, fp32, whole"] = 4 * FP32 * heads
    if setup.autoencoder:
        autoencoder = WAN_ENCODER_PARAMETERS + WAN_DECODER_PARAMETERS
        held["Wan encoder and decoder, bf16, whole"] = BF16 * autoencoder
    held |= _frames(setup)
    of_passes = _pass(setup)
    if setup.recompute:
        cells = setup.clips * _cells(setup)
        history = 3 * (3 * config.latent_stride**2 + config.lr_hidden[0])  # 3 frames of both convolutions
        blocks = len(setup.blocks) - 1
        of_passes["histories of the LR projector, every block"] = blocks * cells * history * BF16
    per_block = [
        [
            layer_activations(
                config,
                setup.rank,
                setup.clips * setup.cells * len(block),
                setup.clips * setup.cells * (len(block) + len(history)),
            )
            for block, history in zip(
                setup.blocks, visible_after_blocks(action, config.schedule.anchor_rule, setup.blocks)
            )
        ]
        for action in config.schedule.actions
    ]
    kept = sum(_history(action, config.schedule, setup.blocks) for action in config.schedule.actions)
    of_passes["history of every layer and block"] = setup.clips * kept * setup.cells * 2 * width * BF16
    of_passes |= _insides(setup, [sum(layer) for layer in per_block])
    layer = layer_activations(config, 0, tokens, tokens)
    if setup.recompute:
        of_passes["discriminator: inputs of its layers, generated clip"] = judged * tokens * width * BF16
    else:
        of_passes["discriminator: inside of its layers, generated clip"] = judged * layer
    of_passes["discriminator: features of both clips"] = 2 * len(MSQ_LAYERS) * tokens * width * BF16
    held |= {name: setup.passes * size for name, size in of_passes.items()}
    moments = _moments(setup, count, setup.plan.frames(0))
    # Two clips through the heads, and R1 once more with the graph of its gradient: inputs and results
    # of each head's norm, float32.
    moments["discriminator: heads of three depths, with R1"] = 4 * len(MSQ_LAYERS) * tokens * 2 * width * FP32
    if setup.autoencoder:
        # What it remembered before and what it remembers now; LPIPS goes frame by frame.
        decoder = WAN_DECODER_BYTES_RECOMPUTED if setup.recompute else WAN_DECODER_BYTES
        kept_a_pixel = decoder + 2 * WAN_DECODER_HISTORY + LPIPS_BYTES[setup.perceptual]
        moments["decoder of one latent (4 frames), LPIPS of one frame"] = pixels * kept_a_pixel
    if setup.recompute:
        again = max(max(layer) for layer in per_block)
        moments["backward of a layer: its inside again"] = max(again, layer) + _backward_buffers(setup)
    return MemoryPlan(held, moments)


def msq_layers(layers: int) -> tuple[int, ...]:
    """Return the discriminator's depths for a backbone of this many layers, the paper's for 30."""
    return tuple(sorted({max(1, round(depth * layers / 30)) for depth in MSQ_LAYERS}))


def msq_parameters(features: int) -> int:
    """Return the parameters of the MSQ discriminator's heads on features of this width."""
    w = MSQ_WIDTH
    norm_and_projection = 2 * features + features * w + w
    attention = MSQ_QUERIES * w + 2 * (w * w + w) + w * w + w
    feed_forward = 2 * w + 8 * w * w + 5 * w
    return len(MSQ_LAYERS) * (norm_and_projection + attention + feed_forward + 2 * w)


def _states(setup: TrainingSetup, count: ParameterCount, *, average: bool) -> dict[str, int]:
    """Return weights, gradients and optimiser states, sharded, and what is gathered at one time."""
    trained, gpus = FP32 * count.trained, setup.gpus
    held = {
        "frozen weights, bf16, sharded": BF16 * count.frozen // gpus,
        "trained weights, fp32, sharded": trained // gpus,
        "their gradients, fp32, sharded": trained // gpus,
        "AdamW's two moments, fp32, sharded": 2 * trained // gpus,
    }
    if average:
        held["moving average, fp32, sharded"] = trained // gpus
    if gpus > 1:
        layer, rest = count.frozen_layer + count.trained_layer, count.frozen_rest + count.trained_rest
        held["gathered: two layers and the rest, bf16"] = BF16 * (2 * layer + rest)
        held["a layer's gradients before they are reduced"] = (BF16 + FP32) * count.trained_layer
    else:
        # A layer's casts go with its inside; those of the prompt's k and v are always kept.
        cast = 1 if setup.recompute else count.layers
        prompt = count.layers * 2 * setup.rank * 2 * setup.generator.width
        held["adapters and projections cast to bf16"] = BF16 * (
            cast * count.trained_layer + prompt + count.trained_rest
        )
    return held


def _frames(setup: TrainingSetup) -> dict[str, int]:
    """Return the batches on the card: that of the step, and the next one, drawn ahead."""
    values = setup.passes * setup.clips * 3 * setup.frames * setup.height * setup.width
    if setup.autoencoder:
        return {"HQ and LR frames of a step and of the next, fp32": 2 * 2 * values * FP32}
    return {"LR frames, bf16": values * BF16}


def _pass(setup: TrainingSetup) -> dict[str, int]:
    """Return what a pass keeps beside the layers."""
    config = setup.generator
    kept = {}
    if not setup.recompute:
        kept["inside of the LR projector"] = projector_activations(
            config, setup.clips, setup.frames, setup.height, setup.width
        )
    kept["prompt's keys and values, and what gives them"] = (
        config.layers * setup.prompt_tokens * config.width * (2 * BF16 + FP32)
    )
    return kept


def _insides(setup: TrainingSetup, inside: Sequence[int]) -> dict[str, int]:
    if setup.recompute:
        size = setup.generator.layers * setup.tokens * setup.generator.width * BF16
        return {"inputs of all layers": size}
    return {"inside of all layers": sum(inside)}


def _backward_buffers(setup: TrainingSetup) -> int:
    """Return gradients that live at once where they are widest, in the feed-forward part of a layer."""
    config = setup.generator
    return setup.tokens * (2 * BF16 * config.ffn_width + 2 * FP32 * config.width)


def _cells(setup: TrainingSetup) -> int:
    """Return the cells of one latent."""
    stride = setup.generator.latent_stride
    return (setup.height // stride) * (setup.width // stride)


def _moments(setup: TrainingSetup, count: ParameterCount, frames: int) -> dict[str, int]:
    """Return the moments of both stages; `frames`: the most that the LR projector gets at once."""
    config = setup.generator
    # One product for all 3 x 3 places of the kernel, then their sum in float32.
    half = (frames + 1) // 2
    convolution = setup.clips * _cells(setup) * half * config.lr_hidden[0] * (9 * BF16 + FP32)
    inside = projector_activations(config, setup.clips, frames, setup.height, setup.width)
    moments = {"first convolution of the LR projector": convolution}
    if setup.recompute:
        moments = {"LR projector: its inside again, and its first convolution": inside + convolution}
    if setup.gpus > 1:
        moments["gradients outside of layers before they are reduced"] = (BF16 + FP32) * count.trained_rest
    return moments
