"""The ways to treat each block, by the figures of a dry run: bytes that each holds, time to recompute it.

A block's ways begin with itself as it is, and with all that autograd saves kept by name. From there on the output that
costs least to compute again for its bytes is given up, one after the other, until only the inputs are kept. What is
counted are the operators that really have to run: those that lead to a saved tensor and to no kept one.

If blocks taken one by one cannot be brought to a budget because each keeps its input, neighbours are joined: of a
run of blocks only the first one's input is kept, and inside it each output is a choice as any other. The shortest runs
that reach the budget are taken; if none do, those with the lowest peak.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from mpt.memory.recomputing import knapsack
from mpt.memory.recomputing.blocks import Unit
from mpt.memory.recomputing.dry_run import Call, Loss
from mpt.memory.recomputing.knapsack import Blocks, Choice, convex
from mpt.memory.recomputing.operators import Key, look_back, places_of

ROUNDS = 32
"""Blocks with more outputs give up several at a time."""


GRADIENTS = 2
"""While a block's backward runs, gradients of that many tensors of the size of its largest are there as well."""


Listed = tuple[list[Unit], list[list[Choice]], list[list[knapsack.Call]]]
"""The units of a step, the choices of each, and each loss's calls."""


def choose_outputs(partitions: Iterable[Listed], share: float) -> dict[Unit, frozenset[Key]]:
    """Return the outputs to keep of each recomputed unit, so that the units stay below this share of their peak.

    `partitions` are the step's units with the blocks taken one by one, and then in ever longer runs; the next is
    looked at only if those before cannot be brought to the share. The share is one of the first's peak.
    """
    found: list[tuple[float, float, dict[Unit, frozenset[Key]]]] = []
    allowed = None
    for units, choices, calls in partitions:
        blocks = Blocks(choices, calls)
        allowed = share * blocks.peak() if allowed is None else allowed
        blocks.shrink(allowed)
        solved = {unit: blocks.choice(number).keeps for number, unit in enumerate(units)}
        keeps = {unit: frozenset(kept) for unit, kept in solved.items() if kept is not None}
        found.append((max(blocks.peak(), allowed), blocks.seconds, keeps))  # type: ignore[arg-type]
        if blocks.peak() <= allowed:
            break
    return min(found, key=lambda one: one[:2])[2]


def list_choices(losses: Sequence[Loss]) -> Listed:
    """Return the findings of a dry run in the form of `mpt.memory.recomputing.knapsack`."""
    own: dict[Unit, list[tuple[Loss, Call]]] = {}
    calls: list[list[knapsack.Call]] = []
    numbers: dict[Unit, int] = {}
    for loss in losses:
        calls.append([])
        beside = _beside(loss)
        for call, size in zip(loss.calls, beside, strict=False):
            number = numbers.setdefault(call.unit, len(numbers))
            before = own.setdefault(call.unit, [])
            calls[-1].append(knapsack.Call(number, len(before), size))
            before.append((loss, call))
        calls[-1].append(knapsack.Call(None, 0, beside[-1]))
    known: dict[tuple[Any, ...], list[Choice]] = {}
    choices = []
    for of_unit in own.values():
        form = _form(of_unit)
        if form not in known:
            known[form] = _choices(of_unit)
        choices.append(known[form])
    return list(own), choices, calls


def _form(calls: Sequence[tuple[Loss, Call]]) -> tuple[Any, ...]:
    """Return all that a unit's choices follow from, with its storages numbered as its operators meet them.

    The blocks of a transformer are alike, and weighing the outputs of one takes time that grows with their square.
    """
    facts: list[Any] = []
    for loss, call in calls:
        numbers: dict[int, int] = {}

        def own(storages: Iterable[int], numbers: dict[int, int] = numbers) -> tuple[int, ...]:
            return tuple(numbers.setdefault(one, len(numbers)) for one in storages)

        for one in call.operators:
            changes = () if one.changes is None else own([one.changes])
            related = own(one.reads), own(one.makes), changes
            facts.append((one.key, *related, one.must_run, one.replaceable, one.seconds))
        facts.append(frozenset(own(sorted(call.saved))))
        sizes, changed = loss.storages.sizes, loss.storages.changed
        facts.append(tuple((sizes[one], one in loss.fixed, one in changed) for one in numbers))
    return tuple(facts)


