"""The names by which a script knows its networks, as it would write them.

A variable of the step names a network, an object that holds some (`model.generator`), or a collection of them
(`nets["a"]`). Of a network that is part of another one, its own name counts: not that of a moving average or a wrapper
around it.
"""

from __future__ import annotations

import keyword
from collections.abc import Container, Iterable, Iterator, Mapping
from types import ModuleType, NoneType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

COMPILED = "_orig_mod"
"""The part of `torch.compile(model)` that is the model; its own parts can be had from both."""
CLOSED = (nn.Module, Tensor, Optimizer, ModuleType, type)
"""Values whose attributes are none of a script's own."""


def named_networks(values: Mapping[str, Any], renamed: Container[str] = ()) -> dict[str, nn.Module]:
    """Return the networks among a script's variables and in its own objects and collections, by name.

    `renamed`: variables whose name counts last.
    """
    whole = {
        name: getattr(one, COMPILED, one)
        for name, one in values.items()
        if isinstance(one, nn.Module)
    }
    found = {name: one for name, one in whole.items() if name not in renamed}
    known = {id(one) for one in found.values()}
    for name, value in values.items():
        for part, one in _parts(name, value):
            if isinstance(one, nn.Module) and id(one) not in known:
                known.add(id(one))
                found[part] = one
    found |= {name: one for name, one in whole.items() if id(one) not in known}
    return parts_first(found)


def are_compiled(networks: Iterable[nn.Module]) -> bool:
    """Return whether a script lets torch compile one of these."""
    return any(COMPILED in one._modules or one._compiled_call_impl is not None for one in networks)


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        # what it holds, which a lazy mapping of a library's classes would import
        yield from ((f"{name}[{key!r}]", one) for key, one in list(dict.items(value)))
    elif isinstance(value, list | tuple):
        yield from ((f"{name}[{place}]", one) for place, one in enumerate(value))
    elif not isinstance(value, CLOSED):
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            yield from ((f"{name}.{key}", one) for key, one in list(own.items()))


def parts_first(networks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return networks in their order, but those that are part of another one before it."""
    inside = {key: {id(part) for part in one.modules()} for key, one in networks.items()}
    holders = {
        key: sum(id(one) in parts for parts in inside.values()) for key, one in networks.items()
    }
    return dict(sorted(networks.items(), key=lambda item: -holders[item[0]]))


def as_written(path: str, networks: Mapping[str, nn.Module]) -> str:
    """Return a module's path as Python has it: `model.layers.0.blocks` is `model.layers[0].blocks`.

    Of a path that is in none of the networks the first word is taken to be a variable.
    """
    root = max((key for key in networks if f"{path}.".startswith(f"{key}.")), key=len, default="")
    found = root or path.partition(".")[0]
    module = networks.get(root)
    for part in path[len(found) + 1 :].split(".") if len(path) > len(found) else ():
        if isinstance(module, nn.ModuleDict):
            found += f"[{part!r}]"
        elif part.isdecimal() and isinstance(module, nn.Sequential | nn.ModuleList | NoneType):
            found += f"[{part}]"
        elif part.isidentifier() and not keyword.iskeyword(part):
            found += f".{part}"
        else:
            found += f".get_submodule({part!r})"
        module = None if module is None else module.get_submodule(part)
    return found
