"""The plan checked against the truth that a CPU can tell: the same step on real tensors.

Two references. The same recorder around real tensors shows whether fake ones are born and die alike; PyTorch's
profiler shows what the CPU's allocator really handed out, scratch inside kernels included. Neither knows a GPU's
routes: those are checked against published measurements (`scripts/check_plan.py`).
"""

from __future__ import annotations

import gc
import json
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from mpt.config.schema import Config
from mpt.engine.build import build_run
from mpt.plan.run_fake import perform_steps
from mpt.plan.trace import Recorder, Trace
from mpt.seams import DataSpec

CPU = torch.device("cpu")


def trace_real(config: Config, data: DataSpec, batch_size: int) -> Trace:
    """Build and step a configuration on real CPU tensors under the recorder."""
    recorder = Recorder("cpu")
    with torch.autograd.set_multithreading_enabled(False), recorder.recording():
        run = build_run(config, CPU, data)
        perform_steps(run, recorder, batch_size)
    return recorder.trace


def profiled_peak(config: Config, data: DataSpec, batch_size: int) -> int:
    """Return the most bytes that the CPU's allocator had handed out at once for build and steps, by torch.profiler."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run = build_run(config, CPU, data)
        perform_steps(run, Recorder("cpu"), batch_size)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
    totals = [
        (event["ts"], event["args"]["Total Allocated"], event["args"]["Bytes"])
        for event in events
        if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0
    ]
    totals.sort()
    before = totals[0][1] - totals[0][2]
    return int(max(total for _, total, _ in totals) - before)
