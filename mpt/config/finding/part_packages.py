"""Part packages: folders with the layout of `mpt` itself, each file in them one part.

`mpt` is one; the systems inside it (`mpt/systems/NAME`) are others. From outside come folders that the user names, by
`--parts DIR` on the command line or in the environment variable `MPT_PARTS`, and installed distributions that announce
a package in the entry-point group `mpt.parts`. A YAML file can name a part of these packages but never add a package.

The environment variable is the only state: `use_parts` writes the folders of `--parts` to it, so that planning
processes, compared runs and data workers know the same parts. Nothing here imports a part.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from mpt.errors import PartError

VARIABLE = "MPT_PARTS"
GROUP = "mpt.parts"
IMPORT_HOME = "mpt.parts"
"""The package that folders are imported below: `my-parts/nn/net.py` is the module `mpt.parts.my_parts.nn.net`."""
KINDS = {
    "nn": "model",
    "tasks": "task",
    "data": "data set",
    "losses": "loss",
    "metrics": "metric",
    "optim": "optimizer",
    "precision": "precision mode",
    "memory": "memory trick",
    "commands": "command",
}
"""A part package's folder -> the kind of its files."""
PART_FOLDERS = tuple(KINDS)


@dataclass(frozen=True)
class PartPackage:
    """A folder with the layout of `mpt` itself: `nn/ tasks/ data/ ...`, each file one part."""

    folder: Path
    module_name: str
    """How its parts are imported: `mpt`, `mpt.systems.NAME`, `mpt.parts.my_parts`, `installed_package`."""
    outside: bool = False
    """Is it no part of mpt?"""
    distribution: str | None = None
    """Name and version of the installed distribution that brings it."""

    @property
    def name(self) -> str:
        """The last part of its module name."""
        return self.module_name.rpartition(".")[2]

    @property
    def origin(self) -> str:
        """Its origin, for people."""
        return self.distribution or str(self.folder)

    def paths(self, subpackage: str) -> list[Path]:
        """Return the files of a subpackage, sorted."""
        folder = self.folder / subpackage
        try:
            return [*_parts_in(folder, folder.stat().st_mtime_ns)]
        except OSError:  # a package without such parts
            return []


@lru_cache(1024)
def _parts_in(folder: Path, changed: int) -> list[Path]:
    """Return the files of parts in a folder, sorted; `changed` is the time of its last change.

    A search for recipes asks thousands of times.
    """
    return sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))


def packages_below(folder: Path, module_name: str) -> list[PartPackage]:
    """Return a package and the systems inside it."""
    systems = sorted(path.parent for path in (folder / "systems").glob("*/__init__.py"))
    return [
        PartPackage(folder, module_name),
        *(PartPackage(system, f"{module_name}.systems.{system.name}") for system in systems),
    ]


def use_parts(folders: Iterable[str | Path] = ()) -> None:
    """Add folders to those that `MPT_PARTS` names, for this process and all that it starts.

    Raises PartError for a folder that is none, or that holds no subpackage of parts.
    """
    known = _named(os.environ.get(VARIABLE, ""))
    added = [_absolute(folder) for folder in folders]
    for folder in added:
        _check_folder(folder, "--parts")
        if os.pathsep in folder:
            raise PartError(
                f"--parts: {folder} has a {os.pathsep!r} in its name, which {VARIABLE} cannot hold"
            )
    everything = list(dict.fromkeys([*known, *added]))
    if everything:
        os.environ[VARIABLE] = os.pathsep.join(everything)


def outside_packages() -> Sequence[PartPackage]:
    """Return the part packages from outside of mpt: installed ones, then the folders of `MPT_PARTS`."""
    return _outside_packages(os.environ.get(VARIABLE, ""))


@cache
def _outside_packages(value: str) -> Sequence[PartPackage]:
    packages = list(_installed_packages())
    taken = {package.folder for package in packages}
    names: dict[str, int] = {}
    for written in _named(value):
        _check_folder(written, VARIABLE)
        folder = Path(written)
        if folder in taken:
            continue
        taken.add(folder)
        name = package_name(folder)
        names[name] = names.get(name, 0) + 1
        suffix = "" if names[name] == 1 else f"_{names[name]}"
        packages.append(PartPackage(folder, f"{IMPORT_HOME}.{name}{suffix}", outside=True))
    return packages


def package_name(folder: Path) -> str:
    """Return the name that a folder's parts are imported by and its commands called by."""
    name = re.sub(r"\W", "_", folder.resolve().name) or "_"
    return f"_{name}" if name[0].isdigit() else name


@cache
def _installed_packages() -> Sequence[PartPackage]:
    """Return the packages announced by installed distributions. One that does not exist is skipped."""
    found: dict[Path, PartPackage] = {}
    for entry in metadata.entry_points(group=GROUP):
        folder = _folder_of_module(entry.value)
        if folder is not None:
            label = f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.name
            found.setdefault(
                folder, PartPackage(folder, entry.value, outside=True, distribution=label)
            )
    return sorted(found.values(), key=lambda package: package.module_name)


def _folder_of_module(module_name: str) -> Path | None:
    """Return a package's folder without importing it."""
    first, *rest = module_name.split(".")
    try:
        spec = find_spec(first)
    except (ImportError, ValueError):
        return None
    for location in (spec and spec.submodule_search_locations) or ():
        folder = Path(location, *rest).resolve()
        if folder.is_dir():
            return folder
    return None


def _named(value: str) -> list[str]:
    return list(dict.fromkeys(_absolute(folder) for folder in value.split(os.pathsep) if folder))


def _absolute(folder: str | Path) -> str:
    return str(Path(folder).expanduser().resolve())


def _check_folder(folder: str, source: str) -> None:
    path = Path(folder)
    if not path.is_dir():
        raise PartError(
            f"{source}: there is no folder {folder}; a folder of parts holds {'/, '.join(PART_FOLDERS[:3])}/ and others"
        )
    if not any((path / subpackage).is_dir() for subpackage in PART_FOLDERS):
        above = f"; did you mean {path.parent}?" if path.name in PART_FOLDERS else ""
        raise PartError(
            f"{source}: {folder} has none of the folders {', '.join(PART_FOLDERS)}{above}"
        )
