"""The one tracker of storages: once per storage, whatever views it, until its last tensor is gone."""

import pytest
import torch

from mpt.run.process.storage_trace import LiveStorages, tensors_in

pytestmark = pytest.mark.tier("fast")


def test_a_storage_lives_until_its_last_view_is_gone():
    dead: list[int] = []
    live = LiveStorages(dead.append)
    tensor = torch.ones(4)
    live.add(tensor, 7)
    view = tensor[1:]
    assert live.number_of(view) == 7
    assert live.number_of(torch.ones(4)) is None
    del tensor
    assert dead == []
    del view
    assert dead == [7]
    assert live.numbers == {}


def test_what_is_forgotten_tells_of_no_end():
    dead: list[int] = []
    live = LiveStorages(dead.append)
    tensor = torch.ones(4)
    live.add(tensor, 0)
    live.forget()
    assert live.number_of(tensor) is None
    del tensor
    assert dead == []


def test_tensors_are_found_in_lists_tuples_and_dicts_in_order():
    one, two, three = (torch.full((), float(n)) for n in range(3))
    assert [int(t) for t in tensors_in([one, (None, {"a": two}), "x", three])] == [0, 1, 2]
