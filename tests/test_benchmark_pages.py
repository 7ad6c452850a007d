"""Tables of docs/benchmarks say how they came to be, and figures quoted from them elsewhere are in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from scripts.documents import quoted_figures

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs" / "benchmarks").glob("*.md"))
RULE = re.compile(r"^\|[-:| ]+\|$", re.M)
ORIGIN = {
    "date": re.compile(r"\b20\d\d-\d\d-\d\d\b"),
    "commit": re.compile(r"\bcommits? `?[0-9a-f]{7,8}\b"),
    "machine": re.compile(r"\bCPUs?\b|\bcpu\b|EPYC|Xeon|x86_64|NVIDIA|no device is involved"),
    "command": re.compile(r"\bpython (?:-m \w|scripts/)|pytest|\bmpt \w+|scripts/(?:\w+/)?\w+\.py"),
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
    lacking = {
        (title, name)
        for title, text in sections
        for name, found in ORIGIN.items()
        if not found.search(text)
    }
    assert lacking == set(), "scripts/provenance.py has date and commit in a script's own words"


def test_every_quoted_figure_is_in_the_table_that_its_sentence_links_to() -> None:
    assert (
        list(
            map(
                str,
                chain.from_iterable(map(quoted_figures.not_in_their_table, quoted_figures.pages())),
            )
        )
        == []
    )


def test_every_measured_figure_names_its_source() -> None:
    assert (
        list(
            map(
                str, chain.from_iterable(map(quoted_figures.without_source, quoted_figures.pages()))
            )
        )
        == []
    )


def test_a_figure_that_no_table_has_and_one_without_a_source_are_found(tmp_path: Path) -> None:
    table, page = tmp_path / "benchmarks" / "speed.md", tmp_path / "page.md"
    table.parent.mkdir()
    table.write_text(
        "| mode | step |\n|---|---:|\n| amp | 1,721 ms |\n| fp32 | 0.0184 |\n| O2 | 1.7e-05 |\n",
        "utf-8",
    )
    link = "([table](benchmarks/speed.md))"
    page.write_text(
        f"It takes 1,721 ms, or 1.7 s, wrong by 1.8 % {link}. Of 8 GB a third.\n\nWithin 2e-5 {link}.\n\n"
        f"It takes 1.4 s {link}.\n\nIt was planned at 4 GiB.\n\nIt took 5 s (`mpt train x`).\n",
        "utf-8",
    )
    assert [one.figure for one in quoted_figures.not_in_their_table(page)] == ["1.7", "1.4"]
    assert [one.text for one in quoted_figures.without_source(page)] == ["It was planned at 4 GiB."]
