"""How much memory there is to plan for: the user's words, the card's true size and the desktop's share.

`--vram 6GiB` is the user's card. If a card is named as well, it gives no more than it has for programs
(`mpt.planner.facts.gpus`), which is less than it is sold with, and a budget beyond that is cut to it and said.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpt.config.sizes import describe_bytes, parse_budget
from mpt.errors import ConfigError
from mpt.planner.facts.gpus import Gpu

WDDM = "wddm"
"""The word for the share that Windows' display driver model keeps of every card."""
LEFT_BY_WDDM = 0.81
"""Of a card's memory. Programs got 81 % of it in https://github.com/tensorflow/tensorflow/issues/22623 and 85 % in
https://github.com/ollama/ollama/issues/9167; the smaller share is planned for."""


@dataclass(frozen=True)
class Capacity:
    """The memory that a plan has to fit into; `budget_bytes` is None if none was given. `statements` are for the
    user."""

    budget_bytes: int | None
    statements: tuple[str, ...]


def wddm_bytes(budget_bytes: int) -> int:
    """Return the memory that Windows keeps from programs, on a card without a screen too."""
    return budget_bytes - int(LEFT_BY_WDDM * budget_bytes)


def find_capacity(
    gpu: Gpu, is_named: bool, vram: str | None, desktop: str | None = None
) -> Capacity:
    """Return the capacity for a card and the options' words. Raises ConfigError for a size that is none."""
    said: list[str] = []
    budget = parse_budget(vram) if vram is not None else None
    if is_named:
        usable = gpu.usable_bytes
        if budget is None or budget > usable:
            beyond = (
                f"; --vram {vram} exceeds that, so those are planned for"
                if budget is not None
                else ""
            )
            said.append(
                f"{gpu.name}: programs can have {gpu.usable_gib:.2f} of its {gpu.memory_gib:g} GiB "
                f"({gpu.usable_source}){beyond}"
            )
            budget = usable
    else:
        said.append(f"no --gpu given: times and kernels are those of an {gpu.name}")
    if desktop is not None:
        if budget is None:
            raise ConfigError("--desktop: it is taken off a budget; add --gpu or --vram")
        taken = (
            wddm_bytes(budget) if desktop.lower() == WDDM else parse_budget(desktop, "--desktop")
        )
        if taken >= budget:
            raise ConfigError(f"--desktop: {desktop} leaves nothing of {describe_bytes(budget)}")
        budget -= taken
        said.append(
            f"{'Windows' if desktop.lower() == WDDM else 'the desktop'} takes {describe_bytes(taken)}; "
            f"{describe_bytes(budget)} are left"
        )
    return Capacity(budget, tuple(said))
