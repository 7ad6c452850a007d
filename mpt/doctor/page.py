"""The doctor's page: the worst fault with its cure, the other findings, and headroom and underflow by module."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mpt.config.text.yaml_text import write_text
from mpt.doctor.findings import Finding, Section, worst_of
from mpt.report.run_page.numerics_map import map_numerics
from mpt.report.run_page.page import environment
from mpt.report.units import counted
from mpt.run.process.files import write_atomically

MOST_ROWS = 40
WORST = {"numerics: parameters": "gradient_error", "numerics: operators": "relative_error"}
"""Tables of which the page has the rows that are most wrong; all are in the JSON."""


def write_page(path: Path, subject: str, sections: Sequence[Section]) -> None:
    """Write one self-contained HTML page. Raises InputOutputError."""
    found = [(section.name, one) for section in sections for one in section.findings]
    faults = of_level(found, "fault")
    groups = {
        "Other faults": faults[1:],
        "Warnings": of_level(found, "warning"),
        "Notes": [(name, one) for name, one in of_level(found, "note") if one.about != "cure"],
    }
    template = environment().get_template("doctor.html.j2")
    text = template.render(
        subject=subject,
        worst=worst_of(sections),
        headline=headline(found),
        details=[one.advice for _, one in faults[:1] if one.advice],
        cures=cures_of(sections),
        groups=[(title, own) for title, own in groups.items() if own],
        fine=of_level(found, "ok"),
        numerics=map_numerics(rows_of(sections, "ranges"), rows_of(sections, "exponents")),
        tables=shown_tables(sections),
    )
    write_atomically(path, text)


def of_level(found: Sequence[tuple[str, Finding]], level: str) -> list[tuple[str, Finding]]:
    """Return the findings of one level, each with its section's name."""
    return [(name, one) for name, one in found if one.level == level]


def rows_of(sections: Sequence[Section], table: str) -> list[dict[str, Any]]:
    """Return the rows that all sections have in tables of one name."""
    return [row for section in sections for row in section.tables.get(table, ())]


def shown_tables(sections: Sequence[Section]) -> Mapping[str, Sequence[dict[str, Any]]]:
    """Return the tables that are printed as such; of those in `WORST` the rows that are most wrong."""
    tables = {
        f"{section.name}: {name}": rows
        for section in sections
        for name, rows in section.tables.items()
        if name not in ("ranges", "exponents", "cure") and rows
    }
    for name, key in WORST.items():
        if name in tables:  # None is an error that is not finite
            worst = sorted(
                tables[name], key=lambda row: -math.inf if row[key] is None else -row[key]
            )
            tables[name] = [
                {**row, key: "not finite" if row[key] is None else row[key]}
                for row in worst[:MOST_ROWS]
            ]
    return tables


def headline(found: Sequence[tuple[str, Finding]]) -> str:
    """Return the answer in one sentence: the first fault, or that there is none."""
    fault = next((one for _, one in found if one.level == "fault"), None)
    if fault is not None:
        return f"{fault.about}: {fault.text}"
    warnings = sum(one.level == "warning" for _, one in found)
    if warnings:
        return f"No fault, {counted(warnings, 'warning')}"
    return "Nothing is wrong"


def cures_of(sections: Sequence[Section]) -> list[tuple[str, str]]:
    """Return the cures that were tried: in words, with the result of the trial, and as YAML to copy."""
    return [
        (
            next(
                (one.text for one in section.findings if one.text.startswith(row["cure"])),
                row["cure"],
            ),
            yaml_of(row),
        )
        for section in sections
        for row in section.tables.get("cure", ())
    ]


def yaml_of(row: Mapping[str, Any]) -> str:
    """Return a cure's settings as YAML."""
    return write_text(row["patch"]).rstrip("\n")
