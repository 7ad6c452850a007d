"""`mpt validate`: read a configuration as `mpt train` would, and say every mistake at once. Torch is not imported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mpt.config.load import load_config


def run(
    config: Path,
    overrides: Sequence[str] = (),
    patches: Sequence[Path] = (),
    allow: Sequence[str] = (),
    quiet: bool = False,
) -> None:
    """Check a configuration. Raises ConfigError with one line per mistake."""
    read = load_config(config, overrides, allow=allow, patches=patches)
    if quiet:
        return
    length = f"{read.train.steps} steps" if read.train.steps else f"{read.train.epochs:g} epochs"
    tricks = f", {', '.join(read.memory.tricks)}" if read.memory.tricks else ""
    print(f"{config}: valid: {read.model.name} on {read.dataset.name}, {read.precision.mode}{tricks}, {length}")
