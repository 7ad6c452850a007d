#!/usr/bin/env python
"""Whether the chances of plans are right: how many published runs stayed within the memory that a chance allows.

    python scripts/plans/chance_table.py -o docs/benchmarks/plan_chances.md
    python scripts/plans/chance_table.py --save    # renew the rows of these pages in what `mpt plan` learns from

For a chance such as 90 % the learnt distribution gives a multiple of the planned memory; counted are the runs that
needed no more. Each source is judged by what the others teach, and one that nothing is learnt from by all of them.
Nothing is planned here: plans are those of the named pages, and of `scripts/plans/check_plan.py --save` for the others.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from mpt.planner.facts.verdict import PUBLISHED, published_ratios, share_below
from scripts.command_line import described
from scripts.provenance import made

ROOT = Path(__file__).resolve().parents[2]
LEVELS = (0.5, 0.75, 0.9, 0.95)
PAGES = {
    "torchtitan": (
        "plan_cards.md",
        r"\| (\d+ \| (?:eager|compiled)) \| ([\d.]+) \| ([\d.]+) \|",
        1024,
    ),
    "mmsegmentation": (
        "plan_segmentation.md",
        r"\| (\w+, ResNet-[^|]+) \| ([\d,]+) \| [^|]+ \| ([\d,]+) \(",
        1,
    ),
    "StyleGAN2": (
        "stylegan2_memory.md",
        r"\| (\d+ pixels, [^|]+) \| ([\d,]+) \| [^|]* \| [^|]+ \| ([\d,]+) \(",
        1,
    ),
}
"""Source -> page in docs/benchmarks, what matches its rows (run, measured, planned as that program was), MiB of a unit.

All plans are without an assumed workspace of cuDNN, as those that chances are asked for.
"""
GB_IN_MIB = 10**9 / 2**20
HELD_OUT = {
    "litgpt": (
        "plan_litgpt.md",
        r"(?m)^\| ([^|]+) \| ([\d.]+) \| ([\d.]+) \| [+-][\d.]+% \|(?: [\d.]+ \|)?$",
        GB_IN_MIB,
    ),
    "PEFT": (
        "plan_peft.md",
        r"\| (\S+) \| [\d,]+ \| ([\d.]+) \| ([\d.]+) \| [\d.]+ \|",
        GB_IN_MIB,
    ),
    "mmaction2": (
        "plan_video.md",
        r"(?m)^\| (\S+) \| ([\d,]+) \| ([\d,]+) \| [+-][\d.]+% \|$",
        1,
    ),
    "aMUSEd": (
        "diffusion_amused.md",
        r"\| (\d+ \| [^|]+ \| \d+) \| ([\d.]+) \| ([\d.]+) \|",
        1000,
    ),
}
"""Sources that nothing is learnt from: two of transformers alone, whose plans are nearer than those of convolutional
networks, one that came after the chances had been learnt, and one that does not say what its figures count."""


def rows_of(source: str, page: str, pattern: str, unit: float) -> list[dict[str, Any]]:
    """Return a page's runs as `published.json` has them. Raises SystemExit if it has none."""
    text = (ROOT / "docs" / "benchmarks" / page).read_text("utf-8")
    found = [
        {
            "source": source,
            "run": run.replace(" |", ","),
            "measured_mib": round(float(measured.replace(",", "")) * unit),
            "planned_mib": round(float(planned.replace(",", "")) * unit),
            "explained": "",
        }
        for run, measured, planned in re.findall(pattern, text)
    ]
    if not found:
        raise SystemExit(f"{page}: no row matches {pattern}")
    return found


def page_rows() -> list[dict[str, Any]]:
    """Return the rows of all pages that chances are learnt from."""
    return [row for source, where in PAGES.items() for row in rows_of(source, *where)]


