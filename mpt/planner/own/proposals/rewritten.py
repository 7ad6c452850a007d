"""Networks that put other tensors into the lists that they are given: they cannot be computed again from these."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules import module as global_hooks


@contextmanager
def noting_rewriting() -> Iterator[set[int]]:
    """Note the identities of the networks, called inside the block, that change a list among their arguments."""
    found: set[int] = set()
    given: dict[int, list[tuple[list[Any], list[Any]]]] = {}

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        given[id(module)] = [(one, list(one)) for one in args if isinstance(one, list)]

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        for now, then in given.pop(id(module), ()):
            if len(now) != len(then) or any(a is not b for a, b in zip(now, then, strict=True)):
                found.add(id(module))

    hooks = [
        global_hooks.register_module_forward_pre_hook(before),
        global_hooks.register_module_forward_hook(after),
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
