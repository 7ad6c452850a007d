"""The contents of a pickle of `torch.save`, found without unpickling: tensors as places in storages, nothing run.

Names are compared with short lists and never imported; an object of any other class becomes a `Foreign`, which is kept
for itself and is never called, so that the weights alongside it can be read. A name that only a program run by the
pickle would need (`os.system`) refuses the file.

Nothing here allocates more than in proportion to the pickle's own length (`mpt.foreign.pickles`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import torch

from mpt.foreign.pickles import PickleMachine, check_pairs

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
REBUILDS = (
    "torch._utils _rebuild_tensor",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",
)
PARAMETERS = ("torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state")
SUBCLASS = "torch._tensor _rebuild_from_type_v2"
PROGRAMS = (
    *(
        "os",
        "nt",
        "posix",
        "sys",
        "subprocess",
        "shutil",
        "socket",
        "ctypes",
        "runpy",
        "importlib",
        "imp",
        "pty",
    ),
    *(
        "webbrowser",
        "code",
        "codeop",
        "pickle",
        "_pickle",
        "multiprocessing",
        "asyncio",
        "signal",
        "platform",
    ),
    *("timeit", "cProfile", "pdb", "bdb", "doctest"),
)
"""Modules that no checkpoint's data comes from."""
PLAIN_BUILTINS = (
    *(
        "bool",
        "bytes",
        "complex",
        "dict",
        "float",
        "frozenset",
        "getattr",
        "int",
        "list",
        "object",
        "range",
        "set",
    ),
    *("slice", "str", "tuple"),
)
MOST_WORK = 3_000_000
"""A state dict has about 40 operations for each tensor; these take some ten seconds."""
MOST_DIMENSIONS = 64
LONGEST_KEY = 100


@dataclass(frozen=True)
class Storage:
    """A flat run of numbers elsewhere in the file."""

    key: str
    dtype: torch.dtype
    count: int


@dataclass(frozen=True)
class Described:
    """A tensor as the pickle describes it: a view of a storage, checked to lie within the storage's claimed size."""

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
    """An object of a class that is not looked up: its class's name and, if it was given one, its state."""

    name: str
    state: Any = None
    items: dict[Any, Any] = field(default_factory=dict)


def interpret(stream: BytesIO, most_work: int = MOST_WORK) -> tuple[Any, dict[str, Storage]]:
    """Interpret the pickle at the stream's position, leave the stream behind it, and return its value and storages.

    Raises ValueError at the first thing that is not data.
    """
    machine = TorchMachine(most_work)
    return machine.run(stream), machine.storages


