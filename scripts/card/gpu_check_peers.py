"""The same training, side by side: by hand, plain and compiled; mpt, plain and with CUDA graphs; Accelerate; Lightning.

Part of `gpu_check.py`. ResNet-18 on drawn 64-pixel images under autocast, float16 with a loss scale on a GPU. Each
contestant trains in a process of its own; the seconds per step are the median of windows that end with a
synchronisation, and the peak is the allocator's. Those that are not installed say so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.card.gpu_check_processes import reason, run  # noqa: E402

GRAPHS = "mpt, CUDA graphs"
"""mpt with `memory.compile: {mode: reduce-overhead}`, torch's own way to record kernels once."""
COMPILED = "by hand, compiled"
CONTESTANTS = ("by hand", "mpt", "accelerate", "lightning", COMPILED, GRAPHS)
"""Those that compile come last: a process of theirs takes minutes where starts are slow."""
NOT_INSTALLED = "not installed"
FOR_A_GPU_ALONE = "compiles kernels, which a pretended card does not run"
NO_FAULTS = (NOT_INSTALLED, FOR_A_GPU_ALONE)
WINDOWS, WINDOW_STEPS, BATCH = 8, 20, 128
SMALL = (2, 2, 2)


def measure_all(
    seconds: float, rehearsal: str, before: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Measure every contestant that `before` does not settle, in a process of its own, within some seconds."""
    deadline, rows = time.monotonic() + seconds, []
    known = {row["name"]: row for row in (before or {}).get("rows", [])}
    for name in CONTESTANTS:
        row = known.get(name, {"name": name})
        rows.append(
            row if is_settled(row) else try_contestant(row, deadline - time.monotonic(), rehearsal)
        )
    return {"rows": rows}


def is_settled(row: dict[str, Any]) -> bool:
    """Is a contestant measured, not to be had here, or did it fail twice?"""
    return "step_seconds" in row or row.get("error") in NO_FAULTS or row.get("tries", 0) > 1


def faults(results: dict[str, Any]) -> list[str]:
    """Return in words which contestants failed."""
    wrong = [row for row in results["rows"] if row.get("error", NOT_INSTALLED) not in NO_FAULTS]
    return [f"side by side, {row['name']}: {row['error']}" for row in wrong]


def try_contestant(row: dict[str, Any], left: float, rehearsal: str) -> dict[str, Any]:
    """Measure one contestant; return its row."""
    name, tries = row["name"], row.get("tries", 0)
    if rehearsal == "cuda" and name in (COMPILED, GRAPHS):
        return {"name": name, "error": FOR_A_GPU_ALONE}
    if left < 5:
        return {"name": name, "tries": tries, "error": "not reached in time"}
    command = [sys.executable, str(Path(__file__).resolve()), name]
    command += [f"--rehearsal={rehearsal}"] if rehearsal else []
    try:
        done = run(command, left)
    except subprocess.TimeoutExpired:
        return {"name": name, "tries": tries, "error": "did not end in its time"}
    if done.returncode:
        return {"name": name, "tries": tries + 1, "error": reason(done)}
    return {"name": name, **json.loads(done.stdout.strip().splitlines()[-1])}


def as_markdown(results: dict[str, Any]) -> list[str]:
    """Return the table, ratios to the loop written by hand."""
    lines = ["## Side by side: ResNet-18 at 64 pixels under autocast", ""]
    lines += ["| loop | step, ms | ratio | peak, MiB |", "|---|---:|---:|---:|"]
    base = next((row.get("step_seconds") for row in results["rows"]), None)
    for row in results["rows"]:
        if "error" in row:
            lines.append(f"| {row['name']} | {row['error']} | | |")
            continue
        ratio = f"{row['step_seconds'] / base:.3f}" if base else ""
        lines.append(
            f"| {row['name']} | {1000 * row['step_seconds']:.2f} | {ratio} | {row['peak_bytes'] / 2**20:.0f} |"
        )
    return [*lines, ""]


def measure(name: str, rehearsal: str) -> dict[str, Any]:
    """Train one contestant and return its seconds per step and its peak."""
    import torch

    device = torch.device(rehearsal or "cuda")
    windows, steps, batch = SMALL if rehearsal else (WINDOWS, WINDOW_STEPS, BATCH)
    torch.manual_seed(0)
    images = torch.rand(batch, 3, 64, 64, device=device)
    labels = torch.randint(10, (batch,), device=device)
    step = make_step(name, device, images, labels)
    for _ in range(2 if rehearsal else 10):
        step()
    seconds = []
    for _ in range(windows):
        wait(device)
        started = time.perf_counter()
        for _ in range(steps):
            step()
        wait(device)
        seconds.append((time.perf_counter() - started) / steps)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    return {"step_seconds": statistics.median(seconds), "peak_bytes": peak}


def wait(device: Any) -> None:
    """Wait for the device."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def make_step(name: str, device: Any, images: Any, labels: Any) -> Any:
    """Return a function that trains for one step. Raises SystemExit with the reason where it cannot be made."""
    import torch
    from torch.nn.functional import cross_entropy

    from mpt.vision_ops import import_torchvision

    if name in ("mpt", GRAPHS):
        return mpt_step(
            device,
            images,
            labels,
            {"compile": {"mode": "reduce-overhead"}} if name == GRAPHS else {},
        )
    net = import_torchvision("models").resnet18(num_classes=10).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    if name == "accelerate":
        return accelerate_step(net, optimizer, device, images, labels)
    if name == "lightning":
        return lightning_step(net, optimizer, device, images, labels)
    if name == COMPILED:
        net = torch.compile(net)
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, half):
            loss = cross_entropy(net(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def mpt_step(device: Any, images: Any, labels: Any, memory: dict[str, Any]) -> Any:
    """Return mpt's own step on a run built with these settings of memory."""
    import torch

    from mpt.config.load import load_config
    from mpt.engine.building.build import build_run
    from mpt.engine.step.step import update
    from mpt.seams import DataSpec, FieldSpec

    fields = {"image": FieldSpec((3, 64, 64), torch.float32), "label": FieldSpec((), torch.int64)}
    data = DataSpec(fields, len(images), tuple(map(str, range(10))))
    sections = {
        "model": "torchvision:resnet18",
        "dataset": "digits",
        "precision": "amp",
        "optimizer": "adam",
    }
    run = build_run(
        load_config(
            {**sections, "memory": memory, "train": {"batch_size": len(images), "steps": 1}}
        ),
        device,
        data,
    )
    batch = {"image": images, "label": labels}

    def step() -> None:
        for phase in run.phases:
            update(run, phase, batch)

    return step


def accelerate_step(net: Any, optimizer: Any, device: Any, images: Any, labels: Any) -> Any:
    """Return a step under Hugging Face Accelerate."""
    if importlib.util.find_spec("accelerate") is None:
        raise SystemExit(NOT_INSTALLED)
    from accelerate import Accelerator
    from torch.nn.functional import cross_entropy

    accelerator = Accelerator(
        mixed_precision="fp16" if device.type == "cuda" else "bf16", cpu=device.type == "cpu"
    )
    net, optimizer = accelerator.prepare(net, optimizer)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with accelerator.autocast():
            loss = cross_entropy(net(images), labels)
        accelerator.backward(loss)
        optimizer.step()

    return step


def lightning_step(net: Any, optimizer: Any, device: Any, images: Any, labels: Any) -> Any:
    """Return a step under Lightning Fabric."""
    if importlib.util.find_spec("lightning") is None:
        raise SystemExit(NOT_INSTALLED)
    from lightning.fabric import Fabric
    from torch.nn.functional import cross_entropy

    on_gpu = device.type == "cuda"
    fabric = Fabric(
        accelerator="cuda" if on_gpu else "cpu",
        devices=1,
        precision="16-mixed" if on_gpu else "bf16-mixed",
    )
    net, optimizer = fabric.setup(net, optimizer)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        fabric.backward(cross_entropy(net(images), labels))
        optimizer.step()

    return step


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=CONTESTANTS)
    parser.add_argument("--rehearsal", choices=("cpu", "cuda"), default="")
    chosen = parser.parse_args()
    print(json.dumps(measure(chosen.name, chosen.rehearsal)))
