"""Read the data inside DeepFaceLab's pickles without ever running a pickle.

Python's unpickler is a machine that calls what a file names. This is another machine: it knows the opcodes of plain
data and arrays and nothing else, and the names that arrays and scalars need (`ALLOWED`) are not looked up but
recognised.
So there is no name that could be reached by a longer path, and nothing is allocated that the file does not hold: an
array is made from the bytes that are there, which must be exactly what its shape and dtype ask for. A NumPy scalar is
read as one. A caller may name enumerations (`integers`), whose members are read as their numbers.

The opcodes are walked once to refuse what is not allowed, then once more to build. A list, dict or array may be used
once: sharing would let a short file unfold into an endless one. `leras_pickle` writes such pickles.

Source: the opcodes' documentation in Python's `pickletools`; NumPy's documented `__reduce__` of arrays and dtypes.
"""

from __future__ import annotations

import io
import pickletools
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mpt.errors import CheckpointError, MptError
from mpt.systems.deepfacelab.data.pickle_machine import Names, PickleMachine

ALLOWED: dict[tuple[str, ...], str] = {
    ("numpy._core.multiarray", "_reconstruct"): "reconstruct",
    ("numpy.core.multiarray", "_reconstruct"): "reconstruct",
    ("numpy._core.multiarray", "scalar"): "scalar",
    ("numpy.core.multiarray", "scalar"): "scalar",
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "encode",
}
PLAIN = frozenset(
    """
    PROTO FRAME STOP MARK POP POP_MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT SHORT_BINUNICODE
    BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8 EMPTY_DICT EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2
    TUPLE3 LIST DICT APPEND APPENDS SETITEM SETITEMS BINPUT LONG_BINPUT BINGET LONG_BINGET MEMOIZE GLOBAL
    STACK_GLOBAL REDUCE BUILD
    """.split()  # noqa: SIM905
)
MOST_OPCODES = 20_000_000
Opcode = tuple[str, Any, int]


def read_pickle(
    data: bytes,
    where: str,
    error: type[MptError] = CheckpointError,
    integers: Collection[tuple[str, str]] = (),
) -> Any:
    """Return what a pickle holds: None, bool, int, float, str, bytes, list, tuple, dict, numeric arrays and scalars.

    `integers` are enumerations (module, name) whose members may occur; they come back as plain numbers. Anything else
    raises `error`, naming `where`, the byte, and what was found there.
    """
    allowed: Names = {**ALLOWED, **dict.fromkeys(integers, "integer")}
    for _ in _walk(data, where, error, allowed):
        pass
    machine = PickleMachine(where, error, allowed)
    for name, argument, position in _walk(data, where, error, allowed):
        machine.position = position
        machine.run(name, argument)
    return machine.result()


def read_arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return a DeepFaceLab weights file: a dict of arrays by name. CheckpointError for anything else."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}); name a folder of DeepFaceLab models"
        ) from error
    content = read_pickle(data, str(path))
    if not isinstance(content, dict):
        raise CheckpointError(
            f"{path}: holds a {type(content).__name__}; DeepFaceLab's weights are a dict of arrays by name"
        )
    for name, value in content.items():
        if isinstance(value, np.generic):
            content[name] = value = np.asarray(value)
        if not isinstance(name, str) or not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu":
            raise CheckpointError(
                f"{path}: entry {str(name)[:80]!r} is a {type(value).__name__}; only arrays of numbers are weights"
            )
    return content


def _walk(data: bytes, where: str, error: type[MptError], allowed: Names) -> Iterator[Opcode]:
    """Yield (name, argument, position), refusing every opcode that plain data and arrays do not need."""
    count = 0
    try:
        for opcode, argument, position in pickletools.genops(io.BytesIO(data)):
            count += 1
            if opcode.name not in PLAIN:
                raise error(
                    f"{where}: refused at byte {position}: opcode {opcode.name} is no part of plain data; not loaded"
                )
            if opcode.name == "GLOBAL" and tuple(str(argument).split(" ", 1)) not in allowed:
                raise error(
                    f"{where}: refused at byte {position}: the file names {argument!r}; only arrays may be named"
                )
            if count > MOST_OPCODES:
                raise error(f"{where}: refused: more than {MOST_OPCODES} opcodes")
            yield opcode.name, argument, position or 0
    except (ValueError, IndexError, OverflowError, struct.error) as failure:
        raise error(f"{where}: damaged or no pickle at all ({str(failure)[:120]}); not loaded") from failure
