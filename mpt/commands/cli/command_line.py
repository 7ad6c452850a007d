"""A command of the shell, made from the class that declares its arguments (see `mpt.commands.cli.arguments`)."""

from __future__ import annotations

import dataclasses
import inspect
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from difflib import get_close_matches
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand
from typer.models import ArgumentInfo, OptionInfo

from mpt.config.checking.layers import SECTIONS
from mpt.config.finding.registry import INSTALLED
from mpt.config.options import DatasetOptions, OptimizerOptions, Options
from mpt.config.schema import GeneralOptions, Train
from mpt.errors import ConfigError
from mpt.importers.shared.command_words import (
    COMMANDS,
    OF_RUN,
    OPTIONS,
    OTHER_COMMANDS,
    SPELT,
    explain_unit,
)

FURTHER = {
    "mpt infer": "--input {value}",
    "mpt evaluate": "--data {value}",
    "mpt convert": "--output {value}",
    "mpt report": "--figures {value}, or --all for a page over all runs",
}
"""The option that a word behind a run was likely meant for."""
WAYS = {
    "CONFIG": "name a YAML file (`mpt init` writes one), or one that comes with mpt: @NAME (`mpt list configs`)",
    "RUN": "name a run (`mpt list runs`), or its path",
    "CONFIG|RUN": "name a YAML file, or a run of `mpt list runs`",
    "A B [KEY=VALUE]": "name two runs, or two configurations",
    "INPUT...": "name files or folders",
    "LOCK": "name a file that `mpt plan lock` wrote",
}
"""The remedy if an argument is missing, by how its help calls it."""
EXAMPLES = "Examples:\n"
"""Begins the paragraph of a command's docstring whose lines are commands, which are not wrapped."""
PARTS = "--parts"
Parts = Annotated[
    list[str] | None,
    typer.Option(
        PARTS,
        metavar="DIR",
        help="A folder with parts of your own; also in the variable MPT_PARTS.",
    ),
]
"""Every command has this option. `mpt.cli` takes it out of the words before the command sees them."""


def declare(
    app: typer.Typer,
    name: str,
    arguments: type[Any],
    notes: Mapping[str, str],
    run: Callable[[dict[str, Any]], None],
    command_class: type[TyperCommand] | None = None,
) -> None:
    """Add a command with the arguments that a dataclass declares; `run` gets their values by name.

    `notes` are the texts below the fields. The dataclass's docstring is the command's help; lines below `Examples:`
    stay as they are.
    """
    parameters: dict[str, inspect.Parameter] = {}
    allowed: dict[str, str] = {}
    hints = get_type_hints(arguments, include_extras=True)
    tuples = set()
    for field in dataclasses.fields(arguments):
        kind, info = split_annotation(hints[field.name])
        if get_origin(kind) is tuple:
            tuples.add(field.name)
            kind = list[get_args(kind)[0]]  # type: ignore[misc]
        if (
            kind is bool
            and isinstance(info, OptionInfo)
            and info.default is ...
            and not info.param_decls
        ):
            info.param_decls = (f"--{field.name.replace('_', '-')}",)  # without --no-...
        info.help = info.help or notes.get(field.name)
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        if field.name in tuples and default == ():
            default = None
        if info.show_default is True and default in (None, False):
            info.show_default = False
        if kind is not bool and default is None:
            kind = kind | None
        parameters[field.name] = make_parameter(field.name, Annotated[kind, info], default)
        if kind in NUMBERS or kind in (one | None for one in NUMBERS):
            allowed[field.name] = numbers_of(kind, info.min, info.max)
    parameters["parts"] = make_parameter("parts", Parts, None)

    def command(**values: Any) -> None:
        values.pop("parts", None)
        run({key: tuple(value or ()) if key in tuples else value for key, value in values.items()})

    command.allowed = allowed  # type: ignore[attr-defined]
    command.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    command.__annotations__ = {key: parameter.annotation for key, parameter in parameters.items()}
    if command_class is None:
        command_class = OverridableCommand if "overrides" in parameters else Command
    help_text = inspect.cleandoc(arguments.__doc__ or "").replace(EXAMPLES, f"\b\n{EXAMPLES}")
    app.command(name, cls=command_class, help=help_text)(command)


NUMBERS = {int: "a whole number", float: "a number"}


