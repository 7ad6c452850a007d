"""Tensors in one file of the safetensors format, written and read as a stream with the hash taken in passing.

The format (https://github.com/huggingface/safetensors) is eight bytes of header length, a JSON header of names,
dtypes, shapes and offsets, then the raw bytes, little-endian. Streaming it holds one tensor's copy at a time, whereas
the library's `save` holds a copy of everything, and the hash is of exactly the files written or read. Every other
tool that reads safetensors reads these files. Dtypes that the format has no name for are stored as bytes;
`mpt.run.checkpoints.state` keeps their dtype.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from io import BufferedReader
from typing import Any, Self

import torch
from torch import Tensor

from mpt.run.process.files import write_fully

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LARGEST_HEADER_BYTES = 100_000_000
"""As in the safetensors library."""
MOST_WAITING = 2
"""Pieces that may wait to be hashed, in memory."""
GATHERED_BYTES = 1 << 20
"""Small tensors are written together, for a system call each would cost more than their bytes."""


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a dense tensor's memory as a one-dimensional uint8 view; a copy if it was not contiguous."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8)


def build_header(tensors: Mapping[str, Tensor]) -> tuple[bytes, list[str]]:
    """Return the encoded header and the order of the tensors' bytes, widest elements first so that all are aligned."""
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, Any] = {}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def write_tensors(descriptor: int, tensors: Mapping[str, Tensor]) -> tuple[str, int]:
    """Write tensors, whose dtypes must be in `DTYPES`, durably; return the file's SHA-256 and size in bytes."""
    header, order = build_header(tensors)
    size = 0
    gathered = bytearray(header)
    with HashBeside() as beside:
        for name in order:
            data = bytes_of(tensors[name].cpu()).numpy().data
            if data.nbytes < GATHERED_BYTES:
                gathered += data
            if len(gathered) >= GATHERED_BYTES or data.nbytes >= GATHERED_BYTES:
                size += flush(descriptor, gathered, beside)
            if data.nbytes >= GATHERED_BYTES:
                beside.update(data)
                write_fully(descriptor, data)
                size += data.nbytes
        size += flush(descriptor, gathered, beside)
        os.fsync(descriptor)  # while the last bytes are hashed
        return beside.hexdigest(), size


def flush(descriptor: int, gathered: bytearray, beside: HashBeside) -> int:
    """Write and hash the buffer, empty it, and return its size."""
    data = bytes(gathered)
    beside.update(data)
    write_fully(descriptor, data)
    gathered.clear()
    return len(data)


class HashBeside:
    """A SHA-256 that is computed in a thread during the reading or writing, for neither holds Python's lock."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.pool = ThreadPoolExecutor(1, "hash")
        self.waiting: deque[Future[None]] = deque()

    def update(self, data: bytes | memoryview) -> None:
        """Hash these bytes after those before them. They must stay as they are until the block ends."""
        self.waiting.append(self.pool.submit(self.digest.update, data))
        if len(self.waiting) > MOST_WAITING:  # copies from a GPU would pile up
            self.waiting.popleft().result()

    def hexdigest(self) -> str:
        """Wait for all bytes and return their hash."""
        while self.waiting:
            self.waiting.popleft().result()
        return self.digest.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(cancel_futures=True)


def read_tensors(file: BufferedReader) -> tuple[dict[str, Tensor], str]:
    """Read all tensors, on the CPU, and the file's SHA-256. Raises ValueError for a file of another form.

    Nothing is allocated beyond the file's own size, whatever its header claims.
    """
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(size - 8, LARGEST_HEADER_BYTES):
        raise ValueError("its header is longer than the file")
    text = file.read(length)
    tensors = {}
    with HashBeside() as beside:
        beside.update(prefix + text)
        for name, dtype, shape, nbytes in parse_header(text, size - 8 - length):
            try:
                tensor = torch.empty(shape, dtype=dtype)
            except (RuntimeError, TypeError, OverflowError) as error:
                raise ValueError(f"tensor {name!r} cannot be made: {error}") from error
            data = bytes_of(tensor).numpy().data
            if file.readinto(data) != nbytes:
                raise ValueError(f"the file ends within tensor {name!r}")
            beside.update(data)
            tensors[name] = tensor
        return tensors, beside.hexdigest()


def parse_header(text: bytes, data_bytes: int) -> list[tuple[str, torch.dtype, list[int], int]]:
    """Return name, dtype, shape and size of each tensor in file order.

    They must fill the file without gap or overlap.
    """
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        rows = [
            (
                entry["data_offsets"][0],
                entry["data_offsets"][1],
                name,
                DTYPES[entry["dtype"]],
                entry["shape"],
            )
            for name, entry in header.items()
        ]
        rows.sort(key=lambda row: row[:2])
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError("its header cannot be read") from error
    position = 0
    found = []
    for begin, end, name, dtype, shape in rows:
        dimensions_fit = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
        if (
            not dimensions_fit
            or type(begin) is not int
            or type(end) is not int
            or begin != position
        ):
            raise ValueError(f"tensor {name!r} has an impossible shape or place")
        if end - begin != math.prod(shape) * dtype.itemsize or end > data_bytes:
            raise ValueError(f"tensor {name!r} does not have the size that its shape needs")
        found.append((name, dtype, shape, end - begin))
        position = end
    if position != data_bytes:
        raise ValueError("it holds bytes that belong to no tensor")
    return found
