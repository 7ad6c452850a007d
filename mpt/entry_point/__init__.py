"""The installed command's first lines, installed under the distribution's name, outside the package `mpt`.

Another distribution called `mpt` may come before this one on the import path. Then nothing of this package can be
imported, and only code outside of it can say so. Installed as the package `mpt_trainer` (setup.py); it must import
nothing but the standard library.
"""

import atexit
import contextlib
import importlib.util
import os
import signal
import sys
from pathlib import Path


def leave(code: int) -> None:
    """End the process after an error without unloading the imported modules: with torch that takes seconds."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        # closed, or its reader has left
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def ignore_interrupts() -> None:
    """Let Ctrl-C change nothing while the exit functions run: the command is done, and a traceback would be printed."""
    atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def main() -> None:
    """Run the command line; if `mpt` is another package, print its path, and exit with 1."""
    found = importlib.util.find_spec("mpt")
    folder = Path(found.origin).parent if found is not None and found.origin else None
    if folder is None or not (folder / "entry_point" / "__init__.py").is_file():
        where = (
            f"another package called mpt comes first: {folder}"
            if folder
            else "its package mpt is missing"
        )
        print(
            f"error: {where}. Take it off PYTHONPATH, or: "
            "pip uninstall mpt; pip install --force-reinstall --no-deps mpt-trainer",
            file=sys.stderr,
        )
        sys.exit(1)
    try:
        run()
    except KeyboardInterrupt:  # while the command line was imported, or at the command's end
        # Python forgets one that came while it ran a string, for which it would end by the signal
        exec("")
        ignore_interrupts()
        print("interrupted", file=sys.stderr)
        sys.exit(130)


def run() -> None:
    """Run the command line, and leave at once after an error."""
    try:
        from mpt.planner.client.processes import start_ahead

        start_ahead(sys.argv[1:])

        from mpt.cli import main as run_command_line

        run_command_line()
    except SystemExit as end:
        ignore_interrupts()
        if isinstance(end.code, int) and end.code:
            leave(end.code)
        raise
