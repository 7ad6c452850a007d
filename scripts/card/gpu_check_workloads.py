"""What `gpu_check.py` plans and then trains a few steps of: networks, precision modes and memory tricks.

The cheapest and most telling come first, so that an early end leaves the widest view: every network in its usual mode,
then the modes, then the tricks. Float16 starts at a small loss scale, so that no step is skipped and the optimizer
gets its state. The sizes fill a few GiB of a card of 12 GB, next to which fixed workspaces are small; other cards get
batches in proportion (`scale_for`), and smaller ones still if a plan does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mpt.config.load import load_config
from mpt.config.schema import Config

ALLOW = ["tests"]
SIZED_FOR_BYTES = 11.5 * 2**30
"""What a card of 12 GB gives to programs: the batches below are for it."""
LARGEST_SCALE = 4.0
AMP, O1, O2 = (
    {"mode": mode, "dtype": "float16", "init_scale": 1024.0} for mode in ("amp", "O1", "O2")
)
ADAM = {"name": "adam", "foreach": True}  # as a GPU gets it, in a rehearsal too
ADABELIEF = {"name": "adabelief"}
SHAPES, FACES = (
    {"name": "shapes", "size": 16},
    {"name": "procedural_faces", "count": 8, "test_count": 4},
)


@dataclass(frozen=True)
class Network:
    """A model's settings, the batch, and what a rehearsal on a CPU takes instead."""

    model: dict[str, Any]
    batch_size: int
    small: dict[str, Any]
    small_batch: int = 4
    optimizer: dict[str, Any] = field(default_factory=lambda: ADAM)
    dataset: dict[str, Any] = field(default_factory=lambda: SHAPES)
    task: dict[str, Any] = field(default_factory=dict)


def image_network(name: str, batch_size: int, small: str = "torchvision:resnet18") -> Network:
    """Return a classifier of torchvision's; rehearsed on 64 pixels, by a smaller one where it is large."""
    return Network(
        {"name": f"torchvision:{name}", "image_size": 224},
        batch_size,
        {"name": small, "image_size": 64},
    )


def own(name: str, image_size: int, **options: Any) -> dict[str, Any]:
    """Return the settings of a network of the tests, which the package does not ship."""
    options = {"channels": 3, **options}
    return {
        "name": f"tests.planner.models:{name}",
        "image_size": image_size,
        "channels": 3,
        "options": options,
    }


RESNET = image_network("resnet50", 64)
VIT = Network(
    {"name": "torchvision:vit_b_16", "image_size": 224}, 64, own("TinyViT", 32, width=32, depth=2)
)
UNET = Network(own("UNet", 256, width=64), 16, own("UNet", 32, width=8))
DCGAN = Network(
    {"name": "dcgan", "image_size": 64, "features": 128}, 512, {"name": "dcgan", "image_size": 16}
)
STYLEGAN2 = Network(
    {
        "name": "stylegan2",
        "image_size": 256,
        "channel_base": 16384,
        "num_fp16_res": 4,
        "conv_clamp": 256,
    },
    16,
    {
        "name": "stylegan2",
        "image_size": 16,
        "channel_base": 512,
        "latent_size": 16,
        "style_size": 16,
    },
)
SAEHD = Network(
    {
        "name": "saehd",
        "image_size": 256,
        "ae_dims": 192,
        "e_dims": 64,
        "d_dims": 64,
        "d_mask_dims": 22,
    },
    8,
    {"name": "saehd", "image_size": 64, "ae_dims": 16, "e_dims": 8, "d_dims": 8, "d_mask_dims": 8},
    2,
    ADABELIEF,
    FACES,
)


@dataclass(frozen=True)
class Workload:
    """A network in a precision mode with memory tricks."""

    name: str
    network: Network
    precision: Any
    memory: dict[str, Any] = field(default_factory=dict)
    deterministic: bool = True
    is_counted: bool = True
    """Whether its error counts. cuDNN's trials in benchmark mode, which no plan knows, do not."""

    @property
    def mode(self) -> str:
        """The precision mode's name."""
        return str(self.precision if isinstance(self.precision, str) else self.precision["mode"])

    @property
    def label(self) -> str:
        """The network, the mode and the tricks."""
        tricks = [key if value is True else f"{key}={value}" for key, value in self.memory.items()]
        return ", ".join(
            [self.name, self.mode, *tricks, *([] if self.deterministic else ["benchmark"])]
        )

    def config(self, rehearsal: str = "", scale: float = 1.0) -> Config:
        """Return it as a configuration, its batch scaled. Raises ConfigError."""
        network = self.network
        batch_size = network.small_batch if rehearsal else max(1, int(network.batch_size * scale))
        memory = dict(self.memory)
        if "micro_batch" in memory:
            memory["micro_batch"] = max(1, batch_size // 4)
        if memory.get("offload_activations") and rehearsal:
            memory["offload_activations"] = 0.001
        if memory.get("stream_weights") and rehearsal:
            memory["stream_weights"] = {"min_kibibytes": 0}
        precision = self.precision
        if rehearsal and isinstance(precision, dict) and has_bfloat16():
            precision = {**precision, "dtype": "bfloat16"}  # CPUs are slow in float16
        data = {
            "model": network.small if rehearsal else network.model,
            "dataset": network.dataset,
            "precision": precision,
            "optimizer": network.optimizer,
            "memory": memory,
            "train": {"batch_size": batch_size, "deterministic": self.deterministic, "steps": 100},
        }
        if network.task:
            data["task"] = network.task
        return load_config(data, allow=ALLOW)


def has_bfloat16() -> bool:
    """Return whether a rehearsal's device computes in bfloat16: a CPU, or a pretended card of capability 8.0."""
    import torch

    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)


