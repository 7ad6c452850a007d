"""YAML text as plain values, each with its line and column.

A settings file is data: text, numbers, booleans, lists and mappings. So everything in YAML that is more than data is
refused by name: tags (`!!python/object`), anchors and aliases, merge keys, several documents in one file. A file
without aliases cannot grow when it is read, and with caps on its size and depth every text is answered at once.

Scalars follow the core schema of YAML 1.2 (chapter 10.3), not PyYAML's 1.1: `1e-4` is a number, only `true` and `false`
are booleans (`no`, `on` and `yes` stay text), `1:30` and `2024-01-01` stay text. Keys are always text.

Only PyYAML's scanner and parser in Python are used: those in C crash on deep nesting, and the composer follows aliases.
This file does not know the meaning of keys; `mpt.config.schema` does.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import NoReturn

import yaml

from mpt.config.finding.shipped import MARK, find_shipped, near_names, shipped_files
from mpt.config.text.yaml_errors import Mark, explain_syntax
from mpt.errors import ConfigError
from mpt.foreign.files import open_foreign

MAX_BYTES = 64 * 1024
MAX_DEPTH = 40
MAX_VALUES = 5000
INTEGER_LIMIT = 2**63

Scalar = str | int | float | bool | None
KeyPath = tuple[str | int, ...]

INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
CONSTANTS: dict[str, bool | None] = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **dict.fromkeys(("null", "Null", "NULL", "~", ""), None),
}


@dataclass(frozen=True)
class Place:
    """A place: a file with a line and a column counted from 1, or an override without them."""

    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}:{self.column}"


@dataclass(frozen=True)
class Node:
    """A value and its place; the children of a mapping also know the place of their key."""

    value: Scalar | list[Node] | dict[str, Node]
    place: Place
    key_place: Place | None = None
    is_blank: bool = False
    """Is this the null of a key with nothing behind it, rather than one that was written?"""

    @property
    def is_mapping(self) -> bool:
        return isinstance(self.value, dict)

    @property
    def members(self) -> dict[str, Node]:
        """The values of a mapping."""
        assert isinstance(self.value, dict)
        return self.value

    def plain(self) -> object:
        """Return the value without places."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value


@dataclass(frozen=True)
class Problem:
    """One mistake, with its place and key."""

    place: Place
    path: KeyPath
    text: str
    fatal: bool = False
    """The text is unusable, so that there is nothing more to check."""

    def follows(self, first: Problem) -> bool:
        """Return whether it is about the value that the text's reader has refused, maybe under its written-out name."""
        inner = self.path[: len(first.path)] == first.path and self.place == first.place
        return inner or self.path == first.path

    def __str__(self) -> str:
        keys = printable(".".join(str(part) for part in self.path))
        return f"{self.place}: {keys}: {self.text}" if keys else f"{self.place}: {self.text}"


def printable(text: str, limit: int = 80) -> str:
    """Return the text on one line without control characters, cut at `limit` characters."""
    safe = "".join(
        character if character.isprintable() else repr(character)[1:-1]
        for character in text[: limit + 1]
    )
    return safe if len(safe) <= limit else safe[: limit - 3] + "..."


def read_file(path: Path) -> tuple[Node, list[Problem]]:
    """Read a YAML file; see `read_text`. A file that cannot be read is a `ConfigError`.

    `-` is the standard input, `@dcgan_amp` a configuration that comes with mpt.
    """
    if str(path) == "-":
        return read_text(read_standard_input(), "standard input")
    path = find_shipped(str(path)) if str(path).startswith(MARK) else path
    name = printable(str(path), 200)
    try:
        program = Path(re.sub(r"(?<=\.py):\w+$", "", str(path)))  # FILE.py:NAME is a function in it
        if program.suffix in (".py", ".ipynb") and program.is_file():
            raise ConfigError(
                f"{name}: a Python program, where a YAML file is expected; `mpt plan {name}` plans a training script"
            )
        if not path.is_file():
            if "=" in name and not path.exists():
                raise ConfigError(
                    f"{name}: a setting, where a configuration is expected: FILE.yaml {name}, or @NAME {name}"
                )
            raise ConfigError(
                f"{name}: {what_stands_at(path)}; a YAML file is expected{suggest_file(path)}"
            )
        with open_foreign(path) as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{name}: cannot be read: {error}") from error
    if len(content) > MAX_BYTES:
        raise ConfigError(f"{name}: larger than {MAX_BYTES // 1024} KiB, which is no settings file")
    try:
        return read_text(content.decode("utf-8-sig"), name)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{name}: byte {error.start} is not UTF-8 text; save the file as UTF-8"
        ) from error


