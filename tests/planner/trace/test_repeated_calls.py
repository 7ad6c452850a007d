"""Repeated calls of a network are recorded again: the same births and deaths as if it had been executed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from mpt.planner.trace.recorder import Recorder
from mpt.planner.trace.repeated_calls import RepeatedCalls
from mpt.planner.trace.trace import Trace


class Counted(nn.Module):
    """Counts how often it is executed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
        self.executed = 0

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.executed += 1
        return {"answer": self.layers(x), "mean": x.mean(dim=1)}


class Keeps(Counted):
    """Holds on to what it made last."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = super().forward(x)
        self.last = found["answer"] * 2
        return found


class Grows(Counted):
    """Makes a larger tensor at each call."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = super().forward(x)
        x.new_zeros(self.executed * 100)
        return found


class Parts(Counted):
    """Returns a part of a larger tensor."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"answer": super().forward(x)["answer"][:, :4]}


def births_and_deaths(trace: Trace) -> Iterator[tuple[int, str, str]]:
    """Yield each birth's size, module and operator, and the place of the birth of each death."""
    born = {}
    for place, entry in enumerate(trace.events):
        if entry >= 0:
            born[entry] = place
            one = trace.storages[entry]
            yield one.size, one.module, one.operator
        else:
            yield ~born[~entry], "", ""


def record(network: Counted, sizes: list[int], is_repeating: bool) -> list[tuple[int, str, str]]:
    recorder = Recorder("cpu")
    with FakeTensorMode(allow_non_fake_inputs=True), recorder.recording(), torch.no_grad():
        network.layers.to_empty(device="cpu")
        repeating: AbstractContextManager[None] = (
            RepeatedCalls(recorder).repeating() if is_repeating else nullcontext()
        )
        kept = []
        with repeating:
            for size in sizes:
                x = torch.zeros(size, 8)
                kept.append(network(x)["answer"])
                assert kept[-1].shape[0] == size
        kept.pop(0)
        del x
    return list(births_and_deaths(recorder.trace))


@pytest.mark.parametrize(
    ("kind", "executed"),
    [(Counted, 2), (Keeps, 6), (Grows, 6), (Parts, 6)],
    ids=lambda one: str(one),
)
def test_what_a_repeated_call_allocates_is_recorded_as_if_it_were_executed(
    kind: type[Counted], executed: int
) -> None:
    repeated, whole = kind(), kind()
    assert record(repeated, [4] * 6, True) == record(whole, [4] * 6, False)
    assert (repeated.executed, whole.executed) == (executed, 6)


def test_other_forms_are_executed() -> None:
    repeated, whole = Counted(), Counted()
    sizes = [4, 6, 4, 6, 4, 6]
    assert record(repeated, sizes, True) == record(whole, sizes, False)
    assert repeated.executed == 4


def test_calls_with_gradients_are_executed() -> None:
    network, recorder = Counted(), Recorder("cpu")
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        recorder.recording(),
        RepeatedCalls(recorder).repeating(),
    ):
        for _ in range(4):
            network(torch.zeros(4, 8))
    assert network.executed == 4
