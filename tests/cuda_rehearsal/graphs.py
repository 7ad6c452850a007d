"""Pretend CUDA graphs: what is recorded is written down, taken back, and computed again at each repetition.

Torch's CPU build has no `torch._C._CUDAGraph`. This one does what a real one does, as far as a program can notice:

- nothing is computed while a graph is recorded: what it wrote to memory outside of it is put back at the end, what it
  made is NaN, and random generators stand where they stood;
- a repetition computes the same operators on the same memory with the same numbers of the host, and draws new random
  numbers; Python has no part in it;
- the host may neither wait nor read nor copy from pageable memory meanwhile;
- memory comes from the graphs' pool, which gives nothing back, and a repetition allocates nothing.

More is noticed than by a real one: a graph that reads memory which was freed since, outside of its pool, says so. Real
graphs read whatever is there by then.
"""

from __future__ import annotations

import ctypes
import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

WARNED = "_warned_capturable_if_run_uncaptured"
"""Torch's own note on an optimizer that it has warned."""
INVALID = "CUDA error: operation not permitted when stream is capturing"
READS = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::equal",
)
STATISTICS = ("running_mean", "running_var")
"""BatchNorm's kernels write to these and their schemas do not say so."""
Form = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype]


@dataclass
class Pool:
    """Graphs that share memory: what each left alive at its end, for those after it."""

    keys: dict[int, tuple[Any, int]] = field(default_factory=dict)
    """Address of a storage's C++ object -> a weak reference to the storage, and its key."""
    left: dict[int, Tensor] = field(default_factory=dict)
    """Key -> what the last repetition has left there."""
    count: int = 0

    def key_of(self, storage: Any) -> int | None:
        """Return the key of what a graph has left, None for other memory."""
        reference, key = self.keys.get(storage._cdata, (None, 0))
        return key if reference is not None and reference() is storage else None

    def add(self, storage: Any) -> int:
        """Take something that a graph leaves."""
        self.count += 1
        self.keys[storage._cdata] = weakref.ref(storage), self.count
        return self.count


pools: dict[Any, Pool] = {}


@dataclass(frozen=True)
class Made:
    """Represents a tensor of the graph's own, or a view of it."""

    slot: int
    form: Form


@dataclass(frozen=True)
class Left:
    """Represents a tensor that an earlier graph of the pool has left."""

    key: int
    form: Form


class Outside:
    """Represents memory that was there before; it is not kept alive."""

    def __init__(self, tensor: Tensor) -> None:
        self.storage, self.form, self.device = (
            weakref.ref(tensor.untyped_storage()),
            form_of(tensor),
            tensor.device,
        )

    def tensor(self, operator: str) -> Tensor:
        storage = self.storage()
        # it asks for the form alone
        if operator.endswith("_like") or operator.startswith("aten::new_"):
            return torch.empty_strided(*self.form[:2], dtype=self.form[3], device=self.device)
        if storage is None:
            raise RuntimeError(
                f"pretend CUDA graph: {operator} reads memory outside of the graph that was freed since"
            )
        shape, stride, offset, dtype = self.form
        with torch.no_grad():
            return torch.empty(0, dtype=dtype, device=storage.device).set_(
                storage, offset, shape, stride
            )


def form_of(tensor: Tensor) -> Form:
    return tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype


