"""A run's files as plain values, whatever state they are in: an unreadable one becomes a sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpt.config.text.yaml_text import read_text as parse_yaml
from mpt.foreign.files import open_foreign, read_json
from mpt.foreign.files import read_lines as log_lines
from mpt.foreign.files import read_text as read_bounded
from mpt.report.units import counted

EVALUATION = b'"kind":"evaluate"'
"""Contents of a line of an evaluation, as `mpt.run.records.recorder` writes it."""
TAIL_BYTES = 8192
"""Bytes of a log that are read if its last lines are enough."""
LARGEST_TEXT_BYTES = 1 << 20
"""A config beyond this is not one that was written here."""


def read_text(path: Path, problems: list[str]) -> str:
    """Return a file's text, or an empty one and a problem."""
    try:
        return read_bounded(path, LARGEST_TEXT_BYTES, "replace")
    except OSError as error:
        problems.append(f"{path.name} could not be read: {error.strerror}.")
        return ""


def parse_config(text: str, problems: list[str]) -> Mapping[str, Any]:
    """Parse a resolved config with the strict reader, which no hostile file can keep busy."""
    node, mistakes = parse_yaml(text, "config.yaml")
    if mistakes:
        problems.append(f"config.yaml could not be interpreted: {mistakes[0]}")
    value = node.plain()
    return (
        value if isinstance(value, dict) and not any(mistake.fatal for mistake in mistakes) else {}
    )


def read_object(path: Path, problems: list[str], *, needed: bool = True) -> Mapping[str, Any]:
    """Return a JSON object, or an empty one and a problem."""
    if not path.is_file():
        if needed:
            problems.append(f"{path.name} is missing.")
        return {}
    try:
        value = read_json(path)
    except OSError as error:
        problems.append(f"{path.name} could not be read: {error.strerror}.")
        return {}
    except ValueError as error:
        problems.append(f"{path.name} could not be read: {error}.")
        return {}
    return value if isinstance(value, dict) else {}


def read_last_lines(path: Path) -> list[Mapping[str, Any]]:
    """Return the JSON objects of the last `TAIL_BYTES` of a file of lines, without a word on other lines."""
    try:
        if not path.is_file():
            return []
        with open_foreign(path) as file:
            start = max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES)
            file.seek(start)
            texts = file.read(TAIL_BYTES).splitlines()
    except OSError:
        return []
    found = []
    for text in texts[1:] if start else texts:
        try:
            found.append(json.loads(text.decode("utf-8", errors="replace")))
        except (ValueError, RecursionError):
            continue
    return [value for value in found if isinstance(value, dict)]


def read_lines(path: Path, problems: list[str], most: int | None = None) -> list[Mapping[str, Any]]:
    """Return the JSON objects of a file of lines; lines that are none become one problem.

    With `most`, of a longer file all evaluations are returned and evenly chosen others, between half of `most` and
    `most`, the last among them. So a long run's report takes no more time and memory than a short one's.
    """
    if not path.is_file():
        problems.append(f"{path.name} is missing.")
        return []
    kept: list[tuple[int, int, bytes]] = []
    always: list[tuple[int, int, bytes]] = []
    every, others, bad, last = 1, 0, 0, (0, 0, b"")
    try:
        for number, text in enumerate(log_lines(path)):
            if not (text.startswith(b"{") and text.rstrip().endswith(b"}")):
                bad += bool(text.strip())
            elif most is not None and EVALUATION in text:
                always.append((number, 0, text))
            else:
                last = (number, others, text)
                if others % every == 0:
                    kept.append(last)
                if most is not None and len(kept) > most:
                    every *= 2
                    kept = [one for one in kept if one[1] % every == 0]
                others += 1
    except OSError as error:
        problems.append(f"{path.name} could not be read: {error.strerror}.")
    if kept and kept[-1] != last:
        kept.append(last)
    found: list[Mapping[str, Any]] = []
    for _, _, text in sorted([*kept, *always]):
        try:
            value = json.loads(text.decode("utf-8", errors="replace"))
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            found.append(value)
        else:
            bad += 1
    if bad:
        problems.append(f"{path.name}: {counted(bad, 'line')} could not be read and were left out.")
    return found
