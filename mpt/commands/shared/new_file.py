"""Files that commands write for a user to edit: never over one that is there."""

from __future__ import annotations

from pathlib import Path

from mpt.errors import ConfigError, InputOutputError


def write_new(path: Path, text: str, way_out: str = "name another file") -> None:
    """Write a file that is not there yet. Raises ConfigError for one that is, InputOutputError if it cannot be."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path}: is there already; {way_out}") from None
    except OSError as error:
        raise InputOutputError(f"{path}: cannot be written: {error.strerror}") from error
