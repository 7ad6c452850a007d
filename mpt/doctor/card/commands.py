"""Whole commands on a card: a training as planned, with data workers, resumed, and through NCCL."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from mpt.config.sizes import describe_bytes
from mpt.doctor.card.processes import reason, run
from mpt.doctor.card.runner import Skipped
from mpt.doctor.card.subjects import BATCH

SECONDS = 3600.0
"""More than any check has: the runner ends a check that takes too long, and with it the processes that it started."""
QUIET = (
    "train.evaluate_every=0",
    "train.sample_every=0",
    "train.checkpoint_every=0",
    "train.epochs=null",
)
MEMORY_WITHIN = 0.15
"""How far a planned peak may be off before it counts as wrong. Times are reported, not judged."""


def mpt(*words: str, device: torch.device) -> str:
    """Run a command of mpt and return its output. Raises RuntimeError with its last line if it fails."""
    command = [sys.executable, "-m", "mpt", *words, "--device", device.type]
    done = run(
        command, SECONDS, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    )
    if done.returncode:
        raise RuntimeError(f"mpt {words[0]}: {reason(done)}")
    return done.stdout + done.stderr


def train(
    folder: str, name: str, run_name: str, *words: str, device: torch.device
) -> list[dict[str, Any]]:
    """Train a shipped configuration for a few steps; return its logged lines."""
    fixed = (f"train.batch_size={BATCH}", "train.deterministic=true", *QUIET)
    mpt(
        "train",
        f"@{name}",
        *fixed,
        *words,
        "--runs",
        folder,
        "--name",
        run_name,
        "--quiet",
        device=device,
    )
    lines = (Path(folder) / run_name / "metrics.jsonl").read_text("utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "train"]


def compare_workers(name: str, device: torch.device) -> dict[str, Any]:
    """Train with data workers, which are forked while CUDA is in use, and without: the losses must be equal."""
    words = ("train.steps=3", "train.log_every=1", "train.plan_memory=false")
    with tempfile.TemporaryDirectory() as folder:
        losses = [
            [
                row["losses"]
                for row in train(
                    folder, name, f"w{count}", *words, f"dataset.workers={count}", device=device
                )
            ]
            for count in (0, 2)
        ]
    wrong = "" if losses[0] == losses[1] else "losses with workers are others than without"
    return {
        "said": f"3 steps of {name} with 2 workers and with none",
        **({"wrong": wrong} if wrong else {}),
    }


def resume(name: str, device: torch.device) -> dict[str, Any]:
    """Resume a shipped configuration halfway and compare it with a training in one go, to the bit."""
    words = (f"train.batch_size={BATCH}", "train.deterministic=true", "dataset.workers=0", *QUIET)
    with tempfile.TemporaryDirectory() as folder:
        mpt("verify-resume", f"@{name}", *words, "--steps", "4", "--runs", folder, device=device)
    return {
        "said": f"{name}: stopped after 2 of 4 steps and resumed, it ends bit for bit as in one go"
    }


def compare_plan(name: str, device: torch.device) -> dict[str, Any]:
    """Train a shipped configuration and compare memory and time of its steps with the plan."""
    if device.type != "cuda":
        raise Skipped("needs a CUDA device: on a CPU a run has no allocator to compare with")
    words = ("train.steps=12", "train.log_every=4", "dataset.workers=0", *QUIET)
    with tempfile.TemporaryDirectory() as folder:
        mpt(
            "train",
            f"@{name}",
            *words,
            "--runs",
            folder,
            "--name",
            "planned",
            "--quiet",
            "--no-report",
            device=device,
        )
        directory = Path(folder) / "planned"
        summary = json.loads((directory / "summary.json").read_text("utf-8"))
        plan = json.loads((directory / "plan.json").read_text("utf-8"))
        left_out = phases_left_out(directory)
    memory = summary["peak_memory"]
    measured, seconds = memory["steps_peak_bytes"], summary["median_step_seconds"]
    if "error" in plan:
        return {
            "said": f"peak {describe_bytes(measured)}",
            "wrong": f"no plan was made: {plan['error']}",
        }
    off, times = plan["peak_bytes"] / measured - 1, seconds / plan["step_seconds"]
    reserved = describe_bytes(memory["steps_reserved_bytes"])
    said = (
        f"allocated {describe_bytes(measured)}, planned {off:+.1%}; reserved {reserved}, planned "
        f"{describe_bytes(plan['reserved_bytes'])}; step {1000 * seconds:.1f} ms, {times:.2f} times the planned"
    )
    figures = {"allocated_off": off, "step_over_planned": times}
    # a phase that these steps do not reach is planned too, and may have the peak
    is_wrong = not -MEMORY_WITHIN <= off <= (math.inf if left_out else MEMORY_WITHIN)
    said += f"; not reached in these steps: {', '.join(left_out)}" if left_out else ""
    return {
        "said": said,
        "figures": figures,
        **({"wrong": f"the plan is {off:+.0%} off"} if is_wrong else {}),
    }


def phases_left_out(directory: Path) -> list[str]:
    """Return the phases of a run that took no step."""
    lines = (directory / "metrics.jsonl").read_text("utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "train"]
    stepped = {name.partition("/")[0] for row in rows for name in row["losses"]}
    return sorted({name for row in rows for name in row["skipped"]} - stepped)


def sum_over_nccl(device: torch.device) -> dict[str, Any]:
    """Sum, gather and spread tensors over NCCL with one rank."""
    if device.type != "cuda":
        raise Skipped("needs a CUDA device")
    if not dist.is_nccl_available():
        raise Skipped("this torch has no NCCL")
    card = torch.device(
        "cuda", torch.cuda.current_device() if device.index is None else device.index
    )
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=1, device_id=card)
    try:
        values = torch.arange(8.0, device=device)
        dist.all_reduce(values)
        gathered = [torch.empty_like(values)]
        dist.all_gather(gathered, values)
        dist.broadcast(values, 0)
        torch.cuda.synchronize(device)
        right = gathered[0].tolist() == list(range(8))
    finally:
        dist.destroy_process_group()
    version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "said": f"NCCL {version}, one rank",
        **({} if right else {"wrong": "sums of one rank are others"}),
    }
