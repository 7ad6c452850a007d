"""The doctor's page: findings, and modules x (forward, gradient) as a heat map of headroom and underflow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from mpt.doctor.findings import Section
from mpt.report.numerics_map import map_numerics
from mpt.report.page import environment
from mpt.run.process.files import write_atomically

MOST_ROWS = 40
WORST = {"numerics: parameters": "gradient_error", "numerics: operators": "relative_error"}
"""Tables of which the page has the rows that are most wrong; all are in the JSON."""


def write_page(path: Path, subject: str, sections: Sequence[Section]) -> None:
    """Write one self-contained HTML page. Raises InputOutputError."""
    ranges, exponents = (
        [row for section in sections for row in section.tables.get(name, ())] for name in ("ranges", "exponents")
    )
    tables = {
        f"{section.name}: {name}": rows
        for section in sections
        for name, rows in section.tables.items()
        if name not in ("ranges", "exponents", "cure") and rows
    }
    for name, key in WORST.items():
        if name in tables:  # None is an error that is not finite
            worst = sorted(tables[name], key=lambda row: -math.inf if row[key] is None else -row[key])
            tables[name] = [{**row, key: "not finite" if row[key] is None else row[key]} for row in worst[:MOST_ROWS]]
    template = environment().get_template("doctor.html.j2")
    numerics = map_numerics(ranges, exponents)
    text = template.render(subject=subject, sections=sections, numerics=numerics, tables=tables)
    write_atomically(path, text)
