"""GPUs by name: memory, compute capability and the speeds that a roofline needs.

Figures are the makers' datasheets: dense float32 and half tensor throughput (with float32 accumulation, which GeForce
cards run at half rate), TF32 where there is any, memory bandwidth, and the host link's practical rate. GPUs without
tensor cores compute half at float32's rate, since libraries accumulate in float32 there.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from mpt.errors import ConfigError


@dataclass(frozen=True)
class Gpu:
    """One card. Throughputs in TFLOP/s, bandwidths in GB/s, memory in GiB."""

    name: str
    memory_gib: float
    capability: tuple[int, int]
    float32: float
    half: float
    tf32: float
    bandwidth: float
    host_link: float = 12.0
    aliases: tuple[str, ...] = ()

    @property
    def has_bfloat16(self) -> bool:
        """Whether bfloat16 runs on tensor cores."""
        return self.capability >= (8, 0)


TABLE = (
    Gpu("gtx1060", 6, (6, 1), 4.4, 4.4, 0, 192),
    Gpu("gtx1070", 8, (6, 1), 6.5, 6.5, 0, 256),
    Gpu("gtx1080", 8, (6, 1), 8.9, 8.9, 0, 320),
    Gpu("gtx1080ti", 11, (6, 1), 11.3, 11.3, 0, 484),
    Gpu("gtx1650", 4, (7, 5), 3.0, 3.0, 0, 128),
    Gpu("gtx1660", 6, (7, 5), 5.0, 5.0, 0, 192, aliases=("gtx1660ti", "gtx1660super")),
    Gpu("rtx2060", 6, (7, 5), 6.5, 25.8, 0, 336),
    Gpu("rtx2070", 8, (7, 5), 7.5, 29.9, 0, 448, aliases=("rtx2070super",)),
    Gpu("rtx2080", 8, (7, 5), 10.1, 40.3, 0, 448, aliases=("rtx2080super",)),
    Gpu("rtx2080ti", 11, (7, 5), 13.4, 53.8, 0, 616),
    Gpu("rtx3050", 8, (8, 6), 9.1, 18.2, 9.1, 224),
    Gpu("rtx3060", 12, (8, 6), 12.7, 25.5, 12.7, 360),
    Gpu("rtx3060ti", 8, (8, 6), 16.2, 32.4, 16.2, 448),
    Gpu("rtx3070", 8, (8, 6), 20.3, 40.6, 20.3, 448),
    Gpu("rtx3070ti", 8, (8, 6), 21.7, 43.5, 21.7, 608),
    Gpu("rtx3080", 10, (8, 6), 29.8, 59.5, 29.8, 760),
    Gpu("rtx3080ti", 12, (8, 6), 34.1, 68.2, 34.1, 912),
    Gpu("rtx3090", 24, (8, 6), 35.6, 71.0, 35.6, 936, aliases=("rtx3090ti",)),
    Gpu("rtx4060", 8, (8, 9), 15.1, 30.2, 15.1, 272),
    Gpu("rtx4060ti", 8, (8, 9), 22.1, 44.1, 22.1, 288),
    Gpu("rtx4070", 12, (8, 9), 29.1, 58.3, 29.1, 504, aliases=("rtx4070super",)),
    Gpu("rtx4070ti", 12, (8, 9), 40.1, 80.2, 40.1, 504),
    Gpu("rtx4080", 16, (8, 9), 48.7, 97.5, 48.7, 717, aliases=("rtx4080super",)),
    Gpu("rtx4090", 24, (8, 9), 82.6, 165.2, 82.6, 1008),
    Gpu("rtx5070", 12, (12, 0), 30.9, 61.7, 30.9, 672),
    Gpu("rtx5080", 16, (12, 0), 56.3, 112.6, 56.3, 960),
    Gpu("rtx5090", 32, (12, 0), 104.8, 209.5, 104.8, 1792, 24),
    Gpu("t4", 16, (7, 5), 8.1, 65, 0, 320, aliases=("tesla-t4",)),
    Gpu("p100", 16, (6, 0), 9.5, 19.0, 0, 732),
    Gpu("v100", 16, (7, 0), 15.7, 125, 0, 900, aliases=("v100-16gb",)),
    Gpu("v100-32gb", 32, (7, 0), 15.7, 125, 0, 900),
    Gpu("a10", 24, (8, 6), 31.2, 125, 62.5, 600, aliases=("a10g",)),
    Gpu("a4000", 16, (8, 6), 19.2, 76.7, 38.3, 448),
    Gpu("a6000", 48, (8, 6), 38.7, 154.8, 77.4, 768),
    Gpu("l4", 24, (8, 9), 30.3, 121, 60, 300),
    Gpu("l40s", 48, (8, 9), 91.6, 362, 183, 864),
    Gpu("a100", 40, (8, 0), 19.5, 312, 156, 1555, 20, aliases=("a100-40gb",)),
    Gpu("a100-80gb", 80, (8, 0), 19.5, 312, 156, 2039, 20),
    Gpu("h100", 80, (9, 0), 67, 989, 494, 3350, 40, aliases=("h100-80gb",)),
    Gpu("h200", 141, (9, 0), 67, 989, 494, 4800, 40),
)


def plain(name: str) -> str:
    """Return a GPU's name without makers' words, spaces and case: "NVIDIA GeForce RTX 2060" -> "rtx2060"."""
    name = re.sub(r"nvidia|geforce|tesla|quadro|graphics|laptop gpu|pcie|sxm\d?|-", " ", name.lower())
    return re.sub(r"[\s_]+", "", name)


def find_gpu(name: str) -> Gpu:
    """Return a GPU by name; a bare number such as `2060` is completed. Raises ConfigError with the nearest names."""
    by_name = {plain(alias): gpu for gpu in TABLE for alias in (gpu.name, *gpu.aliases)}
    wanted = plain(name)
    for candidate in (wanted, f"rtx{wanted}", f"gtx{wanted}"):
        if candidate in by_name:
            return by_name[candidate]
    nearest = difflib.get_close_matches(wanted, by_name, 3, 0.5)
    near = ", ".join(by_name[match].name for match in nearest)
    known = ", ".join(gpu.name for gpu in TABLE)
    raise ConfigError(f"--gpu: there is no {name!r} in the table{f'; nearest: {near}' if near else ''}; known: {known}")


def installed_gpu(name: str, total_bytes: int, capability: tuple[int, int]) -> Gpu:
    """Return the table's row for an installed card, with its true memory; an unknown card gets cautious speeds."""
    memory = total_bytes / 2**30
    try:
        return replace(find_gpu(name), memory_gib=memory, capability=capability)
    except ConfigError:
        half = 30.0 if capability >= (7, 0) else 8.0
        return Gpu(plain(name), memory, capability, 10.0, half, 10.0 if capability >= (8, 0) else 0, 400)


DEFAULT = "rtx3060"
"""For plans without `--gpu`: routes and times of a common card."""
