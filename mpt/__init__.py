"""Mixed-precision training that fits the card you have.

Importing `mpt` is cheap: torch is loaded by the modules that need it, never here. The commands are offered as functions
(`mpt.api`): `mpt.load`, `mpt.train`, `mpt.plan`, `mpt.compare`, `mpt.infer`, `mpt.doctor`, `mpt.diff`,
`mpt.verify_resume`, and for a loop of your own `mpt.build` and `mpt.update`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mpt.version import VERSION

if TYPE_CHECKING:
    from mpt.api import build as build
    from mpt.api import compare as compare
    from mpt.api import diff as diff
    from mpt.api import infer as infer
    from mpt.api import load as load
    from mpt.api import plan as plan
    from mpt.api import train as train
    from mpt.api import update as update
    from mpt.api import verify_resume as verify_resume

__version__ = VERSION
__all__ = [
    *("__version__", "build", "compare", "diff", "infer", "load"),
    *("plan", "plan_step", "train", "update", "verify_resume"),
]
PACKAGES = ("doctor", "precision")
"""Looked up by attribute: `mpt.precision.o1.casts`, and `mpt.doctor`, which calls `mpt.examine`."""


def __getattr__(name: str) -> Any:
    """Import a function or a package of the API when it is first asked for."""
    if name in __all__:
        return getattr(import_module("mpt.api"), name)
    if name == "examine":
        return import_module("mpt.api").doctor
    if name in PACKAGES:
        return import_module(f"mpt.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
