"""Compile the trained networks with `torch.compile`.

Fused kernels write fewer intermediate tensors, and the compiler recomputes cheap operators in backward if that saves
memory. The first steps take minutes. Fused arithmetic rounds differently: results are not bit-equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from mpt.config.options import Options
from mpt.errors import ConfigError
from mpt.seams import MemoryTrick, Run
from mpt.seams.task_kinds import differentiates_twice

GRAPHED = ("reduce-overhead", "max-autotune")
"""The modes in which torch records CUDA graphs."""
CONFLICTS = {
    "recompute": "compiled networks choose for themselves what to recompute; leave one of the two out",
    "offload_activations": "compiled graphs save tensors without asking; use recompute or compile alone",
}


class Settings(Options):
    """How hard the compiler tries: `compile: true`, or one of torch's modes."""

    shorthand: ClassVar[str | None] = "mode"

    mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """Mode of `torch.compile`: how long it compiles for faster kernels."""
    dynamic: bool | None = None
    """Compile once for all batch sizes; null lets torch decide when sizes change."""
    backend: Literal["inductor", "aot_eager"] = "inductor"
    """`aot_eager` traces without generating code: for finding out whether a network can be compiled."""


class Compile(MemoryTrick):
    """Compiles in place; state-dict keys and deep copies are as before."""

    name, exact = "compile", False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def attach(self, run: Run) -> None:
        """Compile each trained network, after precision has changed it."""
        if run.precision.numerics.casts_calls:
            raise ConfigError(
                f"memory.compile: {run.precision.name} casts call by call, which a compiled graph has no calls for; "
                "use precision=amp, which the compiler knows"
            )
        if run.config.precision.settings.stable_forms:
            raise ConfigError(
                "memory.compile: precision.stable_forms replaces calls one by one, which a compiled graph has no calls "
                "for; leave one of the two out, or write the stable forms into the model (mpt doctor names the lines)"
            )
        if differentiates_twice(run.task):
            raise ConfigError(
                f"memory.compile: task {run.config.task.name} differentiates a gradient (a penalty on it, or path "
                "lengths), which compiled networks cannot; leave compile out, or set the penalty to 0"
            )
        if torch._guards.detect_fake_mode() is not None:
            run.notes.append(self._planned_how())
        mode = None if self.settings.mode == "default" else self.settings.mode
        for network in _networks(run.task.trainable.values()):
            if self.settings.backend == "inductor":
                network.compile(dynamic=self.settings.dynamic, mode=mode)
            else:
                network.compile(dynamic=self.settings.dynamic, backend=self.settings.backend)

    def _planned_how(self) -> str:
        """Return the plan's notes on its figures."""
        if self.settings.backend == "aot_eager":
            return "memory.compile: planned from AOTAutograd's graphs, operator by operator, as aot_eager runs them"
        how = (
            "memory.compile: planned from AOTAutograd's graphs and its partition; elementwise results that only "
            "elementwise operators and reductions read are taken as fused away"
        )
        pool = f"; the CUDA graphs of {self.settings.mode} have a pool of their own, which gives nothing back"
        return how + (pool if self.settings.mode in GRAPHED else "")


def _networks(modules: Any) -> Iterator[nn.Module]:
    """Yield the modules that are called: a ModuleDict is networks trained together and has no forward of its own."""
    for module in modules:
        yield from _networks(module.values()) if isinstance(module, nn.ModuleDict) else [module]


def build(settings: Settings) -> Compile:
    """Build the trick."""
    return Compile(settings)
