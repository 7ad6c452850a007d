"""Gives a torch that was built for the CPU one Intel GPU or more: `torch.xpu` and `torch.accelerator` run over it.

The same device as the pretend CUDA cards, compiled for the other kind: torch's own code for XPU decides about autocast,
gradients, streams, random states and statistics. Kernels, their speed and their dtypes are not Intel's.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from mpt.planner.facts.calibration import CONTEXT_BYTES
from tests.cuda_rehearsal import build
from tests.cuda_rehearsal.cards import Properties
from tests.cuda_rehearsal.device_memory import Memory
from tests.cuda_rehearsal.notes import Record


class IntelMemory(Memory):
    """Cards whose matrix products take no workspace that stays."""

    def open_workspace(self, device: int, stream: int) -> str:
        return ""


def install(properties: list[Properties]) -> tuple[Any, Memory, Record]:
    """Make this process's torch one with these Intel cards; return the extension, their memory and the notes."""
    extension = build.load("xpu")
    memory = IntelMemory([(card.total_memory, (card.major, card.minor)) for card in properties])
    notes = Record()
    extension.open(len(properties), memory, notes)
    notes.tell = extension.listen
    _define_driver(extension, memory, properties)
    return extension, memory, notes


def _define_driver(extension: Any, memory: Memory, properties: list[Properties]) -> None:
    cards, initialised_in, xpu = memory.cards, [os.getpid()], torch.xpu

    def init() -> None:
        initialised_in[0] = os.getpid()
        module: Any = xpu
        module._get_device_properties = lambda index: properties[index]
        module.default_generators = tuple(
            extension.default_generator(index) for index in range(len(cards))
        )

    def exchange(index: int) -> int:
        before = int(extension.current_device())
        if index >= 0:
            extension.set_current_device(index)
        return before

    def set_fraction(fraction: float, index: int) -> None:
        cards[index].fraction = fraction

    def memory_info(index: int) -> tuple[int, int]:
        card = cards[index]
        return max(
            0, card.total_bytes - CONTEXT_BYTES - card.others_bytes - card.reserved
        ), card.total_bytes

    driver: dict[str, Any] = {
        "getDeviceCount": lambda: len(cards),
        "init": init,
        "isInBadFork": lambda: initialised_in[0] != os.getpid(),
        "setDevice": extension.set_current_device,
        "getDevice": lambda: int(extension.current_device()),
        "exchangeDevice": exchange,
        "maybeExchangeDevice": exchange,
        "synchronize": lambda index: extension.synchronize(),
        "emptyCache": memory.empty_caches,
        "memoryStats": lambda index: cards[index].statistics(),
        "resetPeakMemoryStats": lambda index: cards[index].reset_peaks(),
        "getMemoryInfo": memory_info,
        "setMemoryFraction": set_fraction,
        "getMemoryFraction": lambda index: cards[index].fraction,
    }
    for name, function in driver.items():
        setattr(torch._C, f"_xpu_{name}", function)
    torch._C._has_xpu = True  # type: ignore[attr-defined]
    module: Any = xpu
    module._is_in_bad_fork = driver["isInBadFork"]
    module._exchange_device = module._maybe_exchange_device = exchange
    module._device_count_zes = lambda: -1  # no driver of Intel's to ask
