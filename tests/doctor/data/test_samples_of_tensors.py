"""Samples of large tensors: more elements than float32 counts exactly (2**24)."""

from typing import Any

import pytest
import torch

from mpt.doctor.measuring.instrument import SAMPLE, is_finite, measure, sample_of
from mpt.doctor.partings import rank_steps

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


def test_a_large_tensor_is_counted_in_pieces_as_a_whole() -> None:
    value = torch.full((3, 300_000), 1.0)
    value[0, :7], value[1, :5], value[2, -3:] = 0.0, 2.0**-30, 2.0**-20
    value[1, 7], value[2, 0] = torch.inf, -512.0
    about: Any = {"module": "", "operator": "", "is_backward": False, "line": "", "occurrence": 0}
    found = measure(value, inputs=(), inputs_finite=True, **about)
    assert (found.largest, found.non_finite, found.bad_rows) == (512.0, 1, (1,))
    shares = [found.underflow, found.subnormal]
    assert [round(share * value.numel()) for share in shares] == [5, 3]
    assert not is_finite(value)
    assert is_finite(value[0])
