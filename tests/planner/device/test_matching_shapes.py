"""Operators are refused on fake tensors for the shapes for which they are refused on real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from mpt.planner.device.matching_shapes import (
    check_alignments,
    check_attention,
    check_masks,
    check_shapes,
)

pytestmark = pytest.mark.tier("fast")
_aten = torch.ops.aten


def lengths(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def test_more_draws_than_categories_are_refused_without_replacement() -> None:
    weights = torch.ones(2, 3)
    with pytest.raises(RuntimeError):
        torch.multinomial(weights, 4)
    with pytest.raises(RuntimeError, match="cannot draw 4 of 3"):
        check_shapes(_aten.multinomial.default, (weights, 4))
    check_shapes(_aten.multinomial.default, (weights, 3))
    check_shapes(_aten.multinomial.default, (weights, 4, True))


def test_a_draw_of_more_categories_than_float32_counts_is_refused() -> None:
    weights = torch.ones(1).expand((1 << 24) + 1)
    with pytest.raises(RuntimeError, match="2\\^24"):
        torch.multinomial(weights, 1, True)
    with pytest.raises(RuntimeError, match="16777217 categories"):
        check_shapes(_aten.multinomial.default, (weights, 1, True))


def test_a_power_in_place_cannot_grow() -> None:
    with pytest.raises(RuntimeError):
        torch.ones(3).pow_(torch.ones(2, 3))
    with pytest.raises(RuntimeError, match=r"\(3,\) cannot hold results of shape \(2, 3\)"):
        check_shapes(_aten.pow_.Tensor, (torch.ones(3), torch.ones(2, 3)))
    check_shapes(_aten.pow_.Tensor, (torch.ones(2, 3), torch.ones(3)))


@pytest.mark.parametrize(
    ("place", "mask"),
    [
        ((), torch.ones(3) > 0),
        ((None,), torch.ones(4) > 0),
        ((), torch.ones(4, 4) > 0),
        ((torch.tensor([0]),), torch.ones(4) > 0),
    ],
)
def test_a_mask_of_other_sizes_is_refused(place: tuple[Any, ...], mask: torch.Tensor) -> None:
    tensor = torch.ones(4, 5)
    index = tuple(slice(None) if one is None else one for one in place)
    with pytest.raises(IndexError):
        tensor[(*index, mask)]
    with pytest.raises(IndexError, match="does not fit the tensor"):
        check_masks(tensor, [*place, mask])


def test_a_mask_of_a_tensors_own_sizes_is_taken() -> None:
    tensor = torch.ones(4, 5, 6)
    check_masks(tensor, [torch.ones(4, 5) > 0])
    check_masks(tensor, [None, torch.ones(5, 6) > 0])
    check_masks(tensor, [torch.tensor([0]), torch.ones(5) > 0])


def test_attention_is_refused_a_mask_of_another_size_and_too_few_values() -> None:
    query, key = torch.ones(1, 2, 3, 8), torch.ones(1, 2, 5, 8)
    for mask in (torch.zeros(5, 3), torch.zeros(2, 5)):
        with pytest.raises(RuntimeError):
            functional.scaled_dot_product_attention(query, key, key, mask)
        with pytest.raises(RuntimeError, match="does not fit 3 queries and 5 keys"):
            check_attention(query, key, key, mask)
    with pytest.raises(RuntimeError, match="5 keys have 4 values"):
        check_attention(query, key, key[:, :, :4], None)
    for mask in (torch.zeros(3, 5), torch.zeros(1, 5), torch.zeros(1, 1, 3, 1), torch.zeros(5)):
        functional.scaled_dot_product_attention(
            query, key, key, mask[None] if mask.dim() < 2 else mask
        )
        check_attention(query, key, key, mask)


@pytest.mark.parametrize(
    "changed",
    [
        {"targets": torch.ones(3, 3, dtype=torch.int64)},
        {"targets": torch.ones(1, 2, 3, dtype=torch.int64)},
        {"input_lengths": lengths(6)},
        {"target_lengths": lengths(3, 3, 3)},
        {"input_lengths": lengths(6, 6, dtype=torch.float32)},
    ],
)
def test_alignments_need_a_length_and_labels_of_each_sample(changed: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "log_probs": torch.zeros(6, 2, 5),
        "targets": torch.ones(2, 3, dtype=torch.int64),
        "input_lengths": lengths(6, 6),
        "target_lengths": lengths(3, 2),
    }
    functional.ctc_loss(**given)
    check_alignments(**given)
    with pytest.raises(RuntimeError):
        functional.ctc_loss(**{**given, **changed})
    with pytest.raises(RuntimeError):
        check_alignments(**{**given, **changed})
