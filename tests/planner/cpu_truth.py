"""The plan checked against the truth that a CPU can tell: the same step on real tensors.

Two references. The same recorder around real tensors shows whether fake ones are born and die alike; PyTorch's
profiler shows what the CPU's allocator handed out and took back, whoever asked. Neither knows a GPU's routes: those
are checked against published measurements (`scripts/plans/check_plan.py`).

The allocator's record also holds what a CPU kernel asks for and gives back before its operator ends, such as oneDNN's
reordered copies of a convolution's weights and feature maps. A plan knows none of it, and a GPU's kernels have their
own, so `Record` tells the peak with and without.
"""

from __future__ import annotations

import bisect
import gc
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from mpt.config.schema import Config
from mpt.engine.building.build import build_run
from mpt.planner.step.run_fake import perform_steps
from mpt.planner.trace.recorder import Recorder
from mpt.planner.trace.trace import Trace
from mpt.seams import DataSpec

CPU = torch.device("cpu")
OPERATOR = "tests.planner.cpu_truth operator"


@dataclass(frozen=True)
class Record:
    """Peaks in bytes of what the CPU's allocator had handed out."""

    peak: int
    """With everything."""
    tensors: int
    """Without what was taken and given back within one operator."""


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Marks every operator in the profile, at the level at which the planner's recorder sees it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with record_function(OPERATOR):
            return func(*args, **(kwargs or {}))


def trace_real(config: Config, data: DataSpec, batch_size: int, batch_ahead: bool = True) -> Trace:
    """Build and step a configuration on real CPU tensors under the recorder."""
    recorder = Recorder("cpu")
    with torch.autograd.set_multithreading_enabled(False), recorder.recording():
        run = build_run(config, CPU, data)
        perform_steps(run, recorder, batch_size, batch_ahead=batch_ahead)
    return recorder.trace


def profile_peak(config: Config, data: DataSpec, batch_size: int) -> Record:
    """Build and step a configuration on real CPU tensors and return torch.profiler's record of the allocator."""
    return profiled(
        lambda: perform_steps(build_run(config, CPU, data), Recorder("cpu"), batch_size)
    )


def profiled(work: Callable[[], Any]) -> Record:
    """Return torch.profiler's record of the CPU's allocator during some work."""
    gc.collect()
    with (
        torch.autograd.set_multithreading_enabled(False),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
        _Operators(),  # type: ignore[no-untyped-call]
    ):
        work()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_record(json.loads(path.read_text("utf-8"))["traceEvents"])


def read_record(events: list[dict[str, Any]]) -> Record:
    """Return the peaks of a profile's events, relative to what was in use when it began."""
    operators = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("name") == OPERATOR
    )
    starts = [start for start, _ in operators]
    changes = sorted(
        (
            (event["ts"], event["args"]["Addr"], event["args"]["Bytes"])
            for event in events
            if event.get("name") == "[memory]" and event["args"].get("Device Type") == 0
        ),
        key=lambda change: float(change[0]),
    )
    born: dict[int, int] = {}  # address -> index of the change that handed it out
    scratch: set[int] = set()
    for index, (moment, address, size) in enumerate(changes):
        if size > 0:
            born[address] = index
        elif address in born:
            birth = born.pop(address)
            operator = bisect.bisect_right(starts, changes[birth][0]) - 1
            if operator >= 0 and changes[birth][0] <= operators[operator][1] >= moment:
                scratch |= {birth, index}
    everything = tensors = peak = peak_tensors = 0
    for index, (_, _, size) in enumerate(changes):
        everything += size
        tensors += 0 if index in scratch else size
        peak, peak_tensors = max(peak, everything), max(peak_tensors, tensors)
    return Record(int(peak), int(peak_tensors))
