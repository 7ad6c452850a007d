"""What a pickle of `torch.save` describes, found out without unpickling: tensors as places in storages, nothing run.

Of the pickle language only what data needs is understood. Names are compared with short lists and never imported; an
object of any other class becomes a `Foreign`, which stands for itself and is never called, so that the weights beside
it can be read. A name that only a program run by the pickle would need (`os.system`) refuses the file.

Nothing here allocates more than the pickle's own length, and the number of operations is bounded.
"""

from __future__ import annotations

import math
import pickletools
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import torch

STORAGES = {
    f"torch {name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
        "ComplexFloat": torch.complex64,
        "ComplexDouble": torch.complex128,
    }.items()
} | {"torch.storage UntypedStorage": torch.uint8}
DICTS = ("collections OrderedDict", "collections defaultdict", "collections Counter")
REBUILDS = ("torch._utils _rebuild_tensor", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3")
PARAMETERS = ("torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state")
PROGRAMS = (
    *("os", "nt", "posix", "sys", "subprocess", "shutil", "socket", "ctypes", "runpy", "importlib", "imp", "pty"),
    *("webbrowser", "code", "codeop", "pickle", "_pickle", "multiprocessing", "asyncio", "signal", "platform"),
    *("timeit", "cProfile", "pdb", "bdb", "doctest"),
)
"""Modules that no checkpoint's data comes from."""
PLAIN_BUILTINS = (
    *("bool", "bytes", "complex", "dict", "float", "frozenset", "getattr", "int", "list", "object", "range", "set"),
    *("slice", "str", "tuple"),
)
LITERALS = (
    *("BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BINSTRING"),
    *("SHORT_BINSTRING", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
)
"""Operations that put their argument on the stack."""
MOST_OPERATIONS = 3_000_000
"""A state dict has about 40 for each tensor; these take some ten seconds."""
MOST_DIMENSIONS = 64


@dataclass(frozen=True)
class Storage:
    """A flat run of numbers elsewhere in the file."""

    key: str
    dtype: torch.dtype
    count: int


@dataclass(frozen=True)
class Described:
    """A tensor as the pickle describes it: a view of a storage, checked to lie within what the storage claims."""

    storage: Storage
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class GlobalName:
    """A name that the pickle would have imported, "module name"."""

    name: str


@dataclass(eq=False)
class Foreign:
    """An object of a class that is not looked up: its class's name and, where it was given one, its state."""

    name: str
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)


class Mark:
    """The pickle machine's mark on the stack."""


def interpret(stream: BytesIO) -> tuple[Any, dict[str, Storage]]:
    """Interpret the pickle at the stream's position, leave the stream behind it, and return its value and storages.

    Raises ValueError at the first thing that is not data.
    """
    machine = _Machine()
    try:
        for count, (operation, argument, _) in enumerate(pickletools.genops(stream)):
            if operation.name == "STOP":
                return machine.stack.pop(), machine.storages
            if count > MOST_OPERATIONS:
                raise ValueError("its pickle is too long for a state_dict")
            machine.do(operation.name, argument)
    except (IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        raise ValueError(f"its pickle is damaged ({type(error).__name__})") from error
    raise ValueError("its pickle has no end")


class _Machine:
    """A stack and a memo."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, Storage] = {}

    def do(self, name: str, argument: Any) -> None:
        """Perform one operation."""
        stack = self.stack
        match name:
            case "PROTO" | "FRAME":
                pass
            case "GLOBAL":
                stack.append(named(argument))
            case "STACK_GLOBAL":
                attribute, module = stack.pop(), stack.pop()
                stack.append(named(f"{module} {attribute}" if type(module) is type(attribute) is str else "? ?"))
            case "MARK":
                stack.append(Mark())
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case _ if name in LITERALS:
                stack.append(argument)
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE" | "EMPTY_SET":
                stack.append({"DICT": dict, "LIST": list, "TUPLE": tuple, "SET": list}[name.removeprefix("EMPTY_")]())
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                items = self.pop_to_mark() if name == "TUPLE" else [stack.pop() for _ in range(int(name[-1]))][::-1]
                stack.append(tuple(items))
            case "FROZENSET":
                stack.append(self.pop_to_mark())
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "MEMOIZE":
                self.memo[len(self.memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "APPEND" | "APPENDS" | "ADDITEMS":
                items = [stack.pop()] if name == "APPEND" else self.pop_to_mark()
                if not isinstance(stack[-1], Foreign):
                    self.top(list).extend(items)
            case "SETITEM" | "SETITEMS":
                items = self.pop_to_mark() if name == "SETITEMS" else [stack.pop() for _ in range(2)][::-1]
                self.set_items(items)
            case "BINPERSID":
                what = stack.pop()
                # The legacy format keeps a network's source beside its class.
                stack.append(what[1] if what[0] == "module" else self.refer(*what))
            case "REDUCE" | "NEWOBJ":
                arguments = stack.pop()
                stack.append(self.call(stack.pop(), arguments))
            case "NEWOBJ_EX":
                stack.pop()
                arguments = stack.pop()
                stack.append(self.call(stack.pop(), arguments))
            case "BUILD":
                self.build(stack.pop())
            case _:
                raise ValueError(f"its pickle uses the operation {name}, which no state_dict needs")

    def pop_to_mark(self) -> list[Any]:
        """Remove and return what lies above the last mark."""
        items: list[Any] = []
        while not isinstance(item := self.stack.pop(), Mark):
            items.append(item)
        return items[::-1]

    def top(self, kind: type) -> Any:
        """Return what lies on top, which must be of this kind."""
        if not isinstance(self.stack[-1], kind):
            raise ValueError(f"its pickle treats a {type(self.stack[-1]).__name__} as a {kind.__name__}")
        return self.stack[-1]

    def set_items(self, items: list[Any]) -> None:
        """Put key-value pairs into the dict, or the object, on top."""
        keys = items[::2]
        target = self.stack[-1].items if isinstance(self.stack[-1], Foreign) else self.top(dict)
        # Nested tuples as keys take exponential time to hash.
        if not all(isinstance(key, str | int) for key in keys):
            raise ValueError("its pickle has keys that are neither text nor integers")
        target.update(zip(keys, items[1::2], strict=True))

    def build(self, state: Any) -> None:
        """Give the object on top its state. A state_dict's is `_metadata`, which tensors do not need."""
        target = self.stack[-1]
        if isinstance(target, Foreign):
            target.state = state
        elif not isinstance(target, dict | Described):
            raise ValueError(f"its pickle gives a state to a {type(target).__name__}")

    def call(self, function: Any, arguments: Any) -> Any:
        """Describe what a call would make."""
        if not isinstance(function, GlobalName) or not isinstance(arguments, tuple):
            raise ValueError("its pickle calls what is no name")
        name = function.name
        if name in DICTS:
            return {}
        if name in PARAMETERS and isinstance(arguments[0], Described):
            return arguments[0]
        if name in REBUILDS and isinstance(arguments[0], Storage):
            typed = named_dtype(arguments[6]) if name.endswith("v3") else arguments[0].dtype
            return describe(arguments[0], typed, *arguments[1:4])
        if name == "torch._tensor _rebuild_from_type_v2" and isinstance(arguments[2], tuple):
            return self.call(arguments[0], arguments[2])
        return Foreign(name)

    def refer(self, kind: Any, storage_type: Any, key: Any, location: Any, count: Any, view: Any = None) -> Storage:
        """Return a storage that the pickle refers to."""
        dtype = STORAGES.get(storage_type.name) if isinstance(storage_type, GlobalName) else None
        if kind != "storage" or dtype is None or type(key) is not str or type(count) is not int or count < 0 or view:
            raise ValueError("its pickle refers to something that is not a storage")
        found = self.storages.setdefault(key, Storage(key, dtype, count))
        if found != Storage(key, dtype, count):
            raise ValueError(f"its storage {key[:40]!r} is claimed to be of two sizes or dtypes")
        return found


def named(name: str) -> GlobalName:
    """Return a name that stands for itself; ValueError for one by which a pickle would run a program."""
    module, _, attribute = name.partition(" ")
    builtin = module in ("builtins", "__builtin__")
    if module.partition(".")[0] in PROGRAMS or (builtin and attribute not in PLAIN_BUILTINS):
        raise ValueError(f"unpickled, it would run {f'{module}.{attribute}'[:80]!r}, which no checkpoint needs")
    return GlobalName(name)


def named_dtype(value: Any) -> torch.dtype:
    """Return the dtype of a name such as "torch float8_e4m3fn"."""
    name = value.name if isinstance(value, GlobalName) else ""
    dtype = getattr(torch, name.removeprefix("torch "), None)
    if not name.startswith("torch ") or not isinstance(dtype, torch.dtype):
        raise ValueError("its pickle describes a tensor of no dtype")
    return dtype


def describe(storage: Storage, dtype: torch.dtype, offset: Any, shape: Any, stride: Any) -> Described:
    """Return a tensor within a storage, after checking that it is within."""
    numbers = (offset, *shape, *stride)
    if not all(type(n) is int and 0 <= n < 2**62 for n in numbers) or len(shape) != len(stride):
        raise ValueError("its pickle describes an impossible tensor")
    if len(shape) > MOST_DIMENSIONS:
        raise ValueError("its pickle describes a tensor of too many dimensions")
    held = storage.count * storage.dtype.itemsize // dtype.itemsize
    count = math.prod(shape)
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if count else 0
    if last >= max(held, 1) or count > held:
        raise ValueError("its pickle describes a tensor that is larger than its storage")
    return Described(storage, dtype, offset, tuple(shape), tuple(stride))
