"""The peak of live tensor bytes over one step, and their categories.

A process's resident size says little on a CPU: allocators keep freed memory, libraries and data count too, and half
precision seems to save nothing. So every storage's birth and death is logged, births from the operators' outputs,
deaths from weak references, and the log is replayed to find the moment of the peak and the storages alive then. A
storage counts once, however many tensors view it. On CUDA the peak is the allocator's own figure and the log only
splits it.

It does not see workspaces that an operator allocates and frees inside itself. Half-precision copies of weights
that autocast makes and backward needs are saved tensors, and count among the activations; tensors that a memory
trick keeps in its own way, as recomputation does, count as the rest. Watching changes no result: operators run as they
are and saved tensors are handed back as they were.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mpt import accelerator
from mpt.run.process.storage_trace import LiveStorages, tensors_in

Known = Mapping[str, Iterable[Tensor]]
"""Tensors by category: "parameters", "gradients", "optimizer_state". Others count as the rest."""

CATEGORIES = ("parameters", "gradients", "optimizer_state")


@dataclass(frozen=True)
class MemorySplit:
    """Bytes at the moment of the peak; the parts add up to `peak_bytes`. `reserved_bytes` is the CUDA allocator's."""

    kind: str
    peak_bytes: int
    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    rest: int
    reserved_bytes: int | None = None

    def to_record(self) -> dict[str, Any]:
        """Return the figures as a metrics line holds them."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def measure_step(
    step: Callable[[], Any], known: Callable[[], Known], device: torch.device | str = "cpu"
) -> MemorySplit:
    """Run one step and return its peak memory, split.

    `known` is asked before and after the step, because optimizers make their state and backward the gradients on the
    way. A known tensor's `.grad` is a gradient without being named.
    """
    with MemoryMeter(known, device) as meter:
        step()
    return meter.split


class MemoryMeter:
    """Watches the work within its block; `split` is there after it."""

    split: MemorySplit

    def __init__(self, known: Callable[[], Known], device: torch.device | str = "cpu") -> None:
        self.known = known
        self.device = torch.device(device)
        self.log = StorageLog(self.device)
        self.stack = ExitStack()

    def __enter__(self) -> Self:
        if accelerator.has_allocator(self.device):
            accelerator.synchronize(self.device)
            accelerator.reset_peaks(self.device)
        self.recognise(is_start=True)
        self.stack.enter_context(
            torch.autograd.graph.saved_tensors_hooks(self.log.save, unpack_saved)
        )
        self.stack.enter_context(DispatchWatch(self.log))
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()
        self.recognise(is_start=False)
        self.log.stop()
        if accelerator.has_allocator(self.device):
            accelerator.synchronize(self.device)
            self.split = self.split_allocator_peak()
        else:
            self.split = MemorySplit(kind="live tensors", **self.log.replay())

    def recognise(self, *, is_start: bool) -> None:
        """Give the log the categories of known tensors, and at the start have gradients recognised as they come."""
        for category, tensors in self.known().items():
            for tensor in tensors:
                self.log.see(tensor, from_the_start=is_start)
                self.log.label(tensor, category if category in CATEGORIES else "rest")
                if not tensor.is_leaf:
                    continue
                if tensor.grad is not None:
                    self.log.see(tensor.grad, from_the_start=is_start)
                    self.log.label(tensor.grad, "gradients")
                if is_start and tensor.requires_grad:
                    # A gradient may be freed or replaced within the step, so the end is too late to find them all.
                    register: Any = tensor.register_post_accumulate_grad_hook
                    handle = register(self.log.see_gradient)
                    self.stack.callback(handle.remove)

    def split_allocator_peak(self) -> MemorySplit:
        """Return the device allocator's peak; the parts are the log's, and the rest is unseen by it."""
        parts = self.log.replay()
        peak, reserved = accelerator.peaks(self.device)
        parts["rest"] = max(0, peak - sum(parts[name] for name in (*CATEGORIES, "activations")))
        parts["peak_bytes"] = peak
        return MemorySplit("CUDA allocator", **parts, reserved_bytes=reserved)


class Saved:
    """A tensor that backward will need. Its end is the end of the saving."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def unpack_saved(saved: Saved) -> Tensor:
    """Hand a saved tensor back to backward."""
    return saved.tensor


