"""Sizes of pictures as they are written on the command line."""

from __future__ import annotations

import re

from mpt.errors import ConfigError

SIZE = re.compile(r"(\d+)(?:x(\d+))?")


def read_size(text: str) -> tuple[int, int]:
    """Return the width and height of "512" or "832x1216". Raises ConfigError for anything else."""
    match = SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"--size: found {text!r}; write a side or WIDTHxHEIGHT, such as 512 or 832x1216"
        )
    return int(match[1]), int(match[2] or match[1])
