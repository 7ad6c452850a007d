"""Files that are whole or absent: exclusive creation, atomic replacement, and failures told with their remedy.

A run outlives crashes, full disks and strangers in a shared directory. So everything here is created under a random
name with O_EXCL and O_NOFOLLOW (a planted link is never written through), is synced before it gets its final name,
and the directory is synced after: a kill at any moment leaves the old file or the new one. The part that other systems
than POSIX lack is in `mpt.run.process.operating_system`.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from mpt.errors import ConfigError, InputOutputError
from mpt.run.process.operating_system import (
    NO_WAITING,
    Folder,
    open_file,
    opened,
    replace,
    sync_folder,
    unlink,
)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write on a disk without room."""
DEVICES = Path("/dev")
"""The folder of devices, each of which a file that replaces it would take from the whole machine."""
TEMPORARY = ".tmp-"
"""The beginning of every unfinished file's or directory's name."""

REMEDIES = {
    errno.ENOSPC: "the disk is full: free some space",
    errno.EDQUOT: "the disk quota is used up: free some space",
    errno.EFBIG: "the limit on a file's size was met (see `ulimit -f`)",
    errno.EROFS: "the file system is read-only: choose another directory",
    errno.EACCES: "permission was denied: choose another directory, or change its owner",
    errno.EPERM: "permission was denied: choose another directory, or change its owner",
    errno.EEXIST: "a file stands where a directory is wanted: choose another directory",
    errno.ELOOP: "a symbolic link stands where a file or directory of the run belongs: remove the link",
    errno.ENOTDIR: "something that is not a directory stands in the way, maybe a symbolic link: remove it",
}
NOT_REGULAR = "not a regular file"


def free_path(path: Path) -> Path:
    """Return a path that nothing has yet: this one, or `name-2.suffix`, `name-3.suffix`, ... alongside it."""
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return next(one for one in itertools.chain([path], numbered) if not os.path.lexists(one))


def refuse_unwritable(path: Path) -> None:
    """Raise InputOutputError for a file that cannot be written, before the work whose result it is to hold."""
    folder = path.absolute().parent
    if folder == DEVICES or path.is_dir() or not os.access(folder, os.W_OK):
        raise InputOutputError(
            f"{path}: cannot be written: it is a folder or a device, or its folder is missing or read-only"
        )


def temporary_name() -> str:
    """Return a name that nobody can guess and that `clean_temporaries` recognises."""
    return TEMPORARY + secrets.token_hex(8)


def open_new(name: str | Path, directory: Folder | None = None) -> int:
    """Create a file for writing. Fails if anything has that name already."""
    return open_file(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, directory)


def open_regular(name: str | Path, directory: Folder | None = None) -> int:
    """Open a regular file for reading; links, pipes and devices are an OSError."""
    return only_regular(open_file(name, os.O_RDONLY | NO_WAITING, directory), name)


def open_to_append(name: str | Path) -> int:
    """Open a regular file for appending, creating it if need be; links, pipes and devices are an OSError."""
    try:
        descriptor = open_file(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_WAITING)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a pipe that nobody reads
            raise
        raise OSError(errno.EINVAL, NOT_REGULAR, str(name)) from error
    return only_regular(descriptor, name)


def only_regular(descriptor: int, name: str | Path) -> int:
    """Return the descriptor of a regular file; anything else is closed, and an OSError that names it."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, NOT_REGULAR, str(name))
    return descriptor


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    with opened(path) as folder:
        sync_folder(folder)


def write_fully(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of `data`, however the system splits it."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def write_atomically(
    path: Path, data: bytes | str, *, durable: bool = True, follow_folder: bool = True
) -> None:
    """Replace a file's content so that a reader, or a crash, meets the old or the new one, never a part.

    A symbolic link under that name is replaced, not followed; with `follow_folder=False` a folder that is a link
    is an error. Text is UTF-8; a part of a file's name that is none is written as an escape. Raises InputOutputError.
    """
    if path.absolute().parent == DEVICES:
        raise InputOutputError(f"{path}: a device, which no file may replace; name a file")
    content = data.encode(errors="backslashreplace") if isinstance(data, str) else data
    temporary = temporary_name()
    with (
        failures_explained(path, len(content)),
        opened(path.parent, follow_links=follow_folder) as folder,
    ):
        try:
            descriptor = open_new(temporary, folder)
            try:
                write_fully(descriptor, content)
                if durable:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            replace(temporary, path.name, folder)
            if durable:
                sync_folder(folder)
        except BaseException:
            with contextlib.suppress(OSError):
                unlink(temporary, folder)
            raise


@contextlib.contextmanager
def partial_file(path: Path) -> Iterator[Path]:
    """Give the block a name to write a file under: after it the file has its own, after an error it is gone."""
    partial = path.with_name(f".partial-{path.name}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        # the cause of a failed write may hinder this too, and was reported
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def write_new(path: Path, text: str, way_out: str = "name another file") -> None:
    """Write a file for a user to edit. Raises ConfigError for one that is there, InputOutputError if it cannot be."""
    with failures_explained(path):
        try:
            file = path.open("x", encoding="utf-8")
        except FileExistsError:
            raise ConfigError(f"{path}: is there already; {way_out}") from None
        with file:
            file.write(text)


def free_bytes(path: Path) -> int | None:
    """Return the space that is left for this user on the file system of `path`; None if unknown."""
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError):
            return shutil.disk_usage(folder).free
    return None


def has_no_inodes(path: Path) -> bool:
    """Return whether the file system of `path` has no inode left; False if unknown."""
    for folder in (path, *path.parents):
        with contextlib.suppress(OSError, AttributeError):  # Windows has no statvfs
            found = os.statvfs(folder)
            return found.f_files > 0 and found.f_favail == 0
    return False


@contextlib.contextmanager
def failures_explained(
    path: Path, needed_bytes: int | None = None, saving: str = ""
) -> Iterator[None]:
    """Turn an OSError into an InputOutputError that names the file, the bytes needed and free, and a remedy.

    `saving` is a further remedy of a full disk.
    """
    try:
        yield
    except OSError as error:
        remedy = REMEDIES.get(error.errno or 0, error.strerror or str(error))
        remedy += saving if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        sizes = ""
        if needed_bytes is not None and error.errno in FULL:
            free = free_bytes(path)
            if (
                error.errno == errno.ENOSPC
                and free is not None
                and free > needed_bytes
                and has_no_inodes(path)
            ):
                raise InputOutputError(
                    f"{path} could not be written: the file system has no room for one more file (inodes), though "
                    f"{free} bytes are free: remove files there."
                ) from error
            sizes = (
                f" {needed_bytes} bytes are needed{'' if free is None else f', {free} are free'}."
            )
        raise InputOutputError(f"{path} could not be written: {remedy}.{sizes}") from error
