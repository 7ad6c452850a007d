"""Weights from files that others made: safetensors, and PyTorch's `.pt` without running its pickle.

A `.pt` file is a zip of raw storages and a pickle that says how tensors lie in them; before PyTorch 1.6 it was pickles
and storages one after the other. The pickle is interpreted, not executed (`mpt.weights.torch_pickle`). Sizes are
checked against the file before anything is allocated, a zip's checksums are verified, and only the storages of the
weights are read, not those of an optimizer alongside them. `torch.load`, even with weights_only, unpacks deflated
members without bound, calls `bytearray` with any size, trusts a storage's claimed length and checks no sum. A refused
file is not tried in any other way.
"""

from __future__ import annotations

import os
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from mpt.errors import CheckpointError
from mpt.foreign.files import read_json
from mpt.run.checkpoints.tensor_file import read_tensors
from mpt.run.process.files import open_regular
from mpt.run.process.host_memory import available_bytes
from mpt.weights.torch_pickle import MOST_WORK, Described, Foreign, Storage, interpret

LARGEST_PICKLE_BYTES = 64 << 20
LEGACY_MAGIC, LEGACY_PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
WRAPPERS = (
    *(
        "state_dict_ema",
        "model_ema",
        "ema_state_dict",
        "params_ema",
        "ema",
        "state_dict",
        "model_state_dict",
    ),
    *("model_state", "model", "params", "module", "net", "network", "weights"),
)
"""Keys under which training scripts put the weights alongside other things; averages, which they evaluate, first."""
INDEX = ".safetensors.index.json"
MOST_DEPTH, LONGEST_NAME = 100, 1000
MOST_ENTRIES = 300_000
"""Modules and tensors of a file, counted as often as they are reached. The largest published networks have 100,000."""

ReadStorage = Callable[[Storage], Tensor]


@dataclass(frozen=True)
class WeightsFile:
    """The tensors of a file, on the CPU, under which of its keys they were (None: on top), and the texts alongside
    them.

    The texts are those of a `.pt` file, which `mpt convert` writes.
    """

    tensors: dict[str, Tensor]
    wrapper: str | None = None
    texts: Mapping[str, str] = field(default_factory=dict)