class Recording(TorchDispatchMode):
    """Writes down the operators of a graph while they run."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.pool = pool
        self.entries: list[tuple[Any, Any, Any, list[int]]] = []
        """Operator, arguments, and the slots of its results."""
        self.slots = 0
        self.made: dict[int, dict[Form, int]] = {}
        """Address of a storage's C++ object -> the slots of its tensors by their form."""
        self.alive: dict[int, Any] = {}
        """Slot -> a weak reference to the tensor's storage."""
        self.before: dict[int, tuple[Any, bytes]] = {}
        """Memory outside that was written to, and its bytes."""
        self.broken = ""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name
        given = [one for one in leaves((args, kwargs)) if isinstance(one, Tensor)]
        self._refuse(name, given)
        self._keep_what_is_written(function, args, kwargs)
        written_down = tree_map(self._describe, (args, kwargs))
        result = function(*args, **kwargs)
        if all(
            one.device.type == "cpu" for one in (*given, *leaves(result)) if isinstance(one, Tensor)
        ):
            return result  # the host's own work, which no graph holds
        inputs = {one.untyped_storage()._cdata for one in given}
        slots = []
        for tensor in (one for one in leaves(result) if isinstance(one, Tensor)):
            slots.append(self._add(tensor, tensor.untyped_storage()._cdata not in inputs))
        self.entries.append((function, *written_down, slots))
        return result

    def _refuse(self, name: str, given: list[Tensor]) -> None:
        on_host = [one for one in given if one.device.type == "cpu"]
        reads = name in READS and len(on_host) < len(given)
        copies = name in ("aten::copy_", "aten::_to_copy") and any(
            not one.is_pinned() for one in on_host
        )
        if reads or (copies and len(on_host) < len(given)):
            self.broken = self.broken or f"{INVALID} ({name})"
            raise RuntimeError(self.broken)

    def _keep_what_is_written(self, function: Any, args: Any, kwargs: Any) -> None:
        for place, argument in enumerate(function._schema.arguments):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if not is_written and argument.name not in STATISTICS:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for tensor in (one for one in leaves(value) if isinstance(one, Tensor)):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.made and storage._cdata not in self.before:
                    self.before[storage._cdata] = (
                        storage,
                        ctypes.string_at(storage.data_ptr(), storage.nbytes()),
                    )

    def _describe(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        address, form = value.untyped_storage()._cdata, form_of(value)
        if address in self.made:
            slots = self.made[address]
            return Made(slots.get(form, next(iter(slots.values()))), form)
        if value.device.type == "cpu" and not value.is_pinned():
            # a number of the host, which is in the kernel's arguments
            return value.detach().clone()
        key = self.pool.key_of(value.untyped_storage())
        return Outside(value) if key is None else Left(key, form)

    def _add(self, tensor: Tensor, is_fresh: bool) -> int:
        address, form = tensor.untyped_storage()._cdata, form_of(tensor)
        if is_fresh:
            self.made[address] = {}
        elif address not in self.made:
            return -1  # outside, written in place
        self.slots += 1
        self.made[address].setdefault(form, self.slots)
        self.alive[self.slots] = weakref.ref(tensor.untyped_storage())
        return self.slots

    def take_back(self) -> None:
        """Put back what was written, and make what is left NaN."""
        for storage, content in self.before.values():
            ctypes.memmove(storage.data_ptr(), content, len(content))
        self.before.clear()
        for reference in self.alive.values():
            storage = reference()
            if storage is not None and storage.nbytes():
                ctypes.memset(storage.data_ptr(), 0xFF, storage.nbytes())


def leaves(value: Any) -> Iterator[Any]:
    """Yield what nested containers of an operator's arguments hold."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    else:
        yield value


def define(device: Any) -> None:
    """Give torch.cuda graphs over the pretend machine."""
    state: dict[str, Any] = {"recording": None, "handles": 0, "stream": None}

    class CUDAGraph:
        """`torch.cuda.CUDAGraph`."""

        recording: Recording | None = None

        def capture_begin(
            self, pool: Any = None, capture_error_mode: str = "global", **options: Any
        ) -> None:
            assert state["recording"] is None, "a graph is being recorded already"
            if torch._C._accelerator_getStream(device.extension.current_device()).stream_id == 0:
                raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
            self.handle = pool if pool is not None else graph_pool_handle()
            self.number = device.extension.current_device()
            self.generator = torch.cuda.default_generators[self.number]
            self.random = self.generator.get_state()
            state["recording"] = self.recording = Recording(pools.setdefault(self.handle, Pool()))
            device.memory.capturing = True
            device.notes.capturing = self.recording
            self.listening = device.notes.listen("wait")
            self.listening.__enter__()
            self.recording.__enter__()

        def capture_end(self) -> None:
            assert self.recording is not None
            self.recording.__exit__(None, None, None)
            self.listening.__exit__(None, None, None)
            state["recording"] = device.notes.capturing = None
            device.memory.capturing = False
            self.generator.set_state(self.random)
            self.recording.take_back()
            if self.recording.broken:
                raise RuntimeError(
                    f"CUDA error: operation failed due to a previous error: {self.recording.broken}"
                )
            self.left: dict[int, tuple[int, Any]] = {}
            """Slot -> the key in the pool, and a weak reference to the storage."""
            for slot, reference in self.recording.alive.items():
                storage = reference()
                if storage is not None:
                    key = self.recording.pool.key_of(storage)
                    self.left[slot] = (
                        self.recording.pool.add(storage) if key is None else key,
                        reference,
                    )
            self.recording.alive.clear()

        def replay(self) -> None:
            assert self.recording is not None
            current = torch.accelerator.current_stream()
            state["stream"] = own = state["stream"] or torch.Stream(current.device)
            own.wait_stream(current)
            device.memory.repeating = True
            try:
                with own, torch.no_grad(), warnings.catch_warnings():
                    # of operators as they were recorded, about how they are called
                    warnings.simplefilter("ignore")
                    self.compute(self.recording)
            finally:
                device.memory.repeating = False
            current.wait_stream(own)

        def compute(self, recording: Recording) -> None:
            values: dict[int, Tensor] = {}

            def found(value: Any) -> Any:
                if isinstance(value, Made):
                    own = values[value.slot]
                    return own if form_of(own) == value.form else own.as_strided(*value.form[:3])
                if isinstance(value, Left):
                    return recording.pool.left[value.key].as_strided(*value.form[:3])
                return value.tensor(name) if isinstance(value, Outside) else value

            for function, args, kwargs, slots in recording.entries:
                name = function._schema.name
                result = function(*tree_map(found, args), **tree_map(found, kwargs))
                tensors = [one for one in leaves(result) if isinstance(one, Tensor)]
                values.update(
                    (slot, one) for slot, one in zip(slots, tensors, strict=True) if slot > 0
                )
            for slot, (key, reference) in self.left.items():
                recording.pool.left[key], storage = values[slot], reference()
                if storage is not None and storage.nbytes():
                    ctypes.memmove(
                        storage.data_ptr(),
                        values[slot].untyped_storage().data_ptr(),
                        storage.nbytes(),
                    )

        def reset(self) -> None:
            self.recording = None

        def pool(self) -> Any:
            return self.handle

    def graph_pool_handle() -> tuple[int, int]:
        state["handles"] += 1
        return 0, state["handles"]

    def check_optimizer(self: Any) -> None:
        """Say of `capturable` what torch does, whose own check asks the driver."""
        is_capturable = all(group["capturable"] for group in self.param_groups)
        if state["recording"] is not None and not is_capturable:
            raise RuntimeError(
                f"Attempting CUDA graph capture of step() for an instance of {type(self).__name__} but param_groups' "
                "capturable is False."
            )
        if is_capturable and state["recording"] is None and not getattr(self, WARNED, False):
            warnings.warn(
                "step() is running without CUDA graph capture although capturable=True",
                stacklevel=2,
            )

    optimizer: Any = torch.optim.Optimizer
    optimizer._cuda_graph_capture_health_check = (
        optimizer._accelerator_graph_capture_health_check
    ) = check_optimizer
    cuda: Any = torch.cuda
    cuda.CUDAGraph = cuda.graphs.CUDAGraph = CUDAGraph
    cuda.graph_pool_handle = cuda.graphs.graph_pool_handle = graph_pool_handle
    torch._C._cuda_isCurrentStreamCapturing = lambda: state["recording"] is not None
