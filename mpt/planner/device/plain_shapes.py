"""Answers of torch's functions for symbolic shapes about plain numbers, so that a plan need not import them.

Torch's rules for shapes call them (`guard_or_false(size == 1)`) so that a size may be a symbol, and the import brings
sympy. Sizes of a plan are numbers. If one of these is asked about anything else, the module itself answers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._ordered_set import OrderedSet

NAME = "torch.fx.experimental.symbolic_shapes"
NUMBERS = (int, float, bool)


def same(value: Any) -> Any:
    """Return a truth value as it is."""
    return value if type(value) is bool else NotImplemented


def no(value: Any) -> Any:
    """Return False for a number."""
    return False if type(value) in NUMBERS else NotImplemented


def yes(value: Any) -> Any:
    """Return True for a number."""
    return True if type(value) in NUMBERS else NotImplemented


def are_equal(one: Any, other: Any) -> Any:
    """Return whether two numbers, or two sequences of them, are equal."""
    if type(one) is int and type(other) is int:
        return one == other
    are_sequences = isinstance(one, tuple | list) and isinstance(other, tuple | list)
    if are_sequences and all(type(size) is int for sizes in (one, other) for size in sizes):
        return list(one) == list(other)
    return NotImplemented


def are_all(*values: Any) -> Any:
    """Return whether all truth values are true."""
    return all(values) if all(type(value) is bool for value in values) else NotImplemented


def is_any(*values: Any) -> Any:
    """Return whether one of truth values is true."""
    return any(values) if all(type(value) is bool for value in values) else NotImplemented


def has_symbols(value: Any) -> Any:
    """Return False for numbers, tensors with sizes in numbers and sequences of these."""
    if isinstance(value, tuple | list):
        return False if all(has_symbols(one) is False for one in value) else NotImplemented
    if (
        isinstance(value, Tensor)
        and not value._has_symbolic_sizes_strides
        and value.layout == torch.strided
    ):
        return False
    return False if type(value) in NUMBERS else NotImplemented


def no_symbols(value: Any) -> Any:
    """Yield nothing for None, numbers and tensors with sizes in numbers."""
    return iter(()) if value is None or has_symbols(value) is False else NotImplemented


def none_of(value: Any) -> Any:
    """Return no symbols, for None, numbers and tensors with sizes in numbers."""
    return OrderedSet[Any]() if value is None or has_symbols(value) is False else NotImplemented


def no_bindings(environment: Any, *others: Any, **options: Any) -> Any:
    """Return None if there are no symbols."""
    return None if environment is None else NotImplemented


RULES: dict[str, Callable[..., Any]] = {
    "guard_or_false": same,
    "guard_or_true": same,
    "statically_known_true": same,
    "expect_true": lambda value, skip=0: same(value),
    "guard_int": lambda value: value if type(value) is int else NotImplemented,
    "is_nested_int": no,
    "is_symbolic": no,
    "has_guarding_hint": yes,
    "sym_eq": are_equal,
    "sym_and": are_all,
    "sym_or": is_any,
    "has_free_symbols": has_symbols,
    "has_free_unbacked_symbols": has_symbols,
    "free_unbacked_symbols": none_of,
    "free_symbols": none_of,
    "_iterate_exprs": no_symbols,
    "_iterate_nodes": no_symbols,
    "compute_unbacked_bindings": no_bindings,
}


class NeverRaised(RuntimeError):
    """A stand-in for an exception that only symbolic sizes raise, for modules that catch it by name."""


class NoSymbol:
    """A stand-in for a class without instances here: sympy's expressions, sources of random numbers in compiled
    graphs."""


SYMPY = {"Basic": NoSymbol}


FUNCTIONS = "torch.utils._sympy.functions"


def answer_for(name: str) -> Any:
    """Return the replacement of a member of torch's module; None if the module itself must be asked for it."""
    if name == "GuardOnDataDependentSymNode":
        return NeverRaised
    return partial(_answer, NAME, name, RULES.get(name, unknown)) if name.islower() else None


def largest_for(name: str) -> Any:
    """Return the replacement of sympy's Max, which a rule for shapes imports on every call; else None."""
    return partial(_answer, FUNCTIONS, name, unknown) if name == "Max" else None


@dataclass(frozen=True)
class NamedSource:
    """A stand-in for the origin of a constant that becomes a fake tensor, which only compiled graphs ask."""

    name: str


def support_for(name: str) -> Any:
    """Return replacements of the compiler's members that torchvision and fake tensors import; else None."""
    if name in ("ConstantSource", "RandomValueSource"):
        return NamedSource if name == "ConstantSource" else NoSymbol
    return (
        partial(_answer, "torch._dynamo.utils", name, unknown)
        if name == "is_compile_supported"
        else None
    )


def unknown(*arguments: Any, **options: Any) -> Any:
    """Answer nothing: torch's rules import some functions on every call, and call them for symbols alone."""
    return NotImplemented


def _answer(
    module_name: str, name: str, rule: Callable[..., Any], *arguments: Any, **options: Any
) -> Any:
    found = rule(*arguments, **options)
    if found is not NotImplemented:
        return found
    module: Any = importlib.import_module(module_name)
    if module.waits:
        module.load()
    return getattr(module, name)(*arguments, **options)
