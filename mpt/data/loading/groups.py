"""Batches of samples of one group each, for data sets whose samples have several sizes.

In training the last batch of a group is filled up with the group's first samples of that epoch: all batches have one
length, and no sample is left out. In evaluation it is shorter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def cut(count: int, groups: Sequence[int] | None, batch_size: int) -> list[range]:
    """Return the batches of samples in their own order, none across two groups."""
    if groups is None:
        return [
            range(first, min(first + batch_size, count)) for first in range(0, count, batch_size)
        ]
    ends = [index for index in range(1, count) if groups[index] != groups[index - 1]]
    pairs = zip([0, *ends], [*ends, count], strict=True)
    return [
        range(first, min(first + batch_size, stop))
        for start, stop in pairs
        for first in range(start, stop, batch_size)
    ]


def grouped_order(groups: Sequence[int], batch_size: int, generator: torch.Generator) -> list[int]:
    """Return an epoch's sample numbers: whole batches of one group each, in random order."""
    batches: list[list[int]] = []
    for whole in cut(len(groups), groups, len(groups)):
        order = (torch.randperm(len(whole), generator=generator) + whole.start).tolist()
        missing = -len(order) % batch_size
        order += (order * (missing // len(order) + 1))[:missing]
        batches += [order[first : first + batch_size] for first in range(0, len(order), batch_size)]
    return [
        index
        for number in torch.randperm(len(batches), generator=generator)
        for index in batches[number]
    ]
