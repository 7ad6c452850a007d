"""Libraries imported without the further ones that they take along where those are installed.

Diffusers imports PEFT, bitsandbytes and torchao for what they add to its networks, and with them transformers and
torch's compiler, and SciPy for noise schedules that mpt has none of: eight seconds of processor time, and a plan of
mpt's own parts uses none of it. So while the files that look for them are executed, Python does not find them.
Afterwards it does: text encoders are transformers' own. Parts from outside of mpt may want them of diffusers, so
nothing is hidden from those.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

LOOKING = ("diffusers", "diffusers.quantizers")
"""Packages whose first files look for others."""
HIDDEN = (
    "accelerate",
    "bitsandbytes",
    "onnxruntime",
    "peft",
    "scipy",
    "torchao",
    "transformers",
)


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Let Python find no module of these names inside the block, unless it is imported already."""
    modules: dict[str, Any] = sys.modules
    hidden = [name for name in names if name not in modules]
    modules.update(dict.fromkeys(hidden))  # Python's own way to refuse an import
    try:
        yield
    finally:
        for name in hidden:
            del modules[name]


@contextmanager
def without_owners() -> Iterator[None]:
    """Let no module ask inside the block which distribution each installed package is of.

    The answer takes half a second, and diffusers wants it for the versions of two libraries that no plan uses.
    """
    original = metadata.packages_distributions
    setattr(metadata, "packages_distributions", dict)  # noqa: B010 - the stubs call it a function
    try:
        yield
    finally:
        setattr(metadata, "packages_distributions", original)  # noqa: B010


class Lone(MetaPathFinder):
    """Finds the packages of `LOOKING`, which are then executed without those of `HIDDEN`."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the package's own spec with that execution; None for all others."""
        spec = PathFinder.find_spec(name, path) if name in LOOKING else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_alone(module: ModuleType) -> None:
            with without(*HIDDEN), without_owners():
                execute(module)

        setattr(spec.loader, "exec_module", execute_alone)  # noqa: B010 - one loader's own
        return spec


@contextmanager
def lone_libraries() -> Iterator[None]:
    """Import the packages of `LOOKING` alone inside the block."""
    finder = Lone()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
