"""Passes that one update adds up: of many with the same shapes, the first few are executed.

A script may accumulate the gradients of forty batches before its optimizer steps. From the second on the gradients are
there, and what a pass allocates and releases is what the one before did. So once two of them were alike, further calls
of the network are written down again instead of executed: its births and deaths, and its work. Its results are new
tensors, of which the script computes its loss and its backward pass as ever; where that reaches them, the deaths and
births of the network's own backward pass are written down too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_flatten

from mpt.planner.trace.recorder import Recorder
from mpt.planner.trace.repeated_calls import Form, form_of, made_of, new_tensor
from mpt.planner.trace.time_model import Work

GIVEN = -(2**40)
"""Events from here downwards: the ends of the gradients that a backward pass is given, by the number of the result."""


@dataclass(frozen=True)
class Events:
    """What a network did in a pass. A birth is its place among all of them, a death the inverse of its birth's."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    sizes: tuple[int, ...]
    kept: tuple[int, ...]
    """The births of the results."""
    form: Form


@dataclass
class Pass:
    """An executed pass: where in the trace its parts begin and end."""

    key: Any
    start: int
    form: Form
    kept: tuple[int, ...]
    """The storages of its results."""
    end: int = 0
    back: int = 0
    """Where the backward pass reached its results; 0 if it did not."""
    given: dict[int, int] = field(default_factory=dict)
    """Storages of the gradients that the backward pass brought -> the number of the result."""
    calls: int = 1
    """Calls of networks before its backward pass."""
    work: Work = field(default_factory=Work)


@dataclass(frozen=True)
class Seen:
    """The last executed pass of a network with the forms that it is given, since the last update."""

    events: Events
    storages: tuple[int, ...]
    work: Work
    is_repeated: bool
    """The one before was alike."""


class AddedPasses:
    """Notes passes, and writes those down again that repeat others; none where it is not allowed."""

    def __init__(self, *, is_allowed: bool = True) -> None:
        self.is_allowed = is_allowed
        self.left_out = 0
        """Calls that were not executed."""
        self._seen: dict[Any, Seen] = {}
        self._pass: Pass | None = None
        """The pass whose backward pass is still to come."""
        self._measured: Work | None = None
        """Counts what is executed of it now."""
        self._rest: Callable[[Mapping[int, Tensor]], None] | None = None
        """Writes down the backward pass of a call that was not executed."""
        self._is_inside = False

    def observe(self, *operator: Any) -> None:
        """Count an operator for the pass in progress."""
        if self._measured is not None:
            self._measured.observe(*operator)

    def notes(self) -> list[str]:
        """Return what a plan assumes."""
        if not self.left_out:
            return []
        return [f"{self.left_out} passes of its updates were left out: they were like those before"]

    @contextmanager
    def noted(self, recorder: Recorder, count: Callable[[Work], None]) -> Iterator[None]:
        """Note calls of networks inside the block; `count` is given the work of those that are left out."""
        execute, backward, grad = nn.Module.__call__, torch.autograd.backward, torch.autograd.grad

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._is_inside or not torch.is_grad_enabled() or not self.is_allowed:
                return execute(module, *args, **kwargs)
            self._is_inside = True
            try:
                return self._call(execute, module, args, kwargs, recorder, count)
            finally:
                self._is_inside, self._measured = False, None

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return backward(*args, **kwargs)
            self._is_inside = True
            try:
                return backward(*args, **kwargs)
            finally:
                self._is_inside, self._measured = False, None
                self._end(recorder)

        def run_grad(*args: Any, **kwargs: Any) -> Any:
            # results of a call that is left out hang on no weight
            self.is_allowed &= self._is_inside
            return grad(*args, **kwargs)

        def forget(*ended: Any) -> None:
            self._seen.clear()
            self._pass = None

        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(nn.Module, "__call__", call))
            stack.enter_context(mock.patch.object(torch.autograd, "backward", run_backward))
            stack.enter_context(mock.patch.object(torch.autograd, "grad", run_grad))
            stack.callback(register_optimizer_step_post_hook(forget).remove)
            yield

    def _call(
        self,
        execute: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        recorder: Recorder,
        count: Callable[[Work], None],
    ) -> Any:
        given = form_of((args, dict(kwargs)))
        if given is None or _is_shared_out():
            return execute(module, *args, **kwargs)
        key = id(module), type(module), _state_of(module), _autocast(), given
        seen = self._seen.get(key)
        is_alone = self._pass is None and self._rest is None
        if seen is not None and seen.is_repeated and is_alone:
            self.left_out += 1
            count(seen.work)
            return self._written_down(seen, recorder)
        start, work = len(recorder.trace.events), Work()
        self._measured = work
        results = execute(module, *args, **kwargs)
        form = form_of(results, may_train=True)
        tensors = [one for one in tree_flatten(results)[0] if isinstance(one, Tensor)]
        if self._pass is not None:
            self._pass.calls += 1
        elif form is not None and self._rest is None and any(one.requires_grad for one in tensors):
            kept = tuple(-1 if (n := recorder.number_of(one)) is None else n for one in tensors)
            self._pass = Pass(key, start, form, kept, len(recorder.trace.events), work=work)
            for number, one in enumerate(tensors):
                if one.requires_grad:
                    one.register_hook(self._reaching(self._pass, number, recorder))  # type: ignore[no-untyped-call]
        return results

    def _reaching(self, begun: Pass, number: int, recorder: Recorder) -> Callable[[Tensor], None]:
        """Return a hook that notes where a backward pass reaches a result of a network."""

        def reached(gradient: Tensor | None) -> None:
            if self._pass is not begun:
                return
            # none if nothing follows from one of several results
            storage = None if gradient is None else recorder.number_of(gradient)
            if storage is not None:
                begun.given[storage] = number
            if not begun.back:
                begun.back = len(recorder.trace.events)
                self._measured = begun.work

        return reached

    def _end(self, recorder: Recorder) -> None:
        """Note that a backward pass is over."""
        if self._rest is not None:  # it did not reach the results
            self._rest({})
        ended, self._pass = self._pass, None
        if ended is None:
            return
        before = self._seen.pop(ended.key, None)
        found = _events_of(ended, recorder) if ended.back and ended.calls == 1 else None
        if found is not None:
            events, storages = found
            is_repeated = before is not None and before.events == events
            self._seen[ended.key] = Seen(events, storages, ended.work, is_repeated)

    def _written_down(self, seen: Seen, recorder: Recorder) -> Any:
        """Write a forward pass down again and return new results, at which a backward pass does the same."""
        trace, numbers, events = recorder.trace, dict[int, int](), seen.events

        def write(entries: tuple[int, ...], given: Mapping[int, Tensor]) -> None:
            for entry in entries:
                if entry <= GIVEN:
                    if (number := GIVEN - entry) in given:
                        recorder.end(given[number])
                elif entry >= 0:
                    numbers[entry] = len(trace.storages)
                    trace.storages.append(replace(trace.storages[seen.storages[entry]]))
                    trace.events.append(numbers[entry])
                else:
                    trace.events.append(~numbers[~entry])

        def rest(given: Mapping[int, Tensor]) -> None:
            if self._rest is rest:
                self._rest = None
                write(events.backward, given)

        write(events.forward, {})
        number = itertools.count()
        with recorder.paused():
            made = made_of(events.form, lambda one: _begun(one, next(number), rest))
        tensors = (one for one in tree_flatten(made)[0] if isinstance(one, Tensor))
        for tensor, place in zip(tensors, events.kept, strict=True):
            if place >= 0:
                recorder.follow(tensor, numbers[place])
        self._rest = rest
        return made


