"""The configuration that a planned patch was made for, kept in a comment of its file: another one is noticed.

The comment is one line of JSON behind `MARK`: the model and its settings, the data set, the optimizer, the batch size,
the card and the budget. A patch without it (written by hand, or by an earlier version) is taken as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mpt.config.differences import flatten
from mpt.config.schema import Config
from mpt.foreign.files import open_foreign

MARK = "# planned for: "
LARGEST_BYTES = 1 << 16
ENOUGH = 0.99
"""Share of the planned memory that counts as all of it: drivers differ by a few MiB in the share of programs."""


def describe_origin(config: Config, gpu: str, budget_bytes: int) -> str:
    """Return the comment line of a patch that was planned for a configuration."""
    return MARK + json.dumps({**_subject(config), "gpu": gpu, "budget_bytes": budget_bytes})


def find_strange_patches(patches: Iterable[Path], config: Config) -> list[str]:
    """Return a sentence for each patch that was planned for another model, data set, optimizer or batch."""
    said = []
    for path in patches:
        origin = flatten(_read_origin(path))
        changed = [
            f"{key} {origin[key]}, not {value}"
            for key, value in flatten(_subject(config)).items()
            if origin.get(key, value) != value
        ]
        if changed:
            said.append(
                f"{path} was planned for {' and '.join(changed)}: plan again, or memory may run out"
            )
    return said


def find_other_cards(patches: Iterable[Path], gpu: str, budget_bytes: int) -> list[str]:
    """Return a sentence for each patch that was planned for another card, or for more memory than there is."""
    said = []
    for path in patches:
        origin = _read_origin(path)
        planned_gpu, planned_bytes = origin.get("gpu"), origin.get("budget_bytes")
        if not isinstance(planned_gpu, str) or not isinstance(planned_bytes, int):
            continue
        before, now = (
            f"{planned_gpu} with {_gib(planned_bytes)}",
            f"{gpu} with {_gib(budget_bytes)}",
        )
        if budget_bytes < ENOUGH * planned_bytes:
            said.append(
                f"{path} was planned for {before}, not {now}: plan again, or memory may run out"
            )
        elif planned_gpu != gpu:
            said.append(
                f"{path} was planned for {before}, not {now}: planned again, a faster recipe may be found"
            )
    return said


def _gib(amount: int) -> str:
    return f"{amount / 2**30:.3g} GiB"


def _subject(config: Config) -> dict[str, Any]:
    model = config.model.settings.model_dump(mode="json", exclude={"weights"})
    return {
        "model": config.model.name,
        "dataset": config.dataset.name,
        "batch_size": config.train.batch_size,
        "optimizer": config.optimizer.name,
        "model_settings": model,
    }


def _read_origin(path: Path) -> dict[str, Any]:
    try:
        with open_foreign(path) as file:
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
