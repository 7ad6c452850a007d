"""Weights from files that others made: safetensors, and PyTorch's `.pt` without running its pickle.

A `.pt` file is a zip of raw storages and a pickle that says how tensors lie in them. Of that pickle's language only
what `torch.save(state_dict)` writes is understood here, and it is interpreted, not executed: names of globals are
compared with a short list and never imported. Sizes are checked against the file before anything is allocated;
`torch.load`, even with weights_only, unpacks deflated members without bound, calls `bytearray` with any size, and
trusts a storage's claimed length. The legacy format from before PyTorch 1.6 is refused. A refused file is not tried
in any other way.
"""

from __future__ import annotations

import pickletools
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpt.errors import CheckpointError
from mpt.run.files import open_regular
from mpt.run.tensor_file import read_tensors

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
}
CALLABLES = ("collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_parameter")
LARGEST_PICKLE_BYTES = 64 << 20
WRAPPERS = ("state_dict", "model_state_dict", "model", "params_ema", "params")
"""Keys under which training scripts put the weights beside other things."""


@dataclass(frozen=True)
class GlobalName:
    """A name that the pickle would have imported."""

    name: str


@dataclass(frozen=True)
class Mark:
    """The pickle machine's mark on the stack."""


def load_weights_file(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a `.safetensors`, or of a `.pt`/`.pth`/`.bin` that holds a state_dict, on the CPU.

    Raises CheckpointError for anything else, with the reason; nothing in the file is ever run.
    """
    try:
        with open(open_regular(path.resolve()), "rb") as file:
            if path.suffix == ".safetensors":
                return read_tensors(file)[0]
            if not zipfile.is_zipfile(file):
                raise ValueError("it is neither safetensors nor the zip that torch.save has written since PyTorch 1.6")
            with zipfile.ZipFile(file) as archive:
                check_members(archive, path.stat().st_size)
                return find_weights(read_archive(archive))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is refused as a weights file: {error}. Give a .safetensors, or save the plain "
            "state_dict with torch.save."
        ) from error


def check_members(archive: zipfile.ZipFile, file_bytes: int) -> None:
    """Raise ValueError unless all members are stored as they are and fit into the file together."""
    members = archive.infolist()
    if any(
        member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size for member in members
    ):
        raise ValueError("it has compressed members, which torch.save never writes and which may unpack without bound")
    total = sum(member.file_size for member in members)
    if total > file_bytes:
        raise ValueError(f"its members claim {total} bytes in a file of {file_bytes}")
    if len({member.filename for member in members}) != len(members):
        raise ValueError("it has two members of one name")


def read_archive(archive: zipfile.ZipFile) -> Any:
    """Return what the archive's pickle describes."""
    names = [name for name in archive.namelist() if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(names) != 1:
        raise ValueError("it is a zip, but not one of torch.save")
    prefix = names[0].removesuffix("data.pkl")
    order = archive.read(prefix + "byteorder") if prefix + "byteorder" in archive.namelist() else b"little"
    if order.decode(errors="replace") != sys.byteorder:
        raise ValueError("its bytes are in another machine's order")
    if archive.getinfo(names[0]).file_size > LARGEST_PICKLE_BYTES:
        raise ValueError("its pickle is too large for a state_dict")
    return Interpreter(archive, prefix).run(archive.read(names[0]))


def find_weights(value: Any) -> dict[str, Tensor]:
    """Return the mapping of names to tensors, looking one level into the usual wrappers."""
    candidates = [value, *(value[key] for key in WRAPPERS if key in value)] if isinstance(value, dict) else []
    for candidate in candidates:
        if isinstance(candidate, Mapping) and candidate and all(isinstance(t, Tensor) for t in candidate.values()):
            return {str(key): tensor for key, tensor in candidate.items()}
    raise ValueError(f"it does not hold tensors by name, neither on top nor under {', '.join(WRAPPERS)}")


class Interpreter:
    """A stack machine for the few pickle operations that a state_dict needs."""

    def __init__(self, archive: zipfile.ZipFile, prefix: str) -> None:
        self.archive = archive
        self.prefix = prefix
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, Tensor] = {}

    def run(self, text: bytes) -> Any:
        """Interpret a pickle and return its value. Raises ValueError at the first thing that is not plain."""
        try:
            for operation, argument, _ in pickletools.genops(text):
                if operation.name == "STOP":
                    return self.stack.pop()
                self.do(operation.name, argument)
        except (IndexError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"its pickle is damaged ({type(error).__name__}: {error})") from error
        raise ValueError("its pickle has no end")

    def do(self, name: str, argument: Any) -> None:
        """Perform one operation."""
        stack = self.stack
        match name:
            case "PROTO" | "FRAME":
                pass
            case "GLOBAL":
                if argument not in STORAGES and argument not in CALLABLES:
                    raise ValueError(f"its pickle names {argument.replace(' ', '.')!r}, which no state_dict needs")
                stack.append(GlobalName(argument))
            case "MARK":
                stack.append(Mark())
            case "NONE" | "NEWTRUE" | "NEWFALSE":
                stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
            case "BINUNICODE" | "SHORT_BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT":
                stack.append(argument)
            case "EMPTY_DICT" | "EMPTY_LIST" | "EMPTY_TUPLE":
                stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[name]())
            case "TUPLE" | "TUPLE1" | "TUPLE2" | "TUPLE3":
                items = self.pop_to_mark() if name == "TUPLE" else [stack.pop() for _ in range(int(name[-1]))][::-1]
                stack.append(tuple(items))
            case "BINPUT" | "LONG_BINPUT":
                self.memo[argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self.memo[argument])
            case "APPEND" | "APPENDS":
                items = self.pop_to_mark() if name == "APPENDS" else [stack.pop()]
                self.top(list).extend(items)
            case "SETITEM" | "SETITEMS":
                items = self.pop_to_mark() if name == "SETITEMS" else [stack.pop() for _ in range(2)][::-1]
                self.set_items(items)
            case "BINPERSID":
                stack.append(self.read_storage(*stack.pop()))
            case "REDUCE":
                arguments = stack.pop()
                stack.append(self.call(stack.pop(), arguments))
            case "BUILD":
                stack.pop()  # a state_dict's `_metadata`, versions of modules, which tensors do not need
                self.top(dict)
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
        """Put key-value pairs into the dict on top."""
        keys = items[::2]
        # Nested tuples as keys take exponential time to hash.
        if not all(isinstance(key, str | int) for key in keys):
            raise ValueError("its pickle has keys that are neither text nor integers")
        self.top(dict).update(zip(keys, items[1::2], strict=True))

    def call(self, function: Any, arguments: Any) -> Any:
        """Do what one of the allowed callables would do."""
        name = function.name if isinstance(function, GlobalName) else None
        if name == "collections OrderedDict" and arguments == ():
            return {}
        if name == "torch._utils _rebuild_parameter" and isinstance(arguments[0], Tensor):
            return arguments[0]
        if name == "torch._utils _rebuild_tensor_v2":
            return self.rebuild(*arguments[:4])
        raise ValueError("its pickle calls what no state_dict calls")

    def rebuild(self, storage: Any, offset: Any, shape: Any, stride: Any) -> Tensor:
        """Return a tensor within a storage, after checking that it is within."""
        numbers = (offset, *shape, *stride)
        if not isinstance(storage, Tensor) or not all(type(n) is int and n >= 0 for n in numbers):
            raise ValueError("its pickle describes an impossible tensor")
        count = 1
        for size in shape:
            count *= size
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if count else 0
        if last >= max(storage.numel(), 1) or count > storage.numel():
            raise ValueError("its pickle describes a tensor that is larger than its storage")
        # A view: with copies, a small file that names one storage ten thousand times would fill the memory.
        return storage.as_strided(shape, stride, offset)

    def read_storage(self, kind: Any, storage_type: Any, key: Any, location: Any, count: Any) -> Tensor:
        """Return a storage as a flat tensor; its claimed length must be its member's."""
        dtype = STORAGES.get(storage_type.name)
        if kind != "storage" or dtype is None or not isinstance(key, str) or type(count) is not int:
            raise ValueError("its pickle refers to something that is not a storage")
        if key not in self.storages:
            member = f"{self.prefix}data/{key}"
            if self.archive.getinfo(member).file_size != count * dtype.itemsize:
                raise ValueError(f"its storage {key!r} does not have the size that its pickle claims")
            data = bytearray(self.archive.read(member))
            self.storages[key] = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        if self.storages[key].dtype != dtype:
            raise ValueError(f"its storage {key!r} is claimed to be of two dtypes")
        return self.storages[key]
