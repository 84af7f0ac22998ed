"""Seconds from the start of a process to its first frames: kernels not compiled yet, and from their cache.

    PYTHONPATH=src python benchmarks/start_up.py                    # 5B, random weights made on the card
    PYTHONPATH=src python benchmarks/start_up.py --folder /tmp/5b   # written there first, then loaded twice

Each run is a process of its own; the first has an empty kernel cache, the second that of the first. With a
folder the files lie in the system's page cache when they are read: a disk's time comes on top.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SIZE = (1080, 1920)


def child(model: str, precision: str, began: float) -> None:
    """Start, load, make two blocks of frames from pictures to pictures; print the times as JSON."""
    times = {"python": time.time() - began}

    def mark(name: str) -> None:
        times[name] = round(time.time() - began, 2)

    import numpy as np
    import torch

    from recavsr.evaluation.speed import RANDOM_5B, Options, open_model
    from recavsr.stream.load import load
    from recavsr.stream.session import Session

    mark("imported")
    torch.zeros(1, device="cuda")
    mark("card ready")

    def tell(line: str) -> None:
        print(f"  told at {time.time() - began:.1f} s: {line}", file=sys.stderr, flush=True)

    made: Any
    if model == RANDOM_5B:
        made = open_model(Options(model=model, sizes=((1920, 1080),)), torch.device("cuda"), precision)
    else:
        made = load(model, device="cuda", precision=precision, tell=tell)
    torch.cuda.synchronize()
    mark("model ready")
    session = Session(made, (SIZE[0] // 4, SIZE[1] // 4), SIZE)
    random = np.random.default_rng(0)

    def push(count: int) -> None:
        session.push(random.integers(0, 256, (count, SIZE[0] // 4, SIZE[1] // 4, 3), np.uint8))

    push(21)
    mark("first frames")
    push(8)
    mark("second block")
    push(8 * 14)
    mark("sixteenth block, with graphs")
    print(json.dumps(times))


def write_folder(path: Path) -> None:
    """Write random 5B weights in the released layout, 10.6 GB in bfloat16."""
    import torch

    from recavsr.models.decoder import FlashDecoder
    from recavsr.models.generator import Generator
    from recavsr.models.presets import recavsr_5b, recavsr_5b_decoder
    from recavsr.models.tensor_file import TensorWriter
    from recavsr.models.weights import ModelFolder, released_generator_name, save_model_folder

    path.mkdir(parents=True, exist_ok=True)
    config = recavsr_5b()
    with torch.device("meta"):
        shapes = {
            released_generator_name(name): tuple(tensor.shape)
            for name, tensor in Generator(config).state_dict().items()
        }
    pool = (torch.randn(2**24) / 55).bfloat16().repeat(14)
    prompt = torch.randn(1, 512, config.text_width)
    vae = {"latents_mean": [0.0] * 48, "latents_std": [1.0] * 48}
    beside = SimpleNamespace(config=config, state_dict=dict)  # the generator's file comes after
    save_model_folder(path, beside, FlashDecoder(recavsr_5b_decoder()), prompt, vae)  # type: ignore[arg-type]
    with TensorWriter(path / "transformer.safetensors", shapes, torch.bfloat16) as file:
        for name, shape in shapes.items():
            ones = "norm" in name and name.endswith("weight")
            file.write(name, torch.ones(shape) if ones else pool[: torch.Size(shape).numel()].view(shape))
    ModelFolder.open(path).check()


def run(model: str, precision: str, cache: str) -> dict[str, Any]:
    """Measure one process."""
    command = [sys.executable, __file__, "--child", model, "--precision", precision]
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    done = subprocess.run(
        [*command, "--began", str(time.time())],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    """Measure a cold and a warm start for each precision."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--precision", default="bf16", help="by commas")
    parser.add_argument("--folder", type=Path, help="load the weights from there")
    parser.add_argument("--seconds", type=float, default=150, help="begin no further process after so long")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child, given.precision, given.began)
        return 0
    began, results = time.time(), []
    model = "recavsr-5b"
    if given.folder:
        if not (given.folder / "vae_config.json").exists():
            write_folder(given.folder)
            print(f"wrote {given.folder} in {time.time() - began:.1f} s", flush=True)
        model = str(given.folder)
    for precision in given.precision.split(","):
        with tempfile.TemporaryDirectory() as cache:
            for kernels in ("cold", "warm"):
                if time.time() - began > given.seconds:
                    break
                try:
                    times = run(model, precision, cache)
                except (subprocess.CalledProcessError, ValueError, IndexError) as error:
                    print(f"{precision} {kernels}: {error}", flush=True)
                    continue
                results.append(
                    {"model": Path(model).name, "precision": precision, "kernels": kernels, **times}
                )
                print(json.dumps(results[-1]), flush=True)
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "start_up.json").write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
