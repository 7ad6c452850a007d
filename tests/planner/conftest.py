"""One planning process for all tests of this folder: the fake device can be registered only once and for good."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mpt.planner.client.session import Session
from mpt.planner.facts.calibration import Calibration
from mpt.planner.facts.gpus import find_gpu


@pytest.fixture(scope="package")
def session() -> Iterator[Session]:
    """Plans for an RTX 3060, with models from `tests` allowed."""
    with Session(find_gpu("rtx3060"), Calibration(), ["tests"]) as opened:
        yield opened
