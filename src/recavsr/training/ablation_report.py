"""Tables of ablations: the paper's columns where they can be had, mean and spread over seeds, what came out.

A result is one line that `training.ablations` wrote: a variant under a seed, its cost, and a row of metrics
for every model (`whole`, or one that forgets), condition and clip. `render` makes Markdown of them, to be
pasted as it is: a table of values, one of differences seed by seed, and in words where all seeds agree.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recavsr.cache_policy import Schedule

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
    share_of: str | None = None
    """A variant: the column has shares of that one's mean."""

    @property
    def title(self) -> str:
        """Return the heading, with an arrow to what is better."""
        return self.heading + {1: " ↑", -1: " ↓", 0: ""}[self.better]


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
    """One of the paper's tables: its rows and columns, and which variants are set against which."""

    title: str
    note: str
    rows: dict[str, str]
    """Variants in the paper's order, and what the paper calls them."""
    columns: tuple[Column, ...]
    comparisons: tuple[tuple[str, str], ...]

    def label(self, variant: str) -> str:
        """Return how a row is called: the paper's name for it, and ours."""
        name = self.rows.get(variant)
        return f"{name} (`{variant}`)" if name else f"`{variant}`"


_WAYS = ("short-first", "later-weight", "through", "bursts", "all-four")

