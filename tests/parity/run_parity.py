"""Compare our arithmetic with the parity fixtures; print one JSON object {check: error or count}.

    MKL_CBWR=COMPATIBLE python tests/parity/run_parity.py SHARED/parity

`tests/test_parity.py` runs this once, in a process of its own, and holds every number to its bound.
The process is its own because of MKL_CBWR, which is read when the library loads: float32 `exp` of
Intel's MKL differs in the last bit between CPU vendors, and the angle 1000 x frequency turns that bit
into 1e-5 in the time embedding. The compatible path is the same on every vendor and is the one that
the fixtures were made with.

Errors are the largest absolute difference, except names that end in `_rms`; names that end in
`_wrong` count what is not as it must be.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from recavsr.attention import SpatialWindow
from recavsr.geometry import BlockPlan, scaled_size
from recavsr.models.decoder import DecoderConfig, FlashDecoder
from recavsr.models.generator import Generator, GeneratorConfig, teacher_forced_recycled
from recavsr.models.lr_projector import LRProjectorState
from recavsr.models.presets import recavsr_5b, recavsr_5b_decoder
from recavsr.models.weights import (
    decoder_name,
    generator_name,
    released_decoder_name,
    released_generator_name,
)
from recavsr.rope import AxisSplit, angles
from recavsr.stream.blocks import prepare_lr_frames, to_picture
from recavsr.stream.color_fix import adain, wavelet

PLAN = BlockPlan()
BLOCKS = 13
TAPPED = (0, 1, 6, 7, 12)
LEVEL = 127.5  # one 8-bit level of frames in [-1, 1]


def worst(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest absolute difference of two tensors of one shape."""
    if ours.shape != theirs.shape:
        raise ValueError(f"shapes differ: {list(ours.shape)} and {list(theirs.shape)}")
    return float((ours.double() - theirs.double()).abs().max())


def rms(ours: Tensor, theirs: Tensor) -> float:
    """Return the root mean square difference."""
    if ours.shape != theirs.shape:
        raise ValueError(f"shapes differ: {list(ours.shape)} and {list(theirs.shape)}")
    return float((ours.double() - theirs.double()).square().mean().sqrt())


def in_token_order(x: Tensor) -> Tensor:
    """Bring tokens [1, N, T, C] into the fixtures' order: latent, row, column."""
    return x[0].transpose(0, 1).flatten(0, 1)


