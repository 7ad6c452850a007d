"""Files that others made, or may have put in the place of ours: a regular file of bounded size, or an error.

Reading a pipe waits for ever, a device has no end, and a sparse file of one block on disk fills the memory. Whatever
this process did not just write itself is therefore opened here, with the size that its kind may have. Links are
followed: users keep data behind them. A file of the run's own, for which a link is an attack, is opened by
`mpt.run.process.files.open_regular`.

Every refusal is an OSError with a reason in `strerror`, so that callers need no case of their own for it.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

LARGEST_SOURCE_BYTES = 4 << 20
"""A Python file, a list of names. The longest module of torch has under 1 MB."""
LARGEST_RECORD_BYTES = 64 << 20
"""A JSON or text record of a run or of a tool."""
LARGEST_LINE_BYTES = 4 << 20
"""A line of a log. One of a run has a few hundred bytes for each network."""
MOST_SKIPPED = 100
"""How often that length is skipped to find the end of a line."""
LARGEST_PICTURE_BYTES = 256 << 20
"""An encoded picture: 4096 x 4096 pixels with 16 bits in each of four channels have half of it before compression."""
NOT_REGULAR = "not a regular file"


class UnfitFileError(OSError):
    """A file that is not regular or too large; `strerror` says which."""


def open_foreign(path: Path, most_bytes: int | None = None) -> BufferedReader:
    """Open a regular file of at most `most_bytes` for reading. Raises OSError for anything else, at once."""
    flags = (
        os.O_RDONLY
        | getattr(os, "O_NONBLOCK", 0)
        | getattr(os, "O_BINARY", 0)
        | getattr(os, "O_CLOEXEC", 0)
    )
    descriptor = os.open(path, flags)  # without O_NONBLOCK a pipe would already be waited on here
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnfitFileError(errno.EINVAL, NOT_REGULAR, str(path))
        if most_bytes is not None and status.st_size > most_bytes:
            raise too_large(path, most_bytes)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file of at most `most_bytes`. Raises OSError."""
    with open_foreign(path, most_bytes) as file:
        data = file.read(most_bytes + 1)  # it may have grown, and files in /proc have no size
    if len(data) > most_bytes:
        raise too_large(path, most_bytes)
    return data


def read_text(path: Path, most_bytes: int, errors: str = "strict") -> str:
    """Return a UTF-8 text with `\\n` as its line ends, without a byte order mark.

    Raises OSError, and UnicodeDecodeError by `errors`.
    """
    text = read_bytes(path, most_bytes).decode("utf-8-sig", errors)
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_json(path: Path, most_bytes: int = LARGEST_RECORD_BYTES) -> Any:
    """Return a JSON file's value. Raises OSError, and ValueError for anything that is no JSON or nests without
    bound."""
    try:
        return json.loads(read_bytes(path, most_bytes))
    except RecursionError as error:
        raise ValueError("it nests too deep") from error


def read_lines(path: Path, most_line_bytes: int = LARGEST_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines of a log, with their ends; of one that is too long its beginning. Raises OSError."""
    with open_foreign(path) as file:
        yield from bounded_lines(file, most_line_bytes)


def bounded_lines(
    file: BufferedReader, most_line_bytes: int = LARGEST_LINE_BYTES
) -> Iterator[bytes]:
    """Yield the lines of an open file as `read_lines` does; one of a hundred times that length is the last."""
    while line := file.readline(most_line_bytes):
        yield line
        for _ in range(MOST_SKIPPED):
            if line.endswith(b"\n") or not line:
                break
            line = file.readline(most_line_bytes)
        else:
            return


def too_large(path: Path, most_bytes: int) -> UnfitFileError:
    """Return the error for a file beyond its bound."""
    return UnfitFileError(
        errno.EFBIG, f"larger than the {most_bytes} bytes that such a file may have", str(path)
    )
