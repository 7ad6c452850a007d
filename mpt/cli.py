"""The command `mpt`: which commands there are, and exit codes. Nothing else.

A command's arguments are declared in its file in `mpt.commands` and read from the source; the file is imported
when the command is called, so that `mpt --help` needs no torch. Systems and part packages from outside bring commands
of their own: `mpt NAME COMMAND`. This is the one place where an `MptError` becomes a message on stderr and an exit
code. The codes are in `mpt.errors`; alongside them 0 is success, 2 also a wrong command line, and 130 an interrupt
before there was anything to save.
"""

from __future__ import annotations

import ast
import io
import itertools
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from mpt.commands.cli.command_line import PARTS, Parts, UsageError, declare, explain_usage
from mpt.commands.cli.infer_options import with_options_of
from mpt.commands.cli.plan_group import PlanCommand, PlanGroup
from mpt.config.finding.part_packages import PartPackage, use_parts
from mpt.config.finding.part_source import COMMAND
from mpt.config.finding.registry import INSTALLED, CommandPart
from mpt.errors import (
    ConfigError,
    InputOutputError,
    Interrupted,
    MptError,
    OwnCodeError,
    PartError,
    Terminated,
)
from mpt.foreign.text import SPELT_OUT, guard_output
from mpt.outside.own_code import explain, explain_own_code
from mpt.run.process.collector import collect_rarely, pause
from mpt.run.process.collector import end as end_pause
from mpt.run.process.files import FULL
from mpt.run.process.signals import terminated_cleanly
from mpt.version import VERSION

COMMANDS = {
    **{name: name for name in ("train", "infer", "evaluate", "compare", "doctor", "diff")},
    "verify-resume": "verify_resume",
    **{name: name for name in ("report", "convert", "prune", "validate", "schema")},
    "list": "listing",
    "init": "init",
    "import": "import_config",
    "plan": "plan",
}
"""Command -> its module in `mpt.commands`."""
PLAN_COMMANDS = {
    "step": "planning.plan_step",
    "infer": "planning.plan_inference",
    **{
        name: f"planning.plan_{name}"
        for name in ("presets", "tune", "calibrate", "lock", "check", "cluster")
    },
}
"""Sub-command of `mpt plan` -> the same."""
TRAIN, INFER = "mpt.commands.train", "mpt.commands.infer"
DEBUG = "--debug"
CODES = (
    "Exit codes: 0 done, 1 an error in a part of your own (or a defect), 2 configuration or command line, 3 data, "
    "4 checkpoint refused, 5 input or output, 6 not finite, 7 out of memory or does not fit, 8 the gate of compare, "
    "or a difference found by diff or verify-resume, 9 another process of the training was lost, "
    "10 a plan that only may fit (--gate), 130 and 143 interrupted after saving."
)


def make_app(word: str = "") -> typer.Typer:
    """Return the command line with mpt's own commands and those of every part package.

    With only one command of mpt's own if `word`, the command line's first, is its name: the others' files are not
    read.
    """
    settings = {"rich_markup_mode": None, "pretty_exceptions_enable": False}
    app = typer.Typer(
        name="mpt",
        help="Mixed-precision training that fits the card you have.",
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        **settings,  # type: ignore[arg-type]
    )
    app.callback(epilog=CODES)(common)
    for name in [word] if word in COMMANDS else COMMANDS:
        if name == "plan":
            add_plan(app, settings)
        else:
            add_command(app, name, INSTALLED.own_command(COMMANDS[name]))
    if word in COMMANDS:
        return app
    groups: dict[PartPackage, typer.Typer] = {}

    def group_of(package: PartPackage) -> typer.Typer:
        if package.name in COMMANDS:
            raise PartError(
                f"{package.folder}: its commands would be called `mpt {package.name}`, which is a command of "
                "mpt; rename the folder"
            )
        if package not in groups:
            groups[package] = typer.Typer(no_args_is_help=True, add_completion=False, **settings)  # type: ignore[arg-type]
            app.add_typer(groups[package], name=package.name, help=describe_group(package))
            # a group stays one, also with a single command
            groups[package].callback()(lambda: None)
        return groups[package]

    for part in INSTALLED.commands():
        add_command(group_of(part.package), part.name.replace("_", "-"), part)
    for package, name, error in INSTALLED.wrong_commands():
        add_wrong(group_of(package), name, error)
    return app


def describe_group(package: PartPackage) -> str:
    """Return a line about a package's commands: the beginning of a system's docstring, up to a colon."""
    if package.outside:
        return (
            f"Commands of your parts in {package.distribution or shlex.quote(package.folder.name)}."
        )
    text = ast.get_docstring(ast.parse((package.folder / "__init__.py").read_text("utf-8")))
    return f"{str(text).partition('.')[0].partition(':')[0]}."


def add_wrong(group: typer.Typer, name: str, error: PartError) -> None:
    """Add a command whose file cannot be read, which says so when it is called."""

    def run() -> None:
        raise error

    group.command(name.replace("_", "-"), help="Its file cannot be read.")(run)


def add_command(
    app: typer.Typer, name: str, part: CommandPart, command_class: type[TyperCommand] | None = None
) -> None:
    """Add a command of mpt's own or of a part package."""
    declared, notes = declared_by(part, part.source.declared, part.source.notes)
    declare(app, name, declared, notes, partial(run_command, part), command_class)


