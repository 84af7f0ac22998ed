"""Low-rank adapters of linear layers (LoRA): attach, train, merge, save (paper, Appendix C.1, C.2).

    W x + b  becomes  W x + b + (alpha / rank) B (A x),   A [rank, in], B [out, rank]

Precision: the base may be bfloat16 and is frozen. Adapters, and the projections that are trained in
full, are float32 masters: at a learning rate of 2e-5 a bfloat16 weight would swallow most updates. They
are cast to the dtype of the activations where they are used (adapters by `LoRALinear`, the projections
by autocast, everything by FSDP2's `param_dtype`); gradients and optimiser states stay float32. Merging
computes in float32 and rounds once, to the dtype of the base.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from recavsr.cache_policy import Schedule
from recavsr.errors import InputError
from recavsr.models.tensor_file import TensorWriter
from recavsr.models.weights import ModelFolder, generator_name, released_generator_name
from recavsr.video.output import PendingFiles

RANK = 512
ALPHA = 512.0
TARGETS = (
    "self_attention.to_q",
    "self_attention.to_k",
    "self_attention.to_v",
    "self_attention.to_out",
    "cross_attention.to_q",
    "cross_attention.to_k",
    "cross_attention.to_v",
    "cross_attention.to_out",
    "ffn.up",
    "ffn.down",
)
"""The attention projections, cross-attention's included, and the feed-forward layers of every block."""

TRAINED_IN_FULL = ("lr_projector", "recycle_projection")
"""Parts of the generator that Wan does not have: no adapters, all their weights are trained."""


class LoRALinear(nn.Linear):
    """A frozen linear layer with a trained low-rank term; its own tensors keep their names."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        """Take over the tensors of `base`; B starts at zero, so the layer starts equal to it."""
        super().__init__(base.in_features, base.out_features, base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        place = base.weight.device
        self.lora_A = nn.Linear(self.in_features, rank, bias=False, device=place, dtype=torch.float32)
        self.lora_B = nn.Linear(rank, self.out_features, bias=False, device=place, dtype=torch.float32)
        self.scale = alpha / rank
        nn.init.kaiming_uniform_(self.lora_A.weight, a=5**0.5)
        nn.init.zeros_(self.lora_B.weight)
        self.weight.requires_grad_(False)
        if self.bias is not None:
            self.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to [..., in]."""
        low = F.linear(x, self.lora_A.weight.to(x.dtype))
        return super().forward(x) + self.scale * F.linear(low, self.lora_B.weight.to(x.dtype))

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Return a plain layer with the low-rank term added to its weight, in the weight's dtype."""
        plain = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        update = self.scale * (self.lora_B.weight.float() @ self.lora_A.weight.float())
        plain.weight = nn.Parameter((self.weight.float() + update).to(self.weight.dtype), requires_grad=False)
        plain.bias = self.bias
        return plain


def attach(
    model: nn.Module,
    rank: int = RANK,
    alpha: float = ALPHA,
    targets: Sequence[str] = TARGETS,
    trained_in_full: Sequence[str] = TRAINED_IN_FULL,
) -> list[str]:
    """Give every linear layer whose name ends with a target an adapter; freeze the rest of the model.

    The parts named in `trained_in_full` are not frozen and become float32. Returns the names of the
    adapted layers. Raises ValueError where a target fits no linear layer, or an adapter is there already.
    """
    if any(True for _ in adapted(model)):
        raise ValueError("the model has adapters already")
    model.requires_grad_(False)
    for part in trained_in_full:
        model.get_submodule(part).float().requires_grad_(True)
    names = []
    for target in targets:
        found = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and f".{name}".endswith(f".{target}")
        ]
        if not found:
            raise ValueError(f"no linear layer is called {target}")
        names += found
    for name in names:
        base = model.get_submodule(name)
        assert isinstance(base, nn.Linear)
        model.set_submodule(name, LoRALinear(base, rank, alpha))
    return names


