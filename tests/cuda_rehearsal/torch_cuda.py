"""Gives a torch that was built for the CPU the functions by which `torch.cuda` asks its driver.

`torch.cuda` is Python over functions named `torch._C._cuda_*`, which a CPU build does not have. They are defined here
for the pretend machine, so that torch's own code runs over them: lazy initialisation, queued seeds, forked processes,
statistics by name. Streams and events are torch's device-independent ones.

Must be called before anything else touches CUDA, once in a process; it cannot be undone.
"""

from __future__ import annotations

import functools
import os
import types
from dataclasses import dataclass
from typing import Any

import torch

from mpt.planner.facts.calibration import CONTEXT_BYTES
from tests.cuda_rehearsal import build, graphs, torch_nccl, torch_xpu
from tests.cuda_rehearsal.cards import BROKEN_HALF, Machine, Properties
from tests.cuda_rehearsal.device_memory import Memory, wants_expandable
from tests.cuda_rehearsal.notes import Record

CUDA_VERSION = "13.0"
ARCHITECTURES = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"
UNSCALE = "aten::_amp_foreach_non_finite_check_and_unscale_"


@dataclass
class Device:
    """The pretend machine of this process."""

    machine: Machine
    extension: Any
    memory: Memory
    notes: Record
    properties: list[Properties]
    initialised_in: int | None = None

    def contexts(self) -> list[int]:
        """Return the cards on which this process has a context."""
        return [index for index in range(len(self.properties)) if self.extension.has_context(index)]

    def fail_once(
        self, operator: str, words: str = "", *, calls_before: int = 0, out_of_memory: bool = True
    ) -> None:
        """Let an operator ("aten::addmm") fail once: for want of memory, or with a library's words."""
        self.extension.fail_once(
            operator, calls_before, out_of_memory, words or self.memory.cards[0].refusal(2**30)
        )


device: Device | None = None


def install(machine: Machine) -> Device:
    """Make this process's torch one with the machine's cards. Raises CannotBuild."""
    global device
    if device is not None:
        return device
    properties = _visible(machine.properties())
    if machine.kind == "xpu":
        extension, memory, waits = torch_xpu.install(properties)
        device = Device(machine, extension, memory, waits, properties)
        return device
    extension = build.load()
    memory = Memory([(card.total_memory, (card.major, card.minor)) for card in properties])
    device = Device(machine, extension, memory, Record(), properties)
    extension.open(len(properties), memory, device.notes)
    device.notes.tell = extension.listen
    extension.multiply_in_tf32(all(card.major >= 8 for card in properties))
    extension.refuse_dtype(
        UNSCALE,
        torch.bfloat16,
        "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'",
    )
    extension.break_half_convolutions(any(card in BROKEN_HALF for card in machine.cards))
    _define_driver(device)
    _define_streams()
    _define_storages(extension)
    torch_nccl.install()
    _watch_reads_of_the_host(extension)
    graphs.define(device)
    return device


def installed() -> Device:
    """Return this process's device."""
    assert device is not None, "no rehearsal runs in this process"
    return device


def _visible(properties: list[Properties]) -> list[Properties]:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return properties
    numbers = [int(part) for part in chosen.split(",") if part.strip().isdigit()]
    return [properties[number] for number in numbers if number < len(properties)]


