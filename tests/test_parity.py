"""Parity with the released runtime, at the tolerances that its fixtures are given with.

`tests/parity/run_parity.py` computes all errors once, in a process of its own (it says why).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "parity" / "run_parity.py"

# For float32 on a CPU. Looser bounds would hide real mistakes: a missing eps costs 1e-5.
CONDITIONING = ADAIN = 2e-6
# AVX-512 kernels, as the fixtures' maker had, give the same bits; AVX2 kernels round up to 1.5e-5 otherwise.
# In float64 the fixtures' own rounding is left: 2.8e-6 on any processor.
PROJECTOR = 2e-6 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 2e-5
PROJECTOR_EXACT = 4e-6
TAPS = 5e-5
LATENTS = 3e-5
RGB = 3e-6


@pytest.fixture(scope="module")
def errors(shared: Path) -> dict[str, float]:
    folder = shared / "parity"
    if not folder.is_dir():
        pytest.skip(f"no parity fixtures in {shared}")
    run = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)],
        # One thread: threads that wait for each other are slow on a busy machine.
        env={**os.environ, "MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def group(errors: dict[str, float], prefix: str, count: int) -> dict[str, float]:
    """Return the errors of one group, which must be complete."""
    found = {name: value for name, value in errors.items() if name.startswith(prefix)}
    assert len(found) == count, sorted(found)
    return found


@pytest.mark.parametrize(
    ("prefix", "count", "bound"),
    [
        ("conditioning.", 6, CONDITIONING),
        ("lr_projector.", 3, PROJECTOR),
        ("lr_projector_in_float64.", 3, PROJECTOR_EXACT),
        ("taps.block", 5 * 8 + 2 * 2 * 7, TAPS),
        ("rollout.block", 13, LATENTS),
        ("rollout.forward_against_steps", 1, LATENTS),
        ("small_grid.", 9, LATENTS),
        ("decoder.", 7, RGB),
        ("color_fix.adain", 1, ADAIN),
        ("bfloat16.latents_rms", 1, 0.035),
        ("bfloat16.rgb_rms", 1, 0.005),
    ],
)
def test_within_tolerance(errors: dict[str, float], prefix: str, count: int, bound: float) -> None:
    over = {name: value for name, value in group(errors, prefix, count).items() if not value <= bound}
    assert not over


@pytest.mark.parametrize(
    "name",
    [
        "history.positions_wrong",
        "taps.query_positions_wrong",
        "preparation.block0_wrong",
        "preparation.block1_wrong",
        "preparation.small_wrong",
        "preparation.picture",
        "color_fix.wavelet",
        "sizes_wrong",
        "full_size.generator_keys_wrong",
        "full_size.generator_parameters_wrong",
        "full_size.decoder_keys_wrong",
        "full_size.decoder_parameters_wrong",
    ],
)
def test_exact(errors: dict[str, float], name: str) -> None:
    assert errors[name] == 0


def test_parameter_counts(errors: dict[str, float]) -> None:
    assert errors["full_size.generator_parameters"] == 5_301_793_984
    assert errors["full_size.decoder_parameters"] == 57_173_552
    # Wan2.2-TI2V-5B itself: without the LR projector and the recycle projection.
    assert errors["full_size.backbone_parameters"] == 4_999_787_712


def test_vae_keys_are_diffusers(shared: Path) -> None:
    """The VAE file of a model folder has the names and shapes of diffusers' Wan2.2 VAE."""
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed (extra `wan`)")
    import torch

    wanted = json.loads((shared / "parity" / "full_size_keys.json").read_text())["vae.safetensors"]
    with torch.device("meta"):
        vae = diffusers.AutoencoderKLWan(
            base_dim=160,
            decoder_base_dim=256,
            z_dim=48,
            dim_mult=[1, 2, 4, 4],
            num_res_blocks=2,
            attn_scales=[],
            temperal_downsample=[False, True, True],
            in_channels=12,
            out_channels=12,
            is_residual=True,
            patch_size=2,
            scale_factor_spatial=16,
            scale_factor_temporal=4,
        )
    assert {name: list(x.shape) for name, x in vae.state_dict().items()} == wanted["tensors"]
