"""One writer per run directory: a lock that the kernel drops with its process.

So a killed run leaves no lock to be removed by hand; the lock file's text only says who held it. Never imports torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpt.errors import InputOutputError, MptError
from mpt.run.process.files import failures_explained, write_fully
from mpt.run.process.operating_system import lock, open_file, read_at

held_locks: set[int] = set()
"""Descriptors of this process's locks; see `forget_locks`."""


@contextlib.contextmanager
def hold_lock(path: Path, directory: Path) -> Iterator[str | None]:
    """Hold the lock file `path` of a directory within the block; yields a sentence if it was a killed holder's.

    Raises InputOutputError if another process holds it, naming it.
    """
    with failures_explained(path):
        descriptor = open_file(path, os.O_RDWR | os.O_CREAT)
    held_locks.add(descriptor)
    try:
        take_lock(descriptor, path, directory)
        before = read_holder(descriptor)
        with failures_explained(path):
            write_holder(descriptor)
        with ends_in_order(descriptor):
            killed = (
                f"The lock of a run that was killed ({describe_holder(before)}) was taken over."
            )
            yield killed if before else None
    finally:
        if descriptor in held_locks:
            held_locks.discard(descriptor)
            os.close(descriptor)


@contextlib.contextmanager
def ends_in_order(descriptor: int) -> Iterator[None]:
    """Empty the lock file after the block, if it ends or explains why it does not: nobody was killed.

    If it cannot be emptied by then, the next holder is only told of a killed run by mistake.
    """
    try:
        yield
    except MptError:
        empty(descriptor)
        raise
    empty(descriptor)


def empty(descriptor: int) -> None:
    """Take the holder's name out of a lock file, if the file can be written."""
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)


def forget_locks() -> None:
    """Close this process's lock files in a forked child.

    A flock belongs to the open file, which a fork shares: data workers that outlive a killed run would keep its
    directory locked. Closing the child's copy does not release the parent's lock.
    """
    for descriptor in held_locks:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    held_locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=forget_locks)


def take_lock(descriptor: int, path: Path, directory: Path) -> None:
    """Lock a run's lock file or raise InputOutputError at once."""
    try:
        lock(descriptor)
    except BlockingIOError as error:
        holder = describe_holder(read_holder(descriptor)) or "another process"
        raise InputOutputError(
            f"{directory} is being written by {holder}: one run has one writer. Wait for it to end, stop it, or start "
            "a new run with another --name."
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise InputOutputError(f"{path} could not be locked: {error.strerror}.") from error
        warnings.warn(
            f"{directory} is on a file system without locks ({error.strerror}): make sure that one process alone "
            "writes there.",
            stacklevel=4,
        )


def write_holder(descriptor: int) -> None:
    """Say in the lock file who holds it."""
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    os.ftruncate(descriptor, 0)
    os.lseek(descriptor, 0, os.SEEK_SET)
    write_fully(descriptor, json.dumps(holder).encode())


def read_holder(descriptor: int) -> dict[str, Any]:
    """Return who holds or held the lock; empty if nobody or unreadable."""
    try:
        value = json.loads(read_at(descriptor, 4096, 0) or b"{}")
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def describe_holder(holder: dict[str, Any]) -> str:
    if not holder:
        return ""
    return f"process {holder.get('pid', '?')} on {holder.get('host', '?')}, started {holder.get('started', '?')}"
