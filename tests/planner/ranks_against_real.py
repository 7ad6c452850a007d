"""Run as a program: compare planned ranks with real ones, joined by gloo on this CPU; a JSON object per configuration.

`python -m tests.planner.ranks_against_real few|fsdp|all [--markdown]`. The real ranks are forked before anything is
planned, since planning registers a device for good.
"""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import nullcontext
from typing import Any

import torch

from mpt.config.load import load_config
from mpt.config.schema import Config
from mpt.engine.building.build import build_run
from mpt.parallel.start import joined
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.facts.placement import Placement
from mpt.planner.step.rank_trace import trace_rank
from mpt.planner.step.run_fake import perform_steps
from mpt.planner.step.shard_trace import watch_shards
from mpt.planner.trace.overlap import OrderedWork
from mpt.planner.trace.recorder import Recorder
from mpt.planner.trace.trace import Trace, live_peak
from tests.parallel.forked import run_ranks
from tests.planner.configs import DIGITS, UNET, VIT, make

FSDP = {"strategy": "fsdp"}
CPU = torch.device("cpu")
Row = tuple[str, Any, dict[str, Any], dict[str, Any], int, int]
FEW: list[Row] = [
    ("dcgan", "amp", {}, {}, 15, 2),
    ("lsgan", "O1", {}, FSDP, 16, 2),
]
ALL: list[Row] = [
    *FEW,
    (UNET, "fp32", {"micro_batch": 3}, {"bucket_mib": 0.05}, 16, 2),
    ("small_cnn", "fp32", {}, {}, 16, 2),
    ("small_cnn", "bf16-pure", {}, {}, 16, 2),
    ("dcgan", "fp32", {}, {"reduce_dtype": "bfloat16"}, 16, 2),
    ("lsgan", "fp32", {}, {}, 16, 2),
    ("wgan_gp", "fp32", {}, {"overlap": False}, 16, 2),
    (UNET, "amp", {"recompute": "all"}, {}, 15, 2),
    (VIT, "fp32", {"recompute": "sqrt"}, {}, 16, 2),
    (VIT, {"mode": "O2", "dtype": "bfloat16"}, {}, {}, 16, 2),
    ("small_cnn", "fp32", {}, {}, 18, 4),
    (VIT, "amp", {}, {}, 16, 4),
    ("small_cnn", "fp32", {}, FSDP, 16, 2),
    ("dcgan", "fp32", {}, FSDP, 16, 2),
    ("dcgan", "amp", {}, {**FSDP, "reduce_dtype": "bfloat16"}, 16, 2),
    (VIT, "amp", {}, FSDP, 16, 2),
    (UNET, "fp32", {"recompute": "all"}, FSDP, 16, 2),
    (UNET, "bf16", {"micro_batch": 3}, FSDP, 16, 2),
    (VIT, "fp32", {"recompute": "sqrt"}, FSDP, 16, 2),
    (UNET, "fp32", {}, FSDP, 16, 2),
    (VIT, "fp32", {}, FSDP, 16, 4),
    ("small_cnn", "amp", {}, FSDP, 16, 4),
    (VIT, "fp32", {}, {**FSDP, "shard": "grad"}, 16, 2),
    (VIT, "fp32", {}, {**FSDP, "shard": "hybrid", "shard_ranks": 2}, 16, 4),
    (VIT, {"mode": "O2", "dtype": "bfloat16"}, {}, FSDP, 16, 2),
    ("lsgan", "bf16-pure", {}, FSDP, 16, 2),
]


def configure(row: Row) -> Config:
    """Return a row's configuration."""
    model, precision, memory, parallel, batch, _ = row
    return load_config(
        {**make(model, precision, batch, **memory).to_data(), "parallel": parallel}, allow=["tests"]
    )


def real_peak(rank: int, row: Row) -> int:
    """Perform two steps on a true rank; return the most live tensor bytes."""
    warnings.simplefilter("ignore")
    config = configure(row)
    with joined(config) as world:
        recorder = Recorder("cpu")
        watching = watch_shards(recorder, OrderedWork()) if world.is_sharded else nullcontext()
        with torch.autograd.set_multithreading_enabled(False), watching, recorder.recording():
            run = build_run(config, CPU, DIGITS, world=world)
            perform_steps(run, recorder, config.train.batch_size, batch_ahead=False)
        return peak_of_steps(recorder.trace)


def peak_of_steps(trace: Trace) -> int:
    """Return the most live bytes of the steps: a real build has whole networks in float32, a planned one on `meta`."""
    return live_peak(trace, next(span.start for span in trace.spans if span.moment == "loading"))


def planned_peak(rank: int, row: Row) -> int:
    """Return what a plan says of a rank."""
    config, size = configure(row), row[-1]
    placement = Placement(nproc=size, rank=rank, strategy=config.parallel.strategy)
    gpu = find_gpu("rtx3060")
    fake = trace_rank(
        config, DIGITS, config.train.batch_size, gpu, None, placement, CPU, batch_ahead=False
    )
    return peak_of_steps(fake.trace)


def name_of(row: Row) -> str:
    """Return a row's name."""
    model, precision, memory, parallel, batch, size = row
    mode = precision if isinstance(precision, str) else precision["mode"]
    changes = [f"{key} {value}" for key, value in {**memory, **parallel}.items()]
    return " ".join([model.rpartition(":")[2], mode, *changes, f"batch {batch}, {size} ranks"])


def main() -> None:
    """Print the peaks of the first and the last rank of every configuration asked for."""
    warnings.simplefilter("ignore")
    chosen = {"few": FEW, "fsdp": [row for row in ALL if row[3].get("strategy")]}.get(
        sys.argv[1], ALL
    )
    real = [run_ranks(row[-1], real_peak, row) for row in chosen]
    if "--markdown" in sys.argv:
        print(
            "| Configuration | Planned KiB, first rank | Tracked | Last rank |\n|---|---:|---:|---:|"
        )
    for row, seen in zip(chosen, real, strict=True):
        planned = [planned_peak(rank, row) for rank in (0, row[-1] - 1)]
        if "--markdown" in sys.argv:
            errors = [
                f"{plan / true - 1:+.2%}"
                for plan, true in zip(planned, (seen[0], seen[-1]), strict=True)
            ]
            print(
                f"| {name_of(row)} | {planned[0] / 2**10:,.1f} | {errors[0]} | {errors[1]} |",
                flush=True,
            )
        else:
            print(
                "ROW "
                + json.dumps(
                    {"name": name_of(row), "planned": planned, "tracked": [seen[0], seen[-1]]}
                )
            )


if __name__ == "__main__":
    main()
