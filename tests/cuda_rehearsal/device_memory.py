"""The pretend cards' memory: what may be allocated, as the planner's model of CUDA's caching allocator decides it.

The bytes are the host's; this is the bookkeeping that CUDA's allocator would do for them, with its rounding,
segments, fragmentation, cache and limit. It is the same code by which `mpt plan` predicts, fed with other requests:
those of a run that happens.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mpt.planner.facts.calibration import CONTEXT_BYTES
from mpt.planner.trace.allocator import GRAPHS, CachingAllocator, ExpandableAllocator, OutOfMemory

GIB = 2**30


def allocator_setting() -> str:
    """Return what the environment says to the allocator now."""
    return os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""


def wants_expandable(setting: str) -> bool | None:
    """Return what an allocator setting says about expandable segments, None where it says nothing."""
    for part in setting.split(","):
        name, _, value = part.partition(":")
        if name.strip() == "expandable_segments":
            return value.strip().lower() == "true"
    return None


@dataclass
class CardMemory:
    """One card. Blocks stay with the allocator that gave them when the kind of segments is changed."""

    total_bytes: int
    capability: tuple[int, int]
    fraction: float = 1.0
    others_bytes: int = 0
    """What other processes hold."""
    spills: bool = False
    """Whether the driver moves what does not fit into system memory, as Windows' does."""
    allocators: list[CachingAllocator] = field(default_factory=list)
    owners: dict[int, CachingAllocator] = field(default_factory=dict)
    requested: dict[int, int] = field(default_factory=dict)
    peak_allocated: int = 0
    peak_reserved: int = 0
    out_of_memory: int = 0
    mallocs: int = 0
    workspaces: int = 0

    @property
    def capacity_bytes(self) -> int:
        """What segments may take: the driver's rest beside context and other processes, or the process's share."""
        share = int(self.fraction * self.total_bytes)
        if self.spills:
            return share if self.fraction < 1 else 2**40
        return min(self.total_bytes - CONTEXT_BYTES - self.others_bytes, share)

    @property
    def spilled(self) -> int:
        """Bytes of this process that lie in system memory."""
        return max(0, self.reserved + CONTEXT_BYTES + self.others_bytes - self.total_bytes)

    @property
    def allocated(self) -> int:
        return sum(allocator.allocated for allocator in self.allocators)

    @property
    def reserved(self) -> int:
        return sum(allocator.reserved for allocator in self.allocators)

    def use(self, expandable: bool) -> None:
        """Serve further requests from segments of this kind."""
        kind = ExpandableAllocator if expandable else CachingAllocator
        if not self.allocators or type(self.allocators[-1]) is not kind:
            self.allocators.append(kind())

    def malloc(self, key: int, size: int, stream: int) -> str:
        """Serve a request; return what CUDA says if it cannot be.

        The environment is read at the first one, as CUDA's allocator does: `mpt train` sets it before that.
        """
        if not self.allocators:
            self.use(expandable=bool(wants_expandable(allocator_setting())))
        if len(self.allocators) == 1:
            (allocator,) = self.allocators
            allocator.capacity_bytes = self.capacity_bytes
        else:
            allocator = self.allocators[-1]
            allocator.capacity_bytes = self.capacity_bytes - self.reserved + allocator.reserved
        try:
            allocator.malloc(key, size, stream)
        except OutOfMemory:
            self.out_of_memory += 1
            return self.refusal(size)
        self.owners[key], self.requested[key] = allocator, size
        self.mallocs += 1
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return ""

    def free(self, key: int) -> None:
        """Take a block back."""
        allocator = self.owners.pop(key, None)
        if allocator is not None:
            allocator.free(key)
            del self.requested[key]

    def refusal(self, size: int) -> str:
        """Return CUDA's words."""
        free = max(0, self.total_bytes - CONTEXT_BYTES - self.others_bytes - self.reserved)
        return (
            f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB. GPU 0 has a total capacity of "
            f"{self.total_bytes / GIB:.2f} GiB of which {free / 2**20:.2f} MiB is free. Of the allocated memory "
            f"{self.allocated / GIB:.2f} GiB is allocated by PyTorch, and "
            f"{(self.reserved - self.allocated) / 2**20:.2f} MiB is reserved by PyTorch but unallocated."
        )

    def statistics(self) -> dict[str, Any]:
        """Return what `torch.cuda.memory_stats` flattens."""

        def kinds(current: int, peak: int) -> dict[str, dict[str, int]]:
            figures = {"current": current, "peak": peak, "allocated": current, "freed": 0}
            return {"all": figures, "small_pool": dict.fromkeys(figures, 0), "large_pool": figures}

        requested = sum(self.requested.values())
        return {
            "allocated_bytes": kinds(self.allocated, self.peak_allocated),
            "active_bytes": kinds(self.allocated, self.peak_allocated),
            "reserved_bytes": kinds(self.reserved, self.peak_reserved),
            "requested_bytes": kinds(requested, requested),
            "inactive_split_bytes": kinds(0, 0),
            "allocation": self.counts(),
            "active": self.counts(),
            "segment": kinds(0, 0),
            "inactive_split": kinds(0, 0),
            "oversize_allocations": {"current": 0, "peak": 0, "allocated": 0, "freed": 0},
            "oversize_segments": {"current": 0, "peak": 0, "allocated": 0, "freed": 0},
            "num_alloc_retries": sum(allocator.retries for allocator in self.allocators),
            "num_ooms": self.out_of_memory,
            "max_split_size": -1,
            "num_sync_all_streams": 0,
            "num_device_alloc": 0,
            "num_device_free": 0,
        }

    def counts(self) -> dict[str, dict[str, int]]:
        """Return how many blocks there are and were."""
        now = len(self.owners)
        figures = {
            "current": now,
            "peak": now,
            "allocated": self.mallocs,
            "freed": self.mallocs - now,
        }
        return {"all": figures, "small_pool": dict.fromkeys(figures, 0), "large_pool": figures}

    def reset_peaks(self) -> None:
        """Begin to look for peaks anew."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def empty_cache(self) -> None:
        """Give unused segments back."""
        for allocator in self.allocators:
            allocator.empty_cache()


class Memory:
    """The machine's cards. `malloc`, `free` and `open_workspace` are called by the extension."""

    def __init__(self, cards: list[tuple[int, tuple[int, int]]]) -> None:
        self.cards = [CardMemory(total, capability) for total, capability in cards]
        self.lock = threading.Lock()
        self.capturing = False
        """Whether a graph is being recorded, whose memory comes from a pool of its own."""
        self.repeating = False
        """Whether a graph is repeated, which allocates nothing: its memory is there."""

    def use(self, expandable: bool) -> None:
        """Choose the kind of segments on all cards."""
        for card in self.cards:
            card.use(expandable)

    def malloc(self, device: int, key: int, size: int, stream: int) -> str:
        if self.repeating:
            return ""
        with self._alone():
            return self.cards[device].malloc(key, size, GRAPHS if self.capturing else stream)

    def free(self, device: int, key: int) -> None:
        with self._alone():
            self.cards[device].free(key)

    def open_workspace(self, device: int, stream: int) -> str:
        """Take a cuBLAS workspace, which stays until all are cleared."""
        # imports torch, which may be what is being imported now
        from mpt.planner.trace.unseen import Unseen

        if self.repeating:
            return ""
        card = self.cards[device]
        deterministic = bool(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        size = Unseen(card.capability, deterministic).cublas_bytes
        with self._alone():
            card.workspaces += 1
            # other keys are positive
            return card.malloc(-card.workspaces, size, GRAPHS if self.capturing else stream)

    def statistics_of(self, device: int) -> list[int]:
        """Return what the extension answers `torch.accelerator` (`Host::on_statistics` in device.h)."""
        card = self.cards[device]
        free = max(0, card.total_bytes - CONTEXT_BYTES - card.others_bytes - card.reserved)
        held = [card.allocated, card.peak_allocated, card.reserved, card.peak_reserved]
        return [*held, free, card.total_bytes, card.mallocs]

    def reset_peaks_of(self, device: int) -> None:
        """Begin to look for a card's peaks anew."""
        self.cards[device].reset_peaks()

    def empty_caches(self) -> None:
        """Give all cards' unused segments back."""
        for card in self.cards:
            card.empty_cache()

    def clear_workspaces(self) -> None:
        """Give all cuBLAS workspaces back to the allocator."""
        with self._alone():
            for card in self.cards:
                for number in range(card.workspaces):
                    card.free(-1 - number)
                card.workspaces = 0

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep out other threads, and the garbage collector, which would free in the middle of an allocation."""
        with self.lock:
            collects = gc.isenabled()
            gc.disable()
            try:
                yield
            finally:
                if collects:
                    gc.enable()
