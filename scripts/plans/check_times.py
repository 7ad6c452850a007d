"""Compare planned step times with published throughputs, as they are and moved from what was measured.

python scripts/plans/check_times.py

What `mpt plan calibrate` learns is one factor: measured over planned seconds. Here each published row in turn is the
measured one, and the others are planned with its factor: the same network on another card, or another network on the
same card. Nothing is fitted to the row that is predicted. Sources:

- NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5, "Training performance results" of one GPU:
  ResNet-50, batch 256 (128 in float32 on 16 GB), SGD with momentum, channels_last, data from DALI.
- NVIDIA DeepLearningExamples, PyTorch/Detection/SSD, "Training performance results" of one GPU: SSD300 with a
  ResNet-50 (`scripts/plans/ssd300.py`), channels_last.
- timm, results/benchmark-train-amp-nchw-pt112-cu113-rtx3090.csv: amp, SGD, contiguous, no data loading.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mpt.config.load import load_config
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import find_gpu


@dataclass(frozen=True)
class Row:
    """One published throughput, in images per second."""

    source: str
    gpu: str
    model: str
    mode: str
    batch: int
    images_per_second: float

    def config(self) -> dict[str, Any]:
        """Return the run as a configuration."""
        model = {"name": f"timm:{self.model}", "image_size": 224, "channels": 3}
        return {
            "model": {"name": "scripts.plans.ssd300:Ssd300", "image_size": 300}
            if self.model == SSD
            else model,
            "dataset": {"name": "image_folder", "root": "nowhere"},
            "precision": {"mode": self.mode},
            "memory": {"channels_last": self.source == "NVIDIA"},
            "optimizer": {"name": "sgd", "momentum": 0.9},
            "train": {"batch_size": self.batch, "deterministic": False},
        }


SSD = "ssd300"
ALLOWED = ["scripts"]
ROWS = (
    Row("NVIDIA", "v100", "resnet50", "fp32", 128, 367),
    Row("NVIDIA", "v100", "resnet50", "amp", 256, 1200),
    Row("NVIDIA", "a100-80gb", "resnet50", "tf32", 256, 938),
    Row("NVIDIA", "a100-80gb", "resnet50", "amp", 256, 2470),
    Row("NVIDIA", "v100", SSD, "fp32", 32, 107.22),
    Row("NVIDIA", "v100", SSD, "amp", 64, 322.81),
    Row("NVIDIA", "v100", SSD, "amp", 32, 296.80),
    Row("NVIDIA", "a100-80gb", SSD, "tf32", 64, 364.27),
    Row("NVIDIA", "a100-80gb", SSD, "amp", 64, 662.91),
    Row("timm", "rtx3090", "resnet50", "amp", 512, 826.06),
    Row("timm", "rtx3090", "resnet18", "amp", 512, 2764.22),
    Row("timm", "rtx3090", "mobilenetv2_100", "amp", 512, 1832.14),
    Row("timm", "rtx3090", "vit_small_patch16_224", "amp", 384, 1052.92),
    Row("timm", "rtx3090", "convnext_tiny", "amp", 256, 813.16),
    Row("timm", "rtx3090", "densenet121", "amp", 256, 730.11),
    Row("timm", "rtx3090", "resnext50_32x4d", "amp", 384, 663.39),
    Row("timm", "rtx3090", "swin_tiny_patch4_window7_224", "amp", 256, 646.76),
    Row("timm", "rtx3090", "vgg11", "amp", 512, 825.98),
)


def plan_rows() -> list[float]:
    """Return the planned images per second of each row, without any calibration."""
    found: dict[Row, float] = {}
    for gpu in dict.fromkeys(row.gpu for row in ROWS):
        rows = [row for row in ROWS if row.gpu == gpu]
        with Session(find_gpu(gpu), Calibration(), ALLOWED) as session:
            answers = session.plan([load_config(row.config(), allow=ALLOWED) for row in rows])
        found |= {
            row: row.batch / answer.get().step_seconds
            for row, answer in zip(rows, answers, strict=True)
        }
    return [found[row] for row in ROWS]


def main() -> None:
    """Print the published and planned throughputs, and the errors of every move."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    planned = plan_rows()
    factors = [plan / row.images_per_second for plan, row in zip(planned, ROWS, strict=True)]
    print("| Source | Card | Network | Mode | Batch | Published img/s | Planned | Error |")
    print("|---|---|---|---|---:|---:|---:|---:|")
    for row, plan, factor in zip(ROWS, planned, factors, strict=True):
        name = f"{row.source} | {row.gpu} | {row.model} | {row.mode} | {row.batch}"
        print(f"| {name} | {row.images_per_second:,.0f} | {plan:,.0f} | {factor - 1:+.0%} |")

    def errors_where(alike: Callable[[Row, Row], bool]) -> list[float]:
        measured = list(zip(ROWS, factors, strict=True))
        return [
            abs(to / at - 1)
            for (one, at), (other, to) in permutations(measured, 2)
            if alike(one, other)
        ]

    moves = {
        "none": [abs(factor - 1) for factor in factors],
        "same network and arithmetic, another card": errors_where(
            lambda a, b: (
                a.gpu != b.gpu and a.model == b.model and (a.mode == "amp") == (b.mode == "amp")
            )
        ),
        "same network and card, other arithmetic": errors_where(
            lambda a, b: a.gpu == b.gpu and a.model == b.model
        ),
        "same card and arithmetic, another network": errors_where(
            lambda a, b: a.gpu == b.gpu and a.mode == b.mode and a.model != b.model
        ),
    }
    print("\n| Measured, and moved to | Moves | Median error | Largest |\n|---|---:|---:|---:|")
    for name, errors in moves.items():
        print(f"| {name} | {len(errors)} | {statistics.median(errors):.0%} | {max(errors):.0%} |")


if __name__ == "__main__":
    main()
