#!/usr/bin/env python
"""Hold plans of StyleGAN2's training against NVIDIA's published memory, with and without a kernel for each picture.

    python scripts/plans/stylegan2_memory.py -o docs/benchmarks/stylegan2_memory.md

NVIDIA's program multiplies each convolution's kernel by each picture's style to find the norms for demodulation, and
keeps the product for backward: pictures x outputs x inputs x 9 float32 numbers a layer. mpt takes the norms from a
matrix product of squares, the same numbers in next to no memory. Both are planned here; the first is what the
published figures measured: `torch.cuda.max_memory_allocated` of one card in GiB of one digit (the page of
configurations of github.com/NVlabs/stylegan3, PyTorch 1.10; for the same runs with PyTorch 1.7, the README of
github.com/NVlabs/stylegan2-ada-pytorch). So allocated memory is compared. Nothing is fitted.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from mpt.config.load import load_config
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.step.run_fake import trace_config
from mpt.planner.trace.replay import replay
from mpt.planner.trace.unseen import unseen_on
from mpt.seams import DataSpec, FieldSpec
from mpt.systems.stylegan2.nn.shared import stylegan2_layers
from scripts.command_line import described
from scripts.provenance import made

MIB = 2**20


@dataclass(frozen=True)
class Row:
    """A published figure of one card."""

    pixels: int
    batch: int
    channel_base: int
    gigabytes: float
    augments: bool = True
    mapping_layers: int = 2
    earlier: float | None = None
    """Of the same run with PyTorch 1.7."""

    @property
    def key(self) -> str:
        """The run in words."""
        return (
            f"{self.pixels} pixels, batch {self.batch}{'' if self.augments else ', not augmented'}"
        )

    @property
    def measured(self) -> int:
        """MiB."""
        return round(self.gigabytes * 1024)


ROWS = (
    Row(128, 32, 16384, 6.2, earlier=7.2),
    Row(128, 16, 16384, 3.5),
    Row(256, 16, 16384, 4.5, earlier=5.0),
    Row(256, 8, 16384, 2.6),
    Row(256, 8, 16384, 2.7, augments=False, mapping_layers=8),
    Row(512, 8, 32768, 6.8, earlier=7.6),
    Row(512, 4, 32768, 3.9),
    Row(1024, 4, 32768, 7.2, earlier=8.1),
    Row(1024, 4, 32768, 6.2, augments=False),
)


def kernel_for_each_picture(weight_oikk: Tensor, style_bi: Tensor) -> Tensor:
    """Return the norms of demodulation by way of a kernel for each picture."""
    kernels_boikk = weight_oikk.float()[None] * style_bi.float()[:, None, :, None, None]
    return (kernels_boikk.square().sum((2, 3, 4)) + 1e-8).rsqrt()


def plan(row: Row, has_kernels: bool) -> tuple[int, str]:
    """Return the allocated MiB of a step, and the moment of the peak."""
    task: dict[str, Any] = (
        {"ada_target": 0.6, "ada_filter": True} if row.augments else {"ada_target": None}
    )
    config = load_config(
        {
            "model": {
                "name": "stylegan2", "image_size": row.pixels, "channel_base": row.channel_base,
                "mapping_layers": row.mapping_layers,
            },
            "task": task,
            "dataset": {"name": "image_folder", "root": "nowhere", "flat": True},
            "precision": {"mode": "native"},
            "optimizer": {"name": "adam", "lr": 2.5e-3, "betas": [0.0, 0.99]},
            "train": {"batch_size": row.batch, "ema": {"half_life_kimg": 10}},
        }
    )  # fmt: skip
    data = DataSpec(
        {"image": FieldSpec((3, row.pixels, row.pixels), torch.float32, "image")}, 1000, ()
    )
    gpu = find_gpu("v100")
    norms = kernel_for_each_picture if has_kernels else stylegan2_layers.demodulate
    with mock.patch.object(stylegan2_layers, "demodulate", norms):
        trace = trace_config(config, data, row.batch, gpu, unseen_on(gpu)).trace
    free = replay(trace)
    return free.allocated // MIB, str(trace.span_at(free.peak_event))


def page(found: dict[str, list[Any]]) -> str:
    """Return the page."""
    lines = []
    for row in ROWS:
        own, theirs, moment = found[row.key]
        errors = [f"{one:,} ({100 * (one / row.measured - 1):+.1f} %)" for one in (own, theirs)]
        earlier = "" if row.earlier is None else f"{round(row.earlier * 1024):,}"
        lines.append(
            f"| {row.key} | {row.measured:,} | {earlier} | {errors[0]} | {errors[1]} | {moment} |"
        )
    return "\n".join(
        [
            "# StyleGAN2's published memory, planned",
            "",
            "Written by `python scripts/plans/stylegan2_memory.py -o docs/benchmarks/stylegan2_memory.md`, "
            f"{made()}, torch {torch.__version__}, on a CPU. Published: `torch.cuda.max_memory_allocated` in NVIDIA's "
            "programs, in GiB of one digit: StyleGAN3's with PyTorch 1.10, and of the same runs StyleGAN2-ADA's with "
            "PyTorch 1.7. These programs compute the norms for demodulation from a kernel for each picture, which "
            "backward keeps; mpt from a matrix product. Planned both ways, allocated memory in MiB:",
            "",
            "| Run | Published | With PyTorch 1.7 | mpt's networks | With a kernel for each picture | Its peak |",
            "|---|---:|---:|---:|---:|---|",
            *lines,
            "",
        ]
    )


def main() -> None:
    """Plan all rows, of which those in --work are there already, and write the page."""
    parser = described(__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs") / "stylegan2_memory.json")
    options = parser.parse_args()
    found: dict[str, list[Any]] = (
        json.loads(options.work.read_text("utf-8")) if options.work.is_file() else {}
    )
    options.work.parent.mkdir(parents=True, exist_ok=True)
    for row in ROWS:
        if row.key not in found:
            found[row.key] = [plan(row, False)[0], *plan(row, True)]
            print(row.key, row.measured, found[row.key], flush=True)
            options.work.write_text(json.dumps(found), "utf-8")
    options.output.write_text(page(found), "utf-8")


if __name__ == "__main__":
    main()
