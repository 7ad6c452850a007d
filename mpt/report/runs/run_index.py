"""The rows of a folder of runs, kept in it as `.mpt-runs.json`, so that a table of thousands reads only the changes.

A row holds as long as size and time of the files that it came from are the same. The index is a cache: one that is
missing, damaged or not writable costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mpt.errors import InputOutputError
from mpt.foreign.files import read_json
from mpt.run.process.files import write_atomically
from mpt.version import VERSION

INDEX = ".mpt-runs.json"
SOURCES = ("config.yaml", "env.json", "metrics.jsonl", "summary.json", "lock", "checkpoints")
"""Files and folders of a run that its row is made of."""


def signature(run: Path) -> list[list[int] | None]:
    """Return time and size of the files behind a run's row."""
    found: list[list[int] | None] = []
    for name in SOURCES:
        try:
            status = os.stat(os.path.join(run, name))
        except OSError:
            found.append(None)
        else:
            found.append([status.st_mtime_ns, status.st_size])
    return found


def read_index(runs_dir: Path) -> dict[str, Any]:
    """Return the entries of a folder's index by the runs' names; none if it is of another version or damaged."""
    try:
        content = read_json(runs_dir / INDEX)
    except (OSError, ValueError):
        return {}
    entries = (
        content.get("runs")
        if isinstance(content, dict) and content.get("version") == VERSION
        else None
    )
    return entries if isinstance(entries, dict) else {}


def write_index(runs_dir: Path, entries: Mapping[str, Any]) -> None:
    """Write the index, if the folder can be written."""
    with contextlib.suppress(InputOutputError):
        write_atomically(
            runs_dir / INDEX, json.dumps({"version": VERSION, "runs": entries}), durable=False
        )


def as_entry(row: Any, made_of: list[list[int] | None]) -> dict[str, Any]:
    """Return a row as the index holds it."""
    values = dataclasses.asdict(row)
    del values["path"]
    return {"made_of": made_of, "row": values}


def from_entry(
    entry: Any, kind: type[Any], path: Path, made_of: list[list[int] | None]
) -> Any | None:
    """Return the row of an entry, None if the run has changed or the entry is none."""
    if (
        not isinstance(entry, dict)
        or entry.get("made_of") != made_of
        or not isinstance(entry.get("row"), dict)
    ):
        return None
    values = {**entry["row"], "path": path}
    return kind(**values) if dict(wrong_types(values, kind)) == {} else None


def wrong_types(values: Mapping[str, Any], kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a row class whose value is missing, superfluous or of another type."""
    types = {
        "str": str,
        "int": int,
        "bool": bool,
        "float": (float, int),
        "int | None": (int, type(None)),
        "Path": Path,
    }
    fields = {field.name: types[str(field.type)] for field in dataclasses.fields(kind)}
    for name in {*fields, *values}:
        if name not in fields or name not in values or not isinstance(values[name], fields[name]):  # type: ignore[arg-type]
            yield name, values.get(name)
