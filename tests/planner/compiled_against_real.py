"""Run as a program: compare planned `memory.compile` with real compiled steps on this CPU.

`python -m tests.planner.compiled_against_real [few]`. `aot_eager` needs nothing, `inductor` a C++ compiler and minutes.
Each real step runs in a process of its own, since planning registers a device for good. What the allocator handed out
within one matrix product, convolution or foreach operator is left out, as in `tests.planner.cpu_truth`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from mpt.engine.building.build import build_run
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.step.run_fake import perform_steps, trace_config
from mpt.planner.trace.recorder import Recorder
from mpt.planner.trace.trace import live_peak
from tests.planner.against_real import MOBILENET, RESNET, prepare
from tests.planner.configs import UNET, VIT
from tests.planner.cpu_truth import CPU, OPERATOR, read_record

NETWORKS: list[tuple[str, str, bool]] = [
    ("small_cnn", "fp32", True),
    (RESNET, "fp32", True),
    (VIT, "fp32", True),
    (UNET, "fp32", False),
    ("dcgan", "fp32", False),
    (VIT, "amp", True),
    (MOBILENET, "fp32", True),
    ("saehd_demo.yaml", "fp32", True),
]
FEW = NETWORKS[3:5]
"""What the tests take."""
SCRATCH = (
    "aten::convolution",
    "aten::mkldnn",
    "aten::addmm",
    "aten::mm",
    "aten::bmm",
    "aten::_foreach",
    "mkldnn::",
)


def planned(name: str, mode: str, backend: str | None, is_deep: bool) -> tuple[int, list[str]]:
    """Return the peak of live tensors in bytes that is planned on a CPU, and the plan's notes."""
    memory = {} if backend is None else {"compile": {"backend": backend}}
    config, data, batch_size = prepare((name, mode, memory), is_deep)
    found = trace_config(config, data, batch_size, find_gpu("rtx3060"), None, CPU)
    return live_peak(found.trace), found.notes


def measure(name: str, mode: str, backend: str, is_deep: bool) -> int:
    """Take two real steps and return the most bytes that tensors held."""
    config, data, batch_size = prepare((name, mode, {"compile": {"backend": backend}}), is_deep)
    with (
        torch.autograd.set_multithreading_enabled(False),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        perform_steps(build_run(config, CPU, data), Recorder("cpu"), batch_size)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
    for event in events:
        if event.get("cat") == "cpu_op" and event["name"].startswith(SCRATCH):
            event["name"] = OPERATOR
    return read_record(events).tensors


def compare(name: str, mode: str, backend: str, is_deep: bool) -> dict[str, Any]:
    """Return planned and measured peaks in bytes; `eager` is the plan without the compiler."""
    words = [
        sys.executable,
        "-m",
        __spec__.name,
        "--measure",
        json.dumps([name, mode, backend, is_deep]),
    ]
    ended = subprocess.run(words, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{name} {backend}: {ended.stderr.strip()[-600:]}")
    peak, notes = planned(name, mode, backend, is_deep)
    return {
        "name": f"{name.rpartition(':')[2].removesuffix('.yaml')} {mode}",
        "backend": backend,
        "eager": planned(name, mode, None, is_deep)[0],
        "planned": peak,
        "measured": int(ended.stdout.rpartition("PEAK ")[2]),
        "notes": notes,
    }


def main() -> None:
    """Print a row for each network and backend."""
    warnings.simplefilter("ignore")
    if "--measure" in sys.argv:
        print(f"PEAK {measure(*json.loads(sys.argv[-1]))}")
        return
    backends = ("aot_eager",) if "few" in sys.argv else ("aot_eager", "inductor")
    print(
        "| Network | Backend | Eager MiB | Planned | Measured | Error |\n|---|---|---:|---:|---:|---:|",
        flush=True,
    )
    for backend in backends:
        for name, mode, is_deep in FEW if "few" in sys.argv else NETWORKS:
            row = compare(name, mode, backend, is_deep)
            sizes = " | ".join(
                f"{row[key] / 2**20:.1f}" for key in ("eager", "planned", "measured")
            )
            print(
                f"| {row['name']} | {backend} | {sizes} | {row['planned'] / row['measured'] - 1:+.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
