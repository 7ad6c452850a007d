"""In which settings two configurations differ, as dotted keys. Works on plain values, so that old files can be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ABSENT = "absent"


@dataclass(frozen=True)
class Difference:
    """One setting that differs; a side that lacks the key holds `ABSENT`."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} {show(self.before)} -> {show(self.now)}"


def find_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Return the changes from one configuration to the other, in the order of the new one, removed keys last."""
    old, new = flatten(before), flatten(now)
    keys = [*new, *(key for key in old if key not in new)]
    found = (Difference(key, old.get(key, ABSENT), new.get(key, ABSENT)) for key in keys)
    return [difference for difference in found if difference.before != difference.now]


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested mapping with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def show(value: Any) -> str:
    """Return a value as the YAML file spells it, in short."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
