"""Print xMem's convolutional runs as planned, and with scratch for the weight gradients of 1x1 kernels.

    python scripts/plans/pointwise_scratch.py

The scratch is the weight once for each sample, in float32, as it was seen for MnasNet on an H200
(docs/decisions/planner.md): whatever it takes, and where it takes no more than 512 MiB. Plans have none;
the table shows which of the runs took it (docs/benchmarks/plan_published.md). VGG-19 and ConvNeXt have no such kernels
and are left out. Three sizes of MnasNet are of the same folder of xMem's repository as the others.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mpt.config.load import load_config
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.server.worker import find_data, preload
from mpt.planner.step.run_fake import trace_config
from mpt.planner.trace.replay import replay
from mpt.planner.trace.unseen import Unseen, unseen_on
from scripts.plans.check_plan import MIB, ROWS, Row, xmem

LIMIT = 512 * MIB
LARGER = (
    xmem("MnasNet, SGD, batch 400", 3506, "mnasnet1_0", 400, "sgd"),
    xmem("MnasNet, SGD, batch 500", 4066, "mnasnet1_0", 500, "sgd"),
    xmem("MnasNet, SGD, batch 700", 5654, "mnasnet1_0", 700, "sgd"),
)


class WithScratch(Unseen):
    """Scratch of a process in which weight gradients of 1x1 kernels take the weight once for each sample."""

    most = sys.maxsize

    def scratch(self, operator: str, args: Any, result: Any, is_written: bool = False) -> int:
        """Return the bytes of scratch that live while this operator runs."""
        found = super().scratch(operator, args, result)
        if operator != "aten::convolution_backward":
            return found
        images, weight, groups = args[1], args[2], args[9]
        scratch = 4 * len(images) * weight.numel()
        is_taken = groups == 1 and max(weight.shape[2:]) == 1 and scratch <= self.most
        return found + is_taken * scratch


class WithLittleScratch(WithScratch):
    """The same, if it is not much."""

    most = LIMIT


def planned(row: Row, kind: type[Unseen]) -> float:
    """Return the MiB that the allocator reserves for a run."""
    config = load_config(row.config(), allow=["scripts"])
    data = find_data(config)[1]
    gpu = find_gpu(row.gpu)
    unseen = unseen_on(gpu, deterministic=config.train.deterministic, kind=kind)
    trace = trace_config(config, data, config.train.batch_size, gpu, unseen).trace
    return (replay(trace).reserved + row.context) / MIB


def main() -> None:
    """Print the table."""
    preload()
    print("| Run | Measured MiB | Planned | With the scratch | If it is 512 MiB at most |")
    print("|---|---:|---:|---:|---:|")
    for row in (*ROWS, *LARGER):
        if row.source == "xMem" and not row.label.startswith(("ConvNeXt", "VGG")):
            measured = row.measured / MIB
            kinds = (Unseen, WithScratch, WithLittleScratch)
            found = [planned(row, kind) for kind in kinds]
            texts = [f"{mebibytes:,.0f} ({mebibytes / measured - 1:+.1%})" for mebibytes in found]
            print(f"| {row.label} | {measured:,.0f} | {' | '.join(texts)} |", flush=True)


if __name__ == "__main__":
    main()
