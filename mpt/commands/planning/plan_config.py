"""The configuration that is planned, the files that are written, and the progress of a search: the common part of
the sub-commands of `mpt plan`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from mpt.commands.cli.arguments import PlannedConfig
from mpt.commands.cli.command_line import spell
from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.config.text.yaml_text import write_text
from mpt.errors import ConfigError
from mpt.planner.recipes.patch_origin import find_strange_patches
from mpt.report.units import counted
from mpt.run.process.files import free_path, refuse_unwritable, write_atomically


def load_planned(arguments: PlannedConfig, *first: str) -> Config:
    """Return the configuration that is to be planned, with warnings about patches that were made for another.

    `first` are changes that come before those of the command line, so that settings that go with them alone may be
    changed.
    """
    overrides = (*first, *arguments.overrides)
    config = load_config(
        arguments.config, overrides, allow=arguments.allow, patches=arguments.patches
    )
    for warning in find_strange_patches(arguments.patches, config):
        print(f"warning: {warning}", file=sys.stderr)
    return config


def sharded(strategy: str | None) -> tuple[str, ...]:
    """Return the change that --strategy asks for: settings of fsdp alone (parallel.shard) may be given then."""
    return ("parallel.strategy=fsdp",) if strategy == "fsdp" else ()


def choose_output(
    arguments: PlannedConfig, output: str | None, stem: str, is_written: bool = True
) -> Path:
    """Return the path of the patch, never that of an existing file.

    Raises ConfigError if that was asked for, and InputOutputError if nothing can be written, before anything is
    planned or measured.
    """
    given = {Path(patch).resolve() for patch in arguments.patches}
    if output is None:
        path = free_path(Path(f"{stem}.yaml"))
    else:
        path = Path(output)
        if path.resolve() in given:
            raise ConfigError(
                f"--output: {path} is given with --with, and the recipe builds on it: name another file"
            )
        if os.path.lexists(path) and not path.is_dir():
            raise ConfigError(f"--output: {path} exists; name another file, or remove it first")
    if is_written:
        refuse_unwritable(path)
    return path


def write_patch(
    path: Path, patch: Mapping[str, Any], heading: Sequence[str], origin: str | None = None
) -> None:
    """Write a patch below comments on its origin. Raises InputOutputError."""
    lines = [f"# {line}".rstrip() for line in heading] + ([] if origin is None else [origin])
    write_atomically(path, "\n".join([*lines, write_text(dict(patch))]))


def common_words(arguments: PlannedConfig, overrides: Sequence[str]) -> list[str]:
    """Return the words of a command about the same configuration: the file, changes, packages and patches."""
    return spell(
        replace(arguments, overrides=tuple(overrides)), ("config", "overrides", "patches", "allow")
    )


@contextlib.contextmanager
def progress() -> Iterator[Callable[[int, int], None]]:
    """Show on the terminal, while a search runs, how many recipes are planned and how many of them fit."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda planned, fitting: None
        return
    with console.status("planning") as status:
        yield lambda planned, fitting: status.update(
            f"searching: {counted(planned, 'recipe')} planned, {fitting} fit"
        )
