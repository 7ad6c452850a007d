"""Recomputing a block with chosen outputs kept: those are handed out again, and operators that only they needed are not
run.

The forward notes what each operator reads and makes, keeps the chosen outputs, and sees which tensors autograd saves.
From that follows the work of a recomputation: the operators that lead to a saved tensor and to no kept one. For
the rest a result of the right form is needed, which nobody reads: memory that is there already is in for it. So the
norm at the end of a residual block is not computed again if the block's output is kept as the next one's input.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from mpt.memory.recomputing.operators import (
    DEVICE_QUERY,
    Key,
    Operator,
    Shape,
    Walk,
    find_rerun,
    find_used,
    large_outputs,
    written,
)
from mpt.memory.recomputing.selective import Kept, alias


class Record:
    """The forward of one call of a block: its operators, the results that were kept, and those that autograd saved."""

    def __init__(self, keeps: Collection[Key]) -> None:
        self.keeps = keeps
        # A kept tensor is saved for backward like all others: if they wait on the host, it does too.
        self.outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self.operators: list[Operator] = []
        self.positions: dict[Key, int] = {}
        self.results: dict[Key, Any] = {}
        """Each operator's results: kept tensors, and the forms of the others."""
        self.saved: set[int] = set()
        self.counts: dict[Any, int] = {}
        self.rerun: set[int] | None = None
        self.begin: Callable[..., None] = lambda *inputs: None
        """Passes the block's inputs to the pass that is under way."""

    def told(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a block's forward that reports its inputs."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.begin(args, kwargs)
            return function(*args, **kwargs)

        return call

    def usable(self) -> set[Key]:
        """Return the kept outputs that were not changed in place since; others must be recomputed."""
        return {
            key for key in self.keeps if key in self.results and is_unchanged(self.results[key])
        }

    def drop_unused(self, forms: dict[Key, Any]) -> None:
        """Release outputs that only other losses of the step save; their forms are given."""
        self.keeps = find_used(self.operators, self.saved, self.usable())
        self.results.update({key: form for key, form in forms.items() if key not in self.keeps})

    def plan(self) -> set[int]:
        """Return the positions of the operators that the recomputation runs."""
        if self.rerun is None:
            self.rerun = find_rerun(self.operators, self.saved, self.usable())
        return self.rerun


class KeepChosen(TorchDispatchMode):
    """Around the forward of one call."""

    def __init__(self, record: Record) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record, self.walk = record, Walk()
        self.forms: dict[Key, Any] = {}
        self.hooks: Any = None

    def __enter__(self) -> Any:
        outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
        pack, unpack = (
            outer if outer is not None else (lambda tensor: tensor, lambda tensor: tensor)
        )

        def note(tensor: Tensor) -> Any:
            number = self.walk.storages.find(tensor)
            if number is not None:
                self.record.saved.add(number)
            return pack(tensor)

        self.record.begin = self.walk.begin
        self.hooks = saved_tensors_hooks(note, unpack)
        self.hooks.__enter__()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self.hooks.__exit__(*exception)
        self.record.counts = dict(self.walk.counts)
        self.record.drop_unused(self.forms)
        del self.walk, self.forms, self.hooks, self.record.begin

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is DEVICE_QUERY:
            return args[0].device
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        operator = self.walk.record(function, args, kwargs, result)
        if operator is None:
            return result
        record = self.record
        if operator.key is not None and not operator.must_run:
            record.positions[operator.key] = len(record.operators)
        if operator.key is not None and not operator.must_run and operator.changes is None:
            large = {id(tensor) for tensor in large_outputs(result)}
            form = _each(
                result,
                lambda tensor: Shape.of(tensor) if id(tensor) in large else self.keep(tensor),
            )
            if operator.key in record.keeps:
                self.forms[operator.key], form = form, _each(result, self.keep)
            record.results[operator.key] = form
        record.operators.append(operator)
        return result

    def keep(self, tensor: Tensor) -> Kept:
        """Keep a tensor as saved tensors are kept."""
        return Kept(tensor) if self.record.outer is None else Saved(tensor, *self.record.outer)


class Saved(Kept):
    """A tensor that was kept through the hooks that saved tensors go through, which may have taken it elsewhere."""

    def __init__(
        self, tensor: Tensor, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]
    ) -> None:
        self.packed, self.unpack = pack(tensor), unpack
        self.here = Kept(tensor) if isinstance(self.packed, Tensor) else None

    @property
    def is_unchanged(self) -> bool:
        """Whether nothing has been written to it since."""
        return self.here is None or self.here.is_unchanged

    def take(self) -> Tensor:
        """Return the tensor."""
        return alias(self.unpack(self.packed)) if self.here is None else self.here.take()


class ReuseChosen(TorchDispatchMode):
    """Around a recomputation of the same call."""

    def __init__(self, record: Record) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record, self.walk = record, Walk()

    def __enter__(self) -> Any:
        self.walk, self.rerun = Walk(), self.record.plan()
        self.record.begin = self.walk.begin  # the inputs may lie elsewhere by now
        # A graph that is kept may be walked again; else each output is released as it is used.
        self.walked_again = torch._C._autograd._get_current_graph_task_keep_graph()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self.walk = Walk()
        del self.record.begin

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is DEVICE_QUERY:
            return args[0].device
        kwargs, walk, record = kwargs or {}, self.walk, self.record
        inputs, reads = walk.inputs_of(args, kwargs)
        if not reads:
            return function(*args, **kwargs)
        key = walk.key(function, reads)
        position = None if key is None else record.positions.get(key)
        if key is not None and key[1] >= record.counts.get(function, 0):
            _refuse(function)
        if key is None or position is None or position in self.rerun:
            if key is not None and not self.walked_again:
                record.results.pop(key, None)  # the statistics that were kept alongside it
            result = function(*args, **kwargs)
        elif record.operators[position].changes is not None:
            # as it is: the operand to be changed is not read
            result = written(function, args, kwargs)[0]
        else:
            forms = record.results.get(key)
            if forms is None:
                _refuse(function)
            result = _each(
                forms,
                lambda form: form.take() if isinstance(form, Kept) else self.stand_in(form, inputs),
            )
            if not self.walked_again:
                del record.results[key]
        walk.note(result)
        return result

    def stand_in(self, shape: Shape, inputs: list[Tensor]) -> Tensor:
        """Return something of this form that nobody will read."""
        found = self.walk.stand_in(shape, inputs)
        assert found is not None, "the forward found one"
        # with a version of its own: a change in place that is not made counts all the same
        return found.detach()


def is_unchanged(result: Any) -> bool:
    """Return whether everything kept of a result is as it was."""
    unchanged: list[bool] = []
    _each(result, lambda form: unchanged.append(not isinstance(form, Kept) or form.is_unchanged))
    return all(unchanged)


def _each(result: Any, change: Any) -> Any:
    """Apply a function to the tensors, kept tensors and forms of a result."""
    if isinstance(result, Tensor | Kept | Shape):
        return change(result)
    if isinstance(result, list | tuple):
        return type(result)(_each(item, change) for item in result)
    return result


def _refuse(function: Any) -> NoReturn:
    raise RuntimeError(
        f"memory.recompute: {function} was called more often in the recomputation than in the forward; the block does "
        "not do the same twice. Use recompute: all or leave the block out"
    )
