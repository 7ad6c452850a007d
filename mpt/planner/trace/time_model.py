"""Step time from a roofline: every kernel is as slow as its arithmetic, its memory traffic or its launch.

time = max(flops / (share * peak of the dtype), bytes / (share * bandwidth), launch). Which kernels an operator launches
is in `mpt.planner.trace.operator_costs`. Both shares are fitted to half of timm's tables of training speeds, and how
many of the other half's times lie in the printed band is in docs/benchmarks/timm_times.md. Source: Williams,
Waterman & Patterson, "Roofline", 2009.

Copies between host and device overlap with computing when they are asynchronous, as offloading makes them: the step
takes the longer of the two.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch

from mpt.planner.device.outcomes import Outcome, Unit
from mpt.planner.facts.gpus import Gpu
from mpt.planner.facts.time_band import (
    BAND,
    FAST_BAND,
    FAST_MEMORY,
    UNCERTAIN_BAND,
    UNCERTAIN_SHARE,
)
from mpt.planner.trace.convolution_workspaces import convolutions_in_tf32
from mpt.planner.trace.operator_costs import cost_of

ARITHMETIC_SHARE = 0.75
"""Of the datasheet's arithmetic that an operator gets."""
CHANNEL_ELEMENTS = 1.9e9
"""Elements of its channel that a block of threads normalizes in a second, on any card: 482 shapes of a batch
normalization on an H100 took 0.87 of the time that follows from it (docs/benchmarks/own_steps_card.md)."""
BANDWIDTH_SHARE = 0.62
"""Of the datasheet's bandwidth that an operator gets."""
LAUNCH_SECONDS = 6e-6


@dataclass
class Work:
    """The operators of one step: how often each (flops, bytes, unit) occurs, and bytes over the host link."""

    operators: defaultdict[tuple[int, int, Unit], float] = field(
        default_factory=lambda: defaultdict(float)
    )
    host_bytes: float = 0
    host_compute_bytes: float = 0
    """Bytes that the host's own processor reads and writes, for optimizers that live there."""
    uncertain: set[tuple[int, int, Unit]] = field(default_factory=set)
    """Those of `operators` whose published times are spread widely."""
    products_in_tf32: bool = False
    convolutions_in_tf32: bool = False
    """Which float32 products the switches of torch allow to be in TF32."""
    share: float = 1.0
    """The share of steps that have the work observed now: a penalty every 16 steps is a sixteenth of each."""

    def read_switches(self) -> None:
        """Note which float32 products may be in TF32 by torch's switches, as they are now.

        The older switches cannot be read once the newer ones were set.
        """
        backends: Any = torch.backends  # whose newer members torch does not declare
        self.products_in_tf32 = backends.cuda.matmul.fp32_precision == "tf32"
        self.convolutions_in_tf32 = convolutions_in_tf32()

    def observe(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        outcome: Outcome | None = None,
    ) -> None:
        """Add one operator. A `mpt.planner.trace.recorder.Observer`. `outcome` keeps its cost for the next like it."""
        cost = None if outcome is None else outcome.cost
        if cost is None:
            cost = cost_of(func, args, kwargs, result)
            if outcome is not None:
                outcome.cost = cost
        for flops, moved in cost.kernels:
            if cost.place == "device":
                self.add(flops, moved, cost.unit)
                if cost.is_uncertain:
                    self.uncertain.add((flops, moved, cost.unit))
            elif cost.place == "link":
                self.host_bytes += self.share * moved
            else:
                self.host_compute_bytes += self.share * moved

    def add(self, flops: int, moved: int, unit: Unit) -> None:
        """Count a kernel of the device."""
        self.operators[flops, moved, unit] += self.share

    def include(self, other: Work) -> None:
        """Count all of another's operators too."""
        for key, count in other.operators.items():
            self.operators[key] += self.share * count
        self.host_bytes += self.share * other.host_bytes
        self.host_compute_bytes += self.share * other.host_compute_bytes
        self.uncertain |= other.uncertain

    def seconds(self, gpu: Gpu) -> float:
        """Return the time of one step on a GPU."""
        total = 0.0
        for (flops, moved, unit), count in self.operators.items():
            total += count * self.operator_seconds(gpu, flops, moved, unit)
        on_link = self.host_bytes / (gpu.host_link * 1e9)
        return max(total, on_link) + self.host_compute_bytes / HOST_BANDWIDTH

    def band(self, gpu: Gpu) -> float:
        """Return the share of published times by which planned ones may differ from them."""
        usual = FAST_BAND if gpu.bandwidth > FAST_MEMORY else BAND
        if not self.uncertain:
            return usual
        times = {
            key: count * self.operator_seconds(gpu, *key) for key, count in self.operators.items()
        }
        share = sum(times.get(key, 0.0) for key in self.uncertain) / sum(times.values())
        return UNCERTAIN_BAND if share >= UNCERTAIN_SHARE else usual

    def kernels(self, gpu: Gpu) -> float:
        """Return how many kernels a step launches on a GPU."""
        return sum(n for key, n in self.operators.items() if self.operator_seconds(gpu, *key))

    def launch_notes(self, gpu: Gpu) -> list[str]:
        """Return the warning, if it is due, that the host and not the card will set the step's pace."""
        kernels, seconds = self.kernels(gpu), self.seconds(gpu)
        if not kernels or seconds >= HOST_LAUNCH_SECONDS * kernels:
            return []
        return [
            f"{kernels:,.0f} kernels in {1000 * seconds:.3g} ms, {1e6 * seconds / kernels:.0f} µs each: a host that "
            "takes longer to launch one sets the pace of the step, whatever the card"
        ]

    def operator_seconds(self, gpu: Gpu, flops: int, moved: int, unit: Unit) -> float:
        """Return the time of one kernel on a GPU; 0 of a copy of a layout that is not made there."""
        traffic = moved / (gpu.bandwidth * 1e9 * BANDWIDTH_SHARE)
        if unit == "channel":
            return max(flops / CHANNEL_ELEMENTS, traffic, LAUNCH_SECONDS)
        is_convolution = unit == "convolution"
        in_tf32 = self.convolutions_in_tf32 if is_convolution else self.products_in_tf32
        if is_convolution and not flops and (not in_tf32 or gpu.tf32 <= gpu.float32):
            return 0.0
        peak = gpu.half if unit == "half" else (in_tf32 and gpu.tf32) or gpu.float32
        arithmetic = flops / (peak * 1e12 * ARITHMETIC_SHARE)
        return max(arithmetic, traffic, LAUNCH_SECONDS)


HOST_LAUNCH_SECONDS = 26e-6
"""A kernel of 63 training steps took the host of an H200 as long as this or longer, Python and autograd included
(docs/benchmarks/own_steps_card.md)."""
HOST_BANDWIDTH = 15e9
"""Bytes per second of an ordinary host's memory under an elementwise optimizer."""
