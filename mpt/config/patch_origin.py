"""What a planned patch was made for, kept in a comment of its file, so that laying it over something else is noticed.

The comment is one line of JSON behind `MARK`: the model, the data set, the batch size, the card and the budget. A patch
without it (written by hand, or by an earlier version) is taken as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mpt.config.schema import Config

MARK = "# planned for: "
LARGEST_BYTES = 1 << 16


def describe_origin(config: Config, gpu: str, budget_bytes: int) -> str:
    """Return the comment line of a patch that was planned for a configuration."""
    return MARK + json.dumps({**_subject(config), "gpu": gpu, "budget_bytes": budget_bytes})


def find_strange_patches(patches: Iterable[Path], config: Config) -> list[str]:
    """Return a sentence for each patch that was planned for another model, data set or batch."""
    said = []
    for path in patches:
        origin = _read_origin(path)
        subject = _subject(config)
        changed = [
            f"{key} {origin[key]}, not {value}" for key, value in subject.items() if origin.get(key, value) != value
        ]
        if changed:
            said.append(f"{path} was planned for {' and '.join(changed)}: plan again, or memory may run out")
    return said


def _subject(config: Config) -> dict[str, Any]:
    return {"model": config.model.name, "dataset": config.dataset.name, "batch_size": config.train.batch_size}


def _read_origin(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return {}
    for line in text.splitlines():
        if line.startswith(MARK):
            try:
                found = json.loads(line.removeprefix(MARK))
            except (ValueError, RecursionError):
                return {}
            return found if isinstance(found, dict) else {}
    return {}
