"""Changes as edits of a script's text: the lines with their places, where there is one at which they can be written."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.machinery import SourceFileLoader
from itertools import groupby
from types import CodeType
from typing import Any
from unittest import mock

from torch import nn
from torch.optim import Optimizer

from mpt.planner.answers.edits import Edit, edited
from mpt.planner.own.execution.source import Made, Source
from mpt.planner.own.proposals.changes import Recomputed
from mpt.planner.own.text.names import as_written
from mpt.planner.own.text.notebooks import parts_of
from mpt.planner.own.text.passes import Passes, as_argument, autocast_edits
from mpt.planner.own.text.places import (
    Standing,
    assigned_by,
    before_loop,
    has_text,
    imported,
    is_alone,
    made_at,
    names_in,
    scope_of,
    text_of,
    tree_of,
    unused,
)

COMPOUND = (ast.If, ast.For, ast.While, ast.With, ast.Try, ast.FunctionDef, ast.ClassDef)
"""Statements with others inside."""
BLOCK = ("block", "recomputed", "recomputed_block")
"""Names of a loop's variable, the first of which a function does not use."""


def find_edits(
    source: Source,
    made: Made,
    recomputed: Recomputed,
    modules: Mapping[str, nn.Module],
    passes: Passes,
    half: str,
    optimizers: Iterable[tuple[Optimizer, tuple[Standing, ...]]],
) -> dict[str, tuple[Edit, ...]]:
    """Return each change's edits, none of one that has no place; `optimizers`: with where the functions stood that
    made them."""
    if source.edits:  # whose lines are not those of the file
        return {}
    forget_files()
    first = [*parts_of(source.where)] if source.is_file else []
    places = [one.file for one in made.places.values() if one.is_own]
    files = [*dict.fromkeys([*first, *places])]
    return {
        "recompute": recompute_edits(recomputed, modules, made.places),
        "autocast": autocast_edits(passes, half, files),
        "optimizer": optimizer_edits(optimizers, made.variables, files),
    }


def forget_files() -> None:
    """Read files anew: a script may have been edited since."""
    for read in (tree_of, text_of, has_text):
        read.cache_clear()


def recompute_edits(
    chosen: Recomputed, modules: Mapping[str, nn.Module], places: Mapping[str, Standing]
) -> tuple[Edit, ...]:
    """Return what recomputes parts of networks, before the loop in which they are trained; nothing if one has no name.

    `places`: where the functions stand whose variables name the networks.
    """
    found: list[Edit] = []
    spots: list[tuple[tuple[str, int], str]] = []
    for path in chosen.paths:
        spot = _spot(path, places)
        if spot is None:
            return ()
        spots.append((spot, path))
    for (file, line), group in groupby(sorted(spots), key=lambda one: one[0]):
        tree, here = tree_of(file), {path for _, path in group}
        name = unused(BLOCK, names_in(scope_of(tree, line)))
        lines = chosen.only(here).lines(modules, name)
        used = [one for one in ("functools", "torch") if any(f"{one}." in line for line in lines)]
        missing = [one for one in used if one not in imported(file)]
        if missing:
            top = tuple(f"import {one}" for one in missing)
            found.append(Edit("recompute", file, "top", 1, 1, top))
        found.append(Edit("recompute", file, "before", line, line, tuple(lines)))
    return tuple(dict.fromkeys(found))


def _spot(path: str, places: Mapping[str, Standing]) -> tuple[str, int] | None:
    """Return the file and the line before which a network's parts can be changed."""
    written = as_written(path, {})
    variable = re.match(r"\w+", written)
    place = places.get(variable[0]) if variable else None
    if place is None or not place.is_own:
        return None
    name = re.match(r"\w+(\.\w+)?", written)
    assert name is not None
    line = before_loop(tree_of(place.file), place.line, name[0])
    return None if line is None else (place.file, line)


