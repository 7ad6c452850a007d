"""A model's folder is switched from one model to the next at once, and the previous content is kept as a backup.

A model is many files, and DeepFaceLab opens whatever lies under its name: new encoders alongside old decoders would be
a model that nobody trained. So the whole folder is made anew alongside the old one: files of other models are linked
into it, the model that is replaced is linked into its newest backup, and the new model is written and synced. Then the
two folders change names in one step. A kill or a full disk at any moment leaves the old folder or the new one.

Backups are DeepFaceLab's own: `NAME_autobackups/01` is the newest of at most 24.

If the kernel or the file system cannot exchange two names, the old folder is set aside for the moment between two
renames, and the next return puts it back if the second never came.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mpt.errors import InputOutputError
from mpt.run.process.files import failures_explained, sync_directory
from mpt.run.process.operating_system import exchange, lock, opened
from mpt.systems.deepfacelab.commands.shared.model_folder import Folder, model_files

BEGUN = ".mpt-return-"
"""Prefix of the folder in which a return is prepared."""
NEW, OLD, NOTE = "new", "old", "note.json"
"""In it: the folder that is made, the one that is set aside, and which one is to be replaced."""
BACKUPS = 24
"""How many backups DeepFaceLab keeps of a model."""


@contextlib.contextmanager
def replacing(folder: Folder) -> Iterator[Folder]:
    """Yield a folder to write a model into. At the end of the block, if it ends well, it is `folder`, at once.

    Files must be new in it and synced: the files that it has already are shared with the folder that it replaces.
    Raises InputOutputError, leaving everything as it was.
    """
    target = folder.path.resolve()
    if os.path.ismount(target):
        raise InputOutputError(
            f"{target} is a mount point, which cannot be switched: name a folder inside of it"
        )
    with failures_explained(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    with held(target):
        recover(target)
        workplace = target.parent / f"{BEGUN}{target.name}-{secrets.token_hex(8)}"
        try:
            with failures_explained(target):
                new = workplace / NEW
                new.mkdir(parents=True)
                if target.exists():
                    shutil.copymode(target, new)
                    write_note(Folder(target, folder.prefix), workplace)
                    link_all(Folder(target, folder.prefix), new)
            yield Folder(new, folder.prefix)
            with failures_explained(target):
                sync_tree(new)
                switch(target, workplace)
        finally:
            with contextlib.suppress(OSError):
                clean(workplace, target)


@contextlib.contextmanager
def held(target: Path) -> Iterator[None]:
    """Keep others from returning a model to this folder meanwhile."""
    with failures_explained(target), opened(target.parent, follow_links=True) as parent:
        if isinstance(parent, int):
            try:
                lock(parent)
            except BlockingIOError as error:
                raise InputOutputError(
                    f"{target}: another process returns a model there; wait for its end"
                ) from error
            except OSError:  # a file system without locks
                pass
        yield


def link_all(old: Folder, new: Path) -> None:
    """Fill a new folder with the files of the old one: the model as its newest backup, the rest as it is."""
    replaced = model_files(old)
    backups = f"{old.prefix.rstrip('_')}_autobackups"
    for path in sorted(old.path.iterdir()):
        if path.name == backups and replaced and path.is_dir() and not path.is_symlink():
            link_backups(path, new / backups)
        elif path not in replaced:
            link(path, new / path.name)
    if replaced:
        newest = new / newest_backup(old)
        newest.mkdir(parents=True)
        for path in replaced:
            link(path.resolve(), newest / path.name)


def link_backups(old: Path, new: Path) -> None:
    """Link a model's backups, each one number older. The last goes, as DeepFaceLab lets it."""
    new.mkdir()
    for path in sorted(old.iterdir()):
        number = int(path.name) if re.fullmatch(r"\d\d", path.name) else 0
        if not 1 <= number <= BACKUPS:
            link(path, new / path.name)
        elif number < BACKUPS:
            link(path, new / f"{number + 1:02d}")


def link(old: Path, new: Path) -> None:
    """Give a file or all files of a folder a second name; copy if the file system has no second names."""
    if old.is_dir() and not old.is_symlink():
        new.mkdir()
        shutil.copymode(old, new)
        for path in sorted(old.iterdir()):
            link(path, new / path.name)
        return
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:
        if not old.is_file() and not old.is_symlink():
            raise
        shutil.copy2(old, new, follow_symlinks=False)
        if not new.is_symlink():
            sync_file(new)


def sync_file(path: Path) -> None:
    """Make a file's content durable."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_tree(folder: Path) -> None:
    """Make the names in a folder and below durable."""
    for place, _, _ in os.walk(folder, topdown=False):
        sync_directory(Path(place))


def switch(target: Path, workplace: Path) -> None:
    """Put the new folder in the old one's place."""
    new = workplace / NEW
    if not target.exists():
        os.rename(new, target)
    elif not exchange(new, target):
        os.rename(target, workplace / OLD)
        os.rename(new, target)
    sync_directory(target.parent)


def write_note(folder: Folder, workplace: Path) -> None:
    """Write down which folder is to be replaced, and its contents when it was linked."""
    files = {path.name: signature(path) for path in folder.path.iterdir() if path.is_file()}
    replaced = [path.name for path in model_files(folder)]
    note = {
        "folder": identity(folder.path),
        "files": files,
        "replaced": replaced,
        "backup": newest_backup(folder),
    }
    path = workplace / NOTE
    path.write_text(json.dumps(note))
    sync_file(path)


def read_note(workplace: Path) -> dict[str, Any]:
    """Read the note of `write_note`; empty if it is not whole, so nothing was switched yet."""
    try:
        note = json.loads((workplace / NOTE).read_text())
    except (OSError, ValueError):
        return {}
    return note if isinstance(note, dict) else {}


def newest_backup(folder: Folder) -> str:
    """Return the place of DeepFaceLab's newest backup of its model in a folder."""
    return f"{folder.prefix.rstrip('_')}_autobackups/01"


def identity(path: Path) -> str:
    """Return the folder's identity, which a rename does not change."""
    found = path.stat()
    return f"{found.st_dev} {found.st_ino}"


def signature(path: Path) -> str:
    """Return a value that changes with the file's content."""
    found = path.stat()
    return f"{found.st_ino} {found.st_size} {found.st_mtime_ns}"


def recover(target: Path) -> None:
    """Undo or finish killed returns to this folder."""
    for workplace in sorted(target.parent.glob(f"{BEGUN}{glob.escape(target.name)}-*")):
        if workplace.is_dir() and not workplace.is_symlink():
            with failures_explained(target):
                clean(workplace, target)


def clean(workplace: Path, target: Path) -> None:
    """Remove the files that a return prepared or replaced; nothing else.

    A folder set aside goes back if nothing took its place. A file that came into a folder while it was being replaced
    is moved to the new one.
    """
    old, new = workplace / OLD, workplace / NEW
    if old.is_dir() and not target.exists():
        os.rename(old, target)
        sync_directory(target.parent)
    note = read_note(workplace)
    for folder in (old, new):
        if folder.is_dir() and identity(folder) == note.get("folder"):
            rescue(folder, target, note)
    shutil.rmtree(workplace, ignore_errors=True)


def rescue(old: Path, target: Path, note: Mapping[str, Any]) -> None:
    """Move files that appeared or changed in a replaced folder after its content was linked."""
    for path in sorted(old.iterdir()):
        if path.is_file() and note["files"].get(path.name) != signature(path):
            place = target / note["backup"] if path.name in note["replaced"] else target
            os.replace(path, place / path.name)
