"""The modules of several networks by dotted names ("gen.layers.0"), as settings and messages write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from mpt.errors import ConfigError


def named_modules(networks: Mapping[str, nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return all modules with their names, outermost first."""
    return [
        (f"{name}.{path}".rstrip("."), module)
        for name, root in networks.items()
        for path, module in root.named_modules()
    ]


def matching_modules(
    networks: Mapping[str, nn.Module], globs: Sequence[str], setting: str
) -> list[nn.Module]:
    """Return the modules whose name matches a glob, each once. Raises ConfigError for a glob without a match."""
    names = dict(named_modules(networks))
    chosen: dict[nn.Module, None] = {}
    for glob in globs:
        found = [module for name, module in names.items() if fnmatchcase(name, glob)]
        if not found:
            known = ", ".join([name for name in names if name.count(".") <= 1][:12])
            raise ConfigError(f"{setting}: no module matches {glob!r}; there are {known}, ...")
        chosen.update(dict.fromkeys(found))
    return list(chosen)


def module_at(modules: Mapping[str, nn.Module], path: str) -> nn.Module:
    """Return a module by its dotted name, which begins with a network's."""
    key = max((key for key in modules if path == key or path.startswith(f"{key}.")), key=len)
    return modules[key].get_submodule(path[len(key) + 1 :])
