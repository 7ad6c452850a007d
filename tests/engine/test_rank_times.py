"""Which rank is named as the one that all others wait for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mpt.engine.rank_times import RankTimes


class Journal:
    def __init__(self) -> None:
        self.progress = SimpleNamespace(step=50)
        self.warnings: list[str] = []

    def warn(self, text: str, kind: str, **fields: Any) -> None:
        self.warnings.append(text)


def named(times: list[float]) -> list[str]:
    world: Any = SimpleNamespace(
        size=len(times), take_waited_seconds=lambda: 0.0, collect=lambda own: [(one, 0) for one in times]
    )
    journal: Any = Journal()
    RankTimes(world, journal).take(max(times), 10, 0)
    return [text.partition(":")[0] for text in journal.warnings]


@pytest.mark.parametrize(
    ("times", "words"),
    [
        ([0.1, 0.1, 0.1, 0.4], ["rank 3 is slow"]),
        ([0.2, 0.1], ["rank 0 is slow"]),
        ([0.11, 0.1], []),
        ([0.0075, 0.0001], []),  # milliseconds that a busy machine takes
    ],
)
def test_a_rank_is_named_where_its_steps_are_longer_by_half_and_by_more_than_noise(
    times: list[float], words: list[str]
) -> None:
    assert named(times) == words
