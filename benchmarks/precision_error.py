"""What precision costs: errors of bfloat16 and float8 against float32, layer by layer and in the latents.

Real activations of nano (trained weights) on a moving picture, or of a random wide model. Every stream is
rolled out on its own, so errors feed back through recycled latents and history, as they do in use.

    python benchmarks/precision_error.py --blocks 20 -o errors.json
    python benchmarks/precision_error.py --model wide --blocks 4
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from recavsr.attention import SpatialWindow
from recavsr.cache_policy import Schedule
from recavsr.evaluation.environment import environment
from recavsr.evaluation.speed import moving_clip
from recavsr.fp8 import FP8Linear
from recavsr.geometry import BlockPlan
from recavsr.models.folded import FoldedGenerator, TensorSource, fold
from recavsr.models.generator import Generator, GeneratorConfig
from recavsr.models.presets import recavsr_5b
from recavsr.models.weights import ModelFolder
from recavsr.stream.blocks import prepare_lr_frames
from recavsr.stream.load import load, model_folder, random_model
from recavsr.stream.step import BlockModel, block_noise

PLAN = BlockPlan()


def wide_config() -> GeneratorConfig:
    """Return the 5B model's head and form at a third of its width, with four layers of its route."""
    full = recavsr_5b()
    return replace(
        full,
        layers=4,
        heads=8,
        ffn_width=4096,
        text_width=256,
        lr_hidden=(256, 512),
        schedule=Schedule(full.schedule.actions[4:8]),
        window=SpatialWindow(22, 40),
    )


def open_weights(name: str) -> tuple[GeneratorConfig, TensorSource, Tensor]:
    """Return sizes, weights in float32 and prompt."""
    if name == "wide":
        from recavsr.models.presets import recavsr_5b_decoder

        torch.manual_seed(0)
        config = wide_config()
        model = random_model("wide", config, recavsr_5b_decoder(), 64, device="cpu", precision="fp32")
        prompt = torch.randn(1, 64, config.text_width)
        return config, model.generator.state_dict().__getitem__, prompt
    folder = ModelFolder.open(model_folder(name))
    return folder.generator, folder.load_generator().state_dict().__getitem__, folder.load_prompt()


def plain(config: GeneratorConfig, source: TensorSource, dtype: torch.dtype) -> Generator:
    """Return the plain form in a dtype."""
    with torch.device("meta"):
        model = Generator(config)
    model.load_state_dict({k: source(k).to(dtype) for k in model.state_dict()}, assign=True)
    return model.requires_grad_(False)


