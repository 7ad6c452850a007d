"""The doctor's page: findings, and modules x (forward, gradient) as a heat map of headroom and underflow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpt.doctor.findings import Section
from mpt.report.page import environment
from mpt.run.files import write_atomically

COMFORTABLE_BITS = 12.0


def write_page(path: Path, subject: str, sections: Sequence[Section]) -> None:
    """Write one self-contained HTML page. Raises InputOutputError."""
    ranges = [row for section in sections for row in section.tables.get("ranges", ())]
    tables = {
        f"{section.name}: {name}": rows
        for section in sections
        for name, rows in section.tables.items()
        if name not in ("ranges", "cure") and rows
    }
    template = environment().get_template("doctor.html.j2")
    text = template.render(subject=subject, sections=sections, ranges=[_colour(row) for row in ranges], tables=tables)
    write_atomically(path, text)


def _colour(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the strength, 0 to 1, in which each of its cells is warned of."""
    strengths = {}
    for way in ("forward", "gradient"):
        bits = row[f"{way}_headroom_bits"]
        strengths[f"{way}_headroom"] = 0.0 if bits is None else min(1.0, max(0.0, 1 - bits / COMFORTABLE_BITS))
        strengths[f"{way}_underflow"] = min(1.0, float(row[f"{way}_underflow"]))
    return {**row, "strength": strengths}
