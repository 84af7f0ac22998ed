"""What do candidate weights gain over bicubic, and what do their latents and memory give?

    python benchmarks/candidates.py CLIPS MODEL[=NAME][:PART] ... [--full] [-o FILE]

CLIPS is a folder with the held-out clips of the evaluation protocol, or a training pack, whose held-back
clips and photos are then measured, also under bursts of noise. PART is what the model does without:
`zero-latents`, `stateless` or `blocks-alone` (see `recavsr.evaluation.ablations`). Prints the table of
docs/training-log.md, mild, then heavy. A FILE that is there is added to, a model at a time: models that it
has by NAME (the folder's by default) are not measured again.

Models run in float32. PSNR and SSIM are differences to bicubic, LPIPS and flicker of static areas are shares
of its, all of plain means over clips; a line at borders is how much more still scenes change there than
beside them. (`report` weighs flicker by static pixels.)
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recavsr.data.clips import ClipSource
from recavsr.errors import InputError, run_module
from recavsr.evaluation.ablations import Ablated
from recavsr.evaluation.environment import environment
from recavsr.evaluation.lpips import LPIPS, weights_folder
from recavsr.evaluation.peers import Upscaler
from recavsr.evaluation.protocol import (
    FULL,
    QUICK,
    described,
    evaluate,
    held_out_clips,
    open_upscaler,
    result_file,
    session_upscaler,
)
from recavsr.evaluation.report import BASELINE, Row, load_rows, summarise
from recavsr.evaluation.validation import CONDITIONS, validate, validation_pairs
from recavsr.stream.load import load
from recavsr.stream.step import ReCaVSR

WITHOUT = {
    "zero-latents": "without latents",
    "stateless": "without any memory",
    "blocks-alone": "without the generator's history and recycled latents",
}
SAME_ROWS = ("versions", "processor", "threads")  # of an environment: what values depend on
PRECISION = "fp32"  # where a processor has bfloat16, `auto` would take that and flicker more
LINES = ("still_latent_line", "still_block_line")
COLUMNS = ("PSNR", "SSIM", "LPIPS", "flicker", "latent, block line")
HELD_BACK: dict[str, Any] = {"frames": 37, "size": 256, "photos": 6}
Measure = Callable[[Upscaler], list[Row]]
"""Gives the rows of one model."""


@dataclass(frozen=True)
class Candidate:
    """A model, what its rows are called, and what it does without."""

    model: str
    name: str
    part: str | None = None

    @classmethod
    def parse(cls, text: str) -> Candidate:
        """Read MODEL[=NAME][:PART]; in a NAME, a colon before a space is part of it."""
        found = re.fullmatch(r"([^=]+?)(?:=(.+?))?(?::([\w-]+))?", text)
        if found is None:
            raise InputError(f"{text!r} is not MODEL[=NAME][:PART]")
        model, name, part = found.groups()
        name = name or Path(model).absolute().name
        if part is None:
            return cls(model, name)
        if part not in WITHOUT:
            raise InputError(f"{text}: {part!r} is unknown; choose one of {', '.join(WITHOUT)}")
        return cls(model, f"{name} {WITHOUT[part]}", part)

    def open(self) -> Upscaler:
        """Load the model."""
        if self.part is None:
            return replace(open_upscaler(self.model, precision=PRECISION), name=self.name)
        model = load(self.model, device="cpu", precision=PRECISION)
        if not isinstance(model, ReCaVSR):
            raise InputError(f"{self.model} has no parts to switch off")
        return session_upscaler(Ablated(model, self.part), self.name)


def measuring(clips: Path, full: bool, lpips: LPIPS, cache: Path) -> tuple[dict[str, Any], Measure]:
    """Return the protocol for a folder of held-out clips or a pack, as facts and as a function."""
    if (clips / "index.json").is_file():
        source = ClipSource.open(clips, processes=2, split="validation")
        pairs = validation_pairs(source, **HELD_BACK)
        return HELD_BACK | {"conditions": list(CONDITIONS)}, lambda one: validate([one], pairs, lpips=lpips)
    files, protocol = held_out_clips(clips), FULL if full else replace(QUICK, still_side=256)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    return described(protocol, files), lambda one: evaluate(
        [one], files, protocol, lpips=lpips, cache=cache, progress=say
    )


def read_record(file: Path, fresh: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the file has. Raises InputError where its protocol is not that of the `fresh` record."""
    rows = load_rows([file])
    record = json.loads(file.read_text(encoding="utf-8"))
    if record["protocol"] != fresh["protocol"]:
        raise InputError(f"{file} was measured under another protocol; choose another name")
    if any(record["environment"].get(key) != fresh["environment"][key] for key in SAME_ROWS):
        print(f"note: {file} was begun in another environment, which it keeps", file=sys.stderr)
    return {"about": fresh["about"]} | record | {"rows": rows}


