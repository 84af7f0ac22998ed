"""Checkpoint names: how the released tensor names map to ours, and strict loading.

The released files keep diffusers' names for the backbone. A released name becomes ours by the
first rule that matches; the reverse is used to save. No tensor is reshaped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from recavsr.errors import InputError
from recavsr.models.decoder import DecoderConfig, FlashDecoder
from recavsr.models.folded import FoldedGenerator, MakeLinear, fold
from recavsr.models.generator import Generator, GeneratorConfig

# (released, ours): prefixes or infixes, delimited by dots; both directions are unambiguous.
_GENERATOR_RULES = (
    ("condition_embedder.time_embedder.linear_1.", "embedding.time_in."),
    ("condition_embedder.time_embedder.linear_2.", "embedding.time_out."),
    ("condition_embedder.time_proj.", "embedding.time_projection."),
    ("condition_embedder.text_embedder.linear_1.", "embedding.text_in."),
    ("condition_embedder.text_embedder.linear_2.", "embedding.text_out."),
    ("lq_proj.", "lr_projector."),
    ("sr_proj.", "recycle_projection."),
    ("proj_out.", "head."),
    (".attn1.", ".self_attention."),
    (".attn2.", ".cross_attention."),
    (".to_out.0.", ".to_out."),
    (".norm2.", ".cross_norm."),
    (".ffn.net.0.proj.", ".ffn.up."),
    (".ffn.net.2.", ".ffn.down."),
    ("scale_shift_table", "modulation"),
)
_DECODER_RULES = (
    ("backbone.blocks.", "backbone."),
    ("temporal_refinement.blocks.", "refinement."),
    ("spatial_projection.0.", "head.inner."),
    ("spatial_projection.2.", "head.outer."),
)


def _rename(name: str, rules: Iterable[tuple[str, str]]) -> str:
    for old, new in rules:
        if old.startswith("."):
            # `.norm2.` belongs to a block; `lq_proj.norm2.` keeps its name.
            if name.startswith("blocks."):
                name = name.replace(old, new)
        elif name.startswith(old):
            name = new + name[len(old) :]
        elif old == "scale_shift_table" or new == "scale_shift_table":
            name = re.sub(rf"\b{old}$", new, name)
    return name


def generator_name(released: str) -> str:
    """Return our name of a tensor of a released `transformer.safetensors`."""
    return _rename(released, _GENERATOR_RULES)


def released_generator_name(ours: str) -> str:
    """Return the released name of one of the generator's tensors."""
    return _rename(ours, [(new, old) for old, new in _GENERATOR_RULES])


def decoder_name(released: str) -> str:
    """Return our name of a tensor of a released `flashdecoder.safetensors`."""
    return _rename(released, _DECODER_RULES)


def released_decoder_name(ours: str) -> str:
    """Return the released name of one of the decoder's tensors."""
    return _rename(ours, [(new, old) for old, new in _DECODER_RULES])


FILES = (
    "model_config.json",
    "transformer.safetensors",
    "flashdecoder_config.json",
    "flashdecoder.safetensors",
    "vae_config.json",
    "prompt.safetensors",
)
"""What a model folder must hold. `vae.safetensors` and `router.safetensors` are optional."""


