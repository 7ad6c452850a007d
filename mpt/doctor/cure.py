"""The smallest change that makes a mode healthy: modules to keep in float32, or another dtype.

Tried in this order, and everything that is offered was tried: the module that was blamed alone; the fewest modules by
delta debugging (Zeller & Hildebrandt, 2002), whose answer is minimal in the sense that leaving out any one of them
fails again; the modules that contain others, from the inside outwards; bfloat16, which has float32's range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mpt.doctor.numerics import Examination, Subject, Verdict, as_on_a_gpu, with_float32
from mpt.engine.module_places import LOSS

MOST_TRIALS = 60
"""Steps that a search may take; what was found by then is offered, and said to be no more than that."""


@dataclass(frozen=True)
class Cure:
    """A patch that was tried and makes the step healthy."""

    patch: dict[str, Any]
    modules: tuple[str, ...]
    is_minimal: bool
    """Whether leaving out any of the modules was seen to fail."""
    trials: int

    def describe(self) -> str:
        """Return the cure in words."""
        if not self.modules:
            return "use bfloat16: float16's range is too small here, and no list of modules helps"
        kept = ", ".join(self.modules)
        known = "the smallest list that helps" if self.is_minimal else "it helps; a smaller list may too"
        return f"keep {kept} in float32 ({known})"


def find_cure(subject: Subject, found: Sequence[Examination]) -> Cure | None:
    """Return the smallest change that was seen to help, or None. Call for an examination with faults."""
    verdict = Verdict(subject)
    kept = subject.config.precision.settings.keep_fp32

    def helps(modules: Sequence[str]) -> bool:
        return verdict.is_healthy(with_float32(subject.config, modules))

    def offer(modules: Sequence[str], is_minimal: bool) -> Cure:
        patch = {"precision": {"keep_fp32": [*kept, *modules]}}
        return Cure(patch, tuple(modules), is_minimal, verdict.tried)

    blamed = list(dict.fromkeys(one.culprit.module for one in found if one.culprit is not None))
    blamed = [name for name in blamed if name != LOSS]
    if len(blamed) == 1 and helps(blamed):
        return offer(blamed, True)
    networks = dict(verdict.reference.task.modules)
    leaves = [name for name, module in named_modules(networks) if not any(True for _ in module.children())]
    if len(leaves) > 1 and helps(leaves):
        smallest, is_minimal = fewest(leaves, helps, lambda: verdict.tried < MOST_TRIALS)
        return offer(smallest, is_minimal)
    for name in containers(networks, blamed):
        if verdict.tried >= MOST_TRIALS:
            break
        if helps([name]):
            return offer([name], True)
    lower = as_on_a_gpu(subject.config, "bfloat16")
    if lower.to_data() != subject.config.to_data() and verdict.is_healthy(lower):
        return Cure({"precision": {"dtype": "bfloat16"}}, (), True, verdict.tried)
    return None


def named_modules(networks: dict[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return all modules by the dotted names that `precision.keep_fp32` knows, outermost first."""
    return [
        (f"{name}.{path}".rstrip("."), module)
        for name, root in networks.items()
        for path, module in root.named_modules()
    ]


def containers(networks: dict[str, nn.Module], blamed: Sequence[str]) -> list[str]:
    """Return the modules that contain others: those around what was blamed first, from the inside outwards."""
    names = [name for name, module in named_modules(networks) if any(True for _ in module.children())]
    around = [name for name in names if any(one == name or one.startswith(f"{name}.") for one in blamed)]
    by_depth = sorted(around, key=lambda name: -name.count("."))
    rest = sorted((name for name in names if name not in around), key=lambda name: -name.count("."))
    return [*by_depth, *rest]


def fewest(
    names: list[str], helps: Callable[[Sequence[str]], bool], may_go_on: Callable[[], bool]
) -> tuple[list[str], bool]:
    """Return a subset that helps and of which no member can be left out, given that all of them help.

    The second value is False where the search was cut short.
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