def optimizer_edits(
    optimizers: Iterable[tuple[Optimizer, tuple[Standing, ...]]],
    variables: Mapping[str, Any],
    files: Iterable[str],
) -> tuple[Edit, ...]:
    """Return what gives optimizers 8-bit state, behind the lines that make them; nothing if one has no such line."""
    found: dict[Edit, None] = {}
    inside: dict[tuple[str, ast.stmt], dict[ast.Call, str]] = {}
    for optimizer, stack in optimizers:
        if any("transformers.trainer" in one.module for one in stack):
            words = {"TrainingArguments": 'optim="adamw_bnb_8bit"'}
            found |= dict.fromkeys(as_argument("optimizer", words, files))
            continue
        kind = f"bitsandbytes.optim.{type(optimizer).__name__}8bit"
        made = assigned_by(stack)
        if made is None or (made[3] and variables.get(made[2]) is not optimizer):
            within = made_at(stack)
            if within is None:
                return ()
            file, statement, call = within
            inside.setdefault((file, statement), {})[call] = kind
            continue
        place, statement, name, _ = made
        if not is_alone(place.file, statement):
            return ()
        first, last = statement.lineno, statement.end_lineno or statement.lineno
        line = f"{name} = {kind}({name}.param_groups)"
        found |= dict.fromkeys(_imported(place.file))
        found[Edit("optimizer", place.file, "after", first, last, (line,))] = None
    for (file, statement), calls in inside.items():
        if isinstance(statement, COMPOUND) or not is_alone(file, statement):
            return ()
        found |= dict.fromkeys((*_imported(file), _wrapped(file, statement, calls)))
    return tuple(found)


def _imported(file: str) -> list[Edit]:
    """Return the import that 8-bit states need, if it is missing."""
    if "bitsandbytes" in imported(file):
        return []
    return [Edit("optimizer", file, "top", 1, 1, ("import bitsandbytes",))]


def _wrapped(file: str, statement: ast.stmt, calls: Mapping[ast.Call, str]) -> Edit:
    """Return a statement with optimizers of 8-bit state around those that are made inside it."""
    first, last = statement.lineno, statement.end_lineno or statement.lineno
    lines = [line.encode() for line in text_of(file).splitlines()[first - 1 : last]]
    marks: list[tuple[int, int, bytes]] = []
    for call, kind in calls.items():
        assert call.end_lineno is not None
        assert call.end_col_offset is not None
        marks.append((call.lineno, call.col_offset, f"{kind}(".encode()))
        marks.append((call.end_lineno, call.end_col_offset, b".param_groups)"))
    for line, column, text in sorted(marks, reverse=True):
        whole = lines[line - first]
        lines[line - first] = whole[:column] + text + whole[column:]
    margin = lines[0][: statement.col_offset]
    written = tuple(line.removeprefix(margin).decode() for line in lines)
    return Edit("optimizer", file, "instead", first, last, written)


def without_library(edit: Edit) -> Edit:
    """Return an edit with an optimizer that allocates as one of bitsandbytes, which need not be installed."""
    imported_here = "from mpt.memory import low_bit_optimizer as bitsandbytes_states"
    return replace(
        edit,
        lines=tuple(
            re.sub(
                r"bitsandbytes\.optim\.\w+8bit", "bitsandbytes_states.AllocatedAdam", line
            ).replace("import bitsandbytes", imported_here)
            for line in edit.lines
        ),
    )


@contextmanager
def executed(edits: Iterable[Edit]) -> Iterator[None]:
    """Let files that are imported inside the block have their edits."""
    by_file = {edit.file: [one for one in edits if one.file == edit.file] for edit in edits}
    if not by_file:
        yield
        return
    original = SourceFileLoader.get_code

    @functools.wraps(original)
    def get_code(self: SourceFileLoader, name: str) -> CodeType | None:
        if self.path not in by_file:
            return original(self, name)
        code: CodeType = compile(edited_file(self.path, by_file[self.path]), self.path, "exec")
        return code

    with mock.patch.object(SourceFileLoader, "get_code", get_code):
        yield


def edited_file(path: str, edits: Iterable[Edit]) -> str:
    """Return the text of a file with its edits among some."""
    return edited(text_of(path), [one for one in edits if one.file == path])