TABLES: dict[str, Table] = {
    "cache": Table(
        "Recycling and cache allocation",
        "The paper has DOVER and VBench's motion smoothness for quality; their networks can't be had here: "
        "PSNR, LPIPS, td and flicker stand in. Slots: latents that all layers together keep. KV: what is "
        "reserved for them at 1920 x 1088. FLOPs: of attention over history, in proportion to the latents "
        "that all layers together attend to in a block. The clock is the same for all, so steps differ.",
        {
            "uniform-3r": "Uniform (3R)",
            "uniform-r": "Uniform (R)",
            "no-recycling": "Ours without recycling",
            "routed": "Ours",
        },
        (
            _PSNR,
            _LPIPS,
            _TD,
            _FLICKER,
            _cost("slots", "slots", ".3g"),
            _cost("KV (MB)", "history_bytes", ".0f", 1e6),
            Column("FLOPs (x)", lambda result: result["history_latents"], ".2f", share_of="uniform-3r"),
            *_HELD_OUT,
            _STEPS,
        ),
        (("routed", "no-recycling"), ("routed", "uniform-r"), ("routed", "uniform-3r")),
    ),
    "scopes": Table(
        "Query scopes",
        "Matched number of queries. The paper has NIQE, MUSIQ and DOVER; the networks of the last two can't "
        "be had here. NIQE rewards grit: never alone.",
        {
            "scope-global": "Global only",
            "scope-spatial": "Global + Spatial",
            "scope-temporal": "Global + Temporal",
            "scope-all": "Ours",
        },
        (_metric("NIQE", "niqe", ".3f", -1), _LPIPS, _PSNR, _FLICKER, *_HELD_OUT, _STEPS),
        (
            ("scope-spatial", "scope-global"),
            ("scope-temporal", "scope-global"),
            ("scope-all", "scope-global"),
        ),
    ),
    "decoder": Table(
        "LR conditioning of the decoder",
        "Reconstruction of true latents; `whole`: behind the generator. FPS and memory: the decoder alone, "
        "in mid-stream at 1920 x 1088.",
        {"decoder-no-lr": "Ours without LR conditioning", "decoder": "Ours"},
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
    "generator": Table(
        "A stronger generator",
        "Not in the paper. A fresh generator with W2 in every layer: latents by their squared error, then "
        "frames through the decoder that nano's own generator was trained with, which rests.",
        {"generator": "As nano", "generator-wide": "Wider", "generator-deep": "Deeper"},
        (
            _PSNR,
            _SSIM,
            _LPIPS,
            _FLICKER,
            _cost("parameters (M)", "generator_parameters", ".1f", 1e6),
            *_HELD_OUT,
            _STEPS,
        ),
        (("generator-wide", "generator"), ("generator-deep", "generator")),
    ),
    "history": Table(
        "Ways of training that may give history a worth",
        "Worth, in the frames after the first block: against the same weights that forget at every block. "
        "`stateless` forgets everything, `alone` (blocks-alone) only recycled latents and the generator's "
        "K/V. In brackets the condition.",
        dict.fromkeys(("as-nano", *_WAYS), ""),
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
        tuple((name, "as-nano") for name in _WAYS),
    ),
}


def render(results: Sequence[Result]) -> str:
    """Return Markdown: for each group its table, the differences seed by seed, and what came out."""
    lines: list[str] = []
    for group, table in TABLES.items():
        by_variant: dict[str, list[Result]] = {name: [] for name in table.rows}
        for result in sorted(results, key=lambda result: result["seed"]):
            if result["group"] == group:
                by_variant.setdefault(result["variant"], []).append(result)
        by_variant = {name: found for name, found in by_variant.items() if found}
        if by_variant:
            lines += [f"### {table.title}", "", *_table(table, by_variant), "", table.note, ""]
            lines += [*_differences(table, by_variant), *_routes(by_variant), *_worths(by_variant)]
    return "\n".join([*lines, *_how(results)]).rstrip()


def _table(table: Table, by_variant: dict[str, list[Result]]) -> list[str]:
    rows = []
    for name, group in by_variant.items():
        cells = [_cell(_values(column, group, by_variant), column.form) for column in table.columns]
        rows.append([table.label(name), *cells, ", ".join(str(result["seed"]) for result in group)])
    return _markdown(["variant", *(column.title for column in table.columns), "seeds"], rows)


def _values(
    column: Column, group: Sequence[Result], by_variant: dict[str, list[Result]]
) -> list[float | None]:
    values = [column.value(result) for result in group]
    if column.share_of is None:
        return values
    whole = [value for result in by_variant.get(column.share_of, []) if (value := column.value(result))]
    mean = sum(whole) / len(whole) if whole else 0.0
    return [None if value is None or not mean else value / mean for value in values]


def _markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table without the columns that are empty in every row."""
    kept = [i for i in range(len(headings)) if any(row[i] != "-" for row in rows)]
    lines = ["| " + " | ".join(line[i] for i in kept) + " |" for line in (headings, *rows)]
    return [lines[0], "|---" * len(kept) + "|", *lines[1:]]


def _cell(values: Sequence[float | None], form: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    cell = format(sum(known) / len(known), form)
    half = (max(known) - min(known)) / 2
    return f"{cell} ± {format(half, form.removeprefix('+'))}" if half else cell


def _differences(table: Table, by_variant: dict[str, list[Result]]) -> list[str]:
    """Return a table of differences, and in words in which columns all seeds agree."""
    columns = [column for column in table.columns if column.better]
    rows, words = [], []
    for name, other in table.comparisons:
        differences = [
            _paired(column, by_variant.get(name, []), by_variant.get(other, [])) for column in columns
        ]
        if not any(differences):
            continue
        rows.append([f"`{name}` - `{other}`", *map(_difference, columns, differences)])
        verdicts: dict[str, list[str]] = {}
        for column, found in zip(columns, differences):
            if found:
                verdicts.setdefault(_verdict(column, found), []).append(column.heading)
        said = "; ".join(f"{verdict}: {', '.join(names)}" for verdict, names in verdicts.items())
        words.append(f"- **{name} against {other}**: {said}.")
    if not rows:
        return []
    return [*_markdown(["difference", *(column.title for column in columns)], rows), "", *words, ""]


def _paired(column: Column, ours: Sequence[Result], theirs: Sequence[Result]) -> list[float]:
    """Differences of a column, seed by seed."""
    others = {result["seed"]: column.value(result) for result in theirs}
    pairs = [(column.value(result), others.get(result["seed"])) for result in ours]
    return [a - b for a, b in pairs if a is not None and b is not None]


def _difference(column: Column, differences: Sequence[float]) -> str:
    """Return a difference's mean and, of several seeds, its range, with one digit more than the values."""
    if not differences:
        return "-"
    digits, kind = int(column.form[-2]) + 1, column.form[-1]
    form = f"+z.{digits}{kind}"
    mean = format(sum(differences) / len(differences), form)
    if len(differences) == 1:
        return mean
    return f"{mean} ({format(min(differences), form)} to {format(max(differences), form)})"


def _verdict(column: Column, differences: Sequence[float]) -> str:
    if len(differences) == 1:
        return "one seed, no verdict"
    signs = {(difference > 0) - (difference < 0) for difference in differences}
    if len(signs) > 1:
        return "seeds disagree"
    word = {1: "better", -1: "worse", 0: "equal"}[column.better * signs.pop()]
    return f"{word} in all {len(differences)} seeds"


def _how(results: Sequence[Result]) -> list[str]:
    """Say how to read the tables, and what the results were made with, each setting that there is."""
    rows = [row for result in results for row in result["rows"]]
    clips = {row["clip"] for row in rows if row["degradation"] in TABLE_CONDITIONS}
    held_out = {row["clip"] for row in rows if row["degradation"].startswith("held-out")}
    lines = [
        "Values are means over seeds ± half of their range. Differences are paired by seed: their mean (and "
        "their range). Two seeds agree by chance half of the time.",
        f"Measured on {len(clips)} clips held back from training, each mild and heavy. td: error of frame "
        "differences; flicker: of still scenes; both in 1/255.",
    ]
    if held_out:
        lines.append(f"Held-out: the {len(held_out)} clips of the quick protocol, mild and heavy.")
    lines.append("")
    made: dict[str, list[str]] = {}
    for result in results:
        environment = result.get("environment", {})
        facts = {
            "from {}": result.get("start"),
            "by {:.0f} s of training": result.get("budget"),
            "on {}": environment.get("device"),
            "torch {}": environment.get("versions", {}).get("torch"),
            "commit {}": environment.get("commit"),
            "{}": result.get("note"),
        }
        text = ", ".join(form.format(fact) for form, fact in facts.items() if fact is not None)
        made.setdefault(text or "not recorded", []).append(f"{result['variant']}-{result['seed']}")
    for text, names in made.items():
        lines.append(f"- Made {text}: " + ("all." if len(made) == 1 else f"{', '.join(names)}."))
    return lines


def _routes(by_variant: dict[str, list[Result]]) -> list[str]:
    """Say which route was learned under each seed."""
    lines = []
    for result in by_variant.get("routed", []):
        if "schedule" in result:
            schedule = Schedule.from_config(result["schedule"])
            route = ", ".join(action.symbol for action in schedule.actions)
            lines.append(f"- Route learned under seed {result['seed']}: {route} ({schedule.slots} slots).")
    return [*lines, ""] if lines else []


_FORGETFUL = {
    "blocks-alone": "without recycled latents and K/V of the generator",
    "stateless": "without any memory",
}


def _worths(by_variant: dict[str, list[Result]]) -> list[str]:
    """Say what memory is worth to those measured without it too; wanted: 0.2 dB or a tenth of the flicker."""
    lines = []
    for name, results in by_variant.items():
        for forgetful, words in _FORGETFUL.items():
            whole, later = (_mean_worth(results, forgetful, prefix) for prefix in ("", "later_"))
            if whole is not None and later is not None:
                met = "met" if whole[0] >= 0.2 or whole[1] >= 0.1 else "missed"
                lines.append(
                    f"- Memory of {name}, against the same weights {words}: {whole[0]:+.3f} dB, "
                    f"{whole[1]:+.1%} less flicker; after the first block {later[0]:+.3f} dB, "
                    f"{later[1]:+.1%}. Target {met}."
                )
    return [*lines, ""] if lines else []


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
