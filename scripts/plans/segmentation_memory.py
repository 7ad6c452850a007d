#!/usr/bin/env python
"""Hold plans against the training memory that mmsegmentation published: four cards, SyncBatchNorm, two heads.

    python scripts/plans/segmentation_memory.py -o docs/benchmarks/plan_segmentation.md

The measured column is `torch.cuda.max_memory_allocated()` of the card with the most, V100, torch 1.5, without cuDNN's
benchmark mode (the model zoo's page and index files of github.com/open-mmlab/mmsegmentation), in GB with one
digit; a GB is taken as 1,024 MiB. So it is compared with allocated memory: no context, no reserve. A planned figure is
the largest sum of live tensors, in the allocator's 512 bytes; nothing is fitted. Each step is planned as it was in 2020
(`scripts/plans/segmentation_models.py`), and with one of the terms of that time left out, for what the term is worth.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from mpt.planner.facts.gpus import find_gpu
from mpt.planner.own.execution.source import Source
from mpt.planner.own.proposals.changes import Changes
from mpt.planner.own.trace import trace_own
from mpt.planner.trace.replay import replay
from mpt.planner.trace.trace import with_workspaces
from mpt.planner.trace.unseen import unseen_on
from scripts.command_line import described
from scripts.provenance import made

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
CITYSCAPES = {"classes": 19, "batch_size": 2, "height": 512, "width": 1024}
CITYSCAPES_769 = {"classes": 19, "batch_size": 2, "height": 769, "width": 769}
PASCAL = {"classes": 21, "batch_size": 4, "height": 512, "width": 512}
ADE = {**PASCAL, "classes": 150}
TERMS = {
    "softmax's input": "of_2020",
    "gradient buckets of DistributedDataParallel": "has_buckets",
    "gradients filled with zeros": "keeps_gradients",
}
SHOWN = (
    "fcn, ResNet-50, Cityscapes",
    "pspnet, ResNet-101, Pascal VOC",
    "deeplabv3, ResNet-50, ADE20K",
)
"""Rows whose terms are planned one by one."""


@dataclass(frozen=True)
class Row:
    """A published figure in GB, and the arguments of `scripts.plans.segmentation_models:training`."""

    gigabytes: float
    head: str
    depth: int
    data: str
    settings: dict[str, int]
    is_deep_stem: bool = True

    @property
    def measured(self) -> int:
        """MiB."""
        return round(self.gigabytes * 1024)

    @property
    def label(self) -> str:
        """The run in words."""
        return f"{self.head}, ResNet-{self.depth}{'' if self.is_deep_stem else ' (7 x 7 stem)'}, {self.data}"

    def arguments(self) -> dict[str, Any]:
        """Return the factory's arguments."""
        return {
            "head": self.head,
            "depth": self.depth,
            "is_deep_stem": self.is_deep_stem,
            **self.settings,
        }


def rows(
    head: str, data: str, settings: dict[str, int], *figures: tuple[float, int, bool]
) -> list[Row]:
    """Return rows of one head and data set, from (GB, depth, deep stem)."""
    return [Row(figure, head, depth, data, settings, is_deep) for figure, depth, is_deep in figures]


PUBLISHED = [
    *rows(
        "fcn",
        "Cityscapes",
        CITYSCAPES,
        (5.7, 50, True),
        (9.2, 101, True),
        (5.6, 50, False),
        (9.1, 101, False),
    ),
    *rows(
        "pspnet",
        "Cityscapes",
        CITYSCAPES,
        (6.1, 50, True),
        (9.6, 101, True),
        (6.0, 50, False),
        (9.5, 101, False),
    ),
    *rows(
        "deeplabv3", "Cityscapes", CITYSCAPES, (6.1, 50, True), (9.6, 101, True), (6.0, 50, False)
    ),
    *rows("deeplabv3", "Cityscapes", CITYSCAPES, (9.5, 101, False)),
    *rows("fcn", "Pascal VOC", PASCAL, (5.7, 50, True), (9.2, 101, True)),
    *rows("pspnet", "Pascal VOC", PASCAL, (6.1, 50, True), (9.6, 101, True)),
    *rows("deeplabv3", "Pascal VOC", PASCAL, (6.1, 50, True), (9.6, 101, True)),
    *rows("fcn", "Cityscapes 769", CITYSCAPES_769, (6.5, 50, True), (10.4, 101, True)),
    *rows("pspnet", "Cityscapes 769", CITYSCAPES_769, (6.9, 50, True), (10.9, 101, True)),
    *rows("deeplabv3", "Cityscapes 769", CITYSCAPES_769, (6.9, 50, True), (10.9, 101, True)),
    *rows("fcn", "ADE20K", ADE, (8.5, 50, True), (12.0, 101, True)),
    *rows("pspnet", "ADE20K", ADE, (8.5, 50, True), (12.0, 101, True)),
    *rows("deeplabv3", "ADE20K", ADE, (8.9, 50, True), (12.4, 101, True)),
    *rows("fcn", "Cityscapes", CITYSCAPES, (1.7, 18, True), (1.6, 18, False)),
    *rows("pspnet", "Cityscapes", CITYSCAPES, (1.7, 18, True), (1.5, 18, False)),
    *rows("deeplabv3", "Cityscapes", CITYSCAPES, (1.7, 18, True), (1.6, 18, False)),
]


