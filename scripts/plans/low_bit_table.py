#!/usr/bin/env python
"""Packed frozen weights: planned bytes of a run, and the measured bytes and time of one layer on this processor.

nice -n 19 python scripts/plans/low_bit_table.py -o docs/benchmarks/low_bit_base.md
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import mpt
from mpt.memory.low_bit.formats import FORMATS
from mpt.memory.low_bit.packed_linear import pack
from scripts.command_line import described
from scripts.provenance import made

BATCH, RANK = 8, 8
VIT: dict[str, object] = {
    "model": {"name": "timm:vit_large_patch16_224", "image_size": 224},
    "dataset": {"name": "image_folder", "image_size": 224},
    "precision": "bf16",
    "optimizer": {"name": "adamw"},
    "train": {"batch_size": BATCH},
}
FLUX: dict[str, object] = {
    "model": {"name": "diffusers", "shape": "flux_dev"},
    "dataset": {
        "name": "latents",
        "assumed": {"latent": [16, 64, 64], "text": [512, 4096], "pooled": [768]},
    },
    "task": {
        "name": "diffusion",
        "objective": "flow",
        "condition_dropout": 0.0,
        "sampler": "euler",
    },
    "precision": "bf16-pure",
    "optimizer": {"name": "adamw"},
    "train": {"batch_size": 1, "ema": None},
}
LORA = {"rank": 16, "targets": ["attention"], "full": []}
WAYS: dict[str, dict[str, object]] = {
    "lora": {},
    "stream_weights": {"stream_weights": True},
    "low_bit_base: fp8": {"low_bit_base": "fp8"},
    "low_bit_base: int8": {"low_bit_base": "int8"},
    "low_bit_base: nf4": {"low_bit_base": "nf4"},
    "low_bit_base: nf4, recompute: all": {"low_bit_base": "nf4", "recompute": "all"},
    "low_bit_base: nf4, recompute: all, stream_weights": {
        "low_bit_base": "nf4",
        "recompute": "all",
        "stream_weights": {"min_kibibytes": 0},
    },
}
LARGE_WAYS: dict[str, dict[str, object]] = {
    "recompute: all": {"recompute": "all"},
    "low_bit_base: fp8, recompute: all": {"low_bit_base": "fp8", "recompute": "all"},
    "low_bit_base: nf4, recompute: all": {"low_bit_base": "nf4", "recompute": "all"},
    "low_bit_base: nf4, recompute: all, stream_weights: 0.5": {
        "low_bit_base": "nf4",
        "recompute": "all",
        "stream_weights": 0.5,
    },
    "low_bit_base: nf4, recompute: all, stream_weights": {
        "low_bit_base": "nf4",
        "recompute": "all",
        "stream_weights": True,
    },
}
SIDE, ROUNDS = 3072, 7
TOKENS = (64, 512)


def planned(
    base: Mapping[str, object], adapters: object, ways: Mapping[str, dict[str, object]], card: str
) -> Iterator[str]:
    """Yield the rows of a run's plan, each way with the adapters."""
    yield "| memory | weights MiB | allocated MiB | step |\n|---|---:|---:|---:|"
    for name, memory in ways.items():
        plan = mpt.plan(mpt.load({**base, "memory": {"lora": adapters, **memory}}), gpu=card).plan
        weights = plan.by_category.get("parameters", 0) / 2**20
        yield f"| `{name}` | {weights:,.0f} | {plan.allocated / 2**20:,.0f} | {plan.step_seconds * 1000:,.0f} ms |"


def seconds(layer: nn.Module, entry: torch.Tensor) -> float:
    """Return the median time of a forward and a backward."""
    taken = []
    for _ in range(ROUNDS):
        start = time.process_time()
        layer(entry).sum().backward()
        taken.append(time.process_time() - start)
    return statistics.median(taken)


def measured() -> Iterator[str]:
    """Yield the rows of one frozen layer in bfloat16: its bytes, and times of forward and backward together."""
    titles = " | ".join(f"{count} tokens" for count in TOKENS)
    yield f"| weight | bytes per weight | {titles} |\n|---|---:|{'---:|' * len(TOKENS)}"
    for name in ("bfloat16", *FORMATS):
        torch.manual_seed(0)
        layer = nn.Linear(SIDE, SIDE, bias=False).bfloat16().requires_grad_(False)
        if name != "bfloat16":
            pack(layer, name)
        held = sum(parameter.nbytes for parameter in layer.parameters()) / SIDE**2
        times = []
        for count in TOKENS:
            entry = torch.randn(count, SIDE, dtype=torch.bfloat16, requires_grad=True)
            times.append(f"{seconds(layer, entry) * 1000:,.0f} ms")
        yield f"| {name} | {held:.4f} | {' | '.join(times)} |"


def main() -> None:
    """Plan, measure, and write the page."""
    parser = described(__doc__)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    small = "\n".join(planned(VIT, RANK, WAYS, "rtx3060"))
    large = "\n".join(planned(FLUX, LORA, LARGE_WAYS, "rtx4090"))
    measured_rows = "\n".join(measured())
    page = f"""# Frozen weights in 8 and 4 bits

Command: `python scripts/plans/low_bit_table.py -o docs/benchmarks/low_bit_base.md`, torch {torch.__version__}, \
{made()}, {platform.machine()}, one thread. How to use it:
[memory](../how-to/large_weights.md#frozen-weights-in-8-and-4-bits).

## Planned

ViT-L/16, `bf16`, batch {BATCH}, AdamW, `memory.lora: {RANK}`, planned for an rtx3060:

{small}

Flux (dev), 512 x 512 pixels, `bf16-pure`, batch 1, AdamW, LoRA of rank {LORA["rank"]} on attention, planned for an \
rtx4090:

{large}

Nothing of these two tables was measured on a card.

## Measured on a processor

One frozen layer of {SIDE} x {SIDE} in bfloat16, forward and the input's gradient, processor time, median of {ROUNDS}.
The weight is unpacked twice, once for each product.

{measured_rows}
"""
    if options.output is not None:
        options.output.write_text(page, "utf-8")
    print(page)


if __name__ == "__main__":
    main()
