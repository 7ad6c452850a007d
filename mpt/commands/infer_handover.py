"""What `mpt infer` leaves to a system's own command: videos, folders of frames, frames with their aligned faces.

A command of a part package that can do more with some inputs than a task, which sees a batch, declares
`from_infer(task, inputs)`: given the name of the run's task and each `--input` as (name or None, path) it returns its
own fields for these inputs, or None where they are not for it. `mpt infer` then runs that command, with its own
options where the command has the same ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mpt.commands.arguments import InferArguments
from mpt.config.registry import INSTALLED, CommandPart
from mpt.errors import ConfigError
from mpt.inference.exported import is_export
from mpt.run.ending import newest_finished_run
from mpt.run.layout import find_run

ALIKE = ("half", "dtype", "batch_size", "vram", "factor", "rate", "allow_gaps", "overwrite", "device", "runs")
"""Options that mean the same in `mpt infer` and in a system's command that has them."""
SYSTEMS_ONLY = ("factor", "rate", "allow_gaps")
"""Those of them that mean nothing without such a command."""


def hand_over(arguments: InferArguments) -> bool:
    """Run the system's command that these inputs are for; return False where there is none.

    Raises ConfigError for options of `mpt infer` that the command does not have, and for those that only such a
    command has where there is none.
    """
    if runs_command(arguments):
        return True
    defaults = {field.name: field.default for field in dataclasses.fields(arguments)}
    alone = [as_option(name) for name in SYSTEMS_ONLY if getattr(arguments, name) != defaults[name]]
    if alone:
        raise ConfigError(
            f"{', '.join(alone)}: goes with a run that interpolates frames, and with --input VIDEO, FOLDER or pictures "
            "without a name before them"
        )
    return False


def as_option(field: str) -> str:
    """Return a field of a command as its option is typed."""
    return f"--{field.replace('_', '-')}"


def runs_command(arguments: InferArguments) -> bool:
    """Run the system's command that these inputs are for; return whether there is one."""
    if not arguments.input or is_export(arguments.run):
        return False
    directory = find_run(arguments.run, Path(arguments.runs))[0] if arguments.run else None
    if directory is None:
        directory = newest_finished_run(Path(arguments.runs))[0]
    task = task_name(directory.config_path)
    inputs = [named(text) for text in arguments.input]
    for part in INSTALLED.commands():
        asks = part.optional("from_infer")
        own = asks(task, inputs) if asks is not None else None
        if own is not None:
            run_part(part, own, arguments, str(arguments.run or directory.path))
            return True
    return False


def named(text: str) -> tuple[str | None, Path]:
    """Return an `--input` as its name, None where it has none, and its path."""
    field, _, rest = text.partition("=")
    is_named = bool(rest) and field.isidentifier() and not Path(text).exists()
    return (field, Path(rest)) if is_named else (None, Path(text))


def task_name(config_path: Path) -> str | None:
    """Return the task of a run's configuration; None where that cannot be read, which opening the run then says."""
    try:
        return str(yaml.safe_load(config_path.read_text("utf-8"))["task"]["name"])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        return None


def run_part(part: CommandPart, own: Mapping[str, Any], arguments: InferArguments, run: str) -> None:
    """Run a system's command with its own fields for the inputs and those that `mpt infer` has too."""
    command_class = part.member("Command")
    fields = {field.name: field for field in dataclasses.fields(command_class)}
    words = f"mpt {part.package.name} {part.name.replace('_', '-')}"
    values: dict[str, Any] = {"run": run, **own}
    asked = {
        field.name: getattr(arguments, field.name)
        for field in dataclasses.fields(arguments)
        if field.name not in ("run", "input", "allow") and getattr(arguments, field.name) != field.default
    }
    if "output" not in asked and fields["output"].default is dataclasses.MISSING:
        raise ConfigError(f"--output: these inputs are for `{words}`, which needs to know where to write; add -o PATH")
    foreign = [name for name in asked if name != "output" and (name not in ALIKE or name not in fields)]
    if foreign:
        options = ", ".join(as_option(name) for name in foreign)
        raise ConfigError(f"{options}: these inputs are for `{words}`, which has no such option; see `{words} --help`")
    for name, value in asked.items():
        wants_path = "Path" in str(fields[name].type)
        values[name] = Path(value) if wants_path and value is not None else value
    print(f"these inputs are for `{words}`, which runs now; it has further options")
    part.member("run")(command_class(**values))
