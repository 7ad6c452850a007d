"""Samples of several sizes: a batch holds one, no sample is left out, and a step's batch follows from its number."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from mpt.data.loading.groups import cut, grouped_order
from mpt.data.loading.loader import Loader
from mpt.errors import DataError
from mpt.seams import Batch, Dataset, DataSpec, FieldSpec

pytestmark = pytest.mark.tier("fast")
GROUPS = [0] * 5 + [1] * 2 + [2] * 4


class Sized(Dataset):
    """Sample number n is a square of the number, as large as its group says."""

    spec = DataSpec({"x": FieldSpec((3, 3), torch.float32)}, len(GROUPS))

    def groups(self) -> Sequence[int]:
        return GROUPS

    def class_labels(self) -> Sequence[int]:
        return GROUPS

    def fetch(self, indices: Sequence[int], epoch: int) -> Batch:
        side = GROUPS[indices[0]] + 1
        return {
            "x": torch.stack(
                [torch.full((side, side), float(n)) for n in indices if GROUPS[n] + 1 == side]
            )
        }


def numbers(batch: Batch) -> list[int]:
    found: list[int] = batch["x"][:, 0, 0].int().tolist()
    return found


def test_no_batch_is_cut_across_two_groups() -> None:
    assert cut(11, GROUPS, 3) == [range(3), range(3, 5), range(5, 7), range(7, 10), range(10, 11)]
    assert cut(7, None, 3) == [range(3), range(3, 6), range(6, 7)]


def test_an_epoch_has_whole_batches_of_one_size_and_every_sample() -> None:
    loader = Loader(Sized(), 3, seed=0)
    assert loader.steps_per_epoch == 5
    stream = loader.batches()
    first, second = ([numbers(next(stream)) for _ in range(5)] for _ in range(2))
    for epoch in (first, second):
        assert all(len(batch) == 3 for batch in epoch)
        assert {n for batch in epoch for n in batch} == set(range(11))
    assert first != second
    assert [
        numbers(batch) for batch, _ in zip(loader.batches(7), range(3), strict=False)
    ] == second[2:]


def test_a_group_smaller_than_a_batch_comes_several_times_in_it() -> None:
    assert sorted(grouped_order([0], 4, torch.Generator())) == [0, 0, 0, 0]


def test_an_evaluation_has_every_sample_once_and_ranks_share_the_batches() -> None:
    loader = Loader(Sized(), 3, seed=0)
    assert [n for batch in loader.evaluation_batches() for n in numbers(batch)] == list(range(11))
    parts = [[numbers(batch) for batch in loader.evaluation_batches(rank, 2)] for rank in range(2)]
    assert sorted(n for part in parts for batch in part for n in batch) == list(range(11))


def test_classes_of_several_sizes_are_not_balanced() -> None:
    with pytest.raises(DataError, match=r"dataset.sampling=balanced: .* several sizes"):
        Loader(Sized(), 3, seed=0, sampling="balanced")
