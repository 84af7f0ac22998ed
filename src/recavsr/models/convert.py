"""Starting points for training: a Wan2.2-TI2V-5B checkpoint becomes a model folder in the released layout.

Two layouts are read: the official one (`config.json`, sharded `diffusion_pytorch_model*.safetensors`,
`Wan2.2_VAE.pth`) and diffusers' (`transformer/`, `vae/`). Every tensor is accounted for: it is used,
or the conversion is refused with its name.

What Wan does not have is made here, so that the start equals Wan exactly, whatever the LR frames and
the recycled latents are:

- the LR projector's last linear layer and the recycle projection are zero; the projector's convolutions
  are uniform in +-1/sqrt(fan in), their norms one, all biases zero;
- `flashdecoder.safetensors` is an untrained decoder (it has its own training);
- `prompt.safetensors` is one zero vector unless a prompt is given: with no mask over the prompt it gives
  the same as the 512 zero vectors of a prompt that is nothing but Wan's padding.

Files are read and written a tensor at a time. The peak of memory is that of the largest tensor, the
projector's second convolution, in float32 and in the file's dtype: 1.4 GB measured, whatever the size of
the checkpoint (mapped pages of the source, which the system takes back, not counted). An official VAE in
the format from before PyTorch 1.6 can not be mapped and is held whole (2.8 GB).
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from recavsr.cache_policy import NO_HISTORY, PAPER_SCHEDULE, Schedule
from recavsr.errors import InputError
from recavsr.models.decoder import DecoderConfig, FlashDecoder
from recavsr.models.generator import Generator, GeneratorConfig
from recavsr.models.tensor_file import TensorWriter
from recavsr.models.wan_vae import WAN22_VAE, WanVAE
from recavsr.models.weights import ModelFolder, decoder_names, read_shapes, released_generator_name
from recavsr.video.output import PendingFiles

_SAFETENSORS = "diffusion_pytorch_model.safetensors"
_VAE_FILE = "Wan2.2_VAE.pth"
_FRESH = ("lr_projector.", "recycle_projection.")

# Official name -> released name (diffusers'), applied in this order.
_DIT_RULES = (
    (r"^time_embedding\.0\.", "condition_embedder.time_embedder.linear_1."),
    (r"^time_embedding\.2\.", "condition_embedder.time_embedder.linear_2."),
    (r"^time_projection\.1\.", "condition_embedder.time_proj."),
    (r"^text_embedding\.0\.", "condition_embedder.text_embedder.linear_1."),
    (r"^text_embedding\.2\.", "condition_embedder.text_embedder.linear_2."),
    (r"^head\.head\.", "proj_out."),
    (r"^head\.modulation$", "scale_shift_table"),
    (r"^(blocks\.\d+)\.modulation$", r"\1.scale_shift_table"),
    (r"^(blocks\.\d+)\.self_attn\.", r"\1.attn1."),
    (r"^(blocks\.\d+)\.cross_attn\.", r"\1.attn2."),
    (r"^(blocks\.\d+)\.norm3\.", r"\1.norm2."),  # the norm before cross-attention, the only one with weights
    (r"^(blocks\.\d+)\.ffn\.0\.", r"\1.ffn.net.0.proj."),
    (r"^(blocks\.\d+)\.ffn\.2\.", r"\1.ffn.net.2."),
    (r"(\.attn[12])\.([qkv])\.", r"\1.to_\2."),
    (r"(\.attn[12])\.o\.", r"\1.to_out.0."),
)
_VAE_RULES = (
    (r"^conv1\.", "quant_conv."),
    (r"^conv2\.", "post_quant_conv."),
    (r"^(\w+coder)\.conv1\.", r"\1.conv_in."),
    (r"^(\w+coder)\.head\.0\.", r"\1.norm_out."),
    (r"^(\w+coder)\.head\.2\.", r"\1.conv_out."),
    (r"^(\w+coder)\.middle\.0\.", r"\1.mid_block.resnets.0."),
    (r"^(\w+coder)\.middle\.1\.", r"\1.mid_block.attentions.0."),
    (r"^(\w+coder)\.middle\.2\.", r"\1.mid_block.resnets.1."),
    (r"\.(down|up)samples\.(\d+)\.\1samples\.\d+\.(resample|time_conv)\.", r".\1_blocks.\2.\1sampler.\3."),
    (r"\.(down|up)samples\.(\d+)\.\1samples\.(\d+)\.", r".\1_blocks.\2.resnets.\3."),
    (r"\.residual\.0\.", ".norm1."),
    (r"\.residual\.2\.", ".conv1."),
    (r"\.residual\.3\.", ".norm2."),
    (r"\.residual\.6\.", ".conv2."),
    (r"\.shortcut\.", ".conv_shortcut."),
)


def _substitute(name: str, rules: tuple[tuple[str, str], ...]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


def released_from_official(name: str) -> str:
    """Return the released name of a tensor of an official Wan2.2 transformer."""
    return _substitute(name, _DIT_RULES)


def vae_from_official(name: str) -> str:
    """Return diffusers' name of a tensor of `Wan2.2_VAE.pth`."""
    return _substitute(name, _VAE_RULES)


