"""Configurations that a planning process need not build again to know that they are refused.

Settings that a memory trick refuses (a loss scale, an optimizer that it does not know), it refuses together with other
tricks as well, and a search tries many pairs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mpt.config.schema import Config
from mpt.errors import ConfigError


class Refusals:
    """Refusals of this process, with their messages."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[dict[str, str], ConfigError]]] = {}

    @contextmanager
    def kept(self, config: Config, asked: Any) -> Iterator[None]:
        """Raise a known refusal at once, else keep the one that the block raises."""
        self.check(config, asked)
        try:
            yield
        except ConfigError as error:
            self.note(config, asked, error)
            raise

    def note(self, config: Config, asked: Any, error: ConfigError) -> None:
        """Note that a configuration was refused, if one of its tricks did that. `asked` are its other tricks."""
        rest, tricks = _parted(config, asked)
        if str(error).startswith(tuple(f"memory.{name}:" for name in tricks)):
            self._found.setdefault(rest, []).append((tricks, error))

    def check(self, config: Config, asked: Any) -> None:
        """Raise the refusal of a configuration that differs from this one in having fewer tricks."""
        rest, tricks = _parted(config, asked)
        for refused, error in self._found.get(rest, ()):
            if refused.items() <= tricks.items():
                raise error.with_traceback(None)


def _parted(config: Config, asked: Any) -> tuple[str, dict[str, str]]:
    """Split a request into its tricks' settings and the rest."""
    data = config.to_data()
    memory = data.pop("memory")
    tricks = {
        name: json.dumps(memory.pop(name, None), sort_keys=True) for name in config.memory.tricks
    }
    return json.dumps([data, memory, asked], sort_keys=True), tricks
