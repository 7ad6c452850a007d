"""Networks that a script records with `torch.jit.trace`, as a logger does that draws a graph (`add_graph`), or compiles
with `torch.jit.script`.

The tracer of TorchScript follows real tensors only: under it a size is a tensor of its own. In a plan a network or
function is called once with the tensors that it is recorded with, and what is returned does as it does. Its graph is
empty, and nothing is saved. The weights of a compiled network are held by C++, which does not know that one of them is
fake after it has moved to the card: it is executed by Python. So are `ScriptModule`s. A compiled function is executed
by TorchScript.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn


class Recorded:
    """What a recorded network or function has in addition to the original."""

    code = ""

    @property
    def graph(self) -> Any:
        """A graph without nodes."""
        return torch._C.Graph()

    inlined_graph = graph

    def save(self, *file: Any, **options: Any) -> None:
        """Save nothing."""

    def save_to_buffer(self, *file: Any, **options: Any) -> bytes:
        """Return nothing."""
        return b""


class RecordedFunction(Recorded):
    """A function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it as it was before."""
        return self._function(*args, **kwargs)


def record(
    func: Callable[..., Any],
    example_inputs: Any = None,
    *options: Any,
    example_kwarg_inputs: Mapping[str, Any] | None = None,
    **named: Any,
) -> Any:
    """Call a network or a function with the tensors that it is recorded with, and return one that does the same."""
    is_one = isinstance(example_inputs, Tensor | dict)
    given = (example_inputs,) if is_one else tuple(example_inputs or ())
    func(*given, **(example_kwarg_inputs or {}))
    return recorded(func)


def recorded(func: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Return a network or a function that does the same."""
    if not isinstance(func, nn.Module):
        return RecordedFunction(func)
    kind = type(func)
    made: Any = object.__new__(type(kind.__name__, (Recorded, kind), {}))
    made.__dict__.update(func.__dict__)  # its weights are the same ones
    return made


class ByPython(Recorded, nn.Module):
    """In the place of `torch.jit.ScriptModule`."""


@contextmanager
def by_python() -> Iterator[None]:
    """Let networks that are compiled by TorchScript inside the block be executed by Python."""
    compiled: Any = torch.jit.script

    def script(obj: Any, *options: Any, _frames_up: int = 0, **named: Any) -> Any:
        if isinstance(obj, nn.Module):
            return recorded(obj)
        # a class finds its file's names by the frame that compiles it, which is one further away
        return compiled(obj, *options, _frames_up=_frames_up + 1, **named)

    with mock.patch.multiple(
        torch.jit, script=script, ScriptModule=ByPython, script_method=lambda method: method
    ):
        yield


@contextmanager
def nothing_traced(are_called: bool = True) -> Iterator[None]:
    """Let `torch.jit.trace` record nothing inside the block, and networks be executed by Python.

    `are_called`: networks and functions are called once with what they are recorded with, which may be memory that
    nothing was written to.
    """
    trace = record if are_called else recorded
    with by_python(), mock.patch.object(torch.jit, "trace", trace):
        yield