@dataclass(frozen=True)
class StartOptions:
    """What a starting point holds beside Wan's weights."""

    schedule: Schedule | None = None  # None: the paper's route if it has as many layers, else no history
    dtype: torch.dtype = torch.bfloat16  # of the transformer; the autoencoder and the decoder stay float32
    prompt: Path | None = None  # a prompt.safetensors to copy
    lr_hidden: tuple[int, int] = (2048, 3072)
    decoder: DecoderConfig = DecoderConfig()  # noqa: RUF009
    official_vae: Mapping[str, Any] | None = None  # sizes of an official VAE; None: Wan2.2-TI2V-5B's
    seed: int = 0


@dataclass(frozen=True)
class Conversion:
    """What became of a checkpoint."""

    layout: str  # official or diffusers
    used: dict[str, int]  # tensors read, by output file
    fresh: tuple[str, ...]  # released names of the tensors that Wan does not have
    unused: tuple[str, ...]  # files and folders of the checkpoint that training has no use for


@dataclass(frozen=True)
class _Part:
    """One network of a checkpoint: its files, and what its tensors are called in a model folder."""

    files: tuple[Path, ...]
    promised: frozenset[str]  # the names that an index lists, if there is one
    rename: Callable[[str], str] = str

    @property
    def place(self) -> Path:
        """Return what to call this network in a message: its file, or the folder of its shards."""
        return self.files[0] if len(self.files) == 1 else self.files[0].parent

    def shapes(self) -> Iterator[tuple[str, list[int]]]:
        """Yield (name in the checkpoint, shape), without reading values."""
        for path in self.files:
            if path.suffix == ".pth":
                yield from ((name, list(tensor.shape)) for name, tensor in _load_pickled(path).items())
            else:
                yield from read_shapes(path).items()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name in the checkpoint, tensor), file by file; values are read when they are used."""
        for path in self.files:
            if path.suffix == ".pth":
                yield from _load_pickled(path).items()
                continue
            with safe_open(str(path), framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    yield name, file.get_tensor(name)


def convert_wan(source: str | Path, output: str | Path, options: StartOptions | None = None) -> Conversion:
    """Write a model folder to start training from; raise InputError where something does not fit.

    `output` must not exist, or be an empty folder; nothing is left there after an error.
    """
    options = options or StartOptions()
    source, output = Path(source), Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output} exists already and is not an empty folder: choose another name")
    layout, transformer, vae = _find(source)
    generator_config, vae_config = _read_configs(layout, source, options)
    with torch.device("meta"):
        generator, autoencoder = Generator(generator_config), WanVAE(vae_config).model
    shapes = {released_generator_name(n): list(t.shape) for n, t in generator.state_dict().items()}
    fresh = tuple(released_generator_name(n) for n in generator.state_dict() if n.startswith(_FRESH))
    vae_shapes = {n: list(t.shape) for n, t in autoencoder.state_dict().items()}
    used = {
        "transformer.safetensors": _account(transformer, shapes, frozenset(fresh)),
        "vae.safetensors": _account(vae, vae_shapes, frozenset()),
    }
    pending = PendingFiles(output, create=not output.exists())
    pending.path.mkdir()
    try:
        with TensorWriter(pending.path / "transformer.safetensors", shapes, options.dtype) as writer:
            _copy(transformer, writer)
            rng = torch.Generator().manual_seed(options.seed)
            for name in fresh:
                writer.write(name, _fresh_tensor(name, shapes[name], rng))
        with TensorWriter(pending.path / "vae.safetensors", vae_shapes, torch.float32) as writer:
            _copy(vae, writer)
        _write_rest(pending.path, generator_config, vae_config, options)
        ModelFolder.open(pending.path).check()
    except BaseException:
        pending.discard()
        raise
    pending.commit()
    read = {path.relative_to(source).parts[0] for path in (*transformer.files, *vae.files)}
    read |= {"config.json", f"{_SAFETENSORS}.index.json"}
    unused = tuple(sorted(path.name for path in source.iterdir() if path.name not in read))
    return Conversion(layout, used, fresh, unused)


def _find(source: Path) -> tuple[str, _Part, _Part]:
    """Return the layout of a checkpoint folder and its two networks."""
    if not source.is_dir():
        raise InputError(f"{source} is not a folder: give the folder of a Wan2.2-TI2V-5B checkpoint")
    if (source / "transformer").is_dir() and (source / "vae").is_dir():
        return "diffusers", _sharded(source / "transformer"), _sharded(source / "vae")
    if (source / _VAE_FILE).is_file():
        transformer = replace(_sharded(source), rename=released_from_official)
        return "official", transformer, _Part((source / _VAE_FILE,), frozenset(), vae_from_official)
    raise InputError(
        f"{source} is no Wan2.2-TI2V-5B checkpoint: it should hold the folders transformer and vae "
        f"(diffusers), or {_SAFETENSORS}, whole or in shards, and {_VAE_FILE} (official)"
    )


def _sharded(folder: Path) -> _Part:
    """Return the safetensors files of a folder: one, or the shards of its index."""
    index, whole = folder / f"{_SAFETENSORS}.index.json", folder / _SAFETENSORS
    if not index.is_file():
        if not whole.is_file():
            raise InputError(f"{folder} holds neither {whole.name} nor {index.name}")
        return _Part((whole,), frozenset())
    places = _read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise InputError(f"{index} holds no weight_map of tensor names to files")
    files = tuple(folder / Path(name).name for name in sorted(set(places.values())))
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise InputError(f"{folder} lacks {', '.join(missing)}, which {index.name} lists")
    return _Part(files, frozenset(places))


def _load_pickled(path: Path) -> dict[str, Tensor]:
    """Read tensors by name from PyTorch's zip format, or the one before it; nothing in the file is run."""
    if tarfile.is_tarfile(path):
        raise InputError(
            f"{path} is in PyTorch's first format (tar), which can not be read as weights alone; where you "
            "trust it, load it and save it again by torch.save"
        )
    try:
        # Only zip archives (PyTorch 1.6 and later) can be mapped instead of read.
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # where bytes are damaged, the unpickler fails in any way
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            raise InputError(
                f"{path} holds more than weights ({found[1]}) and is refused: to read that is to run code"
            ) from error
        raise InputError(f"{path} can not be read as a file of weights: is it complete?") from error
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise InputError(f"{path} must hold tensors by name and nothing else")
    return content


