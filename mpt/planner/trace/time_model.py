"""Step time from a roofline: every operator is as slow as its arithmetic, its memory traffic or its launch.

time = max(flops / (efficiency * peak of the dtype), bytes / (efficiency * bandwidth), launch). Floating-point
operations come from torch's own flop counter, bytes from the operator's tensors. Ranking recipes of one model works
(five published rows on a V100 in the right order, at most 6 % off); absolute times are off by about 20 % between
models, so a band is printed. Source: Williams, Waterman & Patterson, "Roofline", 2009.

Copies between host and device overlap with computing when they are asynchronous, as offloading makes them: the step
takes the longer of the two.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from mpt.planner.device.outcomes import Cost, Outcome
from mpt.planner.facts.gpus import Gpu
from mpt.run.process.storage_trace import tensors_in

BAND = 0.25
ARITHMETIC_SHARE = 0.6
BANDWIDTH_SHARE = 0.75
LAUNCH_SECONDS = 6e-6
HALF = (torch.float16, torch.bfloat16)
VIEWS = (
    "view reshape _reshape_alias expand permute transpose t slice select unsqueeze squeeze detach alias as_strided "
    "_unsafe_view split split_with_sizes unbind chunk empty empty_like empty_strided new_empty new_empty_strided "
    "lift_fresh _local_scalar_dense unfold narrow view_as_real view_as_complex diagonal numpy_T movedim"
)
FREE = frozenset(VIEWS.split(" "))
"""Operators that launch nothing."""


@dataclass(frozen=True)
class Efficiency:
    """How much of the datasheet an operator gets; a calibration replaces it."""

    arithmetic: float = ARITHMETIC_SHARE
    bandwidth: float = BANDWIDTH_SHARE
    launch_seconds: float = LAUNCH_SECONDS


NO_COST = Cost("nowhere", 0, 0, False)


@dataclass
class Work:
    """The operators of one step: how often each (flops, bytes, half) occurs, and bytes over the host link."""

    operators: defaultdict[tuple[int, int, bool], float] = field(default_factory=lambda: defaultdict(float))
    host_bytes: float = 0
    host_compute_bytes: float = 0
    """Bytes that the host's own processor reads and writes, for optimizers that live there."""
    uses_tf32: bool = False
    share: float = 1.0
    """Of the steps, those in which what is observed now happens: a penalty every 16 steps is a sixteenth of each."""

    def observe(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, outcome: Outcome | None = None
    ) -> None:
        """Add one operator. A `mpt.planner.trace.trace.Observer`. `outcome` keeps its cost for the next like it."""
        cost = None if outcome is None else outcome.cost
        if cost is None:
            cost = cost_of(func, args, kwargs, result)
            if outcome is not None:
                outcome.cost = cost
        if cost.place == "device":
            self.add(cost.flops, cost.moved, cost.half)
        elif cost.place == "link":
            self.host_bytes += self.share * cost.moved
        elif cost.place == "host":
            self.host_compute_bytes += self.share * cost.moved

    def add(self, flops: int, moved: int, half: bool) -> None:
        """Count an operator of the device."""
        self.operators[flops, moved, half] += self.share

    def seconds(self, gpu: Gpu, efficiency: Efficiency = Efficiency()) -> float:
        """Return the time of one step on a GPU."""
        total = 0.0
        for (flops, moved, half), count in self.operators.items():
            total += count * self.operator_seconds(gpu, flops, moved, half, efficiency)
        on_link = self.host_bytes / (gpu.host_link * 1e9)
        return max(total, on_link) + self.host_compute_bytes / HOST_BANDWIDTH

    def operator_seconds(
        self, gpu: Gpu, flops: int, moved: int, half: bool, efficiency: Efficiency = Efficiency()
    ) -> float:
        """Return the time of one operator on a GPU."""
        peak = gpu.half if half else (gpu.tf32 or gpu.float32) if self.uses_tf32 else gpu.float32
        arithmetic = flops / (peak * 1e12 * efficiency.arithmetic)
        traffic = moved / (gpu.bandwidth * 1e9 * efficiency.bandwidth)
        return max(arithmetic, traffic, efficiency.launch_seconds)


def cost_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Cost:
    """Return the seconds of an operator's call. They follow from the forms of its tensors."""
    is_free, count_flops = _costs(func)
    if is_free:
        return NO_COST
    inputs = [*tensors_in(args), *tensors_in(kwargs)]
    tensors = [*inputs, *tensors_in(result)]
    if not tensors:
        return NO_COST
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    moved = sum(sizes)
    devices = {tensor.device.type for tensor in tensors if tensor.dim()}
    if "cpu" in devices:
        # A copy crosses once, however many of its tensors the operator names: `copy_` returns what it was given.
        return Cost("link", 0, max(sizes), False) if len(devices) > 1 else Cost("host", 0, moved, False)
    flops = 0 if count_flops is None else int(count_flops(*args, **kwargs, out_val=result))
    return Cost("device", flops, moved, any(tensor.dtype in HALF for tensor in inputs))


@functools.cache
def _costs(func: Any) -> tuple[bool, Callable[..., Any] | None]:
    """Return whether an operator launches nothing, and what counts its floating-point operations, if it has many."""
    return func._schema.name.removeprefix("aten::") in FREE, flop_registry.get(func._overloadpacket)


HOST_BANDWIDTH = 15e9
"""Bytes per second of an ordinary host's memory under an elementwise optimizer."""