class StorageLog:
    """Births, deaths and savings of one device's storages in the order in which they happened."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.live = LiveStorages(self.bury)
        self.sizes: list[int] = []
        self.labels: dict[int, str] = {}
        self.before: dict[int, int] = {}
        """Number -> bytes of the storages that were there at the start."""
        self.events: list[tuple[int, int, int]] = []
        """(number, change in bytes, change in how often it is saved)"""
        self.stopped = False

    def see(self, tensor: Tensor, *, from_the_start: bool = False) -> int | None:
        """Note a tensor's storage, or that it was resized; return its number, None if it is not this device's."""
        if not is_of(tensor, self.device):
            return None
        size = tensor.untyped_storage().nbytes()
        number = self.live.number_of(tensor)
        if number is None:
            number = len(self.sizes)
            self.sizes.append(size)
            self.live.add(tensor, number)
            if from_the_start:
                self.before[number] = size
            else:
                self.events.append((number, size, 0))
        elif size != self.sizes[number]:
            self.events.append((number, size - self.sizes[number], 0))
            self.sizes[number] = size
        return number

    def bury(self, number: int) -> None:
        """Note a storage's end."""
        if not self.stopped:
            self.events.append((number, -self.sizes[number], 0))

    def label(self, tensor: Tensor, category: str) -> None:
        """Name the category of a tensor's storage; the first name counts."""
        number = self.see(tensor)
        if number is not None:
            self.labels.setdefault(number, category)

    def see_gradient(self, parameter: Tensor) -> None:
        """Label the gradient that a parameter was just given."""
        if parameter.grad is not None:
            self.label(parameter.grad, "gradients")

    def save(self, tensor: Tensor) -> Saved:
        """Note that a tensor is kept for backward."""
        saved = Saved(tensor)
        number = self.see(tensor)
        if number is not None:
            self.events.append((number, 0, 1))
            weakref.finalize(saved, self.release, number).atexit = False
        return saved

    def release(self, number: int) -> None:
        """Note that backward needs a storage no more."""
        if not self.stopped:
            self.events.append((number, 0, -1))

    def stop(self) -> None:
        """Note nothing any more."""
        self.stopped = True
        self.live.forget()

    def replay(self) -> dict[str, int]:
        """Return the peak and its parts."""
        current = highest = sum(self.before.values())
        peak_end = 0
        for index, (_, change, _) in enumerate(self.events):
            current += change
            if current > highest:
                peak_end, highest = index + 1, current
        live = dict(self.before)
        times_saved: dict[int, int] = {}
        for number, change, saving in self.events[:peak_end]:
            live[number] = live.get(number, 0) + change
            times_saved[number] = times_saved.get(number, 0) + saving
        parts = dict.fromkeys((*CATEGORIES, "activations", "rest"), 0)
        for number, size in live.items():
            parts[
                self.labels.get(number) or ("activations" if times_saved.get(number) else "rest")
            ] += size
        return {"peak_bytes": highest, **parts}


class DispatchWatch(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Shows each operator's inputs and results to a log."""

    def __init__(self, log: StorageLog) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.log = log

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Tensors that are read before they were made here were there before; only lift_fresh reads a tensor that Python
        # just made.
        is_new = function is torch.ops.aten.lift_fresh.default
        for tensor in tensors_in((args, kwargs or {})):
            self.log.see(tensor, from_the_start=not is_new)
        result = function(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self.log.see(tensor)
        return result


def is_of(tensor: Tensor, device: torch.device) -> bool:
    """Has this tensor memory of its own on this device?"""
    same = tensor.device.type == device.type and device.index in (None, tensor.device.index)
    return same and tensor.layout == torch.strided
