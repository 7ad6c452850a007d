"""Gradients of a tensor that is used twice are planned to be added up where autograd adds them up.

What autograd does on its own is counted by torch's profiler of memory, here on a CPU, so with every torch of the range
and also where there is no pretended card; `tests/cuda_rehearsal/test_gradient_sums.py` counts it on one.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mpt.planner.trace.recorder import Recorder
from mpt.planner.trace.trace import Trace
from mpt.planner.trace.unseen import Unseen

COUNT = 2**16
KEPT: list[Tensor] = []


def with_hook(values: Tensor) -> Tensor:
    """Use a tensor twice, and keep the gradient of one use."""
    one = values.sin()
    one.register_hook(lambda gradient: KEPT.append(gradient))
    return one + values.cos()


class SumInBackward(torch.autograd.Function):
    """Adds two gradients in Python: out of place, as written."""

    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient * 2 + gradient * 3


USES: dict[str, Callable[[Tensor], Tensor]] = {
    "twice": lambda values: values.sin() + values.cos(),
    "three times": lambda values: values.sin() + values.cos() + values.exp(),
    "around a block": lambda values: values + values.sin(),
    "around two blocks": lambda values: (lambda first: first + first.sin())(values + values.sin()),
    "in parts": lambda values: values[: COUNT // 2].sin().sum() + values[COUNT // 2 :].cos().sum(),
    "as views": lambda values: values.view(256, -1).t().sin().sum() + values.cos().sum(),
    "summed twice": lambda values: values.sum() + values.sum(),
    "with a hook": with_hook,
    "summed in Python": SumInBackward.apply,
}


def step(use: Callable[[Tensor], Tensor], device: str, recorder: Recorder | None = None) -> None:
    """Take one forward and backward pass."""
    weight = torch.ones(COUNT, device=device, requires_grad=True)
    if recorder is not None:
        recorder.enter_moment(0, "phase", "forward")
    loss = use(weight * 2).sum()
    if recorder is not None:
        recorder.enter_moment(0, "phase", "backward")
    with torch.autograd.set_multithreading_enabled(False):
        loss.backward()  # type: ignore[no-untyped-call]


def large_births(trace: Trace) -> int:
    """Return how many storages of more than a number were made."""
    return sum(entry >= 0 and trace.storages[entry].size > 512 for entry in trace.events)


def planned_births(use: Callable[[Tensor], Tensor], device: str) -> int:
    """Return how many storages a plan would count."""
    recorder = Recorder(device, Unseen((8, 6)))
    with recorder.recording():
        step(use, device, recorder)
    return large_births(recorder.trace)


@pytest.mark.parametrize("use", USES)
def test_gradients_are_planned_to_be_added_up_in_place_where_autograd_does_so(use: str) -> None:
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profiler:
        step(USES[use], "cpu")
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    taken = [
        event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 512
    ]
    assert planned_births(USES[use], "cpu") == len(taken)
