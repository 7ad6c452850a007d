"""NVIDIA's network pickles (StyleGAN2-ADA, StyleGAN3), read without running anything that is in them.

Such a file holds every module as a call on a dict: the source text of its Python file, the name of its class and the
state of the object. Their program executes the text; here it is skipped, and what a module is follows from its class's
name and the arguments with which it was made (`_init_kwargs`). Every tensor is a file of torch's old format inside the
pickle, which is interpreted by a second machine with a small budget of its own.

The machine is that of foreign weights (`mpt.weights.torch_pickle`), so time and memory follow the file's length.

Source: the format was described from files that the original wrote (version 6 of its persistence module).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from mpt.errors import CheckpointError
from mpt.foreign.files import open_foreign, read_bytes
from mpt.run.process.host_memory import available_bytes
from mpt.weights.torch_pickle import (
    MOST_WORK,
    Described,
    Foreign,
    GlobalName,
    Storage,
    TorchMachine,
)
from mpt.weights.weights_file import (
    MOST_DEPTH,
    MOST_ENTRIES,
    ReadStorage,
    check_memory,
    module_state,
    read_legacy,
    realize,
)

PERSISTENT = "torch_utils.persistence _reconstruct_persistent_obj"
FROM_BYTES = "torch.storage _load_from_bytes"
SCALARS = ("numpy._core.multiarray scalar", "numpy.core.multiarray scalar")
DTYPE = "numpy dtype"
SCALAR_CODES = frozenset(f"{kind}{size}" for kind in "fiu" for size in (1, 2, 4, 8)) - {"f1"} | {
    "b1"
}
MARK, TENSORFLOW = b"torch_utils.persistence", b"dnnlib.tflib.network"
LOOKED_AT = 1 << 16
"""Bytes at a file's beginning in which its kind shows."""
BYTES_HEADS = {"SHORT_BINBYTES": 2, "BINBYTES": 5, "BINBYTES8": 9}
"""Length of an operation before its bytes."""
NESTED_WORK = 300
"""Operations of one tensor's own pickles, of which there are some 60; each tensor costs as much of the outer budget."""
LARGEST_BYTES = 1 << 36
NETWORKS = ("G", "D", "G_ema")


@dataclass(frozen=True)
class Network:
    """One network of a file: its class's name, the arguments that it was made with, and its tree of modules."""

    kind: str
    arguments: dict[str, Any]
    module: Foreign


class NetworkPickle:
    """Contents of a file: networks by name, whose tensors are made when they are asked for."""

    def __init__(
        self, path: Path, networks: Mapping[str, Network], machine: NetworkMachine
    ) -> None:
        self.path, self.networks, self._machine = path, networks, machine

    def described(self, names: tuple[str, ...] = NETWORKS) -> dict[str, Described]:
        """Return the places of the tensors of some networks. Raises CheckpointError for anything that is no tree of
        modules."""
        try:
            return {
                f"{name}.{key}": one
                for name in names
                if name in self.networks
                for key, one in module_state(self.networks[name].module)
            }
        except ValueError as error:
            raise refused(self.path, error) from error

    def rewritten(self, data: bytes, tensors: Mapping[str, Tensor]) -> bytes:
        """Return the file's bytes `data` with the numbers of some tensors in the place of those that are there.

        Raises CheckpointError for a tensor that the file does not have in this shape.
        """
        described = self.described()
        changed = bytearray(data)
        for name, value in tensors.items():
            one = described.get(name)
            if one is None or one.shape != tuple(value.shape):
                found = f"of shape {one.shape}" if one is not None else "missing"
                raise CheckpointError(
                    f"{self.path}: its {name} is {found}, and {tuple(value.shape)} is to be written"
                )
            numbers = self._machine.read(one.storage)
            realize(one, lambda storage, held=numbers: held, {}).copy_(value)  # type: ignore[misc]
            raw = numbers.numpy().tobytes()
            start = self._machine.places[one.storage.key] - len(raw)
            changed[start : start + len(raw)] = raw
        return bytes(changed)

    def tensors(self, names: tuple[str, ...] = NETWORKS) -> dict[str, Tensor]:
        """Return parameters and buffers of some networks, on the CPU, under names that begin with the network's.

        Raises CheckpointError for anything that is no tree of modules.
        """
        described = self.described(names)
        try:
            check_memory(described.values())
            loaded: dict[Storage, Tensor] = {}
            return {key: realize(one, self._machine.read, loaded) for key, one in described.items()}
        except ValueError as error:
            raise refused(self.path, error) from error


