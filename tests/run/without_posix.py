"""Runs `mpt WORDS` on a system that lacks what Windows lacks: `python without_posix.py WORDS then WORDS then ...`.

It ends with the exit code of its command, of several with the first that is not 0. With `MPT_STORY_TOGETHER=1` it also
runs a story, `python without_posix.py ../stories/NAME.py`.
No fcntl and no descriptors of folders, no O_NOFOLLOW and its like, no fork, no SIGHUP, and processes started by spawn.
What libraries have imported before keeps its own ways, as their Windows builds would. Paths stay those of POSIX, and
nothing here shows how Windows itself locks, renames and signals.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import types
from typing import Any

import matplotlib.figure  # noqa: F401 - libraries know their own system
import rich.console  # noqa: F401
import torch
import typer  # noqa: F401

MISSING = {
    os: "O_NOFOLLOW O_DIRECTORY O_CLOEXEC O_NONBLOCK register_at_fork fork nice pread sched_getaffinity getuid",
    signal: "SIGHUP SIGUSR1 alarm pthread_kill",
}


def refuse(function: Any) -> Any:
    """Return a function of `os` that opens no folder and knows no descriptor of one."""

    def checked(path: Any, *words: Any, **options: Any) -> Any:
        if any(options.get(name) is not None for name in ("dir_fd", "src_dir_fd", "dst_dir_fd")):
            raise NotImplementedError("dir_fd unavailable on this platform")
        if function is real_open and os.path.isdir(path):
            raise PermissionError(13, "Permission denied", path)
        return function(path, *words, **options)

    return checked


def locking(descriptor: int, mode: int, count: int) -> None:
    """Lock bytes from the place on that the file is read at, as `msvcrt.locking` does."""
    assert mode == 2
    try:
        fcntl.lockf(
            descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, count, os.lseek(descriptor, 0, os.SEEK_CUR)
        )
    except OSError as error:
        raise PermissionError(13, "Permission denied") from error


real_open, real_kill = os.open, os.kill


def end_at_once(process: int, number: int) -> None:
    """End a process where it stands, as `os.kill` does there whatever the signal."""
    real_kill(process, signal.SIGKILL if number else 0)


def press(program: subprocess.Popen[str], number: int) -> None:
    """Send a program a signal, as a story does where a user presses Ctrl-C there."""
    with contextlib.suppress(ProcessLookupError):  # it has ended, as `Popen` looks first
        real_kill(program.pid, number)


def hide_posix() -> None:
    """Take away what Windows lacks. What mpt has imported so far it imports again, to find it missing."""
    from mpt import vision_ops

    vision_ops.import_torchvision()

    for name in [name for name in sys.modules if name.partition(".")[0] == "mpt"]:
        del sys.modules[name]
    sys.modules["fcntl"] = None  # type: ignore[assignment]
    sys.modules["msvcrt"] = types.ModuleType("msvcrt")
    sys.modules["msvcrt"].__dict__.update(locking=locking, LK_NBLCK=2)
    for module, names in MISSING.items():
        for missing in names.split():
            delattr(module, missing)
    # Windows has it; where the user's name is looked for without `pwd`
    os.environ.setdefault("USERNAME", "user")
    os.kill = end_at_once
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    for name in ("open", "mkdir", "replace", "rename", "unlink"):
        setattr(os, name, refuse(getattr(os, name)))
    multiprocessing.set_start_method("spawn")
    torch.multiprocessing.set_start_method("spawn", force=True)


def run(words: list[str]) -> int:
    """Run `mpt WORDS` and return its exit code."""
    from mpt.cli import main

    try:
        main(words)
    except SystemExit as ended:
        return int(ended.code or 0)


def main() -> int:
    """Run the commands, or the story, and return the exit code."""
    hide_posix()
    if sys.argv[1].endswith(".py"):
        subprocess.Popen.send_signal = press  # type: ignore[method-assign]
        sys.path.insert(0, os.path.dirname(sys.argv[1]))
        # workers import what is called __main__, which must be this file
        runpy.run_path(sys.argv[1], run_name="story")
        return 0
    commands = [
        list(words)
        for is_then, words in itertools.groupby(sys.argv[1:], "then".__eq__)
        if not is_then
    ]
    codes = []
    for words in commands:
        codes.append(run(words))
        if len(commands) > 1:
            print(f"exit code {codes[-1]}")
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
