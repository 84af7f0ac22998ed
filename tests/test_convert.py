"""Wan2.2 checkpoints as starting points: names, numbers against diffusers, and strict accounting."""

from __future__ import annotations

import json
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from recavsr.cache_policy import PAPER_SCHEDULE, Schedule
from recavsr.cli import convert as command
from recavsr.cli.main import run
from recavsr.errors import InputError
from recavsr.geometry import BlockPlan
from recavsr.models import convert
from recavsr.models.convert import StartOptions, convert_wan, released_from_official, vae_from_official
from recavsr.models.presets import recavsr_5b
from recavsr.models.tensor_file import TensorWriter
from recavsr.models.wan_vae import WAN22_VAE, WanVAE
from recavsr.models.weights import ModelFolder
from test_wan_vae import TINY as TINY_VAE
from tiny import DECODER, lively, one_thread

pytest.importorskip("diffusers", reason="needs the extra wan")

LAYERS, HEADS, HEAD_WIDTH, FFN, TEXT = 2, 2, 12, 40, 10
OPTIONS = StartOptions(
    dtype=torch.float32, lr_hidden=(6, 8), decoder=replace(DECODER, head="linear"), official_vae=TINY_VAE
)


@pytest.fixture(scope="module")
def transformer():
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_WIDTH,
        in_channels=48,
        out_channels=48,
        text_dim=TEXT,
        freq_dim=16,
        ffn_dim=FFN,
        num_layers=LAYERS,
    )
    lively(model)
    return model.eval()


@pytest.fixture(scope="module")
def vae():
    from diffusers import AutoencoderKLWan

    torch.manual_seed(1)
    return AutoencoderKLWan(**{k: v for k, v in TINY_VAE.items() if k != "clip_output"}).eval()


@pytest.fixture
def diffusers_folder(tmp_path: Path, transformer, vae) -> Path:
    folder = tmp_path / "diffusers"
    transformer.save_pretrained(folder / "transformer", max_shard_size="20KB")
    vae.save_pretrained(folder / "vae")
    (folder / "text_encoder").mkdir()
    (folder / "model_index.json").write_text("{}")
    assert len(list((folder / "transformer").glob("*.safetensors"))) > 2
    return folder


