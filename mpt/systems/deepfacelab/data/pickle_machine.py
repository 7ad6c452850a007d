"""The machine that builds plain data and arrays from a pickle's opcodes; `restricted_pickle` feeds it.

It looks no name up and calls nothing: what a name may stand for are the roles that arrays and scalars need.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from mpt.errors import MptError

DTYPES = frozenset(f"{kind}{size}" for kind in "fiu" for size in (1, 2, 4, 8)) - {"f1"} | {"b1"}
MOST_DEPTH = 64
Names = Mapping[tuple[str, ...], str]
"""(module, name) -> its role."""


@dataclass(eq=False)
class Recognised:
    """One of the recognised names, standing for itself."""

    role: str


@dataclass(eq=False)
class DtypeState:
    """A dtype of plain numbers, and its byte order once that is told."""

    code: str
    order: str = "="


@dataclass(eq=False)
class ArrayState:
    """An array, empty until its content comes."""

    value: np.ndarray[Any, Any] | None = None


class Mark:
    """Where the items of a container begin on the stack."""


class PickleMachine:
    """A stack, a memo, and one method per kind of opcode."""

    def __init__(self, where: str, error: type[MptError], allowed: Names) -> None:
        self.where, self.error, self.position, self.allowed = where, error, 0, allowed
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.depth: dict[int, int] = {}
        self.finished = False

    def fail(self, reason: str) -> NoReturn:
        """Refuse the file."""
        raise self.error(f"{self.where}: refused at byte {self.position}: {reason}; not loaded")

    def result(self) -> Any:
        """Return the one value that the pickle holds."""
        if not self.finished or len(self.stack) != 1:
            self.fail("the pickle does not end with one value")
        return self.plain(self.stack[0])

    def pop(self, kind: type | None = None) -> Any:
        """Take the top of the stack, which must be of a kind."""
        if not self.stack:
            self.fail("a value is missing")
        value = self.stack.pop()
        if kind is not None and type(value) is not kind:
            self.fail(f"a {type(value).__name__} stands where a {kind.__name__} should")
        return value

    def marked(self) -> list[Any]:
        """Take everything down to the last mark."""
        for index in range(len(self.stack) - 1, -1, -1):
            if isinstance(self.stack[index], Mark):
                values = self.stack[index + 1 :]
                del self.stack[index:]
                return values
        self.fail("a mark is missing")

    def plain(self, value: Any) -> Any:
        """Return a value as a container's item: an array that was built, or data; names are neither."""
        if isinstance(value, ArrayState):
            if value.value is None:
                self.fail("an array has no content")
            return value.value
        if isinstance(value, Recognised | DtypeState | Mark):
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
        """Perform one opcode."""
        if self.finished:
            self.fail("more follows the end")
        if name in ("PROTO", "FRAME"):
            return
        if name == "STOP":
            self.finished = True
        elif name == "MARK":
            self.stack.append(Mark())
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
            self.stack.append(Recognised(self.allowed[tuple(argument.split(" ", 1))]))
        elif name == "STACK_GLOBAL":
            self.name_from_stack()
        elif name == "REDUCE":
            self.reduce()
        elif name == "BUILD":
            self.build()
        else:
            self.collect(name)

    def remember(self, index: int) -> None:
        """Put the top of the stack into the memo."""
        if not self.stack or isinstance(self.stack[-1], Mark):
            self.fail("nothing to remember")
        self.memo[index] = self.stack[-1]

    def recall(self, index: int) -> None:
        """Push what the memo holds: a name, or a value that cannot be unfolded."""
        if index not in self.memo:
            self.fail(f"memo {index} is empty")
        value = self.memo[index]
        flat = isinstance(value, tuple) and all(isinstance(item, int | float | str | bytes | None) for item in value)
        if isinstance(value, list | dict | ArrayState) or (isinstance(value, tuple) and not flat):
            kind = "array" if isinstance(value, ArrayState) else type(value).__name__
            self.fail(f"a {kind} is used twice, which plain data never needs")
        self.stack.append(value)

    def name_from_stack(self) -> None:
        """Push what a name that was built as text stands for."""
        name, module = self.pop(str), self.pop(str)
        if (module, name) not in self.allowed:
            self.fail(f"the file names {f'{module}.{name}'[:120]!r}; only arrays may be named")
        self.stack.append(Recognised(self.allowed[(module, name)]))

    def collect(self, name: str) -> None:
        """Make or extend a list, tuple or dict."""
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
        """Do what a recognised name stands for when it is called."""
        arguments, function = self.pop(tuple), self.pop(Recognised)
        if function.role == "reconstruct":
            first, *rest = arguments or (None,)
            if not (
                isinstance(first, Recognised)
                and first.role == "ndarray"
                and rest
                and rest[0] == (0,)
                and len(rest) == 2
            ):
                self.fail("an array must start empty")
            self.stack.append(ArrayState())
        elif function.role == "dtype":
            if not arguments or arguments[0] not in DTYPES or arguments[1:] not in ((), (False, True), (0, 1)):
                self.fail(f"dtype {str(arguments)[:60]} is not one of plain numbers")
            self.stack.append(DtypeState(arguments[0]))
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
        """Return a scalar from its dtype and bytes."""
        if len(arguments) != 2 or not isinstance(arguments[0], DtypeState) or not isinstance(arguments[1], bytes):
            self.fail("a scalar is not a dtype and bytes")
        dtype = np.dtype(arguments[0].order + arguments[0].code)
        if len(arguments[1]) != dtype.itemsize:
            self.fail(f"a scalar of {dtype.itemsize} bytes has {len(arguments[1])}")
        value: np.generic = np.frombuffer(arguments[1], dtype)[0]
        return value

    def build(self) -> None:
        """Give a dtype its order, or an array its content."""
        state = self.pop(tuple)
        target = self.stack[-1] if self.stack else None
        if isinstance(target, DtypeState):
            if len(state) != 8 or state[1] not in ("<", ">", "|", "=") or state[2:5] != (None, None, None):
                self.fail("a dtype with fields, subarrays or metadata")
            target.order = state[1]
        elif isinstance(target, ArrayState) and target.value is None:
            target.value = self.array(state)
        else:
            self.fail("only an array that is still empty may be filled")

    def array(self, state: tuple[Any, ...]) -> np.ndarray[Any, Any]:
        """Return an array from exactly the bytes that its shape and dtype ask for."""
        if len(state) != 5 or state[0] != 1 or not isinstance(state[2], DtypeState) or not isinstance(state[4], bytes):
            self.fail("an array whose state is not (1, shape, dtype, order, bytes)")
        shape, dtype = state[1], np.dtype(state[2].order + state[2].code)
        if not isinstance(shape, tuple) or len(shape) > 8 or not all(type(n) is int and 0 <= n < 2**40 for n in shape):
            self.fail(f"an array's shape is {str(shape)[:60]}")
        wanted = math.prod(shape) * dtype.itemsize
        if wanted != len(state[4]):
            self.fail(f"an array of shape {shape} needs {wanted} bytes, and {len(state[4])} are there")
        flat = np.frombuffer(state[4], dtype)
        return flat.reshape(shape, order="F" if state[3] else "C")
