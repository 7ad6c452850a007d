"""Which rank is named as the one that all others wait for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from mpt.engine.loop.rank_times import RankTimes


class Journal:
    def __init__(self) -> None:
        self.progress = SimpleNamespace(step=50)
        self.warnings: list[str] = []

    def warn(self, text: str, kind: str, **fields: Any) -> None:
        self.warnings.append(text)


def named(*windows: list[float], steps: int = 10) -> list[str]:
    journal: Any = Journal()
    ranks = RankTimes(None, journal)  # type: ignore[arg-type]
    for times in windows:
        told = [(one, 0) for one in times]
        ranks.world = cast(
            Any,
            SimpleNamespace(
                size=len(times), take_waited_seconds=lambda: 0.0, collect=lambda _, told=told: told
            ),
        )
        ranks.take(max(times), steps, 0)
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
    assert named(times, times, times) == words


def test_a_rank_that_a_busy_machine_holds_up_for_a_moment_is_not_named() -> None:
    """134 warnings came in 980 steps of two healthy ranks."""
    slow, other, fine = [0.2, 0.1], [0.1, 0.2], [0.1, 0.1]
    assert named(*[slow, slow, fine] * 50) == []
    assert named(*[slow, other] * 50) == []
    assert named(*[slow] * 19, steps=1) == []


def test_a_rank_that_stays_slow_is_named_once_until_it_was_not() -> None:
    slow, fine = [0.2, 0.1], [0.1, 0.1]
    assert named(*[slow] * 100) == ["rank 0 is slow"]
    assert named(*[slow] * 5, fine, *[slow] * 5) == ["rank 0 is slow"] * 2
