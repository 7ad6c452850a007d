"""The configuration that is planned and the files that are written: what sub-commands of `mpt plan` share."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mpt.commands.cli.arguments import PlannedConfig
from mpt.commands.cli.command_line import spell
from mpt.config.load import load_config
from mpt.config.patch_origin import find_strange_patches
from mpt.config.schema import Config
from mpt.config.yaml_text import write_text
from mpt.errors import ConfigError, InputOutputError
from mpt.run.process.files import write_atomically


def load_planned(arguments: PlannedConfig, *first: str) -> Config:
    """Return the configuration that is to be planned, with warnings about patches that were made for another.

    `first` are changes that come before those of the command line, so that what goes with them alone may be changed.
    """
    overrides = (*first, *arguments.overrides)
    config = load_config(arguments.config, overrides, allow=arguments.allow, patches=arguments.patches)
    for warning in find_strange_patches(arguments.patches, config):
        print(f"warning: {warning}", file=sys.stderr)
    return config


def sharded(strategy: str | None) -> tuple[str, ...]:
    """Return the change that --strategy asks for: what goes with fsdp alone (parallel.shard) may be given then."""
    return ("parallel.strategy=fsdp",) if strategy == "fsdp" else ()


def choose_output(arguments: PlannedConfig, output: str | None, stem: str, is_written: bool = True) -> Path:
    """Return the path of the patch, never that of an existing file.

    Raises ConfigError if that was asked for, and InputOutputError if nothing can be written, before anything is
    planned or measured.
    """
    given = {Path(patch).resolve() for patch in arguments.patches}
    if output is None:
        path = free_name(stem, ".yaml")
    else:
        path = Path(output)
        if path.resolve() in given:
            raise ConfigError(f"--output: {path} is given with --with, and the recipe builds on it: name another file")
        if os.path.lexists(path) and not path.is_dir():
            raise ConfigError(f"--output: {path} exists; name another file, or remove it first")
    if is_written and (path.is_dir() or not os.access(path.absolute().parent, os.W_OK)):
        raise InputOutputError(f"{path}: cannot be written: it is a folder, or its folder is missing or read-only")
    return path


def write_patch(path: Path, patch: Mapping[str, Any], heading: Sequence[str], origin: str | None = None) -> None:
    """Write a patch below comments on where it comes from. Raises InputOutputError."""
    lines = [f"# {line}".rstrip() for line in heading] + ([] if origin is None else [origin])
    write_atomically(path, "\n".join([*lines, write_text(dict(patch))]))


def free_name(stem: str, suffix: str) -> Path:
    """Return a name in this folder that is not there yet."""
    numbered = (Path(f"{stem}-{number}{suffix}") for number in itertools.count(2))
    return next(name for name in itertools.chain([Path(f"{stem}{suffix}")], numbered) if not os.path.lexists(name))


def common_words(arguments: PlannedConfig, overrides: Sequence[str]) -> list[str]:
    """Return the words of a command about the same configuration: the file, changes, packages and patches."""
    return spell(replace(arguments, overrides=tuple(overrides)), ("config", "overrides", "patches", "allow"))
