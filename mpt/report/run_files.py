"""A run's files as plain values, whatever state they are in: what could not be read becomes a sentence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpt.config.yaml_text import read_text as parse_yaml

LARGEST_TEXT_BYTES = 1 << 20
"""A config beyond this is not one that was written here."""


def read_text(path: Path, problems: list[str]) -> str:
    """Return a file's text, or an empty one and a problem."""
    try:
        if path.stat().st_size > LARGEST_TEXT_BYTES:
            problems.append(f"{path.name} is larger than {LARGEST_TEXT_BYTES} bytes and was not read.")
            return ""
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        problems.append(f"{path.name} could not be read: {error.strerror}.")
        return ""


def parse_config(text: str, problems: list[str]) -> Mapping[str, Any]:
    """Parse a resolved config with the strict reader, which no hostile file can keep busy."""
    node, mistakes = parse_yaml(text, "config.yaml")
    if mistakes:
        problems.append(f"config.yaml could not be interpreted: {mistakes[0]}")
    value = node.plain()
    return value if isinstance(value, dict) and not any(mistake.fatal for mistake in mistakes) else {}


def read_object(path: Path, problems: list[str], *, needed: bool = True) -> Mapping[str, Any]:
    """Return a JSON object, or an empty one and a problem."""
    if not path.is_file():
        if needed:
            problems.append(f"{path.name} is missing.")
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} could not be read: {error}.")
        return {}
    return value if isinstance(value, dict) else {}


def read_lines(path: Path, problems: list[str]) -> list[Mapping[str, Any]]:
    """Return the JSON objects of a file of lines; lines that are none become one problem."""
    if not path.is_file():
        problems.append(f"{path.name} is missing.")
        return []
    found: list[Mapping[str, Any]] = []
    bad = 0
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for text in file:
                try:
                    value = json.loads(text)
                except (ValueError, RecursionError):
                    bad += bool(text.strip())
                    continue
                if isinstance(value, dict):
                    found.append(value)
                else:
                    bad += 1
    except OSError as error:
        problems.append(f"{path.name} could not be read: {error.strerror}.")
    if bad:
        problems.append(f"{path.name}: {bad} line{'s' if bad > 1 else ''} could not be read and were left out.")
    return found
