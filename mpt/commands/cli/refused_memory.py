"""The message of a command that ran out of memory: the refused bytes, and the options that ask for less."""

from __future__ import annotations

from typing import Any

from mpt.engine.step.faults import describe_out_of_memory, is_out_of_memory, out_of_memory_reason
from mpt.errors import MemoryBudgetError


def explain(error: Exception, asked: Any) -> MemoryBudgetError | None:
    """Return the error of a command that found no memory; None if an exception is something else.

    `asked` are the command's arguments. Trainings adapt, and report in more detail; this is for all that remains.
    """
    if not is_out_of_memory(error):
        return None
    found = vars(asked)
    ways = ["a smaller --batch-size"] if "batch_size" in found else []
    ways += ["--vram SIZE"] if found.get("vram", "") is None else []
    ways += ["--half"] if found.get("half") is False else []
    ways += ["--device cpu"] if found.get("device", "cpu") != "cpu" else []
    advice = f"try {', '.join(ways[:-1])}{' or ' if ways[1:] else ''}{ways[-1]}" if ways else ""
    return MemoryBudgetError(describe_out_of_memory("", out_of_memory_reason(error), advice))
