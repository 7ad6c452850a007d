"""The list of mutations fits the code, and the nearest tests are chosen for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.mutations.mutations import (
    PATTERNS,
    ROOT,
    Mutation,
    MutationError,
    Result,
    check_list,
    is_there,
    killers_of,
    page_of,
    read_list,
)
from scripts.mutations.mutations_run import doubled
from scripts.mutations.mutations_swap import changed_functions, swap
from scripts.mutations.mutations_tests import TestsOf

pytestmark = pytest.mark.tier("fast")


def test_every_text_of_the_list_occurs_once_in_its_file() -> None:
    mutations = read_list()
    assert len(mutations) >= 120
    assert check_list(mutations) == []
    assert [one.text for one in mutations if bool(one.why) == bool(one.equivalent)] == []
    assert {one.kind for one in mutations} == set(PATTERNS)


def test_mutations_of_a_system_go_with_it_and_a_missing_file_of_one_that_is_there_is_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "mpt" / "systems" / "here").mkdir(parents=True)
    gone, missing = (Mutation(f"mpt/systems/{one}/a.py", "z", "w", "-") for one in ("gone", "here"))
    (said,) = check_list([gone, missing], tmp_path)
    assert "systems/here/a.py" in said


def test_a_text_that_has_moved_or_is_there_twice_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 1\n")
    moved, twice, fits = (
        Mutation("a.py", "z", "w", "-"),
        Mutation("a.py", "1", "2", "-"),
        Mutation("a.py", "y", "z", "-"),
    )
    found = check_list(
        [moved, twice, fits, Mutation("b.py", "x", "y", "-", ("test_b.py",))], tmp_path
    )
    assert found[:2] == [
        "a.py: 'z' occurs 0 times; it must occur once",
        "a.py: '1' occurs 2 times; it must occur once",
    ]
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
    near = [
        "tests/memory/test_trick.py",
        "tests/memory/test_names_it.py",
        "tests/engine/test_user.py",
    ]
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
        Mutation("scripts/mutations/mutations.yaml", text, "-", f"why {text}")
        for text in ("# Small", "by file", "are run before")
    )
    equal = Mutation(
        "scripts/mutations/mutations.yaml", "a user would meet", "-", "", (), "nothing reads it"
    )
    results = {
        one.name: Result("killed", "tests/a.py::test_b"),
        two.name: Result("survived", tests=7, complete=False),
    }
    page = page_of([one, two, equal, three], results, "python x.py", ROOT).split("## ")
    assert [part.split("\n")[0] for part in page[1:]] == [
        "Survived",
        "Equivalent",
        "Killed",
        "Not run",
    ]
    assert "**4 mutations: 1 killed, 1 survived, 1 equivalent, 1 not run**" in page[0]
    assert "| why by file | 7 (time limit) |" in page[1]
    assert "nothing reads it" in page[2]
    assert "`# Small` → `-` | why # Small | `a.py::test_b` |" in page[3]
    assert killers_of("## " + "## ".join(page)) == {
        ("scripts/mutations/mutations.yaml", "`# Small` → `-`"): "tests/a.py::test_b"
    }
    assert f"| {PATTERNS['number']} | 1 | 1 | 1 | 1 |" in page[0]


def test_a_killer_of_an_earlier_page_is_only_run_while_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test_one() -> None: ...")
    names = ["test_a.py", "test_a.py::test_one[2-x]", "test_a.py::test_two", "test_b.py", ""]
    assert [is_there(name, tmp_path) for name in names] == [True, True, False, False, False]


SOURCE = """
LIMIT = 3

class Box:
    size = 1

    def grown(self, by=2):
        return self.size + by

def outer():
    def inner(value):
        return value < LIMIT
    return inner
"""


@pytest.mark.parametrize(
    "change", [("LIMIT = 3", "LIMIT = 4"), ("size = 1", "size = 2"), ("by=2", "by=3")]
)
def test_what_others_may_have_copied_needs_a_new_import(change: tuple[str, str]) -> None:
    assert changed_functions(SOURCE, SOURCE.replace(*change), "a.py") is None


def test_functions_that_are_held_already_get_the_mutated_code() -> None:
    held: dict[str, Any] = {}
    exec(compile(SOURCE, "a.py", "exec", dont_inherit=True), held)
    box, inner = held["Box"]().grown, held["outer"]()
    changes = changed_functions(SOURCE, SOURCE.replace("value < LIMIT", "value <= LIMIT"), "a.py")
    assert changes is not None
    assert (inner(3), swap(changes), inner(3), held["outer"]()(3)) == (False, 2, True, True)
    changes = changed_functions(SOURCE, SOURCE.replace("self.size + by", "self.size - by"), "a.py")
    assert changes is not None
    assert (box(), swap(changes), box()) == (3, 1, -1)
