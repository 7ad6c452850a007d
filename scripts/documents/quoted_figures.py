"""Find figures that pages quote from the tables of docs/benchmarks, and measured figures that name no source.

    python scripts/documents/quoted_figures.py  # prints both kinds of mistake; tests/test_benchmark_pages.py wants none

A quoted figure is one with a unit, a decimal or a × in a sentence that links to a page of docs/benchmarks. It must be
there, or be what one there rounds to. A paragraph that says that something was measured or planned, in words of
MEASURED, must link to such a page or to a decision, or name the command, script or test that gives its figures.
Bare whole numbers are not looked at: most are sizes and settings. Generated pages are left to their generators.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GENERATED = ("cards", "benchmarks")
WRITTEN = ("settings.md", "commands.md", "python.md", "exit_codes.md")
FENCES = re.compile(r"^ *```.*?^ *```$", re.M | re.S)
PARAGRAPHS = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.) )")
SENTENCES = re.compile(r"(?<=[.:;])\s+(?=[A-Z`\[*])")
LINK = re.compile(r"\]\((\S*?benchmarks/\w+\.md)[^)]*\)|\b(docs/benchmarks/\w+\.md)")
NOT_PROSE = re.compile(r"`[^`]*`|\]\([^)]*\)|docs/\S+\.md")
UNIT = r"%|s|ms|seconds|minutes|MiB|GiB|GB|dB|bytes|grey levels"
FIGURE = re.compile(
    rf"(?<![\w.,@:-])[×x]?(\d[\d,]*\.\d+(?:e-?\d+)?|\d[\d,]*(?:e-?\d+)?(?= ?(?:{UNIT})(?![\w/]))|\d+e-\d+)"
)
RANGE = re.compile(rf"\b(\d[\d,.]*) (?:to|and|or) (?=\d[\d,.]* ?(?:{UNIT})(?![\w/]))")
NUMBER = re.compile(r"(?<![\w.])[-+±×]?(\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)")
MEASURED = re.compile(
    r"\b(?:(?<!not )measured,|measured (?:in|on|at|with)|took|planned at|an accuracy of|a Frechet distance of|a PSNR of"
    r"|times (?:slower|faster))\b"
)
SOURCE = re.compile(
    r"`(?:mpt|python|pytest|bash)\b|scripts/\w+\.py|\btest_\w+|tests/\w+|decisions/\w+\.md|benchmarks/\w+\.md"
)


@dataclass(frozen=True)
class Mistake:
    page: Path
    figure: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}: {self.figure}: {' '.join(self.text.split())[:200]}"


def pages() -> list[Path]:
    """The pages that people write, those of docs/benchmarks aside, and the shipped configurations, for their heads."""
    found = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    configs = [
        *sorted(ROOT.glob("configs/*.yaml")),
        *sorted(ROOT.glob("mpt/systems/*/configs/*.yaml")),
    ]
    return [
        page for page in found if page.name not in WRITTEN and page.parent.name not in GENERATED
    ] + configs


def paragraphs_of(page: Path) -> list[str]:
    text = page.read_text("utf-8")
    if page.suffix == ".yaml":
        head = takewhile(lambda line: line.startswith("#"), text.splitlines())
        text = "\n".join(line.removeprefix("#").strip() for line in head)
    return PARAGRAPHS.split(FENCES.sub("", text))


def figures_of(text: str) -> list[str]:
    """Return the figures with a unit, a decimal or a × of a piece of prose, commas taken out."""
    bare = NOT_PROSE.sub("", text)
    return [figure.replace(",", "") for figure in [*FIGURE.findall(bare), *RANGE.findall(bare)]]


def numbers_of(page: Path) -> set[str]:
    return {number.replace(",", "") for number in NUMBER.findall(page.read_text("utf-8"))}


def is_there(figure: str, numbers: set[str]) -> bool:
    """Is the figure one of the numbers, or what one of them rounds to, also as a percentage?

    A power of ten is a bound: one of the numbers is at most it, and more than half of it.
    """
    if figure in numbers:
        return True
    quoted, digits = float(figure), len(figure.partition(".")[2])
    if "e" in figure:
        return any(quoted / 2 < float(number) <= quoted for number in numbers)
    listed = [float(number) for number in numbers]
    listed += [100 * number for number in listed if number < 1]
    return any(abs(number - quoted) <= 0.501 * 10**-digits for number in listed)


def not_in_their_table(page: Path) -> Iterator[Mistake]:
    """Yield figures of a sentence that are in none of the tables that it links to."""
    for paragraph in paragraphs_of(page):
        for sentence in SENTENCES.split(paragraph):
            tables = [
                page.parent / relative if relative else ROOT / named
                for relative, named in LINK.findall(sentence)
            ]
            if not tables:
                continue
            numbers = set().union(*map(numbers_of, tables))
            for figure in figures_of(sentence):
                if not is_there(figure, numbers):
                    yield Mistake(page, figure, sentence)


def without_source(page: Path) -> Iterator[Mistake]:
    """Yield paragraphs with measured figures and neither a link nor a command.

    Decisions are sources themselves, and a configuration begins with the command that gives its figures.
    """
    if page.parent.name == "decisions" or page.suffix == ".yaml":
        return
    for paragraph in paragraphs_of(page):
        bare = NOT_PROSE.sub("", paragraph)
        found = MEASURED.search(bare)
        if found and figures_of(paragraph) and not SOURCE.search(paragraph):
            yield Mistake(page, found[0], paragraph)


def main() -> None:
    mistakes = [
        mistake
        for page in pages()
        for mistake in (*not_in_their_table(page), *without_source(page))
    ]
    print("\n".join(map(str, mistakes)) or "every quoted figure is in its table")
    sys.exit(bool(mistakes))


if __name__ == "__main__":
    main()
