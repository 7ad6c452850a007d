"""Changes as edits of a script's text: the lines with their places, where there is one at which they can be written."""

from __future__ import annotations

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
from mpt.planner.own.changes import Recomputed
from mpt.planner.own.names import as_written
from mpt.planner.own.notebooks import parts_of
from mpt.planner.own.passes import Passes, as_argument, autocast_edits
from mpt.planner.own.places import (
    Standing,
    assigned_by,
    before_loop,
    has_text,
    imported,
    is_alone,
    names_in,
    scope_of,
    text_of,
    tree_of,
    unused,
)
from mpt.planner.own.source import Made, Source

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
    return tuple(found)


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
    for optimizer, stack in optimizers:
        if any("transformers.trainer" in one.module for one in stack):
            words = {"TrainingArguments": 'optim="adamw_bnb_8bit"'}
            found |= dict.fromkeys(as_argument("optimizer", words, files))
            continue
        made = assigned_by(stack)
        if made is None:
            return ()
        place, statement, name, through_library = made
        if through_library and variables.get(name) is not optimizer:
            return ()
        if not is_alone(place.file, statement):
            return ()
        first, last = statement.lineno, statement.end_lineno or statement.lineno
        kind = f"{type(optimizer).__name__}8bit"
        line = f"{name} = bitsandbytes.optim.{kind}({name}.param_groups)"
        if "bitsandbytes" not in imported(place.file):
            top = Edit("optimizer", place.file, "top", 1, 1, ("import bitsandbytes",))
            found[top] = None
        found[Edit("optimizer", place.file, "after", first, last, (line,))] = None
    return tuple(found)


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
