"""Which programs' configurations are read: the common ones, and those that systems bring in their `importers/`."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpt.commands.importing import diffusion_trainers, lightning_cli, timm_script, transformers_trainer
from mpt.commands.importing.reading import read_command, read_settings
from mpt.commands.importing.translation import Translation
from mpt.config.registry import INSTALLED
from mpt.errors import ConfigError

COMMON: tuple[Any, ...] = (transformers_trainer, lightning_cli, diffusion_trainers, timm_script)


def all_importers() -> Iterator[Any]:
    """Yield the systems' importers, which are more particular, then the common ones."""
    for package in INSTALLED.inside[1:]:
        for path in package.paths("importers"):
            yield importlib.import_module(f"{package.module_name}.importers.{path.stem}")
    yield from COMMON


def translate_file(path: Path) -> tuple[Translation, str]:
    """Return a file's translation and its program's name. Raises ConfigError for one that nobody recognises."""
    if not path.is_file():
        raise ConfigError(f"{path}: there is no such file; a command line goes into --command '...'")
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
            importer.translate(into)
            return into, importer.NAME
    names = ", ".join(importer.NAME for importer in all_importers())
    raise ConfigError(f"{source}: not recognised; configurations and command lines are read of {names}")
