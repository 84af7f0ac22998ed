"""Result files of the protocol as Markdown tables.

    python -m recavsr.evaluation.report FILE.json [FILE.json ...] [--clips]

Rows of several files go into one table if their protocols are equal. Every comparison is with bicubic's mean
in the same table: PSNR and SSIM as differences, LPIPS and td as shares, flicker as ratios.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from recavsr.errors import InputError, run_module

BASELINE = "bicubic"
NOTE = (
    "LPIPS: AlexNet, v0.1. SSIM on luma. td and flicker in 1/255; td favours blur, NIQE grit: read them "
    "beside LPIPS. Our training covered these degradations, the peers' did not."
)
_NOT_AVERAGED = {"model", "degradation", "clip", "frames", "height", "width"}

Row = dict[str, Any]


def load_rows(files: Iterable[Path]) -> list[Row]:
    """Rows of all files; a model that occurs twice counts from the last file that has it.

    Raises InputError for what is no result file, and if the files were made under different protocols.
    """
    protocol = None
    rows: dict[tuple[str, str, str], Row] = {}
    for file in files:
        try:
            result = json.loads(file.read_text(encoding="utf-8"))
            measured_by, found = result["protocol"], result["rows"]
            by_place = {(row["model"], row["degradation"], row["clip"]): row for row in found}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{file}: no result file of the protocol ({error})") from error
        if protocol is not None and measured_by != protocol:
            raise InputError(f"{file} was measured under another protocol than the files before it")
        protocol = measured_by
        rows.update(by_place)
    return list(rows.values())


def summarise(rows: Sequence[Row]) -> list[Row]:
    """Means over clips, one row per (model, degradation), with comparisons to bicubic where it is present.

    Added keys: psnr_gain, ssim_gain (differences), lpips_share, td_share, flicker_ratio, still_ratio. A value
    that some clip lacks is averaged over the clips that have it; flicker is the mean over all static pixels.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["degradation"]), []).append(row)
    means = {key: _mean_row(group) for key, group in groups.items()}
    return [_compare(mean, means.get((BASELINE, degradation))) for (_, degradation), mean in means.items()]


def _mean_row(group: Sequence[Row]) -> Row:
    mean: Row = {"model": group[0]["model"], "degradation": group[0]["degradation"], "clips": len(group)}
    for key in dict.fromkeys(key for row in group for key in row):
        values = [row[key] for row in group if row.get(key) is not None]
        if key not in _NOT_AVERAGED:
            mean[key] = sum(values) / len(values) if values else None
    static = [row for row in group if row.get("flicker") is not None]
    pixels = [row["static_share"] * row["height"] * row["width"] for row in static]
    if static:
        mean["flicker"] = sum(row["flicker"] * n for row, n in zip(static, pixels)) / sum(pixels)
    return mean


def _compare(mean: Row, baseline: Row | None) -> Row:
    def difference(key: str) -> float | None:
        if baseline is None or mean.get(key) is None or baseline.get(key) is None:
            return None
        return mean[key] - baseline[key]

    def share(key: str) -> float | None:
        if baseline is None or mean.get(key) is None or not baseline.get(key):
            return None
        return mean[key] / baseline[key]

    return mean | {
        "psnr_gain": difference("psnr"),
        "ssim_gain": difference("ssim"),
        "lpips_share": share("lpips"),
        "td_share": share("td"),
        "flicker_ratio": share("flicker"),
        "still_ratio": share("still_flicker"),
    }


_SUMMARY_COLUMNS = (
    ("PSNR", "psnr", "psnr_gain", ".2f", "+.2f"),
    ("SSIM", "ssim", "ssim_gain", ".3f", "+.3f"),
    ("LPIPS", "lpips", "lpips_share", ".3f", ".2f"),
    ("NIQE", "niqe", None, ".2f", ""),
    ("td", "td", "td_share", ".2f", ".2f"),
    ("flicker", "flicker", "flicker_ratio", ".2f", ".2f"),
    ("still scene", "still_flicker", "still_ratio", ".2f", ".2f"),
    ("line at latent borders", "still_latent_line", None, "+.1%", ""),
    ("line at block borders", "still_block_line", None, "+.1%", ""),
)


def render(rows: Sequence[Row], *, per_clip: bool = False) -> str:
    """Markdown: one table per degradation, the note, and with `per_clip` one table per clip below."""
    lines: list[str] = []
    summary = summarise(rows)
    for degradation in dict.fromkeys(row["degradation"] for row in rows):
        lines += [f"### {degradation}", ""]
        lines += _table([row for row in summary if row["degradation"] == degradation])
    lines += [
        f"In brackets: against {BASELINE} (difference or share). {NOTE}",
        "",
    ]
    if per_clip:
        for degradation, clip in dict.fromkeys((row["degradation"], row["clip"]) for row in rows):
            chosen = [r for r in rows if (r["degradation"], r["clip"]) == (degradation, clip)]
            lines += [f"#### {clip}, {degradation}", "", *_table(summarise(chosen))]
    return "\n".join(lines)


def _table(summary: Sequence[Row]) -> list[str]:
    headings = ["model", *(column[0] for column in _SUMMARY_COLUMNS)]
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    for row in summary:
        cells = [row["model"]]
        for _, key, relative, form, relative_form in _SUMMARY_COLUMNS:
            cell = "-" if row.get(key) is None else format(row[key], form)
            if relative and row.get(relative) is not None and row["model"] != BASELINE:
                cell += f" ({format(row[relative], relative_form)})"
            cells.append(cell)
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; prints Markdown."""
    parser = argparse.ArgumentParser(prog="recavsr.evaluation.report", description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--clips", action="store_true", help="also one table per clip")
    options = parser.parse_args(argv)
    print(render(load_rows(options.files), per_clip=options.clips))
    return 0


if __name__ == "__main__":
    run_module(main)
