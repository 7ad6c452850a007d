"""How this process was started: alone, or as one of several by torchrun and its like."""

from __future__ import annotations

import os

from mpt.errors import ConfigError

SIDE_BY_SIDE = "MPT_SIDE_BY_SIDE"
"""The variable with the number of a comparison's runs that share the processor, this one included."""


def refuse_several_processes(what: str) -> None:
    """Raise ConfigError if this process is one of several: each would do the whole, in a folder of its own."""
    count = os.environ.get("WORLD_SIZE", "1").strip()
    if count.isdecimal() and int(count) > 1:
        raise ConfigError(
            f"this process is one of {count} (WORLD_SIZE), as torchrun starts them, and {what} is done by one: each "
            "would do it for itself. Start it without torchrun, or unset WORLD_SIZE"
        )
