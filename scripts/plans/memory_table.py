"""Measure every memory trick on two real steps and write the tables of docs/benchmarks/memory.md.

Usage: OMP_NUM_THREADS=1 python scripts/plans/memory_table.py [--output docs/benchmarks/memory.md] [--quick]

For each trick the same training is built anew: what the first phase keeps for backward (saved bytes, weights aside),
the peak of live bytes in the second step on this CPU (`mpt.run.process.memory_meter`), the peak that the planner
predicts for a GPU, the arithmetic of a step relative to the plain one, and whether the weights after two steps are
bit-equal to those of the plain run. The text between the two markers in the file is replaced.
"""

from __future__ import annotations

import argparse
import gc
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from mpt import vision_ops  # noqa: F401  torchvision needs it beside a CPU torch
from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.engine.building.build import build_run
from mpt.engine.state.memory import known_tensors
from mpt.engine.step.step import update
from mpt.errors import MptError
from mpt.memory.recomputing.selective import Kept
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.facts.placement import Placement
from mpt.planner.plans.plan import trace_placed
from mpt.planner.trace.replay import replay
from mpt.precision.shared.module_state import module_state
from mpt.run.process.memory_meter import measure_step
from mpt.seams import Batch, DataSpec, FieldSpec, Run
from mpt.seams.phase_losses import entered

START, END = "<!-- tables by scripts/plans/memory_table.py -->", "<!-- end of tables -->"
CPU = torch.device("cpu")
TRICKS: list[dict[str, Any]] = [
    {},
    {"recompute": "sqrt"},
    {"recompute": "all"},
    {"recompute": "selective"},
    {"recompute": {"every": 2}},
    {"recompute": {"budget": 0.5}},
    {"micro_batch": 16},
    {"offload_activations": 0.05},
    {"optimizer_in_backward": True},
    {"low_bit_optimizer": True},
    {"cpu_optimizer": True},
    {"release_grads_after": ["*"]},
    {"channels_last": True},
    {"set_to_none": False},
    {"recompute": "all", "micro_batch": 16},
    {"recompute": "sqrt", "optimizer_in_backward": True},
]
COSTS = {
    "recompute": "a part of the forward runs twice",
    "micro_batch": "smaller kernels; BatchNorm sees smaller batches",
    "offload_activations": "copies to the host and back",
    "optimizer_in_backward": "one small optimizer step per tensor",
    "low_bit_optimizer": "rounding of the optimizer's state",
    "cpu_optimizer": "copies, and the CPU's arithmetic",
    "release_grads_after": "none",
    "channels_last": "none; other kernels",
    "set_to_none": "is a cost: this row shows it switched off",
}


@dataclass(frozen=True)
class Workload:
    """One model at one batch size."""

    title: str
    sections: dict[str, Any]
    data: DataSpec
    batch_size: int

    def config(self, memory: dict[str, Any]) -> Config:
        """Return the configuration with these tricks."""
        return load_config(
            {
                **self.sections,
                "memory": memory,
                "train": {"batch_size": self.batch_size, "steps": 2},
            }
        )

    def batches(self) -> Iterator[Batch]:
        """Yield the same random batches each time."""
        for seed in range(2):
            generator = torch.Generator().manual_seed(seed)
            shape = (self.batch_size, *self.data.fields["image"].shape)
            yield {
                "image": torch.rand(shape, generator=generator),
                "label": torch.randint(
                    0, len(self.data.classes), (self.batch_size,), generator=generator
                ),
            }


def workloads(quick: bool) -> list[Workload]:
    """Return a classifier and a GAN."""

    def data(channels: int, size: int) -> DataSpec:
        fields = {
            "image": FieldSpec((channels, size, size), torch.float32),
            "label": FieldSpec((), torch.int64),
        }
        return DataSpec(fields, 1000, tuple("0123456789"))

    size, batch_size = (32, 8) if quick else (64, 64)
    resnet = {
        "model": {"name": "torchvision:resnet18", "image_size": size},
        "optimizer": {"name": "adam"},
        "precision": "fp32",
    }
    gan = {
        "model": {"name": "dcgan", "features": 16 if quick else 64, "image_size": size},
        "optimizer": {"name": "adam"},
        "precision": "fp32",
    }
    return [
        Workload(
            f"ResNet-18, {size} x {size}, batch {batch_size}, Adam, fp32",
            resnet,
            data(3, size),
            batch_size,
        ),
        Workload(
            f"DCGAN, {size} x {size}, batch {batch_size}, Adam, fp32",
            gan,
            data(1, size),
            batch_size,
        ),
    ]


def all_kept() -> list[Kept]:
    """Return what `selective` keeps at this moment in the whole process."""
    return [held for held in gc.get_objects() if type(held) is Kept]


