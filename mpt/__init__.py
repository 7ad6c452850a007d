"""Mixed-precision training that fits the card you have.

Importing `mpt` is cheap: torch is loaded by the rooms that need it, never here.
"""

from importlib import import_module
from types import ModuleType

__version__ = "0.1.0"


def __getattr__(name: str) -> ModuleType:
    """Import `precision` when it is first asked for, so that `mpt.precision.o1.casts(...)` works as written."""
    if name == "precision":
        return import_module("mpt.precision")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
