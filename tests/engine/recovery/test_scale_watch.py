"""What is said of a loss scale in trouble, and when."""

from __future__ import annotations

import pytest

from mpt.engine.recovery.scale_watch import FALL_WINDOW, FALLS, LOW_STEPS, ScaleWatch

pytestmark = pytest.mark.tier("fast")


def said(watch: ScaleWatch, scales: list[float]) -> list[tuple[int, str]]:
    """Return the warnings of a history of scales, each with its step."""
    found = []
    for step, (before, scale) in enumerate(zip([scales[0], *scales], scales, strict=False)):
        warning = watch.observe(step, scale, scale < before)
        if warning:
            found.append((step, warning))
    return found


def test_a_scale_that_fell_and_stays_low_is_told_once_with_what_helps_against_overflow() -> None:
    low = [4.0] * 100
    ((step, warning),) = said(ScaleWatch("gen"), [16.0, *low])
    assert step == LOW_STEPS
    assert warning.startswith(
        "gen: the loss scale has stayed below 16 for 20 steps (now 4); try a lower optimizer.lr"
    )


def test_a_scale_that_was_set_low_is_not_blamed_on_overflow() -> None:
    ((_, warning),) = said(ScaleWatch("gen"), [8.0] * 100)
    assert "raise precision.init_scale" in warning
    assert "overflows" not in warning


def test_after_recovering_it_is_told_again() -> None:
    low = [4.0] * LOW_STEPS
    assert len(said(ScaleWatch("net"), [32.0, *low, 32.0, *low])) == 2


def test_a_scale_that_falls_again_and_again_is_told_once() -> None:
    falling = [2.0**power for power in range(40, 40 - 2 * FALLS, -1)]
    ((step, warning),) = said(ScaleWatch("net"), falling)
    assert step == FALLS
    assert f"fell {FALLS} times within {FALLS} steps" in warning
    apart = [2.0 ** (40 - step // FALL_WINDOW) for step in range(FALLS * FALL_WINDOW)]
    assert said(ScaleWatch("net"), apart) == []


def test_six_falls_within_just_the_window_are_told_and_over_a_step_more_are_not() -> None:
    for last, count in ((200, 1), (201, 0)):
        watch = ScaleWatch("net")
        warnings = [watch.observe(step, 1024.0, True) for step in (0, 40, 80, 120, 160, last)]
        assert warnings[:5] == [None] * 5
        assert len([one for one in warnings if one]) == count
