"""Lines to write into somebody's script, with their places: as a person reads them, and as they are applied.

What is printed is what was planned: a plan of a change executes the text that `edited` returns.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import ConfigDict

from mpt.planner.answers.plan import READ

How = Literal["top", "before", "after", "around", "instead", "argument"]
INDENT = "    "


@dataclass(frozen=True)
class Edit:
    """Lines of one change, and their place in a file of the script as it is."""

    __pydantic_config__: ClassVar[ConfigDict] = READ

    change: str
    """recompute, autocast or optimizer."""
    file: str
    how: How
    """`top`: among the file's imports. `before` and `after` the lines, indented as these. `around`: these are indented
    below it. `instead` of them. `argument`: behind the bracket at `column` of the first line."""
    first: int
    """The first of the lines of the file, from 1 on."""
    last: int
    lines: tuple[str, ...]
    column: int = 0

    @property
    def place(self) -> str:
        """Where the lines go, in words."""
        name = Path(self.file).name
        if self.how == "top":
            return f"at the top of {name}"
        if self.how == "argument":
            return f"as an argument, {name}:{self.first}"
        words = {"instead": "in the place of"}.get(self.how, self.how)
        span = (
            f"-{self.last}" if self.how in ("around", "instead") and self.last > self.first else ""
        )
        return f"{words} {name}:{self.last if self.how == 'after' else self.first}{span}"


def edited(text: str, edits: Iterable[Edit]) -> str:
    """Return the text of a file with all of its edits."""
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    top: dict[str, None] = {}
    # from the end on, so that the numbers of lines still hold; a line's own arguments before what is put around it
    for edit in sorted(edits, key=lambda one: (one.first, one.column, one.how), reverse=True):
        start, end = edit.first - 1, edit.last
        if edit.how == "top":
            top.update(dict.fromkeys(edit.lines))
            continue
        line = lines[start]
        if edit.how == "argument":
            lines[start] = line[: edit.column] + "".join(edit.lines) + line[edit.column :]
            continue
        margin = line[: len(line) - len(line.lstrip())]
        new = [f"{margin}{one}\n" for one in edit.lines]
        if edit.how == "before":
            lines[start:start] = new
        elif edit.how == "after":
            lines[end:end] = new
        elif edit.how == "instead":
            lines[start:end] = new
        else:
            step = "\t" if margin.endswith("\t") else INDENT
            lines[start:end] = [
                *new,
                *(step + one if one.strip() else one for one in lines[start:end]),
            ]
    start = first_statement(ast.parse(text)) - 1
    ordered = sorted(top, key=lambda line: not line.startswith("import "))
    lines[start:start] = [f"{line}\n" for line in ordered]
    return "".join(lines)


def first_statement(tree: ast.Module) -> int:
    """Return the line of a module's first statement that is neither its docstring nor an import of the future."""
    for place, statement in enumerate(tree.body):
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        is_future = isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
        if not is_future and not (is_text and place == 0):
            decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
            return min([statement.lineno, *(one.lineno for one in decorators)])
    return 1
