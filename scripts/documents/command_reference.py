"""Write docs/reference/commands.md, python.md and exit_codes.md from arguments, signatures and tests/faults.md.

`python scripts/documents/config_reference.py` writes them with the other generated pages. Torch is not imported.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from mpt.cli import make_app
from mpt.commands.cli.command_line import EXAMPLES

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "reference"
HEAD = "Written by `python scripts/documents/config_reference.py`; do not edit."
TESTS = re.compile(r"(?:,? *(?:slow: )?`[\w/]+\.py::\w+(?:\[[^\]`]*\])?`)+")


def write_commands() -> str:
    """Make the page of commands: usage, arguments and options of each."""
    group: Any = typer.main.get_command(make_app())
    parts = [
        "# Command line",
        HEAD,
        "`mpt COMMAND -h` prints the same, and the defaults and ranges; an optional RUN is the newest one. "
        "`--json` prints one object over several lines; `mpt train --json` prints one object per line, as the lines of "
        "[metrics.jsonl](run_directory.md#metricsjsonl). Messages go to the standard error. "
        "[Exit codes](exit_codes.md).",
        *sections(group, ["mpt"]),
    ]
    return "\n\n".join(parts) + "\n"


def sections(command: Any, words: list[str]) -> Iterator[str]:
    """Yield a section for each command below this one."""
    children = getattr(command, "commands", {})
    for name, child in children.items():
        if getattr(child, "hidden", False):
            continue
        path = [*words, name] if words[-1] != name else words
        if not getattr(child, "commands", {}):
            yield section(child, path)
        yield from sections(child, path)


def section(command: Any, words: list[str]) -> str:
    told, _, examples = (command.help or "").replace("\b", "").partition(EXAMPLES)
    text = " ".join(told.split())
    if examples:
        text += f"\n\n```sh\n{textwrap.dedent(examples).rstrip()}\n```"
    rows = [row for parameter in command.params if (row := parameter_row(parameter))]
    table = "\n".join(["| argument | |", "|---|---|", *rows])
    return "\n\n".join(
        [f"## `{' '.join(words)}`", text, table] if rows else [f"## `{' '.join(words)}`", text]
    )


def parameter_row(parameter: Any) -> str | None:
    """Write one argument or option as a table row; hidden ones and --help give None."""
    if getattr(parameter, "hidden", False) or parameter.name == "help":
        return None
    if parameter.param_type_name == "argument":
        spelt = parameter.metavar or parameter.name.upper()
    else:
        spelt = ", ".join([*parameter.opts, *parameter.secondary_opts])
        if not parameter.is_flag:
            spelt += f" {parameter.metavar or parameter.name.upper()}"
    text = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
    default = parameter.default
    shown = default not in (None, (), [], False, "") and not callable(default)
    return f"| `{spelt.replace('|', chr(92) + '|')}` | {text}{f' Default: `{default}`.' if shown else ''} |"


def write_python() -> str:
    """Make the page of signatures from the source of `mpt.api`."""
    tree = ast.parse((ROOT / "mpt" / "api.py").read_text("utf-8"))
    parts = [
        "# Python API: signatures",
        HEAD,
        "Examples that run are in [Using mpt from Python](api.md).",
    ]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            parts.append(f"## `mpt.{node.name}`")
            parts.append(f"```text\n{signature(node)}\n```")
            parts.append(ast.get_docstring(node) or "")
    return "\n\n".join(parts) + "\n"


def signature(node: ast.FunctionDef) -> str:
    """Write a function's signature, one argument a line."""
    arguments = ast.unparse(node.args)
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    one_line = f"mpt.{node.name}({arguments}){returns}"
    if len(one_line) <= 100:
        return one_line
    pieces = re.split(r", (?![^\[\]]*\])", arguments)
    return "\n".join([f"mpt.{node.name}(", *(f"    {piece}," for piece in pieces), f"){returns}"])


def write_exit_codes() -> str:
    """Make the page of faults from tests/faults.md, without the column of tests."""
    lines = []
    for line in (ROOT / "tests" / "faults.md").read_text("utf-8").splitlines():
        cells = re.split(r"(?<!\\)\|", line)
        if line.startswith("|") and len(cells) == 5:  # a row of fault, what happens, tests
            line = "|".join(cells[:3]) + "|"
        lines.append(TESTS.sub("", line))
    # parentheses that held nothing but a test's name
    text = re.sub(r"\s\(\)", "", "\n".join(lines))
    head = f"# Exit codes and faults\n\n{HEAD}\n\n{INTRODUCTION}\n\n"
    text = re.sub(
        r"# What happens when something breaks\n.*?\n\n(?=\|)", head, text, count=1, flags=re.S
    )
    for page, title in (
        ("how-to/parallel.md", "several processes"),
        ("benchmarks/battery.md", "results"),
    ):
        text = text.replace(f"docs/{page}", f"[{title}](../{page})")
    return text.rstrip("\n") + "\n"


INTRODUCTION = """A mistake of yours and a broken machine both end in one message: where, what was found and what to do.
Each row below is provoked by tests, which `tests/faults.md` of the repository names."""


def write_pages() -> dict[Path, str]:
    """Make the text of all three pages."""
    return {
        FOLDER / "commands.md": write_commands(),
        FOLDER / "python.md": write_python(),
        FOLDER / "exit_codes.md": write_exit_codes(),
    }