class Fixtures:
    """The folder of fixtures, and the tiny models that they were made with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = GeneratorConfig.from_released(self.json("tiny_model_config.json"))
        self.generator_config = replace(config, window=SpatialWindow(4, 6))
        self.generator_weights = self.tensors("tiny_transformer.safetensors")
        self.norm = self.json("latent_norm.json")
        self.prompt = self.tensors("tiny_prompt.safetensors")["positive"]
        inputs = self.tensors("inputs.safetensors")
        lr = inputs["lr_source_u8"].repeat_interleave(4, 2).repeat_interleave(4, 3).float() / LEVEL - 1
        self.lr_frames = lr.permute(1, 0, 2, 3)[None]
        self.noise = [inputs[f"noise.block{b:02d}"] for b in range(BLOCKS)]
        rollout = self.tensors("rollout_latents.safetensors")
        self.latents = [rollout[f"latents.block{b:02d}"][None] for b in range(BLOCKS)]

    def json(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / name).read_text(encoding="utf-8"))

    def tensors(self, name: str) -> dict[str, Tensor]:
        return load_file(str(self.folder / name))

    def generator(self, window: SpatialWindow | None = None) -> Generator:
        config = self.generator_config
        model = Generator(config if window is None else replace(config, window=window))
        model.load_state_dict({generator_name(k): v for k, v in self.generator_weights.items()}, strict=True)
        return model

    def decoder(self) -> FlashDecoder:
        model = FlashDecoder(
            DecoderConfig.from_released(self.json("tiny_flashdecoder_config.json"), self.norm)
        )
        weights = self.tensors("tiny_flashdecoder.safetensors")
        model.load_state_dict({decoder_name(k): v for k, v in weights.items()}, strict=True)
        return model

    def lr_block(self, index: int) -> Tensor:
        first = PLAN.first_frame(index)
        return self.lr_frames[:, :, first : first + PLAN.frames(index)]


def check_conditioning(fixtures: Fixtures) -> dict[str, float]:
    """Time and text embeddings, and what layer 0 makes of them."""
    generator, wanted = fixtures.generator(), fixtures.tensors("conditioning.safetensors")
    time, projection, text = generator.embedding(torch.tensor([1000.0]), fixtures.prompt)
    layer = generator.condition(fixtures.prompt).layers[0]
    return {
        "conditioning.time": worst(time, wanted["temb"][0]),
        "conditioning.time_projection": worst(projection, wanted["timestep_proj"][0]),
        "conditioning.text": worst(text, wanted["text_projected"]),
        "conditioning.cross_keys": worst(layer.cross_keys.transpose(1, 2), wanted["block0.cross_k"]),
        "conditioning.cross_values": worst(layer.cross_values.transpose(1, 2), wanted["block0.cross_v"]),
        "conditioning.modulation": worst(layer.modulation, wanted["block0.modulation"][0]),
    }


def check_lr_projector(fixtures: Fixtures) -> dict[str, float]:
    """LR tokens of blocks 0, 1, 2 and 12, projected block by block and in other pieces.

    In float32, whose rounding depends on the processor, and in float64, where what is left is the rounding of
    the fixtures themselves.
    """
    projector, wanted = fixtures.generator().lr_projector, fixtures.tensors("lq_projector.safetensors")

    def project(sizes: list[int], dtype: torch.dtype) -> Tensor:
        state, parts = LRProjectorState(), []
        for piece in fixtures.lr_frames.to(dtype).split(sizes, dim=2):
            state, tokens = projector.to(dtype).step(state, piece)
            parts.append(tokens)
        return torch.cat(parts, dim=2)

    total = fixtures.lr_frames.shape[2]
    cuts = {"blocks": [21] + [8] * 12, "whole": [total], "odd_pieces": [1, 2, 3, 5, 7, 11, 13] + [25] * 3}
    checks = {}
    ways = {"lr_projector": torch.float32, "lr_projector_in_float64": torch.float64}
    for (group, dtype), (name, sizes) in product(ways.items(), cuts.items()):
        tokens = project(sizes, dtype)
        checks[f"{group}.{name}"] = max(
            worst(
                in_token_order(tokens[:, :, PLAN.first_latent(b) :][:, :, : PLAN.latents(b)]),
                wanted[f"lq_tokens.block{b:02d}"],
            )
            for b in (0, 1, 2, 12)
        )
    return checks


def without_time(keys: Tensor, positions: range) -> Tensor:
    """Undo the temporal rotation of keys [B, H, N, T, D]: what is left is norm and spatial rotation."""
    channels = AxisSplit.wan(keys.shape[-1]).time
    angle = angles(torch.tensor(list(positions)), channels)
    pairs = torch.view_as_complex(keys[..., :channels].double().unflatten(-1, (-1, 2)).contiguous())
    turned = torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), -angle)).flatten(-2)
    return torch.cat([turned, keys[..., channels:].double()], dim=-1)


def check_rollout(fixtures: Fixtures) -> dict[str, float]:
    """The free-running rollout: taps inside, latents, what each layer's history holds."""
    generator = fixtures.generator()
    taps = fixtures.tensors("generator_taps.safetensors")
    meta = fixtures.json("rollout_meta.json")
    condition = generator.condition(fixtures.prompt)
    seen: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
    for index, layer in enumerate(generator.blocks):
        layer.register_forward_hook(
            lambda _, given, out, i=index: seen.__setitem__(i, (given[0], out[0], *out[1]))
        )

    checks: dict[str, float] = {"history.positions_wrong": 0, "taps.query_positions_wrong": 0}
    state, outputs = generator.start(), []
    for b in range(BLOCKS):
        positions = range(state.next_position, state.next_position + PLAN.latents(b))
        state, latents = generator.step(state, condition, fixtures.noise[b], fixtures.lr_block(b))
        outputs.append(latents)
        held = [list(history.positions) if history else [] for history in state.layers]
        checks["history.positions_wrong"] += sum(
            ours != theirs for ours, theirs in zip(held, meta["cache_frame_ids_after_block"][b], strict=True)
        )
        checks[f"rollout.block{b:02d}"] = worst(latents, fixtures.latents[b])
        tap = f"block{b:02d}"
        if b not in TAPPED:
            continue
        origin = max(0, positions.stop - 22)
        relative = [position - origin for position in positions]
        checks["taps.query_positions_wrong"] += relative != sorted(
            set(taps[f"{tap}.query_positions"].tolist())
        )
        checks[f"taps.{tap}.hidden_in"] = worst(in_token_order(seen[0][0]), taps[f"{tap}.hidden_in"])
        for index, (_, hidden, keys, values) in seen.items():
            name = f"{tap}.layer{index}"
            checks[f"taps.{name}.hidden_out"] = worst(in_token_order(hidden), taps[f"{name}.hidden_out"])
            if f"{name}.value" not in taps:
                continue
            keys, values = (x.permute(0, 2, 3, 1, 4) for x in (without_time(keys, positions), values))
            checks[f"taps.{name}.key"] = worst(in_token_order(keys), taps[f"{name}.key_spatial_rot"])
            checks[f"taps.{name}.value"] = worst(in_token_order(values), taps[f"{name}.value"])

    latents, noise = torch.cat(outputs, dim=2), torch.cat(fixtures.noise, dim=2)
    recycled = teacher_forced_recycled(latents, PLAN)
    velocity = generator(condition, noise, fixtures.lr_frames, recycled, PLAN)
    checks["rollout.forward_against_steps"] = worst(noise - velocity, latents)
    return checks


