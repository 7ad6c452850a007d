"""What `mpt import` makes of a file: settings with their meaning, and comments on the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mpt.commands.import_config import Command, run
from mpt.config.load import load_config


def check_translation(
    source: Path, settings: dict[str, Any], lines: list[str], model: str | None
) -> None:
    """Import a file and look for settings of ours by path, and for lines of the written text."""
    output = source.parent / "out.yaml"
    run(Command(source, output=str(output), model=model))
    written = output.read_text()
    read = yaml.safe_load(written)
    for path, value in settings.items():
        section, _, key = path.partition(".")
        assert (read[section][key] if key else read[section]) == value, path
    for line in lines:
        assert line in written
    load_config(output)
