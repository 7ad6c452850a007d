"""A configuration file or a command line of another program as flat settings: `trainer.max_epochs` -> 3.

YAML, JSON and TOML files, and text files that hold a command line (`python train.py --lr 0.1`), with or without
backslashes at the ends of lines. Nothing is run and nothing is imported; values are read as YAML.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpt.config.text.yaml_text import read_text
from mpt.errors import ConfigError
from mpt.foreign.files import LARGEST_RECORD_BYTES
from mpt.foreign.files import read_text as read_foreign

MARKUP = (".yaml", ".yml", ".json", ".toml")


def read_settings(path: Path) -> tuple[dict[str, Any], str]:
    """Return a file's settings and the words by which its program can be recognised.

    Raises ConfigError for a file that cannot be read or holds no settings.
    """
    try:
        text = read_foreign(path, LARGEST_RECORD_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text; save it as UTF-8"
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    if path.suffix.lower() in MARKUP:
        return dict(flatten(parse(text, path))), path.name
    return read_command(text)


def parse(text: str, path: Path) -> Mapping[str, Any]:
    """Return the mapping that a file holds. Raises ConfigError."""
    suffix = path.suffix.lower()
    try:
        if suffix == ".toml":
            found: Any = tomllib.loads(text)
        elif suffix == ".json":
            found = json.loads(text)
        else:
            node, problems = read_text(text, str(path))
            if problems:
                raise ConfigError(str(problems[0]))
            found = node.plain()
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not valid {suffix[1:].upper()}: {error}") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"{path}: holds no settings (a mapping of names to values)")
    return found


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names with their values."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def read_command(text: str) -> tuple[dict[str, Any], str]:
    """Return the options of a command line, and its other words. Raises ConfigError for one without options."""
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError(f"the command line cannot be read: {error}") from error
    given, others = dict[str, Any](), list[str]()
    place = 0
    while place < len(words):
        word, following = words[place], words[place + 1 : place + 2]
        place += 1
        if word.startswith("-") and not is_number(word):
            name, has_value, value = word.lstrip("-").partition("=")
            if (
                not has_value
                and following
                and (not following[0].startswith("-") or is_number(following[0]))
            ):
                values = [following[0], *more_values(words[place + 1 :])]
                place += len(values)
                given[name.replace("-", "_")] = one_or_list([scalar(each) for each in values])
            else:
                given[name.replace("-", "_")] = scalar(value) if has_value else True
        elif "=" in word and not word.startswith(("/", ".")):
            name, _, value = word.partition("=")
            given[name.replace("-", "_")] = scalar(value)
        else:
            others.append(word)
    if not given:
        raise ConfigError(
            "no settings: name a configuration file, or a text file with a command line"
        )
    return given, " ".join(others)


def more_values(words: Sequence[str]) -> Iterator[str]:
    """Yield the numbers that follow an option's first value (`--opt-betas 0.9 0.95`)."""
    for word in words:
        if not is_number(word):
            return
        yield word


def one_or_list(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def scalar(word: str) -> Any:
    """Return a word of the command line as a number, a switch or text."""
    if word.casefold() in ("true", "false"):
        return word.casefold() == "true"
    if not is_number(word):
        return word
    number = float(word)
    return int(word) if word.lstrip("+-").isdigit() else number