@dataclass(frozen=True)
class Planned:
    """MiB of a planned step: live tensors, and with the workspaces that cuDNN asks for."""

    allocated: int
    with_workspaces: int


def plan(arguments: dict[str, Any]) -> Planned:
    """Plan a step on a V100."""
    gpu = find_gpu("v100")
    source = Source("scripts.plans.segmentation_models", "training", str(ROOT))
    trace = trace_own(source, arguments, gpu, unseen_on(gpu), Changes()).fake.trace
    allocated = (replay(one).allocated // MIB for one in (trace, with_workspaces(trace)))
    return Planned(*allocated)


def percent(planned: int, measured: int) -> float:
    """Return the error of a planned figure in percent."""
    return 100 * (planned / measured - 1)


def main() -> None:
    """Plan all rows, of which those in --work are there already, and write the page."""
    parser = described(__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs") / "segmentation_memory.json")
    options = parser.parse_args()
    found: dict[str, list[int]] = (
        json.loads(options.work.read_text("utf-8")) if options.work.is_file() else {}
    )
    options.work.parent.mkdir(parents=True, exist_ok=True)
    for row in PUBLISHED:
        if row.label not in found:
            found[row.label] = figures_of(row)
            print(row.label, row.measured, found[row.label], flush=True)
            options.work.write_text(json.dumps(found), "utf-8")
    options.output.write_text(page(found), "utf-8")


def figures_of(row: Row) -> list[int]:
    """Return MiB: the step of today, of 2020, of 2020 with workspaces; of shown rows each term's as well."""
    then = plan(row.arguments())
    today = plan(row.arguments() | dict.fromkeys(TERMS.values(), False))
    terms = TERMS.values() if row.label in SHOWN else ()
    without = [plan(row.arguments() | {name: False}).allocated for name in terms]
    whole = then.allocated
    return [
        today.allocated,
        whole,
        then.with_workspaces,
        *(whole - one for one in without),
    ]


def summary(name: str, errors: list[float]) -> str:
    """Return a row of the table of errors."""
    sizes = sorted(map(abs, errors))
    ninth = sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))]
    low = sum(error < 0 for error in errors)
    return (
        f"| {name} | {statistics.median(sizes):.1f} % | {ninth:.1f} % | {min(errors):+.1f} % | {max(errors):+.1f} % "
        f"| {low} of {len(errors)} |"
    )


def page(found: dict[str, list[int]]) -> str:
    """Return the page."""
    lines, errors = [], []
    for row in PUBLISHED:
        errors.append([percent(figure, row.measured) for figure in found[row.label][:3]])
        cells = [
            f"{figure:,} ({error:+.1f} %)"
            for figure, error in zip(found[row.label], errors[-1], strict=False)
        ]
        lines.append(f"| {row.label} | {row.measured:,} | {' | '.join(cells)} |")
    steps = (
        "of today",
        "of 2020",
        "of 2020, with workspaces",
    )
    worth = [
        f"| {label} | {' | '.join(f'{one:,}' for one in found[label][3:])} |" for label in SHOWN
    ]
    return "\n".join(
        [
            "# Segmentation on four cards, against published memory",
            "",
            "Written by `python scripts/plans/segmentation_memory.py -o docs/benchmarks/plan_segmentation.md`, "
            f"{made()}, torch {torch.__version__}, on a CPU. Nothing is fitted. Measured: the most of "
            "`torch.cuda.max_memory_allocated()` on four V100 with torch 1.5 and SyncBatchNorm, two pictures of "
            "512 x 1024 (Cityscapes) or four of 512 x 512 on each card (mmsegmentation's tables, in GB of one digit, "
            "taken as 1,024 MiB; with 1,000 all measured figures are 2.3 % lower). Planned: allocated memory. The "
            "workspaces are what `mpt plan` adds for cuDNN until a card is calibrated, on this card the transforms of "
            "Winograd's kernels for dense convolutions of 3 x 3. All figures are MiB.",
            "",
            "| Run | Measured | Step of today | Step of 2020 | With workspaces |",
            "|---|---:|---:|---:|---:|",
            *lines,
            "",
            "| Step | Median error | 90 % within | Lowest | Highest | Too low |",
            "|---|---:|---:|---:|---:|---:|",
            *(
                summary(name, list(one))
                for name, one in zip(steps, zip(*errors, strict=True), strict=True)
            ),
            "",
            "What the step of 2020 holds in addition (`scripts/plans/segmentation_models.py`), each term alone:",
            "",
            f"| Run | {' | '.join(TERMS)} |",
            "|---|---:|---:|---:|",
            *worth,
            "",
        ]
    )


if __name__ == "__main__":
    main()
