"""Every mode, trick and optimizer together trains every weight, and equals the plain run where that is claimed."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from mpt.memory import offload_activations
from tests.memory import wall


@pytest.fixture(autouse=True)
def _as_in_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    """Know the wall's network alone, and treat the CPU as a device to leave."""
    monkeypatch.setenv("MPT_PARTS", "")
    monkeypatch.setattr(offload_activations, "POINTLESS_ON", {})
    wall.plain.cache_clear()


def build(bricks: list[wall.Brick]) -> Counter[str]:
    """Lay bricks; fail with all that is wrong, and return how many of each trick stood."""
    found = {brick: wall.lay(brick) for brick in bricks}
    wrong = [f"{brick}: {text}" for brick, text in found.items() if text and not text.startswith("refused: ")]
    assert not wrong, "\n".join(wrong)
    refused = [f"{brick}: {text}" for brick, text in found.items() if text and not re.search(wall.REFUSALS, text)]
    assert not refused, "\n".join(refused)
    return Counter(trick for brick, text in found.items() if not text for trick in brick.tricks)


def test_a_slice_of_the_wall_stands() -> None:
    stood = build(list(wall.quick()))
    assert not stood.keys() ^ wall.TRICKS.keys() ^ {"compile"}, stood


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_wall_stands() -> None:
    stood = build(list(wall.whole()))
    assert min(stood.values()) > 50
