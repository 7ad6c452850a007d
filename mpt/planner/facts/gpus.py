"""GPUs by name: memory, compute capability and the speeds that a roofline needs.

Figures are the makers' datasheets: dense float32 and half tensor throughput (with float32 accumulation, which GeForce
cards run at half rate), TF32 if there is any, memory bandwidth, and the host link's practical rate. GPUs without
tensor cores compute half at float32's rate, since libraries accumulate in float32 there.

A card never gives programs all the memory it is sold with: the driver and, on data-centre cards, error correction keep
a part. `SEEN` holds what PyTorch's out-of-memory messages called the "total capacity", each with the thread it was
read in; the rest is interpolated between cards of the same kind. Windows shows the nominal size and takes the same part
out of what is free. Drivers of 2025 and later keep about 100 MiB more than those most of these messages were printed
under. A desktop takes more still: `mpt plan --desktop SIZE`. Laptops' throughputs are those of the middle of the range
of clocks that their makers may choose from.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

from pydantic import ConfigDict

from mpt.errors import ConfigError
from mpt.planner.answers.plan import READ

SEEN: dict[str, tuple[float, str]] = {
    "gtx1660": (5.81, "github.com/zhou13/lcnn/issues/23"),
    "rtx2060": (5.79, "github.com/facebookresearch/meshrcnn/issues/92"),
    "rtx3060-laptop": (5.80, "github.com/JiehongLin/SAM-6D/issues/13"),
    "rtx3070": (7.78, "github.com/akshitac8/OW-DETR/issues/46"),
    "rtx3080": (9.78, "github.com/zai-org/CogVideo/issues/34"),
    "rtx2080ti": (10.76, "github.com/RenYurui/StructureFlow/issues/35"),
    "rtx3060": (11.75, "github.com/Kunhao-Liu/StyleGaussian/issues/12"),
    "t4": (
        14.56,
        "out-of-memory messages give 14.56 to 14.76; 14.75 in github.com/hpcaitech/Open-Sora/issues/697",
    ),
    "rtx4060-laptop": (7.75, "github.com/ESRSchao/EdgeRegNet/issues/2"),
    "quadro-rtx4000": (7.80, "github.com/CompVis/stable-diffusion/issues/485"),
    "rtx4060ti-16gb": (15.55, "github.com/boson-ai/higgs-audio/issues/48"),
    "rtx5060ti-16gb": (15.45, "github.com/Luce-Org/lucebox/issues/407"),
    "a4000": (15.61, "github.com/DengKaiCQ/VGGT-Long/issues/6"),
    "v100": (15.78, "github.com/kchengiva/Shift-GCN/issues/34"),
    "v100-32gb": (31.74, "github.com/liucongg/ChatGLM-Finetuning/issues/73"),
    "a30": (23.53, "github.com/google/RB-Modulation/issues/5"),
    "rx7900xtx": (23.98, "github.com/ilya-zlobintsev/LACT/pull/533"),
    "h100": (79.11, "github.com/vllm-project/vllm/issues/27508"),
    "rtx3090": (23.70, "github.com/clovaai/deep-text-recognition-benchmark/issues/386"),
    "rtx4090": (23.64, "github.com/3DTopia/Phidias-Diffusion/issues/8"),
    "rtx5090": (31.37, "github.com/Wan-Video/Wan2.1/issues/465"),
    "a100": (39.50, "github.com/TianheWu/CoSeR/issues/10"),
    "l40s": (44.53, "out-of-memory messages"),
    "rtx6000ada": (44.43, "github.com/DINGYANB/MTVCrafter/issues/21"),
    "rtx8000": (47.46, "github.com/Victarry/stable-dreambooth/issues/8"),
    "a100-80gb": (79.25, "github.com/levihsu/OOTDiffusion/issues/235"),
}
"""Card -> GiB that PyTorch called its total capacity, and the source."""
KEPT = (
    (3.0, 0.06),
    (6.0, 0.21),
    (8.0, 0.22),
    (10.0, 0.22),
    (12.0, 0.25),
    (16.0, 0.45),
    (24.0, 0.36),
    (32.0, 0.63),
    (80.0, 0.89),
)
"""Nominal GiB and the GiB missing from it in `SEEN`, the larger of two, without error correction."""
KEPT_OF_BLACKWELL = ((8.0, 0.48), (16.0, 0.55), (32.0, 0.63), (192.0, 1.5))
"""The same of compute capability 10 and later, whose drivers keep more; messages of 8 GB cards give 7.51 to 7.53."""
LEFT_BY_AMD = 0.995
"""As `SEEN` has it of the RX 7900 XTX; messages of cards of 16 GB give 15.92."""
WITH_ERROR_CORRECTION = ("a10", "a40", "l4", "l20", "l40")
LEFT_BY_ERROR_CORRECTION = 0.925
"""Of GDDR6, as `SEEN` has it of the L40S and the RTX 6000 Ada."""


@dataclass(frozen=True)
class Gpu:
    """One card. Throughputs in TFLOP/s, bandwidths in GB/s, memory in GiB."""

    __pydantic_config__: ClassVar[ConfigDict] = READ

    name: str
    memory_gib: float
    """As it is sold, or the share of programs if `is_installed`."""
    capability: tuple[int, int]
    """CUDA compute capability."""
    float32: float
    half: float
    tf32: float
    """0 if there is none."""
    bandwidth: float
    host_link: float = 12.0
    peer_link: float = 0.0
    """To the other cards of a machine as sold with eight, in one direction; 0 is PCI Express."""
    aliases: tuple[str, ...] = ()
    """Other names."""
    is_installed: bool = False
    """`memory_gib` was read from the card and is the share of programs."""

    @property
    def usable_gib(self) -> float:
        """GiB that programs can have, the CUDA context included."""
        return (
            self.memory_gib
            if self.is_installed
            else SEEN[self.name][0]
            if self.name in SEEN
            else self._estimate()
        )

    @property
    def usable_bytes(self) -> int:
        """Bytes that programs can have, the CUDA context included."""
        return int(self.usable_gib * 2**30)

    @property
    def usable_source(self) -> str:
        """The source of `usable_gib`."""
        if self.is_installed:
            return "read from the card"
        return (
            SEEN[self.name][1] if self.name in SEEN else "interpolated between cards that were seen"
        )

    @property
    def is_amd(self) -> bool:
        """Whether it runs under torch's build for ROCm."""
        return self.name.startswith(("rx", "mi"))

    def _estimate(self) -> float:
        if self.name in WITH_ERROR_CORRECTION:
            return self.memory_gib * LEFT_BY_ERROR_CORRECTION
        if self.is_amd:
            return self.memory_gib * LEFT_BY_AMD
        table = KEPT if self.capability < (10, 0) else KEPT_OF_BLACKWELL
        size = min(max(self.memory_gib, table[0][0]), table[-1][0])
        for (small, kept), (large, kept_of_large) in pairwise(table):
            if size <= large:
                return (
                    self.memory_gib
                    - kept
                    - (kept_of_large - kept) * (size - small) / (large - small)
                )
        raise AssertionError("the last entry bounds the size")

    @property
    def has_bfloat16(self) -> bool:
        """Whether bfloat16 runs on tensor cores."""
        return self.capability >= (8, 0)


