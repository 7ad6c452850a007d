"""Gradients of a tensor that is used twice are planned to be added up where a card adds them up.

The recorder watches the pretend card's own backward pass: what it would plan, and what was allocated without it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mpt.planner import releases
from mpt.planner.trace import Recorder, Trace
from mpt.planner.unseen import Unseen

MIB = 2**20
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
    "in parts": lambda values: values[: MIB // 2].sin().sum() + values[MIB // 2 :].cos().sum(),
    "as views": lambda values: values.view(1024, 1024).t().sin().sum() + values.cos().sum(),
    "summed twice": lambda values: values.sum() + values.sum(),
    "with a hook": with_hook,
    "summed in Python": SumInBackward.apply,
}


def step(use: Callable[[Tensor], Tensor], recorder: Recorder | None = None) -> None:
    """Take one forward and backward pass."""
    weight = torch.ones(MIB, device="cuda", requires_grad=True)
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


@pytest.mark.parametrize("use", USES)
def test_gradients_are_added_up_in_place_where_the_card_does_so(use: str) -> None:
    from tests.cuda_rehearsal.device_memory import CardMemory

    taken: list[int] = []
    malloc = CardMemory.malloc

    def noted(self: CardMemory, key: int, size: int, stream: int) -> str:
        taken.append(size)
        return malloc(self, key, size, stream)

    CardMemory.malloc = noted  # type: ignore[method-assign]
    step(USES[use])
    recorder = Recorder("cuda", Unseen((8, 6)))
    wanted = sum(size > 512 for size in taken)
    with recorder.recording():
        step(USES[use], recorder)
    assert large_births(recorder.trace) == wanted


def test_before_torch_2_0_a_sum_is_planned_as_a_third_tensor() -> None:
    births = []
    for release in (None, (2, 0), (1, 13)):
        recorder = Recorder("cuda", Unseen((8, 6)))
        with releases.planning_as(release), recorder.recording():
            step(USES["three times"], recorder)
        births.append(large_births(recorder.trace))
    assert births == [births[0], births[0], births[0] + 2]
    assert [route.name for route in releases.taken_routes()] == ["sums of gradients"]
