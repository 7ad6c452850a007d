"""The options of `mpt infer` that part packages bring: those of the commands to which it hands inputs over.

A command's file names them in the literal `INFER_OPTIONS`; each is a field of its `Command`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, get_type_hints

from mpt.config.finding.registry import CommandPart


def options_of(part: CommandPart) -> tuple[str, ...]:
    """Return the fields of a command that `mpt infer` has too while the part is there."""
    return tuple(part.source.literals.get("INFER_OPTIONS", ()))


def with_options_of(
    declared: type[Any], notes: Mapping[str, str], parts: Iterable[CommandPart]
) -> tuple[type[Any], Mapping[str, str]]:
    """Return a class of arguments with the options that commands bring, and the notes of all fields."""
    known = {field.name for field in dataclasses.fields(declared)}
    added: list[tuple[str, Any, Any]] = []
    for part in parts:
        command = part.source.declared
        hints = get_type_hints(command, include_extras=True)
        fields = {field.name: field for field in dataclasses.fields(command)}
        for name in options_of(part):
            if name not in known:
                added.append((name, hints[name], dataclasses.field(default=fields[name].default)))
                notes = {**notes, name: part.source.notes.get(name, "")}
                known.add(name)
    if not added:
        return declared, notes
    described = {"__doc__": declared.__doc__}
    kind = dataclasses.make_dataclass(
        declared.__name__, added, bases=(declared,), namespace=described, frozen=True
    )
    return kind, notes
