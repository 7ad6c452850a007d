"""Write plain data and arrays as pickles that DeepFaceLab loads.

The bytes are put together here, opcode by opcode, with the module names of the NumPy that DeepFaceLab has: Python's
own pickler would write those of the NumPy it runs with. `restricted_pickle` reads them back.

Source: the opcodes' documentation in Python's `pickletools`; NumPy's documented `__reduce__` of arrays and dtypes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np


def write_arrays(file: BinaryIO, arrays: Mapping[str, np.ndarray[Any, Any] | np.generic]) -> None:
    """Write a dict of arrays and scalars as a protocol 4 pickle, without framing, that NumPy from 1.16 on loads."""
    file.write(b"\x80\x04}(")
    for name, array in arrays.items():
        file.write(_text(name))
        for part in _numpy(array):
            file.write(part)
    file.write(b"u.")


def write_plain(value: object) -> bytes:
    """Return None, bool, int, float, str, bytes, arrays, NumPy scalars, and dicts, lists and tuples of them as a
    protocol 4 pickle.
    """
    return b"\x80\x04" + _plain(value) + b"."


def _plain(value: object) -> bytes:
    if isinstance(value, np.ndarray | np.generic):  # before float, which np.float64 is
        return b"".join(bytes(part) for part in _numpy(value))
    if value is None or isinstance(value, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if isinstance(value, int):
        return _integer(value)
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bytes):
        return b"\x8e" + struct.pack("<Q", len(value)) + value
    if isinstance(value, list):
        return b"](" + b"".join(map(_plain, value)) + b"e"
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_plain, value)) + b"t"
    assert isinstance(value, dict), f"{type(value).__name__} is not plain"
    return b"}(" + b"".join(_plain(key) + _plain(item) for key, item in value.items()) + b"u"


def _numpy(value: np.ndarray[Any, Any] | np.generic) -> Iterator[bytes | memoryview]:
    """Yield the pieces of an array's or a scalar's pickle; a large array's bytes are not copied."""
    if isinstance(value, np.generic):
        data = value.tobytes()
        yield (
            b"cnumpy.core.multiarray\nscalar\n"
            + _dtype(value.dtype)
            + b"C"
            + struct.pack("<B", len(data))
        )
        yield data + b"\x86R"
        return
    fortran = value.flags.f_contiguous and not value.flags.c_contiguous
    array = np.asarray(value.T if fortran else value, order="C")
    yield b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R(K\x01("
    yield b"".join(_integer(side) for side in value.shape) + b"t" + _dtype(value.dtype)
    yield (b"\x88" if fortran else b"\x89") + b"\x8e" + struct.pack("<Q", array.nbytes)
    yield array.data.cast("B") if array.ndim and array.size else array.tobytes()
    yield b"tb"


def _dtype(dtype: np.dtype[Any]) -> bytes:
    order, code = dtype.str[0], dtype.str[1:]
    size = b"NNN" + _integer(-1) * 2 + b"K\x00tb"
    return b"cnumpy\ndtype\n" + _text(code) + b"\x89\x88\x87R(K\x03" + _text(order) + size


def _text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _integer(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return b"J" + struct.pack("<i", value)
    length = value.bit_length() // 8 + 1
    assert length < 256, "numbers of files have at most 255 bytes"
    return b"\x8a" + struct.pack("<B", length) + value.to_bytes(length, "little", signed=True)
