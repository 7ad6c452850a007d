"""A training's device apart from tensors: which there is, its memory, its random numbers, its streams.

Everything goes through `torch.accelerator`, and through the module of the device's kind (`torch.cuda`, `torch.xpu`) for
functions that it does not have, under names that all of them share. So a kind of device is refused only if torch does
not have it. Features of NVIDIA's and AMD's cards alone (compute capability, TF32, cuBLAS) are asked for at their use.

A CPU has none of it, and Apple's `mps` neither statistics nor streams: for these the functions do nothing or return 0.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from mpt.config.sizes import describe_bytes
from mpt.errors import MptError

WITHOUT_ALLOCATOR = ("cpu", "meta", "mps", "fgpu")
"""Kinds of devices without torch's caching allocator: no statistics, no cache of its own, no streams. `fgpu` is the
planner's, whose tensors have no memory."""
CHOSEN_BY_NAME = ("mps",)
"""Kinds that `auto` leaves out: nobody has tried them, and a CPU may be meant."""


def available() -> str | None:
    """Return the kind of this machine's accelerator ("cuda", "xpu"); None without one."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


@functools.cache  # asked in every step, where the name of a kind takes long to make
def has_allocator(device: torch.device) -> bool:
    """Return whether torch's caching allocator serves a device: it has statistics, a cache, and streams."""
    return device.type not in WITHOUT_ALLOCATOR


def copies_beside(device: torch.device) -> bool:
    """Return whether copies can run on a stream of their own: on a real device that has streams, not on a fake one."""
    return has_allocator(device) and available() == device.type and detect_fake_mode() is None


def select(device: torch.device) -> None:
    """Make a device with a number the current one.

    Functions of torch that take no device (pinned memory, emptying the cache) would open a context on the first.
    """
    if device.index is not None and has_allocator(device):
        torch.accelerator.set_device_index(device.index)


def index_of(device: torch.device) -> int:
    """Return a device's number; the current one's for a device without a number."""
    return torch.accelerator.current_device_index() if device.index is None else device.index


def name_of(device: torch.device) -> str:
    """Return the name of a card as its driver has it; the kind of device if there is no name."""
    module = torch.get_device_module(device)
    return (
        str(module.get_device_name(device)) if hasattr(module, "get_device_name") else device.type
    )


def total_bytes(device: torch.device) -> int:
    """Return the bytes of memory that a card has."""
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)


def synchronize(device: torch.device) -> None:
    """Wait until a device has done everything; a CPU always has."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def empty_cache(device: torch.device) -> None:
    """Give unused cached memory back to the driver."""
    if has_allocator(device):
        torch.accelerator.empty_cache()


def empty_host_cache(device: torch.device) -> None:
    """Give unused page-locked host memory back, which is otherwise never returned. Only CUDA builds can."""
    if device.type == "cuda":
        torch._C._host_emptyCache()


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes that tensors of this process take."""
    return torch.accelerator.memory_allocated(device) if has_allocator(device) else 0


def reserved_bytes(device: torch.device) -> int:
    """Return the bytes that the allocator holds for this process."""
    return torch.accelerator.memory_reserved(device) if has_allocator(device) else 0


def peaks(device: torch.device) -> tuple[int, int]:
    """Return the most bytes that were allocated and reserved since `reset_peaks`."""
    if not has_allocator(device):
        return 0, 0
    return torch.accelerator.max_memory_allocated(device), torch.accelerator.max_memory_reserved(
        device
    )


def reset_peaks(device: torch.device) -> None:
    """Begin to look for peaks anew."""
    if has_allocator(device):
        torch.accelerator.reset_peak_memory_stats(device)


def allocations_made(device: torch.device) -> int:
    """Return how many allocations this process has made."""
    if not has_allocator(device):
        return 0
    return int(torch.accelerator.memory_stats(device).get("allocation.all.allocated", 0))


def free_and_total(device: torch.device) -> tuple[int, int]:
    """Return the bytes that are free on a card, and those that it has, as its driver counts them."""
    free, total = torch.get_device_module(device).mem_get_info(device)
    return int(free), int(total)


def outside_bytes(device: torch.device) -> int:
    """Return the bytes a card holds outside this process's allocator: its context, and other processes."""
    free, total = free_and_total(device)
    return max(0, total - free - reserved_bytes(device))


def held_by_others(device: torch.device) -> str:
    """Describe the memory of a card that other programs hold, for a message; empty below a quarter of the card."""
    if not has_allocator(device):
        return ""
    try:
        (free, total), others = free_and_total(device), outside_bytes(device)
    except RuntimeError:  # not even a context found room
        return ""
    if others < total / 4:
        return ""
    sizes = [describe_bytes(size) for size in (free, total, others)]
    return ", of which {} of {} are free: other programs hold {}, end them first".format(*sizes)


def busy_share(device: torch.device) -> float:
    """Return the share, from 0 to 1, of the driver's last sample period (1/6 to 1 s) in which a card ran any kernel.

    Asks the driver's library, which neither waits for the card nor runs anything on it. Raises MptError with the
    reason if it is not known: another kind of device, a library that is not installed, a driver that has no figure.
    """
    ask = (
        getattr(torch.get_device_module(device), "utilization", None)
        if has_allocator(device)
        else None
    )
    if ask is None:
        raise MptError(f"no driver counts it for {device.type}")
    try:
        percent = float(ask(device))
    except ImportError as error:
        if device.type == "cuda" and not torch.version.hip:
            raise MptError(
                "nvidia-ml-py is not installed: pip install 'mpt-trainer[nvidia]'"
            ) from error
        raise MptError(str(error)) from error
    except (
        Exception
    ) as error:  # NVML's and amdsmi's errors are classes of libraries that need not be there
        raise MptError(f"the driver has no figure: {error or type(error).__name__}") from error
    if not 0 <= percent <= 100:
        raise MptError(f"the driver has no figure: it answers {percent:g} %")
    return percent / 100


def limit_share(device: torch.device, share: float) -> None:
    """Let this process's allocator take no more than a share of a card."""
    torch.get_device_module(device).set_per_process_memory_fraction(share, index_of(device))


def share_limit(device: torch.device) -> float:
    """Return the share of a card that this process's allocator may take."""
    return float(torch.get_device_module(device).get_per_process_memory_fraction(index_of(device)))


def random_state(device: torch.device) -> Tensor | None:
    """Return the state of a device's own random numbers; None for a CPU, whose are torch's, and for a fake device."""
    if not has_allocator(device) and device.type != "mps":
        return None
    module: Any = torch.get_device_module(device)
    state: Tensor = module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: Tensor) -> None:
    """Restore the result of `random_state`."""
    module: Any = torch.get_device_module(device)
    if device.type == "mps":
        module.set_rng_state(state)
    else:
        module.set_rng_state(state, device)
