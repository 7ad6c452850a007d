"""Temporary folders of training processes: each goes at its end, and those of killed ones go at the next start.

A folder is in use while its lock is held, which the kernel drops with the process. Never imports torch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from mpt.run.process.operating_system import lock, open_file
from mpt.run.records.lock import hold_lock

LOCK = "lock"
NEW_SECONDS = 60.0
"""A folder this young may not have its lock yet."""
OLD_SECONDS = 24 * 3600.0
"""A folder this old without a lock file was left before it had one."""


@contextlib.contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Give a folder of the system's temporary ones within the block, and remove those of killed processes."""
    remove_abandoned(prefix)
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with hold_lock(folder / LOCK, folder):
            yield folder


def remove_abandoned(prefix: str) -> None:
    """Remove this user's folders with a prefix whose process is gone; unreadable ones stay."""
    for folder in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if is_abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


def is_abandoned(folder: Path) -> bool:
    """Return whether a folder is this user's and nobody's lock holds it. Raises OSError."""
    found = folder.lstat()
    age = time.time() - found.st_mtime
    if folder.is_symlink() or not folder.is_dir() or age < NEW_SECONDS:
        return False
    if hasattr(os, "getuid") and found.st_uid != os.getuid():
        return False
    if not (folder / LOCK).exists():
        return age > OLD_SECONDS
    descriptor = open_file(folder / LOCK, os.O_RDWR)
    try:
        lock(descriptor)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
