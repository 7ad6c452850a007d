"""The roofline and the host's link, with the constants' numbers written out."""

from __future__ import annotations

import pytest
import torch

from mpt.planner.device.outcomes import Cost
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.trace.allocator import GRAPHS
from mpt.planner.trace.operator_costs import cost_of
from mpt.planner.trace.time_model import Work
from mpt.planner.trace.trace import Storage, Trace

pytestmark = pytest.mark.tier("fast")

CARD = find_gpu("rtx3060")
"""360 GB/s, 12.7 TFLOP/s of float32, a link of 12 GB/s to the host."""


def seconds(**counts: int) -> float:
    """Return the time of a step of one kernel."""
    work = Work()
    work.add(counts.get("flops", 0), counts.get("moved", 0), "float32")
    return work.seconds(CARD)


def test_a_kernel_takes_its_arithmetic_its_traffic_or_its_launch_whichever_is_longest() -> None:
    assert (CARD.bandwidth, CARD.float32, CARD.host_link) == (360, 12.7, 12)
    assert seconds(moved=10**9) == pytest.approx(1e9 / (360e9 * 0.62), rel=1e-12)
    assert seconds(flops=10**12) == pytest.approx(1e12 / (12.7e12 * 0.75), rel=1e-12)
    assert seconds(flops=10**12, moved=10**9) == seconds(flops=10**12)
    assert seconds(flops=1, moved=1) == 6e-6


def test_a_copy_between_host_and_device_crosses_the_link_once_and_runs_beside_computing() -> None:
    device, host = torch.empty(1000, device="meta"), torch.empty(1000)
    copied = cost_of(torch.ops.aten.copy_.default, (device, host), {}, device)
    assert copied == Cost("link", ((0, 4000),), "float32")
    computing = 1e9 / (360e9 * 0.62)  # 4.5 ms
    for on_link, expected in ((12 * 10**6, computing), (120 * 10**6, 0.01)):  # 1 ms and 10 ms
        work = Work(host_bytes=on_link)
        work.add(0, 10**9, "float32")
        assert work.seconds(CARD) == pytest.approx(expected, rel=1e-12)


def test_an_optimizer_on_the_host_is_waited_for() -> None:
    work = Work(host_compute_bytes=30 * 10**6)  # at 15 GB/s
    work.add(0, 10**9, "float32")
    assert work.seconds(CARD) == pytest.approx(1e9 / (360e9 * 0.62) + 0.002, rel=1e-12)


def test_a_step_of_short_kernels_says_that_the_host_sets_its_pace() -> None:
    gpu, short, long = find_gpu("rtx3060"), Work(), Work()
    for work, moved in ((short, 2**10), (long, 2**26)):
        for _ in range(500):
            work.add(0, moved, "float32")
    (note,) = short.launch_notes(gpu)
    assert "500 kernels in 3 ms, 6 µs each" in note
    assert long.launch_notes(gpu) == Work().launch_notes(gpu) == []


def test_a_trace_knows_that_graphs_were_recorded_in_it() -> None:
    streams = {"eager": (0, 1), "recorded": (0, GRAPHS)}
    traces = {
        name: Trace([Storage(512, "temporaries", "", "", stream) for stream in both])
        for name, both in streams.items()
    }
    assert {name: trace.is_recorded for name, trace in traces.items()} == {
        "eager": False,
        "recorded": True,
    }
