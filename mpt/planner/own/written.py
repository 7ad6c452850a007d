"""Files that a script writes while it is planned: they go to a folder of their own, which is dropped.

A plan must not replace a log, a picture or a checkpoint of the training. The script finds its files and folders where
it made them, and what it removes or renames stays. Files that are written without Python's `open` (by OpenCV, HDF5 or
another process) are not kept apart.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

WRITING = frozenset("wax+")
FREE = ("/dev/", "/proc/")
ASKING = ("stat", "lstat", "listdir", "scandir", "access")
CHANGING = ("remove", "unlink", "rmdir", "chmod", "utime")
MOVING = ("rename", "replace", "symlink", "link")


class Written:
    """The files of one script."""

    def __init__(self, *folders: str) -> None:
        """`folders`: the script's own, which count though they may lie in that of temporary files."""
        self.count = 0
        """Files that were written."""
        self._folder = Path(tempfile.mkdtemp(prefix="mpt-plan-"))
        self._free = (*FREE, tempfile.gettempdir() + os.sep)
        self._own = tuple(os.path.join(os.path.abspath(one), "") for one in folders)

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

    def place_of(self, path: Any) -> Path | None:
        """Return the place of a file in their folder; None for an open one, and for one that is temporary anyway."""
        if not isinstance(path, str | bytes | os.PathLike):
            return None
        whole = os.path.abspath(os.fsdecode(path))
        if whole.startswith(str(self._folder)):
            return None
        if whole.startswith(self._free) and not whole.startswith(self._own):
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
            place = self.place_of(path)
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
