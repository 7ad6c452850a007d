"""Targets of which a sample has a varying number (boxes, points), padded to one length with a mask.

The mask is True if a row is real.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pad_rows(samples: Sequence[Tensor], length: int) -> tuple[Tensor, Tensor]:
    """Return samples of (n_i, ...) rows as one tensor (b, length, ...) with zeros behind, and the mask (b, length).

    No row is ever left out: a `length` below the longest sample's is an assertion error.
    """
    longest = max(map(len, samples))
    assert longest <= length, f"a sample has {longest} rows, and there is room for {length}"
    first = samples[0]
    padded = first.new_zeros(len(samples), length, *first.shape[1:])
    mask = torch.zeros(len(samples), length, dtype=torch.bool)
    for row, sample in enumerate(samples):
        padded[row, : len(sample)] = sample
        mask[row, : len(sample)] = True
    return padded, mask
