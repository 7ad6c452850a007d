#!/usr/bin/env python
"""The least memory that mpt's own workloads train in on a card, compared with their plans.

    python scripts/card/workload_limits.py ROWS.jsonl [--seconds 90]       # on the card

The workloads are those of `gpu_check_workloads.py`, in the batches of a card of 12 GB. Each trains without a limit,
then in its plan, then in limits halved between one that it trained in and one that it ran out at. The rows are printed
by `own_step_limits.py page`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.card.gpu_check_memory import append, limited, measure, prepare
from scripts.card.gpu_check_planning import Planners
from scripts.card.gpu_check_workloads import WORKLOADS

TRIED = (
    *("U-Net, fp32", "ResNet-50, fp32", "StyleGAN2, native", "ResNet-50, fp32, recompute=all"),
    *("DCGAN, amp", "ResNet-50, bf16", "U-Net, amp", "VGG-16, fp32", "DenseNet-121, fp32"),
    *("EfficientNet-B0, amp", "ConvNeXt-T, amp", "MobileNetV2, fp32"),
)
"""The workloads with the largest workspaces."""
LEAST_SHARE, MOST_SHARE = 0.8, 1.6
TRIES = 4


def measure_all(path: Path, seconds: float) -> None:
    """Plan all, four at once, and append a row for each that is reached."""
    import torch

    deadline, card = time.monotonic() + seconds, torch.device("cuda", 0)
    known, elsewhere = {one.label: one for one in WORKLOADS}, Planners()
    try:
        with ThreadPoolExecutor(4) as pool:
            prepared = [(label, *prepare(known[label], "", 1.0)) for label in TRIED]
            plans = [
                pool.submit(elsewhere.plan, *settings, card, deadline) for _, *settings in prepared
            ]
            for (label, config, data), plan in zip(prepared, plans, strict=True):
                if time.monotonic() < deadline:
                    allocated, reserved = plan.result(seconds)["planned"]["0.0"]
                    row = {"label": label, "planned": reserved or allocated}
                    append(path, row | limits(config, data, card, row["planned"]))
    finally:
        elsewhere.close()


def limits(config: Any, data: Any, card: Any, planned: int) -> dict[str, int]:
    """Return the bytes reserved without a limit, the largest limit that was too small, the smallest that was enough."""
    import torch

    free = measure(config, data, card)["reserved"]
    failed, low, ran = 0, int(LEAST_SHARE * planned), int(MOST_SHARE * planned)
    limit = planned
    for _ in range(TRIES):
        try:
            with limited(limit, card):
                measure(config, data, card)
            ran = limit
        except torch.OutOfMemoryError:
            failed = low = limit
        limit = (low + ran) // 2
    return {"reserved": free, "failed": failed, "ran": ran}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the rows in Markdown."""
    lines = [
        "| mpt's workload | Planned, MiB | Ran out at | Ran in | Of the plan | Without a limit |"
    ]
    lines.append("|---|---:|---:|---:|---:|---:|")
    for row in rows:
        shares = f"{row['failed'] / row['planned']:.2f} .. {row['ran'] / row['planned']:.2f}"
        sizes = [f"{row[name] / 2**20:,.0f}" for name in ("planned", "failed", "ran", "reserved")]
        lines.append(f"| {row['label']} | {' | '.join([*sizes[:3], shares, sizes[3]])} |")
    return lines


def main() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as for deterministic runs
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", type=Path)
    parser.add_argument("--seconds", type=float, default=90.0)
    options = parser.parse_args()
    measure_all(options.rows, options.seconds)
    print(options.rows.read_text("utf-8"))


if __name__ == "__main__":
    main()