def _events_of(ended: Pass, recorder: Recorder) -> tuple[Events, tuple[int, ...]] | None:
    """Return what a network did in a pass, and the storages that were born.

    None if it left more behind than its results, or ended what was there before, or its results are no tensors of
    their own.
    """
    trace = recorder.trace
    places: dict[int, int] = {}
    alive: set[int] = set()
    parts: tuple[list[int], list[int]] = [], []
    spans = (ended.start, ended.end), (ended.end, ended.back), (ended.back, len(trace.events))
    for number, (start, stop) in enumerate(spans):
        part = parts[number == 2]
        for entry in trace.events[start:stop]:
            if entry >= 0 and number != 1:  # what the script allocates in between is its own
                places[entry] = len(places)
                alive.add(entry)
                part.append(places[entry])
            elif entry < 0 and ~entry in places:
                alive.discard(~entry)
                if ~entry not in ended.kept:
                    part.append(~places[~entry])
            elif entry < 0 and number == 0:
                return None
            elif number == 2 and ~entry in ended.given:
                part.append(GIVEN - ended.given[~entry])
    kept = [one for one in ended.kept if one >= 0]
    if len({*kept}) < len(kept) or not {*kept} <= places.keys() or not alive <= {*kept}:
        return None
    sizes = tuple(trace.storages[one].size for one in places)
    of_results = tuple(places.get(one, -1) for one in ended.kept)
    return Events(tuple(parts[0]), tuple(parts[1]), sizes, of_results, ended.form), tuple(places)


def _state_of(network: nn.Module) -> tuple[Any, ...]:
    """Return what a pass depends on beside its inputs: which parts train, and where gradients are to be added to."""
    with torch._C.DisableTorchFunction():
        return (
            tuple(part.training for part in network.modules()),
            tuple((one.requires_grad, one.grad is None) for one in network.parameters()),
        )


def _autocast() -> tuple[Any, ...]:
    return torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")


def _is_shared_out() -> bool:
    """Return whether other processes wait for what a call does."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _begun(form: Any, number: int, reached: Callable[[Mapping[int, Tensor]], None]) -> Tensor:
    """Return a tensor of a form, at which a backward pass ends if it requires gradients."""
    if not form[-1]:
        return new_tensor(form)
    anchor = torch.empty(0, requires_grad=True)
    made: Tensor = _Begun.apply(anchor, form, number, reached)  # type: ignore[no-untyped-call]
    return made


class _Begun(torch.autograd.Function):
    """A tensor at which a backward pass ends."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        form: tuple[Any, ...],
        number: int,
        reached: Callable[[Mapping[int, Tensor]], None],
    ) -> Tensor:
        """Return a new tensor of a form."""
        ctx.reached, ctx.number = reached, number
        return new_tensor(form)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        """Say that the backward pass is here, and hand on nothing."""
        ctx.reached({ctx.number: gradient})
        return None, None, None, None
