"""Other programs called `mpt`: another distribution on PyPI has the name too, and a command of the same name."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

OURS = "mpt-trainer"


def find_shadows() -> Iterator[tuple[str, str]]:
    """Yield obstacles to this program, and their remedies."""
    command = shutil.which("mpt")
    scripts = Path(sys.executable).parent
    if command is not None and Path(command).absolute().parent not in (
        scripts,
        scripts / "Scripts",
    ):
        known = metadata_command()
        if known is None or Path(command).resolve() != known:
            yield (
                f"the command mpt on the PATH is {command}, which does not belong to this Python ({sys.executable})",
                "write `python -m mpt`, or put this Python's scripts first in PATH",
            )
    try:
        other = metadata.distribution("mpt")
    except metadata.PackageNotFoundError:
        return
    yield (
        f"the distribution mpt {other.version} is installed too: another program with a package and a command mpt",
        f"pip uninstall mpt, then pip install --force-reinstall --no-deps {OURS}",
    )


def metadata_command() -> Path | None:
    """Return the script that the installation of this program wrote, wherever its scheme puts scripts."""
    try:
        files = metadata.distribution(OURS).files or []
    except metadata.PackageNotFoundError:
        return None
    return next(
        (Path(str(file.locate())).resolve() for file in files if file.name in ("mpt", "mpt.exe")),
        None,
    )
