"""Torch's compiler, imported when something asks for it and not before: a plan needs its settings alone.

Fake tensors, checkpointing and optimizers say `import torch._dynamo` for a setting, or to be left out of graphs. The
import takes nearly as long as that of torch. `postpone` puts a module in its place that has the few files fake tensors
ask for, leaves functions as they are where they are to be kept out of graphs, and becomes the real one when anything
else of it is wanted. From then on parts that a model compiles alone run eagerly, because a plan follows operators.

So are torchvision's data sets and what it tells the ONNX exporter, which come with every model of it, Triton, of which
the settings want one type, and symbolic shapes with sympy (`mpt.planner.device.plain_shapes`).

For processes that plan and do nothing else (`mpt.planner.server.worker`). Found in torch 2.13; if another torch
wants more of its compiler, it is imported, and only time is lost.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import _triton
from torch.utils._python_dispatch import _disable_current_modes

from mpt.planner.device import plain_shapes

NAME = "torch._dynamo"
EARLY = ("utils", "source")
"""Names that fake tensors may ask for in addition to `config`, importable without the rest."""
SYMBOLIC = plain_shapes.NAME

VISION: dict[str, dict[str, Any]] = {
    "torchvision.datasets": {},
    "torchvision.ops._register_onnx_ops": {"_register_custom_op": lambda: None},
}
"""Parts of torchvision that its models import and do not use, with the functions that are called on import."""


class LateModule(ModuleType):
    """A stand-in for a module until something in it is asked for."""

    waits = True

    def __init__(
        self,
        spec: ModuleSpec,
        answered: Mapping[str, Any] | None = None,
        answer_for: Callable[[str], Any] = lambda name: None,
    ) -> None:
        """`answered` holds attributes that need no module; `answer_for` returns further ones, or None."""
        super().__init__(spec.name)
        self.answer_for = answer_for
        self.answered = dict(answered or {})
        vars(self).update(self.answered)
        self.__spec__, self.__loader__, self.__file__, self.__package__ = (
            spec,
            spec.loader,
            spec.origin,
            spec.parent,
        )
        if spec.submodule_search_locations is not None:
            self.__path__ = spec.submodule_search_locations

    def __getattr__(self, name: str) -> Any:
        asks_import_system = name.startswith("__") and name != "__all__"  # as it does of any module
        if asks_import_system or not self.waits:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        answer = self.answer_for(name)
        if answer is not None:
            self.answered[name] = vars(self)[name] = answer
            return answer
        self.load()
        return getattr(self, name)

    def load(self) -> None:
        """Become the module."""
        spec = self.__spec__
        assert spec is not None
        assert spec.loader is not None
        self.waits = False
        for name in self.answered:
            vars(self).pop(name, None)
        with _disable_current_modes():  # nothing that is made on import is a part of the step
            spec.loader.exec_module(self)
        others = (one for one in list(sys.modules.values()) if isinstance(one, ModuleType))
        for other in others:  # also if it was imported by name
            for name, answer in self.answered.items():
                if name in vars(self) and vars(other).get(name) is answer:
                    vars(other)[name] = vars(self)[name]
        if spec.name == NAME:
            stay_eager()


class EarlyFile(LateModule):
    """A stand-in for a file of the compiler that can be imported without the rest."""

    def load(self) -> None:
        """Become the file; the compiler becomes whole if another torch's file wants it so."""
        whole = sys.modules[NAME]
        if isinstance(whole, LateModule) and whole.waits:
            before, Submodules.let_by = Submodules.let_by, True
            try:
                super().load()
            except (ImportError, AttributeError):
                Submodules.let_by = before
                whole.load()
                self.waits = True
            finally:
                Submodules.let_by = before
        if self.waits:
            super().load()


