"""The fewest modules that must be computed in float32 for a step to be right, of all that might be.

Delta debugging (Zeller & Hildebrandt, 2002): its answer is minimal in the sense that leaving out any one of the modules
was seen to fail. The caller defines "right": the doctor judges errors against a float32 step; a training that is
to recover asks whether the update that failed is finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from mpt.engine.recovery.diagnosis import Finding, undisturbed
from mpt.engine.step.step import back_propagate
from mpt.nn.shared.named_modules import named_modules
from mpt.precision.shared.float32_modules import keeping
from mpt.seams import Batch, Phase, Run

MOST_TRIALS = 60
"""Steps that a search may take. After them it offers the best list so far, and says that a smaller one may exist."""

Helps = Callable[[Sequence[str]], bool]


@dataclass(frozen=True)
class SmallestList:
    """Modules of which it was seen that keeping them in float32 helps."""

    modules: tuple[str, ...]
    is_minimal: bool
    """Whether leaving out any of the modules was seen to fail."""
    trials: int

    def describe(self) -> str:
        """Return how sure it is that a smaller list does not do."""
        if self.is_minimal:
            return "the smallest list that helps"
        return "it helps; a smaller list may too"


def smallest_list(
    networks: Mapping[str, nn.Module], blamed: Sequence[str], helps: Helps
) -> SmallestList | None:
    """Return the fewest modules that help, or None.

    Tried in this order: the module that was blamed alone; the fewest modules without children; those with children,
    from the inside outwards.
    """
    tried = 0

    def tries(names: Sequence[str]) -> bool:
        nonlocal tried
        tried += 1
        return helps(names)

    if len(blamed) == 1 and tries(blamed):
        return SmallestList(tuple(blamed), True, tried)
    leaves = [
        name for name, module in named_modules(networks) if not any(True for _ in module.children())
    ]
    if len(leaves) > 1 and tries(leaves):
        found, is_minimal = fewest(leaves, tries, lambda: tried < MOST_TRIALS)
        return SmallestList(tuple(found), is_minimal, tried)
    around = containers(networks, blamed)
    if not tries([*leaves, *around]):
        return None
    for name in around:
        if tried >= MOST_TRIALS:
            break
        if tries([name]):
            return SmallestList((name,), True, tried)
    return None


def containers(networks: Mapping[str, nn.Module], blamed: Sequence[str]) -> list[str]:
    """Return the modules that contain others: those around the modules blamed first, from the inside outwards."""
    names = [
        name for name, module in named_modules(networks) if any(True for _ in module.children())
    ]
    around = [
        name for name in names if any(one == name or one.startswith(f"{name}.") for one in blamed)
    ]
    by_depth = sorted(around, key=lambda name: -name.count("."))
    rest = sorted((name for name in names if name not in around), key=lambda name: -name.count("."))
    return [*by_depth, *rest]


def fewest(names: list[str], helps: Helps, may_go_on: Callable[[], bool]) -> tuple[list[str], bool]:
    """Return a subset that helps and of which no member can be left out, given that all of them help.

    The second value is False if the search was cut short.
    """
    parts = 2
    while len(names) > 1:
        size = -(-len(names) // parts)
        pieces = [names[start : start + size] for start in range(0, len(names), size)]
        for piece in pieces:
            if not may_go_on():
                return names, False
            if len(piece) < len(names) and helps(piece):
                names, parts = piece, 2
                break
            rest = [name for name in names if name not in piece]
            if parts > 2 or len(pieces) > 2:
                if not may_go_on():
                    return names, False
                if rest and helps(rest):
                    names, parts = rest, max(parts - 1, 2)
                    break
        else:
            if size == 1:
                return names, True
            parts = min(2 * parts, len(names))
    return names, True


def list_that_makes_finite(
    run: Run, phase: Phase, batch: Batch, finding: Finding
) -> SmallestList | None:
    """Return the fewest modules with which in float32 an update that was not finite is; the run stays as it was.

    `batch` is the whole batch with its random inputs. None if the update does not fail each time, if no list
    helps, or the mode keeps no more modules. All ranks take the trials, and the first one's word counts.
    """
    if not finding.repeats:
        return None
    modules = dict(named_modules(run.task.modules))

    def helps(names: Sequence[str]) -> bool:
        with (
            keeping(run.precision, [modules[name] for name in names]) as kept,
            undisturbed(run, phase),
        ):
            return bool(run.world.tell(kept > 0 and is_finite(run, phase, batch)))

    return smallest_list(
        run.task.modules, [finding.module] if finding.module is not None else [], helps
    )


def is_finite(run: Run, phase: Phase, batch: Batch) -> bool:
    """Return whether losses and gradients of an update are finite, at the loss scale in force; leaves the gradients."""
    losses = back_propagate(run, phase, batch)
    if not all(math.isfinite(float(value)) for value in losses.values()):
        return False
    gradients = [weight.grad for weight in run.weights[phase.name] if weight.grad is not None]
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