# `peer_link` is half of what the datasheets advertise, which is both ways: P100 160, V100 300, A100 600, H100 and H200
# (SXM) 900 GB/s of NVLink; Instinct MI210 up to 300, MI250 600, MI300X 896 GB/s of Infinity Fabric.
TABLE = (
    Gpu("gtx1060", 6, (6, 1), 4.4, 4.4, 0, 192),
    Gpu("gtx1070", 8, (6, 1), 6.5, 6.5, 0, 256, aliases=("gtx1070ti",)),
    Gpu("gtx1080", 8, (6, 1), 8.9, 8.9, 0, 320),
    Gpu("gtx1080ti", 11, (6, 1), 11.3, 11.3, 0, 484),
    Gpu("titanxp", 12, (6, 1), 12.1, 12.1, 0, 548, aliases=("titanx",)),
    Gpu("titanv", 12, (7, 0), 14.9, 110, 0, 653),
    Gpu("gtx1650", 4, (7, 5), 3.0, 3.0, 0, 128, aliases=("gtx1650-laptop", "gtx1650ti-laptop")),
    Gpu("gtx1650super", 4, (7, 5), 4.4, 4.4, 0, 192),
    Gpu("gtx1660", 6, (7, 5), 5.0, 5.0, 0, 192),
    Gpu("gtx1660super", 6, (7, 5), 5.0, 5.0, 0, 336),
    Gpu("gtx1660ti", 6, (7, 5), 5.4, 5.4, 0, 288, aliases=("gtx1660ti-laptop",)),
    Gpu("rtx2060", 6, (7, 5), 6.5, 25.8, 0, 336, aliases=("rtx2060-laptop",)),
    Gpu("rtx2060-12gb", 12, (7, 5), 7.2, 28.7, 0, 336),
    Gpu("rtx2060super", 8, (7, 5), 7.2, 28.7, 0, 448),
    Gpu("rtx2070", 8, (7, 5), 7.5, 29.9, 0, 448, aliases=("rtx2070-laptop",)),
    Gpu("rtx2070super", 8, (7, 5), 9.1, 36.3, 0, 448, aliases=("rtx2070super-laptop",)),
    Gpu("rtx2080", 8, (7, 5), 10.1, 40.3, 0, 448, aliases=("rtx2080-laptop",)),
    Gpu("rtx2080super", 8, (7, 5), 11.2, 44.6, 0, 496, aliases=("rtx2080super-laptop",)),
    Gpu("rtx2080ti", 11, (7, 5), 13.4, 53.8, 0, 616),
    Gpu("titanrtx", 24, (7, 5), 16.3, 130.5, 0, 672),
    Gpu("rtx2050-laptop", 4, (8, 6), 5.1, 10.2, 5.1, 112, aliases=("rtx2050",)),
    Gpu("rtx3050", 8, (8, 6), 9.1, 18.2, 9.1, 224),
    Gpu("rtx3050-6gb", 6, (8, 6), 6.8, 13.5, 6.8, 168),
    Gpu("rtx3050-laptop", 4, (8, 6), 7.1, 14.2, 7.1, 192, aliases=("rtx3050ti-laptop",)),
    Gpu("rtx3060", 12, (8, 6), 12.7, 25.5, 12.7, 360),
    Gpu("rtx3060-8gb", 8, (8, 6), 12.7, 25.5, 12.7, 240),
    Gpu("rtx3060-laptop", 6, (8, 6), 10.9, 21.9, 10.9, 336),
    Gpu("rtx3060ti", 8, (8, 6), 16.2, 32.4, 16.2, 448),
    Gpu("rtx3070", 8, (8, 6), 20.3, 40.6, 20.3, 448),
    Gpu("rtx3070-laptop", 8, (8, 6), 16.6, 33.2, 16.6, 448, aliases=("rtx3070ti-laptop",)),
    Gpu("rtx3070ti", 8, (8, 6), 21.7, 43.5, 21.7, 608),
    Gpu("rtx3080", 10, (8, 6), 29.8, 59.5, 29.8, 760),
    Gpu("rtx3080-12gb", 12, (8, 6), 30.6, 61.3, 30.6, 912),
    Gpu("rtx3080-laptop", 8, (8, 6), 19.0, 38.0, 19.0, 448),
    Gpu("rtx3080-laptop-16gb", 16, (8, 6), 19.0, 38.0, 19.0, 448),
    Gpu("rtx3080ti", 12, (8, 6), 34.1, 68.2, 34.1, 912),
    Gpu("rtx3080ti-laptop", 16, (8, 6), 23.6, 47.2, 23.6, 512),
    Gpu("rtx3090", 24, (8, 6), 35.6, 71.0, 35.6, 936),
    Gpu("rtx3090ti", 24, (8, 6), 40.0, 80.0, 40.0, 1008),
    Gpu("rtx4050-laptop", 6, (8, 9), 9.0, 18.0, 9.0, 192),
    Gpu("rtx4060", 8, (8, 9), 15.1, 30.2, 15.1, 272),
    Gpu("rtx4060-laptop", 8, (8, 9), 11.6, 23.2, 11.6, 256),
    Gpu("rtx4060ti", 8, (8, 9), 22.1, 44.1, 22.1, 288),
    Gpu("rtx4060ti-16gb", 16, (8, 9), 22.1, 44.1, 22.1, 288),
    Gpu("rtx4070", 12, (8, 9), 29.1, 58.3, 29.1, 504),
    Gpu("rtx4070super", 12, (8, 9), 35.5, 71.0, 35.5, 504),
    Gpu("rtx4070-laptop", 8, (8, 9), 15.6, 31.2, 15.6, 256),
    Gpu("rtx4070ti", 12, (8, 9), 40.1, 80.2, 40.1, 504),
    Gpu("rtx4070tisuper", 16, (8, 9), 44.1, 88.2, 44.1, 672),
    Gpu("rtx4080", 16, (8, 9), 48.7, 97.5, 48.7, 717),
    Gpu("rtx4080super", 16, (8, 9), 52.2, 104.4, 52.2, 736),
    Gpu("rtx4080-laptop", 12, (8, 9), 24.7, 49.4, 24.7, 432),
    Gpu("rtx4090", 24, (8, 9), 82.6, 165.2, 82.6, 1008),
    Gpu("rtx4090-laptop", 16, (8, 9), 33.0, 66.0, 33.0, 576),
    Gpu("rtx5050", 8, (12, 0), 13.2, 26.3, 13.2, 320),
    Gpu("rtx5050-laptop", 8, (12, 0), 10.6, 21.3, 10.6, 384),
    Gpu("rtx5060", 8, (12, 0), 19.2, 38.4, 19.2, 448),
    Gpu("rtx5060-laptop", 8, (12, 0), 13.3, 26.6, 13.3, 384),
    Gpu("rtx5060ti", 8, (12, 0), 23.7, 47.4, 23.7, 448),
    Gpu("rtx5060ti-16gb", 16, (12, 0), 23.7, 47.4, 23.7, 448),
    Gpu("rtx5070", 12, (12, 0), 30.9, 61.7, 30.9, 672),
    Gpu("rtx5070-laptop", 8, (12, 0), 20.0, 40.0, 20.0, 384),
    Gpu("rtx5070ti", 16, (12, 0), 43.9, 87.9, 43.9, 896),
    Gpu("rtx5070ti-laptop", 12, (12, 0), 21.6, 43.2, 21.6, 672),
    Gpu("rtx5080", 16, (12, 0), 56.3, 112.6, 56.3, 960),
    Gpu("rtx5080-laptop", 16, (12, 0), 29.1, 58.2, 29.1, 896),
    Gpu("rtx5090", 32, (12, 0), 104.8, 209.5, 104.8, 1792, 24),
    Gpu("rtx5090-laptop", 24, (12, 0), 39.4, 78.9, 39.4, 896),
    Gpu("t4", 16, (7, 5), 8.1, 65, 0, 320, aliases=("tesla-t4",)),
    Gpu("p4", 8, (6, 1), 5.5, 5.5, 0, 192),
    Gpu("p40", 24, (6, 1), 11.8, 11.8, 0, 346),
    Gpu("p100", 16, (6, 0), 9.5, 19.0, 0, 732, peer_link=80),
    Gpu("v100", 16, (7, 0), 15.7, 125, 0, 900, aliases=("v100-16gb",), peer_link=150),
    Gpu("v100-32gb", 32, (7, 0), 15.7, 125, 0, 900, peer_link=150),
    Gpu("quadro-rtx4000", 8, (7, 5), 7.1, 57.0, 0, 416, aliases=("rtx4000",)),
    Gpu("quadro-rtx5000", 16, (7, 5), 11.2, 89.2, 0, 448, aliases=("rtx5000",)),
    Gpu("quadro-rtx6000", 24, (7, 5), 16.3, 130.5, 0, 672, aliases=("rtx6000",)),
    Gpu("rtx8000", 48, (7, 5), 16.3, 130.5, 0, 672),
    Gpu("a10", 24, (8, 6), 31.2, 125, 62.5, 600, aliases=("a10g",)),
    Gpu("a2000", 6, (8, 6), 8.0, 31.9, 16.0, 288, aliases=("rtxa2000",)),
    Gpu("a2000-12gb", 12, (8, 6), 8.0, 31.9, 16.0, 288, aliases=("rtxa2000-12gb",)),
    Gpu("a30", 24, (8, 0), 10.3, 165, 82, 933, 20),
    Gpu("a40", 48, (8, 6), 37.4, 149.7, 74.8, 696),
    Gpu("a4000", 16, (8, 6), 19.2, 76.7, 38.3, 448, aliases=("rtxa4000",)),
    Gpu("a4500", 20, (8, 6), 23.7, 94.6, 47.3, 640, aliases=("rtxa4500",)),
    Gpu("a5000", 24, (8, 6), 27.8, 111.1, 55.6, 768, aliases=("rtxa5000",)),
    Gpu("a6000", 48, (8, 6), 38.7, 154.8, 77.4, 768, aliases=("rtxa6000",)),
    Gpu("rtx2000ada", 16, (8, 9), 12.0, 48, 24, 224),
    Gpu("rtx4000ada", 20, (8, 9), 26.7, 107, 53, 360),
    Gpu("rtx4500ada", 24, (8, 9), 39.6, 158, 79, 432),
    Gpu("rtx5000ada", 32, (8, 9), 65.3, 261, 131, 576),
    Gpu("rtx6000ada", 48, (8, 9), 91.1, 364, 182, 960),
    Gpu("l4", 24, (8, 9), 30.3, 121, 60, 300),
    Gpu("rtxpro6000", 96, (12, 0), 125, 504, 252, 1792, 24, aliases=("rtxpro6000blackwell",)),
    Gpu("l20", 48, (8, 9), 59.8, 119.5, 59.8, 864),
    Gpu("l40", 48, (8, 9), 90.5, 181, 90.5, 864),
    Gpu("l40s", 48, (8, 9), 91.6, 362, 183, 864),
    Gpu("a100", 40, (8, 0), 19.5, 312, 156, 1555, 20, aliases=("a100-40gb",), peer_link=300),
    Gpu("a100-80gb", 80, (8, 0), 19.5, 312, 156, 2039, 20, peer_link=300),
    Gpu("h100", 80, (9, 0), 67, 989, 494, 3350, 40, aliases=("h100-80gb",), peer_link=450),
    Gpu("h200", 141, (9, 0), 67, 989, 494, 4800, 40, peer_link=450),
    Gpu("h20", 96, (9, 0), 44, 148, 74, 4000, 40, peer_link=450),
    Gpu("b200", 180, (10, 0), 80, 2250, 1125, 8000, 40, peer_link=900),
    # AMD's, under torch's ROCm build; their capabilities represent the routes that come nearest.
    Gpu("rx6800", 16, (7, 0), 16.2, 16.2, 0, 512),
    Gpu("rx6800xt", 16, (7, 0), 20.7, 20.7, 0, 512),
    Gpu("rx6900xt", 16, (7, 0), 23.0, 23.0, 0, 512),
    Gpu("rx7700xt", 12, (8, 0), 35.2, 70.3, 0, 432),
    Gpu("rx7800xt", 16, (8, 0), 37.3, 74.7, 0, 624),
    Gpu("rx7900gre", 16, (8, 0), 46.0, 91.9, 0, 576),
    Gpu("rx7900xt", 20, (8, 0), 51.5, 103, 0, 800),
    Gpu("rx7900xtx", 24, (8, 0), 61.4, 122.8, 0, 960),
    Gpu("rx9060xt", 16, (8, 0), 25.6, 103, 0, 320),
    Gpu("rx9070", 16, (8, 0), 36.1, 145, 0, 640),
    Gpu("rx9070xt", 16, (8, 0), 48.7, 195, 0, 640),
    Gpu("mi100", 32, (8, 0), 23.1, 184.6, 0, 1229, 20),
    Gpu("mi210", 64, (8, 0), 22.6, 181, 0, 1638, 20, peer_link=150),
    Gpu("mi250", 64, (8, 0), 22.6, 181, 0, 1638, 20, aliases=("mi250x",), peer_link=300),
    Gpu("mi300x", 192, (9, 0), 163.4, 1307, 654, 5300, 40, peer_link=448),
)


