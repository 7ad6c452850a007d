"""Which of a few traces of one step is planned, with traces that are made up."""

from __future__ import annotations

import pytest

from mpt.planner.own.values import attempts
from mpt.planner.own.values.attempts import Answers, Attempt, as_its_data_need
from mpt.planner.trace.trace import Storage, Trace

pytestmark = pytest.mark.tier("fast")
MIB = 2**20


def made(name: str, size: int, answers: Answers, **asked: bool) -> Attempt[object]:
    trace = Trace([Storage(size * MIB, "activations", "", "")], [0, ~0])
    found = type("Run", (), {"name": name})()
    return Attempt(found, trace, answers, **asked)


def planned(bound: int, of_draws: dict[int, int]) -> tuple[str, list[str]]:
    """Return the chosen trace and its notes, of one with a peak at its bounds and others for each draw."""

    def attempt(answers: Answers) -> Attempt[object]:
        if answers.trusts_data:
            size = of_draws[answers.seed]
            return made(f"draw {answers.seed}", size, answers, follows_data=True)
        return made("bounds", bound, answers, is_bounded=True)

    chosen = as_its_data_need(attempt)
    return chosen.found.name, chosen.notes  # type: ignore[attr-defined]


def test_bounds_that_are_near_the_largest_draw_are_planned() -> None:
    """HuBERT leaves layers out at random: 2,916 to 3,080 MiB in four draws, 3,188 with all of its layers."""
    name, notes = planned(3188, {0: 2916, 1: 3080, 2: 2950, 3: 2960})
    assert name == "bounds"
    assert notes == [
        "its memory depends on numbers that it draws: 2,916 MiB to 3,080 MiB of tensors in 4 draws. "
        "Planned is a step with each size as large as it can be"
    ]


def test_bounds_far_above_every_draw_are_not() -> None:
    name, notes = planned(4000, {0: 2916, 1: 3080, 2: 2950, 3: 2960})
    assert name == "draw 1"
    assert notes[0].endswith("The largest is planned; another draw may need more")
    assert "the tensors would need 4,000 MiB" in notes[1]


def test_batches_of_several_forms_that_were_loaded_once_are_noted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Texts are padded to the longest of a batch, and a slow step is traced with one order of them."""
    monkeypatch.setattr(attempts, "DRAW_PATIENCE", -1.0)

    def attempt(answers: Answers) -> Attempt[object]:
        return made("first", 100, answers, batches_differ=True, reads_draws=True)

    [note] = as_its_data_need(attempt).notes
    assert "several forms, and there was no time" in note