def load_weights_file(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a weights file; see `read_weights_file`."""
    return read_weights_file(path).tensors


def read_weights_file(path: Path) -> WeightsFile:
    """Read the tensors of a `.safetensors`, or of a `.pt`/`.pth`/`.bin` that holds a state_dict, on the CPU.

    Of a file in parts the index is named, `NAME.safetensors.index.json`. Raises CheckpointError for anything else, with
    the reason; nothing in the file is ever run.
    """
    if path.name.endswith(INDEX):
        return read_parts(path)
    try:
        with open(open_regular(path.resolve()), "rb") as file:
            if path.suffix == ".safetensors":
                check_size(os.fstat(file.fileno()).st_size)
                return WeightsFile(read_tensors(file)[0])
            start = file.read(4)
            file.seek(0)
            # as torch.load decides; a zip may also hide at another file's end
            if start == b"PK\x03\x04":
                with zipfile.ZipFile(file) as archive:
                    refuse_programs(archive.namelist())
                    check_members(archive, os.fstat(file.fileno()).st_size)
                    return find_weights(*read_archive(archive))
            if start[:1] != b"\x80":
                raise ValueError("it is neither safetensors nor what torch.save writes")
            return find_weights(*read_legacy(file, os.fstat(file.fileno()).st_size))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (
        ValueError,
        zipfile.BadZipFile,
        NotImplementedError,
        RuntimeError,
        EOFError,
        MemoryError,
    ) as error:
        raise CheckpointError(
            f"{path} is refused as a weights file: {error}. Give a .safetensors, or save the plain "
            "state_dict with torch.save."
        ) from error


def read_parts(index: Path) -> WeightsFile:
    """Read the tensors of safetensors files that lie next to their index. Raises CheckpointError for missing ones."""
    try:
        places = read_json(index, LARGEST_PICKLE_BYTES)["weight_map"]
        parts = sorted({str(part) for part in places.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is refused as an index of weights: it has no weight_map"
        ) from error
    inside = [
        part for part in parts if Path(part).name != part or not part.endswith(".safetensors")
    ]
    if inside:
        raise CheckpointError(
            f"{index} names {inside[0]}, and its parts are .safetensors files in the same folder"
        )
    tensors: dict[str, Tensor] = {}
    for part in parts:
        tensors |= read_weights_file(index.with_name(part)).tensors
    missing = [name for name in places if name not in tensors]
    if missing:
        raise CheckpointError(
            f"{index}: {missing[0]} is not in {places[missing[0]]}; the file is another one's part"
        )
    return WeightsFile(tensors)


def refuse_programs(members: Sequence[str]) -> None:
    """Raise ValueError for files of torch.jit.save and torch.export.save: code, which is never run."""
    for kind, mark in (("TorchScript", "constants.pkl"), ("torch.export", "archive_format")):
        if any(name.partition("/")[2] == mark for name in members):
            raise ValueError(f"it is a {kind} program, and weights are wanted")


def check_members(archive: zipfile.ZipFile, file_bytes: int) -> None:
    """Raise ValueError unless all members are stored as they are and fit into the file together."""
    members = archive.infolist()
    if any(
        member.compress_type != zipfile.ZIP_STORED or member.file_size != member.compress_size
        for member in members
    ):
        raise ValueError(
            "it has compressed members, which torch.save never writes and which may unpack without bound"
        )
    total = sum(member.file_size for member in members)
    if total > file_bytes:
        raise ValueError(f"its members claim {total} bytes in a file of {file_bytes}")
    if len({member.filename for member in members}) != len(members):
        raise ValueError("it has two members of one name")


def read_archive(archive: zipfile.ZipFile) -> tuple[Any, ReadStorage]:
    """Return the content of the archive's pickle, and a reader of its storages."""
    members = archive.namelist()
    names = [name for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(names) != 1:
        raise ValueError("it is a zip, but not one of torch.save")
    prefix = names[0].removesuffix("data.pkl")
    order = b"little"
    if prefix + "byteorder" in members:
        with archive.open(prefix + "byteorder") as member:
            order = member.read(16)
    if order.decode(errors="replace") != sys.byteorder:
        raise ValueError("its bytes are in another machine's order")
    if archive.getinfo(names[0]).file_size > LARGEST_PICKLE_BYTES:
        raise ValueError("its pickle is too large for a state_dict")

    def read(storage: Storage) -> Tensor:
        member = f"{prefix}data/{storage.key}"
        if member not in archive.NameToInfo or archive.getinfo(member).file_size != bytes_of(
            storage
        ):
            raise ValueError(
                f"its storage {storage.key[:40]!r} is not there or not as large as its pickle claims"
            )
        return as_numbers(archive.read(member), storage)  # zipfile compares the CRC

    return interpret(BytesIO(archive.read(names[0])))[0], read


def read_legacy(file: BinaryIO, size: int, most_work: int = MOST_WORK) -> tuple[Any, ReadStorage]:
    """Return the content of a file from before PyTorch 1.6, and a reader of its storages.

    Five pickles (a magic number, the version, the writer's system, the object, the storages' keys in order), then each
    storage: its count in eight bytes and its numbers. Each pickle may have `most_work` operations.
    """
    stream = BytesIO(file.read(LARGEST_PICKLE_BYTES))
    if (
        interpret(stream, most_work)[0] != LEGACY_MAGIC
        or interpret(stream, most_work)[0] != LEGACY_PROTOCOL
    ):
        raise ValueError("it is a pickle, but not one of torch.save")
    system = interpret(stream, most_work)[0]
    if not isinstance(system, dict) or system.get("little_endian") is not (
        sys.byteorder == "little"
    ):
        raise ValueError("its bytes are in another machine's order")
    value, storages = interpret(stream, most_work)
    keys = interpret(stream, most_work)[0]
    named = (
        isinstance(keys, list)
        and len(keys) == len(storages)
        and all(type(key) is str for key in keys)
    )
    if not named or set(keys) != set(storages):
        raise ValueError("its storages are not those that its pickle names")
    places: dict[str, int] = {}
    position = stream.tell()
    for key in keys:
        file.seek(position)
        if int.from_bytes(file.read(8), "little") != storages[key].count:
            raise ValueError(
                f"its storage {key[:40]!r} does not have the size that its pickle claims"
            )
        places[key] = position + 8
        position += 8 + bytes_of(storages[key])
    if position != size:
        raise ValueError(f"it should have {position} bytes and has {size}")

    def read(storage: Storage) -> Tensor:
        file.seek(places[storage.key])
        return as_numbers(file.read(bytes_of(storage)), storage)

    return value, read


def bytes_of(storage: Storage) -> int:
    return storage.count * storage.dtype.itemsize


def as_numbers(data: bytes, storage: Storage) -> Tensor:
    """Return bytes as a flat tensor of the storage's dtype."""
    if not data:
        return torch.empty(0, dtype=storage.dtype)
    if storage.dtype == torch.bool and max(data) > 1:
        raise ValueError(
            f"its storage {storage.key[:40]!r} has truth values that are neither 0 nor 1"
        )
    return torch.frombuffer(bytearray(data), dtype=storage.dtype)


def find_weights(value: Any, read: ReadStorage) -> WeightsFile:
    """Return the tensors by name: under one of the usual wrappers, on top, or in a network that was saved whole."""
    wrapped = (
        [(key, value[key]) for key in WRAPPERS if key in value]
        if isinstance(value, Mapping)
        else []
    )
    candidates: list[tuple[str | None, Any]] = [*wrapped, (None, value)]
    for wrapper, candidate in candidates:
        described = dict(
            module_state(candidate) if isinstance(candidate, Foreign) else state_of(candidate)
        )
        if described:
            check_memory(described.values())
            loaded: dict[Storage, Tensor] = {}
            tensors = {name: realize(one, read, loaded) for name, one in described.items()}
            beside = value.items() if wrapper is not None else ()
            texts = {
                key: text for key, text in beside if isinstance(key, str) and isinstance(text, str)
            }
            return WeightsFile(tensors, wrapper, texts)
    wanted = ", ".join(WRAPPERS)
    raise ValueError(f"it does not hold tensors by name, neither on top nor under one of {wanted}")


def check_memory(described: Iterable[Described]) -> None:
    """Raise ValueError for tensors that do not fit into memory; a sparse file claims any size for nothing."""
    check_size(sum(bytes_of(storage) for storage in {one.storage for one in described}))


def check_size(needed: int) -> None:
    """Raise ValueError if that much memory is not free."""
    free = available_bytes()
    if free is not None and needed > free:
        raise ValueError(f"its tensors need {needed} bytes of memory, and {free} are free")


def state_of(candidate: Any) -> Iterator[tuple[str, Described]]:
    """Yield the tensors of a mapping of which most are; numbers that a module kept alongside its weights are left
    out."""
    if isinstance(candidate, Mapping):
        tensors = {
            entry_name("", key): item
            for key, item in candidate.items()
            if isinstance(item, Described)
        }
        check_entries(len(tensors))
        if 2 * len(tensors) > len(candidate):
            yield from tensors.items()


def module_state(module: Foreign) -> Iterator[tuple[str, Described]]:
    """Yield the weights and buffers of a network that was pickled as an object, by their state-dict names.

    A module that is its own child, or a thousand others', is one object in the file and unfolds here: everything pushed
    and yielded is counted.
    """
    waiting = [("", module, 0)]
    entries = 1
    while waiting:
        prefix, one, depth = waiting.pop()
        state = one.state if isinstance(one.state, dict) else {}
        for store in ("_parameters", "_buffers"):
            found = state.get(store)
            entries = check_entries(entries + (len(found) if isinstance(found, Mapping) else 0))
            for key, item in found.items() if isinstance(found, Mapping) else ():
                if isinstance(item, Described):
                    yield entry_name(prefix, key), item
        children = state.get("_modules")
        if isinstance(children, Mapping):
            entries = check_entries(entries + len(children), depth + 1)
            named = [
                (entry_name(prefix, key) + ".", one, depth + 1)
                for key, one in children.items()
                if isinstance(one, Foreign)
            ]
            waiting += named[::-1]


def entry_name(prefix: str, key: Any) -> str:
    """Return the name of a tensor or a module in a network."""
    if not isinstance(key, str | int) or (
        isinstance(key, str) and len(prefix) + len(key) > LONGEST_NAME
    ):
        raise ValueError("it holds a tensor or a module whose name is none, or longer than any is")
    return f"{prefix}{key}"


def check_entries(entries: int, depth: int = 0) -> int:
    """Return how many entries were met so far. Raises ValueError for more than any network has."""
    if entries > MOST_ENTRIES or depth > MOST_DEPTH:
        raise ValueError("it holds a network that is deeper or of more modules than any is")
    return entries


def realize(described: Described, read: ReadStorage, loaded: dict[Storage, Tensor]) -> Tensor:
    """Return a described tensor, as a view.

    With copies, a small file that names one storage ten thousand times would fill the memory.
    """
    if described.storage not in loaded:
        loaded[described.storage] = read(described.storage)
    numbers = loaded[described.storage]
    if described.dtype != numbers.dtype:
        numbers = numbers[
            : numbers.numel() // described.dtype.itemsize * described.dtype.itemsize
        ].view(described.dtype)
    return numbers.as_strided(described.shape, described.stride, described.offset)
