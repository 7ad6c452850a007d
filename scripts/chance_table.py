#!/usr/bin/env python
"""Whether the chances of plans are right: how many published runs stayed within the memory that a chance allows.

    python scripts/chance_table.py -o docs/benchmarks/plan_chances.md

For a chance such as 90 % the learnt distribution gives a share of the planned memory; counted are the runs that needed
no more. Runs that a distribution was learnt from do not judge it: each source is judged by what the others teach, and
the tables that nothing was learnt from by all of them. Nothing is planned here: plans are those of
`mpt/planner/facts/published.json` and of the named pages.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import NormalDist, fmean

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from mpt.planner.facts.verdict import PUBLISHED, bell_width, share_below
from scripts.provenance import made

Share = Callable[[float, Sequence[float]], float]
ROOT = Path(__file__).resolve().parent.parent
LEVELS = (0.5, 0.75, 0.9, 0.95)
HELD_OUT = {
    "torchtitan, Llama 3.1 8B": (
        "plan_cards.md",
        r"\| \d+ \| (?:eager|compiled) \| ([\d.]+) \| ([\d.]+) \|",
    ),
    "mmsegmentation's, with DistributedDataParallel": (
        "plan_segmentation.md",
        r"\| \w+, ResNet-[^|]+ \| ([\d,]+) \| [^|]+ \| ([\d,]+) \(",
    ),
    "StyleGAN2, NVIDIA's": (
        "stylegan2_memory.md",
        r"\| \d+ pixels, [^|]+ \| ([\d,]+) \| [^|]* \| [^|]+ \| ([\d,]+) \(",
    ),
    "aMUSEd's 18": ("diffusion_amused.md", r"\| \d+ \| [^|]+ \| \d+ \| ([\d.]+) \| ([\d.]+) \|"),
}
"""Source -> page in docs/benchmarks, and what matches its rows: measured, planned."""
NOT_NAMED = ("aMUSEd's 18",)
"""Sources that do not say what their figures count."""


def learnt() -> dict[str, list[float]]:
    """Return measured over planned memory of the runs that chances are learnt from, by source."""
    found: dict[str, list[float]] = {}
    for row in json.loads(PUBLISHED.read_text("utf-8")):
        if not row["explained"]:
            found.setdefault(row["source"], []).append(row["measured_mib"] / row["planned_mib"])
    return found


def held_out(page: str, pattern: str) -> list[float]:
    """Return the same of a table on a page. Raises SystemExit if it has no such rows."""
    text = (ROOT / "docs" / "benchmarks" / page).read_text("utf-8")
    rows = [
        (float(a.replace(",", "")), float(b.replace(",", ""))) for a, b in re.findall(pattern, text)
    ]
    if not rows:
        raise SystemExit(f"{page}: no row matches {pattern}")
    return [measured / planned for measured, planned in rows]


def limit(chance: float, ratios: Sequence[float], share: Share = share_below) -> float:
    """Return the multiple of the planned memory that has a chance, by bisection."""
    low, high = 0.5, 2.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle, ratios) < chance else (low, middle)
    return high


def by_source(sources: Mapping[str, Sequence[float]]) -> Share:
    """Return the share of runs below a limit if every source counts the same, however many runs it has."""
    width = bell_width([ratio for ratios in sources.values() for ratio in ratios])

    def share(most: float, _: Sequence[float]) -> float:
        return fmean(
            fmean(NormalDist(one, width).cdf(most) for one in ratios) for ratios in sources.values()
        )

    return share


def wide() -> Iterator[str]:
    """Yield the lines of the table of chances learnt from all sources that name their way of measuring but one."""
    sources = {
        **learnt(),
        **{name: held_out(*where) for name, where in HELD_OUT.items() if name not in NOT_NAMED},
    }
    within = dict.fromkeys(LEVELS, 0.0)
    for name, ratios in sources.items():
        share = by_source({other: values for other, values in sources.items() if other != name})
        limits = {level: limit(level, (), share) for level in LEVELS}
        counts = {level: sum(ratio <= most for ratio in ratios) for level, most in limits.items()}
        for level, count in counts.items():
            within[level] += count / len(ratios) / len(sources)
        cells = (
            f"{counts[level]} ({counts[level] / len(ratios):.0%}) at {limits[level]:.3f}"
            for level in LEVELS
        )
        yield f"| {name} | {len(ratios)} | {' | '.join(cells)} |"
    yield f"| mean of the sources | {len(sources)} | {' | '.join(f'{one:.0%}' for one in within.values())} |"


def judged() -> Iterator[tuple[str, str, list[float], list[float]]]:
    """Yield runs, what judges them, their ratios and those that were learnt from."""
    sources = learnt()
    for name, ratios in sources.items():
        others = [ratio for other, values in sources.items() if other != name for ratio in values]
        yield name, "the other two sources", ratios, others
    every = [ratio for values in sources.values() for ratio in values]
    for name, (page, pattern) in HELD_OUT.items():
        yield name, "all three", held_out(page, pattern), every


def row(name: str, by: str, ratios: Sequence[float], known: Sequence[float]) -> str:
    """Return a row of the table."""
    within = [sum(ratio <= limit(level, known) for ratio in ratios) for level in LEVELS]
    cells = " | ".join(f"{count} ({count / len(ratios):.0%})" for count in within)
    return f"| {name} | {by} | {len(ratios)} | {cells} |"


def total(
    name: str, judgements: Sequence[tuple[str, str, Sequence[float], Sequence[float]]]
) -> str:
    """Return the row of several sources together."""
    count = sum(len(ratios) for _, _, ratios, _ in judgements)
    within = [
        sum(ratio <= limit(level, known) for _, _, ratios, known in judgements for ratio in ratios)
        for level in LEVELS
    ]
    return (
        f"| {name} | | {count} | "
        + " | ".join(f"{one} ({one / count:.0%})" for one in within)
        + " |"
    )


def page() -> str:
    """Return the page."""
    judgements = list(judged())
    heads = " | ".join(f"{level:.0%}" for level in LEVELS)
    sources = learnt()
    every = [ratio for values in sources.values() for ratio in values]
    limits = ", ".join(f"{level:.0%} at {limit(level, every):.3f}" for level in LEVELS)
    return "\n".join(
        [
            "# Chances of plans, counted",
            "",
            f"Written by `python scripts/chance_table.py`, {made()}, on a CPU. A chance is that of a "
            "run to need no more than some multiple of its planned memory, learnt from "
            f"{len(every)} published runs ([table](plan_published.md)): {limits} of the plan. Counted are runs that "
            "needed no more; in a column of 90 % nine of ten should.",
            "",
            f"| Runs | Judged by | Number | {heads} |",
            "|---|---|---:|" + "---:|" * len(LEVELS),
            *(row(*one) for one in judgements),
            total(
                "all whose way of measuring is named",
                [one for one in judgements if one[0] not in NOT_NAMED],
            ),
            total("all", judgements),
            "",
            "Learnt from all sources that name their way of measuring but the one that is judged, each of which counts "
            "the same; with the multiple of the planned memory:",
            "",
            f"| Judged | Number | {heads} |",
            "|---|---:|" + "---:|" * len(LEVELS),
            *wide(),
            "",
        ]
    )


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.parse_args().output.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
