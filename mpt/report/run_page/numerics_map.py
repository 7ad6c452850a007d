"""The doctor's measurements of a run's numerics, as a heat map over training and histograms against each dtype's range.

Made of `doctor.json` alone, whatever state it is in: a row that is not as the doctor writes it is left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from mpt.report.reading.log_values import number, section, whole
from mpt.report.reading.run_files import read_object

COMFORTABLE_BITS = 12.0
"""Headroom from which on a cell has no colour."""
LOWEST, HIGHEST = -52, 24
"""Powers of two between which a histogram is drawn; values beyond count in the last bar."""
DTYPES = (("float16", -24, -14, 15), ("bfloat16", -133, -126, 127))
"""Name, the smallest subnormal's, the smallest normal's and the largest number's power of two."""
QUANTITIES = (
    ("forward headroom, bits", "forward_headroom_bits"),
    ("forward underflow", "forward_underflow"),
    ("gradient headroom, bits", "gradient_headroom_bits"),
    ("gradient underflow", "gradient_underflow"),
)


@dataclass(frozen=True)
class Cell:
    """One cell: its text and its colour."""

    text: str
    colour: str


@dataclass(frozen=True)
class NumericsMap:
    """The parts of a page."""

    steps: Sequence[int]
    rows: Sequence[tuple[str, str, Sequence[Sequence[Cell]]]]
    """Phase, module, and for each quantity a cell per step."""
    histograms: Sequence[tuple[str, Markup]]
    """Caption and SVG."""
    quantities: Sequence[str] = tuple(name for name, _ in QUANTITIES)


def read_numerics(run: Path) -> NumericsMap | None:
    """Return the doctor's results in a run; None if nothing can be shown."""
    record = read_object(run / "doctor.json", [], needed=False)
    sections = record.get("sections")
    if not isinstance(sections, list):
        return None
    tables = [section(one, "tables") for one in sections if isinstance(one, Mapping)]
    return map_numerics(
        [row for table in tables for row in rows_of(table, "ranges")],
        [row for table in tables for row in rows_of(table, "exponents")],
    )


def rows_of(tables: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return a table's rows, those that are rows."""
    found = tables.get(name)
    return [row for row in found if isinstance(row, Mapping)] if isinstance(found, list) else []


def map_numerics(
    ranges: Sequence[Mapping[str, Any]], exponents: Sequence[Mapping[str, Any]]
) -> NumericsMap | None:
    """Arrange the doctor's rows; None if there are none."""
    steps = sorted({whole(row.get("step", 0)) for row in ranges})
    by_place: dict[tuple[str, str], dict[int, Mapping[str, Any]]] = {}
    for row in ranges:
        place = (str(row.get("phase", "")), str(row.get("module", "")))
        by_place.setdefault(place, {})[whole(row.get("step", 0))] = row
    if not by_place:
        return None
    rows = [
        (
            phase,
            module,
            [[cell(key, found.get(step, {}).get(key)) for step in steps] for _, key in QUANTITIES],
        )
        for (phase, module), found in by_place.items()
    ]
    last = max((whole(row.get("step", 0)) for row in exponents), default=0)
    histograms = [
        (
            f"{row.get('phase')}, {row.get('way')}, step {last}",
            draw_exponents(section(row, "shares")),
        )
        for row in exponents
        if whole(row.get("step", 0)) == last and section(row, "shares")
    ]
    return NumericsMap(steps, rows, histograms)


def cell(key: str, value: Any) -> Cell:
    """Return a cell: the nearer float16's end, the darker; red for overflow, blue for underflow."""
    amount = number(value)
    if not math.isfinite(amount):
        return Cell("", "transparent")
    if key.endswith("bits"):
        strength = min(1.0, max(0.0, 1 - amount / COMFORTABLE_BITS))
        return Cell(f"{amount:z.0f}", f"rgba(200, 60, 50, {0.7 * strength:.2f})")
    return Cell(
        f"{amount:.0%}" if amount >= 0.005 else "",
        f"rgba(60, 90, 200, {0.7 * min(1.0, amount):.2f})",
    )


def draw_exponents(shares: Mapping[str, Any]) -> Markup:
    """Draw how often each power of two occurs, over the ranges that dtypes hold."""
    bars = [0.0] * (HIGHEST - LOWEST + 1)
    for power, share in shares.items():
        place = number(power)
        if math.isfinite(place):
            bars[min(max(int(place), LOWEST), HIGHEST) - LOWEST] += max(0.0, number(share, 0.0))
    tallest = max(bars) or 1.0
    width, height, base = 8 * len(bars), 90, 100

    def left(power: float) -> float:
        return 8 * (min(max(power, LOWEST), HIGHEST + 1) - LOWEST)

    parts = [
        f'<svg viewBox="0 0 {width} 158" role="img" aria-label="powers of two and the ranges of dtypes">'
    ]
    for index, share in enumerate(bars):
        if share:
            tall = max(0.6, height * share / tallest)
            held = -24 <= index + LOWEST <= 15
            colour = "var(--accent)" if held else "var(--bad)"
            parts.append(
                f'<rect x="{8 * index + 0.5}" y="{base - tall:.1f}" width="7" height="{tall:.1f}" fill="{colour}">'
                f"<title>2^{index + LOWEST}: {share:.2%}</title></rect>"
            )
    parts.append(f'<line x1="0" x2="{width}" y1="{base}" y2="{base}" stroke="var(--line)"/>')
    for mark in range(LOWEST + 2, HIGHEST + 1, 10):
        parts.append(
            f'<text x="{left(mark) + 4}" y="{base + 12}" font-size="10" text-anchor="middle" fill="var(--soft)">'
            f"2^{mark}</text>"
        )
    for row, (name, subnormal, normal, largest) in enumerate(DTYPES):
        y = base + 22 + 18 * row
        start, middle, end = left(subnormal), left(normal), left(largest + 1)
        parts.append(
            f'<rect x="{start}" y="{y}" width="{middle - start}" height="11" fill="var(--soft)" opacity="0.35"/>'
            f'<rect x="{middle}" y="{y}" width="{end - middle}" height="11" fill="var(--soft)" opacity="0.7"/>'
            f'<text x="{(middle + end) / 2}" y="{y + 9}" font-size="9.5" text-anchor="middle" fill="var(--paper)">'
            f"{escape(name)}</text>"
        )
    return Markup("".join([*parts, "</svg>"]))
