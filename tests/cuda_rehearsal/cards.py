"""The cards that a rehearsal can pretend to have, from the planner's table of GPUs."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from mpt.planner.facts.gpus import find_gpu

VARIABLE = "MPT_REHEARSAL"
"""Environment variable with the machine's description; processes started from a rehearsal find it too."""

FULL_NAMES = {
    "gtx1660": "NVIDIA GeForce GTX 1660",
    "rtx2060": "NVIDIA GeForce RTX 2060",
    "rtx3060": "NVIDIA GeForce RTX 3060",
    "rtx4090": "NVIDIA GeForce RTX 4090",
    "h100": "NVIDIA H100 80GB HBM3",
}
INTEL = {"arc_a770": ("Intel(R) Arc(TM) A770 Graphics", 16)}
"""Intel's cards, which `torch.xpu` computes on: full name and GiB. The planner's table has none of them."""
BROKEN_HALF = ("gtx1650", "gtx1660")
"""Chips TU116 and TU117: cuDNN's float16 convolutions give NaN on them."""


@dataclass(frozen=True)
class Properties:
    """What `torch.cuda.get_device_properties` answers, and `torch.xpu`'s."""

    name: str
    major: int
    minor: int
    total_memory: int
    multi_processor_count: int = 30
    is_integrated: bool = False
    is_multi_gpu_board: bool = False
    max_threads_per_multi_processor: int = 1024
    warp_size: int = 32
    regs_per_multiprocessor: int = 65536
    shared_memory_per_block: int = 49152
    gcnArchName: str = ""  # torch's own spelling
    uuid: str = "00000000-0000-0000-0000-000000000000"
    pci_bus_id: int = 1
    pci_device_id: int = 0
    pci_domain_id: int = 0
    L2_cache_size: int = 3 * 2**20
    has_fp64: bool = True  # what `torch.xpu` answers beside these
    has_fp16: bool = True


@dataclass(frozen=True)
class Machine:
    """The pretend machine: its cards by short name, and what their memory is cut to, if it is."""

    cards: tuple[str, ...] = ("rtx3060",)
    memory_bytes: int | None = None

    @property
    def kind(self) -> str:
        """What torch calls the cards: cuda or xpu. A machine has one kind."""
        return "xpu" if set(self.cards) & set(INTEL) else "cuda"

    def properties(self) -> list[Properties]:
        """Return each card's properties."""
        found = []
        for card in self.cards:
            if self.kind == "xpu":
                name, gib = INTEL[card]
                found.append(
                    Properties(name, 0, 0, self.memory_bytes or gib * 2**30, has_fp64=False)
                )
                continue
            gpu = find_gpu(card)
            total = self.memory_bytes or int(gpu.memory_gib * 2**30)
            name = FULL_NAMES.get(gpu.name, f"NVIDIA {gpu.name.upper()}")
            found.append(Properties(name, *gpu.capability, total))
        return found

    def to_text(self) -> str:
        """Return the description for the environment."""
        return json.dumps({"cards": self.cards, "memory_bytes": self.memory_bytes})

    @classmethod
    def from_environment(cls) -> Machine | None:
        """Return the machine that the environment describes, if it does."""
        text = os.environ.get(VARIABLE)
        if not text:
            return None
        record = json.loads(text)
        return cls(tuple(record["cards"]), record["memory_bytes"])
