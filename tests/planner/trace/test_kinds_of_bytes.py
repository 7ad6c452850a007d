"""What storages of a step are called: what a forward leaves for backward, and what a block leaves that is run again."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mpt.planner.trace.recorder import Recorder

COUNT = 2**12


class Cosine(nn.Module):
    """Its backward needs the doubled input of the cosine."""

    def forward(self, values: Tensor) -> Tensor:
        """Return numbers (n,)."""
        return (values * 2).cos()


def kinds(is_recomputed: bool) -> list[tuple[str, str, str]]:
    """Return moment, operator and kind of what a module made."""
    block, recorder = Cosine(), Recorder("cpu")
    with recorder.recording():
        weight = torch.ones(COUNT, requires_grad=True)
        recorder.enter_moment(0, "phase", "forward")
        made: Tensor = (
            checkpoint(block, weight, use_reentrant=False) if is_recomputed else block(weight)
        )
        loss = made.sum()
        recorder.enter_moment(0, "phase", "backward")
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()
    trace = recorder.trace
    return [
        (
            trace.span_at(number).moment,
            trace.storages[entry].operator,
            trace.storages[entry].category,
        )
        for number, entry in enumerate(trace.events)
        if entry >= 0 and trace.storages[entry].operator in ("aten::mul", "aten::cos")
    ]


def test_what_backward_needs_is_an_activation_in_a_block_that_is_run_again_too() -> None:
    assert ("forward", "aten::mul", "activations") in kinds(False)
    assert ("backward", "aten::mul", "activations") in kinds(True)
    assert ("forward", "aten::mul", "temporaries") in kinds(True)