def numbers_of(kind: Any, least: float | None, most: float | None) -> str:
    """Return in words the numbers that an option takes."""
    named = next(text for number, text in NUMBERS.items() if kind in (number, number | None))
    if least is None or most is None:
        return named if least is None else f"{named}, {least:g} or more"
    return f"{named} from {least:g} to {most:g}"


def given(arguments: Any, names: Iterable[str]) -> Iterator[str]:
    """Yield those of some options that were given, as they are typed."""
    for name in names:
        if getattr(arguments, name) != getattr(type(arguments), name):
            yield f"--{name.replace('_', '-')}"


def spell(arguments: Any, names: Collection[str] | None = None) -> list[str]:
    """Return the words that give a command these arguments, all or those named; defaults are left out."""
    hints = get_type_hints(type(arguments), include_extras=True)
    words: list[str] = []
    options: list[str] = []
    for field in dataclasses.fields(arguments):
        value = getattr(arguments, field.name)
        if (
            (names is not None and field.name not in names)
            or value is None
            or value == field.default
        ):
            continue
        _, info = split_annotation(hints[field.name])
        values = [str(one) for one in value] if isinstance(value, tuple | list) else [str(value)]
        if isinstance(info, ArgumentInfo):
            words += values
            continue
        option = (
            info.default if isinstance(info.default, str) else f"--{field.name.replace('_', '-')}"
        )
        options += [option] if value is True else [word for one in values for word in (option, one)]
    return [*words, *options]


WORDS = "mpt.words"
"""Under which a command's context has its words, for `explain_usage`."""


class Command(TyperCommand):
    """A command that keeps its words for the message about a wrong one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as any command does."""
        ctx.meta[WORDS] = list(args)
        return super().parse_args(ctx, args)


class OverridableCommand(Command):
    """A command with overrides: an option that is a setting's name is answered with the override."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as any command does. Raises ConfigError for an option that is a setting, or a script's."""
        check_script_options(ctx.command_path, self, args)
        known = {
            "--help",
            *(option for one in self.params for option in (*one.opts, *one.secondary_opts)),
        }
        for place, word in enumerate(args[: args.index("--")] if "--" in args else args):
            option, _, value = word.partition("=")
            name = option.removeprefix("--").replace("-", "_")
            if (
                option in known
                or (name in OPTIONS and has_option(self, OPTIONS[name]))
                or not option.startswith("--")
                or (setting := setting_called(name)) is None
            ):
                continue
            following = args[place + 1] if place + 1 < len(args) else "-"
            value = value or ("VALUE" if following.startswith("-") else following)
            override = setting if "=" in setting else f"{setting}={value}"
            override = explain_unit(name, value, options_in(args), config_in(args)) or override
            raise ConfigError(
                f"no such option: {option}. Settings are given as overrides: {override}"
            )
        return super().parse_args(ctx, args)


def check_script_options(command: str, takes: Any, words: Sequence[str]) -> None:
    """Raise ConfigError if options that a command does not take follow a script without a -- before them."""
    if not "".join(words[:1]).endswith((".py", ".ipynb")) or "--" in words:
        return
    own = {name for one in takes.params for name in (*one.opts, *one.secondary_opts)}
    for place, word in enumerate(words[1:], 1):
        option = word.partition("=")[0]
        if option.startswith("-") and option not in (*own, "-h", "--help"):
            near = get_close_matches(option, own, n=1, cutoff=0.75)
            meant = f"did you mean {near[0]}? A" if near else "a"
            corrected = f"{command} {shlex.join([*words[:place], '--', *words[place:]])}"
            raise ConfigError(
                f"{command}: {option} is none of its options; {meant} script's own follow after --: {corrected}"
            )


def has_option(command: Any, written: str) -> bool:
    return any(written.partition(" ")[0] in one.opts for one in command.params)


def options_in(words: Sequence[str]) -> dict[str, str]:
    """Return the options of a command line that have a value, by name, and the batch that an override sets."""
    found = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        option, equals, value = word.partition("=")
        if option.startswith("--"):
            found[option[2:].replace("-", "_")] = value if equals else following
        elif option == "train.batch_size":
            found.setdefault("batch_size", value)
    return found


def config_in(words: Sequence[str]) -> str | None:
    """Return the configuration that a command line names."""
    return next(
        (word for word in words if word.startswith("@") or word.endswith((".yaml", ".yml"))), None
    )


