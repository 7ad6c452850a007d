"""The machine: cards, drivers, precision by computing it, memory, threads, disk.

Whatever can be tested is tested: bfloat16 may be emulated, float16 is broken on some GTX 16xx cards (their convolutions
return NaN), and a wheel built for another driver fails at its first kernel and not at import.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpt import accelerator
from mpt.config.sizes import describe_bytes
from mpt.doctor.findings import Section
from mpt.doctor.machine.driver import driver_version, examine_visibility
from mpt.doctor.machine.shadows import find_shadows
from mpt.engine.state.spill_watch import WINDOWS_SETTING, WSL_SETTING
from mpt.precision.shared.choice import AMPERE, cpu_has_fast_bfloat16
from mpt.run.process import operating_system
from mpt.run.process.files import free_bytes
from mpt.run.records.environment import package_version, processor_name

LITTLE_DISK = 2 * 2**30
BUSY_SHARE = 0.1
"""The share of a card's memory that others may hold before it is reported."""


def examine_environment(batch_size: int, runs: Path) -> Section:
    """Look at the machine that a run would use."""
    section = Section("environment")
    versions = ", ".join(
        f"{name} {package_version(name) or 'not installed'}" for name in ("torch", "torchvision")
    )
    driver = driver_version()
    section.add(
        "ok",
        "versions",
        f"{versions}, built for {_build()}{driver and f', NVIDIA driver {driver}'}",
    )
    for text, advice in find_shadows():
        section.add("warning", "command", text, advice)
    _examine_processor(section)
    examine_visibility(section)
    kind = accelerator.available()
    for index in range(torch.accelerator.device_count() if kind else 0):
        _examine_card(section, torch.device(str(kind), index), batch_size)
    free = free_bytes(runs)
    if free is not None:
        advice = (
            "free some space: a checkpoint that does not fit ends the run"
            if free < LITTLE_DISK
            else ""
        )
        text = f"{describe_bytes(free)} free where runs are written ({runs})"
        section.add("warning" if advice else "ok", "disk", text, advice)
    return section


def _build() -> str:
    version: Any = torch.version
    return (
        f"CUDA {version.cuda}" if version.cuda else f"ROCm {version.hip}" if version.hip else "CPUs"
    )


def _examine_processor(section: Section) -> None:
    threads, cores = torch.get_num_threads(), operating_system.usable_cores()
    advice = "set train.threads, or OMP_NUM_THREADS" if threads > cores else ""
    text = f"{processor_name()}: torch uses {threads} of {cores} cores that this process may use"
    section.add("warning" if threads > cores else "ok", "processor", text, advice)
    native = cpu_has_fast_bfloat16()
    text = (
        "bfloat16 is native on this CPU"
        if native
        else "bfloat16 is emulated on this CPU: it saves memory, not time"
    )
    section.add("ok" if native else "note", "bfloat16", text)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > cores + 0.5:
        section.add(
            "note",
            "load",
            f"other programs keep {load:.1f} cores busy: times will be longer than usual",
        )


def _examine_card(section: Section, device: torch.device, batch_size: int) -> None:
    name = f"{device}: {accelerator.name_of(device)}"
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if accelerator.has_allocator(device):
        _examine_memory(section, device, name, capability)
    error = try_dtype(device, torch.float32, batch_size)
    if error:
        advice = "the wheel and the driver or card do not fit; docs/how-to/gpu.md has a table"
        section.add("fault", name, f"a first computation failed: {error}", advice)
        return
    for dtype in (torch.float16, torch.bfloat16):
        word = str(dtype).removeprefix("torch.")
        error = try_dtype(device, dtype, batch_size)
        if error:
            other = (
                "bf16" if dtype == torch.float16 and (capability or AMPERE) >= AMPERE else "fp32"
            )
            section.add(
                "fault",
                name,
                f"{word} is broken: {error}",
                f"use precision={other}, or cudnn disabled",
            )
        elif dtype == torch.bfloat16 and capability is not None and capability < AMPERE:
            section.add(
                "note",
                name,
                "bfloat16 is emulated: it saves memory, not time",
                "use amp in float16",
            )
        else:
            section.add("ok", name, f"{word} convolutions and products are right")
    allowed = torch.backends.cuda.matmul.allow_tf32
    if capability is not None and capability >= AMPERE:
        section.add(
            "ok", name, f"TF32 is {'on' if allowed else 'off'}; precision=tf32 switches it on"
        )


def _examine_memory(
    section: Section, device: torch.device, name: str, capability: tuple[int, int] | None
) -> None:
    total = accelerator.total_bytes(device)
    kind = f"compute capability {capability[0]}.{capability[1]}, " if capability else ""
    section.add("ok", name, f"{kind}{describe_bytes(total)}")
    others = accelerator.outside_bytes(device)
    if others > BUSY_SHARE * total:
        advice = "close other programs, or plan with --desktop"
        section.add(
            "note",
            name,
            f"{describe_bytes(others)} are taken by other programs or the desktop",
            advice,
        )
    examine_overflow(section, name)


def examine_overflow(section: Section, name: str) -> None:
    """Note how the driver handles allocations beyond the card's memory."""
    if not operating_system.moves_overflow():
        section.add(
            "ok", name, "the driver refuses what does not fit, and memory.on_oom answers that"
        )
        return
    where, setting = (
        ("WSL", WSL_SETTING) if operating_system.is_wsl() else ("Windows", WINDOWS_SETTING)
    )
    text = f"on {where} the driver moves what does not fit into system memory, and training becomes many times slower"
    section.add(
        "note", name, text, f"leave memory.ceiling at auto, which refuses it before; {setting}"
    )


def try_dtype(device: torch.device, dtype: torch.dtype, batch_size: int) -> str:
    """Compute a convolution and a product in a dtype, forward and backward; return the failure, or ""."""
    numbers = torch.Generator().manual_seed(0)
    image = torch.rand(max(1, batch_size), 16, 16, 16, generator=numbers)
    net = nn.Sequential(
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8192, 8)
    )
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=numbers) * 0.02 - 0.01)
    expected = net(image).detach()
    try:
        moved = net.to(device, dtype)
        result = moved(image.to(device, dtype))
        result.float().square().mean().backward()
        value = result.detach().float().cpu()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    gradients = [parameter.grad for parameter in moved.parameters() if parameter.grad is not None]
    if not bool(torch.isfinite(value).all()) or not all(
        bool(torch.isfinite(one).all()) for one in gradients
    ):
        return "it makes NaN of numbers between 0 and 1"
    worst = float((value - expected).abs().max() / expected.abs().max())
    return f"results are off by {worst:.0%}" if worst > 0.1 else ""
