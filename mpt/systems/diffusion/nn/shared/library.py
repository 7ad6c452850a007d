"""Packages of `mpt-trainer[diffusion]`, imported on request, and the JSON files of models in their layout."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from mpt.errors import ConfigError
from mpt.foreign.files import read_json

LARGEST_CONFIG_BYTES = 1 << 20


def import_package(name: str, reader: str) -> Any:
    """Return diffusers or transformers. Raises ConfigError, for its reader, if it is not installed."""
    from mpt import vision_ops

    # transformers imports it, and fails if its binary does not fit torch
    vision_ops.import_torchvision()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{reader}: {name} is not installed; `pip install 'mpt-trainer[diffusion]'` adds it"
        ) from error


def read_mapping(path: Path, reader: str, advice: str = "") -> dict[str, Any]:
    """Return a JSON file's mapping. Raises ConfigError, for its reader, for another file."""
    try:
        found = read_json(path, LARGEST_CONFIG_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{reader}: {path} is missing, or cannot be read as JSON: {error}{advice}"
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{reader}: {path} holds a {type(found).__name__}, not a mapping{advice}")
    return found
