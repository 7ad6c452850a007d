"""Torch's question before each call of a mode, whether its operator has a rule for the mode, asked in fewer calls.

`torch._library.simple_registry` makes an entry for each operator that it is asked about, by three functions in Python:
a thirtieth of a trace, of which a half are questions for a device. Here there are entries of operators with rules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._library import simple_registry


def shorten() -> None:
    """Answer from what is registered; to be called before the first mode is entered, since torch keeps the function."""
    entries = simple_registry.singleton._data

    def find(operator: Any, mode: type) -> Callable[..., Any] | None:
        entry = entries.get(operator.__qualname__)
        return None if entry is None else entry.torch_dispatch_rules.find(mode)

    setattr(simple_registry, "find_torch_dispatch_rule", find)  # noqa: B010 - its stub names the arguments
