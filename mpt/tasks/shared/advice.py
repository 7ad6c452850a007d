"""Warnings of generative tasks: each once, and none while a run is young."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FIRST_STEPS = 500
"""Before this many steps samples are alike, codes empty and discriminators ahead in any run: no cause to warn."""


@dataclass
class Advice:
    """Remembers how far the run is and its reports."""

    steps_done: int = 0
    told: set[str] = field(default_factory=set)

    def is_due(self, after: int = FIRST_STEPS) -> bool:
        """Return whether the run is no longer young."""
        return self.steps_done >= after

    def say_once(self, kind: str, message: str | None) -> list[str]:
        """Return a message that is due however young the run is, the first time."""
        if message is None or kind in self.told:
            return []
        self.told.add(kind)
        return [message]

    def say(self, found: Mapping[str, str], after: int = FIRST_STEPS) -> list[str]:
        """Return the messages that are due after that many steps, of kind -> message."""
        if not self.is_due(after):
            return []
        fresh = [message for kind, message in found.items() if kind not in self.told]
        self.told.update(found)
        return fresh