def check_small_grid(fixtures: Fixtures) -> dict[str, float]:
    """A grid of 3 x 5 tokens under windows that cover it, and one that does not."""
    data = fixtures.tensors("small_grid.safetensors")
    lr_frames, checks = data["lr"][None].float(), {}
    for height, width in ((22, 40), (4, 40), (2, 3)):
        generator = fixtures.generator(SpatialWindow(height, width))
        state, condition = generator.start(), generator.condition(fixtures.prompt)
        for b in range(3):
            first = PLAN.first_frame(b)
            state, latents = generator.step(
                state, condition, data[f"noise.block{b:02d}"], lr_frames[:, :, first : first + PLAN.frames(b)]
            )
            wanted = data[f"window_{height}x{width}.latents.block{b:02d}"]
            checks[f"small_grid.window_{height}x{width}.block{b}"] = worst(latents[0], wanted)
    return checks


def check_decoder(fixtures: Fixtures) -> dict[str, float]:
    """The decoder on the fixtures' latents: frames, statistics; and one with grouped heads."""
    decoder, wanted = fixtures.decoder(), fixtures.tensors("decoder_rgb.safetensors")
    state, parts = decoder.start(), []
    for b in range(BLOCKS):
        state, frames = decoder.step(state, fixtures.latents[b], fixtures.lr_block(b))
        parts.append(frames)
    rgb = torch.cat(parts, dim=2).clamp(-1, 1)[0]
    checks = {f"decoder.frame{n:03d}": worst(rgb[:, n], wanted[f"frame{n:03d}"]) for n in (0, 4, 21)}
    checks["decoder.every8px"] = worst(rgb[:, :, 3::8, 5::8], wanted["all_frames_every8px"])
    checks["decoder.frame_mean"] = worst(rgb.double().mean((2, 3)), wanted["frame_mean"])
    checks["decoder.frame_std"] = worst(rgb.double().std((2, 3)), wanted["frame_std"])

    data, config = fixtures.tensors("decoder_gqa.safetensors"), fixtures.json("decoder_gqa_config.json")
    del config["latent_grid"]  # the fixture's own note, not a field of a decoder config
    decoder = FlashDecoder(DecoderConfig.from_released(config, fixtures.norm))
    prefix = "weights."
    weights = {decoder_name(k.removeprefix(prefix)): v for k, v in data.items() if k.startswith(prefix)}
    decoder.load_state_dict(weights, strict=True)
    lr_frames = data["lr"].float()
    state, first = decoder.step(decoder.start(), data["latents"][:, :, :2], lr_frames[:, :, :5])
    _, second = decoder.step(state, data["latents"][:, :, 2:], lr_frames[:, :, 5:])
    rgb = torch.cat([first, second], dim=2)[0].clamp(-1, 1)
    return checks | {"decoder.grouped_heads": worst(rgb[:, :, 1::4, 2::4], data["rgb"])}


