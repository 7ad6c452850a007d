"""Which parts from outside of mpt a run used, kept in its folder as `parts.json`: every file that was imported from a
part package, with its hash.

So a resume can say that a part is another than the checkpoint's, and inference that one is not here. The package's
place may change: it is known by its name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpt.config.finding.part_packages import PartPackage, outside_packages
from mpt.errors import ConfigError, PartError
from mpt.foreign.files import LARGEST_SOURCE_BYTES, read_bytes, read_json
from mpt.run.process.files import write_atomically


def used_parts() -> list[dict[str, Any]]:
    """Return the part packages from outside that this process has imported from, each with its files and their
    hashes.
    """
    found = []
    for package in outside_packages():
        files = imported_files(package)
        if files:
            found.append(
                {
                    "name": package.name,
                    "folder": str(package.folder),
                    "distribution": package.distribution,
                    "files": {file: hash_of(package.folder / file) for file in files},
                }
            )
    return found


def imported_files(package: PartPackage) -> list[str]:
    """Return the package's files that are imported by now, relative to its folder."""
    prefix = f"{package.module_name}."
    modules = [module for name, module in list(sys.modules.items()) if name.startswith(prefix)]
    paths = {Path(file) for module in modules if (file := getattr(module, "__file__", None))}
    return sorted(
        path.relative_to(package.folder).as_posix()
        for path in paths
        if path.is_relative_to(package.folder)
    )


def hash_of(path: Path) -> str | None:
    """Return a file's SHA-256, None if it cannot be read."""
    try:
        return hashlib.sha256(read_bytes(path, LARGEST_SOURCE_BYTES)).hexdigest()
    except OSError:
        return None


def write_used_parts(path: Path) -> None:
    """Write what this process uses; a run without parts from outside has no such file. Raises InputOutputError."""
    found = used_parts()
    if found:
        write_atomically(path, json.dumps(found, indent=1) + "\n")
    else:
        path.unlink(missing_ok=True)


def read_used_parts(path: Path) -> list[dict[str, Any]]:
    """Return the content; nothing if it is not there or damaged."""
    try:
        found = read_json(path)
        return [
            one for one in found if isinstance(one["name"], str) and isinstance(one["files"], dict)
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def changed_parts(path: Path) -> list[str]:
    """Return the files of parts that are not as a run's record says, `my_parts/nn/net.py`."""
    here = {package.name: package for package in outside_packages()}
    changed = []
    for one in read_used_parts(path):
        package = here.get(one["name"])
        for file, recorded in one["files"].items():
            if package is None or hash_of(package.folder / file) != recorded:
                changed.append(f"{one['name']}/{file}")
    return changed


@contextlib.contextmanager
def missing_parts_explained(folder: Path) -> Iterator[None]:
    """Within the block, say of a configuration that is not understood which of its run's parts are not here.

    Raises PartError instead of ConfigError if that is the reason.
    """
    try:
        yield
    except ConfigError as error:
        here = {package.name for package in outside_packages()}
        missing = [one for one in read_used_parts(folder / "parts.json") if one["name"] not in here]
        if not missing or isinstance(error, PartError):
            raise
        what = ", ".join(f"{one['name']} ({', '.join(sorted(one['files']))})" for one in missing)
        cures = [
            f"install {one['distribution']}"
            if one.get("distribution")
            else f"add --parts {one.get('folder')}"
            for one in missing
        ]
        raise PartError(
            f"{folder}: the run was made with parts that are not here: {what}; {' and '.join(cures)}"
        ) from error
