"""Results of an examination: one line each, with its gravity and a remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Level = Literal["ok", "note", "warning", "fault"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "fault")


@dataclass(frozen=True)
class Finding:
    """One thing that was examined. `advice` is the remedy, empty if none is needed."""

    level: Level
    about: str
    text: str
    advice: str = ""


@dataclass
class Section:
    """Findings of one part of the doctor; `tables` are rows under a heading, for the page and for JSON."""

    name: str
    findings: list[Finding] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, level: Level, about: str, text: str, advice: str = "") -> None:
        """Note a finding."""
        self.findings.append(Finding(level, about, text, advice))

    @property
    def worst(self) -> Level:
        """The gravest level found."""
        return LEVELS[max((LEVELS.index(one.level) for one in self.findings), default=0)]

    def to_record(self) -> dict[str, Any]:
        """Return the section as JSON can hold it."""
        return {
            "name": self.name,
            "worst": self.worst,
            "seconds": round(self.seconds, 2),
            "findings": [asdict(one) for one in self.findings],
            "tables": self.tables,
        }


def worst_of(sections: Sequence[Section]) -> Level:
    """Return the gravest level of several sections."""
    return LEVELS[max((LEVELS.index(one.worst) for one in sections), default=0)]
