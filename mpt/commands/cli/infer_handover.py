"""Inputs that `mpt infer` leaves to a system's own command: videos, folders of frames, frames with their aligned faces.

A command of a part package that can do more with some inputs than a task, which sees a batch, declares
`from_infer(task, inputs)`: given the name of the run's task and each `--input` as (name or None, path) it returns its
own fields for these inputs, or None if they are not for it. A file in the place of a run that mpt did not write is
asked about in the same way, without a task and as the first of the inputs. `mpt infer` then runs that command, with its
own options if the command has the same ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from mpt.commands.cli.infer_options import options_of
from mpt.config.finding.registry import INSTALLED, CommandPart
from mpt.config.text.yaml_text import MAX_BYTES
from mpt.errors import ConfigError
from mpt.foreign.files import read_text
from mpt.inference.exported import SUFFIXES, is_export
from mpt.inference.inputs import named
from mpt.run.checkpoints.choice import load_wanted, read_wish
from mpt.run.records.ending import newest_finished_run
from mpt.run.records.layout import RunDirectory, find_run

ALIKE = (
    "half",
    "dtype",
    "batch_size",
    "vram",
    "overwrite",
    "device",
    "runs",
    "count",
    "seed",
    "truncation",
)
"""Options that mean the same in `mpt infer` and in a system's command that has them."""
CHOICES = ("best", "newest", "step")
"""Options that choose a checkpoint, which goes to the command as its run."""


def hand_over(arguments: Any) -> bool:
    """Run the system's command that these inputs are for; return False if there is none.

    `arguments` are those of `mpt infer` with the options that the commands bring, which no class in a file declares.
    Raises ConfigError for options of `mpt infer` that the command does not have, and for those that only such a
    command has if there is none.
    """
    if runs_command(arguments):
        return True
    defaults = {field.name: field.default for field in dataclasses.fields(arguments)}
    for part in INSTALLED.commands():
        own = [
            name
            for name in options_of(part)
            if getattr(arguments, name, defaults.get(name)) != defaults.get(name)
        ]
        if own:
            raise ConfigError(
                f"{', '.join(map(as_option, own))}: goes with a run and inputs that are for `{words_of(part)}`; "
                f"`{words_of(part)} -h` says which"
            )
    return False


def words_of(part: CommandPart) -> str:
    """Return a command of a part package as it is typed."""
    return f"mpt {part.package.name} {part.name.replace('_', '-')}"


def as_option(field: str) -> str:
    """Return a field of a command as its option is typed."""
    return f"--{field.replace('_', '-')}"


def runs_command(arguments: Any) -> bool:
    """Run the system's command that these inputs are for; return whether there is one."""
    given = [named(text) for text in arguments.input]
    if is_foreign(arguments.run):
        inputs = [(None, Path(str(arguments.run))), *given]
        return runs_part_for(None, inputs, arguments, lambda: str(arguments.run))
    if not given or is_export(arguments.run):
        return False
    directory = find_run(arguments.run, Path(arguments.runs))[0] if arguments.run else None
    if directory is None:
        directory = newest_finished_run(Path(arguments.runs))[0]
    task = task_name(directory.config_path)
    return runs_part_for(task, given, arguments, lambda: chosen_run(arguments, directory))


def is_foreign(run: str | None) -> bool:
    """Return whether a file is in the place of a run that is none of `mpt convert`'s."""
    return run is not None and Path(run).is_file() and not run.endswith(SUFFIXES)


def runs_part_for(
    task: str | None,
    inputs: Sequence[tuple[str | None, Path]],
    arguments: Any,
    run: Callable[[], str],
) -> bool:
    """Run the first command that these inputs are for; return whether there is one."""
    for part in INSTALLED.commands():
        asks = part.optional("from_infer")
        own = asks(task, inputs) if asks is not None else None
        if own is not None:
            run_part(part, own, arguments, run())
            return True
    return False


def chosen_run(arguments: Any, directory: RunDirectory) -> str:
    """Return the run for a system's command, or the checkpoint that --best, --newest or --step chooses of it."""
    which = read_wish(best=arguments.best, newest=arguments.newest, step=arguments.step)
    if which is None:
        return str(arguments.run or directory.path)
    return str(load_wanted(directory, which, "metric")[0].path)


def task_name(config_path: Path) -> str | None:
    """Return the task of a run's configuration; None if that cannot be read, which opening the run then says."""
    try:
        return str(yaml.safe_load(read_text(config_path, MAX_BYTES))["task"]["name"])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        return None


def run_part(part: CommandPart, own: Mapping[str, Any], arguments: Any, run: str) -> None:
    """Run a system's command with its own fields for the inputs and those that `mpt infer` has too."""
    command_class = part.member("Command")
    fields = {field.name: field for field in dataclasses.fields(command_class)}
    words = words_of(part)
    values: dict[str, Any] = {"run": run, **own}
    asked = {
        field.name: getattr(arguments, field.name)
        for field in dataclasses.fields(arguments)
        if field.name not in ("run", "input", "allow", *CHOICES)
        and getattr(arguments, field.name) != field.default
    }
    if "output" not in asked and fields["output"].default is dataclasses.MISSING:
        raise ConfigError(
            f"--output: these inputs are for `{words}`, which needs to know where to write; add -o PATH"
        )
    foreign = [
        name
        for name in asked
        if name != "output" and name not in {*ALIKE, *options_of(part)} & set(fields)
    ]
    if foreign:
        options = ", ".join(as_option(name) for name in foreign)
        raise ConfigError(
            f"{options}: these inputs are for `{words}`, which has no such option; see `{words} --help`"
        )
    for name, value in asked.items():
        wants_path = "Path" in str(fields[name].type)
        values[name] = Path(value) if wants_path and value is not None else value
    print(f"these inputs are for `{words}`, which runs now; it has further options")
    part.member("run")(command_class(**values))