def store(record: Mapping[str, Any], file: Path | None) -> None:
    """Write the record, in whole or not at all."""
    if file is not None:
        with result_file(file) as path:
            path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def table(rows: Sequence[Row]) -> list[str]:
    """Return the Markdown table, a line a model."""
    means = {(mean["model"], mean["degradation"]): mean for mean in summarise(rows)}

    def flicker(model: str, degradation: str) -> float:
        case = [row for row in rows if (row["model"], row["degradation"]) == (model, degradation)]
        return sum(row["flicker"] for row in case) / len(case)

    def lines_of(mean: Row) -> str:
        values = [mean.get(key) for key in LINES]  # records from before v0.15 have none
        return ", ".join("-" if value is None else f"{100 * value:+.1f}" for value in values) + " %"

    degradations = list(dict.fromkeys(row["degradation"] for row in rows))
    headings = ["weights", *COLUMNS * len(degradations)]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for model in dict.fromkeys(row["model"] for row in rows if row["model"] != BASELINE):
        cells = [model]
        for degradation in degradations:
            mean = means[model, degradation]
            cells += [f"{mean['psnr_gain']:+.3f}", f"{mean['ssim_gain']:+.4f}", f"{mean['lpips_share']:.3f}"]
            cells.append(f"{flicker(model, degradation) / flicker(BASELINE, degradation):.3f}")
            cells.append(lines_of(mean))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Measure the models that the file lacks, write it after each of them, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clips", type=Path)
    parser.add_argument("models", nargs="+", metavar="MODEL[=NAME][:PART]")
    parser.add_argument("--full", action="store_true", help="the full protocol instead of the quick one")
    parser.add_argument("--about", help="what the names stand for, to be kept in FILE")
    parser.add_argument("--lpips", type=Path, help="folder of the LPIPS weights")
    parser.add_argument("--cache", type=Path, default=weights_folder() / "evaluation", help="for LR frames")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE")
    options = parser.parse_args()
    candidates = [Candidate(BASELINE, BASELINE), *map(Candidate.parse, options.models)]
    names = [candidate.name for candidate in candidates]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"two models are called {twice[0]}: give one of them another name")
    metric = LPIPS("alex", options.lpips)
    protocol, measure = measuring(options.clips, options.full, metric, options.cache)
    record: dict[str, Any] = {"about": "", "protocol": protocol, "environment": environment("cpu")}
    record["rows"] = []
    if options.output and options.output.exists():
        record = read_record(options.output, record)
    if options.about is not None:
        record["about"] = options.about
    known = {row["model"] for row in record["rows"]}
    upscalers = [candidate.open() for candidate in candidates if candidate.name not in known]
    store(record, options.output)  # where it can't be written, that is said before the measuring
    for upscaler in upscalers:
        record["rows"] += measure(upscaler)
        store(record, options.output)
    print("\n".join(table(record["rows"])))


if __name__ == "__main__":
    run_module(main)
