"""Read the data inside DeepFaceLab's pickles without ever running a pickle.

The machine of `mpt.foreign.pickles` knows the operations of plain data; here the names that arrays and scalars need
(`ALLOWED`) are recognised and never looked up. So there is no name that could be reached by a longer path, and nothing
is allocated that the file does not hold: an array is made from the bytes that are there, of exactly the number that its
shape and dtype ask for. A NumPy scalar is read as one. A caller may name enumerations (`integers`), whose members are
read as their numbers.

A list, dict or array may be used once: sharing would let a short file unfold into an endless one. `leras_pickle` writes
such pickles.

Source: NumPy's documented `__reduce__` of arrays and dtypes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpt.errors import CheckpointError, MptError
from mpt.foreign.files import read_bytes
from mpt.foreign.pickles import PickleMachine
from mpt.run.process.host_memory import available_bytes

ALLOWED: dict[tuple[str, str], str] = {
    ("numpy._core.multiarray", "_reconstruct"): "reconstruct",
    ("numpy.core.multiarray", "_reconstruct"): "reconstruct",
    ("numpy._core.multiarray", "scalar"): "scalar",
    ("numpy.core.multiarray", "scalar"): "scalar",
    ("numpy", "ndarray"): "ndarray",
    ("numpy", "dtype"): "dtype",
    ("_codecs", "encode"): "encode",
}
DTYPES = frozenset(f"{kind}{size}" for kind in "fiu" for size in (1, 2, 4, 8)) - {"f1"} | {"b1"}
MOST_WORK = 20_000_000
"""A loss history has six operations for each iteration."""
MOST_DEPTH = 64
MOST_FLAT = 64
"""Items of a tuple that may be used again: a shape, a dtype's arguments."""
LARGEST_BYTES = 1 << 40
"""The limit of a file if the free memory is not known."""


@dataclass(eq=False)
class Recognised:
    """One of the recognised names, standing for itself."""

    role: str


@dataclass(eq=False)
class DtypeState:
    """A dtype of plain numbers, and its byte order once that is reported."""

    code: str
    order: str = "="

    def dtype(self) -> np.dtype[Any]:
        """Return NumPy's dtype."""
        return np.dtype(self.order + self.code)


@dataclass(eq=False)
class EmptyArray:
    """An array whose content comes next."""


def read_pickle(
    data: bytes,
    where: str,
    error: type[MptError] = CheckpointError,
    integers: Collection[tuple[str, str]] = (),
) -> Any:
    """Read a pickle: None, bool, int, float, str, bytes, list, tuple, dict, numeric arrays and scalars.

    `integers` are enumerations (module, name) whose members may occur; they come back as plain numbers. Anything else
    raises `error`, naming the file, the byte, and the content found.
    """
    machine = ArrayMachine({**ALLOWED, **dict.fromkeys(integers, "integer")}, len(data))
    try:
        value = machine.run(io.BytesIO(data))
        machine.check_value(value)
        return value
    except ValueError as failure:
        reason = str(failure)[:160]
        raise error(
            f"{where}: refused at byte {machine.position}: {reason}; not loaded"
        ) from failure


