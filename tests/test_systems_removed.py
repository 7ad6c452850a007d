"""Nothing common needs a system: each can be taken out with its folder and its tests."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mpt.config.finding.registry import INSTALLED

ROOT = Path(__file__).parents[1]
SYSTEMS = sorted(
    path.name for path in (ROOT / "mpt" / "systems").iterdir() if (path / "__init__.py").is_file()
)
LOOKS = """
import contextlib, io, sys
from mpt.cli import main
for words in (["--help"], ["list"], ["list", "configs"], ["schema"], ["infer", "--help"],
              ["validate", "@classify_digits"], ["init", "new.yaml", "--model", "small_cnn"]):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            main(words)
        except SystemExit as end:
            assert not end.code, (words, said.getvalue())
assert "torch" not in sys.modules
"""
"""What a user looks at first."""
IMPORTS = """
from mpt.cli import main
from mpt.config.finding.registry import INSTALLED, SUBPACKAGES
for subpackage in SUBPACKAGES:
    for name in INSTALLED.names(subpackage):
        INSTALLED.find(subpackage, name).load()
main(["train", "configs/classify_digits.yaml", "--dry-run"])
"""
"""The import of every part that is left, and a training that is built."""


def parts_of(system: str) -> dict[str, set[str]]:
    """Return the names by which a system's parts are chosen in YAML, by folder."""
    home = ROOT / "mpt" / "systems" / system
    found: dict[str, set[str]] = {}
    for folder in ("nn", "tasks", "data", "optim"):
        for name in INSTALLED.names(folder):
            plugin = INSTALLED.find(folder, name)
            if plugin is not None and plugin.path.is_relative_to(home):
                found.setdefault(folder, set()).add(name)
    return found


def copy_without(systems: Sequence[str], to: Path, tests: bool = False) -> Path:
    """Copy the repository's code and configurations, and its tests if asked for, but for the systems' own."""
    for folder in ("mpt", "configs", *(("tests", "docs", "scripts") if tests else ())):
        shutil.copytree(ROOT / folder, to / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file() and tests:
            shutil.copy(path, to / path.name)
    for system in systems:
        for home in ("mpt", *(("tests",) if tests else ())):
            shutil.rmtree(to / home / "systems" / system)
    return to


def run_in(folder: Path, *words: str, timeout: int) -> subprocess.CompletedProcess[str]:
    """Run Python in a copy, whose packages come before the installed ones."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, *words]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def test_there_are_systems_and_their_parts_are_found() -> None:
    assert len(SYSTEMS) >= 4
    assert all(parts_of(system).get("nn") and parts_of(system).get("tasks") for system in SYSTEMS)


def test_no_common_file_names_a_system() -> None:
    """Names of folders anywhere, docstrings included; names of parts as whole strings, but for words of others."""
    # A function of torch, a command of other programs, a library whose adapter files are written, a generator's noise.
    words_of_others = {"interpolate", "detect", "diffusers", "latents"}
    parts = {
        name for system in SYSTEMS for names in parts_of(system).values() for name in names
    } - words_of_others
    wrong = []
    for path in sorted((ROOT / "mpt").rglob("*.py")):
        if path.is_relative_to(ROOT / "mpt" / "systems"):
            continue
        source = path.read_text("utf-8")
        # Not behind a hyphen: "stable-diffusion" in an address is another's name.
        wrong += [
            f"{path.name}: {word}"
            for word in re.findall(rf"(?<!-)\b(?:{'|'.join(SYSTEMS)})\b", source)
        ]
        strings = {
            node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)
        }
        wrong += [
            f"{path.name}: {name!r}"
            for name in sorted(parts & {one for one in strings if isinstance(one, str)})
        ]
    assert not wrong


@pytest.mark.parametrize(
    "system", [SYSTEMS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in SYSTEMS[1:])]
)
def test_without_a_system_the_command_line_finds_all_else(system: str, tmp_path: Path) -> None:
    done = run_in(copy_without([system], tmp_path), "-W", "ignore", "-c", LOOKS, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("system", SYSTEMS)
def test_no_file_outside_of_a_system_imports_it(system: str) -> None:
    home = ROOT / "mpt" / "systems" / system
    outside = [path for path in (ROOT / "mpt").rglob("*.py") if not path.is_relative_to(home)]
    assert len(outside) > 300
    assert not [path.name for path in outside if f"mpt.systems.{system}" in path.read_text("utf-8")]


def test_without_any_system_all_parts_are_imported_and_a_training_is_built(tmp_path: Path) -> None:
    done = run_in(copy_without(SYSTEMS, tmp_path), "-W", "ignore", "-c", IMPORTS, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "dry run: everything builds" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(960)
@pytest.mark.parametrize("system", SYSTEMS)
def test_without_a_system_the_fast_tier_of_all_else_passes(system: str, tmp_path: Path) -> None:
    """Tests of common code that try it on a system's parts go with the system."""
    copy = copy_without([system], tmp_path, tests=True)
    names = {system, *(name for names in parts_of(system).values() for name in names)} - {
        "interpolate",
        "detect",
    }
    word = re.compile(rf"\b(?:{'|'.join(sorted(names))})")
    beside = [
        path for path in (copy / "tests").rglob("test_*.py") if word.search(path.read_text("utf-8"))
    ]
    ignored = [f"--ignore={path}" for path in (*beside, copy / "tests" / "test_systems_removed.py")]
    done = run_in(copy, "-m", "pytest", "-q", "-m", "fast", *ignored, "tests", timeout=900)
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"[0-9]{3,} passed", done.stdout), done.stdout[-300:]
