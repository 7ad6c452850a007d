"""What a run's data set delivers, kept in its folder: `data.json` (see `mpt.data.absent` for what it is good for)."""

from __future__ import annotations

import json
from pathlib import Path

from mpt.run.files import write_atomically
from mpt.seams import DataSpec

LARGEST_BYTES = 1 << 24
"""A layout beyond this is not one that was written here; 21,000 classes take half a megabyte."""


def write_layout(path: Path, spec: DataSpec) -> None:
    """Write what a data set delivers. Raises InputOutputError."""
    write_atomically(path, json.dumps(spec.to_record(), indent=1) + "\n")


def read_layout(path: Path) -> DataSpec | None:
    """Return the layout that was written, None where there is none that can be read."""
    try:
        if not path.is_file() or path.stat().st_size > LARGEST_BYTES:  # a pipe would be waited on
            return None
        return DataSpec.from_record(json.loads(path.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