@cache
def read_standard_input() -> str:
    """Read the standard input, which can be read once."""
    content = sys.stdin.buffer.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise ConfigError(
            f"standard input: larger than {MAX_BYTES // 1024} KiB, which is no settings file"
        )
    return content.decode("utf-8-sig", errors="replace")


def what_stands_at(path: Path) -> str:
    """Describe a path that is no file."""
    if path.is_dir():
        return "a folder"
    return "neither a file nor a link to one" if os.path.lexists(path) else "no such file"


WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
"""How the names of files of weights end."""


def suggest_file(path: Path) -> str:
    """Return a hint at mpt's configuration of this name, or at the YAML file next to it with the nearest one."""
    if (path / "config.yaml").is_file():
        run = printable(str(path), 200)
        return (
            f"; did you mean {run}{os.sep}config.yaml, or to continue that run with --resume {run}?"
        )
    if os.path.lexists(path):
        return ""
    beside = path.parent.glob("*.y*ml")
    found = {file.stem: file for file in beside if file.suffix in (".yaml", ".yml")}
    if path.stem in shipped_files() and path.stem not in found:
        return f"; did you mean {MARK}{path.stem}, which comes with mpt?"
    if path.suffix in WEIGHTS:
        return f": weights are no configuration; a run starts from them with model.weights={printable(str(path), 200)}"
    nearest = get_close_matches(path.stem, found, n=1)
    if nearest:
        return f"; did you mean {printable(str(found[nearest[0]]), 200)}?"
    shipped = near_names(path.name) if path.suffix == "" and path.name == str(path) else []
    come = "comes" if len(shipped) == 1 else "come"
    named = " or ".join(MARK + one for one in shipped)
    return f"; did you mean {named}, which {come} with mpt?" if shipped else ""


def read_text(text: str, source: str, located: bool = True) -> tuple[Node, list[Problem]]:
    """Parse YAML text into a node tree and the list of the faults with it.

    With `located=False` the places carry the source's name alone, as for a command-line override. Text that is not
    YAML, or that no settings file would hold, ends the reading: the problem is reported and the tree is empty.
    """
    if len(text) > MAX_BYTES:
        start = Place(source, 1, 1) if located else Place(source)
        return Node({}, start), [
            Problem(
                start, (), f"longer than {MAX_BYTES // 1024} KiB, which is no settings file", True
            )
        ]
    reader = _Reader(text, source, located)
    return reader.read(), reader.problems


def resolve_scalar(text: str) -> Scalar:
    """Return the value of an unquoted scalar under YAML 1.2's core schema."""
    if text in CONSTANTS:
        return CONSTANTS[text]
    if INTEGER.fullmatch(text):
        if len(text) > 64:  # converting thousands of digits is slow, and refused anyway
            return INTEGER_LIMIT
        return int(text, 8 if text.startswith("0o") else 16 if text.startswith("0x") else 10)
    if FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


class _Stop(Exception):
    """Nothing after this point can be understood."""


