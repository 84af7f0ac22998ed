"""Model folders: written, read back, and refused with the name of what does not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from recavsr.errors import InputError
from recavsr.models.weights import FILES, ModelFolder, decoder_name, generator_name, save_model_folder
from tiny import CHANNELS, DECODER, STRIDE, tiny_decoder, tiny_generator, tiny_prompt

VAE = {
    "scale_factor_spatial": STRIDE,
    "scale_factor_temporal": 4,
    "z_dim": CHANNELS,
    "latents_mean": list(DECODER.latents_mean),
    "latents_std": list(DECODER.latents_std),
}


@pytest.fixture(params=["linear", "convolutional"])
def head(request: pytest.FixtureRequest) -> str:
    return request.param


def write(path: Path, head: str = "linear", dtype: torch.dtype = torch.float32) -> Path:
    save_model_folder(path, tiny_generator(), tiny_decoder(head=head), tiny_prompt(), VAE, dtype)
    return path


def edit_tensors(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(str(path))
    change(tensors)
    save_file(tensors, str(path))


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_round_trip(tmp_path: Path, head: str) -> None:
    folder = ModelFolder.open(write(tmp_path / "model", head))
    folder.check()
    assert folder.generator == tiny_generator().config
    assert sorted(p.name for p in folder.path.iterdir()) == sorted(FILES)
    generator = folder.load_generator()
    for (name, ours), (_, wanted) in zip(
        generator.state_dict().items(), tiny_generator().state_dict().items(), strict=True
    ):
        assert torch.equal(ours, wanted), name
    assert not any(p.requires_grad for p in generator.parameters())
    assert torch.equal(folder.load_prompt(), tiny_prompt())


def test_the_decoder_round_trip(tmp_path: Path, head: str) -> None:
    saved = tiny_decoder(head=head)
    folder = ModelFolder.open(write(tmp_path / "model", head))
    decoder = folder.load_decoder()
    assert decoder.config == saved.config
    for name, wanted in saved.state_dict().items():
        assert torch.equal(decoder.state_dict()[name], wanted), name
    assert torch.equal(decoder.latents_mean, saved.latents_mean)
    assert torch.equal(decoder.latents_std, saved.latents_std)
    latents, lr_frames = torch.randn(1, CHANNELS, 2, 3, 3), torch.rand(1, 3, 5, 3 * STRIDE, 3 * STRIDE)
    with torch.no_grad():
        ours = decoder.step(decoder.start(), latents, lr_frames)[1]
        wanted = saved.step(saved.start(), latents, lr_frames)[1]
    assert torch.equal(ours, wanted)


def test_files_have_the_released_names(tmp_path: Path) -> None:
    path = write(tmp_path / "model")
    names = set(load_file(str(path / "transformer.safetensors")))
    assert {
        "patch_embedding.weight",
        "condition_embedder.time_embedder.linear_1.weight",
        "blocks.0.attn1.to_out.0.bias",
        "blocks.3.ffn.net.0.proj.weight",
        "blocks.0.scale_shift_table",
        "scale_shift_table",
        "lq_proj.norm2.weight",
        "sr_proj.bias",
        "proj_out.weight",
    } <= names
    assert {generator_name(name) for name in names} == set(tiny_generator().state_dict())
    names = set(load_file(str(path / "flashdecoder.safetensors")))
    assert {"backbone.blocks.0.attention.query.weight", "spatial_projection.2.bias"} <= names
    assert {decoder_name(name) for name in names} == set(tiny_decoder().state_dict())


def test_half_files_load_in_any_precision(tmp_path: Path) -> None:
    folder = ModelFolder.open(write(tmp_path / "model", dtype=torch.float16))
    assert {p.dtype for p in folder.load_generator(dtype=torch.bfloat16).parameters()} == {torch.bfloat16}
    decoder = folder.load_decoder(dtype=torch.bfloat16)
    assert {p.dtype for p in decoder.parameters()} == {torch.bfloat16}
    assert decoder.latents_mean.dtype == torch.float32
    wanted = tiny_generator().head.weight.half().float()
    assert torch.equal(folder.load_generator().head.weight, wanted)


def remove(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def add(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: torch.ones(2)})


MISFITS = [
    ("transformer.safetensors", remove("sr_proj.weight"), "missing sr_proj.weight"),
    (
        "transformer.safetensors",
        remove("blocks.2.ffn.net.2.bias"),
        r"missing blocks\.2\.ffn\.net\.2\.bias",
    ),
    ("transformer.safetensors", add("blocks.0.extra"), "unexpected blocks.0.extra"),
    ("transformer.safetensors", add("proj_out.bias"), r"proj_out.bias is \[2\], the config wants \[6\]"),
    (
        "flashdecoder.safetensors",
        remove("spatial_projection.0.weight"),
        "missing spatial_projection.0",
    ),
    ("flashdecoder.safetensors", add("colour"), "unexpected colour"),
    ("flashdecoder.safetensors", add("lr_stem.bias"), r"lr_stem.bias is \[2\]"),
]


@pytest.mark.parametrize(("file", "change", "message"), MISFITS, ids=[m[2] for m in MISFITS])
def test_a_misfit_is_named(tmp_path: Path, file: str, change: Callable, message: str) -> None:
    folder = ModelFolder.open(write(tmp_path / "model"))
    edit_tensors(folder.path / file, change)
    load = folder.load_generator if file.startswith("transformer") else folder.load_decoder
    for act in (folder.check, load):
        with pytest.raises(InputError, match=message) as error:
            act()
        assert file in str(error.value)


def test_many_misfits_are_counted(tmp_path: Path) -> None:
    folder = ModelFolder.open(write(tmp_path / "model"))
    edit_tensors(folder.path / "transformer.safetensors", lambda t: [t.pop(name) for name in list(t)[:9]])
    with pytest.raises(InputError, match="and 4 more"):
        folder.check()


def test_unmerged_lora_weights_are_refused(tmp_path: Path) -> None:
    folder = ModelFolder.open(write(tmp_path / "model"))
    edit_tensors(folder.path / "transformer.safetensors", add("blocks.0.attn1.to_q.lora_A.weight"))
    with pytest.raises(InputError, match="LoRA"):
        folder.load_generator()
    with pytest.raises(InputError, match="lora_A"):
        folder.check()


def test_a_config_of_other_sizes_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "model")
    edit_json(path / "model_config.json", ffn_dim=40)
    with pytest.raises(InputError, match=r"proj\.weight is \[32, 24\], the config wants \[40, 24\]"):
        ModelFolder.open(path).check()


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("model_config.json", {"colour": 1}, "colour"),
        ("model_config.json", {"num_layers": 3}, "4 actions for 3 layers"),
        ("flashdecoder_config.json", {"colour": 1}, "colour"),
        ("vae_config.json", {"latents_mean": [0.0]}, "1 latent means"),
        ("vae_config.json", {"latents_std": [1.0] * 48}, "48 deviations"),
    ],
)
def test_a_wrong_config_is_refused(tmp_path: Path, file: str, changes: dict, message: str) -> None:
    path = write(tmp_path / "model")
    edit_json(path / file, **changes)
    with pytest.raises(InputError, match=message):
        ModelFolder.open(path)


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_named(tmp_path: Path, file: str) -> None:
    path = write(tmp_path / "model")
    (path / file).unlink()
    with pytest.raises(InputError, match=f"lacks {file}"):
        ModelFolder.open(path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere is not a model folder"):
        ModelFolder.open(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_broken_json_is_named(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "model")
    (path / "vae_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=r"vae_config\.json"):
        ModelFolder.open(path)


@pytest.mark.parametrize("file", [name for name in FILES if name.endswith(".safetensors")])
def test_a_cut_weight_file_is_named(tmp_path: Path, file: str) -> None:
    folder = ModelFolder.open(write(tmp_path / "model"))
    (path := folder.path / file).write_bytes(path.read_bytes()[:100])
    with pytest.raises(InputError, match=f"{file} can not be read"):
        folder.check()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"negative": torch.ones(1, 3, 10)}, "one tensor 'positive'"),
        ({"positive": torch.ones(3, 10)}, r"\[3, 10\], expected \[1, L, 10\]"),
        ({"positive": torch.ones(1, 3, 11)}, r"\[1, 3, 11\], expected \[1, L, 10\]"),
    ],
)
def test_a_wrong_prompt_is_refused(tmp_path: Path, tensors: dict[str, Tensor], message: str) -> None:
    folder = ModelFolder.open(write(tmp_path / "model"))
    save_file(tensors, str(folder.path / "prompt.safetensors"))
    with pytest.raises(InputError, match=message):
        folder.check()


def test_latent_channels_come_from_the_generator(tmp_path: Path) -> None:
    folder = ModelFolder.open(write(tmp_path / "model"))
    assert (folder.decoder.latent_channels, folder.decoder.latent_stride) == (CHANNELS, STRIDE)
    assert folder.decoder == DECODER
