"""Compare the planner with published measurements of real GPUs, and with real steps on this machine's CPU.

python scripts/plans/check_plan.py [--cpu] [--markdown]

Nothing is fitted: every row uses the defaults of `mpt.planner` and what its source says of the run. Sources:

- ViT-L/16: "pytorch-memory-optim" (S. Raschka), torch.cuda.max_memory_reserved, in 10^9 bytes. The scripts without
  accumulation clear the gradients between forward and backward, so the last step's gradients live through the
  forward; `memory.set_to_none: false` plans that. SGD is without momentum.
- BERT-large: "Methods and tools for efficient training on a single GPU" (Hugging Face), nvidia-smi, MB of 2^20 bytes,
  V100. The page itself gives 1343 MB for a process with nothing but its context and kernels; that is taken as the
  context here. Gradients were zeroed, not released: `memory.set_to_none: false` again.
- xMem: arXiv 2510.21048, torchvision models at 86 x 86, peak MiB, RTX 3060 and 4060. Its programs set neither cuDNN's
  benchmark mode nor TF32, so that both are torch's defaults: off, and on for convolutions. Five rows are the article's;
  the others are of its repository (github.com/Stone-ResearchLife/xMem, plot/data/001-Anova/CNN/001, "ground"): of the
  first hundred runs by name the first of each network and optimizer that did not run out of memory, but for Adagrad,
  which mpt has not.
- GPUMemNet: ResNet-50 in float32 on an A100, memory in use on the device in MiB; cuDNN's benchmark mode is not
  stated.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from mpt.config.load import load_config
from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import find_gpu
from scripts.plans.chance_table import save

MIB, GB = 2**20, 10**9
BERT_CONTEXT = 1343 * MIB


@dataclass(frozen=True)
class Row:
    """One published figure: `measured` bytes, and the settings of the run."""

    source: str
    label: str
    measured: float
    gpu: str
    model: str
    batch: int
    precision: str = "fp32"
    optimizer: str = "adam"
    micro_batch: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int, int] = (3, 224)
    foreach: bool | None = None
    context: int = 0
    keeps_gradients: bool = False

    def config(self) -> dict[str, Any]:
        """Return the run as a configuration."""
        optimizer: dict[str, Any] = {"name": self.optimizer}
        if self.foreach is not None:
            optimizer["foreach"] = self.foreach
        if self.optimizer == "sgd":
            optimizer["momentum"] = 0.0
        data: dict[str, Any] = {
            "model": {
                "name": self.model,
                "image_size": self.shape[1],
                "channels": self.shape[0],
                "options": self.options,
            },
            "dataset": {"name": "image_folder", "root": "nowhere"},
            "precision": {"mode": self.precision},
            "optimizer": optimizer,
            "train": {"batch_size": self.batch, "deterministic": False},
        }
        if self.micro_batch:
            data["memory"] = {"micro_batch": self.micro_batch}
        if self.keeps_gradients:
            data.setdefault("memory", {})["set_to_none"] = False
        return data


def vit(label: str, gigabytes: float, batch: int, **more: Any) -> Row:
    """A row of the ViT-L/16 table."""
    return Row("ViT-L/16", label, gigabytes * GB, "a100", "torchvision:vit_l_16", batch, **more)


def bert(label: str, megabytes: float, batch: int, recompute: bool = False, **more: Any) -> Row:
    """A row of the BERT-large table; 512 tokens."""
    options = {"recompute": recompute}
    return Row(
        "BERT-large", label, megabytes * MIB, "v100", "scripts.plans.published_models:BertLarge", batch,
        options=options, shape=(1, 512), optimizer="adamw", foreach=False, context=BERT_CONTEXT,
        keeps_gradients=True, **more,
    )  # fmt: skip


def xmem(label: str, mebibytes: float, model: str, batch: int, optimizer: str) -> Row:
    """A row of xMem's table."""
    name = f"torchvision:{model}"
    return Row(
        "xMem", label, mebibytes * MIB, "rtx3060", name, batch, optimizer=optimizer, shape=(3, 86)
    )


