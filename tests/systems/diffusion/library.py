"""diffusers as the other side of tests, which skip with a reason without it."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import pytest

from mpt.systems.diffusion.nn.shared.library import import_package


def diffusers() -> Any:
    """Return the installed package; what it warns of when it is imported is its own."""
    if importlib.util.find_spec("diffusers") is None:
        pytest.skip("diffusers is not installed (pip install 'mpt-trainer[diffusion]')")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_package("diffusers", "test")
