"""The plan of a training step that does not use mpt: the step unchanged, and ways to change it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from pydantic import ConfigDict, TypeAdapter

from mpt.planner.answers.plan import READ, Plan, without_absent


@dataclass(frozen=True)
class Way:
    """A change to a training script, and the plan of the step with it."""

    __pydantic_config__: ClassVar[ConfigDict] = READ

    lines: list[str]
    """Lines to write into the script."""
    exact: bool
    """The training stays the same to rounding."""
    plan: Plan


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