def read_arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Return a DeepFaceLab weights file: a dict of arrays by name. CheckpointError for anything else."""
    free = available_bytes()
    try:
        # the arrays are a second copy
        data = read_bytes(path, LARGEST_BYTES if free is None else free // 2)
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
        if (
            not isinstance(name, str)
            or not isinstance(value, np.ndarray)
            or value.dtype.kind not in "fiu"
        ):
            raise CheckpointError(
                f"{path}: entry {str(name)[:80]!r} is a {type(value).__name__}; only arrays of numbers are weights"
            )
    return content


class ArrayMachine(PickleMachine):
    """Builds plain data and NumPy's arrays and scalars; a name may represent the roles that these need."""

    def __init__(self, allowed: Mapping[tuple[str, str], str], most_encoded: int) -> None:
        super().__init__(MOST_WORK)
        self.allowed = allowed
        self.most_encoded = most_encoded
        """Bytes that texts may be copied to: those of the file, in which each occurs once."""

    def check_value(self, value: Any) -> None:
        """Raise ValueError unless a value is plain data throughout and nests no deeper than `MOST_DEPTH`."""
        if self.stack:
            raise ValueError("the pickle does not end with one value")
        waiting = [(value, 1)]
        while waiting:
            one, depth = waiting.pop()
            if isinstance(one, Recognised | DtypeState):
                raise ValueError("a name is used as data")
            if isinstance(one, EmptyArray):
                raise ValueError("an array has no content")
            if not isinstance(one, list | tuple | dict):
                continue
            if depth > MOST_DEPTH:
                raise ValueError(f"containers nest deeper than {MOST_DEPTH}")
            self.spend(len(one))
            items = one.values() if isinstance(one, dict) else one
            waiting += [
                (item, depth + 1)
                for item in items
                if not isinstance(item, int | float | str | bytes)
            ]

    def check_sharing(self, value: Any) -> None:
        """Allow names, numbers and texts to be used again, and short tuples of them."""
        flat = isinstance(value, tuple) and len(value) <= MOST_FLAT
        flat = flat and all(isinstance(item, int | float | str | bytes | None) for item in value)
        if isinstance(value, list | dict | EmptyArray | np.ndarray) or (
            isinstance(value, tuple) and not flat
        ):
            kind = "array" if isinstance(value, EmptyArray | np.ndarray) else type(value).__name__
            raise ValueError(f"a {kind} is used twice, which plain data never needs")

    def name(self, module: str, attribute: str) -> Recognised:
        """Return the object for a recognised name."""
        if (module, attribute) not in self.allowed:
            raise ValueError(
                f"the file names {f'{module}.{attribute}'[:90]!r}; only arrays may be named"
            )
        return Recognised(self.allowed[(module, attribute)])

    def call(self, function: Any, arguments: Any) -> Any:
        """Perform a call of a recognised name."""
        if type(function) is not Recognised or type(arguments) is not tuple:
            raise ValueError("what is called is no name")
        match function.role:
            case "reconstruct":
                return self.reconstruct(arguments)
            case "dtype":
                return self.dtype(arguments)
            case "encode":
                return self.encode(arguments)
            case "scalar":
                return self.scalar(arguments)
            case "integer":
                if len(arguments) != 1 or type(arguments[0]) is not int:
                    raise ValueError("an enumeration's member is named by one number")
                return arguments[0]
        raise ValueError(f"{function.role} may not be called")

    def reconstruct(self, arguments: tuple[Any, ...]) -> EmptyArray:
        """Return an array that waits for its content."""
        if (
            len(arguments) != 3
            or type(arguments[0]) is not Recognised
            or arguments[0].role != "ndarray"
        ):
            raise ValueError("an array is not made of ndarray")
        if arguments[1] != (0,):
            raise ValueError("an array must start empty")
        return EmptyArray()

    def dtype(self, arguments: tuple[Any, ...]) -> DtypeState:
        """Return a dtype of plain numbers."""
        code = arguments[0] if arguments else None
        if (
            type(code) is not str
            or code not in DTYPES
            or arguments[1:] not in ((), (False, True), (0, 1))
        ):
            found = code[:10] if isinstance(code, str) else type(code).__name__
            raise ValueError(f"dtype {found!r} is not one of plain numbers")
        return DtypeState(code)

    def encode(self, arguments: tuple[Any, ...]) -> bytes:
        """Return latin1 text as the bytes that it encodes."""
        if len(arguments) != 2 or arguments[1] != "latin1" or not isinstance(arguments[0], str):
            raise ValueError("only text as latin1 bytes may be encoded")
        self.most_encoded -= len(arguments[0])
        if self.most_encoded < 0:
            raise ValueError("the same text is encoded again and again")
        return arguments[0].encode("latin1")

    def scalar(self, arguments: tuple[Any, ...]) -> np.generic:
        """Return a scalar from its dtype and bytes."""
        if (
            len(arguments) != 2
            or not isinstance(arguments[0], DtypeState)
            or not isinstance(arguments[1], bytes)
        ):
            raise ValueError("a scalar is not a dtype and bytes")
        dtype = arguments[0].dtype()
        if len(arguments[1]) != dtype.itemsize:
            raise ValueError(f"a scalar of {dtype.itemsize} bytes has {len(arguments[1])}")
        value: np.generic = np.frombuffer(arguments[1], dtype)[0]
        return value

    def build(self, state: Any) -> None:
        """Give a dtype its order, or put an array in the place of the one that waits for its content."""
        target = self.stack[-1]
        if type(state) is not tuple:
            raise ValueError(f"a {type(state).__name__} stands where a tuple should")
        if isinstance(target, DtypeState):
            if (
                len(state) != 8
                or state[1] not in ("<", ">", "|", "=")
                or state[2:5] != (None, None, None)
            ):
                raise ValueError("a dtype with fields, subarrays or metadata")
            target.order = state[1]
        elif isinstance(target, EmptyArray):
            self.stack[-1] = build_array(state)
        else:
            raise ValueError("only an array that is still empty may be filled")


def build_array(state: tuple[Any, ...]) -> np.ndarray[Any, Any]:
    """Return an array from exactly the bytes that its shape and dtype ask for."""
    if (
        len(state) != 5
        or state[0] != 1
        or not isinstance(state[2], DtypeState)
        or not isinstance(state[4], bytes)
    ):
        raise ValueError("an array whose state is not (1, shape, dtype, order, bytes)")
    shape, dtype = state[1], state[2].dtype()
    if (
        type(shape) is not tuple
        or len(shape) > 8
        or not all(type(n) is int and 0 <= n < 2**40 for n in shape)
    ):
        raise ValueError("an array's shape is not of at most 8 sizes")
    wanted = math.prod(shape) * dtype.itemsize
    if wanted != len(state[4]):
        raise ValueError(
            f"an array of shape {shape} needs {wanted} bytes, and {len(state[4])} are there"
        )
    flat = np.frombuffer(state[4], dtype)
    return flat.reshape(shape, order="F" if state[3] else "C")
