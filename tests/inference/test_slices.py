"""Results of several processes, of which the first have a batch more, come out in the order of one process."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from mpt.inference import slices
from mpt.inference.slices import Work, infer_all

pytestmark = pytest.mark.tier("fast")


class Inline:
    """A pool whose work is done at once, here."""

    def __init__(self, *options: Any) -> None: ...

    def __enter__(self) -> Inline:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def submit(self, function: Any, *words: Any) -> Any:
        """Return what is there already."""
        return SimpleNamespace(result=lambda: function(*words))


@pytest.mark.parametrize(("processes", "batches"), [(1, 5), (2, 5), (3, 7), (3, 2)])
def test_batches_come_in_the_order_of_one_process(
    processes: int, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def part(first: int, every: int) -> list[int]:
        return list(range(first, batches, every))

    monkeypatch.setattr(slices, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(
        slices, "batches_of", lambda trained, work, first, every: part(first, every)
    )
    monkeypatch.setattr(slices, "infer_part", lambda work, device, rank, count: part(rank, count))
    trained: Any = None
    assert infer_all(trained, Work((), 1, batches), ["cpu"] * processes) == list(range(batches))


def slow(*words: Any) -> list[int]:
    """Stand for a part that takes long, in a process of its own."""
    time.sleep(60)
    return []


def test_an_interrupt_does_not_wait_for_the_parts_of_other_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*words: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(slices, "batches_of", interrupted)
    monkeypatch.setattr(slices, "infer_part", slow)
    trained: Any = None
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        infer_all(trained, Work((), 1, 1), ["cpu", "cpu"])
    assert time.monotonic() - started < 30