@dataclass(frozen=True)
class ModelFolder:
    """A model folder in the released layout, its configs read and checked."""

    path: Path
    generator: GeneratorConfig
    decoder: DecoderConfig
    vae: dict[str, Any]

    @staticmethod
    def open(path: str | Path) -> ModelFolder:
        """Read the configs of a folder; raise InputError where a file is missing or does not fit."""
        path = Path(path)
        if not path.is_dir():
            raise InputError(f"{path} is not a model folder (it should hold {', '.join(FILES)})")
        missing = [name for name in FILES if not (path / name).is_file()]
        if missing:
            raise InputError(f"model folder {path} lacks {', '.join(missing)}")
        vae = _read_json(path / "vae_config.json")
        decoder = DecoderConfig.from_released(_read_json(path / "flashdecoder_config.json"), vae)
        generator = GeneratorConfig.from_released(_read_json(path / "model_config.json"))
        if not len(decoder.latents_mean) == len(decoder.latents_std) == generator.latent_channels:
            raise InputError(
                f"vae_config.json: {len(decoder.latents_mean)} latent means and {len(decoder.latents_std)} "
                f"deviations, the generator has {generator.latent_channels} latent channels"
            )
        generator = replace(generator, latent_stride=decoder.latent_stride)
        return ModelFolder(path, generator, decoder, vae)

    def load_generator(
        self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Generator:
        """Load the generator straight to `device` in `dtype`, strictly."""
        with torch.device("meta"):
            model = Generator(self.generator)
        tensors = read_tensors(self.path / "transformer.safetensors", device, dtype, generator_name)
        load_strictly(model, tensors, self.path / "transformer.safetensors", released_generator_name)
        return model.eval().requires_grad_(False)

    def load_folded(
        self,
        prompt: Tensor,
        dtype: torch.dtype,
        make: MakeLinear | None = None,
        resident: Sequence[bool] | None = None,
    ) -> FoldedGenerator:
        """Load the generator in its form for inference, strictly, straight to the device of `prompt`.

        One layer at a time is read, folded and brought into its final form (see `models.folded`).
        """
        path = self.path / "transformer.safetensors"
        with torch.device("meta"):
            plain = Generator(self.generator)
        found = read_shapes(path)
        _refuse_lora(found, path)
        shapes = {generator_name(name): shape for name, shape in found.items()}
        _compare(plain, shapes, path, released_generator_name)
        with safe_open(str(path), framework="pt", device=str(prompt.device)) as file:

            def source(name: str) -> Tensor:
                return file.get_tensor(released_generator_name(name))

            return fold(self.generator, source, prompt, dtype, make, resident)

    def load_decoder(
        self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> FlashDecoder:
        """Load the LR-conditioned decoder straight to `device` in `dtype`, strictly."""
        with torch.device("cpu"):  # its latent statistics come from the config, so not on meta
            model = FlashDecoder(self.decoder)
        name = self.path / "flashdecoder.safetensors"
        to_ours, to_released = decoder_names(self.decoder)
        load_strictly(model, read_tensors(name, device, dtype, to_ours), name, to_released)
        return model.to(device).eval().requires_grad_(False)

    def load_prompt(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
        """Load the fixed prompt embedding [1, L, text width]."""
        name = self.path / "prompt.safetensors"
        tensors = read_tensors(name, device, dtype)
        if set(tensors) != {"positive"}:
            raise InputError(f"{name} must hold one tensor 'positive', it holds {sorted(tensors)}")
        prompt = tensors["positive"]
        if prompt.dim() != 3 or prompt.shape[0] != 1 or prompt.shape[2] != self.generator.text_width:
            raise InputError(
                f"{name}: 'positive' is {list(prompt.shape)}, expected [1, L, {self.generator.text_width}]"
            )
        return prompt

    def check(self) -> None:
        """Compare every tensor's name and shape with the configs without loading values.

        Raises InputError that names what is missing, unexpected or of another shape.
        """
        with torch.device("meta"):
            generator, decoder = Generator(self.generator), FlashDecoder(self.decoder)
        to_ours, to_released = decoder_names(self.decoder)
        for model, file, ours, released in (
            (generator, "transformer.safetensors", generator_name, released_generator_name),
            (decoder, "flashdecoder.safetensors", to_ours, to_released),
        ):
            shapes = {ours(name): shape for name, shape in read_shapes(self.path / file).items()}
            _compare(model, shapes, self.path / file, released)
        self.load_prompt()


def decoder_names(config: DecoderConfig) -> tuple[Callable[[str], str], Callable[[str], str]]:
    """Return the (to ours, to released) renaming of a decoder's tensors."""
    if config.head == "linear":
        return decoder_name, released_decoder_name
    # The convolutional head is ours and has no released names; the rest of the decoder has.
    rules = [rule for rule in _DECODER_RULES if not rule[1].startswith("head.")]
    return partial(_rename, rules=rules), partial(_rename, rules=[(new, old) for old, new in rules])


def read_shapes(path: Path) -> dict[str, list[int]]:
    """Return the shape of every tensor in a safetensors file."""
    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} can not be read as safetensors: {error}") from error


def read_tensors(
    path: Path,
    device: torch.device | str,
    dtype: torch.dtype,
    rename: Callable[[str], str] = str,
) -> dict[str, Tensor]:
    """Read a safetensors file to `device` in `dtype`, with renamed tensors."""
    try:
        with safe_open(str(path), framework="pt", device=str(device)) as file:
            names = list(file.keys())
            _refuse_lora(names, path)
            return {rename(name): file.get_tensor(name).to(dtype) for name in names}
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path} can not be read as safetensors: {error}") from error


def _refuse_lora(names: Iterable[str], path: Path) -> None:
    if any(".lora_" in name for name in names):
        raise InputError(f"{path} holds unmerged LoRA weights; merge them first")


def load_strictly(
    model: nn.Module, tensors: Mapping[str, Tensor], path: Path, released: Callable[[str], str]
) -> None:
    """Put tensors (our names) into a model; raise InputError that names every misfit."""
    _compare(model, {name: list(tensor.shape) for name, tensor in tensors.items()}, path, released)
    model.load_state_dict(tensors, strict=True, assign=True)


def _compare(
    model: nn.Module, shapes: Mapping[str, list[int]], path: Path, released: Callable[[str], str]
) -> None:
    wanted = {name: list(tensor.shape) for name, tensor in model.state_dict().items()}
    problems = [f"missing {released(name)}" for name in wanted if name not in shapes]
    problems += [f"unexpected {released(name)}" for name in shapes if name not in wanted]
    problems += [
        f"{released(name)} is {shapes[name]}, the config wants {shape}"
        for name, shape in wanted.items()
        if name in shapes and shapes[name] != shape
    ]
    if problems:
        shown, rest = problems[:5], len(problems) - 5
        more = f" and {rest} more" if rest > 0 else ""
        raise InputError(f"{path} does not fit its config: {'; '.join(shown)}{more}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} can not be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise InputError(f"{path} must hold a JSON object")
    return config


def save_model_folder(
    path: Path,
    generator: Generator,
    decoder: FlashDecoder,
    prompt: Tensor,
    vae: dict[str, Any],
    dtype: torch.dtype = torch.float16,
) -> None:
    """Write a model folder in the released layout and names."""
    path.mkdir(parents=True, exist_ok=True)
    _, to_released = decoder_names(decoder.config)
    for model, file, rename in (
        (generator, "transformer.safetensors", released_generator_name),
        (decoder, "flashdecoder.safetensors", to_released),
    ):
        tensors = {rename(k): v.detach().to("cpu", dtype).contiguous() for k, v in model.state_dict().items()}
        save_file(tensors, str(path / file))
    save_file({"positive": prompt.detach().to("cpu", dtype).contiguous()}, str(path / "prompt.safetensors"))
    for file, config in (
        ("model_config.json", generator.config.to_released()),
        ("flashdecoder_config.json", decoder.config.to_released()),
        ("vae_config.json", vae),
    ):
        (path / file).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
