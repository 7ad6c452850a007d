"""The settings that a run had, step by step, when a resume changed them.

`config.yaml` has the run's present settings. When a resume at step N changes one, the former settings are kept as
`config-until-0000000N.yaml`, so that the run's folder alone determines every step's settings. A resume from an
earlier checkpoint drops the history of the steps that it takes back. Never imports torch.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mpt.foreign.files import LARGEST_RECORD_BYTES, read_bytes
from mpt.run.process.files import failures_explained, write_atomically
from mpt.run.records.layout import RunDirectory

EARLIER = re.compile(r"config-until-(\d{8,18})\.yaml", re.ASCII)


def earlier_settings(run: RunDirectory) -> dict[int, Path]:
    """Return the last step that each superseded settings file held for -> the file, in ascending order."""
    found = {
        int(match.group(1)): run.path / name
        for name in os.listdir(run.path)
        if (match := EARLIER.fullmatch(name))
    }
    return dict(sorted(found.items()))


def settings_at(run: RunDirectory, step: int) -> Path:
    """Return the file with the settings that step `step` was trained with. It may be missing or damaged."""
    return next(
        (path for until, path in earlier_settings(run).items() if until >= step), run.config_path
    )


def replace_settings(run: RunDirectory, step: int, text: str) -> None:
    """Make `text` the settings from `step` on, keeping those that held until then.

    Call only while holding the run's lock. Raises InputOutputError.
    """
    before = settings_at(run, step)
    kept = run.path / f"config-until-{step:08d}.yaml"
    with failures_explained(kept):
        old = read_bytes(before, LARGEST_RECORD_BYTES) if before.is_file() else b""
        # before the first step nothing held for any
        changes = step > 0 and bool(old) and old != text.encode()
        if changes and before != kept:
            write_atomically(kept, old)
        write_atomically(run.config_path, text)
        for until, path in earlier_settings(run).items():
            if until > step or (until == step and not changes):
                path.unlink()