def save(rows: list[dict[str, Any]]) -> None:
    """Write rows into what `mpt plan` learns from, in place of those of their sources."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in json.loads(PUBLISHED.read_text("utf-8")):
        found.setdefault(row["source"], []).append(row)
    for source in {row["source"]: None for row in rows}:
        found[source] = [row for row in rows if row["source"] == source]
    lines = ",\n".join(f" {json.dumps(row)}" for source in found.values() for row in source)
    PUBLISHED.write_text(f"[\n{lines}\n]\n", "utf-8")


def limit(chance: float, sources: Collection[Sequence[float]]) -> float:
    """Return the multiple of the planned memory that has a chance, by bisection."""
    low, high = 0.5, 2.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if share_below(middle, sources) < chance else (low, middle)
    return high


def judged() -> dict[str, tuple[list[float], list[list[float]]]]:
    """Return the ratios of each source, and those that judge it."""
    learnt = published_ratios()
    found = {
        name: (ratios, [others for other, others in learnt.items() if other != name])
        for name, ratios in learnt.items()
    }
    for name, where in HELD_OUT.items():
        ratios = [row["measured_mib"] / row["planned_mib"] for row in rows_of(name, *where)]
        found[name] = ratios, [*learnt.values()]
    return found


def page() -> str:
    """Return the page."""
    lines, shares, counts = [], [], []
    for name, (ratios, known) in judged().items():
        limits = [limit(level, known) for level in LEVELS]
        within = [sum(ratio <= most for ratio in ratios) for most in limits]
        cells = " | ".join(
            f"{count} ({count / len(ratios):.0%}) at {most:.3f}"
            for count, most in zip(within, limits, strict=True)
        )
        lines.append(f"| {name} | {len(ratios)} | {max(ratios):.3f} | {cells} |")
        if name not in HELD_OUT:
            shares.append([count / len(ratios) for count in within])
            counts.append([len(ratios), *within])
    means = " | ".join(f"{fmean(share):.0%}" for share in zip(*shares, strict=True))
    number, *sums = (sum(count) for count in zip(*counts, strict=True))
    totals = " | ".join(f"{count} ({count / number:.0%})" for count in sums)
    sources = published_ratios().values()
    limits = ", ".join(f"{level:.0%} at {limit(level, sources):.3f}" for level in LEVELS)
    heads = " | ".join(f"{level:.0%}" for level in LEVELS)
    return "\n".join(
        [
            "# Chances of plans, counted",
            "",
            f"Written by `python scripts/plans/chance_table.py`, {made()}, on a CPU. A chance is that of a run to need "
            f"no more than some multiple of its planned memory, learnt from {number} published runs of {len(sources)} "
            f"sources, each of which counts the same: {limits} of the plan. Planned is memory without an assumed "
            "workspace of cuDNN, as what is judged; measured is memory with what the run's cuDNN took. Runs: "
            "[ViT-L/16, BERT-large, xMem](plan_published.md), [torchtitan](plan_cards.md), [mmsegmentation]"
            "(plan_segmentation.md) (its step of 2020), [StyleGAN2](stylegan2_memory.md) (with a kernel for each "
            "picture) and, to be judged alone, [litgpt](plan_litgpt.md) and [PEFT](plan_peft.md), whose "
            "networks are transformers, [mmaction2](plan_video.md) (without a softmax over activations) and "
            "[aMUSEd](diffusion_amused.md), whose way of measuring is not named.",
            "",
            "Each source is judged by what the other five teach, the last four by all six. Counted are runs that "
            "needed no more, with the multiple of the planned memory; in a column of 90 % nine of ten should. Highest "
            "is what the run that needed most took of its plan.",
            "",
            f"| Judged | Runs | Highest | {heads} |",
            "|---|---:|---:|" + "---:|" * len(LEVELS),
            *lines,
            f"| the six, each counting the same | {number} | | {means} |",
            f"| the six, each run counting the same | {number} | | {totals} |",
            "",
        ]
    )


def main() -> None:
    """Write the page, or what is learnt from."""
    parser = described(__doc__)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("-o", "--output", type=Path)
    task.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if options.save:
        save(page_rows())
    else:
        options.output.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