class TorchMachine(PickleMachine):
    """Describes tensors, and objects of other classes."""

    def __init__(self, most_work: int) -> None:
        super().__init__(most_work)
        self.storages: dict[str, Storage] = {}

    def do_other(self, name: str, argument: Any) -> None:
        """Perform the calls for objects, sets, byte strings of Python 2 and storages."""
        match name:
            case "BINSTRING" | "SHORT_BINSTRING":
                self.stack.append(argument)
            case "EMPTY_SET":
                self.stack.append([])
            case "ADDITEMS":
                items = self.pop_to_mark()
                self.extend(items)
            case "FROZENSET":
                self.stack.append(self.pop_to_mark())
            case "BINPERSID":
                self.stack.append(self.referred(self.pop()))
            case "NEWOBJ":
                arguments = self.pop()
                self.stack.append(self.call(self.pop(), arguments))
            case "NEWOBJ_EX":
                self.pop()
                arguments = self.pop()
                self.stack.append(self.call(self.pop(), arguments))
            case _:
                raise ValueError(f"its pickle uses the operation {name}, which no state_dict needs")

    def extend(self, items: Sequence[Any]) -> None:
        """Append to the list on top; the items of another object are left out."""
        if not isinstance(self.stack[-1], Foreign):
            super().extend(items)

    def set_items(self, items: Sequence[Any]) -> None:
        """Put key-value pairs into the dict, or the object, on top."""
        if isinstance(self.stack[-1], Foreign):
            check_pairs(items)
            self.stack[-1].items.update(zip(items[::2], items[1::2], strict=True))
        else:
            super().set_items(items)

    def name(self, module: str, attribute: str) -> GlobalName:
        """Return a name that is kept as it is; ValueError for one by which a pickle would run a program."""
        builtin = module in ("builtins", "__builtin__")
        if module.partition(".")[0] in PROGRAMS or (builtin and attribute not in PLAIN_BUILTINS):
            raise ValueError(
                f"unpickled, it would run {f'{module[:80]}.{attribute}'[:80]!r}, which no checkpoint needs"
            )
        return GlobalName(f"{module} {attribute}")

    def build(self, state: Any) -> None:
        """Give the object on top its state. A state_dict's is `_metadata`, which tensors do not need."""
        target = self.stack[-1]
        if isinstance(target, Foreign):
            target.state = state
        elif not isinstance(target, dict | Described):
            raise ValueError(f"its pickle gives a state to a {type(target).__name__}")

    def call(self, function: Any, arguments: Any) -> Any:
        """Describe the result of a call."""
        is_of_subclass = isinstance(function, GlobalName) and function.name == SUBCLASS
        if is_of_subclass and type(arguments) is tuple and len(arguments) >= 3:
            # a tensor's subclass: how to make the tensor, the class, with what
            function, _, arguments = arguments[:3]
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
        return Foreign(name)

    def referred(self, what: Any) -> Any:
        """Return the target of a persistent id: a storage or, in the legacy format, a class alongside its source."""
        # unpacked only then: it may be long, and used again
        if type(what) is not tuple or not 2 <= len(what) <= 6:
            raise ValueError("its pickle refers to something that is not a storage")
        return what[1] if what[0] == "module" else self.refer(*what)

    def refer(
        self, kind: Any, storage_type: Any, key: Any, location: Any, count: Any, view: Any = None
    ) -> Storage:
        """Return a storage that the pickle refers to."""
        dtype = STORAGES.get(storage_type.name) if isinstance(storage_type, GlobalName) else None
        named = type(key) is str and len(key) <= LONGEST_KEY
        if (
            kind != "storage"
            or dtype is None
            or not named
            or type(count) is not int
            or count < 0
            or view is not None
        ):
            raise ValueError("its pickle refers to something that is not a storage")
        found = self.storages.setdefault(key, Storage(key, dtype, count))
        if found != Storage(key, dtype, count):
            raise ValueError(f"its storage {key[:40]!r} is claimed to be of two sizes or dtypes")
        return found


def named_dtype(value: Any) -> torch.dtype:
    """Return the dtype of a name such as "torch float8_e4m3fn"."""
    name = value.name if isinstance(value, GlobalName) else ""
    dtype = getattr(torch, name.removeprefix("torch "), None)
    if not name.startswith("torch ") or not isinstance(dtype, torch.dtype):
        raise ValueError("its pickle describes a tensor of no dtype")
    return dtype


def describe(
    storage: Storage, dtype: torch.dtype, offset: Any, shape: Any, stride: Any
) -> Described:
    """Return a tensor within a storage, after checking that it is within."""
    # first: a long tuple may be used a million times
    if len(shape) != len(stride) or len(shape) > MOST_DIMENSIONS:
        raise ValueError(
            "its pickle describes a tensor of too many dimensions, or of strides that are not as many"
        )
    if not all(type(n) is int and 0 <= n < 2**62 for n in (offset, *shape, *stride)):
        raise ValueError("its pickle describes an impossible tensor")
    held = storage.count * storage.dtype.itemsize // dtype.itemsize
    count = math.prod(shape)
    last = (
        offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if count
        else 0
    )
    if last >= max(held, 1) or count > held:
        raise ValueError("its pickle describes a tensor that is larger than its storage")
    return Described(storage, dtype, offset, tuple(shape), tuple(stride))
