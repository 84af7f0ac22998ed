"""The benchmark measures what it says, and its counts agree with counts made another way."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from recavsr.attention import SpatialWindow
from recavsr.errors import InputError
from recavsr.evaluation import speed
from recavsr.evaluation.floor import Work, attention_work, decoder_work, generator_work
from recavsr.geometry import BlockPlan, Grid
from recavsr.models.presets import recavsr_5b, recavsr_5b_decoder
from recavsr.stream.load import random_model
from recavsr.stream.memory import plan_memory
from tiny import DECODER, GENERATOR, STRIDE, one_thread, tiny_model


@pytest.fixture(scope="module", autouse=True)
def threads() -> Iterator[None]:
    with one_thread():
        yield


def operations(work: dict[str, Work]) -> float:
    return sum(part.operations for part in work.values())


def test_counts_are_those_that_torch_counts() -> None:
    """Where the window covers the grid nothing is masked, so torch's counter sees the counted products."""
    config = replace(GENERATOR, window=SpatialWindow(8, 8))
    decoder = replace(DECODER, window=SpatialWindow(16, 16, border="cut"), head="linear")
    model = random_model("tiny", config, decoder, 3, device="cpu", precision="fp32")
    height, width = 4 * STRIDE, 6 * STRIDE
    state = model.start(height, width)
    for index in range(4):
        lr_frames = torch.rand(1, 3, model.blocks.frames(index), height, width)
        seen = speed.visible_latents(state, model.blocks.latents(index))
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            state, _ = model.step(state, lr_frames)
    grid = Grid(4, 6)
    counted = operations(generator_work(config, grid, 2, seen, 3)) + operations(
        decoder_work(decoder, grid, 2)
    )
    # The plain form applies P twice and S; the folded one, which is counted, one product for both.
    counted += 2 * (2 * grid.cells) * config.width**2
    assert math.isclose(counter.get_total_flops(), counted, rel_tol=1e-9)


def test_the_counts_of_the_5b_model_are_the_known_ones() -> None:
    config, grid = recavsr_5b(), Grid(34, 60)
    seen = [2 + action.capacity(config.schedule.anchor_rule) for action in config.schedule.actions]
    work = generator_work(config, grid, 2, seen, 512)
    assert work["products"].operations / 1e12 == pytest.approx(35.4, abs=0.05)
    assert work["lr_projector"].operations / 1e12 == pytest.approx(3.70 + 1.85 + 0.08, abs=0.01)
    assert work["attention"].operations / 600e12 == pytest.approx(9.3e-3, abs=0.05e-3)
    assert decoder_work(recavsr_5b_decoder(), Grid(68, 120), 2)["decoder_products"].operations > 1e12


def test_cut_windows_count_only_what_they_hold() -> None:
    work = attention_work(SpatialWindow(2, 4, border="cut"), Grid(2, 4), 1, 1, 1, 8, 8, 2)
    rows, columns = (1 + 2) / 2, (2 + 3 + 4 + 3) / 4  # [q - size / 2, q + size / 2) within the grid
    assert work.operations == 4 * 8 * rows * columns * 8


def test_a_part_takes_the_longer_of_its_two_times() -> None:
    assert Work(100, 1).seconds(10, 10) == 10
    assert Work(1, 100).seconds(10, 50) == 2


@pytest.mark.parametrize(
    ("text", "size"), [("1080p", (1920, 1080)), ("4K", (3840, 2160)), ("64x48", (64, 48))]
)
def test_sizes(text: str, size: tuple[int, int]) -> None:
    assert speed.parse_size(text) == size


@pytest.mark.parametrize("text", ["big", "64x", "0x48", "64x48x2"])
def test_an_unknown_size_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="WIDTHxHEIGHT"):
        speed.parse_size(text)


def test_times_are_of_the_named_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that each part moves on by a known time: blocks of 3 s, the first of 21 s."""
    now = [0.0]
    monkeypatch.setattr(speed.time, "perf_counter", lambda: now[0])
    model = tiny_model()

    def part(state: object, lr_frames: Tensor) -> object:
        now[0] += 21.0 if lr_frames.shape[2] == 21 else 3.0
        return state

    row, _ = speed.measure_stream(model, part, (32, 48), 201)  # type: ignore[arg-type]
    assert (row["first_output_s"], row["block_ms"]) == (21, 3000)
    assert row["steady_fps"] == pytest.approx(8 / 3, abs=0.01)
    assert row["fps"] == pytest.approx(201 / (21 + 23 * 3), abs=0.01)  # 21 + 23 x 8 >= 201


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp8"])
def test_a_whole_run(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "REPEATS", 1)
    monkeypatch.setattr(speed, "recavsr_5b", lambda: GENERATOR)
    monkeypatch.setattr(speed, "recavsr_5b_decoder", lambda: DECODER)
    memory = None
    if precision == "bf16":  # some of the layers travel
        plan = plan_memory(GENERATOR, DECODER, (32, 48), BlockPlan(), 10**11, speed.PROMPT_TOKENS, 2, 2)
        memory = f"{(plan.peak - plan.layer) / 1e6}MB"
    options = speed.Options(
        memory=memory,
        model=speed.RANDOM_5B,
        sizes=((48, 32),),
        precisions=(precision,),
        frames=30,
        device="cpu",
        ceiling_size=64,
    )
    lines: list[str] = []
    result = speed.run(options, lines.append)
    (row,) = result["rows"]
    assert json.loads(lines[-1]) == row
    assert json.loads(json.dumps(result)) == result
    assert {"torch", "numpy"} <= set(result["environment"]["versions"])
    assert f"{precision}_tflops" in result["ceilings"]
    assert (row["size"], row["precision"], row["peak_gb"]) == ("32x48", precision, None)
    times = [row["fps"], row["block_ms"], row["first_output_s"], row["generator"]["block_ms"]]
    assert all(time > 0 for time in times)
    assert set(row["parts_ms"]) >= {"lr_projector", "products", "attention", "decoder", "decoder_attention"}
    total = sum(value for name, value in row["floor_ms"].items() if name != "total")
    assert row["floor_ms"]["total"] == pytest.approx(total, abs=0.01)
    assert row["baseline"]["bicubic_frame_ms"] > 0
    assert row["file_to_file"]["fps"] > 0
    assert row.get("memory") == memory


def test_the_transformer_of_diffusers_runs_at_our_shapes() -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed (extra `wan`)")
    model = random_model("tiny", GENERATOR, DECODER, 3, device="cpu", precision="fp32")
    time_of_block = speed.diffusers_baseline(GENERATOR, (32, 48), model)
    assert time_of_block is not None
    assert time_of_block > 0
    assert torch.get_default_dtype() == torch.float32


def test_the_module_needs_no_command_line_and_no_pyav() -> None:
    code = "import sys, recavsr.evaluation.speed; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(done.stdout.split()) & {"typer", "pydantic", "av", "cv2", "scipy", "huggingface_hub"}


def test_nano_by_the_command(tmp_path: Path) -> None:
    from recavsr.cli.main import run

    output = tmp_path / "speed.json"
    arguments = ["bench", "--size", "64x48", "--frames", "22", "--device", "cpu", "--precision", "fp32"]
    assert run([*arguments, "--no-baseline", "--no-files", "-o", str(output)]) == 0
    (row,) = json.loads(output.read_text())["rows"]
    assert (row["model"], row["size"]) == ("nano", "64x64")
    assert "baseline" not in row
