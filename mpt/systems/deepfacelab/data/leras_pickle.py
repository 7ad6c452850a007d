"""Write plain data and arrays as pickles that DeepFaceLab loads.

The bytes are put together here, opcode by opcode, with the module names of the NumPy that DeepFaceLab has: Python's
own pickler would write those of the NumPy it runs with. `mpt.data.restricted_pickle` reads them back.

Source: the opcodes' documentation in Python's `pickletools`; NumPy's documented `__reduce__` of arrays and dtypes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np


def write_arrays(file: BinaryIO, arrays: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """Write a dict of arrays as a protocol 4 pickle, without framing, that NumPy from 1.16 on loads."""
    file.write(b"\x80\x04}(")
    for name, array in arrays.items():
        array = np.asarray(array, order="C")
        file.write(_text(name))
        file.write(b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R(K\x01(")
        file.write(b"".join(_integer(side) for side in array.shape) + b"t")
        file.write(b"cnumpy\ndtype\n" + _text(array.dtype.str[1:]) + b"\x89\x88\x87R(K\x03" + _text(array.dtype.str[0]))
        file.write(b"NNN" + _integer(-1) * 2 + b"K\x00tb\x89")
        file.write(b"\x8e" + struct.pack("<Q", array.nbytes))
        file.write(array.data if array.ndim and array.size else array.tobytes())
        file.write(b"tb")
    file.write(b"u.")


def write_plain(value: object) -> bytes:
    """Return None, bool, int, float, str and dicts and lists of them as a protocol 4 pickle."""
    return b"\x80\x04" + _plain(value) + b"."


def _plain(value: object) -> bytes:
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, list):
        return b"](" + b"".join(_plain(item) for item in value) + b"e"
    assert isinstance(value, dict), f"{type(value).__name__} is not plain"
    return b"}(" + b"".join(_plain(key) + _plain(item) for key, item in value.items()) + b"u"


def _text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _integer(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    return b"\x8a\x08" + struct.pack("<q", value)
