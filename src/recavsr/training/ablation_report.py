"""Tables of ablations: the paper's columns where they can be had, mean and spread over seeds, what came out.

A result is one line that `training.ablations` wrote: a variant under a seed, its cost, and a row of metrics
for every model (`whole`, or one that forgets), condition and clip.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Result = dict[str, Any]
TABLE_CONDITIONS = ("mild", "heavy")


def read_results(files: Iterable[Path]) -> list[Result]:
    """Read the lines of result files, those there are; of a variant and seed the last one counts."""
    found: dict[tuple[str, int], Result] = {}
    for file in files:
        for line in file.read_text().splitlines() if file.is_file() else ():
            result = json.loads(line)
            found[result["variant"], result["seed"]] = result
    return list(found.values())


def mean_of(
    result: Result, metric: str, model: str = "whole", conditions: Sequence[str] = TABLE_CONDITIONS
) -> float | None:
    """Return a metric's mean over clips and conditions; None where it was not measured."""
    values = [
        row[metric]
        for row in result["rows"]
        if row["model"] == model and row["degradation"] in conditions and row.get(metric) is not None
    ]
    return sum(values) / len(values) if values else None


@dataclass(frozen=True)
class Column:
    """A column: its heading, a value of each result, how it is written, and which way is better."""

    heading: str
    value: Callable[[Result], float | None]
    form: str
    better: int = 0  # 1: more is better; -1: less is; 0: not compared


def _metric(heading: str, metric: str, form: str, better: int, **where: Any) -> Column:
    return Column(heading, lambda result: mean_of(result, metric, **where), form, better)


def _cost(heading: str, key: str, form: str, scale: float = 1.0, better: int = 0) -> Column:
    def value(result: Result) -> float | None:
        return None if result.get(key) is None else result[key] / scale

    return Column(heading, value, form, better)


def worth(result: Result, metric: str, forgetful: str, conditions: Sequence[str]) -> float | None:
    """Return what memory is worth: PSNR gained over the forgetful model, or the share of flicker saved."""
    whole, without = (mean_of(result, metric, model, conditions) for model in ("whole", forgetful))
    if whole is None or not without:
        return None
    return whole - without if metric.endswith("psnr") else 1 - whole / without


def _worth(heading: str, metric: str, forgetful: str, *conditions: str) -> Column:
    form = "+.3f" if metric.endswith("psnr") else "+.1%"
    return Column(heading, lambda result: worth(result, metric, forgetful, conditions), form, 1)


_PSNR = _metric("PSNR", "psnr", ".2f", 1)
_SSIM = _metric("SSIM", "ssim", ".4f", 1)
_LPIPS = _metric("LPIPS", "lpips", ".4f", -1)
_TD = _metric("td", "td", ".3f", -1)
_FLICKER = _metric("flicker", "still_flicker", ".3f", -1)
_HELD_OUT = tuple(
    _metric(f"held-out {heading}", metric, form, better, conditions=("held-out mild", "held-out heavy"))
    for heading, metric, form, better in (("PSNR", "psnr", ".2f", 1), ("LPIPS", "lpips", ".4f", -1))
)
_STEPS = Column("steps", lambda result: sum(result["steps"].values()), ".0f")


@dataclass(frozen=True)
class Table:
    """One of the paper's tables: its columns, and which variants are set against which."""

    title: str
    note: str
    columns: tuple[Column, ...]
    comparisons: tuple[tuple[str, str], ...]


TABLES: dict[str, Table] = {
    "cache": Table(
        "Recycling and cache allocation",
        "The paper has DOVER and VBench's motion smoothness for quality; their networks can't be had here: "
        "PSNR, LPIPS, td and flicker stand in. KV: reserved at 1920 x 1088; attention: earlier latents that "
        "all layers together attend to in a block, to which its FLOPs are in proportion.",
        (
            _PSNR,
            _LPIPS,
            _TD,
            _FLICKER,
            _cost("slots", "slots", ".0f"),
            _cost("KV (MB)", "history_bytes", ".0f", 1e6),
            Column("attention", lambda result: result["history_latents"], ".1f"),
            *_HELD_OUT,
            _STEPS,
        ),
        (("routed", "no-recycling"), ("routed", "uniform-r"), ("routed", "uniform-3r")),
    ),
    "scopes": Table(
        "Query scopes",
        "Matched number of queries. The paper has NIQE, MUSIQ and DOVER. NIQE rewards grit: never alone.",
        (_metric("NIQE", "niqe", ".3f", -1), _LPIPS, _PSNR, _FLICKER, *_HELD_OUT, _STEPS),
        (
            ("scope-spatial", "scope-global"),
            ("scope-temporal", "scope-global"),
            ("scope-all", "scope-global"),
        ),
    ),
    "decoder": Table(
        "LR conditioning of the decoder",
        "Reconstruction of true latents; `whole`: behind the generator. FPS, memory: decoder, mid-stream.",
        (
            _metric("PSNR", "psnr", ".2f", 1, model="reconstruction"),
            _metric("SSIM", "ssim", ".4f", 1, model="reconstruction"),
            _metric("LPIPS", "lpips", ".4f", -1, model="reconstruction"),
            _metric("whole PSNR", "psnr", ".2f", 1),
            _cost("FPS", "decoder_fps", ".1f"),
            _cost("Mem. (GB)", "decoder_peak_bytes", ".2f", 1e9),
            *_HELD_OUT,
            _STEPS,
        ),
        (("decoder", "decoder-no-lr"),),
    ),
    "history": Table(
        "Ways of training that may give history a worth",
        "Worth, in the frames after the first block: against the same weights that forget at every block. "
        "`stateless` forgets everything, `alone` (blocks-alone) only recycled latents and the generator's "
        "K/V. In brackets the condition.",
        (
            _PSNR,
            _LPIPS,
            _FLICKER,
            _worth("alone, PSNR", "later_psnr", "blocks-alone", *TABLE_CONDITIONS),
            _worth("alone, flicker", "later_still_flicker", "blocks-alone", *TABLE_CONDITIONS),
            _worth("stateless, PSNR", "later_psnr", "stateless", *TABLE_CONDITIONS),
            _worth("stateless, flicker", "later_still_flicker", "stateless", *TABLE_CONDITIONS),
            _worth("alone, PSNR (bursts)", "later_psnr", "blocks-alone", "bursts"),
            _worth("alone, flicker (bursts)", "later_still_flicker", "blocks-alone", "bursts"),
            *_HELD_OUT,
            _STEPS,
        ),
        tuple((name, "as-nano") for name in ("short-first", "later-weight", "through", "bursts", "all-four")),
    ),
}


