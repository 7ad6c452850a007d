"""Measurements of the doctor, `mpt diff` and `mpt verify-resume`. `mpt.doctor(...)` is the function of `mpt.api`.

The function and this package have one name, and importing a module of the package makes `mpt.doctor` the package. So
the package can be called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return sys.modules["mpt"].examine(*arguments, **options)  # which is above this package


_package = _Callable(__name__, __doc__)
_package.__dict__.update(
    {name: value for name, value in globals().items() if name.startswith("__")}
)
sys.modules[__name__] = _package  # the import machinery takes the object that it finds here
