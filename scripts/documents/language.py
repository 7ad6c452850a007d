"""Count turns of phrase that make the documentation hard to read, and print their places.

    python scripts/documents/language.py                          # a table: pattern by folder
    python scripts/documents/language.py --places mpt/planner docs    # each place, with its line
    python scripts/documents/language.py --only what beside --places README.md

Markdown is counted without its code blocks; of Python files docstrings, comments and messages are. The patterns and
what to write instead are in CONTRIBUTING.md ("Documentation and language"). `what`, `where` and `then` are good English
in questions and of places and order, so a count of zero is not the aim: a place is to be read before it is changed.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs", "configs", "mpt")
WORDS = {
    "what": r"\bwhat\b",
    "Return what": r"\breturns? what\b",
    "where": r"\bwhere\b",
    "beside": r"\bbesides?\b",
    "said, told": r"\b(?:is|are|was|were|be) (?:told|said)\b|\btells?\b|\bit says so\b|\bwhich is said\b",
    "so many, by itself": r"\bso many\b|\bby itself\b|\bgo(?:es)? on\b|\blets? (?:it|them)? ?go\b",
    "stands": r"\bstands?\b",
    ".5": r"(?<![\w.*/\])…:+])\.\d+\b(?![.%])",
    "today, until then": r"\btoday(?:'s)?\b|\buntil then\b|\bthe first version\b|\ban earlier form\b",
    "of one's own": r"\bof one's own\b",
}
PATTERNS = {name: re.compile(pattern, re.I) for name, pattern in WORDS.items()}
REPEATS = "repeats its name"
CODE = re.compile(r"^ *```.*?^ *```$", re.M | re.S)
FILLERS = frozenset(
    re.findall(
        r"\w+", "a an the of and to in its it this that for from with by on as is are one all"
    )
)


@dataclass(frozen=True)
class Place:
    """One hit: `line` counts from 1."""

    path: Path
    line: int
    pattern: str
    text: str


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file that a person reads as prose, with their numbers."""
    text = path.read_text("utf-8")
    if path.suffix == ".md":
        text = CODE.sub(lambda block: "\n" * block[0].count("\n"), text)
    if path.suffix != ".py":
        yield from enumerate(text.splitlines(), 1)
        return
    wanted = (
        tokenize.STRING,
        tokenize.COMMENT,
        getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING),
    )
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in wanted and (
            " " in token.string.strip("\"'") or token.type == tokenize.COMMENT
        ):
            yield from enumerate(token.string.splitlines(), token.start[0])


def repeats_its_name(name: str, docstring: str) -> bool:
    """Is a docstring of one sentence made of the words of the name alone?"""
    words = [word for word in re.findall(r"[a-z]+", docstring.lower()) if word not in FILLERS]
    known = {stem(word) for word in re.findall(r"[A-Z]?[a-z]+", name)}
    return bool(words) and docstring.count(".") <= 1 and all(stem(word) in known for word in words)


def stem(word: str) -> str:
    return re.sub(r"(?:ies|ing|ed|es|s|y)$", "", word.lower())


def find_repeats(path: Path) -> Iterator[Place]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            docstring = ast.get_docstring(node)
            if docstring and repeats_its_name(node.name, docstring):
                yield Place(path, node.lineno, REPEATS, f"{node.name}: {docstring}")


def find(path: Path) -> Iterator[Place]:
    """Yield every hit of every pattern in a file."""
    for number, line in read_lines(path):
        for name, pattern in PATTERNS.items():
            for _ in pattern.finditer(line):
                yield Place(path, number, name, line.strip())
    if path.suffix == ".py":
        yield from find_repeats(path)


def files_of(place: Path) -> list[Path]:
    if place.is_file():
        return [place]
    found = (path for path in sorted(place.rglob("*")) if path.suffix in (".md", ".py", ".yaml"))
    return [path for path in found if "__pycache__" not in path.parts]


def count(places: list[Path]) -> dict[str, Counter[str]]:
    """Count the hits of each pattern by place."""
    return {
        str(place): Counter(hit.pattern for path in files_of(place) for hit in find(path))
        for place in places
    }


def table(counts: dict[str, Counter[str]]) -> str:
    """Format counts as a Markdown table, one row per pattern."""
    names = [Path(name).name for name in counts]
    rows = [f"| pattern | {' | '.join(names)} | all |", "|---|" + "---:|" * (len(names) + 1)]
    for pattern in (*PATTERNS, REPEATS):
        found = [counted[pattern] for counted in counts.values()]
        rows.append(f"| {pattern} | {' | '.join(map(str, found))} | {sum(found)} |")
    totals = [sum(counted.values()) for counted in counts.values()]
    return "\n".join([*rows, f"| all | {' | '.join(map(str, totals))} | {sum(totals)} |"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "paths", nargs="*", type=Path, help="files and folders; by default all that a user reads"
    )
    parser.add_argument(
        "--places", action="store_true", help="print each place instead of the table"
    )
    parser.add_argument(
        "--only", nargs="+", choices=(*PATTERNS, REPEATS), help="count these patterns alone"
    )
    arguments = parser.parse_args()
    paths = arguments.paths or [ROOT / name for name in FOLDERS]
    if not arguments.places:
        print(table(count(paths)))
        return
    for place in (hit for path in paths for file in files_of(path) for hit in find(file)):
        if arguments.only is None or place.pattern in arguments.only:
            print(f"{place.path}:{place.line}: [{place.pattern}] {place.text}")


if __name__ == "__main__":
    main()