class _Reader:
    """Builds the tree from PyYAML's events, one call per node."""

    def __init__(self, text: str, source: str, located: bool) -> None:
        self.text = text
        self.source = source
        self.located = located
        self.problems: list[Problem] = []
        self.count = 0
        self.path: list[str | int] = []

    def read(self) -> Node:
        start = self.place(None)
        try:
            self.events: Iterator[yaml.Event] = iter(yaml.parse(self.text, Loader=yaml.SafeLoader))
            next(self.events)  # the start of the stream
            if isinstance(next(self.events), yaml.StreamEndEvent):
                return Node(None, start)
            root = self.node(next(self.events), 0)
            next(self.events)  # the end of the document
            following = next(self.events)
            if not isinstance(following, yaml.StreamEndEvent):
                self.stop(
                    following.start_mark,
                    "a second document starts here; one file holds one configuration",
                )
            return root
        except yaml.YAMLError as error:
            mark, reason = explain_syntax(error, self.text)
            self.report(mark, f"not YAML: {printable(reason, 200)}", fatal=True)
        except (_Stop, RecursionError):
            if not self.problems:
                self.report(None, "nested too deeply", fatal=True)
        except (
            ValueError,
            OverflowError,
        ) as error:  # PyYAML lets chr() fail on escapes such as "\U00110000"
            self.report(None, f"not YAML: {printable(str(error), 200)}", fatal=True)
        return Node(None, start)

    def place(self, mark: Mark | None) -> Place:
        if not self.located:
            return Place(self.source)
        line, column = (mark.line + 1, mark.column + 1) if mark else (1, 1)
        return Place(self.source, line, column)

    def report(self, mark: Mark | None, text: str, fatal: bool = False) -> None:
        self.problems.append(Problem(self.place(mark), tuple(self.path), text, fatal))

    def stop(self, mark: Mark | None, text: str) -> NoReturn:
        self.report(mark, text, fatal=True)
        raise _Stop

    def node(self, event: yaml.Event, depth: int) -> Node:
        self.count += 1
        if self.count > MAX_VALUES:
            self.stop(event.start_mark, f"more than {MAX_VALUES} values, which is no settings file")
        if depth > MAX_DEPTH:
            self.stop(event.start_mark, f"nested more than {MAX_DEPTH} levels deep")
        self.refuse_more_than_data(event)
        place = self.place(event.start_mark)
        if isinstance(event, yaml.MappingStartEvent):
            return Node(self.mapping(depth), place)
        if isinstance(event, yaml.SequenceStartEvent):
            return Node(self.sequence(depth), place)
        assert isinstance(event, yaml.ScalarEvent)
        return Node(self.scalar(event), place, is_blank=event.value == "" and event.style is None)

    def refuse_more_than_data(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.AliasEvent):
            self.stop(
                event.start_mark,
                f"the alias *{printable(str(event.anchor))} is not allowed; repeat the value",
            )
        if getattr(event, "anchor", None):
            anchor = printable(str(getattr(event, "anchor", "")))
            self.stop(
                event.start_mark,
                f"the anchor &{anchor} is not allowed; write the value in its place",
            )
        if getattr(event, "tag", None):
            tag = printable(str(getattr(event, "tag", "")).replace("tag:yaml.org,2002:", "!!"))
            self.stop(
                event.start_mark,
                f"the tag {tag} is not allowed; a settings file holds plain values only",
            )

    def mapping(self, depth: int) -> dict[str, Node]:
        children: dict[str, Node] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            self.refuse_more_than_data(event)
            if not isinstance(event, yaml.ScalarEvent):
                self.stop(event.start_mark, "a list or mapping cannot be a key; keys are names")
            key, mark = event.value, event.start_mark
            if key == "<<" and event.implicit[0]:
                self.stop(mark, "the merge key << is not allowed; write the keys out")
            self.path.append(key)
            child = self.node(next(self.events), depth + 1)
            if key in children:
                self.report(
                    mark,
                    f"the key is repeated here; it was first given at {children[key].key_place}",
                )
            else:
                children[key] = replace(child, key_place=self.place(mark))
            self.path.pop()
        return children

    def sequence(self, depth: int) -> list[Node]:
        children: list[Node] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            self.path.append(len(children))
            children.append(self.node(event, depth + 1))
            self.path.pop()
        return children

    def scalar(self, event: yaml.ScalarEvent) -> Scalar:
        if any("\ud800" <= character <= "\udfff" for character in event.value):
            self.report(
                event.start_mark, "the text holds half of a surrogate pair, which is no character"
            )
            return ""
        if not event.implicit[0]:  # quoted, or a block of text
            return str(event.value)
        value = resolve_scalar(event.value)
        if isinstance(value, int) and not -INTEGER_LIMIT <= value < INTEGER_LIMIT:
            written = printable(event.value, 30)
            message = (
                f"the whole number {written} does not fit in 64 bits; allowed are those that do"
            )
            self.report(event.start_mark, message)
            return 0
        return value


class _Dumper(yaml.SafeDumper):
    """Writes text so that `read_text` reads it as text again."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML takes some Unicode spaces and line breaks for its own, so only printable text is unquoted
    quoted = not isinstance(resolve_scalar(text), str) or not text.isprintable()
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if quoted else None)


_Dumper.add_representer(str, _represent_text)


def write_text(value: object) -> str:
    """Return plain values as YAML that `read_text` reads back to the same values. Keys keep their order."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100))
