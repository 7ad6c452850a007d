"""Copies of the parts from outside that a run used, in its folder: `parts/NAME/nn/net.py`.

With them a run can be trained again with its own code after the parts were edited: `own_parts` puts them in the place
of the packages of the same names, for a block. Copies count only if they have the recorded hashes.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from mpt.config.finding.part_packages import IMPORT_HOME, VARIABLE, outside_packages
from mpt.foreign.files import LARGEST_SOURCE_BYTES, read_bytes
from mpt.run.process.files import write_atomically
from mpt.run.records.layout import RunDirectory
from mpt.run.records.used_parts import changed_parts, hash_of, imported_files, read_used_parts

FOLDER = "parts"


def keep_parts(directory: RunDirectory) -> None:
    """Copy the files that this process has imported from part packages. Raises InputOutputError."""
    folder = directory.path / FOLDER
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder, ignore_errors=True)
    for package in outside_packages():
        for file in imported_files(package):
            # gone or unreadable by now: its hash is recorded as unknown, too
            with contextlib.suppress(OSError):
                source = read_bytes(package.folder / file, LARGEST_SOURCE_BYTES)
                copy = folder / package.name / file
                copy.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(copy, source, durable=False)


def kept_packages(directory: RunDirectory) -> dict[str, Path]:
    """Return the packages of which all recorded files are kept as they were, by name."""
    found = {}
    for one in read_used_parts(directory.parts_path):
        folder = directory.path / FOLDER / one["name"]
        if all(
            recorded is not None and hash_of(folder / file) == recorded
            for file, recorded in one["files"].items()
        ):
            found[one["name"]] = folder
    return found


def lost_parts(directory: RunDirectory) -> list[str]:
    """Return the parts that are not here as the run used them, neither in their package nor in the run's folder."""
    kept = kept_packages(directory)
    return [
        file for file in changed_parts(directory.parts_path) if file.partition("/")[0] not in kept
    ]


@contextlib.contextmanager
def own_parts(directory: RunDirectory | None) -> Iterator[None]:
    """Within the block, parts that were changed since the run are those that it kept.

    Modules imported in the block are not in `sys.modules` after it, and the other way round.
    """
    changed = (
        {file.partition("/")[0] for file in changed_parts(directory.parts_path)}
        if directory is not None
        else set()
    )
    kept = (
        {name: path for name, path in kept_packages(directory).items() if name in changed}
        if directory
        else {}
    )
    if not kept:
        yield
        return
    others = [
        one.folder
        for one in outside_packages()
        if one.name not in kept and one.distribution is None
    ]
    before, modules = os.environ.get(VARIABLE), taken_out(kept)
    os.environ[VARIABLE] = os.pathsep.join(
        map(str, [*(path.resolve() for path in kept.values()), *others])
    )
    try:
        yield
    finally:
        taken_out(kept)
        sys.modules.update(modules)
        if before is None:
            os.environ.pop(VARIABLE, None)
        else:
            os.environ[VARIABLE] = before


def taken_out(names: Iterable[str]) -> dict[str, ModuleType]:
    """Take the modules of part packages out of `sys.modules` and return them."""
    homes = tuple(f"{IMPORT_HOME}.{name}" for name in names)
    found = [
        name
        for name in sys.modules
        if name in homes or name.startswith(tuple(f"{home}." for home in homes))
    ]
    return {name: sys.modules.pop(name) for name in found}
