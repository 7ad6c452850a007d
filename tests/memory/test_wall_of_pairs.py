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
    wrong = [
        f"{brick}: {text}"
        for brick, text in found.items()
        if text and not text.startswith("refused: ")
    ]
    assert not wrong, "\n".join(wrong)
    refused = [
        f"{brick}: {text}"
        for brick, text in found.items()
        if text and not re.search(wall.REFUSALS, text)
    ]
    assert not refused, "\n".join(refused)
    return Counter(trick for brick, text in found.items() if not text for trick in brick.tricks)


def test_a_slice_of_the_wall_stands() -> None:
    stood = build(list(wall.quick()))
    assert not stood.keys() ^ wall.TRICKS.keys() ^ {"compile"}, stood


def test_channels_last_weights_with_a_side_of_one_travel_as_they_are() -> None:
    # Kernels of a CPU's float16 know the layout by the strides, of sides of one too.
    assert wall.lay(wall.Brick("gan", "amp", "adam", ("stream_weights", "channels_last"))) == ""


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # by torch's compiler
@pytest.mark.parametrize("mode", wall.MODES)
def test_the_whole_wall_of_a_mode_stands(mode: str) -> None:
    stood = build(list(wall.whole([mode])))
    assert {trick for trick in wall.TRICKS if not stood[trick]} == wall.NEVER.get(mode, set()), (
        stood
    )
