"""`mpt init --part KIND NAME`: a part that works, its configuration and its test, to be changed into one's own.

The texts are in `skeletons/`, one per kind. Torch is not imported, no file overwritten.
"""

from __future__ import annotations

import keyword
from collections.abc import Collection
from importlib import resources
from pathlib import Path

from mpt.config.finding.part_packages import KINDS, outside_packages, package_name
from mpt.config.finding.registry import FUNCTIONS, INSTALLED, SUBPACKAGES, WITHOUT_FILE
from mpt.config.text.messages import unknown_name
from mpt.errors import ConfigError
from mpt.run.process.files import failures_explained

SHORT = {"data set": "dataset", "precision mode": "precision", "memory trick": "trick"}
SUBPACKAGE_OF = {SHORT.get(kind, kind): folder for folder, kind in KINDS.items()}
"""Value of `--part` -> its folder."""
SECTIONS = {
    "nn": "model: @NAME@",
    "tasks": "model: small_cnn\ntask: @NAME@",
    "data": "model: small_cnn\ndataset: @NAME@",
    "losses": "model: small_cnn\ntask: {loss: @NAME@}",
    "metrics": "model: small_cnn\ntask: {metrics: [@NAME@]}",
    "optim": "model: small_cnn\noptimizer: @NAME@",
    "precision": "model: small_cnn\nprecision: @NAME@",
    "memory": "model: small_cnn\nmemory: {@NAME@: true}",
}
"""Subpackage -> the part of a configuration that uses it."""


def write_part(kind: str, name: str, into: str | None) -> list[Path]:
    """Write the skeleton of a part into a folder of parts and return the files.

    The folder is the one named, else the last of `--parts`, else `parts`. Raises ConfigError for an unknown kind, a
    name that is none, and files that are there; InputOutputError if nothing can be written.
    """
    if kind not in SUBPACKAGE_OF:
        raise ConfigError(f"--part: {unknown_name(kind, list(SUBPACKAGE_OF))}")
    if keyword.iskeyword(name):
        raise ConfigError(f"--part: found the name {name!r}, a word of Python; name it otherwise")
    if not name.isidentifier() or name.startswith("_"):
        raise ConfigError(
            f"--part: found the name {name!r}; allowed are letters, digits and '_', not beginning with a digit or '_'"
        )
    subpackage = SUBPACKAGE_OF[kind]
    folder = Path(into) if into else default_folder()
    texts = {Path(subpackage, f"{name}.py"): read_skeleton(subpackage)}
    if subpackage == "commands":
        texts[Path("tests", f"test_{name}.py")] = read_skeleton("test_commands")
    else:
        texts[Path("configs", f"{name}.yaml")] = read_skeleton("config")
        texts[Path("tests", f"test_{name}.py")] = read_skeleton("test")
    words = {
        "SECTION": SECTIONS.get(subpackage, ""),
        "CLASS": "".join(part.capitalize() for part in name.split("_")),
        "CONFIG": str(folder / "configs" / f"{name}.yaml"),
        "FOLDER": str(folder),
        "KIND": KINDS[subpackage],
        "PACKAGE": package_name(folder),
        "WORD": name.replace("_", "-"),
        "MODE": name,
        "NAME": name,
    }
    for path in texts:
        if (folder / path).exists():
            raise ConfigError(f"{folder / path}: is there already; choose another name")
    if name in names_taken(subpackage):
        raise ConfigError(f"--part: there is a {kind} named {name} already; choose another name")
    for path, text in texts.items():
        for word, value in words.items():
            text = text.replace(f"@{word}@", value)
        with failures_explained(folder / path):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, "utf-8")
    return [folder / path for path in texts]


def names_taken(subpackage: str) -> Collection[str]:
    """Return the names that parts of a kind have already; a command's may be another package's too."""
    if subpackage in SUBPACKAGES:
        return INSTALLED.names(subpackage)
    if subpackage in FUNCTIONS:
        return (*INSTALLED.functions(subpackage), *WITHOUT_FILE.get(subpackage, ()))
    return ()


def default_folder() -> Path:
    """Return the folder that `--parts` or `MPT_PARTS` named last, else `parts`."""
    named = [package.folder for package in outside_packages() if package.distribution is None]
    return named[-1] if named else Path("parts")


def read_skeleton(name: str) -> str:
    return (resources.files("mpt.commands") / "skeletons" / f"{name}.txt").read_text("utf-8")
