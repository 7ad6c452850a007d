"""Covering arrays: combinations in which every two values of two dimensions meet at least once.

Greedy: each combination starts from the first two values that have not met, and takes in every further dimension the
value that meets the most of the others for the first time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, product

Value = tuple[str, str]
"""Dimension and value."""
Pair = frozenset[Value]


def pairs_of(chosen: Mapping[str, str]) -> Iterator[Pair]:
    """Yield every two values of a combination."""
    return map(frozenset, combinations(chosen.items(), 2))


def all_pairs(dimensions: Mapping[str, Sequence[str]]) -> dict[Pair, None]:
    """Return every two values that can meet, in order."""
    return {
        frozenset(((first, one), (second, other))): None
        for first, second in combinations(dimensions, 2)
        for one, other in product(dimensions[first], dimensions[second])
    }


def touch(
    dimensions: Mapping[str, Sequence[str]],
    excluded: Callable[[Mapping[str, str]], bool],
    first: Sequence[Mapping[str, str]] = (),
) -> Iterator[dict[str, str]]:
    """Yield a few combinations in which every value occurs; the first of them have these values."""
    left = {name: [*values] for name, values in dimensions.items()}
    starts = [*first]
    while starts or any(left.values()):
        chosen = dict(starts.pop(0)) if starts else {}
        for name, values in dimensions.items():
            if name not in chosen:
                possible = [*left[name], *values]
                chosen[name] = next(one for one in possible if not excluded({**chosen, name: one}))
        for name, value in chosen.items():
            if value in left[name]:
                left[name].remove(value)
        yield chosen


def cover(
    dimensions: Mapping[str, Sequence[str]], excluded: Callable[[Mapping[str, str]], bool]
) -> Iterator[dict[str, str]]:
    """Yield combinations that cover all pairs but those that `excluded` says cannot be combined."""
    left = {pair: None for pair in all_pairs(dimensions) if not excluded(dict(pair))}
    while left:
        chosen = dict(next(iter(left)))
        for name in sorted(dimensions, key=lambda name: -len(dimensions[name])):
            if name in chosen:
                continue
            possible = [
                (sum(frozenset(((name, value), one)) in left for one in chosen.items()), value)
                for value in dimensions[name]
                if not excluded({**chosen, name: value})
            ]
            if possible:
                chosen[name] = max(possible, key=lambda pair: pair[0])[1]
        for pair in pairs_of(chosen):
            left.pop(pair, None)
        yield chosen