class NetworkMachine(TorchMachine):
    """Describes persistent modules as objects of their classes, tensors by the bytes inside, and NumPy's scalars."""

    def __init__(self, most_work: int) -> None:
        super().__init__(most_work)
        self.nested: dict[int, Storage] = {}
        self.readers: dict[str, tuple[Storage, ReadStorage]] = {}
        self.held: list[bytes] = []
        self.places: dict[str, int] = {}
        """The end of a storage's numbers in the file."""
        self._ends: dict[int, int] = {}

    def do(self, name: str, argument: Any) -> None:
        """Perform one operation, and note the places of bytes."""
        if name in BYTES_HEADS:
            self._ends[id(argument)] = self.position + BYTES_HEADS[name] + len(argument)
        super().do(name, argument)

    def call(self, function: Any, arguments: Any) -> Any:
        """Describe the result of a call."""
        name = function.name if isinstance(function, GlobalName) else ""
        if name not in (PERSISTENT, FROM_BYTES, DTYPE, *SCALARS):
            return super().call(function, arguments)
        if type(arguments) is not tuple or not arguments:
            raise ValueError(f"its pickle calls {name} without an argument")
        if name == PERSISTENT:
            return persistent(arguments[0])
        if name == FROM_BYTES:
            return self.storage(arguments[0])
        if name == DTYPE:
            return Foreign(name, items={"code": arguments[0]})
        return scalar(*arguments[:2])

    def storage(self, data: Any) -> Storage:
        """Return the storage of which `data` is a file. The same bytes are interpreted once."""
        if type(data) is not bytes:
            raise ValueError("its pickle has a tensor that is not made of bytes")
        if id(data) not in self.nested:
            self.spend(NESTED_WORK)
            storage, read = read_legacy(BytesIO(data), len(data), NESTED_WORK)
            if not isinstance(storage, Storage):
                raise ValueError("its pickle has a tensor whose bytes are no storage")
            # keys were addresses, used again
            own = Storage(f"{len(self.readers)}", storage.dtype, storage.count)
            self.readers[own.key] = (storage, read)
            self.nested[id(data)] = own
            self.held.append(data)  # its number stays its own
            self.places[own.key] = self._ends[id(data)]
        return self.nested[id(data)]

    def read(self, storage: Storage) -> Tensor:
        """Return a storage's numbers."""
        inner, read = self.readers[storage.key]
        return read(inner)


def persistent(meta: Any) -> Foreign:
    """Return the object that a persistent module's dict describes; its source text is not looked at."""
    if not isinstance(meta, dict) or not isinstance(meta.get("class_name"), str):
        raise ValueError("its pickle has a module without a class's name")
    return Foreign(meta["class_name"][:80], state=meta.get("state"))


def scalar(dtype: Any, data: Any) -> float | int | bool:
    """Return a NumPy scalar as Python's number."""
    code = dtype.items.get("code") if isinstance(dtype, Foreign) else None
    if code not in SCALAR_CODES or type(data) is not bytes or len(data) != np.dtype(code).itemsize:
        raise ValueError("its pickle has a NumPy scalar that is none")
    order = dtype.state[1] if type(dtype.state) is tuple and len(dtype.state) > 1 else "<"
    value: float | int | bool = np.frombuffer(
        data, np.dtype(f"{'>' if order == '>' else '<'}{code}")
    )[0].item()
    return value


