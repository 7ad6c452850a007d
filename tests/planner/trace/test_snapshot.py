"""A planned timeline as a memory snapshot: torch's own parser reads it, and it holds what the allocator's model did."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from mpt.planner.client.session import Session
from mpt.planner.trace.allocator import round_request
from mpt.planner.trace.replay import replay
from mpt.planner.trace.snapshot import make_snapshot
from mpt.planner.trace.trace import Storage, Trace
from tests.planner.configs import make

MIB = 2**20


def random_trace(seed: int, count: int = 400) -> Trace:
    """Return births and deaths of storages of all sizes on two streams."""
    numbers = random.Random(seed)
    trace, live = Trace(), list[int]()
    for number in range(count):
        size = numbers.choice([0, 4, 5000, MIB, 3 * MIB, 12 * MIB, 40 * MIB])
        category = numbers.choice(["activations", "batch", "parameters"])
        trace.storages.append(Storage(size, category, "net.layer", "aten::add"))
        trace.events.append(number)
        live.append(number)
        if numbers.random() < 0.7:
            trace.events.append(~live.pop(numbers.randrange(len(live))))
    return trace


def peak_of(entries: list[dict[str, Any]]) -> int:
    """Return the most bytes alive at once, from the entries alone."""
    live = peak = 0
    for entry in entries:
        live += {"alloc": 1, "free_completed": -1}.get(entry["action"], 0) * round_request(
            entry["size"]
        )
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_torchs_own_parser_reads_it_and_finds_what_was_reserved(
    seed: int, expandable: bool
) -> None:
    trace = random_trace(seed)
    snapshot = make_snapshot(trace, expandable=expandable)
    played = replay(trace, expandable=expandable)
    entries = snapshot["device_traces"][0]
    summary = _memory_viz.segsum(snapshot)  # which checks that blocks fill their segments
    live = sum(trace.storages[one].size for one in trace.live_at(len(trace.events)))
    assert f"segments: {len(snapshot['segments'])}" in summary
    assert sum(segment["requested_size"] for segment in snapshot["segments"]) == live
    words = ("segment_map", "segment_unmap") if expandable else ("segment_alloc", "segment_free")
    sign = {words[0]: 1, words[1]: -1}
    assert sum(sign.get(one["action"], 0) * one["size"] for one in entries) == played.reserved
    assert sum(segment["total_size"] for segment in snapshot["segments"]) == played.reserved
    assert peak_of(entries) <= played.allocated
    assert _memory_viz.trace(snapshot).startswith("Device 0 ---")
    assert _memory_viz.trace_plot(snapshot).count("<html>") == 1
    assert "net.layer aten::add" in _memory_viz.memory(
        snapshot, format_flamegraph=lambda lines: lines
    )


def test_what_does_not_fit_ends_it(tmp_path: Path) -> None:
    trace = random_trace(0)
    limit = replay(trace).allocated // 2
    snapshot = make_snapshot(trace, limit)
    last = snapshot["device_traces"][0][-1]
    assert last["action"] == "oom"
    assert "raise OutOfMemoryError #" in _memory_viz.trace(snapshot)
    assert sum(segment["total_size"] for segment in snapshot["segments"]) <= limit


def test_a_plan_writes_its_timeline_with_modules_and_operators(
    session: Session, tmp_path: Path
) -> None:
    file = tmp_path / "plan.pickle"
    plan = session.plan([make("small_cnn", "amp", 8)], snapshot=str(file))[0].get()
    snapshot = pickle.loads(file.read_bytes())
    assert peak_of(snapshot["device_traces"][0]) == plan.allocated
    names = {entry["frames"][0]["name"] for entry in snapshot["device_traces"][0]}
    assert any("aten::convolution" in name and name.startswith("net.") for name in names)
