"""Which tests reach a file, nearest first, for `scripts/mutations/mutations.py`.

Read from the imports of all files: a test file that mirrors the mutated one is nearest, then those that import it, then
those that import what imports it. Parts are found by file name and imported by nobody, so a test that names a part
counts as one that imports it.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections import defaultdict
from pathlib import Path

FOLDERS = ("mpt", "tests", "scripts")
PART_FOLDERS = (
    "nn",
    "tasks",
    "data",
    "losses",
    "metrics",
    "optim",
    "precision",
    "memory",
    "commands",
)
LEFT_OUT = (
    "tests/scripts/test_mutations.py",  # would see that the text is gone
    "tests/test_architecture.py",  # rules about source text
    "tests/test_config_reference.py",  # a page that is generated from the defaults
    "tests/test_documents.py",
    "tests/test_matrix_of_versions.py",
    "tests/test_distribution.py",
    "tests/cuda_rehearsal/",  # compiles a device first
)
FARTHEST = 4
"""Imports between a test and the mutated file."""
SAME_FOLDER = 0.75
"""Imports that a folder in common makes up for."""


class TestsOf:
    """The import graph of a folder with `mpt`, `tests` and `scripts`."""

    __test__ = False

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = {
            path.relative_to(root).as_posix(): path.read_text("utf-8")
            for folder in FOLDERS
            for path in sorted((root / folder).rglob("*.py"))
        }
        self.tests = [
            name
            for name in self.files
            if Path(name).name.startswith("test_")
            and name.startswith("tests/")
            and not name.startswith(LEFT_OUT)
        ]

    @functools.cached_property
    def importers(self) -> dict[str, set[str]]:
        """File -> the files that import it."""
        found = defaultdict(set)
        for name, text in self.files.items():
            for module in imported_modules(text):
                if (file := self.file_of(module)) is not None and file != name:
                    found[file].add(name)
        return found

    def file_of(self, module: str) -> str | None:
        """Return the file of a dotted name, whose last word may be something in the file."""
        for name in (module, module.rpartition(".")[0]):
            path = name.replace(".", "/")
            for file in (f"{path}.py", f"{path}/__init__.py"):
                if file in self.files:
                    return file
        return None

    def nearest(self, file: str) -> list[str]:
        """Return the test files that reach a file, nearest first."""
        distances = dict.fromkeys((test for test in self.tests if mirrors(test, file)), 0)
        seen, ring = {file}, {file}
        for distance in range(1, FARTHEST + 1):
            ring = {one for name in ring for one in self.importers.get(name, ())} - seen
            if distance == 1:
                ring |= self.naming(file)
            seen |= ring
            for test in ring.intersection(self.tests):
                distances.setdefault(test, distance)

        def farness(test: str) -> tuple[float, str]:
            apart = (
                distances[test]
                - SAME_FOLDER * shared_folders(test, file)
                + test.startswith("tests/scripts/")
            )
            return (apart if distances[test] else -1.0), test

        return sorted(distances, key=farness)

    def naming(self, file: str) -> set[str]:
        """Return the tests that name a part."""
        path = Path(file)
        if path.parent.name not in PART_FOLDERS:
            return set()
        word = re.compile(rf"\b{path.stem}\b")
        return {test for test in self.tests if word.search(self.files[test])}


def imported_modules(text: str) -> set[str]:
    """Return the dotted names that a source imports, of `from` with each name in it."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in FOLDERS}


def mirrors(test: str, file: str) -> bool:
    """Return whether a test file has the mutated one's name, or that of its folder."""
    stem, name = Path(file).stem, Path(test).stem.removeprefix("test_")
    same_folder = Path(test).parent.parts[1:] == Path(file).parent.parts[1:]
    return same_folder and (name == stem or stem.startswith(name) or name.startswith(stem))


def shared_folders(test: str, file: str) -> int:
    """Return how many folders two paths have in common below `tests` and `mpt`."""
    pairs = zip(Path(test).parent.parts[1:], Path(file).parent.parts[1:])
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
