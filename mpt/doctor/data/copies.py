"""One picture twice, also if it was encoded again: found by thumbnails, as perceptual hashes do.

A thumbnail of 16 x 16 pixels keeps the content of a picture and loses an encoder's changes. Two pictures count as one
if their thumbnails are near for this set, and far nearer than the next pictures are: in a set of small digits, which
are all alike, a fixed number of a hash's bits would take two digits for one. Cut or turned copies are not found.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mpt.doctor.data.samples_seen import Samples

ALIKE = 0.15
"""Of the median distance to the pictures of a set: the same picture is nearer than this."""
LONELY = 0.25
"""Of the distance to the picture of rank `NEXT`: the same picture is nearer than this. Up to `NEXT` - 1 copies are
found.
"""
NEXT = 6
FEWEST = 8
"""Pictures from which on these distances say something."""


def shared_pictures(train: Samples, test: Samples) -> list[tuple[int, int]]:
    """Return the pictures that are in both sets, as indices in each: the same to the bit, or encoded again."""
    exact = {
        test_index: train.digests[digest][0]
        for digest, holders in test.digests.items()
        if digest in train.digests
        for test_index in holders
    }
    near = {
        test_index: index
        for index, test_index in near_pairs(train, test)
        if test_index not in exact
    }
    return [(index, test_index) for test_index, index in sorted({**exact, **near}.items())]


def in_two_classes(seen: Samples) -> list[tuple[int, int]]:
    """Return pairs of one picture that have different labels."""
    pairs = [(holders[0], other) for holders in seen.digests.values() for other in holders[1:]]
    pairs += [(min(pair), max(pair)) for pair in near_pairs(seen, seen)]
    labels = seen.labels
    return [pair for pair in dict.fromkeys(pairs) if labels.get(pair[0]) != labels.get(pair[1])]


def near_pairs(one: Samples, other: Samples) -> Iterator[tuple[int, int]]:
    """Yield for each picture of `other` the index of the same one in `one`, if there is one, and its own."""
    if min(len(one.thumbnails), len(other.thumbnails)) < FEWEST:
        return
    sides = [stacked(side) for side in (one, other)]
    if sides[0].shape[1] != sides[1].shape[1]:
        return
    distances = torch.cdist(sides[1], sides[0])
    limits = ALIKE * distances.median(1).values
    if one is other:
        distances.fill_diagonal_(torch.inf)
    nearest = distances.topk(NEXT, largest=False)
    is_copy = (nearest.values[:, 0] < limits) & (
        nearest.values[:, 0] < LONELY * nearest.values[:, -1]
    )
    names = list(one.thumbnails), list(other.thumbnails)
    for place in is_copy.nonzero().flatten().tolist():
        yield names[0][int(nearest.indices[place, 0])], names[1][place]


def stacked(seen: Samples) -> Tensor:
    """Return all thumbnails as rows."""
    return torch.stack([one.flatten() for one in seen.thumbnails.values()])
