"""An optimizer's saved state for another optimizer: kept if it means the same, else dropped, with a report.

Names do not decide: AdamW's `exp_avg` is no momentum of Lion's, whose decay is another. State is kept by optimizers of
one family, of which one class is made from the other (Adam and AdamW, SGD and one that warms up); state that a changed
setting needs is made, and state that it no longer needs left out. Everything else begins anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mpt.nn.shared.mixin import own_class


@dataclass
class Carried:
    """The fate of a saved state: bytes by the names of its entries."""

    before: str
    """The class that saved it; empty if the checkpoint has no such optimizer."""
    now: str
    """Its class here; empty if the run has no such optimizer any more."""
    kept: Counter[str] = field(default_factory=Counter)
    converted: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def is_as_before(self) -> bool:
        """Whether all of it was kept for the optimizer that saved it."""
        return self.before == self.now and not self.converted and not self.dropped

    def __str__(self) -> str:
        if not self.now:
            size = sum(self.dropped.values())
            return f"switched off or not trained any more: its {self.before or 'optimizer'} ({size:,} bytes) is dropped"
        if not self.before:
            return f"the checkpoint has none; it and its optimizer {self.now} begin anew"
        change = f"{self.before} -> {self.now}" if self.before != self.now else self.now
        kinds = {"kept": self.kept, "converted": self.converted, "dropped": self.dropped}
        told = (
            f"{kind} {', '.join(f'{n} ({size:,} bytes)' for n, size in own.items())}"
            for kind, own in kinds.items()
        )
        said = [text for text, own in zip(told, kinds.values(), strict=True) if own]
        return f"optimizer {change}: " + ("; ".join(said) or "there was no state")


def lineage(optimizer: Optimizer) -> list[str]:
    """Return the names of an optimizer's class and those it is made from, to be saved with its state."""
    inner = getattr(optimizer, "inner", optimizer)  # of one that works in host memory
    kinds = own_class(inner).__mro__
    return [kind.__name__ for kind in kinds[: kinds.index(Optimizer)]]


def carry_over(
    saved: Mapping[str, Any], optimizer: Optimizer, foreign: Collection[str] = ()
) -> tuple[dict[str, Any], Carried]:
    """Return the part of a saved state that an optimizer loads, and the fate of the rest.

    `foreign` names entries that are not the optimizer's own and have no use any more. A state without the name of its
    optimizer, of before they were saved, is taken for this one's.
    """
    own, before = lineage(optimizer), list(saved.get("kind", ()))
    inner = getattr(optimizer, "inner", optimizer)
    groups = optimizer.state_dict()["param_groups"]
    is_same = not before or before[0] == own[0]
    is_related = is_same or before[0] in own or own[0] in before
    carried = Carried(own[0] if is_same else before[0], own[0])
    if not is_related:
        for entries in saved["state"].values():
            count(carried.dropped, entries, entries)
        return {"state": {}, "param_groups": groups}, carried
    loaded_groups = [
        {**built, **group}
        if is_same
        else {key: group.get(key, value) for key, value in built.items()}
        for built, group in zip(groups, saved["param_groups"], strict=True)
    ]
    state = {}
    for built, group in zip(groups, saved["param_groups"], strict=True):
        for index in group["params"]:
            if index in saved["state"]:
                state[index] = convert(saved["state"][index], inner, built, foreign, carried)
    return {"state": state, "param_groups": loaded_groups}, carried


def given_up(saved: Mapping[str, Any]) -> Carried:
    """Return the fate of the state of an optimizer that the run has no more."""
    carried = Carried(next(iter(saved.get("kind", ())), ""), "")
    for entries in saved["state"].values():
        count(carried.dropped, entries, entries)
    return carried


def convert(
    entries: Mapping[str, Any],
    optimizer: Optimizer,
    group: Mapping[str, Any],
    foreign: Collection[str],
    told: Carried,
) -> dict[str, Any]:
    """Return a parameter's state as the settings of now need it: torch's optimizers expect the state that they would
    have made under them.
    """
    made: dict[str, Callable[[], Tensor]] = {}
    unused = set(foreign)
    if isinstance(optimizer, torch.optim.Adam):
        made["max_exp_avg_sq"] = lambda: entries["exp_avg_sq"].clone()
        unused |= set() if group["amsgrad"] else {"max_exp_avg_sq"}
    elif isinstance(optimizer, torch.optim.RMSprop):
        made["momentum_buffer"] = made["grad_avg"] = lambda: torch.zeros_like(entries["square_avg"])
        unused |= set() if group["momentum"] else {"momentum_buffer"}
        unused |= set() if group["centered"] else {"grad_avg"}
    elif isinstance(optimizer, torch.optim.SGD) and not group["momentum"]:
        unused.add("momentum_buffer")
    missing = {
        name: make() for name, make in made.items() if name not in unused and name not in entries
    }
    kept = [name for name in entries if name not in unused]
    count(told.kept, entries, kept)
    count(told.dropped, entries, [name for name in entries if name in unused])
    count(told.converted, missing, missing)
    return {**{name: entries[name] for name in kept}, **missing}


def count(into: Counter[str], entries: Mapping[str, Any], names: Collection[str]) -> None:
    """Add up the bytes of some entries."""
    for name in names:
        value = entries[name]
        into[name] += value.numel() * value.element_size() if isinstance(value, Tensor) else 0