def tricks(name: str, network: Network, *rows: tuple[Any, dict[str, Any]]) -> list[Workload]:
    """Return one network in several modes and with several tricks."""
    return [Workload(name, network, precision, memory) for precision, memory in rows]


WORKLOADS: list[Workload] = [
    # first: it calibrates cuDNN's share for the second column
    Workload("ResNet-50", RESNET, "fp32"),
    Workload("ResNet-50", RESNET, AMP),
    Workload("ViT-B/16", VIT, AMP),
    Workload("U-Net", UNET, "fp32"),
    Workload("DCGAN", DCGAN, AMP),
    Workload("SAEHD", SAEHD, AMP),
    Workload("StyleGAN2", STYLEGAN2, "native"),
    *tricks("U-Net", UNET, (AMP, {}), (O1, {})),
    *tricks("ViT-B/16", VIT, ("fp32", {}), ("bf16-pure", {}), (O2, {})),
    *tricks("ResNet-50", RESNET, (O1, {}), (O2, {}), ("bf16-pure", {}), ("tf32", {}), ("bf16", {})),
    *tricks(
        "ResNet-50",
        RESNET,
        ("fp32", {"recompute": "all"}),
        (AMP, {"recompute": "sqrt"}),
        (AMP, {"micro_batch": True}),
        (AMP, {"offload_activations": True}),
        ("fp32", {"optimizer_in_backward": True}),
        ("fp32", {"cpu_optimizer": True}),
        ("fp32", {"low_bit_optimizer": True}),
        (AMP, {"channels_last": True}),
        ("fp32", {"set_to_none": False}),
        (AMP, {"recompute": "selective"}),
    ),
    *tricks(
        "ViT-B/16",
        VIT,
        ("bf16", {"recompute": "all"}),
        ("bf16", {"optimizer_in_backward": True}),
        (AMP, {"micro_batch": True}),
        ("fp32", {"low_bit_optimizer": True}),
        ("bf16", {"offload_activations": True}),
        ("bf16-pure", {"stream_weights": 1.0}),
    ),
    *tricks(
        "DCGAN",
        DCGAN,
        ("fp32", {}),
        (O2, {"release_grads_after": ["disc"]}),
        ("fp32", {"micro_batch": True}),
    ),
    *tricks(
        "SAEHD",
        SAEHD,
        ("fp32", {}),
        (AMP, {"recompute": "all"}),
        ("bf16", {"offload_activations": True}),
    ),
    *tricks("StyleGAN2", STYLEGAN2, ("fp32", {}), (AMP, {}), ("native", {"micro_batch": True})),
    *tricks(
        "U-Net",
        UNET,
        (AMP, {"recompute": "all"}),
        ("fp32", {"micro_batch": True, "recompute": "sqrt"}),
    ),
    Workload("ConvNeXt-T", image_network("convnext_tiny", 64), AMP),
    Workload("MobileNetV2", image_network("mobilenet_v2", 64, "torchvision:mobilenet_v2"), "fp32"),
    Workload(
        "EfficientNet-B0", image_network("efficientnet_b0", 64, "torchvision:efficientnet_b0"), AMP
    ),
    Workload("DenseNet-121", image_network("densenet121", 32), "fp32"),
    Workload("VGG-16", image_network("vgg16", 32), "fp32"),
    Workload("ResNet-50", RESNET, "fp32", deterministic=False, is_counted=False),
]
BUDGETS: list[tuple[Workload, float]] = [
    (Workload("ResNet-18", image_network("resnet18", 128), "fp32"), 0.5),
    (Workload("U-Net", Network(UNET.model, 8, UNET.small), "fp32"), 0.5),
    (Workload("DCGAN", DCGAN, "fp32"), 0.6),
    (Workload("ResNet-18", image_network("resnet18", 128), "fp32"), 0.25),
    (Workload("TinyViT", Network(own("TinyViT", 64, width=256, depth=6), 64, VIT.small), AMP), 0.4),
]
"""Shares of what the configuration as it stands would reserve; the planner has to find one that fits."""
REHEARSED_BUDGETS = 1


CARD_ALONE = "low_bit_optimizer"
"""Compiles kernels for the card, which a pretended one does not run."""


def scale_for(room_bytes: float) -> float:
    """Return by which power of two batches are scaled for a card that gives this much to programs."""
    return min(
        LARGEST_SCALE, 2.0 ** math.floor(math.log2(max(room_bytes, 1) / SIZED_FOR_BYTES) + 0.1)
    )


def rehearsed(workloads: Sequence[Workload]) -> list[Workload]:
    """Return the workloads with a network, as small as it is rehearsed, a mode or a trick that none before has.

    Without the trick that takes a card's own kernels.
    """
    seen: set[str] = set()
    chosen = []
    for one in (one for one in workloads if CARD_ALONE not in one.memory):
        brings = {
            str(one.network.small),
            one.mode,
            *one.memory,
            *([] if one.deterministic else ["benchmark"]),
        }
        if not brings <= seen:
            chosen.append(one)
            seen |= brings
    return chosen


def budget_label(workload: Workload, part: float) -> str:
    """Return what a workload is called that may have only a part of its memory."""
    return f"{workload.label}, {part:.0%}"