def adapted(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """Yield (name, layer) of every layer with an adapter."""
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            yield name, module


def merge(model: nn.Module) -> nn.Module:
    """Replace every adapted layer by a plain one that computes the same; return the model."""
    for name, layer in list(adapted(model)):
        model.set_submodule(name, layer.merged())
    return model


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return what training changes, under released names: adapters and the parts trained in full."""
    return {released_generator_name(n): p for n, p in model.named_parameters() if p.requires_grad}


@dataclass(frozen=True)
class AdapterHeader:
    """What a file of adapters says of itself."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    schedule: Schedule | None = None  # the route that the adapters were trained under
    base: Path | None = None  # the model folder that they belong to


def save_adapters(
    model: nn.Module,
    path: str | Path,
    *,
    tensors: Mapping[str, Tensor] | None = None,
    schedule: Schedule | None = None,
    base: Path | None = None,
) -> None:
    """Write `trained_tensors` of a model with adapters, without its frozen base; float32.

    `tensors` (our names) replaces them where the model's own are sharded; `schedule` and `base` go into
    the file's header. Raises ValueError where no layer has an adapter.
    """
    layers = dict(adapted(model))
    if not layers:
        raise ValueError("the model has no adapters")
    first = next(iter(layers.values()))
    rank = first.lora_A.out_features
    settings = {
        "rank": rank,
        "alpha": first.scale * rank,
        "targets": sorted({re.sub(r"^blocks\.\d+\.", "", name) for name in layers}),
    }
    named = trained_tensors(model)
    if tensors is not None:
        named = {released_generator_name(name): value for name, value in tensors.items()}
    header = {"lora": json.dumps(settings)}
    if schedule is not None:
        header["schedule"] = json.dumps(schedule.to_config())
    if base is not None:
        header["base"] = str(base.resolve())
    written = {name: value.detach().float().cpu().contiguous() for name, value in named.items()}
    save_file(written, str(path), metadata=header)


def read_header(path: str | Path) -> AdapterHeader:
    """Read what a file of `save_adapters` says of itself; raise InputError where it is none."""
    try:
        with safe_open(str(path), framework="pt") as file:
            found = file.metadata() or {}
        settings = json.loads(found.get("lora", "null"))
        if not isinstance(settings, dict) or set(settings) != {"rank", "alpha", "targets"}:
            raise InputError(f"{path} holds no adapters: its header names no rank, alpha and targets")
        schedule = Schedule.from_config(json.loads(found["schedule"])) if "schedule" in found else None
        base = Path(found["base"]) if "base" in found else None
        return AdapterHeader(settings["rank"], settings["alpha"], tuple(settings["targets"]), schedule, base)
    except (OSError, SafetensorError, ValueError) as error:
        raise InputError(f"{path} can not be read as adapters: {error}") from error


def load_adapters(model: nn.Module, path: str | Path) -> None:
    """Attach the adapters of a file to a generator that has none, and load all that training changed.

    Raises InputError where the file is none of `save_adapters`, or does not fit the generator.
    """
    header = read_header(path)
    with safe_open(str(path), framework="pt") as file:
        tensors = {generator_name(name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    full = tuple(part for part in TRAINED_IN_FULL if any(name.startswith(f"{part}.") for name in tensors))
    try:
        attach(model, header.rank, header.alpha, header.targets, full)
    except (ValueError, TypeError) as error:
        raise InputError(f"{path} does not fit the model: {error}") from error
    wanted = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    problems = [f"missing {name}" for name in wanted if name not in tensors]
    problems += [f"unexpected {name}" for name in tensors if name not in wanted]
    problems += [
        f"{name} is {list(tensor.shape)}, the model wants {list(wanted[name].shape)}"
        for name, tensor in tensors.items()
        if name in wanted and tensor.shape != wanted[name].shape
    ]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise InputError(f"{path} does not fit the model: {'; '.join(problems[:5])}{more}")
    with torch.no_grad():
        for name, parameter in wanted.items():
            parameter.copy_(tensors[name])


def merge_into_folder(model: str | Path, adapters: str | Path, output: str | Path, dtype: torch.dtype) -> int:
    """Write a model folder whose generator has the adapters merged; return how many layers had one.

    Its schedule is that of the adapters, where they name one.
    The generator is held once, in `dtype`, with the adapters beside it. `output` must not exist, or be
    an empty folder; nothing is left there after an error. Raises InputError for what does not fit.
    """
    folder, output, schedule = ModelFolder.open(model), Path(output), read_header(adapters).schedule
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output} exists already and is not an empty folder: choose another name")
    generator = folder.load_generator(dtype=dtype)
    load_adapters(generator, adapters)
    layers = len(list(adapted(generator)))
    tensors = {released_generator_name(n): t for n, t in merge(generator).state_dict().items()}
    pending = PendingFiles(output, create=not output.exists())
    pending.path.mkdir(exist_ok=True)
    try:
        file = pending.path / "transformer.safetensors"
        with TensorWriter(file, {n: t.shape for n, t in tensors.items()}, dtype) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)
        for path in folder.path.iterdir():
            if path.is_file() and path.name != file.name:
                shutil.copyfile(path, pending.path / path.name)
        if schedule is not None:
            config = replace(folder.generator, schedule=schedule).to_released()
            text = json.dumps(config, indent=1) + "\n"
            (pending.path / "model_config.json").write_text(text, encoding="utf-8")
        ModelFolder.open(pending.path).check()
    except BaseException:
        pending.discard()
        raise
    pending.commit()
    return layers
