"""A part from outside that imports a module of mpt from where it lay is told its present place in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpt.config.finding.moved import moved_to
from mpt.config.finding.part_packages import PartPackage
from mpt.config.finding.registry import Registry
from mpt.errors import PartError

pytestmark = pytest.mark.tier("fast")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("mpt.precision.policy", "mpt.precision.shared.policy"),
        ("mpt.data.in_memory", "mpt.data.pictures.in_memory"),
        ("mpt.engine.step", "mpt.engine.step.step"),
        ("mpt.doctor.numerics", "mpt.doctor.numerics.numerics"),
        ("mpt.report.page", "mpt.report.run_page.page"),
        ("mpt.config.finding.registry", "mpt.config.finding.registry"),
        ("mpt.task", "mpt.seams.task"),
        ("mpt.config.patch_origin", "mpt.planner.recipes.patch_origin"),
        ("mpt.run.weights", "mpt.weights"),
        ("mpt.nothing.of_this", None),
        ("torch.nn", None),
        ("no_such_package", None),
    ],
)
def test_a_moved_module_is_found_by_its_name(old: str, new: str | None) -> None:
    assert moved_to(old) == new


@pytest.mark.parametrize(
    ("folder", "source", "answer"),
    [
        (
            "nn",
            "from mpt.config.options import ModelOptions\nfrom mpt.precision.policy import Policy\n"
            "class Settings(ModelOptions):\n    pass\n",
            "mpt.precision.policy is mpt.precision.shared.policy now: change the import",
        ),
        (
            "nn",
            "from mpt.config.options import ModelOptions\nfrom mpt.engine.step import update\n"
            "class Settings(ModelOptions):\n    pass\n",
            "mpt.engine.step is mpt.engine.step.step now: change the import",
        ),
    ],
)
def test_a_part_with_an_import_of_before_gets_the_new_one_in_one_line(
    tmp_path: Path, folder: str, source: str, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "old_parts"
    (package / folder).mkdir(parents=True)
    (package / folder / "written_before.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    registry = Registry(
        tmp_path / "none", "none", lambda: [PartPackage(package, "old_parts", outside=True)]
    )
    plugin = registry.find(folder, "written_before")
    assert plugin is not None
    with pytest.raises(PartError, match=answer):
        plugin.load()


def test_a_command_that_imports_its_arguments_from_before_gets_the_new_place(
    tmp_path: Path,
) -> None:
    package = tmp_path / "old_parts"
    (package / "commands").mkdir(parents=True)
    (package / "commands" / "say.py").write_text(
        "from dataclasses import dataclass\nfrom mpt.commands.arguments import Config\n\n"
        "@dataclass(frozen=True)\nclass Command:\n    config: Config\n"
    )
    registry = Registry(outside=lambda: [PartPackage(package, "old_parts", outside=True)])
    assert "say" not in [part.name for part in registry.commands()]
    ((_, name, error),) = registry.wrong_commands()
    assert name == "say"
    assert "say.py:2: mpt.commands.arguments is mpt.commands.cli.arguments now" in str(error)