def declared_by(
    part: CommandPart, declared: type[Any], notes: Mapping[str, str]
) -> tuple[type[Any], Mapping[str, str]]:
    """Return the class of a command's arguments with its notes: that of `mpt infer` has options of other commands."""
    if part.module_name != INFER:
        return declared, notes
    return with_options_of(declared, notes, INSTALLED.commands())


def add_plan(app: typer.Typer, settings: Mapping[str, Any]) -> None:
    """Add `mpt plan` with its sub-commands."""
    part = INSTALLED.own_command(COMMANDS["plan"])
    group = typer.Typer(cls=PlanGroup, add_completion=False, **settings)
    app.add_typer(group, name="plan", help=str(part.source.declared.__doc__).partition("\n")[0])
    add_command(group, "plan", part, PlanCommand)
    for name, module in PLAN_COMMANDS.items():
        add_command(group, name, INSTALLED.own_command(module))


def print_version(wanted: bool) -> None:
    """Print the version and stop, if that is wanted."""
    if wanted:
        print(f"mpt {VERSION}")
        raise typer.Exit


def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=print_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
    parts: Parts = None,
    debug: Annotated[
        bool,
        typer.Option(
            DEBUG,
            help="Show every frame of an error in a part of your own, not only your own lines.",
        ),
    ] = False,
) -> None:
    """Mixed-precision training that fits the card you have."""


def run_command(part: CommandPart, values: dict[str, Any]) -> None:
    """Import a command and run it. An interrupt that the command did not turn into a saved run ends with 130."""
    asked: Any = None
    try:
        work = part.member("run")
        asked = declared_by(part, part.member(COMMAND), {})[0](**values)
        if part.module_name != TRAIN:  # which says itself when it has imported everything
            collect_rarely()
        work(asked)
        if sys.stdout is not None and not sys.stdout.closed:
            sys.stdout.flush()  # here, since a reader that has left is no error
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except SystemExit as stop:  # of a model, say: a training must not end well for it
        said = None if part.package.outside else explain_own_code(stop)
        if said is None:
            raise
        raise OwnCodeError(said) from stop
    except BrokenPipeError:  # the reader of our output left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except RuntimeError as error:
        if "torch" not in sys.modules:
            raise
        from mpt.commands.cli.refused_memory import explain as explain_refusal

        refusal = explain_refusal(error, asked)
        if refusal is None:
            raise
        raise refusal from error


def take_parts(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words without `--parts DIR`, at any place, and the folders: they decide which commands there
    are.
    """
    rest: list[str] = []
    folders: list[str] = []
    left = iter(words)
    for word in left:
        if word == "--":
            return [*rest, word, *left], folders
        if word.startswith(f"{PARTS}="):
            folders.append(word.partition("=")[2])
        elif word == PARTS and (following := next(left, None)) is not None:
            folders.append(following)
        else:
            rest.append(word)
    return rest, folders


def take_debug(words: Sequence[str]) -> tuple[list[str], bool]:
    """Return the words without `--debug`, wherever it is before a `--`, and whether it was there."""
    end = words.index("--") if "--" in words else len(words)
    rest = [word for word in words[:end] if word != DEBUG]
    return [*rest, *words[end:]], len(rest) < end


def spell_resume(words: Sequence[str]) -> list[str]:
    """Write a `--resume` without a value as `--resume=auto`.

    The next word is its value unless it is another option, an override or a configuration.
    """
    spelt: list[str] = []
    for word, following in itertools.pairwise([*words, "--"]):
        bare = (
            following.startswith("-") or "=" in following or following.endswith((".yaml", ".yml"))
        )
        spelt.append("--resume=auto" if word == "--resume" and bare else word)
    return spelt


def main(words: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    pause()
    for stream in (sys.stdout, sys.stderr):
        # a file's name need not be text in the terminal's encoding
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=SPELT_OUT)
    guard_output()
    debug = False
    try:
        rest, folders = take_parts(sys.argv[1:] if words is None else words)
        rest, debug = take_debug(rest)
        use_parts(folders)
        with terminated_cleanly():
            code = make_app(rest[0] if rest else "")(
                args=spell_resume(rest), prog_name="mpt", standalone_mode=False
            )
            sys.exit(code or 0)
    except Terminated as stop:
        print(stop, file=sys.stderr)
        sys.exit(stop.exit_code)
    except UsageError as error:
        explained = explain_usage(error)
        if explained is None:
            error.show()
            sys.exit(2)
        fail(ConfigError(explained))
    except MptError as error:
        fail(error)
    except OSError as error:
        if error.filename is None and error.errno not in FULL:
            if debug or (said := explain(error)) is None:
                raise
            fail(OwnCodeError(said))
        fail(InputOutputError(f"{error.filename or 'what was to be written'}: {error.strerror}"))
    except Exception as error:
        if (
            isinstance(error, UnicodeEncodeError)
            and (kind := sys.getfilesystemencoding()) != "utf-8"
        ):
            fail(
                InputOutputError(
                    f"{error.object}: no file name in {kind}, this locale's; set PYTHONUTF8=1"
                )
            )
        explained = None if debug else explain(error)
        if explained is None:
            raise
        fail(OwnCodeError(explained))
    finally:
        end_pause()


def fail(error: MptError) -> NoReturn:
    """Print the message and exit with the error's code. Being stopped and having saved is no error."""
    print(error if isinstance(error, Interrupted) else f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code)
