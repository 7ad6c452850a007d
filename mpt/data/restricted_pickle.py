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
import math
import pickletools
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from mpt.errors import CheckpointError, MptError

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
DTYPES = frozenset(f"{kind}{size}" for kind in "fiu" for size in (1, 2, 4, 8)) - {"f1"} | {"b1"}
MOST_OPCODES = 20_000_000
MOST_DEPTH = 64


@dataclass(eq=False)
class _Name:
    """One of the recognised names, standing for itself."""

    role: str


@dataclass(eq=False)
class _Dtype:
    code: str
    order: str = "="


@dataclass(eq=False)
class _Array:
    value: np.ndarray[Any, Any] | None = None


class _Mark:
    pass


Opcode = tuple[str, Any, int]
Names = Mapping[tuple[str, ...], str]
"""(module, name) -> its role."""


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
    machine = _Machine(where, error, allowed)
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


class _Machine:
    """A stack, a memo, and one method per kind of opcode."""

    def __init__(self, where: str, error: type[MptError], allowed: Names) -> None:
        self.where, self.error, self.position, self.allowed = where, error, 0, allowed
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.depth: dict[int, int] = {}
        self.finished = False

    def fail(self, reason: str) -> NoReturn:
        raise self.error(f"{self.where}: refused at byte {self.position}: {reason}; not loaded")

    def result(self) -> Any:
        if not self.finished or len(self.stack) != 1:
            self.fail("the pickle does not end with one value")
        return self.plain(self.stack[0])

    def pop(self, kind: type | None = None) -> Any:
        if not self.stack:
            self.fail("a value is missing")
        value = self.stack.pop()
        if kind is not None and type(value) is not kind:
            self.fail(f"a {type(value).__name__} stands where a {kind.__name__} should")
        return value

    def marked(self) -> list[Any]:
        for index in range(len(self.stack) - 1, -1, -1):
            if isinstance(self.stack[index], _Mark):
                values = self.stack[index + 1 :]
                del self.stack[index:]
                return values
        self.fail("a mark is missing")

    def plain(self, value: Any) -> Any:
        """Return a value as a container's item: an array that was built, or data; names are neither."""
        if isinstance(value, _Array):
            if value.value is None:
                self.fail("an array has no content")
            return value.value
        if isinstance(value, _Name | _Dtype | _Mark):
            self.fail("a name is used as data")
        return value

    def put(self, value: Any, items: list[Any]) -> None:
        """Push a container, knowing how deep it is."""
        depth = 1 + max((self.depth.get(id(item), 0) for item in items), default=0)
        if depth > MOST_DEPTH:
            self.fail(f"containers nest deeper than {MOST_DEPTH}")
        self.depth[id(value)] = max(depth, self.depth.get(id(value), 0))
        self.stack.append(value)

    def run(self, name: str, argument: Any) -> None:
        if self.finished:
            self.fail("more follows the end")
        if name in ("PROTO", "FRAME"):
            return
        if name == "STOP":
            self.finished = True
        elif name == "MARK":
            self.stack.append(_Mark())
        elif name == "POP":
            self.pop()
        elif name == "POP_MARK":
            self.marked()
        elif name in ("NONE", "NEWTRUE", "NEWFALSE"):
            self.stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
        elif name.startswith(("BININT", "LONG1", "BINFLOAT", "SHORT_BIN", "BINUNICODE", "BINBYTES")):
            self.stack.append(argument)
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self.remember(len(self.memo) if name == "MEMOIZE" else argument)
        elif name in ("BINGET", "LONG_BINGET"):
            self.recall(argument)
        elif name == "GLOBAL":
            self.stack.append(_Name(self.allowed[tuple(argument.split(" ", 1))]))
        elif name == "STACK_GLOBAL":
            self.name_from_stack()
        elif name == "REDUCE":
            self.reduce()
        elif name == "BUILD":
            self.build()
        else:
            self.collect(name)

    def remember(self, index: int) -> None:
        if not self.stack or isinstance(self.stack[-1], _Mark):
            self.fail("nothing to remember")
        self.memo[index] = self.stack[-1]

    def recall(self, index: int) -> None:
        if index not in self.memo:
            self.fail(f"memo {index} is empty")
        value = self.memo[index]
        flat = isinstance(value, tuple) and all(isinstance(item, int | float | str | bytes | None) for item in value)
        if isinstance(value, list | dict | _Array) or (isinstance(value, tuple) and not flat):
            self.fail(f"a {type(value).__name__.strip('_').lower()} is used twice, which plain data never needs")
        self.stack.append(value)

    def name_from_stack(self) -> None:
        name, module = self.pop(str), self.pop(str)
        if (module, name) not in self.allowed:
            self.fail(f"the file names {f'{module}.{name}'[:120]!r}; only arrays may be named")
        self.stack.append(_Name(self.allowed[(module, name)]))

    def collect(self, name: str) -> None:
        if name.startswith("EMPTY_"):
            self.put({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[name](), [])
        elif name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
            items = self.marked() if name == "TUPLE" else [self.pop() for _ in range(int(name[-1]))][::-1]
            self.put(tuple(items), items)
        elif name == "LIST":
            items = [self.plain(item) for item in self.marked()]
            self.put(items, items)
        elif name in ("APPEND", "APPENDS"):
            items = self.marked() if name == "APPENDS" else [self.pop()]
            target = self.pop(list)
            target.extend(self.plain(item) for item in items)
            self.put(target, items)
        else:
            items = [self.pop(), self.pop()][::-1] if name == "SETITEM" else self.marked()
            target = {} if name == "DICT" else self.pop(dict)
            if len(items) % 2:
                self.fail("a dict has a key without a value")
            for key, value in zip(items[::2], items[1::2]):
                if not isinstance(key, str | int | float | bytes | None):
                    self.fail(f"a dict key is a {type(key).__name__}")
                target[key] = self.plain(value)
            self.put(target, items)

    def reduce(self) -> None:
        arguments, function = self.pop(tuple), self.pop(_Name)
        if function.role == "reconstruct":
            first, *rest = arguments or (None,)
            if not (
                isinstance(first, _Name) and first.role == "ndarray" and rest and rest[0] == (0,) and len(rest) == 2
            ):
                self.fail("an array must start empty")
            self.stack.append(_Array())
        elif function.role == "dtype":
            if not arguments or arguments[0] not in DTYPES or arguments[1:] not in ((), (False, True), (0, 1)):
                self.fail(f"dtype {str(arguments)[:60]} is not one of plain numbers")
            self.stack.append(_Dtype(arguments[0]))
        elif function.role == "encode":
            if len(arguments) != 2 or arguments[1] != "latin1" or not isinstance(arguments[0], str):
                self.fail("only text as latin1 bytes may be encoded")
            try:
                self.stack.append(arguments[0].encode("latin1"))
            except UnicodeEncodeError:
                self.fail("text that is not latin1")
        elif function.role == "scalar":
            self.stack.append(self.scalar(arguments))
        elif function.role == "integer":
            if len(arguments) != 1 or type(arguments[0]) is not int:
                self.fail("an enumeration's member is named by one number")
            self.stack.append(arguments[0])
        else:
            self.fail(f"{function.role} may not be called")

    def scalar(self, arguments: tuple[Any, ...]) -> np.generic:
        if len(arguments) != 2 or not isinstance(arguments[0], _Dtype) or not isinstance(arguments[1], bytes):
            self.fail("a scalar is not a dtype and bytes")
        dtype = np.dtype(arguments[0].order + arguments[0].code)
        if len(arguments[1]) != dtype.itemsize:
            self.fail(f"a scalar of {dtype.itemsize} bytes has {len(arguments[1])}")
        value: np.generic = np.frombuffer(arguments[1], dtype)[0]
        return value

    def build(self) -> None:
        state = self.pop(tuple)
        target = self.stack[-1] if self.stack else None
        if isinstance(target, _Dtype):
            if len(state) != 8 or state[1] not in ("<", ">", "|", "=") or state[2:5] != (None, None, None):
                self.fail("a dtype with fields, subarrays or metadata")
            target.order = state[1]
        elif isinstance(target, _Array) and target.value is None:
            target.value = self.array(state)
        else:
            self.fail("only an array that is still empty may be filled")

    def array(self, state: tuple[Any, ...]) -> np.ndarray[Any, Any]:
        if len(state) != 5 or state[0] != 1 or not isinstance(state[2], _Dtype) or not isinstance(state[4], bytes):
            self.fail("an array whose state is not (1, shape, dtype, order, bytes)")
        shape, dtype = state[1], np.dtype(state[2].order + state[2].code)
        if not isinstance(shape, tuple) or len(shape) > 8 or not all(type(n) is int and 0 <= n < 2**40 for n in shape):
            self.fail(f"an array's shape is {str(shape)[:60]}")
        wanted = math.prod(shape) * dtype.itemsize
        if wanted != len(state[4]):
            self.fail(f"an array of shape {shape} needs {wanted} bytes, and {len(state[4])} are there")
        flat = np.frombuffer(state[4], dtype)
        return flat.reshape(shape, order="F" if state[3] else "C")