def render(results: Sequence[Result]) -> str:
    """Return Markdown: a table a group, and below it what came out, whichever way."""
    lines: list[str] = []
    for group, table in TABLES.items():
        by_variant: dict[str, list[Result]] = {}
        for result in results:
            if result["group"] == group:
                by_variant.setdefault(result["variant"], []).append(result)
        if by_variant:
            lines += [f"### {table.title}", "", *_table(table, by_variant), "", table.note, ""]
            lines += [*_outcomes(table, by_variant), *_targets(group, by_variant), ""]
    lines.append(
        "Held-back clips of the training pack, mild and heavy; mean over seeds, and half of their range "
        "where there are several. Flicker: of still scenes, in 1/255."
    )
    return "\n".join(lines)


def _table(table: Table, by_variant: dict[str, list[Result]]) -> list[str]:
    results = [result for group in by_variant.values() for result in group]
    columns = [c for c in table.columns if any(c.value(result) is not None for result in results)]
    headings = ["variant", *(column.heading for column in columns), "seeds"]
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    for name, group in by_variant.items():
        cells = [_cell([column.value(result) for result in group], column.form) for column in columns]
        seeds = ", ".join(str(result["seed"]) for result in group)
        lines.append("| " + " | ".join([name, *cells, seeds]) + " |")
    return lines


def _cell(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    cell = format(sum(known) / len(known), form)
    half = (max(known) - min(known)) / 2
    return f"{cell} ± {format(half, form.removeprefix('+'))}" if half else cell


def _outcomes(table: Table, by_variant: dict[str, list[Result]]) -> list[str]:
    lines = []
    for name, other in table.comparisons:
        said = []
        for column in table.columns:
            differences = _paired(column, by_variant.get(name, []), by_variant.get(other, []))
            if column.better and differences:
                said.append(_outcome(column, differences))
        if said:
            lines.append(f"- **{name} against {other}**: {'; '.join(said)}.")
    return lines


def _paired(column: Column, ours: Sequence[Result], theirs: Sequence[Result]) -> list[float]:
    """Differences of a column, seed by seed."""
    others = {result["seed"]: column.value(result) for result in theirs}
    pairs = [(column.value(result), others.get(result["seed"])) for result in ours]
    return [a - b for a, b in pairs if a is not None and b is not None]


def _outcome(column: Column, differences: Sequence[float]) -> str:
    form = f"+z{column.form.removeprefix('+')}"
    mean = sum(differences) / len(differences)
    wins = sum(column.better * difference > 0 for difference in differences)
    losses = sum(column.better * difference < 0 for difference in differences)
    if len(differences) == 1:
        verdict = "one seed"
    elif wins == len(differences):
        verdict = "better in every seed"
    elif losses == len(differences):
        verdict = "worse in every seed"
    else:
        verdict = "seeds disagree"
    return f"{column.heading} {format(mean, form)} ({verdict})"


def _targets(group: str, by_variant: dict[str, list[Result]]) -> list[str]:
    """Say for each way of training whether history is worth 0.2 dB or a tenth of the flicker."""
    lines = []
    for name, results in by_variant.items() if group == "history" else ():
        for forgetful in ("blocks-alone", "stateless"):
            whole, later = (_mean_worth(results, forgetful, prefix) for prefix in ("", "later_"))
            if whole is not None and later is not None:
                met = "met" if whole[0] >= 0.2 or whole[1] >= 0.1 else "missed"
                lines.append(
                    f"- {name}, against {forgetful}: {whole[0]:+.3f} dB, {whole[1]:+.1%} less flicker; after "
                    f"the first block {later[0]:+.3f} dB, {later[1]:+.1%}. Target {met}."
                )
    return lines


def _mean_worth(results: Sequence[Result], forgetful: str, prefix: str) -> tuple[float, float] | None:
    """Mean over seeds of the PSNR gained and of the share of flicker saved."""
    means = []
    for metric in ("psnr", "still_flicker"):
        found = [worth(result, prefix + metric, forgetful, TABLE_CONDITIONS) for result in results]
        known = [value for value in found if value is not None]
        if not known:
            return None
        means.append(sum(known) / len(known))
    return means[0], means[1]
