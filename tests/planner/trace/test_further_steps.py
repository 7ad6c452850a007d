"""Steps after the traced ones: a replay that empties the cache gets through them too, or does not fit."""

from __future__ import annotations

import random

import pytest

from mpt.planner.trace.allocator import CachingAllocator
from mpt.planner.trace.further_steps import MOST, repeated_step
from mpt.planner.trace.replay import replay
from mpt.planner.trace.trace import EMPTIED, Span, Storage, Trace
from tests.planner.configs import DIGITS, UNET, make
from tests.planner.cpu_truth import trace_real

MIB = 2**20


class Steps:
    """A training of as many steps as wanted: activations and gradients of the given sizes in MiB.

    A batch is loaded a step ahead, gradients of the step before die after the forward, states come in the first step.
    With `gives_back` the cache is emptied between forward and backward.
    """

    def __init__(
        self,
        activations: list[int],
        gradients: list[int],
        steps: int,
        scratch: int = 12,
        gives_back: bool = False,
    ) -> None:
        self.trace = Trace(spans=[Span(0, 0, "", "build")])
        weights = [self.born(size, "parameters") for size in gradients]
        following, old = self.born(2, "batch"), list[int]()
        for step in range(steps):
            self.trace.spans.append(Span(len(self.trace.events), step, "", "forward"))
            batch, following = following, self.born(2, "batch")
            made = [self.born(size, "activations") for size in activations]
            self.die(*old)
            old = []
            if gives_back:
                self.trace.events.append(len(self.trace.storages))
                self.trace.storages.append(Storage(0, "temporaries", "", EMPTIED))
            for size in gradients:
                temporary = self.born(scratch, "temporaries")
                old.append(self.born(size, "gradients"))
                self.die(temporary, made.pop())
            if step == 0:
                for _ in weights:
                    self.born(1, "optimizer state")
            self.die(batch)
        self.trace.spans.append(Span(len(self.trace.events), steps - 1, "", "after the step"))
        self.die(following)

    def born(self, size: int, category: str) -> int:
        number = len(self.trace.storages)
        self.trace.storages.append(Storage(size * MIB, category, "net", "aten::mul"))
        self.trace.events.append(number)
        return number

    def die(self, *numbers: int) -> None:
        self.trace.events += [~number for number in numbers]


def without_spans(trace: Trace) -> Trace:
    """Return the trace as one stretch, of which no step is repeated."""
    return Trace(trace.storages, trace.events)


def test_a_step_that_gets_through_twice_and_runs_out_in_the_third_does_not_fit() -> None:
    trace = Steps([12, 16], [12, 12], steps=2).trace
    twice = replay(without_spans(trace), 102 * MIB)
    assert (twice.fits, twice.retries) == (True, 1)
    assert not replay(without_spans(Steps([12, 16], [12, 12], steps=3).trace), 102 * MIB).fits
    assert not replay(trace, 102 * MIB).fits


def test_a_step_that_empties_the_cache_and_settles_fits() -> None:
    trace = Steps([12, 12], [12, 16], steps=2).trace
    found = replay(trace, 106 * MIB)
    assert found.fits
    assert found.retries == 2
    assert found == replay(without_spans(trace), 106 * MIB)


@pytest.mark.parametrize("gives_back", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_further_steps_are_those_of_a_longer_training(seed: int, gives_back: bool) -> None:
    numbers = random.Random(seed)
    count = numbers.randrange(2, 6)
    activations = [numbers.choice([3, 12, 15, 17, 21, 24, 32, 41]) for _ in range(count)]
    gradients = [numbers.choice([3, 9, 12, 16, 20, 24, 30]) for _ in range(count)]
    two, more = (
        Steps(activations, gradients, steps, gives_back=gives_back).trace for steps in (2, 2 + MOST)
    )
    free = replay(two)
    for capacity in range(free.allocated, free.reserved, 4 * MIB):
        assert replay(two, capacity).fits == replay(without_spans(more), capacity).fits


def test_with_room_enough_nothing_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Steps([12, 16], [12, 12], steps=2).trace
    free = replay(trace)
    requests: list[int] = []
    serve = CachingAllocator.malloc

    def noted(self: CachingAllocator, key: int, size: int, stream: int = 0) -> None:
        requests.append(key)
        serve(self, key, size, stream)

    monkeypatch.setattr(CachingAllocator, "malloc", noted)
    assert replay(trace, free.reserved) == free
    assert len(requests) == len(trace.storages)


def test_only_a_second_step_that_leaves_what_it_found_is_repeated() -> None:
    trace = Steps([12, 16], [12, 12], steps=2).trace
    requests = [(storage.size, 0) for storage in trace.storages]
    step = repeated_step(trace, requests)
    assert step is not None
    categories = [trace.storages[old].category for old in sorted(step.heirs)]
    assert categories == ["batch", "gradients", "gradients"]
    trace.storages[max(step.heirs.values())].operator = "aten::add"  # what made it is no matter
    assert repeated_step(trace, requests) == step
    first = Steps([12, 16], [12, 12], steps=1).trace
    assert repeated_step(first, [(storage.size, 0) for storage in first.storages]) is None
    assert repeated_step(without_spans(trace), requests) is None
    grown = list(requests)
    grown[max(step.heirs.values())] = (13 * MIB, 0)
    assert repeated_step(trace, grown) is None
    trace.storages[0].stream = 2**20
    assert repeated_step(trace, requests) is None


def test_a_trainings_own_second_step_is_repeated() -> None:
    """On real tensors, which die in the same order."""
    trace = trace_real(make(UNET), DIGITS, batch_size=8)
    step = repeated_step(trace, [(storage.size, storage.stream) for storage in trace.storages])
    assert step is not None
    assert "batch" in {trace.storages[old].category for old in step.heirs}
