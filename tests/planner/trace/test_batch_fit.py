"""Sizes at any batch, of two traces: scratch that is on no line."""

from __future__ import annotations

import pytest

from mpt.planner.trace.batch_fit import fit
from mpt.planner.trace.trace import Storage, Trace

pytestmark = pytest.mark.tier("fast")


def at(tensor: int, parts: int, rows: int) -> Trace:
    storages = [
        Storage(tensor, "activations", "", "aten::relu"),
        Storage(parts, "workspace", "", "aten::sum"),
        Storage(rows, "workspace", "", "aten::embedding_dense_backward"),
    ]
    return Trace(storages, [0, 1, ~1, 2, ~2])


def test_scratch_that_begins_or_ends_growing_is_taken_as_the_larger_of_two() -> None:
    found = fit(at(100, 1, 1), 4, at(200, 5000, 3000), 8)
    assert found is not None
    assert [found.sizes(batch) for batch in (4, 8, 16)] == [
        [100, 5000, 3000],
        [200, 5000, 3000],
        [400, 5000, 3000],
    ]


def test_scratch_that_grows_with_the_batch_is_on_its_line() -> None:
    found = fit(at(100, 5000, 1500), 4, at(200, 5000, 3000), 8)
    assert found is not None
    assert found.sizes(16) == [400, 5000, 6000]


def test_a_tensor_that_grows_faster_than_the_batch_is_on_none() -> None:
    assert fit(at(100, 1, 1), 4, at(400, 1, 1), 8) is None