class Submodules(MetaPathFinder):
    """Imports a package as a whole before another of its files is: they import each other in circles."""

    let_by = False
    """Set while files are imported that need not the whole."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a loader of a module that exists already; None for all others."""
        late = sys.modules.get(self.package)
        if (
            not name.startswith(f"{self.package}.")
            or not isinstance(late, LateModule)
            or not late.waits
        ):
            return None
        if self.let_by and self.package == NAME:
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
    """Register stand-ins for the compiler and parts of torchvision, unless those were imported already."""
    postpone_vision()
    postpone_symbols()
    spec = importlib.util.find_spec(NAME)
    if NAME in sys.modules or spec is None:
        return
    module = LateModule(
        spec,
        {
            "disable": keep_out,
            "allow_in_graph": lambda function: function,
            "graph_break": lambda *arguments, **options: None,
        },
    )
    sys.modules[NAME] = module
    vars(torch)["_dynamo"] = module
    importlib.import_module(f"{NAME}.config")
    for own in EARLY:
        file = PathFinder.find_spec(f"{NAME}.{own}", package_path(NAME))
        if file is not None:
            sys.modules[file.name] = vars(module)[own] = EarlyFile(
                file, answer_for=plain_shapes.support_for
            )
    sys.meta_path.insert(0, Submodules(NAME))


def postpone_vision() -> None:
    """Register stand-ins for `VISION`."""
    package = importlib.util.find_spec("torchvision")
    if (
        package is None
        or package.submodule_search_locations is None
        or "torchvision" in sys.modules
    ):
        return
    root = package.submodule_search_locations[0]
    for name, called in VISION.items():
        spec = PathFinder.find_spec(name, [str(Path(root, *name.split(".")[1:-1]))])
        if spec is None:  # another torchvision's files
            continue
        sys.modules[name] = LateModule(spec, called)


def postpone_symbols() -> None:
    """Register stand-ins for sympy and symbolic shapes, which torch asks about plain numbers all the time."""
    answers = {SYMBOLIC: plain_shapes.answer_for, plain_shapes.FUNCTIONS: plain_shapes.largest_for}
    algebra = importlib.util.find_spec("sympy")
    if algebra is None or "sympy" in sys.modules or any(name in sys.modules for name in answers):
        return
    for name, answer_for in answers.items():
        parent, _, own = name.rpartition(".")
        spec = PathFinder.find_spec(name, package_path(parent))
        if spec is not None:
            sys.modules[name] = LateModule(spec, answer_for=answer_for)
            vars(importlib.import_module(parent))[own] = sys.modules[name]
    sys.modules["sympy"] = LateModule(algebra, plain_shapes.SYMPY)
    sys.meta_path.insert(0, Submodules("sympy"))


def package_path(name: str) -> list[str]:
    """Return the folder of a package of torch, whose own file need not be imported for that."""
    return [str(Path(torch.__file__).parent.joinpath(*name.split(".")[1:]))]


@contextmanager
def without_triton() -> Iterator[None]:
    """Inside the block torch finds no Triton, unless that is imported already, in place of importing it."""
    if "triton" in sys.modules:
        yield
        return
    complaints = logging.getLogger("torch.utils.flop_counter")
    loaded: dict[str, Any] = sys.modules
    loaded["triton"] = None  # Python's own way to refuse an import
    _triton.has_triton_package.cache_clear()
    complaints.disabled = True
    try:
        yield
    finally:
        complaints.disabled = False
        del loaded["triton"]
        _triton.has_triton_package.cache_clear()


def keep_out(function: Any = None, *arguments: Any, **options: Any) -> Any:
    """Return a function as it is, as `torch._dynamo.disable` may while nothing is compiled."""
    return (lambda decorated: decorated) if function is None else function


def stay_eager() -> None:
    """Let functions that a model compiles itself run eagerly; if nothing is compiled yet, from the compiler's import
    on."""
    late = sys.modules.get(NAME)
    if not isinstance(late, LateModule) or not late.waits:
        torch.compiler.set_stance("force_eager")
