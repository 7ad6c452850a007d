"""The recorder of a step's storages: it writes down their births and deaths (`mpt.planner.trace.trace`).

A dispatch mode sees every operator's results; a weak reference reports each storage's death. Nothing is executed
twice and nothing is estimated, so the same recorder serves fake tensors (planning) and real ones (checking the plan).
The result is a plain list of events that can be replayed through an allocator at any limit
(`mpt.planner.trace.replay`).

The owning module is the innermost one whose forward runs. In backward it is that of the operator being
differentiated: its autograd node's sequence number is looked up among those noted when modules were entered. Not
seen: memory used inside one operator, which `mpt.planner.trace.unseen` adds.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from types import FrameType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._C import _functorch as functorch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as nn_module
from torch.utils._python_dispatch import TorchDispatchMode

from mpt.planner.device import sparse_rows
from mpt.planner.device.composites import parts_of
from mpt.planner.device.fake_mode import LeanFakeMode
from mpt.planner.device.operator_kinds import DEVICE_QUERY, RECORD_IDS, facts_of
from mpt.planner.device.outcomes import Outcome
from mpt.planner.device.sparse_rows import SparseRows
from mpt.planner.device.zero_values import SCALAR, ZeroValues, is_unknown
from mpt.planner.trace import kept_sizes
from mpt.planner.trace.allocator import GRAPHS
from mpt.planner.trace.freed_later import FreedLater
from mpt.planner.trace.gradient_sums import SUM, is_in_place, node_number
from mpt.planner.trace.trace import EMPTIED, FORWARD, GATHERED, Span, Storage, Trace
from mpt.planner.trace.unseen import Unseen
from mpt.run.process.storage_trace import LiveStorages, tensors_in

Observer = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], None]
"""Called with every operator but views, which launch nothing, with its arguments and its result."""


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records storages of one device type, for as long as it is entered."""

    def __init__(
        self, device_type: str, unseen: Unseen | None = None, observer: Observer | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type, self.unseen, self.observer = device_type, unseen, observer
        self.trace = Trace(spans=[Span(0, 0, "", "build")])
        self.moment = "build"
        """The moment that the run is in."""
        self.module_names: dict[int, str] = {}
        self._live = LiveStorages(self._die)
        self._undecided: set[int] = set()
        self._stack: list[tuple[nn.Module, str]] = []
        # (next autograd sequence number, module) in order
        self._entries: list[tuple[int, str]] = []
        self._made_by: dict[int, int] = {}
        """Storages of the backward pass -> the number of the autograd node in which they were made."""
        self._workspaces: list[int] = []
        self.later = FreedLater()
        self._closed = False
        self.is_paused = False
        """Set while torch computes shapes on tensors of its own."""
        self.in_written_kernels = False
        """Set while a compiler's kernels are in the place of torch's: libraries alone take scratch."""
        self.below: LeanFakeMode | None = None
        """The fake mode right below, which answers known calls at once."""
        self.outcome: Outcome | None = None
        """The outcome of the last call, if it was known: the same for the same forms of arguments."""
        self.notes: list[str] = []
        """Assumptions of the trace."""
        self.answers: ZeroValues | None = None
        """Answers for numbers that are read while it is set."""
        self.stream = 0
        """The stream that is allocated on now; `GRAPHS` names the pool of recorded graphs."""

    def use_on(self, tensor: Tensor, stream: int) -> None:
        """Note that a stream uses a tensor, which may be one of another stream."""
        index = self._live.number_of(tensor)
        if index is not None and self.trace.storages[index].stream != stream:
            self.later.use(index)

    def host_waited(self, ended: int) -> None:
        """Free memory of tensors that streams used: of the first `ended` ones of `later`."""
        self.trace.events += [~index for index in self.later.release(ended)]

    def _resizing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `UntypedStorage.resize_`, of a storage that is emptied in place, or filled again, too."""

        def resize(storage: Any, size: int) -> Any:
            number, before = self._live.numbers.get(storage._cdata), storage.size()
            result = original(storage, size)
            if number is not None and storage.size() != before:
                old = self.trace.storages[number]
                self._live.bury_storage(storage)
                is_named = old.category not in (FORWARD, "temporaries")
                category = old.category if is_named else GATHERED
                index = self._birth(storage.size(), category, old.module, "resize_")
                self._live.add_storage(storage, index)
            return result

        return resize

    @contextlib.contextmanager
    def in_graphs(self) -> Iterator[None]:
        """Record graphs inside the block, as far as memory goes: allocations come from their pool.

        A recording gives unused memory back first, and cuBLAS's workspaces before and after it.
        """
        self._return_workspaces()
        self.empties_cache()
        before, self.stream = self.stream, GRAPHS
        try:
            yield
        finally:
            self.stream = before
            self._return_workspaces()

    def empties_cache(self) -> None:
        """Note that memory which is reserved and not used goes back to the driver."""
        self._birth(0, "temporaries", "", EMPTIED)

    def _return_workspaces(self) -> None:
        self.trace.events += [~number for number in self._workspaces]
        self._workspaces.clear()
        if self.unseen is not None:
            self.unseen.opened_handles.clear()

    def comes_from_outside(self, tensor: Tensor) -> bool:
        """Whether recorded CUDA graphs must copy a tensor: neither a parameter or buffer nor made by such a graph."""
        if tensor.device.type != self.device_type:
            return False
        index = self._live.number_of(tensor)
        if index is None:
            return True
        storage = self.trace.storages[index]
        return storage.category not in ("parameters", "buffers") and storage.stream != GRAPHS

    def number_of(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage in the trace; None if it is not followed."""
        return self._live.number_of(tensor)

    def follow(self, tensor: Tensor, number: int) -> None:
        """Note the end of a tensor's storage as that of one whose birth is in the trace already."""
        self._live.add(tensor, number)

    def end(self, tensor: Tensor) -> None:
        """Note the end of a tensor's storage, if it is followed, while it lives."""
        if self._live.number_of(tensor) is not None:
            self._live.bury(tensor)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let tensors of the planner's own be made inside the block."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def born(self, result: Any, operator: str) -> None:
        """Note an operator's results while it was not seen."""
        for tensor in tensors_in(result):
            self._note(tensor, operator)

    def enter_moment(self, step: int, phase: str, moment: str) -> None:
        """Note that from here on the run is in another moment."""
        if moment == "backward":
            self._decide()
        self.moment = moment
        self.trace.spans.append(Span(len(self.trace.events), step, phase, moment))

    def mark(self, tensors: Iterable[Tensor], category: str, module: str | None = None) -> None:
        """Note the category of tensors, and optionally their owner."""
        tensor: Any
        for tensor in chain.from_iterable(map(tensors_inside, tensors)):
            while isinstance(tensor, Tensor) and functorch.is_functorch_wrapped_tensor(tensor):
                tensor = functorch.get_unwrapped(tensor)
            if isinstance(tensor, Tensor) and tensor.is_sparse:
                if category == "buffers":  # a gradient's places may be the batch's tokens
                    self.mark([tensor._indices()], category, module)
                tensor = tensor._values()
            index = self._live.number_of(tensor) if isinstance(tensor, Tensor) else None
            if index is not None:
                storage = self.trace.storages[index]
                storage.category = category
                storage.module = storage.module if module is None else module
                self._undecided.discard(index)

    def mark_modules(self, modules: Mapping[str, nn.Module]) -> None:
        """Mark every module's parameters and buffers, and learn the modules' names."""
        # of two networks that share a part, the first counts
        for key, root in reversed(list(modules.items())):
            for name, module in root.named_modules():
                full = f"{key}.{name}" if name else key
                self.module_names[id(module)] = full
                self.mark(module._buffers.values(), "buffers", full)
                self.mark(module._parameters.values(), "parameters", full)

    def rename(self, modules: Mapping[str, nn.Module]) -> None:
        """Give what was recorded under earlier names of these modules to the new ones."""
        for new, module in modules.items():
            old = self.module_names.get(id(module), new)
            for storage in self.trace.storages if old != new else ():
                if storage.module == old or storage.module.startswith(f"{old}."):
                    storage.module = new + storage.module.removeprefix(old)

    @contextlib.contextmanager
    def recording(self) -> Iterator[Trace]:
        """Record inside the block; cyclic garbage collection is off, so that deaths come in one order every time."""
        was_enabled = gc.isenabled()
        gc.disable()
        enter = nn_module.register_module_forward_pre_hook(self._enter_module)
        leave = nn_module.register_module_forward_hook(self._leave_module, always_call=True)
        resizing = self._resizing(torch.UntypedStorage.resize_)
        try:
            with self, mock.patch.object(torch.UntypedStorage, "resize_", resizing):
                yield self.trace
        finally:
            self._closed = True
            enter.remove()
            leave.remove()
            if was_enabled:
                gc.enable()
            for index in self._undecided:
                self.trace.storages[index].category = "temporaries"

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # nothing is compiled while recording, so nothing need be kept from the compiler
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_QUERY:
            asked = args[0]
            if type(asked) is FakeTensor and not asked.fake_mode.in_kernel_invocation:
                return asked.fake_device  # sooner than by its property
            return asked.device
        if func is SCALAR and self.later.ended:  # the host waits for a number that it reads
            self.host_waited(self.later.ended)
        if func is SCALAR and self.answers is not None and is_unknown(args[0]):
            return self.answers.number(args[0])
        if any(map(holds_others, types)):
            return NotImplemented  # it comes back with its inner tensors
        if self.is_paused:
            return func(*args, **(kwargs or {}))
        kwargs, below, unseen = kwargs or {}, self.below, self.unseen
        parts = parts_of(func, args)
        if parts is not None:
            with self:
                return parts(*args, **kwargs)
        if below is not None and (SparseRows in types or sparse_rows.makes_rows(func, args)):
            return self._on_rows(func, args, kwargs)
        operator = facts_of(func).name
        if below is not None and (view := below.view(func, args, kwargs)) is not None:
            for one in (view,) if isinstance(view, Tensor) else view:
                self._note(one, operator)
            return view
        in_backward = self.moment == "backward"
        if unseen is not None and unseen.opens_handle(operator, in_backward):
            self._workspaces.append(self._birth(unseen.cublas_bytes, "workspace", "", "cuBLAS"))
        self.outcome = None
        if func is SUM and in_backward and self._adds_up(args, sys._getframe(1)):
            result = args[0].add_(args[1])
        elif below is not None and (number := below.number(func, args)) is not None:
            result = number
        elif below is not None and (known := below.known(func, args, kwargs)) is not None:
            self.outcome, result = known, below.make(known, args)
        elif below is not None and id(func) in RECORD_IDS:
            with torch._C._DisableTorchDispatch():
                return func(*args, **kwargs)
        elif below is None and sparse_rows.is_stolen(func, args):
            result = sparse_rows.shared(args[0])
        else:
            result = func(*args, **kwargs)
        least = (
            kept_sizes.least_bytes(operator, args, result)
            if operator in kept_sizes.OPERATORS
            else 0
        )
        if isinstance(result, Tensor):
            self._note(result, operator, least)
        else:
            for tensor in tensors_in(result):
                self._note(tensor, operator, least)
        if unseen is not None:
            scratch = unseen.scratch(operator, args, result, self.in_written_kernels)
            if scratch:
                self.trace.events.append(
                    ~self._birth(scratch, "workspace", self._owner(), operator)
                )
            place = len(self.trace.events)
            for size in unseen.workspaces(operator, args, result):
                self.trace.workspaces.append((place, size))
        if self.observer is not None:
            self.observer(func, args, kwargs, result)
        return result

    def _on_rows(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator on sparse tensors; what it makes is seen like other tensors."""
        is_gradient = torch._C._current_autograd_node() is not None
        if is_gradient and sparse_rows.makes_rows(func, args):  # and not a script's own matrix
            self.notes += [sparse_rows.NOTE] * (sparse_rows.NOTE not in self.notes)
        with self:
            result = sparse_rows.call(func, args, kwargs)
        self.outcome = None
        rows = next((one for one in args[:2] if isinstance(one, SparseRows)), None)
        if self.observer is not None and rows is not None and not isinstance(args[0], SparseRows):
            # not the whole table
            self.observer(func, (rows.numbers, rows.numbers, rows.places), {}, rows.numbers)
        return result

    def _adds_up(self, args: tuple[Any, ...], caller: FrameType | None) -> bool:
        """Is this a sum of gradients that autograd would add up in place? The first was made by an earlier node."""
        if self.unseen is None:  # a run on a CPU measures under a mode, too
            return False
        index = self._live.number_of(args[0])
        if index is None or self._made_by.get(index) == node_number():
            return False
        return is_in_place(args[0], args[1], caller)

    def _note(self, tensor: Tensor, operator: str, least: int = 0) -> None:
        device = tensor.fake_device if type(tensor) is FakeTensor else tensor.device
        if device.type != self.device_type:
            return
        if tensor.layout is not torch.strided:
            if tensor.layout == torch._mkldnn:  # type: ignore[attr-defined]
                return
            if tensor.layout == torch.sparse_coo:  # a real one, on a CPU
                self._note(tensor._indices(), operator)
                self._note(tensor._values(), operator)
                return
            raise NotImplementedError(
                f"tensors of this layout are not followed ({operator}, {tensor.layout}); a matrix in COO is "
                "(`matrix.to_sparse()`)"
            )
        storage = tensor.untyped_storage()
        if storage._cdata in self._live.numbers:
            return
        in_backward = self.moment == "backward"
        is_forward = self.moment == FORWARD or (in_backward and self._stack)
        category = FORWARD if is_forward else "temporaries"
        index = self._birth(max(least, storage.nbytes()), category, self._owner(), operator)
        if in_backward:
            self._made_by[index] = node_number()
        if category == FORWARD:
            self._undecided.add(index)
        self._live.add_storage(storage, index)

    def _die(self, index: int) -> None:
        if self._closed:
            return
        if not self.later.ends(index):
            self.trace.events.append(~index)
        if index in self._undecided:
            self._undecided.discard(index)
            self.trace.storages[index].category = "temporaries"

    def _birth(self, size: int, category: str, module: str, operator: str) -> int:
        index = len(self.trace.storages)
        self.trace.storages.append(Storage(size, category, module, operator, self.stream))
        self.trace.events.append(index)
        return index

    def _decide(self) -> None:
        """A forward's result that backward finds alive is an activation."""
        for index in self._undecided:
            self.trace.storages[index].category = "activations"
        self._undecided.clear()

    def _owner(self) -> str:
        if self._stack:
            return self._stack[-1][1]
        if self.moment == "backward" and self._entries:
            node = torch._C._current_autograd_node()
            if node is not None:
                position = bisect.bisect_right(self._entries, (node._sequence_nr(), "\uffff")) - 1
                return self._entries[position][1] if position >= 0 else ""
        return ""

    def _enter_module(self, module: nn.Module, inputs: Any) -> None:
        outer = self._stack[-1][1] if self._stack else ""
        name = self.module_names.get(id(module)) or outer or type(module).__name__
        self._stack.append((module, name))
        self._entries.append((torch._C._autograd._get_sequence_nr(), name))

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        while self._stack and self._stack.pop()[0] is not module:
            pass
        self._entries.append(
            (torch._C._autograd._get_sequence_nr(), self._stack[-1][1] if self._stack else "")
        )
        if not self._stack and self.moment == "backward":
            self._decide()  # a recomputed block is done: its live results are its activations


def tensors_inside(tensor: Any) -> Iterator[Any]:
    """Yield the tensors whose memory a tensor has: itself, if it does not hold others."""
    kind: Any = type(tensor)
    if not holds_others(kind):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from tensors_inside(getattr(tensor, name))


@functools.cache
def holds_others(kind: Any) -> bool:
    """Return whether tensors of a class have no memory but that of tensors inside (DTensor, torchao's)."""
    return hasattr(kind, "__tensor_flatten__")
