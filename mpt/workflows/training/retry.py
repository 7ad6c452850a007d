"""The proposal after a training ran out of memory: the command, or the Python, that continues."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpt.config.schema import Config


@dataclass(frozen=True)
class Retry:
    """How a training is started again under a patch. `patches` are those that it was started with."""

    write: Callable[[Path, Config, Path, bool], str]
    """From the run's folder, its configuration, the patch's file, and whether there is a checkpoint to continue
    from."""
    patches: Sequence[Path] = ()


def write_command(run: Path, config: Config, patch: Path, resumes: bool) -> str:
    """Return the command that trains from the run's own record."""
    words = ["mpt", "train", str(run / "config.yaml"), "--runs", str(run.parent)]
    words += [word for package in config.granted for word in ("--allow", package)]
    return shlex.join([*words, "--with", str(patch), *(["--resume", str(run)] if resumes else [])])


def write_python(run: Path, config: Config, patch: Path, resumes: bool) -> str:
    """Return the same as a call."""
    allowed = f", allow={list(config.granted)}" if config.granted else ""
    loaded = f"mpt.load({str(run / 'config.yaml')!r}, patches=[{str(patch)!r}]{allowed})"
    return f"mpt.train({loaded}, runs={str(run.parent)!r}{f', resume={str(run)!r}' if resumes else ''})"


BY_COMMAND, IN_PYTHON = Retry(write_command), Retry(write_python)
