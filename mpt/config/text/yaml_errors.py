"""Mistakes in YAML's own syntax, in the words of somebody who writes settings and not of PyYAML's parser.

PyYAML names the token that it met; the mistake is often in a line before, of which it keeps the mark as the context.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import yaml

OTHERWISE_INDENTED = "the line is indented otherwise than those around it"
HINTS = (
    ("'\\t'", "a tab; YAML is indented with spaces"),
    (
        "mapping values are not allowed",
        "a ':' where no key can be: indent the line as those around it, write a space behind each ':', and put quotes "
        "around a value that holds one",
    ),
    ("<block mapping start>", OTHERWISE_INDENTED),
    ("<block sequence start>", OTHERWISE_INDENTED),
    ("cannot start any token", "put quotes around a value that begins with this character"),
    ("while scanning an alias", "put quotes around a value that begins with *"),
    ("unknown escape character", "a backslash between double quotes: use single quotes"),
)
"""Part of what PyYAML says -> the mistake, at the place that PyYAML names."""
HINTS_OF_CONTEXT = (
    ("could not find expected ':'", "no ': ' in this line, a colon and a space behind it"),
    ("unexpected end of stream", "a quote that is opened here and never closed"),
)
"""The same, at the place that PyYAML names as the context."""


class Mark(Protocol):
    """A line and a column, counted from 0, as PyYAML's marks and `Position` have them."""

    @property
    def line(self) -> int: ...
    @property
    def column(self) -> int: ...


class Position(NamedTuple):
    """A mark that is not PyYAML's."""

    line: int
    column: int


def explain_syntax(error: yaml.YAMLError, text: str) -> tuple[Mark | None, str]:
    """Return the place of a mistake in a text and what is wrong there."""
    if isinstance(error, yaml.reader.ReaderError):
        lines = text[: error.position].split("\n")
        return Position(
            len(lines) - 1, len(lines[-1])
        ), f"a control character ({error.character:#04x}); remove it"
    if not isinstance(error, yaml.MarkedYAMLError):
        return None, str(error)
    reason = ", ".join(part for part in (error.context, error.problem) if part)
    place, context = error.problem_mark or error.context_mark, error.context_mark
    for said, hint in HINTS:
        if said in reason:
            return place, hint
    if context is not None:
        for said, hint in HINTS_OF_CONTEXT:
            if said in reason:
                return context, hint
        if "expected ',' or" in reason:
            opened = f"the bracket of line {context.line + 1} is not closed"
            return place, f"a comma is missing here, or {opened}"
    return place, reason