def check_pictures(fixtures: Fixtures) -> dict[str, float]:
    """Colour fixes, LR preparation, quantising and output sizes."""
    uint8 = np.dtype(np.uint8)

    def levels_wrong(ours: Tensor, theirs: Tensor) -> float:
        if ours.shape != theirs.shape:
            raise ValueError(f"shapes differ: {list(ours.shape)} and {list(theirs.shape)}")
        return float(((ours.double() - theirs.double()).abs() * LEVEL > 1e-3).sum())

    data, checks = fixtures.tensors("block_preparation.safetensors"), {}
    frames = data["frames_u8_thwc"].numpy()
    padded = np.concatenate([frames[21:], np.repeat(frames[-1:], 6, axis=0)])
    for name, ours, theirs in (
        ("block0", prepare_lr_frames(frames[:21], (27, 33), 32), data["block0_x3"]),
        ("block1", prepare_lr_frames(padded, (27, 33), 32), data["block1_x3"]),
        (
            "small",
            prepare_lr_frames(data["small_u8_thwc"].numpy(), scaled_size(12, 10, 1.5), 32),
            data["small_x1p5"],
        ),
    ):
        checks[f"preparation.{name}_wrong"] = levels_wrong(ours, theirs)
    picture = torch.from_numpy(to_picture(data["decoded_in"], (49, 67), uint8))
    checks["preparation.picture"] = worst(picture, data["decoded_u8_thwc"])

    data = fixtures.tensors("color_fix.safetensors")
    checks["color_fix.adain"] = worst(adain(data["decoded"], data["adain_reference"]), data["adain_out"])
    fixed = wavelet(data["decoded"], data["lq_u8_thwc"].numpy())
    picture = torch.from_numpy(to_picture(fixed, (50, 70), uint8))
    checks["color_fix.wavelet"] = worst(picture, data["wavelet_out_u8_thwc"])

    sizes = fixtures.json("sizes.json")["scaled_size (h,w,scale -> out)"]
    checks["sizes_wrong"] = 0
    for name, wanted in sizes.items():
        size, scale = name.split("@")
        height, width = (int(side) for side in size.split("x"))
        checks["sizes_wrong"] += list(scaled_size(height, width, float(scale))) != wanted
    return checks


def check_full_size(fixtures: Fixtures) -> dict[str, float]:
    """Names, shapes and parameter counts of the full-size files, on the meta device."""
    full, checks = fixtures.json("full_size_keys.json"), {}
    with torch.device("meta"):
        generator, decoder = Generator(recavsr_5b()), FlashDecoder(recavsr_5b_decoder())
    files: tuple[tuple[str, nn.Module, str, Callable[[str], str]], ...] = (
        ("generator", generator, "transformer.safetensors", released_generator_name),
        ("decoder", decoder, "flashdecoder.safetensors", released_decoder_name),
    )
    for name, model, file, released in files:
        ours = {released(key): list(value.shape) for key, value in model.state_dict().items()}
        theirs = full[file]["tensors"]
        wrong = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
        checks[f"full_size.{name}_keys_wrong"] = len(wrong)
        count = sum(parameter.numel() for parameter in model.parameters())
        checks[f"full_size.{name}_parameters"] = count
        checks[f"full_size.{name}_parameters_wrong"] = abs(count - full[file]["parameters"])
    added = ("lr_projector.", "recycle_projection.")
    checks["full_size.backbone_parameters"] = sum(
        parameter.numel() for key, parameter in generator.named_parameters() if not key.startswith(added)
    )
    return checks


def check_bfloat16(fixtures: Fixtures) -> dict[str, float]:
    """Our bfloat16 path on the CPU against a bfloat16 run of the released runtime on a GPU."""
    data = fixtures.tensors("tiny_bf16_gpu.safetensors")
    generator, decoder = fixtures.generator().bfloat16(), fixtures.decoder()
    # As `load_decoder` does it: weights in bfloat16, latent statistics in float32.
    mean, deviation = decoder.latents_mean, decoder.latents_std
    decoder.bfloat16()
    decoder.latents_mean, decoder.latents_std = mean, deviation
    condition = generator.condition(fixtures.prompt.bfloat16())
    state, decoder_state = generator.start(), decoder.start()
    outputs, frames = [], []
    for b in range(BLOCKS):
        lr_frames = fixtures.lr_block(b).bfloat16()
        state, latents = generator.step(state, condition, fixtures.noise[b], lr_frames)
        outputs.append(latents)
        decoder_state, piece = decoder.step(decoder_state, fixtures.latents[b], lr_frames)
        frames.append(piece)
    wanted = torch.cat([data[f"latents.block{b:02d}"].float() for b in range(BLOCKS)], dim=-3)
    rgb = torch.cat(frames, dim=2)[0].clamp(-1, 1)[:, ::2, 3::8, 5::8]
    return {
        "bfloat16.latents_rms": rms(torch.cat(outputs, dim=2).view_as(wanted), wanted),
        "bfloat16.rgb_rms": rms(rgb, data["rgb_every8px_even_frames"]),
    }


CHECKS = (
    check_conditioning,
    check_lr_projector,
    check_rollout,
    check_small_grid,
    check_decoder,
    check_pictures,
    check_full_size,
    check_bfloat16,
)


def main() -> None:
    fixtures = Fixtures(Path(sys.argv[1]))
    with torch.inference_mode():
        results = {name: value for check in CHECKS for name, value in check(fixtures).items()}
    json.dump(results, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
