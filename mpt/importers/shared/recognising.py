"""Whose configuration it is: each part package's importers are asked, those of systems first.

An importer is a file in `importers/` with the members of `mpt.importers.shared.translation.Importer`; one that has a
`read(path)` too reads files of a form of its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpt.config.finding.registry import INSTALLED
from mpt.errors import ConfigError
from mpt.importers.shared.reading import read_command, read_settings
from mpt.importers.shared.translation import Translation


def all_importers() -> Iterator[Any]:
    """Yield the systems' importers, which are more particular, then the common ones."""
    for package in reversed(INSTALLED.inside):
        for path in package.paths("importers"):
            yield importlib.import_module(f"{package.module_name}.importers.{path.stem}")


def translate_file(path: Path) -> tuple[Translation, str]:
    """Return a file's translation and its program's name. Raises ConfigError for one that nobody recognises."""
    if path.is_dir():
        raise ConfigError(f"{path}: a folder; name a configuration file in it")
    if not path.is_file():
        raise ConfigError(
            f"{path}: there is no such file; a command line goes into --command '...'"
        )
    readers = (vars(one).get("read") for one in all_importers())
    own = (read(path) for read in readers if read is not None)
    given = next((found for found in own if found is not None), None)
    words = path.name
    if given is None:
        given, words = read_settings(path)
    return translate(given, words, str(path))


def translate_command(text: str) -> tuple[Translation, str]:
    """Return a command line's translation and its program's name."""
    return translate(*read_command(text), "the command line")


def translate(given: dict[str, Any], words: str, source: str) -> tuple[Translation, str]:
    """Return the translation by the first importer that recognises the settings."""
    for importer in all_importers():
        if importer.recognises(given, words):
            into = Translation(dict(given))
            try:
                importer.translate(into)
            except (TypeError, ValueError, OverflowError, ZeroDivisionError) as error:
                raise ConfigError(
                    f"{source}: the value of {into.taken} is not understood as {importer.NAME} has it"
                ) from error
            return into, importer.NAME
    names = ", ".join(importer.NAME for importer in all_importers())
    raise ConfigError(
        f"{source}: not recognised; configurations and command lines are read of {names}"
    )
