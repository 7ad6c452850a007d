"""Tensors to keep under a budget: a choice for each block, the cheapest whose bytes stay below it at every moment.

A block's choices are points of (bytes held, seconds to compute again): first the block as it is, at no cost, then
recomputed with ever fewer outputs kept. Backward reaches the blocks in reverse, and at each it finds what the blocks
before it hold, and computes that block's own again, whole. So there is a limit for every call of every block, each a
sum over the calls before it. Bytes are taken from the cheapest places by the limit that is exceeded most; what turned
out needless is given back at the end.

For one limit that is Dantzig's rule for the knapsack's relaxation; the tests compare with trying
everything. Nothing here knows torch.
Source: Dantzig, "Discrete-variable extremum problems", 1957; recomputation as a knapsack: Feng & Huang, "Optimal
gradient checkpoint search", 2021.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

ROUNDING = 1e-6


@dataclass(frozen=True)
class Choice:
    """One way to treat a block. Bytes for each of its calls, in order."""

    keeps: frozenset[Hashable] | None
    """The tensors kept of a recomputed block; None leaves the block as it is."""
    seconds: float
    held: tuple[int, ...]
    """From the call's forward to its backward."""
    whole: tuple[int, ...]
    """While its own backward runs."""

    @property
    def total(self) -> int:
        """Bytes held by all calls."""
        return sum(self.held)


@dataclass(frozen=True)
class Call:
    """One call of a block in the forward of a loss, or the end after the last one: the loss itself."""

    block: int | None
    number: int
    """Among the block's own calls."""
    beside: int = 0
    """Bytes that are there when its backward runs, whatever is chosen."""


Losses = Sequence[Sequence[Call]]
"""For each loss its calls in order."""


def convex(choices: Iterable[Choice]) -> list[Choice]:
    """Return the choices worth making, by falling bytes: each next byte costs more than the one before."""
    found: list[Choice] = []
    for one in sorted(choices, key=lambda one: (one.seconds, one.total)):
        if found and one.total >= found[-1].total:
            continue
        while len(found) > 1 and _slope(found[-2], found[-1]) >= _slope(found[-1], one):
            found.pop()
        found.append(one)
    return found


def _slope(one: Choice, other: Choice) -> float:
    return (other.seconds - one.seconds) / (one.total - other.total)


class Blocks:
    """The blocks of a step with a choice made for each."""

    def __init__(self, choices: Sequence[Sequence[Choice]], losses: Losses) -> None:
        self.choices, self.losses = choices, losses
        self.chosen = [0] * len(choices)

    def choice(self, block: int) -> Choice:
        """Return the choice for a block."""
        return self.choices[block][self.chosen[block]]

    @property
    def seconds(self) -> float:
        """The operators that are computed again."""
        return sum(self.choice(block).seconds for block in range(len(self.choices)))

    def loads(self) -> list[list[int]]:
        """Return the bytes at each call's backward, by loss."""
        found = []
        for calls in self.losses:
            before, loads = 0, []
            for call in calls:
                loads.append(before + call.beside)
                if call.block is not None:
                    choice = self.choice(call.block)
                    loads[-1] += choice.whole[call.number]
                    before += choice.held[call.number]
            found.append(loads)
        return found

    def peak(self) -> int:
        """Return the most bytes at any backward."""
        return max((load for loads in self.loads() for load in loads), default=0)

    def gains(self, loss: int, position: int) -> dict[int, int]:
        """Return the bytes that the blocks' next choices take off the load at one call, if any."""
        gains: dict[int, int] = {}
        for place, call in enumerate(self.losses[loss][: position + 1]):
            if call.block is not None and self.chosen[call.block] + 1 < len(
                self.choices[call.block]
            ):
                now, then = (
                    self.choice(call.block),
                    self.choices[call.block][self.chosen[call.block] + 1],
                )
                before = now.held[call.number] - then.held[call.number]
                own = now.whole[call.number] - then.whole[call.number]
                gains[call.block] = gains.get(call.block, 0) + (before if place < position else own)
        return {block: gain for block, gain in gains.items() if gain > 0}

    def price(self, block: int) -> float:
        """Return the seconds of a block's next choice beyond the present one's."""
        return self.choices[block][self.chosen[block] + 1].seconds - self.choice(block).seconds

    def shrink(self, allowed: float) -> None:
        """Choose until no load exceeds the allowed bytes, or nothing makes those that do smaller."""
        hopeless: set[tuple[int, int]] = set()
        while True:
            excess, place = max(
                (
                    (load - allowed, (loss, position))
                    for loss, loads in enumerate(self.loads())
                    for position, load in enumerate(loads)
                    if (loss, position) not in hopeless
                ),
                default=(0, (0, 0)),
            )
            if excess <= 0:
                break
            gains = self.gains(*place)
            if gains:
                self.chosen[
                    min(gains, key=lambda block: self.price(block) / min(gains[block], excess))
                ] += 1
            else:
                hopeless.add(place)
        self.give_back(allowed)

    def give_back(self, allowed: float) -> None:
        """Undo choices without which no load exceeds the allowed bytes that did not before, the dearest first."""
        limits = [[max(load, allowed) for load in loads] for loads in self.loads()]
        again = True
        while again:
            again = False
            undone = [block for block, number in enumerate(self.chosen) if number]
            for block in sorted(undone, key=self._last_price, reverse=True):
                self.chosen[block] -= 1
                pairs = zip(self.loads(), limits, strict=True)
                again = all(
                    load <= limit
                    for own, most in pairs
                    for load, limit in zip(own, most, strict=True)
                )
                if again:
                    break
                self.chosen[block] += 1

    def _last_price(self, block: int) -> float:
        return self.choice(block).seconds - self.choices[block][self.chosen[block] - 1].seconds