def _read_configs(layout: str, source: Path, options: StartOptions) -> tuple[GeneratorConfig, dict[str, Any]]:
    """Return the sizes of the generator and the fields of vae_config.json."""
    if layout == "diffusers":
        path = source / "transformer" / "config.json"
        fields = {k: v for k, v in _read_json(path).items() if not k.startswith("_")}
        # What only image-to-video checkpoints of Wan2.1 set.
        for name in ("image_dim", "added_kv_proj_dim", "pos_embed_seq_len"):
            if fields.pop(name, None) is not None:
                raise InputError(f"{path}: {name} is set; only text-to-video checkpoints can be a start")
        vae = {k: v for k, v in _read_json(source / "vae" / "config.json").items() if not k.startswith("_")}
    else:
        path = source / "config.json"
        fields = _from_official(path, _read_json(path))
        vae = dict(options.official_vae or WAN22_VAE)
    layers = fields.get("num_layers")
    schedule = options.schedule
    if schedule is None:
        paper = layers == len(PAPER_SCHEDULE.actions)
        schedule = PAPER_SCHEDULE if paper else Schedule.uniform(int(layers or 0), NO_HISTORY)
    fields |= {
        "lq_proj_hidden_dim1": options.lr_hidden[0],
        "lq_proj_hidden_dim2": options.lr_hidden[1],
        "static_kv_router": schedule.to_config(),
    }
    try:
        config = GeneratorConfig.from_released(fields)
    except InputError as error:
        raise InputError(str(error).replace("model_config.json", str(path))) from error
    if vae.get("z_dim") != config.latent_channels:
        raise InputError(
            f"{path}: {config.latent_channels} latent channels, the autoencoder has {vae.get('z_dim')}: "
            "is this Wan2.2-TI2V-5B? Other Wan models use another autoencoder"
        )
    return replace(config, latent_stride=vae.get("scale_factor_spatial", 16)), vae


