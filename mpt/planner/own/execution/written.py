"""Files that a script writes while it is planned: they go to a folder of their own, which is dropped.

A plan must not replace a log, a picture or a checkpoint of the training. The script finds its files and folders where
it made them, and what it removes or renames stays. Files that are written without Python's `open` (by OpenCV, HDF5 or
another process) are not kept apart, nor are the caches of downloads: a file that is there need not be fetched for each
plan, and libraries lock and map those files by other means.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self
from unittest import mock

from mpt.planner.facts.kept_apart import prefix

WRITING = frozenset("wax+")
FREE = ("/dev/", "/proc/")
OPENED = "/proc/self/fd"
"""The folder of links to the files that this process has opened."""
ASKING = ("stat", "lstat", "access")
CACHES = {
    "XDG_CACHE_HOME": "~/.cache",
    "HF_HOME": "",
    "HF_HUB_CACHE": "",
    "HF_DATASETS_CACHE": "",
    "TORCH_HOME": "",
}
"""Variables that name folders of downloads -> the folder if it is not set."""
CHANGING = ("remove", "unlink", "rmdir", "chmod", "utime")
MOVING = ("rename", "replace", "symlink", "link")
KEPT_LINES = 20


class Written:
    """The files of one script."""

    def __init__(self, *folders: str) -> None:
        """`folders`: the script's own, which count though they may lie in that of temporary files."""
        self.count = 0
        """Files that were written."""
        self._folder = Path(tempfile.mkdtemp(prefix=prefix()))
        self._free = (*FREE, tempfile.gettempdir() + os.sep)
        self._stat = os.stat
        self._own = tuple(os.path.join(os.path.abspath(one), "") for one in folders)
        caches = filter(None, (os.environ.get(*one) for one in CACHES.items()))
        self._caches = tuple(os.path.abspath(os.path.expanduser(one)) + os.sep for one in caches)

    def drop(self) -> None:
        """Remove them."""
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Let what is written inside the block go to their folder."""
        forms = {
            **dict.fromkeys(ASKING, self._asking),
            **dict.fromkeys(CHANGING, self._changing),
            **dict.fromkeys(MOVING, self._moving),
            "mkdir": self._making,
            "listdir": self._listing,
            "scandir": self._scanning,
            "chdir": self._entering,
        }
        opens = self._opening(io.open)
        with ExitStack() as stack:
            for module in (builtins, io):
                stack.enter_context(mock.patch.object(module, "open", opens))
            for name, form in forms.items():
                stack.enter_context(mock.patch.object(os, name, form(getattr(os, name))))
            removes = self._changing(shutil.rmtree)
            stack.enter_context(mock.patch.object(shutil, "rmtree", removes))
            yield

    def place_of(self, path: Any, folder: int | None = None) -> Path | None:
        """Return the place of a file in their folder; None for an open one, and for one that is temporary anyway.

        `folder`: an open one that the path is in, as while the contents of a folder are removed.
        """
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        above = "" if folder is None else f"{OPENED}/{folder}"
        if above and not os.path.islink(above):  # not on Linux
            return None
        above = above and os.readlink(above)
        whole = os.path.abspath(os.path.join(above, os.fsdecode(path)))
        inside = whole + os.sep
        if whole.startswith(str(self._folder)) or inside.startswith(self._caches):
            return None
        if whole.startswith(self._free) and not inside.startswith(self._own):
            return None
        return self._folder / whole.lstrip(os.sep).replace(":", "")

    def _opening(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            place = None if kwargs.get("opener") else self.place_of(file)  # of a temporary file
            if place is None:
                return function(file, mode, *args, **kwargs)
            if WRITING & {*mode} and not place.is_file():
                self._make_folder_of(file, place)
                if "w" not in mode and os.path.isfile(file):
                    place.write_bytes(Path(file).read_bytes())
                self.count += 1
            is_there = place.is_file() or WRITING & {*mode}
            return function(place if is_there else file, mode, *args, **kwargs)

        return call

    def _make_folder_of(self, path: Any, place: Path) -> None:
        folder = os.path.dirname(os.path.abspath(os.fsdecode(path)))
        if not os.path.isdir(folder):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(path))
        place.parent.mkdir(parents=True, exist_ok=True)

    def _asking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            place = self.place_of(path)
            is_there = place is not None and os.access(place, os.F_OK)
            return function(place if is_there else path, *args, **kwargs)

        return call

    def _listing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".") -> Any:
            return [*dict.fromkeys(one for folder in self._both(path) for one in function(folder))]

        return call

    def _scanning(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".") -> Any:
            found: dict[Any, Any] = {}
            for folder in self._both(path):
                with function(folder) as entries:
                    found.update((one.name, one) for one in entries)
            return Entries(found.values())

        return call

    def _entering(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda path: function(self._both(path)[0])

    def _both(self, path: Any) -> list[Any]:
        """Return the folders that have a folder's entries: itself, and the place of those that were written to it."""
        place = self.place_of(path)
        if place is None or not place.is_dir():
            return [path]
        apart = os.fsencode(place) if isinstance(path, bytes) else str(place)
        try:
            self._stat(path)
        except OSError:
            return [apart]
        return [path, apart]

    def _making(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> None:
            place = self.place_of(path)
            if place is None:
                return function(path, *args, **kwargs)  # type: ignore[no-any-return]
            if os.path.lexists(path):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fsdecode(path))
            self._make_folder_of(path, place)
            place.mkdir()
            return None

        return call

    def _changing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            place = self.place_of(path, kwargs.get("dir_fd"))
            if place is None:
                return function(path, *args, **kwargs)
            return function(place, *args, **kwargs) if place.exists() else None

        return call

    def _moving(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(old: Any, new: Any, *args: Any, **kwargs: Any) -> Any:
            before, after = self.place_of(old), self.place_of(new)
            if before is None and after is None:
                return function(old, new, *args, **kwargs)
            if (before is None or before.exists()) and after is not None:
                self._make_folder_of(new, after)
                return function(before or old, after, *args, **kwargs)
            return None

        return call


class Entries(list[Any]):
    """Entries of a folder as `os.scandir` gives them."""

    def __init__(self, entries: Iterable[Any]) -> None:
        super().__init__(entries)
        self._rest = list.__iter__(self)

    def __iter__(self) -> Iterator[Any]:
        return self._rest

    def __next__(self) -> Any:
        return next(self._rest)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End it: nothing is open."""


class Tail(io.TextIOBase):
    """A stream of text that keeps the last lines."""

    encoding = "utf-8"

    def __init__(self) -> None:
        super().__init__()
        self._text = ""

    def write(self, text: str) -> int:
        """Take text."""
        self._text = "\n".join((self._text + text).split("\n")[-KEPT_LINES:])
        return len(text)

    def writable(self) -> bool:
        """It takes text."""
        return True

    def last(self) -> str:
        """Return the last line that says something."""
        lines = [line.strip() for line in self._text.split("\n")]
        return next((line for line in reversed(lines) if line), "")
