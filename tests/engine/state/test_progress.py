"""What is counted along the way: the best figure in either direction, and what goes back with a rollback."""

from __future__ import annotations

import math

import pytest
import torch

from mpt.engine.state.early_stopping import Waiting
from mpt.engine.state.progress import Progress, due, next_due

pytestmark = pytest.mark.tier("fast")


@pytest.mark.parametrize(("higher", "best", "step"), [(True, 3.0, 1), (False, 1.0, 2)])
def test_the_best_figure_is_the_highest_or_the_lowest_and_the_first_of_equals(
    higher: bool, best: float, step: int
) -> None:
    progress = Progress()
    for progress.step, figure in enumerate((2.0, 3.0, 1.0, 1.0, 3.0, math.nan, 2.0)):
        progress.note_figure(figure, higher)
    assert (progress.best, progress.best_step) == (best, step)


def test_what_early_stopping_has_seen_goes_back_with_a_rollback() -> None:
    progress = Progress(step=4, waiting=Waiting(0.5, 2, 1))
    record = progress.to_record()
    progress.waiting = Waiting(0.5, 2, 3)
    progress.restore(record, torch.device("cpu"))
    assert progress.waiting == Waiting(best=0.5, best_step=2, evaluations=1)


def test_side_jobs_are_due_at_multiples_and_never_at_a_period_of_zero() -> None:
    assert [step for step in range(1, 9) if due(step, 3)] == [3, 6]
    assert not any(due(step, 0) for step in range(9))
    assert [next_due(step, (3, 0, 4), 7) for step in (0, 3, 4, 6)] == [3, 4, 6, 8]
