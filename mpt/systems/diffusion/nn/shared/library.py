"""The package diffusers, imported on request."""

from __future__ import annotations

from typing import Any

from mpt.errors import ConfigError


def import_diffusers(reader: str) -> Any:
    """Return the package diffusers. Raises ConfigError if it is not installed."""
    from mpt import vision_ops

    # transformers imports it, and fails if its binary does not fit torch
    vision_ops.import_torchvision()
    try:
        import diffusers
    except ImportError as error:
        raise ConfigError(
            f"{reader}: diffusers is not installed; `pip install 'mpt-trainer[diffusion]'` adds it"
        ) from error
    return diffusers
