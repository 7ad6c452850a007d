"""Numbers and series out of a run's files, in which anything may be missing or of another kind."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

LARGEST_WHOLE = 2.0**53
"""Beyond it a float is no longer each whole number."""
Series = tuple[list[int], list[float]]
"""Steps and the value at each."""


def finite_median(values: Sequence[float]) -> float:
    """Return the median of the finite values; NaN if there are none."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan


def section(mapping: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a mapping inside a mapping, empty if it is absent or something else."""
    value = mapping.get(key)
    return value if isinstance(value, Mapping) else {}


def number(value: Any, otherwise: float = math.nan) -> float:
    """Read a number that JSON may hold as text ("NaN", "inf") or as null."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return otherwise
    try:
        return float(value)
    except (ValueError, OverflowError):
        return otherwise


def whole(value: Any, otherwise: int = 0) -> int:
    """Read a count or a step, which JSON may hold as anything; `otherwise` for a value that is none, infinity
    included."""
    found = number(value)
    return int(found) if abs(found) < LARGEST_WHOLE else otherwise


def curves(lines: Sequence[Mapping[str, Any]], key: str) -> dict[str, Series]:
    """Collect a mapping that every line holds under `key` into one series per name."""
    found: dict[str, Series] = {}
    for line in lines:
        for name, value in section(line, key).items():
            if isinstance(value, int | float | str):
                steps, values = found.setdefault(str(name), ([], []))
                steps.append(whole(line.get("step")))
                values.append(number(value))
    return found


def curve(lines: Sequence[Mapping[str, Any]], key: str) -> Series:
    """Collect one number that every line holds under `key`."""
    found = [(whole(line.get("step")), number(line[key])) for line in lines if key in line]
    return [step for step, _ in found], [value for _, value in found]
