"""Text of others on its way to a terminal, which obeys escape sequences, and to a spreadsheet, which runs formulas.

File names, docstrings, model outputs and the errors of servers reach both. `harmless` is for whatever is printed,
`csv_cell` for a text in a table.
"""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO

CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters but line feed and tab, line separators, marks that reorder a line, halves of surrogate pairs."""
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters by which a spreadsheet takes a cell for a formula. Source: OWASP, "CSV Injection"."""
QUOTE = "'"


def harmless(text: str) -> str:
    """Return a text with its control characters escaped, as in `\\x1b[31m`; lines stay lines."""
    return CONTROL.sub(lambda found: repr(found.group())[1:-1], text)


def csv_cell(value: Any) -> Any:
    """Return a value for a CSV file: a text that a spreadsheet would run gets an apostrophe before it."""
    return (
        QUOTE + value if isinstance(value, str) and value.startswith((*FORMULA, QUOTE)) else value
    )


def from_csv_cell(text: str) -> str:
    """Undo `csv_cell`."""
    return text.removeprefix(QUOTE)


class HarmlessStream:
    """A text stream to which only harmless text is written. All else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write the text. A carriage return at its beginning stays: progress bars of other packages begin so."""
        start = "\r" if text.startswith("\r") else ""
        self.stream.write(start + harmless(text.removeprefix("\r")))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def unguarded(stream: TextIO) -> TextIO:
    """Return the stream itself, for text that is to move a terminal's cursor."""
    return stream.stream if isinstance(stream, HarmlessStream) else stream


SPELT_OUT = "mpt.spelt_out"
"""The error handler of a stream whose encoding lacks a letter."""
LETTERS = str.maketrans({"×": "x", "µ": "u", "±": "+-", "–": "-", "…": "...", "→": "->"})
"""What mpt's own messages use beyond ASCII -> how it is written there."""


def spell_out(error: UnicodeError) -> tuple[str | bytes, int]:
    """Write mpt's own letters in ASCII, and others, of file names, as escapes."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letter = error.object[error.start].translate(LETTERS)
    if letter.isascii():
        return letter, error.start + 1
    return letter.encode("ascii", "backslashreplace").decode(), error.start + 1


codecs.register_error(SPELT_OUT, spell_out)


def guard_output() -> None:
    """Let only harmless text through to standard output and standard error from now on."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, HarmlessStream):
            setattr(sys, name, HarmlessStream(stream))
