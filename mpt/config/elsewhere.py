"""Where a name that mpt does not know may be found: torchvision's and timm's models, part packages not yet named.

Only looked at when a configuration is refused. Packages are read as text, not imported: torch would be imported with
them.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from mpt.config.part_packages import VARIABLE

SOURCES = ("torchvision", "timm")
REGISTERED = re.compile(r"^@register_model\b[^\n]*\n(?:@[^\n]*\n)*def (\w+)\(", re.MULTILINE)


def models_elsewhere(name: str) -> str | None:
    """Return the full names of torchvision's and timm's models of this name, or None."""
    found = [f"{package}:{name}" for package in SOURCES if name in model_names(package)]
    return " or ".join(found) or None


def model_names(package: str) -> set[str]:
    """Return the names of the models that an installed package registers; none where it is not installed."""
    if not re.fullmatch(r"\w+", package) or (spec := find_spec(package)) is None:
        return set()
    folders = [Path(folder) / "models" for folder in spec.submodule_search_locations or []]
    names: set[str] = set()
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        try:
            names.update(REGISTERED.findall(path.read_text("utf-8", errors="replace")))
        except OSError:
            continue
    return names


def parts_hint(subpackage: str, name: str) -> str:
    """Return a hint at a folder of parts near by that has a file of this name, or the words for where parts come from.

    A folder of parts is found in the working directory and one level below it.
    """
    if not re.fullmatch(r"\w+", name):
        return ""
    for path in (Path(subpackage, f"{name}.py"), *sorted(Path().glob(f"*/{subpackage}/{name}.py"))):
        if path.is_file():
            return f"; {path} is there: add --parts {path.parent.parent}"
    return f". A part of your own is found with --parts DIR (a folder with {subpackage}/{name}.py) or {VARIABLE}"