def _beside(loss: Loss) -> list[int]:
    """Return, for each call and for the end, the tensors present at its backward: units' inputs, and gradients."""
    sizes = loss.storages.sizes
    inputs: set[int] = set()
    found = []
    for position, call in enumerate(loss.calls):
        inputs |= call.walk.given
        largest = max((sizes[number] for number in call.walk.made), default=0)
        elsewhere = sum(size for before, size in loss.elsewhere if before <= position)
        found.append(sum(sizes[number] for number in inputs) + elsewhere + GRADIENTS * largest)
    after = [size for before, size in loss.elsewhere if before == len(loss.calls)]
    end = sum(sizes[number] for number in inputs) + sum(size for _, size in loss.elsewhere)
    end += GRADIENTS * max(after, default=0)
    seen: set[Unit] = set()
    weights = 0
    for position in range(len(found) - 1, -1, -1):
        unit = loss.calls[position].unit
        if unit not in seen:
            seen.add(unit)
            weights += sum(
                weight.nbytes for module in unit.modules for weight in module.parameters()
            )
        found[position] += weights
    return [*found, end]


def _choices(calls: Sequence[tuple[Loss, Call]]) -> list[Choice]:
    bytes_of: dict[Key, int] = {}
    saved: set[Key] = set()
    changed: set[Key] = set()
    for loss, call in calls:
        for operator in call.operators:
            if operator.key is None or operator.must_run:
                continue
            if not loss.storages.changed.isdisjoint(operator.makes):
                changed.add(operator.key)
            bytes_of[operator.key] = bytes_of.get(operator.key, 0) + _bytes(loss, operator.makes)
            if not call.saved.isdisjoint(operator.makes):
                saved.add(operator.key)
    bytes_of = {key: bytes_of[key] for key in bytes_of if key in saved - changed}
    as_it_is = tuple(_bytes(loss, call.saved) for loss, call in calls)
    found = [Choice(None, 0.0, as_it_is, as_it_is)]
    kept, costly = frozenset(bytes_of), [key for key, size in bytes_of.items() if size]
    now = _treat(calls, kept)
    if now.seconds:  # else nothing is computed again, so nothing is gained
        found.append(now)
    at_once = -(-len(costly) // ROUNDS)
    places = [places_of(call.operators) for _, call in calls]
    while costly:
        at = _placed(places, kept)
        prices = {
            key: (_seconds(calls, map(set.difference, at, _placed(places, [key]))) - now.seconds)
            / bytes_of[key]
            for key in costly
        }
        given_up = sorted(costly, key=prices.__getitem__)[:at_once]
        kept -= set(given_up)
        costly = [key for key in costly if key in kept]
        now = _treat(calls, kept)
        found.append(now)
    return convex(found)


def _treat(calls: Sequence[tuple[Loss, Call]], kept: frozenset[Key]) -> Choice:
    held, whole = [], []
    at = _placed([places_of(call.operators) for _, call in calls], kept)
    for (loss, call), places in zip(calls, at, strict=True):
        used = look_back(call.operators, call.saved, places)[1]
        own = {number for place in used for number in call.operators[place].makes}
        held.append(_bytes(loss, own))
        whole.append(_bytes(loss, own | call.saved))
    return Choice(kept, _seconds(calls, at), tuple(held), tuple(whole))


def _placed(places: Sequence[dict[Key, int]], kept: Iterable[Key]) -> list[set[int]]:
    """Return the positions of these keys in each call."""
    return [{own[key] for key in kept if key in own} for own in places]


def _seconds(calls: Sequence[tuple[Loss, Call]], kept: Iterable[set[int]]) -> float:
    return sum(
        call.operators[position].seconds
        for (_, call), places in zip(calls, kept, strict=True)
        for position in look_back(call.operators, call.saved, places)[0]
    )


def _bytes(loss: Loss, numbers: Sequence[int] | set[int] | tuple[int, ...]) -> int:
    return sum(loss.storages.sizes[number] for number in set(numbers) - loss.fixed)