def _define_driver(found: Device) -> None:
    cards, extension = found.memory.cards, found.extension

    def card(index: int | None) -> Any:
        return cards[extension.current_device() if index is None or index < 0 else index]

    def init() -> None:
        if not cards:
            raise RuntimeError("No CUDA GPUs are available")
        found.initialised_in = os.getpid()
        extension.init()
        cuda: Any = torch.cuda
        cuda._get_device_properties = lambda index: found.properties[index]
        cuda.default_generators = tuple(
            extension.default_generator(index) for index in range(len(cards))
        )

    def set_device(index: int) -> None:
        if index >= len(cards):
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        extension.set_current_device(index)
        extension.touch(index)

    def exchange(index: int) -> int:
        before = int(extension.current_device())
        if index >= 0:
            extension.set_current_device(index)
        return before

    def synchronize() -> None:
        extension.touch(extension.current_device())
        extension.synchronize()

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        stream = torch.Stream(
            stream_id=stream_id, device_index=device_index, device_type=device_type
        )
        exchange(device_index)
        torch._C._accelerator_setStream(stream)

    def current_stream(index: int) -> tuple[int, int, int]:
        index = extension.current_device() if index < 0 else index
        stream = torch._C._accelerator_getStream(index)
        return stream.stream_id, index, stream.device_type

    def default_stream(index: int) -> tuple[int, int, int]:
        index = extension.current_device() if index < 0 else index
        return 0, index, 1

    def mem_get_info(index: int) -> tuple[int, int]:
        extension.touch(index)
        free = (
            card(index).total_bytes
            - card(index).others_bytes
            - CONTEXT_BYTES
            - card(index).reserved
        )
        return max(0, free), card(index).total_bytes

    def empty_cache() -> None:
        found.extension.touch(extension.current_device())
        for each in cards:
            each.empty_cache()

    def clear_workspaces() -> None:
        found.memory.clear_workspaces()
        extension.close_handles()

    def register(address: int, size: int, flags: int) -> int:
        extension.register_pinned(address, size)
        return 0

    def unregister(address: int) -> int:
        extension.unregister_pinned(address)
        return 0

    def set_fraction(fraction: float, index: int) -> None:
        card(index).fraction = fraction

    driver: dict[str, Any] = {
        "getDeviceCount": lambda: len(cards),
        "init": init,
        "isInBadFork": lambda: found.initialised_in not in (None, os.getpid()),
        "setDevice": set_device,
        "getDevice": lambda: int(extension.current_device()),
        "exchangeDevice": exchange,
        "maybeExchangeDevice": exchange,
        "synchronize": synchronize,
        "setStream": set_stream,
        "getCurrentStream": current_stream,
        "getCurrentRawStream": lambda index: current_stream(index)[0],
        "getDefaultStream": default_stream,
        "isCurrentStreamCapturing": lambda: False,
        "getArchFlags": lambda: ARCHITECTURES,
        "getCompiledVersion": lambda: 13000,
        "memoryStats": lambda index: card(index).statistics(),
        "resetPeakMemoryStats": lambda index: card(index).reset_peaks(),
        "resetAccumulatedMemoryStats": lambda index: None,
        "emptyCache": empty_cache,
        "setMemoryFraction": set_fraction,
        "getMemoryFraction": lambda index: card(index).fraction,
        "getAllocatorBackend": lambda: "native",
        "memorySnapshot": lambda *args: {"segments": [], "device_traces": []},
        "hostMemoryStats": dict,
        "ipc_collect": lambda: None,
        "canDeviceAccessPeer": lambda one, other: False,
        "clearCublasWorkspaces": clear_workspaces,
        "lock_mutex": lambda: None,
        "unlock_mutex": lambda: None,
        "set_sync_debug_mode": lambda mode: found.notes.warn_of_waits(mode > 0),
        "get_sync_debug_mode": lambda: int(found.notes.warns),
    }
    for name, function in driver.items():
        setattr(torch._C, f"_cuda_{name}", function)
    runtime: Any = types.SimpleNamespace(
        cudaMemGetInfo=mem_get_info,
        cudaError=types.SimpleNamespace(success=0),
        cudaGetErrorString=str,
        cudaHostRegister=register,
        cudaHostUnregister=unregister,
        cudaProfilerStart=lambda: 0,
        cudaProfilerStop=lambda: 0,
    )
    cuda: Any = torch.cuda
    cuda._cudart = torch._C._cudart = runtime  # type: ignore[attr-defined]
    cuda._is_in_bad_fork = driver["isInBadFork"]
    cuda._exchange_device = cuda._maybe_exchange_device = exchange
    torch._C._has_cuda = True  # type: ignore[attr-defined]
    torch._C._host_emptyCache = lambda: None
    torch.version.cuda = CUDA_VERSION
    torch.backends.cudnn.version = lambda: 91300  # type: ignore[assignment]
    settings: Any = torch._C._accelerator_setAllocatorSettings

    def set_allocator(text: str) -> None:
        settings(text)
        expandable = wants_expandable(text)
        if expandable is not None:
            found.memory.use(expandable)

    torch._C._accelerator_setAllocatorSettings = set_allocator


def _index(place: Any) -> int:
    if place is None:
        return int(torch.cuda.current_device())
    if isinstance(place, int):
        return place
    index = torch.device(place).index
    return int(torch.cuda.current_device()) if index is None else int(index)


def _define_streams() -> None:
    class Stream(torch.Stream):
        """`torch.cuda.Stream` over torch's own stream."""

        def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Any:
            torch.cuda._lazy_init()  # type: ignore[no-untyped-call]
            if kwargs:
                return super().__new__(cls, **kwargs)
            return super().__new__(cls, torch.device("cuda", _index(device)), priority=priority)

        @property
        def cuda_stream(self) -> int:
            return int(self.stream_id)

    class Event(torch.Event):
        """`torch.cuda.Event` over torch's own event."""

        def __new__(
            cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
        ) -> Any:
            return super().__new__(cls, "cuda", enable_timing=enable_timing, blocking=blocking)

    cuda: Any = torch.cuda
    cuda.Stream = cuda.streams.Stream = Stream
    cuda.Event = cuda.streams.Event = Event


def _define_storages(extension: Any) -> None:
    """Let storages of the device be copied and resized, which a CPU build refuses."""
    make, resize = torch.UntypedStorage.__new__, torch.UntypedStorage.resize_

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return (
                make(cls, *args, **kwargs)
                if device is None
                else make(cls, *args, device=device, **kwargs)
            )
        size = args[0] if args else 0
        return torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()

    def resized(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type != "cuda":
            return resize(self, size)
        extension.resize_storage(
            torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), size
        )
        return self

    storage: Any = torch.UntypedStorage
    storage.__new__, storage.resize_ = new, resized


def _watch_reads_of_the_host(extension: Any) -> None:
    """Report bytes that Python reads by no operator of torch's and that a copy may still be writing."""

    def watched(name: str) -> Any:
        read = getattr(torch.Tensor, name)

        @functools.wraps(read)
        def reading(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if (
                type(self) in (torch.Tensor, torch.nn.Parameter)
                and self.device.type == "cpu"
                and self.is_pinned()
            ):
                extension.host_touches(self.data_ptr(), self.nbytes, False, f"{name}()")
            return read(self, *args, **kwargs)

        return reading

    tensor: Any = torch.Tensor
    for name in ("numpy", "tolist"):
        setattr(tensor, name, watched(name))
