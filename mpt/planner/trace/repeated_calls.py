"""Calls of a network without gradients that repeat earlier ones: recorded again instead of executed again.

An evaluation asks a network at ten noise levels, a preview fifty times. What such a call allocates and releases follows
from the forms of what it is given, and so from the second one on of the same forms nothing new is seen: its births and
deaths are written down once more, and its results are new tensors of the forms of the last ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from mpt.planner.trace.recorder import Recorder

PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)
Form = tuple[TreeSpec, tuple[Any, ...]]
"""How values are nested; and a tensor's shape, strides, dtype, device and whether it requires gradients, or a plain
value."""


@dataclass(frozen=True)
class Seen:
    """What a call did: events `start` to `stop` of the trace."""

    form: Form
    """Of its results."""
    start: int
    stop: int
    shape: tuple[int, ...]
    """The sizes of what was born, and the places of the births of what died."""
    kept: tuple[int, ...]
    """The storages of the results, in order."""


class RepeatedCalls:
    """Calls of networks, by what they are given."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._is_inside = False
        self._seen: dict[Any, tuple[Seen | None, bool]] = {}
        """A network with the forms that it is given -> its last call, and whether that repeated the one before."""

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Let repeated calls of networks inside the block be recorded again."""
        learn = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside or torch.is_grad_enabled():
                return learn(module, *args, **kwargs)
            return self.call(learn, module, args, kwargs)

        with mock.patch.object(nn.Module, "__call__", call):
            yield

    def call(
        self,
        forward: Callable[..., Any],
        network: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call a network, or record its last call again."""
        given = form_of((args, dict(kwargs)))
        key = id(network), torch.is_autocast_enabled(self.recorder.device_type), given
        last, is_repeated = self._seen.get(key, (None, False))
        if last is not None and is_repeated:
            return self.record_again(last)
        events = self.recorder.trace.events
        start = len(events)
        self._is_inside = True
        try:
            result = forward(network, *args, **kwargs)
        finally:
            self._is_inside = False
        if given is not None:
            now = self.seen(result, start)
            is_repeated = (
                now is not None
                and last is not None
                and (now.form, now.shape) == (last.form, last.shape)
            )
            self._seen[key] = now, is_repeated
        return result

    def seen(self, result: Any, start: int) -> Seen | None:
        """Return what a call did, or None if it left more behind than its results, or ended what was there before."""
        form, trace = form_of(result), self.recorder.trace
        if form is None:
            return None
        events, born = trace.events[start:], dict[int, int]()
        shape: list[int] = []
        for place, entry in enumerate(events):
            if entry >= 0:
                born[entry] = place
                shape.append(trace.storages[entry].size)
            elif ~entry in born:
                shape.append(~born.pop(~entry))
            else:
                return None
        tensors = [one for one in tree_flatten(result)[0] if isinstance(one, Tensor)]
        # -1: not followed, on the host
        kept = tuple(
            -1 if (one := self.recorder.number_of(each)) is None else one for each in tensors
        )
        is_part = any(one.untyped_storage().nbytes() != one.nbytes for one in tensors)
        if is_part or sorted(born) != sorted(kept):
            return None
        return Seen(form, start, len(trace.events), tuple(shape), kept)

    def record_again(self, last: Seen) -> Any:
        """Write a call's births and deaths down once more and return new results."""
        trace, numbers = self.recorder.trace, dict[int, int]()
        for entry in trace.events[last.start : last.stop]:
            if entry >= 0:
                numbers[entry] = len(trace.storages)
                trace.storages.append(replace(trace.storages[entry]))
                trace.events.append(numbers[entry])
            else:
                trace.events.append(~numbers[~entry])
        with self.recorder.paused():
            made = made_of(last.form)
        tensors = (one for one in tree_flatten(made)[0] if isinstance(one, Tensor))
        for tensor, number in zip(tensors, last.kept, strict=True):
            self.recorder.follow(tensor, numbers[number])
        return made


def form_of(values: Any, *, may_train: bool = False) -> Form | None:
    """Return the form of fake tensors and plain values in tuples, lists and mappings; None if there is more.

    Tensors that require gradients are more, unless they are said to be expected.
    """
    leaves, spec = tree_flatten(values)
    forms: list[Any] = []
    for one in leaves:
        is_plain = isinstance(one, FakeTensor) and one.layout is torch.strided
        if is_plain and (may_train or not one.requires_grad):
            forms.append((one.shape, one.stride(), one.dtype, one.fake_device, one.requires_grad))
        elif isinstance(one, PLAIN):
            forms.append(one)
        else:
            return None
    return (spec, tuple(forms)) if any(isinstance(one, Tensor) for one in leaves) else None


def new_tensor(form: tuple[Any, ...]) -> Tensor:
    """Return a new tensor of a tensor's form."""
    return torch.empty_strided(form[0], form[1], dtype=form[2], device=form[3])


def made_of(form: Form, make: Callable[[tuple[Any, ...]], Tensor] = new_tensor) -> Any:
    """Return new tensors of a form, with its plain values; `make` is given each tensor's form."""
    spec, forms = form
    return tree_unflatten([make(one) if isinstance(one, tuple) else one for one in forms], spec)
