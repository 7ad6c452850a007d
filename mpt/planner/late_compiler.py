"""Torch's compiler, imported when something asks for it and not before: a plan needs its settings alone.

Fake tensors, checkpointing and optimizers say `import torch._dynamo` for a setting, or to be left out of graphs. The
import takes nearly as long as that of torch. `postpone` puts a module in its place that has the few files fake tensors
ask for, leaves functions as they are where they are to be kept out of graphs, and becomes the real one when anything
else of it is wanted. From then on what a model compiles by itself runs eagerly, because a plan follows operators.

For processes that plan and do nothing else (`mpt.planner.worker`). Found in torch 2.13; where another torch wants more
of its compiler, it is imported, and only time is lost.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

NAME = "torch._dynamo"
EARLY = ("config", "utils", "source")
"""What fake tensors ask for, in an order in which it can be imported without the rest."""


class LateModule(ModuleType):
    """Stands for the compiler's package until something of it is asked for."""

    waits = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not self.waits:  # the former is what the import system asks of any module
            raise AttributeError(f"module {NAME!r} has no attribute {name!r}")
        self.load()
        return getattr(self, name)

    def load(self) -> None:
        """Become the compiler's package."""
        spec = self.__spec__
        assert spec is not None
        assert spec.loader is not None
        self.waits = False
        with _disable_current_modes():  # nothing that is made on import is a part of the step
            spec.loader.exec_module(self)
        stay_eager()


class Submodules(MetaPathFinder):
    """Imports the compiler as a whole before another of its files is: they import each other in circles."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return what leads to the module that is there by then; None for all others."""
        late = sys.modules.get(NAME)
        if not name.startswith(f"{NAME}.") or not isinstance(late, LateModule) or not late.waits:
            return None
        late.load()
        present = sys.modules.pop(name, None)  # or the import system would run it a second time
        return None if present is None else ModuleSpec(name, Present(present))


class Present(Loader):
    """Returns a module that has been imported meanwhile."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        """Leave it as it was."""
        module.__spec__ = self.spec


def postpone() -> None:
    """Put the stand-in where the compiler would be, unless that is there already."""
    spec = importlib.util.find_spec(NAME)
    if NAME in sys.modules or spec is None:
        return
    module: Any = LateModule(NAME)
    module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
    module.__path__, module.__package__ = spec.submodule_search_locations, NAME
    module.disable, module.graph_break = keep_out, lambda *arguments, **options: None
    sys.modules[NAME] = module
    vars(torch)["_dynamo"] = module
    try:
        for name in EARLY:
            importlib.import_module(f"{NAME}.{name}")
    except (ImportError, AttributeError):  # another torch's files want it whole
        module.load()
    sys.meta_path.insert(0, Submodules())


def keep_out(function: Any = None, *arguments: Any, **options: Any) -> Any:
    """Return a function as it is, as `torch._dynamo.disable` may while nothing is compiled."""
    return (lambda decorated: decorated) if function is None else function


def stay_eager() -> None:
    """Let what a model compiles by itself run eagerly; where nothing is compiled yet, from the compiler's import on."""
    late = sys.modules.get(NAME)
    if not isinstance(late, LateModule) or not late.waits:
        torch.compiler.set_stance("force_eager")
