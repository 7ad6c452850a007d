"""Differences of operating systems, files above all: the one module that distinguishes POSIX from Windows.

On POSIX everything goes through descriptors of opened folders, so that a link planted meanwhile is never followed, and
a folder's names are synced. Windows opens no folders: there a folder is its path, a link that is in the way is
looked for just before, which leaves a moment between, and names become durable when the system writes them. A process
that replaces a file waits there while a virus scanner or an indexer holds it.

`fcntl` decides which of the two it is. Never imports torch. Windows itself has not run this yet: tests hide from
Linux the features that Windows lacks.
"""

from __future__ import annotations

import contextlib
import errno
import ntpath
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path, PureWindowsPath

try:
    import fcntl

    IS_POSIX = True
except ImportError:
    IS_POSIX = False

Folder = int | Path
"""An opened folder: a descriptor on POSIX, a path on Windows."""
ALWAYS = sum(
    getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_BINARY", "O_NOINHERIT")
)
"""No links, nothing handed to other programs, no line ends changed."""
NO_WAITING = getattr(os, "O_NONBLOCK", 0)
"""A pipe without a writer would block for ever; regular files do not heed it."""
LOCKED_BYTE = 1 << 30
"""Windows locks bytes against readers too: one far behind the text of a lock file."""
AT_CWD, RENAME_EXCHANGE = -100, 2
"""Of Linux: paths count from the working directory; two names change their places."""
PATIENCE_SECONDS = 2.0
"""How long a file that another program holds is waited for on Windows."""


@contextlib.contextmanager
def opened(path: Path, *, follow_links: bool = False) -> Iterator[Folder]:
    """Open a folder that is not a symbolic link, unless links are to be followed. Raises OSError."""
    if IS_POSIX:
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow_links else os.O_NOFOLLOW)
        descriptor = os.open(path, flags)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    else:
        if not follow_links:
            refuse_link(path)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "not a directory", str(path))
        yield path


@contextlib.contextmanager
def opened_below(name: str, folder: Folder) -> Iterator[Folder]:
    """Open a folder inside an opened one."""
    if isinstance(folder, int):
        descriptor = os.open(
            name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder
        )
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    else:
        with opened(folder / name) as inner:
            yield inner


def open_file(name: str | Path, flags: int, folder: Folder | None = None) -> int:
    """Open a file, in an opened folder or by its path; a link is an OSError. New files have the usual rights."""
    if isinstance(folder, int):
        return os.open(name, flags | ALWAYS, 0o666, dir_fd=folder)
    path = name if folder is None else folder / name
    if not IS_POSIX:
        refuse_link(Path(path))
    return os.open(path, flags | ALWAYS, 0o666)


def is_reserved(name: str) -> bool:
    """Return whether Windows keeps a file name for itself, as `nul`, or cuts its end off."""
    if sys.version_info >= (3, 13):
        return ntpath.isreserved(name)
    return PureWindowsPath(name).is_reserved() or name.endswith(".")  # removed in Python 3.15


def make_folder(name: str, folder: Folder) -> None:
    """Make a folder inside an opened one."""
    if isinstance(folder, int):
        os.mkdir(name, dir_fd=folder)
    else:
        os.mkdir(folder / name)


def replace(old: str, new: str, folder: Folder) -> None:
    """Give a file another's name, which it takes the place of, inside an opened folder."""
    if isinstance(folder, int):
        os.replace(old, new, src_dir_fd=folder, dst_dir_fd=folder)
        return
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return os.replace(folder / old, folder / new)
        except PermissionError:  # somebody reads the old file
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


def exchange(one: Path, other: Path) -> bool:
    """Let two folders change names in one step of the kernel's; False if kernel or file system cannot. OSError."""
    if sys.platform != "linux":
        return False
    import ctypes

    # Python has no name for it. Linux 3.15 and glibc 2.28 do; a file system without it answers EINVAL.
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if (
        rename(AT_CWD, os.fsencode(one), AT_CWD, os.fsencode(other), ctypes.c_uint(RENAME_EXCHANGE))
        == 0
    ):
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def unlink(name: str, folder: Folder) -> None:
    """Remove a file from an opened folder."""
    if isinstance(folder, int):
        os.unlink(name, dir_fd=folder)
    else:
        os.unlink(folder / name)


def sync_folder(folder: Folder) -> None:
    """Make the names in an opened folder durable, if the system can be asked to."""
    if isinstance(folder, int):
        os.fsync(folder)


def read_at(descriptor: int, count: int, position: int) -> bytes:
    """Read from a place in a file; the file's own position may change."""
    if IS_POSIX:
        return os.pread(descriptor, count, position)
    os.lseek(descriptor, position, os.SEEK_SET)
    return os.read(descriptor, count)


def lock(descriptor: int) -> None:
    """Lock an open file against other processes until it is closed. Raises BlockingIOError if one holds it."""
    if IS_POSIX:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    import msvcrt

    os.lseek(descriptor, LOCKED_BYTE, os.SEEK_SET)
    try:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
    except PermissionError as error:
        raise BlockingIOError(errno.EWOULDBLOCK, "locked by another process") from error
    except OSError as error:
        if error.errno in (errno.EDEADLK, errno.EACCES):
            raise BlockingIOError(errno.EWOULDBLOCK, "locked by another process") from error
        raise


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[None]:
    """Hold Ctrl-C back in this thread, and in processes that are started meanwhile until they call
    `ignore_interrupts`: it reaches the whole process group, and would end one that is just starting. Not on Windows.
    """
    if not IS_POSIX:
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts() -> None:
    """Let Ctrl-C pass this process by, one that was held back as well."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if IS_POSIX:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def moves_overflow() -> bool:
    """Return whether a GPU's driver moves excess allocations into system memory instead of refusing them.

    NVIDIA's does on Windows (the driver's setting "CUDA - Sysmem Fallback Policy") and, without that setting, in the
    Linux of Windows (https://github.com/microsoft/WSL/issues/11050).
    """
    return sys.platform == "win32" or is_wsl()


def is_wsl() -> bool:
    """Return whether this is the Linux of Windows, whose kernel says so."""
    return sys.platform == "linux" and "microsoft" in os.uname().release.lower()


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def refuse_link(path: Path) -> None:
    """Raise OSError if a symbolic link has this path."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, "a symbolic link", str(path))