def _from_official(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an official config.json under the released names."""
    known = {k: v for k, v in config.items() if not k.startswith("_")}
    known.pop("text_len", None)  # the prompt's length is no property of the weights
    try:
        kind, width, heads = known.pop("model_type"), known.pop("dim"), known.pop("num_heads")
        if kind not in ("ti2v", "t2v"):
            raise InputError(f"{path}: a {kind} model; only text-to-video checkpoints can be a start")
        fields = {
            "num_attention_heads": heads,
            "attention_head_dim": width // heads,
            "in_channels": known.pop("in_dim"),
            "out_channels": known.pop("out_dim"),
            "ffn_dim": known.pop("ffn_dim"),
            "freq_dim": known.pop("freq_dim"),
            "num_layers": known.pop("num_layers"),
            "eps": known.pop("eps"),
            # Left out of published configs: properties of the class.
            "text_dim": known.pop("text_dim", 4096),
            "patch_size": known.pop("patch_size", [1, 2, 2]),
        }
    except KeyError as error:
        raise InputError(f"{path}: missing field {error}") from error
    if known:
        raise InputError(f"{path}: unknown fields {sorted(known)}")
    return fields


def _account(part: _Part, shapes: dict[str, list[int]], fresh: frozenset[str]) -> int:
    """Return how many tensors a network has; raise InputError unless each has its place and none lacks."""
    origin: dict[str, str] = {}
    problems = []
    for name, shape in part.shapes():
        target = part.rename(name)
        if target not in shapes or target in fresh:
            problems.append(f"unexpected {name}")
        elif target in origin:
            problems.append(f"{name} twice")
        elif shape != shapes[target]:
            problems.append(f"{name} is {shape}, the config wants {shapes[target]}")
        origin[target] = name
    problems += [f"missing {name}" for name in shapes if name not in origin and name not in fresh]
    problems += [f"{name} is in the index but in no file" for name in part.promised - set(origin.values())]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise InputError(f"{part.place} does not fit its config: {'; '.join(problems[:5])}{more}")
    return len(origin)


def _copy(part: _Part, writer: TensorWriter) -> None:
    """Write every tensor of a network under its released name."""
    for name, tensor in part.tensors():
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise InputError(
                f"{part.place}: {name} is {tensor.dtype}: quantised checkpoints can not be a start"
            )
        writer.write(part.rename(name), tensor)


def _fresh_tensor(name: str, shape: list[int], rng: torch.Generator) -> Tensor:
    """Return the start of a tensor that Wan does not have (see the top of this file)."""
    if ".norm" in name:
        return torch.ones(shape)
    if ".conv" in name and name.endswith("weight"):
        bound = math.prod(shape[1:]) ** -0.5
        return torch.empty(shape).uniform_(-bound, bound, generator=rng)
    return torch.zeros(shape)


def _write_rest(folder: Path, generator: GeneratorConfig, vae: dict[str, Any], options: StartOptions) -> None:
    """Write the configs, the untrained decoder and the prompt."""
    decoder_config = replace(
        options.decoder,
        latent_channels=generator.latent_channels,
        latent_stride=generator.latent_stride,
        latents_mean=tuple(vae["latents_mean"]),
        latents_std=tuple(vae["latents_std"]),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        decoder = FlashDecoder(decoder_config)
    _, to_released = decoder_names(decoder_config)
    tensors = {to_released(name): value.contiguous() for name, value in decoder.state_dict().items()}
    save_file(tensors, str(folder / "flashdecoder.safetensors"))
    if options.prompt is not None:
        shutil.copyfile(options.prompt, folder / "prompt.safetensors")
    else:
        save_file({"positive": torch.zeros(1, 1, generator.text_width)}, str(folder / "prompt.safetensors"))
    for file, config in (
        ("model_config.json", generator.to_released()),
        ("flashdecoder_config.json", decoder_config.to_released()),
        ("vae_config.json", vae),
    ):
        (folder / file).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} can not be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} must hold a JSON object")
    return content