def official_transformer_names(layers: int) -> dict[str, str]:
    """Return released name -> official name, written out from the official class's definition."""
    names = {"scale_shift_table": "head.modulation"}
    pairs = {
        "patch_embedding": "patch_embedding",
        "condition_embedder.time_embedder.linear_1": "time_embedding.0",
        "condition_embedder.time_embedder.linear_2": "time_embedding.2",
        "condition_embedder.time_proj": "time_projection.1",
        "condition_embedder.text_embedder.linear_1": "text_embedding.0",
        "condition_embedder.text_embedder.linear_2": "text_embedding.2",
        "proj_out": "head.head",
    }
    for layer in range(layers):
        ours, theirs = f"blocks.{layer}", f"blocks.{layer}"
        names[f"{ours}.scale_shift_table"] = f"{theirs}.modulation"
        pairs[f"{ours}.norm2"] = f"{theirs}.norm3"
        pairs[f"{ours}.ffn.net.0.proj"] = f"{theirs}.ffn.0"
        pairs[f"{ours}.ffn.net.2"] = f"{theirs}.ffn.2"
        for attention, official in (("attn1", "self_attn"), ("attn2", "cross_attn")):
            for projection, letter in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o")):
                pairs[f"{ours}.{attention}.{projection}"] = f"{theirs}.{official}.{letter}"
            for norm in ("norm_q", "norm_k"):
                names[f"{ours}.{attention}.{norm}.weight"] = f"{theirs}.{official}.{norm}.weight"
    for ours, theirs in pairs.items():
        names |= {f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")}
    return names


def official_vae_names(config: dict) -> dict[str, str]:
    """Return diffusers' name -> official name, written out from the official class's definition."""
    names: dict[str, str] = {}

    def layer(ours: str, theirs: str) -> None:
        names.update({f"{ours}.{kind}": f"{theirs}.{kind}" for kind in ("weight", "bias")})

    def residual(ours: str, theirs: str) -> None:
        names[f"{ours}.norm1.gamma"] = f"{theirs}.residual.0.gamma"
        names[f"{ours}.norm2.gamma"] = f"{theirs}.residual.3.gamma"
        layer(f"{ours}.conv1", f"{theirs}.residual.2")
        layer(f"{ours}.conv2", f"{theirs}.residual.6")
        layer(f"{ours}.conv_shortcut", f"{theirs}.shortcut")  # only where the widths differ

    layer("quant_conv", "conv1")
    layer("post_quant_conv", "conv2")
    blocks = config["num_res_blocks"]
    for side, way, count in (("encoder", "down", blocks), ("decoder", "up", blocks + 1)):
        layer(f"{side}.conv_in", f"{side}.conv1")
        names[f"{side}.norm_out.gamma"] = f"{side}.head.0.gamma"
        layer(f"{side}.conv_out", f"{side}.head.2")
        residual(f"{side}.mid_block.resnets.0", f"{side}.middle.0")
        residual(f"{side}.mid_block.resnets.1", f"{side}.middle.2")
        names[f"{side}.mid_block.attentions.0.norm.gamma"] = f"{side}.middle.1.norm.gamma"
        for part in ("to_qkv", "proj"):
            layer(f"{side}.mid_block.attentions.0.{part}", f"{side}.middle.1.{part}")
        for stage in range(len(config["dim_mult"])):
            ours, theirs = f"{side}.{way}_blocks.{stage}", f"{side}.{way}samples.{stage}.{way}samples"
            for block in range(count):
                residual(f"{ours}.resnets.{block}", f"{theirs}.{block}")
            layer(f"{ours}.{way}sampler.resample.1", f"{theirs}.{count}.resample.1")
            layer(f"{ours}.{way}sampler.time_conv", f"{theirs}.{count}.time_conv")
    return names


def renamed(tensors: dict[str, Tensor], names: dict[str, str]) -> dict[str, Tensor]:
    return {names[name]: value.clone() for name, value in tensors.items()}


@pytest.fixture
def official_folder(tmp_path: Path, transformer, vae) -> Path:
    folder = tmp_path / "official"
    folder.mkdir()
    config = {
        "_class_name": "WanModel",
        "model_type": "ti2v",
        "text_len": 512,
        "dim": HEADS * HEAD_WIDTH,
        "ffn_dim": FFN,
        "freq_dim": 16,
        "in_dim": 48,
        "out_dim": 48,
        "num_heads": HEADS,
        "num_layers": LAYERS,
        "eps": 1e-6,
        "text_dim": TEXT,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = renamed(transformer.state_dict(), official_transformer_names(LAYERS))
    places = {}
    for shard in range(2):
        file = f"diffusion_pytorch_model-0000{shard + 1}-of-00002.safetensors"
        part = {name: tensors[name] for name in list(tensors)[shard::2]}
        save_file(part, str(folder / file))
        places |= dict.fromkeys(part, file)
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    torch.save(renamed(vae.state_dict(), official_vae_names(TINY_VAE)), folder / "Wan2.2_VAE.pth")
    (folder / "models_t5_umt5-xxl-enc-bf16.pth").write_bytes(b"not read")
    return folder


@pytest.fixture(params=["diffusers", "official"])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(f"{request.param}_folder")


@torch.no_grad()
def test_the_start_equals_wan(checkpoint: Path, tmp_path: Path, transformer, vae) -> None:
    made = convert_wan(checkpoint, tmp_path / "start", OPTIONS)
    assert made.layout == checkpoint.name
    assert made.used == {
        "transformer.safetensors": len(transformer.state_dict()),
        "vae.safetensors": len(vae.state_dict()),
    }
    folder = ModelFolder.open(tmp_path / "start")
    generator = folder.load_generator()
    assert folder.generator.schedule == Schedule.uniform(LAYERS, convert.NO_HISTORY)

    torch.manual_seed(2)
    noisy, prompt = torch.randn(2, 48, 3, 4, 6), torch.randn(2, 7, TEXT)
    timestep = torch.tensor([731.0, 12.5])
    whole = BlockPlan(first=3)  # one block: every latent sees every other
    with one_thread():
        ours = generator(
            generator.condition(prompt, timestep),
            noisy,
            torch.rand(2, 3, 9, 64, 96) * 2 - 1,  # neither LR frames nor recycled latents matter yet
            torch.randn_like(noisy),
            whole,
        )
        theirs = transformer(noisy, timestep, prompt, return_dict=False)[0]
        assert theirs.std() > 0.1
        assert torch.allclose(ours, theirs, atol=2e-5)

        frames = torch.rand(1, 3, 5, 32, 32) * 2 - 1
        autoencoder = WanVAE.load(folder.path)
        latents = autoencoder.encode(frames)
        mean, deviation = (torch.tensor(TINY_VAE[f"latents_{k}"]).view(-1, 1, 1, 1) for k in ("mean", "std"))
        raw = vae.encode(frames).latent_dist.mode()
        assert torch.equal(latents, (raw - mean) / deviation)
        assert torch.allclose(autoencoder.decode(latents), vae.decode(raw).sample, atol=1e-5)


def test_a_prompt_of_padding_alone_is_one_zero_vector(
    diffusers_folder: Path, tmp_path: Path, transformer
) -> None:
    convert_wan(diffusers_folder, tmp_path / "start", OPTIONS)
    folder = ModelFolder.open(tmp_path / "start")
    generator, prompt = folder.load_generator(), folder.load_prompt()
    noisy = torch.randn(1, 48, 1, 4, 4)
    with torch.no_grad():
        theirs = transformer(noisy, torch.tensor([500.0]), torch.zeros(1, 512, TEXT), return_dict=False)[0]
        ours = generator(
            generator.condition(prompt, 500.0), noisy, torch.zeros(1, 3, 1, 64, 64), 0 * noisy, BlockPlan()
        )
    assert torch.allclose(ours, theirs, atol=1e-5)


def test_fresh_tensors(diffusers_folder: Path, tmp_path: Path) -> None:
    made = convert_wan(diffusers_folder, tmp_path / "start", OPTIONS)
    tensors = load_file(str(tmp_path / "start" / "transformer.safetensors"))
    assert {name for name in tensors if name.startswith(("lq_proj.", "sr_proj."))} == set(made.fresh)
    assert not any(tensors[name].any() for name in ("sr_proj.weight", "lq_proj.out_proj.weight"))
    weight = tensors["lq_proj.conv2.weight"]  # uniform: its deviation is bound / sqrt(3)
    bound = (6 * 4 * 3 * 3) ** -0.5
    assert weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
    assert made.unused == ("model_index.json", "text_encoder")
    # The projections learn from the first step on, although their result is still zero.
    generator = ModelFolder.open(tmp_path / "start").load_generator().requires_grad_(True)
    noisy = torch.randn(1, 48, 1, 4, 4)
    condition = generator.condition(torch.randn(1, 2, TEXT), 500.0)
    generator(condition, noisy, torch.rand(1, 3, 1, 64, 64), noisy, BlockPlan()).square().sum().backward()
    assert generator.lr_projector.out_proj.weight.grad.any()
    assert generator.recycle_projection.weight.grad.any()


def test_options(official_folder: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.safetensors"
    save_file({"positive": torch.ones(1, 3, TEXT)}, str(prompt))
    route = Schedule(PAPER_SCHEDULE.actions[:LAYERS])
    options = replace(OPTIONS, schedule=route, dtype=torch.bfloat16, prompt=prompt)
    convert_wan(official_folder, tmp_path / "start", options)
    folder = ModelFolder.open(tmp_path / "start")
    assert folder.generator.schedule == route
    assert torch.equal(folder.load_prompt(), torch.ones(1, 3, TEXT))
    tensors = load_file(str(folder.path / "transformer.safetensors"))
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    source = load_file(str(official_folder / "diffusion_pytorch_model-00001-of-00002.safetensors"))
    assert torch.equal(tensors["patch_embedding.bias"], source["patch_embedding.bias"].bfloat16())


def test_full_size_names(shared: Path) -> None:
    released = json.loads((shared / "parity" / "full_size_keys.json").read_text())
    fresh = ("lq_proj.", "sr_proj.")
    wan = {n for n in released["transformer.safetensors"]["tensors"] if not n.startswith(fresh)}
    official = official_transformer_names(30)
    assert set(official) == wan
    assert {released_from_official(name) for name in official.values()} == wan
    assert all(released_from_official(theirs) == ours for ours, theirs in official.items())

    vae = set(released["vae.safetensors"]["tensors"])
    names = {ours: theirs for ours, theirs in official_vae_names(WAN22_VAE).items() if ours in vae}
    assert set(names) == vae
    assert all(vae_from_official(theirs) == ours for ours, theirs in names.items())
    norm = json.loads((shared / "parity" / "latent_norm.json").read_text())
    assert {k: WAN22_VAE[k] for k in ("latents_mean", "latents_std")} == {
        k: norm[k] for k in ("latents_mean", "latents_std")
    }


def edit(path: Path, change: Callable[[dict], object]) -> None:
    if path.suffix == ".json":
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))
    elif path.suffix == ".pth":
        content = torch.load(path, weights_only=True)
        change(content)
        torch.save(content, path)
    else:
        content = load_file(str(path))
        change(content)
        save_file(content, str(path))


SHARD = "diffusion_pytorch_model-00002-of-00002.safetensors"
INDEX = "diffusion_pytorch_model.safetensors.index.json"
MISFITS = [
    (SHARD, lambda t: t.update({"blocks.0.cross_attn.k_img.weight": torch.ones(2)}), r"unexpected .*k_img"),
    (
        SHARD,
        lambda t: t.pop("patch_embedding.weight"),
        r"missing patch_embedding\.weight; patch_emb.* in no file",
    ),
    (SHARD, lambda t: t.update({"patch_embedding.bias": torch.ones(24)}), "patch_embedding.bias twice"),
    (SHARD, lambda t: t.update({"head.head.weight": torch.ones(2, 3)}), r"head.head.weight is \[2, 3\]"),
    (SHARD, lambda t: t.update({"sr_proj.weight": torch.ones(24, 24)}), r"unexpected sr_proj\.weight"),
    (SHARD, lambda t: t.update({n: v.to(torch.float8_e4m3fn) for n, v in t.items()}), "quantised"),
    (INDEX, lambda c: c["weight_map"].update({"x": "gone.safetensors"}), r"lacks gone\.safetensors"),
    (INDEX, lambda c: c.pop("weight_map"), "weight_map"),
    (
        "config.json",
        lambda c: c.update(ffn_dim=41),
        r"ffn\.0\.weight is \[40, 24\], the config wants \[41, 24\]",
    ),
    ("config.json", lambda c: c.update(model_type="i2v"), "i2v model"),
    ("config.json", lambda c: c.pop("num_heads"), "missing field 'num_heads'"),
    ("config.json", lambda c: c.update(colour=1), "colour"),
    ("config.json", lambda c: c.update(in_dim=16, out_dim=16), "16 latent channels"),
    ("Wan2.2_VAE.pth", lambda t: t.pop("conv1.bias"), r"Wan2.2_VAE.pth .* missing quant_conv.bias"),
    ("Wan2.2_VAE.pth", lambda t: t.update({"encoder.x": torch.ones(1)}), "unexpected encoder.x"),
    ("Wan2.2_VAE.pth", lambda t: t.update(epoch=3), "tensors by name"),
]


@pytest.mark.parametrize(("file", "change", "message"), MISFITS, ids=[m[2] for m in MISFITS])
def test_a_misfit_is_named(
    official_folder: Path, tmp_path: Path, file: str, change: Callable, message: str
) -> None:
    edit(official_folder / file, change)
    with pytest.raises(InputError, match=message) as error:
        convert_wan(official_folder, tmp_path / "start", OPTIONS)
    assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["official"]


@pytest.mark.parametrize("zipped", [True, False])
def test_both_pickle_formats_are_read(official_folder: Path, tmp_path: Path, vae, zipped: bool) -> None:
    path = official_folder / "Wan2.2_VAE.pth"
    tensors = renamed(vae.state_dict(), official_vae_names(TINY_VAE))
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    assert zipfile.is_zipfile(path) == zipped
    convert_wan(official_folder, tmp_path / "start", OPTIONS)
    read = load_file(tmp_path / "start" / "vae.safetensors")
    assert read.keys() == vae.state_dict().keys()
    assert all(torch.equal(value, read[name]) for name, value in vae.state_dict().items())


def tar_of_old(path: Path) -> None:
    with tarfile.open(path, "w") as file:
        for name in ("storages", "tensors", "pickle"):
            file.addfile(tarfile.TarInfo(name))


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def halve_old(path: Path) -> None:
    torch.save(torch.load(path), path, _use_new_zipfile_serialization=False)
    halve(path)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda path: torch.save({"conv1.bias": BlockPlan()}, path),
            r"weights \(recavsr.geometry.BlockPlan\)",
        ),
        (lambda path: torch.save(torch.nn.Linear(2, 2), path), r"\(torch.nn.modules.linear.Linear\)"),
        (tar_of_old, "PyTorch's first format"),
        (halve, "is it complete"),
        (halve_old, "is it complete"),
        (lambda path: path.write_bytes(b"abc"), "is it complete"),
        (lambda path: path.write_bytes(b""), "is it complete"),
    ],
)
def test_pickles_that_can_not_be_read_safely_are_refused(
    official_folder: Path, tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(official_folder / "Wan2.2_VAE.pth")
    with pytest.raises(InputError, match=message) as error:
        convert_wan(official_folder, tmp_path / "start", OPTIONS)
    assert "\n" not in str(error.value)


def test_image_to_video_transformers_are_refused(diffusers_folder: Path, tmp_path: Path) -> None:
    edit(diffusers_folder / "transformer" / "config.json", lambda c: c.update(image_dim=1280))
    with pytest.raises(InputError, match="image_dim"):
        convert_wan(diffusers_folder, tmp_path / "start", OPTIONS)


def test_other_folders_are_refused(diffusers_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a folder"):
        convert_wan(tmp_path / "nowhere", tmp_path / "start", OPTIONS)
    with pytest.raises(InputError, match=r"no Wan2\.2-TI2V-5B checkpoint"):
        convert_wan(tmp_path, tmp_path / "start", OPTIONS)
    with pytest.raises(InputError, match="not an empty folder"):
        convert_wan(diffusers_folder, diffusers_folder, OPTIONS)


def test_command(official_folder: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    asked = {}

    def tiny(source: Path, output: Path, options: StartOptions) -> convert.Conversion:
        asked["options"] = options
        return convert_wan(source, output, OPTIONS)

    monkeypatch.setattr(convert, "convert_wan", tiny)
    arguments = ["convert", "wan2.2", str(official_folder), "-o", str(tmp_path / "start")]
    assert run(arguments) == 0
    said = capsys.readouterr().err
    assert "official checkpoint" in said
    assert "models_t5_umt5-xxl-enc-bf16.pth" in said
    assert asked["options"] == StartOptions(PAPER_SCHEDULE)
    assert asked["options"].schedule == recavsr_5b().schedule
    assert run(arguments) == 2
    assert "not an empty folder" in capsys.readouterr().err
    assert run([*arguments, "--route", "nowhere.json"]) == 2
    assert run([*arguments, "--precision", "fp8"]) == 2
    assert command._schedule("none").slots == 0


def test_tensor_writer(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 5), "b": torch.randn(()), "c": torch.randn(0, 2), "d": torch.randn(7)}
    path = tmp_path / "x.safetensors"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with TensorWriter(path, {n: t.shape for n, t in tensors.items()}, dtype) as writer:
            for name in ("d", "b", "a", "c"):
                writer.write(name, tensors[name])
        read = load_file(str(path))
        assert {n: (t.dtype, t.shape) for n, t in read.items()} == {
            n: (dtype, t.shape) for n, t in tensors.items()
        }
        assert all(torch.equal(read[name], value.to(dtype)) for name, value in tensors.items())
    with (
        pytest.raises(ValueError, match="1 tensors were never written"),
        TensorWriter(path, {"a": [2]}, dtype),
    ):
        pass
    with TensorWriter(path, {"a": [2]}, dtype) as writer:
        with pytest.raises(ValueError, match="announced"):
            writer.write("a", torch.ones(3))
        writer.write("a", torch.ones(2))
        with pytest.raises(ValueError, match="before"):
            writer.write("a", torch.ones(2))
