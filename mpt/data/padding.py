"""Targets of which a sample has a varying number (boxes, points), padded to one length with a mask.

A batch's shapes then do not depend on its content, which the planner, compiled steps and equal micro-batches need.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pad_rows(samples: Sequence[Tensor], length: int) -> tuple[Tensor, Tensor]:
    """Return samples of (n_i, ...) rows as one tensor (b, length, ...) with zeros behind, and a mask (b, length).

    The mask is True where a row is real. A sample with more than `length` rows loses those behind: say so before, or
    choose `length` by the largest sample.
    """
    first = samples[0]
    padded = first.new_zeros(len(samples), length, *first.shape[1:])
    mask = torch.zeros(len(samples), length, dtype=torch.bool)
    for row, sample in enumerate(samples):
        count = min(len(sample), length)
        padded[row, :count] = sample[:count]
        mask[row, :count] = True
    return padded, mask
