"""Precision modes, one file per family, and Apex's O1 as a library (`mpt.precision.o1`)."""

from importlib import import_module
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Import `o1` when it is first asked for, so that `import mpt` needs no torch."""
    if name == "o1":
        return import_module("mpt.precision.o1")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
