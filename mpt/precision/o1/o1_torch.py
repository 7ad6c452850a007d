"""Replacements in torch while any thread is inside `casts`, taken back after the last one left.

A function mode sees calls. It does not see the autograd engine recomputing a checkpoint or running the backward of a
custom `autograd.Function`, a recurrent layer refusing half input before it calls anything, or TorchScript. Each
replacement asks for the calling thread's context first, so that threads outside `casts` notice nothing.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.jit._script import RecursiveScriptModule

from mpt.nn.shared.mixin import become

Make = Callable[[Callable[..., Any]], Callable[..., Any]]
Recall = Callable[[], Callable[[], AbstractContextManager[None]] | None]
HALVES = (torch.float16, torch.bfloat16)


class Replacements:
    """Attributes of modules and classes that are replaced while `open` was called more often than `close`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.wanted: dict[tuple[int, str], tuple[Any, str, Make]] = {}
        self.standing: list[tuple[Any, str, bool, Any, Any]] = []

    def want(self, owner: Any, name: str, make: Make | None) -> None:
        """Replace `owner.name` by `make(owner.name)` from the next block on; None takes that back."""
        with self.lock:
            if make is None:
                self.wanted.pop((id(owner), name), None)
            else:
                self.wanted[id(owner), name] = (owner, name, make)

    def open(self) -> None:
        """Put the replacements in place, if they are not."""
        with self.lock:
            self.inside += 1
            if self.inside == 1:
                for owner, name, make in self.wanted.values():
                    original = getattr(owner, name)
                    replacement = make(original)
                    self.standing.append((owner, name, name in vars(owner), original, replacement))
                    setattr(owner, name, replacement)

    def close(self) -> None:
        """Put the originals back after the last block, but not over somebody else's later replacements."""
        with self.lock:
            self.inside -= 1
            while self.inside == 0 and self.standing:
                owner, name, is_own, original, replacement = self.standing.pop()
                if getattr(owner, name, None) is not replacement:
                    continue
                if is_own:
                    setattr(owner, name, original)
                else:
                    delattr(owner, name)

    def original(self, owner: Any, name: str) -> Callable[..., Any] | None:
        """Return the function that is behind a replacement, if there is one now."""
        return next((f for o, n, _, f, _ in self.standing if o is owner and n == name), None)


def replacements_in_torch(recall: Recall) -> Iterator[tuple[Any, str, Make]]:
    """Yield (owner, name, maker) of every place in torch. `recall` returns a function that re-enters the present
    context."""
    # checkpoint() looks its generator up as a global of its module; the reentrant kind is an autograd function.
    name = "_checkpoint_without_reentrant_generator"
    # torch 2.14 and later keep the other name for programs outside of torch
    if hasattr(checkpointing, f"{name}_impl"):
        name = f"{name}_impl"
    yield checkpointing, name, functools.partial(_recompute_as_before, recall)
    yield BackwardCFunction, "__init__", functools.partial(_mark_node, recall)
    yield nn.RNNBase, "check_input", functools.partial(_check_cast_input, recall)
    yield RecursiveScriptModule, "__call__", functools.partial(_call_script, recall)


def _recompute_as_before(recall: Recall, original: Callable[..., Any]) -> Callable[..., Any]:
    def begin(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        again = recall()
        if again is None:
            return original(function, *args, **kwargs)

        @functools.wraps(function)
        def recompute(*inputs: Any, **keywords: Any) -> Any:
            with again():
                return function(*inputs, **keywords)

        return original(recompute, *args, **kwargs)

    return begin


def _mark_node(recall: Recall, original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the node of a custom function, created inside the block, run its backward in the casts of its forward.

    Apex's patches, which are in force for good, have the same effect.
    """

    def create(node: Any, *args: Any, **kwargs: Any) -> None:
        original(node, *args, **kwargs)
        again = recall()
        if again is not None:
            become(node, _recasting(type(node)))
            node._o1_again = again

    return create


def _recasting(kind: type) -> type:
    """Return the subclass of a node's class whose backward runs in the node's own context; made once per class."""
    made = kind.__dict__.get("_o1_recasting")
    if made is None:

        def apply(self: Any, *gradients: Any) -> Any:
            with self._o1_again():
                return kind.apply(self, *gradients)  # type: ignore[attr-defined]

        def apply_boxed(self: Any, *gradients: Any) -> Any:
            with self._o1_again():
                return kind.apply_boxed(self, *gradients)  # type: ignore[attr-defined]

        made = type(kind.__name__, (kind,), {"apply": apply, "apply_boxed": apply_boxed})
        kind._o1_recasting = made  # type: ignore[attr-defined]
    return made


def _check_cast_input(recall: Recall, original: Callable[..., Any]) -> Callable[..., Any]:
    """Let a recurrent layer accept another dtype than its weights': its function's rule casts both to half."""

    def check(layer: Any, entry: Tensor, *args: Any) -> None:
        if recall() is not None and entry.is_floating_point():
            entry = entry.to(layer._flat_weights[0].dtype)
        original(layer, entry, *args)

    return check


def _call_script(recall: Recall, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        if recall() is not None:
            warnings.warn(
                f"O1: {module.original_name} is TorchScript, which the casts do not reach: it runs in the dtypes of "
                "its input and its weights, float32 if nothing was converted. Use the module itself",
                stacklevel=2,
            )
        return original(module, *args, **kwargs)

    return call
