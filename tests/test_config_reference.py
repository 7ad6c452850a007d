"""docs/reference/settings.md says what the plugins say now, and every setting has a row of its own."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

import pytest
import yaml
from pydantic import Field

from mpt.config.finding.registry import INSTALLED, SUBPACKAGES
from mpt.config.json_schema import read_notes_of_schema
from mpt.config.load import load_config
from mpt.config.options import Options
from mpt.config.schema import GeneralOptions, MemoryOptions, Parallel, Train

ROOT = Path(__file__).parent.parent
EXTERNAL = {"nn": ["torchvision:any"]}


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "config_reference", ROOT / "scripts" / "documents" / "config_reference.py"
    )
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page(reference: ModuleType) -> str:
    written: str = reference.write_page()
    return written


def test_every_generated_page_is_up_to_date(reference: ModuleType) -> None:
    pages = reference.write_all()
    old = [
        str(path.relative_to(ROOT))
        for path, text in pages.items()
        if path.read_text("utf-8") != text
    ]
    assert old == [], "run python scripts/documents/config_reference.py"


def test_the_reference_configuration_has_every_setting_and_only_true_defaults() -> None:
    text = (ROOT / "configs" / "reference.yaml").read_text("utf-8")
    bare = "\n".join(
        re.sub(r"^# ", "", line)
        for line in text.splitlines()
        if not re.match(r"^# *#|^# ---", line)
    )
    for subpackage in SUBPACKAGES:
        for name in INSTALLED.names(subpackage):
            plugin = INSTALLED.find(subpackage, name)
            assert plugin
            assert all(
                re.search(rf"^ *{key}:", bare, re.M) for key in plugin.settings_class.model_fields
            ), name
    general = bare[bare.index("\ntrain:\n  steps:") :].partition("\nparallel:")[0]
    known = load_config({"model": "small_cnn"}).train.model_dump()
    assert yaml.safe_load(general)["train"]["batch_size"] == known["batch_size"]
    assert set(yaml.safe_load(general)["train"]) == set(known)


def test_every_card_says_what_the_part_is_and_links_to_its_settings() -> None:
    settings = (ROOT / "docs" / "reference" / "settings.md").read_text("utf-8")
    for page in sorted((ROOT / "docs" / "reference" / "cards").glob("*.md")):
        for card in page.read_text("utf-8").split("\n## ")[1:]:
            heading, _, rest = card.partition("\n")
            assert len(rest.split()) > 10, heading
            if page.stem != "systems":
                assert f"### {heading}\n" in settings


@pytest.mark.parametrize("subpackage", SUBPACKAGES)
def test_every_name_and_every_setting_is_on_the_page(page: str, subpackage: str) -> None:
    for name in INSTALLED.names(subpackage):
        plugin = INSTALLED.find(subpackage, name)
        assert plugin
        assert f"`{name}`" in page
        assert all(f"| `{key}` |" in page for key in plugin.settings_class.model_fields)


@pytest.mark.parametrize("subpackage", SUBPACKAGES)
def test_every_setting_has_a_description(subpackage: str) -> None:
    plugins = [
        INSTALLED.find(subpackage, name)
        for name in [*INSTALLED.names(subpackage), *EXTERNAL.get(subpackage, [])]
    ]
    silent = {
        f"{plugin.path.name}: {key}"
        for plugin in plugins
        if plugin
        for key in plugin.settings_class.model_fields
        if not plugin.notes.get(key)
    }
    assert not silent, f"write one line below each of these fields: {sorted(silent)}"


def test_every_general_setting_has_a_description_and_a_row_of_the_page(page: str) -> None:
    notes = read_notes_of_schema()
    keys = [
        key
        for kind in (GeneralOptions, MemoryOptions, Parallel, Train)
        for key in kind.model_fields
    ]
    assert [key for key in keys if key not in notes] == []
    assert [key for key in keys if f"| `{key}` |" not in page] == []


def test_kinds_limits_and_defaults_are_said_in_words(reference: ModuleType) -> None:
    class Example(Options):
        count: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
        share: float = Field(gt=0, lt=1)
        names: list[str] = Field(default_factory=list)
        flag: bool | None = None

    rows = reference.table(Example, {}, {"share": "one | other"}).splitlines()[2:]
    assert rows == [
        "| `count` | a whole number ≥ 1 or `auto` | `auto` |  |",
        "| `share` | a number > 0 and < 1 | `required` | one \\| other |",
        "| `names` | a list: text | `[]` |  |",
        "| `flag` | true or false or null | `null` |  |",
    ]
