"""What a program asks of the file system, in order: without a power loss, a missing sync is seen in no other way.

Every call of `os` that opens, writes, syncs or renames is noted with names below a folder. Random parts of names are
left out. What Python's own files write is not seen; the bytes that a sync has made durable are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RANDOM = re.compile(r"(?<=-)[0-9a-f]{16}")


class StorageOrder:
    """Notes calls below a folder. `events` are `write a`, `sync a`, `rename a > b`, `sync folder/`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.events = folder.resolve(), list[str]()
        self.synced: dict[int, bytes | tuple[str, ...]] = {}
        """Inode -> the content of a file, or the names in a folder, at its last sync. What is there is durable."""
        for path in self.folder.rglob("*"):
            self.synced[path.stat().st_ino] = content_of(path)
        for name, note in (("write", self.note_write), ("fsync", self.note_sync)):
            monkeypatch.setattr(os, name, self.noted(getattr(os, name), note))
        for name in ("rename", "replace"):
            monkeypatch.setattr(os, name, self.noted(getattr(os, name), self.note_rename))

    def noted(self, function: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
        """Return a function that is noted once it has been done."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            result = function(*arguments, **keywords)
            note(*arguments, **keywords)
            return result

        return call

    def add(self, event: str) -> None:
        """Note an event; one write for all parts of a content, and a sync each time, since each waits for the disk."""
        if not event.startswith("write ") or self.events[-1:] != [event]:
            self.events.append(event)

    def name_of(self, path: str | Path) -> str | None:
        """Return a path below the folder without what is random in it, None for one elsewhere."""
        if Path(path) == self.folder:
            return "."
        name = os.path.relpath(os.path.realpath(os.path.dirname(path)), self.folder)
        name = os.path.normpath(os.path.join(name, os.path.basename(path)))
        return None if name.startswith("..") else RANDOM.sub("*", name)

    def note_write(self, descriptor: int, *_: Any) -> None:
        """Note a write."""
        if (name := self.name_of(os.readlink(f"/proc/self/fd/{descriptor}"))) is not None:
            self.add(f"write {name}")

    def note_sync(self, descriptor: int) -> None:
        """Note a sync and what it has made durable."""
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if (name := self.name_of(path)) is not None:
            self.synced[os.fstat(descriptor).st_ino] = content_of(path)
            self.add(f"sync {name}{'/' * path.is_dir()}")

    def note_rename(
        self, old: str | Path, new: str | Path, *, src_dir_fd: Any = None, dst_dir_fd: Any = None
    ) -> None:
        """Note a new name."""
        folders = [
            "" if one is None else os.readlink(f"/proc/self/fd/{one}")
            for one in (src_dir_fd, dst_dir_fd)
        ]
        names = [
            self.name_of(os.path.join(folder, one))
            for folder, one in zip(folders, (old, new), strict=True)
        ]
        if names[1] is not None:
            self.add(f"rename {names[0]} > {names[1]}")

    def not_durable(self, path: Path) -> list[str]:
        """Return what below a path, itself too, has other content or names than at its last sync."""
        places = [path, *path.rglob("*")] if path.is_dir() else [path]
        found = [
            place for place in places if self.synced.get(place.stat().st_ino) != content_of(place)
        ]
        return sorted(str(place.relative_to(self.folder)) for place in found)


def content_of(path: Path) -> bytes | tuple[str, ...]:
    """Return a file's bytes, or the names in a folder."""
    return tuple(sorted(os.listdir(path))) if path.is_dir() else path.read_bytes()
