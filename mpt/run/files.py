"""Files that are whole or absent: exclusive creation, atomic replacement, and failures told with their remedy.

A run outlives crashes, full disks and strangers in a shared directory. So everything here is created under a random
name with O_EXCL and O_NOFOLLOW (a planted link is never written through), is synced before it gets its final name,
and the directory is synced after: a kill at any moment leaves the old file or the new one. POSIX only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from mpt.errors import InputOutputError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a write meets on a disk without room."""
NO_LINKS = os.O_NOFOLLOW
TEMPORARY = ".tmp-"
"""What every unfinished file's or directory's name begins with."""

REMEDIES = {
    errno.ENOSPC: "the disk is full: free some space or lower train.keep_last",
    errno.EDQUOT: "the disk quota is used up: free some space or lower train.keep_last",
    errno.EFBIG: "the limit on a file's size was met (see `ulimit -f`)",
    errno.EROFS: "the file system is read-only: choose another directory for runs",
    errno.EACCES: "permission was denied: choose another directory for runs, or change its owner",
    errno.EPERM: "permission was denied: choose another directory for runs, or change its owner",
    errno.EEXIST: "a file stands where a directory is wanted: choose another directory",
    errno.ELOOP: "a symbolic link stands where a file or directory of the run belongs: remove the link",
    errno.ENOTDIR: "something that is not a directory stands in the way, maybe a symbolic link: remove it",
}


def temporary_name() -> str:
    """Return a name that nobody can guess and that `clean_temporaries` recognises."""
    return TEMPORARY + secrets.token_hex(8)


def open_directory(path: Path) -> int:
    """Open a directory that is not a symbolic link."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def open_new(name: str | Path, directory: int | None = None) -> int:
    """Create a file for writing. Fails if anything has that name already."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(name, flags, 0o666, dir_fd=directory)


def open_regular(name: str | Path, directory: int | None = None) -> int:
    """Open a regular file for reading; links, pipes and devices are an OSError."""
    # A pipe without a writer would block for ever without O_NONBLOCK; regular files do not heed it.
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(name))
    return descriptor


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    descriptor = open_directory(path)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_fully(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data`, however the system splits it."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_atomically(path: Path, data: bytes | str, *, durable: bool = True, follow_folder: bool = True) -> None:
    """Replace a file's content so that a reader, or a crash, meets the old or the new one, never a part.

    A symbolic link under that name is replaced, not followed; with `follow_folder=False` one that stands for its folder
    is an error. Text is UTF-8; a part of a file's name that is none is written as an escape. Raises InputOutputError.
    """
    content = data.encode(errors="backslashreplace") if isinstance(data, str) else data
    temporary = temporary_name()
    with failures_explained(path, len(content)):
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow_folder else NO_LINKS))
        try:
            descriptor = open_new(temporary, folder)
            try:
                write_fully(descriptor, content)
                if durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(temporary, path.name, src_dir_fd=folder, dst_dir_fd=folder)
            if durable:
                os.fsync(folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        finally:
            os.close(folder)


def free_bytes(path: Path) -> int | None:
    """Return the space that is left for this user where `path` is or would be; None if it cannot be told."""
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError):
            figures = os.statvfs(folder)
            return figures.f_bavail * figures.f_frsize
    return None


@contextlib.contextmanager
def failures_explained(path: Path, needed_bytes: int | None = None) -> Iterator[None]:
    """Turn an OSError into an InputOutputError that names the file, the bytes needed and free, and a remedy."""
    try:
        yield
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, error.strerror or str(error))
        sizes = ""
        if needed_bytes is not None and error.errno in FULL:
            free = free_bytes(path)
            sizes = f" {needed_bytes} bytes are needed{'' if free is None else f', {free} are free'}."
        raise InputOutputError(f"{path} could not be written: {remedy}.{sizes}") from error
