"""Whether what the GPU check needs is installed, and its processes (`mpt.doctor.card.processes`), which end with it."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mpt.doctor.card.processes import reason, run  # noqa: E402

__all__ = ["reason", "refuse_without_packages", "run"]


def refuse_without_packages() -> None:
    """End with exit code 2 and one line where something that mpt needs is not installed: a bare machine lacks some."""
    missing = [f"'{need}'" for need in needs() if not is_installed(need)]
    if missing:
        where = 'docs/how-to/gpu.md, "A machine without a network"'
        print(
            f"error: not installed here: {' '.join(missing)}; install them with pip, or see {where}",
            file=sys.stderr,
        )
        sys.exit(2)


def needs() -> list[str]:
    """Return what mpt needs, as pip takes it: "pydantic>=2.9,<3"."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return [str(need) for need in project["dependencies"]]


def is_installed(need: str) -> bool:
    """Is any version of a package there?"""
    found = re.match(r"[\w.-]+", need)
    try:
        return found is not None and bool(version(found.group()))
    except PackageNotFoundError:
        return False
