"""`precision.stable_forms`: numerically poor forms in models and losses, replaced by stable ones while a step is taken.

A `TorchFunctionMode` sees every call of torch's functions in a forward, remembers the calls that made a tensor
(`mpt.precision.stable.stable_graph`), and computes the last call of a poor form (the logarithm of a softmax) from the
inputs of the earlier ones. It works above autograd and autocast, so gradients and casts are those of the stable form.
Calls inside of torch's own Python functions are not seen, and nothing inside a compiled graph is.

`mpt doctor` finds which of the forms occur, and tries them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch.overrides import TorchFunctionMode

from mpt.config.options import STABLE_FORMS
from mpt.precision.stable.stable_graph import ALIASES, WINDOWS, Graph, read_call
from mpt.precision.stable.stable_logs import (
    LOGS,
    Rewrite,
    cross_entropy,
    logarithm,
    logarithm_of_one_more,
    quotient,
)
from mpt.precision.stable.stable_sums import (
    difference,
    distance,
    divide_first,
    epsilon,
    mean_of_squares,
    root,
    shifted_scale,
)
from mpt.seams import NOTHING

Rule = Callable[..., Rewrite | None]
Found = Callable[[str, Rewrite], None]
"""Told of each form that is replaced: its name, and both expressions."""

RULES: Mapping[str, Mapping[str, Rule]] = {
    "log": {"log": logarithm, "log1p": logarithm_of_one_more},
    "cross_entropy": {"binary_cross_entropy": cross_entropy},
    "softmax": {
        "div": quotient,
        "reciprocal": quotient,
        "softmax": shifted_scale,
        "sub": shifted_scale,
    },
    "norm": {"sqrt": root, "rsqrt": root, "pow": root, "mean": mean_of_squares},
    "variance": {"sub": difference},
    "distance": {"sub": distance},
    "divide_first": {"mul": divide_first, "div": divide_first},
    "epsilon": {"add": epsilon, "clamp": epsilon, "normalize": epsilon},
}
"""Form -> the call that it ends with -> its rule. The names are those of the setting."""
assert tuple(RULES) == STABLE_FORMS
REACHES: Mapping[str, tuple[str, ...]] = {
    "log": (*LOGS, "neg"),
    "cross_entropy": ("sigmoid", "cast", "reshape"),
    "softmax": (*LOGS, "amax", "cast"),
    "norm": ("mul", "pow", "square", "sum", "mean", "add"),
    "variance": ("mul", "pow", "square", "mean", *WINDOWS),
    "distance": ("mul", "pow", "square", "sum", "add"),
    "divide_first": ("mul", "div", "pow", "square", "sum", "matmul", "cast"),
    "epsilon": (),
}
"""Form -> the calls that it looks back to; others are not remembered."""
assert all(name in ALIASES for names in REACHES.values() for name in names)


class StableForms(TorchFunctionMode):
    """Replaces some forms within its block. One per run; entered again inside of itself it changes nothing."""

    def __init__(self, forms: Iterable[str], found: Found | None = None) -> None:
        super().__init__()
        self.forms = [form for form in STABLE_FORMS if form in set(forms)]
        self.found = found
        self.rules: dict[str, list[tuple[str, Rule]]] = defaultdict(list)
        for form in self.forms:
            for call, rule in RULES[form].items():
                self.rules[call].append((form, rule))
        self.remembered = frozenset(name for form in self.forms for name in REACHES[form])
        self.graph = Graph()
        self.depth = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        call = read_call(func, args, kwargs or {})
        if call is None:
            return func(*args, **(kwargs or {}))
        result: Any = None
        for form, rule in self.rules.get(call.name, ()):
            rewrite = rule(self.graph, call)
            if rewrite is not None:
                if self.found is not None:
                    self.found(form, rewrite)
                result = rewrite.make()
                break
        if result is None:
            result = func(*args, **(kwargs or {}))
        if call.name in self.remembered:
            self.graph.note(result, call)
        return result

    def __enter__(self) -> StableForms:
        """Begin a forward, unless inside of one."""
        global _active
        self.depth += 1
        if self.depth == 1:
            self.graph, _active = Graph(), self
            super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        """Forget the forward's calls."""
        global _active
        self.depth -= 1
        if self.depth == 0:
            super().__exit__(*exception)  # type: ignore[no-untyped-call]
            self.graph, _active = Graph(), None


_active: StableForms | None = None
"""The forms in force: a forward runs on one thread at a time."""


class Region(AbstractContextManager[None]):
    """A part of a forward that may be computed again: forms do not reach into it from outside, or out of it."""

    def __init__(self, mode: StableForms) -> None:
        self.mode = mode
        self.outside: list[Graph] = []

    def __enter__(self) -> None:
        self.mode.__enter__()
        self.outside.append(self.mode.graph)
        self.mode.graph = Graph()

    def __exit__(self, *exception: Any) -> None:
        self.mode.graph = self.outside.pop()
        self.mode.__exit__(*exception)


def checkpoint_context() -> AbstractContextManager[Any]:
    """Return the context for a forward that is checkpointed and for its recomputations."""
    return Region(_active) if _active is not None else NOTHING


def make_stable_forms(forms: Iterable[str]) -> AbstractContextManager[Any]:
    """Return the context of the forms that the settings name, which is nothing if they name none."""
    chosen = list(forms)
    return StableForms(chosen) if chosen else NOTHING
