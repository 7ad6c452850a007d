"""The machine that was checked, and how fast its bus is: needed to read figures of another person's card."""

from __future__ import annotations

import os
import platform
import time
from typing import Any

import torch

from mpt.config.sizes import describe_bytes
from mpt.doctor.machine.driver import driver_version
from mpt.run.process.host_memory import available_bytes
from mpt.version import VERSION

BUS_BYTES = 256 * 2**20
COPIES = 5


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return versions, driver, system, processor, memory, and the card's name and memory if there is one."""
    machine: dict[str, Any] = {
        "mpt": VERSION,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": driver_version() or None,
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "host_memory_bytes": host_memory_bytes(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine |= {
            "gpu": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "gpu_memory_bytes": properties.total_memory,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        }
    return machine


def host_memory_bytes() -> int | None:
    """Return the machine's memory; None if the system does not report it."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def measure_machine(device: torch.device) -> dict[str, Any]:
    """Return free memory of card and host, the context, and the bus in both directions, pinned and pageable."""
    left = available_bytes()
    said = [f"host memory left {describe_bytes(left) if left else 'unknown'}"]
    if device.type != "cuda":
        return {"said": f"{said[0]}; no CUDA device, so there is no bus to measure"}
    torch.empty(1, device=device)
    free, total = torch.cuda.mem_get_info(device)
    outside = total - free - torch.cuda.memory_reserved(device)
    said.append(f"card {describe_bytes(free)} free of {describe_bytes(total)}")
    said.append(f"context and other programs {describe_bytes(outside)}")
    size = min(BUS_BYTES, free // 8)
    there = torch.empty(size, dtype=torch.uint8, device=device)
    rates = {}
    for kind in ("pinned", "pageable"):
        host = torch.ones(size, dtype=torch.uint8, pin_memory=kind == "pinned")
        rates[f"to the card, {kind}"] = size / seconds_of_copy(there, host, device)
        rates[f"to the host, {kind}"] = size / seconds_of_copy(host, there, device)
    said.append("bus " + ", ".join(f"{rate / 1e9:.1f} GB/s {name}" for name, rate in rates.items()))
    figures = {"free_bytes": free, "outside_bytes": outside, "bus_bytes_per_second": rates}
    return {"said": "; ".join(said), "figures": figures}


def seconds_of_copy(target: torch.Tensor, source: torch.Tensor, device: torch.device) -> float:
    """Return the seconds of the fastest of some copies."""
    best = float("inf")
    for _ in range(COPIES):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best
