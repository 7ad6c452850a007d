"""The order of an epoch in which every class comes equally often.

An epoch is as long as without it. Each class fills its share of the places with whole passes over its samples and a
part of one more, each pass in an order of its own, and all places are then shuffled: the samples of a class come
equally often, up to one. Independent draws by weight, the usual way, would leave out a third of them by chance.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def balanced_order(labels: Sequence[int], generator: torch.Generator) -> list[int]:
    """Return as many sample numbers as there are labels, every class that has samples equally often, up to one."""
    label = torch.as_tensor(labels)
    classes = torch.tensor(sorted(set(labels)))
    share, rest = divmod(len(label), len(classes))
    # who gets the places that are left over
    more = torch.randperm(len(classes), generator=generator)[:rest].tolist()
    chosen: list[Tensor] = []
    for number, name in enumerate(classes):
        members = (label == name).nonzero().flatten()
        wanted = share + (number in more)
        passes = -(-wanted // len(members))
        turns = [members[torch.randperm(len(members), generator=generator)] for _ in range(passes)]
        chosen.append(torch.cat([members[:0], *turns])[:wanted])
    together = torch.cat(chosen)
    order: list[int] = together[torch.randperm(len(together), generator=generator)].tolist()
    return order