def is_network_pickle(path: Path) -> bool:
    """Return whether a file is one of NVIDIA's network pickles. Raises CheckpointError for one of TensorFlow."""
    try:
        with open_foreign(path) as file:
            start = file.read(LOOKED_AT)
    except OSError:
        return False
    if start[:1] == b"\x80" and TENSORFLOW in start:
        raise CheckpointError(
            f"{path}: a network pickle of the TensorFlow version, which is not read; NVIDIA's stylegan2-ada-pytorch "
            "writes it anew (legacy.py --source ... --dest ...)"
        )
    return start[:1] == b"\x80" and MARK in start


def read_network_pickle(path: Path) -> NetworkPickle:
    """Return the networks of a file. Raises CheckpointError for any other file, with the reason."""
    try:
        data = file_bytes(path)
        machine = NetworkMachine(MOST_WORK)
        value = machine.run(BytesIO(data))
        if not isinstance(value, dict):
            raise ValueError("it does not hold networks by name")
        networks = {
            name: network_of(value[name]) for name in NETWORKS if value.get(name) is not None
        }
        if "G_ema" not in networks:
            raise ValueError("it holds no G_ema, the generator that is used")
        return NetworkPickle(path, networks, machine)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, EOFError, MemoryError, RuntimeError) as error:
        raise refused(path, error) from error


def file_bytes(path: Path) -> bytes:
    """Return a file's bytes. Raises OSError if they are more than half of the memory that is free."""
    free = available_bytes()
    most = LARGEST_BYTES if free is None else free // 2
    return read_bytes(path, min(path.stat().st_size, most))  # which asks for that much at once


def refused(path: Path, error: BaseException) -> CheckpointError:
    """Return the refusal of a file."""
    return CheckpointError(f"{path} is refused as a network pickle: {error}.")


def network_of(value: Any) -> Network:
    """Return a network with the arguments that it was made with. Raises ValueError for other objects."""
    state = value.state if isinstance(value, Foreign) and isinstance(value.state, dict) else None
    if state is None:
        raise ValueError("one of its networks is not a module")
    if plain(state.get("_init_args", ()), [MOST_ENTRIES]):
        raise ValueError("one of its networks was made with arguments that have no names")
    arguments = plain(state.get("_init_kwargs", {}), [MOST_ENTRIES])
    if not isinstance(arguments, dict):
        raise ValueError("one of its networks does not say how it was made")
    return Network(value.name, arguments, value)


def plain(value: Any, room: list[int], depth: int = 0) -> Any:
    """Return settings as plain data: dicts with attributes become dicts, objects their class's name.

    `room` holds the number of values that may still be met. Raises ValueError beyond it.
    """
    room[0] -= 1
    if room[0] < 0 or depth > MOST_DEPTH:
        raise ValueError("its settings are nested without end")
    if isinstance(value, Foreign):
        return (
            plain(value.items, room, depth) if value.name == "dnnlib.util EasyDict" else value.name
        )
    if isinstance(value, dict):
        return {key: plain(one, room, depth + 1) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one, room, depth + 1) for one in value]
    return "a tensor" if isinstance(value, Described) else value


def modules_of(network: Network) -> Iterator[tuple[str, Foreign]]:
    """Yield the modules of a network with their dotted names, parents first. Raises ValueError for endless trees."""
    waiting = [("", network.module, 0)]
    met = 0
    while waiting:
        name, module, depth = waiting.pop(0)
        met += 1
        if met > MOST_ENTRIES // 100 or depth > MOST_DEPTH:
            raise ValueError("it holds a network of more modules than any has")
        yield name, module
        children = module.state.get("_modules") if isinstance(module.state, dict) else None
        if isinstance(children, dict):
            waiting += [
                (f"{name}.{key}".lstrip("."), child, depth + 1)
                for key, child in children.items()
                if isinstance(child, Foreign) and isinstance(key, str)
            ]
