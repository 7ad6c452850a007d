"""Steps of which a value says how often a loop goes round are planned with all of their values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mpt.planner.client.session import Session
from mpt.planner.device.fake_mode import LeanFakeMode
from mpt.planner.own.values import computed_values
from mpt.planner.own.values.attempts import (
    AS_BOUNDS,
    COMPUTING,
    SEEDS,
    Answers,
    Attempt,
    as_its_data_need,
)
from mpt.planner.own.values.value_loops import EndlessLoop, lines_of_loops
from mpt.planner.own.values.without_values import without_values
from mpt.planner.trace.trace import Trace
from scripts.plans.live_bytes import live_bytes
from tests.planner.own import looping_steps
from tests.planner.own.own_plans import plan_of

STEPS = Path(looping_steps.__file__)
STATE = 4 * looping_steps.ROWS * looping_steps.WIDTH


def test_live_bytes_of_a_loop_on_a_cpu_are_those_of_real_tensors() -> None:
    calls = [
        ({"where": str(STEPS), "function": name}, {})
        for name in ("solved", "left", "balanced", "rejecting")
    ]
    for planned, measured in live_bytes(*calls):
        assert planned == measured > 6 * STATE


def test_a_plan_says_which_loop_goes_round_as_its_values_say(session: Session) -> None:
    [note] = (one for one in plan_of(session, STEPS, "solved", {}).notes if "goes round" in one)
    assert note.startswith(
        "all values were computed on the host, since one says how often the loop"
    )
    assert "looping_steps.py:27 goes round" in note


def test_a_loop_of_known_length_that_reads_values_comes_to_its_end(session: Session) -> None:
    notes = plan_of(session, STEPS, "counting", {}).notes
    assert any("since one says how often the loop" in note for note in notes)


def attempt_of(asked: list[Answers]) -> Callable[[Answers], Attempt[str]]:
    def attempt(answers: Answers) -> Attempt[str]:
        asked.append(answers)
        if answers == AS_BOUNDS:
            raise EndlessLoop("train.py:1")
        if answers.computes_for:
            raise computed_values.TooMuch("cannot plan")
        return Attempt("found", Trace(), answers)

    return attempt


def test_a_loop_without_end_is_waited_for_if_its_values_take_too_long() -> None:
    asked: list[Answers] = []
    assert as_its_data_need(attempt_of(asked)).found == "found"
    assert asked == [AS_BOUNDS, COMPUTING, Answers(waits=True)]


def test_values_that_take_too_long_or_too_much_are_not_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with LeanFakeMode(allow_non_fake_inputs=True), without_values(COMPUTING) as asked:
        with asked.building():
            assert torch.rand(100).add(2).sum().item() > 200
        monkeypatch.setattr(computed_values, "MOST_HELD_BYTES", 0)
        with pytest.raises(computed_values.TooMuch, match="memory"), asked.building():
            torch.rand(100)
    hurried = replace(COMPUTING, computes_for=1e-9)
    with (
        LeanFakeMode(allow_non_fake_inputs=True),
        without_values(hurried) as asked,
        pytest.raises(computed_values.TooMuch, match="0 s to compute"),
        asked.building(),
    ):
        torch.rand(100)


def test_a_size_that_follows_from_a_networks_results_is_computed() -> None:
    """Of all that the plan draws, the largest counts."""
    source = {"where": str(STEPS), "function": "folded"}
    seeds = (0, *SEEDS)
    *found, as_array = live_bytes(
        *((source, {"seed": seed}) for seed in seeds), (source, {"as_array": True})
    )
    assert found[0][0] == as_array[0] == max(measured for _, measured in found)


def test_lines_of_loops_are_their_conditions_and_of_what_leaves_them_but_for_training(
    tmp_path: Path,
) -> None:
    file = tmp_path / "loops.py"
    file.write_text(
        "while a():\n    b()\n    with c:\n        if d():\n            break\n    if e():\n        f()\n"
        "for g in h:\n    if i():\n        break\nwhile (j() and\n       k()):\n    pass\n"
        "for m in n:\n    m.backward()\n    if o():\n        break\n"
    )
    assert lines_of_loops(str(file)) == {1, 4, 9, 11, 12}
    assert lines_of_loops(str(tmp_path / "none.py")) == frozenset()
