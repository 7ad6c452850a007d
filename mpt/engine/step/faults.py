"""Classify the failure of an update: memory that ran out, a trick that does not suit, or anything else."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import CheckpointError as RecomputationError

from mpt.errors import ConfigError
from mpt.parallel.world import FaultKind, PeerFaultError

REFUSALS = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",  # the driver's, for pinned memory, kernels and handles
    "_STATUS_ALLOC_FAILED",  # cuBLAS, cuDNN and cuSOLVER
    "Storage size calculation overflowed",  # more than can be addressed
)
"""Words of a refusal that is no torch.OutOfMemoryError."""
NO_ENGINE = "unable to find an engine to execute this computation"
"""cuDNN's words if no kernel's workspace had room, and also for a dtype or a layout that it has no kernel for."""
LEAST_ROOM = 2**30
ROOM_SHARE = 0.1
"""Of a card's memory. With more than this and `LEAST_ROOM` left, a kernel of cuDNN's finds room for its workspace."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception is a refusal of memory: by torch's allocators, the driver or CUDA's libraries."""
    return fault_kind(error) == "out_of_memory"


def fault_kind(error: BaseException) -> FaultKind:
    """Return how an update's failure is to be taken; that of another rank as it was taken there."""
    if isinstance(error, PeerFaultError):
        return error.kind
    if isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in REFUSALS):
        return "out_of_memory"
    if NO_ENGINE in str(error) and is_memory_short():
        return "out_of_memory"
    return "unsuited" if isinstance(error, ConfigError | RecomputationError) else "error"


def is_memory_short() -> bool:
    """Return whether the current card has too little room for a library's workspace; False without one.

    Call while the failed update still holds its tensors.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    free, total = torch.cuda.mem_get_info()
    cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    share = torch.cuda.get_per_process_memory_fraction(torch.cuda.current_device())
    room = min(free + cached, share * total - torch.cuda.memory_allocated())
    return room < max(LEAST_ROOM, ROOM_SHARE * total)


def out_of_memory_reason(error: BaseException) -> str:
    """Return an allocator's message without its advice."""
    return str(error).strip().split("\n")[0].split(". Of the allocated memory")[0]


def describe_out_of_memory(where: str, reason: str, advice: str = "") -> str:
    """Return the message of memory that ran out: "out of memory at step 3 (1 GiB refused); try a smaller batch"."""
    place = f" {where}" if where else ""
    return f"out of memory{place} ({reason})" + (f"; {advice}" if advice else "")
