"""Tables of docs/benchmarks say how they came to be, and figures quoted from them elsewhere are in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs" / "benchmarks").glob("*.md"))
RULE = re.compile(r"^\|[-:| ]+\|$", re.M)
ORIGIN = {
    "date": re.compile(r"\b20\d\d-\d\d-\d\d\b"),
    "commit": re.compile(r"\bcommits? `?[0-9a-f]{7,8}\b"),
    "machine": re.compile(r"\bCPUs?\b|\bcpu\b|EPYC|Xeon|x86_64|no device is involved"),
    "command": re.compile(r"\bpython (?:-m \w|scripts/)|pytest|\bmpt \w+|scripts/\w+\.py"),
}


def sections_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield the sections that have a table, each with the page's introduction, which may speak for all of them."""
    intro, *rest = re.split(r"^(?=## )", text, flags=re.M)
    for section in [intro, *rest]:
        if RULE.search(section):
            yield section.partition("\n")[0], section if section is intro else intro + section


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_every_table_has_date_commit_machine_and_command(path: Path) -> None:
    sections = list(sections_of(path.read_text("utf-8")))
    assert sections, "a page of benchmarks without a table"
    lacking = {(title, name) for title, text in sections for name, found in ORIGIN.items() if not found.search(text)}
    assert lacking == set(), "scripts/provenance.py has date and commit in a script's own words"
