"""What each step leaves behind for good, such as `losses.append(loss)` or features that are collected in a list.

A plan has two steps, and a training many. What both steps left, as often as both did, is taken to be left by each step:
a state that the first step makes is made once, and a batch that is kept until the next is gone after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from mpt.config.sizes import format_bytes
from mpt.planner.trace.trace import Trace

LEAST_BYTES = 64 * 1024
"""Of each step; a thousand steps with less need no note."""
STEPS = 1000


def left_by_each_step(trace: Trace) -> tuple[int, list[str]]:
    """Return the bytes that both traced steps left at the end, and the modules or operators that made the most."""
    first = next((span.start for span in trace.spans if span.moment != "build"), 0)
    second = next((span.start for span in trace.spans if span.step == 1), first)
    born = {entry: place for place, entry in enumerate(trace.events) if entry >= 0}
    alive = trace.live_at(len(trace.events))

    def kinds(found: Iterable[int]) -> Counter[tuple[str, str, int]]:
        given = [trace.storages[index] for index in found]
        return Counter((one.module, one.operator, one.size) for one in given)

    after_first = {one for one in trace.live_at(second - 1) if born[one] >= first}
    by_second = kinds(one for one in alive if born[one] >= second)
    replaced = kinds(after_first - alive)  # a batch, which a variable holds until the next
    both = (by_second - replaced) & kinds(after_first & alive)
    sizes: Counter[str] = Counter()
    for (module, operator, size), count in both.items():
        sizes[module or operator.removeprefix("aten::")] += size * count
    return sizes.total(), [name for name, _ in sizes.most_common(2)]


def growth_note(trace: Trace) -> list[str]:
    """Return a note if a training needs more with every step."""
    size, makers = left_by_each_step(trace)
    if size < LEAST_BYTES:
        return []
    return [
        f"each step leaves {format_bytes(size)} on the card ({', '.join(makers)}), which comes on top of the plan: "
        f"{format_bytes(STEPS * size)} after {STEPS:,} steps if none is dropped. A list of losses or features keeps "
        "them; `.item()`, `.detach().cpu()` or a new list ends that"
    ]
