"""The parent package of parts outside mpt: `my-parts/nn/net.py` is `mpt.parts.my_parts.nn.net`.

A folder has no import name of its own, and putting it on `sys.path` would let its `data` or `nn` shadow other packages.
So it becomes a package below this one, in which the files may import each other (`from ..losses.mine import mine`).
The folder is found by the registry at the time of the import; a data worker that unpickles a data set finds it by
`MPT_PARTS`, as every other process that mpt starts does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from mpt.config.finding.part_packages import IMPORT_HOME, outside_packages


class Finder:
    """Finds `mpt.parts.NAME` and nothing else; Python finds its submodules in its folder."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of a namespace package over the folder of that name."""
        if name.rpartition(".")[0] != IMPORT_HOME:
            return None
        for package in outside_packages():
            if package.module_name == name:
                spec = ModuleSpec(name, None, is_package=True)
                spec.submodule_search_locations = [str(package.folder)]
                return spec
        return None


sys.meta_path.append(Finder)
