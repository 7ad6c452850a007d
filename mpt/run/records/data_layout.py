"""The fields and classes of a run's data set, kept in its folder: `data.json` (see `mpt.data.loading.absent` for its
use).
"""

from __future__ import annotations

import json
from pathlib import Path

from mpt.foreign.files import read_json
from mpt.run.process.files import write_atomically
from mpt.seams import DataSpec


def write_layout(path: Path, spec: DataSpec, training_list: str | None = None) -> None:
    """Write a data set's fields and classes, and a hash of the training set's list. Raises InputOutputError."""
    record = {
        **spec.to_record(),
        **({"training_list": training_list} if training_list is not None else {}),
    }
    write_atomically(path, json.dumps(record, indent=1) + "\n")


def read_training_list(path: Path) -> str | None:
    """Return the hash of the training set's list that was written, None if there is none that can be read."""
    try:
        found = read_json(path).get("training_list")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def read_layout(path: Path) -> DataSpec | None:
    """Return the layout that was written, None if there is none that can be read."""
    try:
        return DataSpec.from_record(read_json(path))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