UsageError: type[Any] = typer.BadParameter.__mro__[1]
"""Exceptions of a wrong command line; typer's public names have only its kinds, which differ by its version."""


def explain_usage(error: Any) -> str | None:
    """Return one line for a wrong command line, with the way out; None if its message is the whole help."""
    said = error.format_message().strip().rstrip(".")
    if "\n" in said:
        return None
    said = f"{said[:1].lower()}{said[1:]}"
    if error.ctx is None:
        return said
    command = error.ctx.command_path
    if said.startswith("no such command") and command == "mpt":
        word = said.split("'")[1]
        parts = (
            f"mpt {part.package.name} {part.name}"
            for part in INSTALLED.commands()
            if part.name == word
        )
        if ours := COMMANDS.get(word) or next(parts, None):
            help_of = ours.partition(" --")[0]
            return f"mpt: no such command '{word}'; `{ours}` does that, `{help_of} -h` explains it"
    elif (
        said.startswith("no such command")
        and (word := said.split("'")[1]) in error.ctx.find_root().command.commands
    ):
        return f"{command}: no such command '{word}'; `mpt {word}` does that, `mpt {word} -h` explains it"
    if said.startswith("no such option") and (ours := option_called(said, error.ctx)):
        return f"{command}: {said.partition(' (')[0].partition('. ')[0]}; here it is {ours}"
    if (found := re.search(r"unexpected extra argument\S* \((.*)\)", said)) and (
        ours := FURTHER.get(command)
    ):
        return f"{command}: found {found[1]}, where nothing more is expected; write {ours.format(value=found[1])}"
    if said.startswith("invalid value") and (ours := wrong_number(said, error.ctx)):
        return f"{command}: {ours}"
    if said.startswith("missing argument"):
        name = said.split("'")[1]
        return f"{command}: {name} is missing: {WAYS.get(name, f'`{command} -h` explains it')}"
    return (
        f"{command}: {said}{'' if said.endswith('?') else f'; `{command} -h` lists what there is'}"
    )


def wrong_number(said: str, context: Any) -> str | None:
    """Return the option, the word that it was given and the numbers that it takes; None for an option of no number."""
    option = re.search(r"--[\w-]+", said)
    name = option[0][2:].replace("-", "_") if option else ""
    allowed = vars(context.command.callback).get("allowed", {}).get(name)
    found = options_in(context.meta.get(WORDS, ())).get(name)
    if option is None or allowed is None or found is None:
        return None
    return f"{option[0]}: found {found!r}; allowed: {allowed}"


def option_called(said: str, context: Any) -> str | None:
    """Return the option of a command that has the effect of another program's, by the words of click's refusal."""
    found = re.search(r"--([\w-]+)", said)
    name = found[1].replace("-", "_") if found else ""
    ours = OPTIONS.get(name)
    if name == "format" and has_option(context.command, "--figures"):
        ours = "--figures DIR, which writes SVG, PDF and CSV"
    if ours is None or not has_option(context.command, ours):
        ours = OTHER_COMMANDS.get(name)
    value = options_in(context.meta.get(WORDS, ())).get(name, "")
    if ours is None and name in OF_RUN and any(one.name == "run" for one in context.command.params):
        ours = f"{context.command_path} {{value}}"
    if ours is None:
        return None
    return ours.format(value="VALUE" if not value or value.startswith("-") else value)


def setting_called(name: str) -> str | None:
    """Return the full name of the setting that is called so, or None."""
    sections: dict[str, type[Options]] = {
        "train": Train,
        "optimizer": OptimizerOptions,
        "dataset": DatasetOptions,
    }
    if name in SPELT:
        return SPELT[name]
    if name in (*SECTIONS, *GeneralOptions.model_fields):
        return name
    return next(
        (
            f"{section}.{name}"
            for section, fields in sections.items()
            if name in fields.model_fields
        ),
        None,
    )


def split_annotation(annotation: Any) -> tuple[Any, OptionInfo | ArgumentInfo]:
    """Return a field's type and a copy of its declaration for typer, a plain option by default."""
    if get_origin(annotation) is Annotated:
        kind, *told = get_args(annotation)
        for info in told:
            if isinstance(info, OptionInfo | ArgumentInfo):
                return kind, copy(info)
        annotation = kind
    return annotation, typer.Option()


def make_parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    """Return a keyword of the function that typer calls."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )
