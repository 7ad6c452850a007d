"""The fake device's guard, which lets an error inside a backward come out as an error.

While an exception leaves autograd's engine, torch asks the guard for its device type in a destructor. If the error
came from a Python hook (one on a tensor or a gradient, or the recomputation of a checkpoint), Python's error indicator
is still set then, so that a call into Python fails and torch ends the process without a word. This guard takes the
error away before anything else; the engine then raises a SystemError without a cause, and `lost_error` has the true
one.

Its first call must be this one, and by a function that makes none itself: hence ctypes without argument types.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_fetch: Any = ctypes.PyDLL(None).PyErr_Fetch
_fetch.restype = None
_kind, _value, _traceback = (ctypes.py_object() for _ in range(3))
_places = tuple(ctypes.byref(place) for place in (_kind, _value, _traceback))
_type: Any = torch._C._autograd.DeviceType.PrivateUse1
_lost: list[BaseException] = []


class DeviceGuard(torch._C._acc.DeviceGuard):
    """A device of the type that torch leaves to others."""

    def type_(self) -> Any:
        """Return the device type, and keep an error that is on its way."""
        _fetch(*_places)
        if _kind:
            _keep()
        return _type


def _keep() -> None:
    error = _value.value if _value else None
    if not isinstance(error, BaseException):
        error = _kind.value() if error is None else _kind.value(error)
    _lost.append(error.with_traceback(_traceback.value) if _traceback else error)


def lost_error() -> BaseException | None:
    """Return the first error that was taken away since the last question, and forget it."""
    error = _lost[0] if _lost else None
    _lost.clear()
    return error
