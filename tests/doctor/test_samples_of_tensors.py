"""Samples of large tensors: more elements than float32 counts exactly (2**24)."""

import pytest
import torch

from mpt.doctor import rank_steps
from mpt.doctor.instrument import SAMPLE, sample_of

LARGE = 21_233_664
"""Attention of four samples over 2,304 tokens; as a float32 number its last index rounds to its size."""


@pytest.mark.parametrize("count", [1, SAMPLE, SAMPLE + 1, LARGE, 2**31 + 7])
def test_a_tensor_of_any_size_has_a_sample_from_end_to_end(count: int) -> None:
    ends = torch.zeros(1).expand(count)
    assert len(sample_of(ends)) == min(count, SAMPLE)
    assert rank_steps.sample_rows(ends[None]).shape == (1, min(count, rank_steps.SAMPLE))


def test_a_sample_begins_and_ends_with_the_tensor() -> None:
    found = sample_of(torch.arange(100_000))
    assert (found[0], found[-1]) == (0, 99_999)
    assert bool((found.diff() > 0).all())
