"""The planner's proposals of memory tricks, and the setting when memory runs out: read from the tricks' own files.

A trick's file says it in literals, so that a new file is planned, proposed and used in recovery without being named
anywhere else:

- `RELIEVES`: the memory that it reduces, "activations", "weights", "gradients", "optimizer" (its state, and perhaps
  gradients), "batch" (the samples that go through the networks at once; its shorthand is a number of samples),
  "fragmentation" (of the allocator) or "moments" (the run's work outside its steps).
- `PROPOSALS`: the planner's proposals as its YAML value, the gentlest first.
- `DIALS`: settings with one number to be found, each a mapping in which that number is a pair: the value that relieves
  most, and the one that relieves least. Whole numbers stay whole; "activations" means the configuration's own list
  of that category at its peak, in GiB.
- `LADDER`: the YAML value that is set when memory runs out in training. Only for exact tricks, which can be applied to
  a run that has begun.
- `RANK`: a number by which tricks of a kind are tried, those that cost less time first.
- `IN_PARTS = False`: not proposed together with a trick that splits the batch.
- `POINTLESS_ON`: device type -> why it relieves nothing there.
- `LOSSY = True`: it changes the learned result, beyond the rounding of a sum; proposed only if that is allowed.
- `ENVIRONMENT`: variables to set before torch first allocates, unless the user has.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mpt.config.finding.registry import INSTALLED, Plugin
from mpt.errors import PartError

KINDS = (
    "activations",
    "weights",
    "gradients",
    "optimizer",
    "batch",
    "fragmentation",
    "moments",
)
LAST_RANK = 100


@dataclass(frozen=True)
class Dial:
    """Settings of a trick with one number to be found between two ends."""

    name: str
    most: float | str
    """The end that relieves most, or the category whose GiB it is."""
    least: float
    rest: Mapping[str, Any]

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Dial:
        """Return the dial of a literal: the one value that is a pair is the number."""
        ((name, (most, least)),) = (
            (name, value) for name, value in settings.items() if isinstance(value, tuple)
        )
        return cls(
            name, most, least, {key: value for key, value in settings.items() if key != name}
        )

    def end(self, gibibytes: Mapping[str, float]) -> float:
        """Return the end that relieves most; `gibibytes` is the memory of each category."""
        return gibibytes.get(self.most, 0.0) if isinstance(self.most, str) else self.most

    def settings(self, value: float) -> dict[str, Any]:
        """Return the trick's settings with this number."""
        whole = isinstance(self.most, int) and isinstance(self.least, int)
        return {self.name: round(value) if whole else round(value, 2), **self.rest}


@dataclass(frozen=True)
class Relief:
    """Declarations of one trick's file."""

    name: str
    relieves: str
    proposals: tuple[Any, ...]
    dials: tuple[Dial, ...]
    ladder: Any
    """None if it is not for the ladder."""
    rank: int
    in_parts: bool
    is_lossy: bool
    pointless_on: Mapping[str, str]
    conflicts: Mapping[str, str]

    def suits(self, other: Relief) -> bool:
        """Whether two tricks may be combined."""
        return other.name not in self.conflicts and self.name not in other.conflicts


def read_relief(plugin: Plugin) -> Relief | None:
    """Return a trick's declarations, or None for one that relieves nothing. Raises PartError for an unknown kind."""
    literals = plugin.literals
    kind = literals.get("RELIEVES")
    if kind is None:
        return None
    if kind not in KINDS:
        raise PartError(f"{plugin.path}: RELIEVES is {kind!r}; allowed are {', '.join(KINDS)}")
    return Relief(
        name=plugin.name,
        relieves=kind,
        proposals=tuple(literals.get("PROPOSALS", ())),
        dials=tuple(Dial.read(settings) for settings in literals.get("DIALS", ())),
        ladder=literals.get("LADDER"),
        rank=literals.get("RANK", LAST_RANK),
        in_parts=literals.get("IN_PARTS", True),
        is_lossy=literals.get("LOSSY", False),
        pointless_on=literals.get("POINTLESS_ON", {}),
        conflicts=plugin.conflicts,
    )


def reliefs(*kinds: str) -> list[Relief]:
    """Return the tricks that relieve one of these, in the order in which they are tried."""
    folders = [os.path.join(package.folder, "memory") for package in INSTALLED.packages]
    found = _all_reliefs(tuple((folder, _changed_at(folder)) for folder in folders))
    return [one for one in found if one.relieves in kinds]


@functools.lru_cache(8)
def _all_reliefs(folders: tuple[tuple[str, int], ...]) -> list[Relief]:
    """Read every trick. A search asks hundreds of times, so it is done once as long as no file comes or goes."""
    plugins = [INSTALLED.find("memory", name) for name in INSTALLED.names("memory")]
    found = [read_relief(plugin) for plugin in plugins if plugin is not None]
    return sorted((one for one in found if one is not None), key=lambda one: one.rank)


def _changed_at(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:  # a part package without memory tricks
        return 0


def splitter() -> str:
    """Return the name of the trick that splits the batch."""
    return reliefs("batch")[0].name


def environment(tricks: Mapping[str, Plugin]) -> dict[str, str]:
    """Return the variables that the chosen tricks want to be set before torch allocates."""
    return {
        name: value
        for plugin in tricks.values()
        for name, value in plugin.literals.get("ENVIRONMENT", {}).items()
    }
