"""Tests run as on a machine without a GPU wherever they run: what they expect was measured on a CPU."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs, from the processes that tests start too, unless tests are chosen for needing one: `pytest -m gpu`."""
    if "gpu" not in config.getoption("markexpr"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
