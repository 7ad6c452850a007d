"""A place where two trainings part, and the findings of a comparison."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from mpt.doctor.partings.difference import FLOOR_UNITS

Kind = Literal[
    "network",
    "weights",
    "batch",
    "random numbers",
    "operator",
    "gradient",
    "update",
    "skip",
    "loss",
]


@dataclass(frozen=True)
class Parting:
    """One difference of the trainings."""

    step: int
    phase: str
    kind: Kind
    where: str
    """Operator with module and source line, parameter or field."""
    first: str
    second: str
    """The value that each of the two has there."""
    reason: str
    error: float | None = None
    """Relative to the first training's."""
    rounding: float | None = None
    """The difference that rounding alone would make."""

    def describe(self) -> str:
        """Return place, difference and reason in a sentence."""
        size = "" if self.error is None else f", {show_share(self.error)} apart"
        if self.rounding is not None and self.error is not None:
            size += f" (rounding: {show_share(self.rounding)})"
        place = f"step {self.step}" + (f", phase {self.phase}" if self.phase else "")
        sides = f": {self.first} against {self.second}" if self.first or self.second else ""
        return f"{place}, {self.where}{sides}{size}. Reason: {self.reason}"


@dataclass
class Comparison:
    """Findings of a lockstep. Partings are None if the steps that were taken have none."""

    start: int
    steps: int
    """Steps taken."""
    bits: Parting | None = None
    """The first difference of any size."""
    beyond: Parting | None = None
    """The first that rounding does not explain."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def not_finite(self) -> dict[str, Any]:
        """The first step at which a loss is NaN or infinite in both: step, name; empty if none is."""
        for row in self.rows:
            one, other = row["losses"]
            for name, value in one.items():
                if name in other and not math.isfinite(value) and not math.isfinite(other[name]):
                    return {"step": row["step"], "name": name}
        return {}

    def table(self) -> Iterator[str]:
        """Yield the lines of a table of the steps; none without any."""
        if not self.rows:
            return
        width = max(24, *(len(name) + 2 for name in self.rows[0]["losses"][0]))
        yield f"{'step':>6}  {'loss':<{width}}{'A':>14}{'B':>14}{'weights apart':>16}{'rounding':>12}"
        for row in self.rows:
            rounding = "-" if row["rounding"] is None else f"{row['rounding']:.1e}"
            step, more = row["step"], f"{row['weights_apart']:>16.1e}{rounding:>12}"
            for name, value in row["losses"][0].items():
                other = row["losses"][1].get(name)
                shown = "-" if other is None else f"{other:.6g}"
                yield f"{step:>6}  {name:<{width}}{value:>14.6g}{shown:>14}{more}"
                step = more = ""  # of a step's first line alone

    def to_record(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        return {**asdict(self), "not_finite": self.not_finite}


def show_share(value: float) -> str:
    """Write a relative error."""
    return f"{value:.2%}" if 1e-4 <= abs(value) < 10 else f"{value:.1e}"


def exceeds(place: Parting, unit: float) -> bool:
    """Return whether a first difference is itself more than rounding."""
    return place.error is None or place.error > FLOOR_UNITS * unit
