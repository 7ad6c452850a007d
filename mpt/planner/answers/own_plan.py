"""The plan of a training step that does not use mpt: the step unchanged, and ways to change it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter

from mpt.planner.answers.edits import Edit
from mpt.planner.answers.plan import READ, Plan, without_absent

ORDER = {"recompute": 0, "autocast": 1, "optimizer": 2, "accumulate": 3}
"""Changes -> the order in which they are written down."""
UNPLACED = "where it applies; no single place for it was found"
AS_WORDS = "an option of its own, for its command line"
AS_BATCHES = "options of its own, for its command line in place of its batch: as many samples for each update"
Places = tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Way:
    """A change to a training script, and the plan of the step with it."""

    __pydantic_config__: ClassVar[ConfigDict] = READ

    lines: list[str]
    """Lines to write into the script."""
    exact: bool
    """The training stays the same to rounding."""
    plan: Plan
    edits: list[Edit] = field(default_factory=list)
    """The places of the lines; without one, a change has no place that is known."""
    unplaced: dict[str, list[str]] = field(default_factory=dict)
    """A change without a place -> its lines."""
    words: dict[str, str] = field(default_factory=dict)
    """A change for which the script has an option -> the words for its command line."""
    note: str = ""
    """How the result differs, if it does otherwise than by rounding."""

    @property
    def changes(self) -> list[tuple[str, Places]]:
        """Its changes by name, each with its places in words and the lines for them, imports last."""
        found: dict[str, Places] = {
            name: ((UNPLACED, tuple(lines)),) for name, lines in self.unplaced.items()
        }
        for name, words in self.words.items():
            found[name] = ((AS_BATCHES if name == "accumulate" else AS_WORDS, (words,)),)
        for edit in sorted(self.edits, key=lambda one: (one.how == "top", one.file, one.first)):
            found[edit.change] = (*found.get(edit.change, ()), (edit.place, edit.lines))
        return [*found.items()]


@dataclass(frozen=True)
class OwnPlan:
    """A step unchanged and the ways that were planned, best first: those that fit by time, then by memory."""

    __pydantic_config__: ClassVar[ConfigDict] = READ

    name: str
    plan: Plan
    ways: list[Way]

    def as_data(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        data: dict[str, Any] = _adapter().dump_python(self)
        for plan in (data["plan"], *(way["plan"] for way in data["ways"])):
            without_absent(plan)
            del plan["timeline"]
        return data

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> OwnPlan:
        """Read the data of `as_data`. Raises ValueError."""
        return _adapter().validate_python(data)


@cache
def _adapter() -> TypeAdapter[OwnPlan]:
    return TypeAdapter(OwnPlan)
