"""The comparison of two runs' states other than tensors."""

from __future__ import annotations

from typing import Any

import torch

from mpt.doctor.partings.run_difference import in_order
from mpt.run.checkpoints.state import pack


def test_the_order_in_which_states_were_made_is_no_difference() -> None:
    def structure(*numbers: int, step: int = 3) -> Any:
        """Return the packed state of an optimizer, its weights in the order in which they first stepped."""
        states = {number: {"step": step, "average": torch.ones(2)} for number in numbers}
        return pack(
            {"state": states, "items": (1, [2.0]), "param_groups": [{"params": [0, 1, 10]}]}
        )[0]

    backward, saved = structure(10, 1, 0), structure(0, 1, 10)
    assert backward != saved
    assert in_order(backward) == in_order(saved)
    assert in_order(backward) != in_order(structure(0, 1, 10, step=4))
    assert in_order(backward) != in_order(structure(0, 1))
    other = pack({"items": [[2, 1], [1, 2]]})[0]
    assert in_order(other) == other != pack({"items": [[1, 2], [2, 1]]})[0]