def roll_out(generator: Generator, prompt: Tensor, frames: Tensor, blocks: int) -> list[Tensor]:
    """Return the latents of each block of a clip [1, 3, F, H, W]."""
    config, dtype = generator.config, generator.head.weight.dtype
    side = [extent // config.latent_stride for extent in frames.shape[3:]]
    state, condition, latents = generator.start(), generator.condition(prompt), []
    for index in range(blocks):
        noise = block_noise((1, config.latent_channels, PLAN.latents(index), *side), 42, 0, index)
        first = PLAN.first_frame(index)
        piece = frames[:, :, first : first + PLAN.frames(index)].to(dtype)
        state, made = generator.step(state, condition, noise, piece)
        latents.append(made)
    return latents


def relative(ours: list[Tensor], exact: list[Tensor]) -> float:
    """Return the root mean square error as a share of the root mean square."""
    a, b = (torch.cat([x.flatten() for x in latents]).double() for latents in (ours, exact))
    return float((a - b).norm() / b.norm())


def layer_errors(generator: FoldedGenerator, prompt: Tensor, frames: Tensor) -> dict[str, dict[str, float]]:
    """Return each kind of layer's relative error in float8 and in bfloat16, on activations in float32.

    The median and the worst of all layers of a kind, over the first two blocks.
    """
    found: dict[str, list[tuple[float, float]]] = {}

    def compare(kind: str):
        def hook(layer: nn.Linear, inputs: tuple[Tensor], out: Tensor) -> None:
            x = inputs[0].bfloat16()
            rounded = FP8Linear(layer.weight, layer.bias)(x)
            half = nn.functional.linear(x, layer.weight.bfloat16(), layer.bias.bfloat16())
            found.setdefault(kind, []).append((relative([rounded], [out]), relative([half], [out])))

        return hook

    hooks = [
        layer.register_forward_hook(compare(name.partition(".")[2]))
        for name, layer in generator.blocks.named_modules()
        if isinstance(layer, nn.Linear)
    ]
    roll_out(generator, prompt, frames, 2)
    for hook in hooks:
        hook.remove()
    return {
        kind: {
            "fp8_median": round(statistics.median(e for e, _ in errors), 5),
            "fp8_worst": round(max(e for e, _ in errors), 5),
            "bf16_median": round(statistics.median(e for _, e in errors), 5),
        }
        for kind, errors in found.items()
    }


def frames_of(model: BlockModel, frames: Tensor, blocks: int) -> Tensor:
    """Return the SR frames of a clip, clamped to [-1, 1]."""
    state, out = model.start(*frames.shape[3:]), []
    for index in range(blocks):
        first = PLAN.first_frame(index)
        state, made = model.step(state, frames[:, :, first : first + PLAN.frames(index)])
        out.append(made.clamp(-1, 1))
    return torch.cat(out, dim=2)


def rgb_decibels(name: str, frames: Tensor, blocks: int) -> dict[str, float]:
    """Return the PSNR of the whole model's frames in each precision against float32."""
    exact = frames_of(load(name, device="cpu", precision="fp32"), frames, blocks)
    found = {}
    for precision in ("bf16", "fp8"):
        made = frames_of(load(name, device="cpu", precision=precision), frames, blocks)
        found[precision] = round(float(10 * torch.log10(4 / (made - exact).square().mean())), 2)
    return found


@torch.inference_mode()
def main() -> None:
    """Measure, print, and write a result file where one is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="nano", help="nano, wide (random), or a model folder")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--size", type=int, nargs=2, default=(64, 96), help="output height and width")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    config, source, prompt = open_weights(options.model)
    height, width = options.size
    count = PLAN.first_frame(options.blocks)
    frames = prepare_lr_frames(
        moving_clip(count, height // 4, width // 4), (height, width), config.token_stride
    )

    def half(name: str) -> Tensor:
        return source(name).bfloat16()

    rows = {}
    for weights, given in (("as given", source), ("rounded to bfloat16 before", half)):
        exact = roll_out(plain(config, given, torch.float32), prompt, frames, options.blocks)
        forms = {
            "plain bf16": plain(config, given, torch.bfloat16),
            "folded fp32": fold(config, given, prompt, torch.float32),
            "folded bf16": fold(config, given, prompt, torch.bfloat16),
            "folded fp8": fold(config, given, prompt, torch.bfloat16, FP8Linear),
        }
        for form, generator in forms.items():
            own = prompt.bfloat16() if form == "plain bf16" else prompt
            made = roll_out(generator, own, frames, options.blocks)
            cuts = (slice(0, 1), slice(1, options.blocks // 2), slice(options.blocks // 2, None))
            errors = [float(f"{relative(made[cut], exact[cut]):.4g}") for cut in cuts]
            rows[f"{form}, weights {weights}"] = errors
            print(f"{form:12}  weights {weights:28}", *errors, flush=True)
    layers = layer_errors(fold(config, source, prompt, torch.float32), prompt, frames)
    for kind, values in layers.items():
        print(f"{kind:28}", values)
    decibels = {} if options.model == "wide" else rgb_decibels(options.model, frames, options.blocks)
    print("PSNR of the frames against float32, dB:", decibels)
    if options.output:
        about = {"environment": environment(), "model": options.model, "blocks": options.blocks}
        result = {
            **about,
            "size": [height, width],
            "latent_errors": rows,
            "layer_errors": layers,
            "rgb_db": decibels,
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