def saved_bytes(run: Run, batch: Batch) -> int:
    """Return the largest number of bytes that one loss of the first phase keeps for its backward, weights aside."""
    weights = {
        p.untyped_storage()._cdata
        for module in run.task.modules.values()
        for p in module.parameters()
    }
    phase, most = run.phases[0], 0
    kept: dict[int, Tensor] = {}
    others = all_kept()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in weights:
            kept[tensor.untyped_storage()._cdata] = tensor.detach()
        # a graph that holds its own output and is never walked would not be freed
        return tensor.detach()

    part = {
        name: value[: run.adaptation.micro_batch_size]
        for name, value in run.task.draw(batch, phase).items()
    }
    pending = None
    while True:
        kept.clear()
        with (
            run.precision.forward(),
            saved_tensors_hooks(pack, lambda tensor: tensor),
            entered(trick.forward() for trick in run.tricks),
        ):
            # most tasks compute all at once
            pending = iter(phase.losses(part)) if pending is None else pending
            loss = next(pending, None)
        if loss is None:
            return most
        for held in all_kept():  # what `selective` keeps is not a saved tensor
            if not any(held is other for other in others):
                kept[held.tensor.untyped_storage()._cdata] = held.tensor
        most = max(most, sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
        del loss


def perform(run: Run, batch: Batch) -> None:
    """Perform a step."""
    for phase in run.phases:
        update(run, phase, batch)


def measure(workload: Workload, memory: dict[str, Any]) -> dict[str, Any]:
    """Return one row's figures; a figure that cannot be had here is None."""
    row: dict[str, Any] = {}
    gpu = find_gpu("rtx2060")
    config = workload.config(memory)
    traced = trace_placed(
        config, workload.data, gpu, Calibration(), Placement(), workload.batch_size
    )
    row["planned"] = replay(traced.trace).allocated
    try:
        run = build_run(config, CPU, workload.data)
    except MptError:  # the 8-bit backends are extras
        return row
    first, second = workload.batches()
    if "offload_activations" not in memory:  # on a CPU there is nowhere to go
        row["saved"] = saved_bytes(build_run(config, CPU, workload.data), first)
    torch.manual_seed(0)
    with FlopCounterMode(display=False) as counter:
        perform(run, first)
    row["flops"] = counter.get_total_flops()
    row["peak"] = measure_step(lambda: perform(run, second), lambda: known_tensors(run)).peak_bytes
    row["weights"] = [
        value.detach().clone()
        for m in run.task.modules.values()
        for value in module_state(run.precision, m).values()
    ]
    row["exact"] = all(trick.exact for trick in run.tricks)
    return row


def describe(memory: dict[str, Any]) -> str:
    """Return a trick as YAML would have it."""

    def plain(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key}: {plain(item)}" for key, item in value.items()) + "}"
        return str(value).lower().replace("'", '"')

    return ", ".join(f"`{name}: {plain(value)}`" for name, value in memory.items()) or "nothing"


def write_table(workload: Workload) -> str:
    """Return a Markdown table of every trick on one workload."""
    lines = [
        f"### {workload.title}",
        "",
        "| Trick | saved MiB | CPU peak MiB | planned GPU MiB | arithmetic | bit-equal | cost |",
        "|---|---:|---:|---:|---:|---|---|",
    ]
    plain: dict[str, Any] = {}
    for memory in TRICKS:
        row = measure(workload, memory)
        plain = plain or row
        mebibytes = [
            f"{row[key] / 2**20:.1f}" if key in row else "-" for key in ("saved", "peak", "planned")
        ]
        equal = "needs an extra"
        if "weights" in row:
            same = all(
                torch.equal(a, b) for a, b in zip(plain["weights"], row["weights"], strict=True)
            )
            equal = "yes" if same else "no"
            if row["exact"] and not same:
                raise SystemExit(f"{describe(memory)} says that it is exact, and is not")
        flops = f"{row['flops'] / plain['flops']:.2f}" if "flops" in row else "-"
        cost = "; ".join(COSTS[name] for name in memory)
        lines.append(
            f"| {describe(memory)} | {' | '.join(mebibytes)} | {flops} | {equal} | {cost} |"
        )
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    """Measure, and replace the tables in the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks/memory.md"))
    parser.add_argument(
        "--quick", action="store_true", help="small models: to try the script, not for the page"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    text = arguments.output.read_text("utf-8")
    if START not in text or END not in text:
        raise SystemExit(f"{arguments.output}: no lines {START!r} and {END!r} to write between")
    before, rest = text.split(START, 1)
    after = rest.split(END, 1)[1]
    tables = "\n\n".join(write_table(workload) for workload in workloads(arguments.quick))
    arguments.output.write_text(f"{before}{START}\n\n{tables}\n\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
