"""The table of docs/explanation/architecture.md lists everything that mpt asks of a part's file."""

from __future__ import annotations

import ast
import inspect
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import pytest

from mpt.config.finding.part_source import LITERALS
from mpt.config.finding.registry import INSTALLED, SUBPACKAGES

pytestmark = pytest.mark.tier("fast")

ROOT = Path(__file__).parents[2]
ASKED = re.compile(r'\.optional\(\s*"(\w+)"|literals\.get\("(\w+)"')
ROW = re.compile(r"^\| ((?:`\w+/`,? ?)+)\| ((?:`[^`]+`,? ?)+)\|", re.M)
KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(
        ("CONFLICTS", "POINTLESS_ON", "ENVIRONMENT", "EMA", "MOVED", "NAMES", "ABOUT"), dict
    ),
    **dict.fromkeys(
        ("PROPOSALS", "NEEDS_BFLOAT16", "SCALED", "DIALS", "PATHS", "INFER_OPTIONS"), tuple
    ),
    **dict.fromkeys(("SHARDED", "LOSSY", "IN_PARTS", "HOLDS_FLOAT32"), bool),
    **dict.fromkeys(("TASK", "RELIEVES", "DATASET"), str),
    **dict.fromkeys(("RANK", "TEST_SAMPLES"), int),
    "LADDER": (str, int, float, bool),
}
"""The type of what each name holds."""


def table() -> dict[str, dict[str, str]]:
    """Return folder -> name -> the name as it stands in the table, with parameters where it is a function."""
    text = (ROOT / "docs" / "explanation" / "architecture.md").read_text("utf-8")
    text = text[text.index("## Further declarations of a part's file") :]
    found: dict[str, dict[str, str]] = {}
    for folders, names in ROW.findall(text[: text.index("\n## ", 5)]):
        for folder in re.findall(r"`(\w+)/`", folders):
            own = re.findall(r"`([^`]+)`", names)
            found.setdefault(folder, {}).update({one.partition("(")[0]: one for one in own})
    return found


TABLE = table()


def test_everything_that_is_asked_of_a_part_is_in_the_table_and_nothing_else() -> None:
    sources = [path.read_text("utf-8") for path in (ROOT / "mpt").rglob("*.py")]
    asked = {one or other for source in sources for one, other in ASKED.findall(source)}
    named = {name for names in TABLE.values() for name in names}
    assert asked == named - {"NAMES"}
    assert set(LITERALS) == {name for name in named if name.isupper()} - {"TEST_SAMPLES"}, (
        "read without an import"
    )


@pytest.mark.parametrize("folder", SUBPACKAGES)
def test_parts_declare_what_the_table_has_for_their_folder_in_the_right_form(folder: str) -> None:
    allowed = TABLE[folder]
    paths = {
        plugin.path: plugin
        for name in INSTALLED.names(folder)
        if (plugin := INSTALLED.find(folder, name))
    }
    for path, plugin in paths.items():
        tree = ast.parse(path.read_text("utf-8"))
        functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
        for name, value in plugin.literals.items():
            assert name in allowed, f"{path}: {name} is not asked of {folder}/"
            assert isinstance(value, KINDS[name]), f"{path}: {name} is {value!r}"
        for name, node in functions.items():
            if name in allowed:
                parameters = [argument.arg for argument in node.args.args]
                assert allowed[name] == f"{name}({', '.join(parameters)})", path
            near = get_close_matches(name, allowed, 1, 0.85)
            assert name in allowed or not near, f"{path}: is {name} meant to be {near}?"


def test_a_model_of_another_package_declares_the_same() -> None:
    plugin: Any = INSTALLED.find("nn", "torchvision:resnet18")
    function = plugin.member("published_scaling")
    assert (
        f"published_scaling({', '.join(inspect.signature(function).parameters)})"
        == TABLE["nn"]["published_scaling"]
    )
