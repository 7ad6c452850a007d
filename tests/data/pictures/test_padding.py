"""Ragged targets in tensors of one shape."""

import pytest
import torch

from mpt.data.pictures.padding import pad_rows

pytestmark = pytest.mark.tier("fast")


def test_rows_stand_in_front_with_zeros_and_false_behind():
    padded, mask = pad_rows([torch.ones(2, 4), torch.full((0, 4), 7.0), torch.full((3, 4), 3.0)], 3)
    assert padded.shape == (3, 3, 4)
    assert padded.dtype == torch.float32
    assert mask.tolist() == [[True, True, False], [False, False, False], [True, True, True]]
    assert padded[0].sum() == 8
    assert padded[1].sum() == 0
    assert torch.equal(padded[2], torch.full((3, 4), 3.0))


def test_numbers_of_classes_keep_their_dtype():
    padded, _ = pad_rows([torch.tensor([3, 1])], 4)
    assert padded.tolist() == [[3, 1, 0, 0]]
    assert padded.dtype == torch.int64


def test_no_row_is_left_out():
    with pytest.raises(AssertionError, match="a sample has 5 rows, and there is room for 3"):
        pad_rows([torch.ones(2), torch.ones(5)], 3)
