"""The list of mutations fits the code, and the nearest tests are chosen for each."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.mutations import ROOT, Mutation, MutationError, Result, check_list, page_of, read_list
from scripts.mutations_run import doubled
from scripts.mutations_tests import TestsOf

pytestmark = pytest.mark.tier("fast")


def test_every_text_of_the_list_occurs_once_in_its_file() -> None:
    mutations = read_list()
    assert len(mutations) >= 120
    assert check_list(mutations) == []
    assert [one.text for one in mutations if bool(one.why) == bool(one.equivalent)] == []


def test_a_text_that_has_moved_or_is_there_twice_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 1\n")
    moved, twice, fits = (
        Mutation("a.py", "z", "w", "-"),
        Mutation("a.py", "1", "2", "-"),
        Mutation("a.py", "y", "z", "-"),
    )
    found = check_list([moved, twice, fits, Mutation("b.py", "x", "y", "-", ("test_b.py",))], tmp_path)
    assert found[:2] == ["a.py: 'z' occurs 0 times; it must occur once", "a.py: '1' occurs 2 times; it must occur once"]
    assert "b.py" in found[2]
    assert found[3:] == ["b.py: test_b.py is gone"]
    assert (fits.apply("x = 1\ny = 1\n"), fits.line("x = 1\ny = 1\n")) == ("x = 1\nz = 1\n", 2)
    with pytest.raises(MutationError, match="is not changed"):
        Mutation("a.py", "y", "y", "-").apply("y")


def test_the_tests_that_reach_a_file_come_nearest_first(tmp_path: Path) -> None:
    sources = {
        "mpt/memory/trick.py": "",
        "mpt/engine/user.py": "from mpt.memory.trick import build",
        "tests/memory/test_trick.py": "",
        "tests/memory/test_names_it.py": "SETTINGS = {'trick': True}",
        "tests/engine/test_user.py": "from mpt.engine import user",
        "tests/engine/test_other.py": "import json",
        "tests/test_architecture.py": "from mpt.memory import trick",
        "scripts/x.py": "",
    }
    for name, text in sources.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    near = ["tests/memory/test_trick.py", "tests/memory/test_names_it.py", "tests/engine/test_user.py"]
    assert TestsOf(tmp_path).nearest("mpt/memory/trick.py") == near
    assert list(doubled(list("abcdefg"))) == [["a"], ["b", "c"], ["d", "e", "f", "g"]]


def test_a_result_holds_while_its_files_are_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x")
    result = Result("killed", "test_a.py::test", hashes={"a.py": "2d711642b726b044"})  # sha256("x")
    assert result.holds(tmp_path)
    (tmp_path / "a.py").write_text("y")
    assert not result.holds(tmp_path)


def test_the_page_has_every_mutation_once_under_what_became_of_it() -> None:
    one, two, three = (
        Mutation("scripts/mutations.yaml", text, "-", f"why {text}")
        for text in ("# Small", "by file", "are run before")
    )
    equal = Mutation("scripts/mutations.yaml", "a user would meet", "-", "", (), "nothing reads it")
    results = {one.name: Result("killed", "tests/a.py::test_b"), two.name: Result("survived", tests=7, complete=False)}
    page = page_of([one, two, equal, three], results, "python x.py", ROOT).split("## ")
    assert [part.split("\n")[0] for part in page[1:]] == ["Survived", "Equivalent", "Killed", "Not run"]
    assert "**4 mutations: 1 killed, 1 survived, 1 equivalent, 1 not run**" in page[0]
    assert "| why by file | 7 (time limit) |" in page[1]
    assert "nothing reads it" in page[2]
    assert "`# Small` → `-` | why # Small | `a.py::test_b` |" in page[3]