def plain(name: str) -> str:
    """Return a GPU's name without makers' words, spaces and case: "NVIDIA GeForce RTX 2060" -> "rtx2060"."""
    makers = r"nvidia|geforce|amd|radeon|instinct|intel"
    words = (
        rf"{makers}|tesla|quadro|graphics|gpu|pcie|sxm\d?|hbm\d?e?|generation|with max.?q design|-"
    )
    return re.sub(r"[\s_]+", "", re.sub(words, " ", name.lower()))


def find_gpu(name: str, option: str = "--gpu") -> Gpu:
    """Return a GPU by name; a bare number such as `2060` is completed.

    Raises ConfigError with the nearest names, in the words of the option that gave it.
    """
    by_name = {plain(alias): gpu for gpu in TABLE for alias in (gpu.name, *gpu.aliases)}
    wanted = plain(name)
    for candidate in (
        wanted,
        f"rtx{wanted}",
        f"gtx{wanted}",
        f"rx{wanted}",
        plain(re.sub(r"\d+ ?gb\b", "", name.lower())),
    ):
        if candidate in by_name:
            return by_name[candidate]
    if re.match(r"arc|[ab](380|5[078]0|7[57]0)$", wanted):
        raise ConfigError(
            f"{option}: {name!r} is an Intel card; training runs on it, but plans are of what torch calls cuda "
            "(NVIDIA's and AMD's): use --vram with its size"
        )
    close = difflib.get_close_matches(wanted, by_name, 6, 0.5)
    # two digits that changed places come first
    close.sort(key=lambda match: sorted(match) != sorted(wanted))
    nearest = dict.fromkeys(by_name[match].name for match in close)
    near = ", ".join(list(nearest)[:3])
    known = f"nearest: {near}" if near else f"known: {', '.join(gpu.name for gpu in TABLE)}"
    raise ConfigError(f"{option}: there is no {name!r} in the table; {known}")


def installed_gpu(name: str, total_bytes: int, capability: tuple[int, int]) -> Gpu:
    """Return the table's row for an installed card, with its true memory; an unknown card gets cautious speeds."""
    memory = total_bytes / 2**30
    try:
        return replace(find_gpu(name), memory_gib=memory, capability=capability, is_installed=True)
    except ConfigError:
        half, tf32 = 30.0 if capability >= (7, 0) else 8.0, 10.0 if capability >= (8, 0) else 0
        return Gpu(plain(name), memory, capability, 10.0, half, tf32, 400, is_installed=True)


DEFAULT = "rtx3060"
"""For plans without `--gpu`: routes and times of a common card."""
