"""One machine for the pickles of others: it understands data, looks no name up, calls nothing and has a budget.

Python's unpickler is a machine that calls whatever a file names. This one knows the operations of plain data; what a
name, a call or a reference means is for the format that derives from it: `mpt.weights.torch_pickle` describes
tensors, a system's own builds arrays.

The budget counts pushed items, so time and memory are bounded by the file's length and never by what its sharing
would unfold to: a list that holds itself twice, forty times over, is forty-odd lists here. The same holds for callers:
they must not print, compare, sort or hash a value before its type is known.

Source: the operations' documentation in Python's `pickletools`.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

LITERALS = frozenset(
    (
        *(
            "BINUNICODE",
            "SHORT_BINUNICODE",
            "BINUNICODE8",
            "BINBYTES",
            "SHORT_BINBYTES",
            "BINBYTES8",
        ),
        *("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    )
)
"""Operations that push their argument."""
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
LONGEST_NAME = 1000
"""Longer keys and names are refused: a text that is used a million times would be compared or copied as often."""


class Mark:
    """The start of a container's items on the stack."""


NEW: dict[str, Callable[[], Any]] = {
    "MARK": Mark,
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
}
"""Operation -> what it puts on the stack."""


class PickleMachine:
    """A stack and a memo; a format defines `name`, `call`, `build` and whatever else it allows."""

    def __init__(self, most_work: int) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.position = 0
        self.work, self.most_work = 0, most_work

    def run(self, stream: BytesIO) -> Any:
        """Interpret the pickle at the stream's position, leave the stream behind it, and return its value.

        Raises ValueError at the first thing that is not data.
        """
        try:
            for operation, argument, position in pickletools.genops(stream):
                self.position = position or 0
                self.spend(1)
                if operation.name == "STOP":
                    return self.pop()
                self.do(operation.name, argument)
        except (
            IndexError,
            KeyError,
            TypeError,
            AttributeError,
            OverflowError,
            MemoryError,
            struct.error,
        ) as error:
            raise ValueError(f"its pickle is damaged ({type(error).__name__})") from error
        raise ValueError("its pickle has no end")

    def spend(self, work: int) -> None:
        """Count work: one for each operation and for each item that is looked at again."""
        self.work += work
        if self.work > self.most_work:
            raise ValueError("its pickle is too long for what it should hold")

    def do(self, name: str, argument: Any) -> None:
        """Perform one operation."""
        stack = self.stack
        if name in LITERALS:
            stack.append(argument)
            return
        if name in NEW:
            stack.append(NEW[name]())
            return
        match name:
            case "PROTO" | "FRAME":
                pass
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                self.check_sharing(self.memo[argument])
                stack.append(self.memo[argument])
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append(CONSTANTS[name])
            case "GLOBAL":
                module, _, attribute = argument.partition(" ")
                stack.append(self.name(*check_name(module, attribute)))
            case "STACK_GLOBAL":
                attribute, module = self.pop(), self.pop()
                stack.append(self.name(*check_name(module, attribute)))
            case "REDUCE":
                arguments = self.pop()
                stack.append(self.call(self.pop(), arguments))
            case "BUILD":
                self.build(self.pop())
            case "POP":
                stack.pop()
            case "POP_MARK":
                self.pop_to_mark()
            case _:
                if not self.fills(name):
                    self.do_other(name, argument)

    def fills(self, name: str) -> bool:
        """Perform an operation that makes or fills a container of what is on the stack; return whether it is one."""
        stack = self.stack
        match name:
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple([self.pop() for _ in range(int(name[-1]))][::-1]))
            case "TUPLE":
                stack.append(tuple(self.pop_to_mark()))
            case "LIST":
                stack.append(self.pop_to_mark())
            case "DICT":
                items = self.pop_to_mark()
                stack.append({})
                self.set_items(items)
            case "APPEND" | "APPENDS":
                items = [self.pop()] if name == "APPEND" else self.pop_to_mark()
                self.extend(items)
            case "SETITEM" | "SETITEMS":
                items = [self.pop(), self.pop()][::-1] if name == "SETITEM" else self.pop_to_mark()
                self.set_items(items)
            case _:
                return False
        return True

    def pop(self) -> Any:
        """Remove and return the top of the stack, which may be no mark."""
        value = self.stack.pop()
        if isinstance(value, Mark):
            raise ValueError("its pickle uses a mark as a value")
        return value

    def pop_to_mark(self) -> list[Any]:
        """Remove and return all above the last mark."""
        items: list[Any] = []
        while not isinstance(item := self.stack.pop(), Mark):
            items.append(item)
        return items[::-1]

    def top(self, kind: type) -> Any:
        """Return the top of the stack, which must be of this kind."""
        if not isinstance(self.stack[-1], kind):
            raise ValueError(
                f"its pickle treats a {type(self.stack[-1]).__name__} as a {kind.__name__}"
            )
        return self.stack[-1]

    def extend(self, items: Sequence[Any]) -> None:
        """Append to the list on top."""
        self.top(list).extend(items)

    def set_items(self, items: Sequence[Any]) -> None:
        """Put key-value pairs into the dict on top."""
        check_pairs(items)
        self.top(dict).update(zip(items[::2], items[1::2], strict=True))

    def check_sharing(self, value: Any) -> None:
        """Raise ValueError for a remembered value that may not be used again; here all may be."""

    def name(self, module: str, attribute: str) -> Any:
        """Return the placeholder of a name, which is never imported. Raises ValueError for names that are refused."""
        raise NotImplementedError

    def call(self, function: Any, arguments: Any) -> Any:
        """Return a stand-in for the result of a call, without calling anything."""
        raise NotImplementedError

    def build(self, state: Any) -> None:
        """Give the object on top its state."""
        raise NotImplementedError

    def do_other(self, name: str, argument: Any) -> None:
        """Perform an operation that plain data do not need; here none is allowed."""
        raise ValueError(f"its pickle uses the operation {name}, which its data never need")


def check_name(module: Any, attribute: Any) -> tuple[str, str]:
    """Return a name's two halves. Raises ValueError unless they are texts of a name's length."""
    if (
        type(module) is not str
        or type(attribute) is not str
        or len(module) + len(attribute) > LONGEST_NAME
    ):
        raise ValueError("its pickle has a name that is none")
    return module, attribute


def check_pairs(items: Sequence[Any]) -> None:
    """Raise ValueError unless keys and values alternate and keys are plain.

    Nested tuples take exponential time to hash, and long integers can be chosen so that all hashes are the same.
    """
    if len(items) % 2:
        raise ValueError("its pickle has a key without a value")
    for key in items[::2]:
        if isinstance(key, str | bytes):
            plain = len(key) <= LONGEST_NAME
        elif isinstance(key, int):
            plain = -(2**63) <= key < 2**64
        else:
            plain = key is None or isinstance(key, float)
        if not plain:
            raise ValueError("its pickle has keys that are neither short texts nor numbers")
