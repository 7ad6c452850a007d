"""What an update that ran out of memory leaves behind: nothing."""

from __future__ import annotations

from typing import Any

import torch

from mpt.engine.recovery.out_of_memory import undo_update
from mpt.engine.state.state import capture_random
from mpt.seams import MemoryTrick, Phase
from mpt.seams.undo import notes_of
from tests.engine import parts


class Holding(MemoryTrick):
    """A trick that has begun something."""

    name = "holding"

    def __init__(self) -> None:
        self.abandoned: list[str] = []

    def abandon(self, phase: Phase) -> None:
        """Note that it is to forget what it has begun."""
        self.abandoned.append(phase.name)


def test_an_update_that_is_undone_leaves_no_gradient_statistic_random_number_or_note() -> None:
    run, trick = parts.classifier(), Holding()
    task: Any = run.task
    task.seen = {"samples": [1, 2]}
    phase = run.phases[0]
    run.tricks.append(trick)
    run.buffers.remember()
    before = [buffer.clone() for buffer in phase.module.buffers()]
    random_state, notes = capture_random(run.device), notes_of(task)
    expected = torch.rand(3)

    task.seen["samples"].append(3)
    task.begun = True
    (loss,) = phase.losses(parts.batch())
    loss.value.backward()
    undo_update(run, phase, random_state, notes)
    assert torch.equal(torch.rand(3), expected)
    assert task.seen == {"samples": [1, 2]}
    assert not hasattr(task, "begun")
    assert trick.abandoned == ["net"]
    assert all(map(torch.equal, phase.module.buffers(), before))
    assert all(parameter.grad is None for parameter in phase.module.parameters())