ROWS = (
    vit("fp32, Adam, batch 64", 26.79, 64, keeps_gradients=True),
    vit("amp float16, batch 64", 18.21, 64, precision="amp", keeps_gradients=True),
    vit("bfloat16 weights, batch 64", 13.82, 64, precision="bf16-pure", keeps_gradients=True),
    vit("the same, batch 16", 5.69, 16, precision="bf16-pure", keeps_gradients=True),
    vit("the same, 4 x 4", 3.91, 16, precision="bf16-pure", micro_batch=4),
    vit("the same, 4 x 4, SGD", 2.02, 16, precision="bf16-pure", micro_batch=4, optimizer="sgd"),
    bert("batch 4", 14949, 4),
    bert("4 x 1", 8681, 4, micro_batch=1),
    bert("4 x 1, recompute", 6775, 4, micro_batch=1, recompute=True),
    bert("amp float16, batch 4", 13939, 4, precision="amp"),
    bert("amp, 4 x 1, recompute", 7275, 4, micro_batch=1, recompute=True, precision="amp"),
    xmem("ConvNeXt-T, AdamW, batch 400", 6386, "convnext_tiny", 400, "adamw"),
    xmem("ResNet-152, Adam, batch 326", 10648, "resnet152", 326, "adam"),
    xmem("MobileNetV2, Adam, batch 764", 10110, "mobilenet_v2", 764, "adam"),
    xmem("ConvNeXt-B, AdamW, batch 294", 10012, "convnext_base", 294, "adamw"),
    xmem("VGG-19, AdamW, batch 377", 10364, "vgg19", 377, "adamw"),
    *(
        xmem(f"{label}, {name}, batch {batch}", mebibytes, model, batch, name.lower())
        for label, model, runs in (
            (
                "ConvNeXt-B",
                "convnext_base",
                {"Adam": (300, 10034), "AdamW": (300, 10034), "RMSprop": (200, 6744), "SGD": (300, 9522)},
            ),
            (
                "ConvNeXt-T",
                "convnext_tiny",
                {"Adam": (200, 3308), "AdamW": (200, 3308), "RMSprop": (300, 4616), "SGD": (200, 3166)},
            ),
            (
                "MnasNet",
                "mnasnet1_0",
                {"Adam": (300, 3114), "AdamW": (200, 2142), "RMSprop": (200, 2134), "SGD": (300, 3088)},
            ),
            (
                "MobileNetV3-L",
                "mobilenet_v3_large",
                {"Adam": (200, 1736), "AdamW": (300, 2604), "RMSprop": (700, 6076)},
            ),
        )
        for name, (batch, mebibytes) in runs.items()
    ),
    *(
        Row("GPUMemNet", f"ResNet-50, Adam, batch {batch}", mebibytes * MIB, "a100", "torchvision:resnet50", batch,
            context=Calibration().context_bytes)
        for batch, mebibytes in ((8, 2875), (16, 3733), (32, 5229), (64, 8465), (128, 15169))
    ),
)  # fmt: skip


EXPLAINED = {
    ("ViT-L/16", "the same, 4 x 4"): "torch 2.0's Adam made a second temporary",
}
"""Rows whose error has a known cause that no longer applies (docs/benchmarks/plan_published.md)."""


def main() -> None:
    """Print the table and the errors per source."""
    parser = argparse.ArgumentParser(description="Compare the planner with published measurements.")
    parser.add_argument(
        "--markdown",
        action="store_true",
        help="print a table for docs/benchmarks/plan_published.md",
    )
    parser.add_argument(
        "--save", action="store_true", help="renew what `mpt plan` learns its chances from"
    )
    parser.add_argument("--only", default="", help="sources whose name contains this")
    arguments = parser.parse_args()
    errors: dict[str, list[float]] = {}
    rows: list[dict[str, Any]] = []
    if arguments.markdown:
        print("| Source | Run | Measured MiB | Planned MiB | Error |\n|---|---|---|---|---|")
    for row in ROWS:
        if arguments.only.lower() not in row.source.lower():
            continue
        config = load_config(row.config(), allow=["scripts"])
        with Session(
            find_gpu(row.gpu), Calibration(context_bytes=row.context), ["scripts"]
        ) as session:
            answer = session.plan([config])[0]
        if answer.error:
            print(f"{row.source:10s} {row.label:30s} {answer.error}")
            continue
        planned = answer.get().reserved + row.context
        error = planned / row.measured - 1
        errors.setdefault(row.source, []).append(error)
        if row.source != "GPUMemNet":  # it says neither its cuDNN mode nor its optimizer
            sizes = {"measured_mib": round(row.measured / MIB), "planned_mib": round(planned / MIB)}
            explained = EXPLAINED.get((row.source, row.label), "")
            rows.append({"source": row.source, "run": row.label, **sizes, "explained": explained})
        cells = (
            row.source,
            row.label,
            f"{row.measured / MIB:.0f}",
            f"{planned / MIB:.0f}",
            f"{error:+.1%}",
        )
        if arguments.markdown:
            print("| " + " | ".join(cells) + " |")
        else:
            allocated = answer.get().allocated / MIB
            print(
                f"{cells[0]:10s} {cells[1]:30s} {cells[2]:>7s} {cells[3]:>7s} {cells[4]:>7s}  (tensors {allocated:.0f})"
            )
    print()
    if arguments.save:
        save(rows)
    for source, values in errors.items():
        sizes = [abs(value) for value in values]
        print(
            f"{source}: median {statistics.median(sizes):.1%}, largest {max(sizes):.1%} of {len(sizes)} runs"
        )


if __name__ == "__main__":
    main()
