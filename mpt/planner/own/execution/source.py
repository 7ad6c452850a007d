"""What is planned, by name, and what it returns: the types that factories and scripts have in common."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpt.planner.answers.edits import Edit
from mpt.planner.own.text.command_lines import Parsed
from mpt.planner.own.text.places import Standing


@dataclass(frozen=True)
class Source:
    """A factory by name, or a script: `where` is a module or a file."""

    where: str
    function: str = ""
    """Empty for a script."""
    folder: str = ""
    """Folder that modules are imported from, in addition to installed packages."""
    words: tuple[str, ...] = ()
    """A script's command line."""
    edits: tuple[Edit, ...] = ()
    """Lines that its files are to have in addition."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Source:
        """Return a source from its fields as JSON has them."""
        return cls(**{**fields, "words": tuple(fields.get("words", ()))})

    @property
    def is_script(self) -> bool:
        """Whether it is executed as it stands."""
        return not self.function

    @property
    def is_file(self) -> bool:
        """Whether `where` is a file, a notebook perhaps, and not a module."""
        return self.where.endswith((".py", ".ipynb"))

    def __str__(self) -> str:
        if self.is_script:
            return shlex.join([Path(self.where).name, *self.words])
        return f"{Path(self.where).name if self.is_file else self.where}:{self.function}"


@dataclass(frozen=True)
class Made:
    """The values that a factory returned."""

    step: Callable[[], Any]
    named: Mapping[str, Any]
    """Values that may be networks, by name: those of the tuple, or the variables that the step sees."""
    batch: Any = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Variables where it stands as the step begins, by name."""
    places: Mapping[str, Standing] = field(default_factory=dict)
    """Variable -> where the function stands that it is one of."""
    parsed: Sequence[Parsed] = ()
    """The parsers of its command line."""
    stop: Callable[[], None] = lambda: None
    """To be called when no more steps are wanted."""
    notes: Callable[[], list[str]] = list
    """Assumptions of the steps, after them."""
