"""Two updates written down and compared: the same each time, or the difference in words."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mpt.memory.capturing.tape import Tape, first_change, first_difference, plain_values

pytestmark = pytest.mark.tier("fast")
CPU, META = torch.device("cpu"), torch.device("meta")


def difference(update: Callable[[int], object], device: torch.device = CPU) -> str:
    """Return how two updates differ, which are told their number."""
    tapes = [Tape(device), Tape(device)]
    for number, tape in enumerate(tapes):
        with tape:
            update(number)
    return first_difference(*tapes)


def test_an_update_that_draws_and_steps_is_the_same_each_time() -> None:
    weight, state = torch.ones(4, requires_grad=True), torch.zeros(4)

    def update(number: int) -> None:
        weight.grad = None
        (torch.sigmoid(weight * torch.rand(4)) * 3).sum().backward()
        state.lerp_(weight.grad, 0.1)
        with torch.no_grad():
            weight.sub_(state * 0.01)

    assert difference(update) == ""


def test_a_number_that_changes_a_branch_and_another_length_are_named() -> None:
    weight = torch.ones(4)
    assert difference(lambda n: weight.mul_(0.5 + n)) == (
        "aten.mul_.Tensor is given 0.5 in one update and 1.5 in the next"
    )
    assert (
        "one update computes aten.exp_.default where the next one computes aten.sin_"
        in difference(lambda n: weight.sin_() if n else weight.exp_())
    )
    assert (
        difference(lambda n: [weight.neg_() for _ in range(n)])
        == "one update has 0 operators, the next one 1"
    )


def test_a_tensor_that_is_replaced_is_named_but_not_where_its_form_alone_counts() -> None:
    held: dict[str, Tensor] = {"balance": torch.ones(4)}
    weight = torch.ones(4)

    def update(number: int) -> None:
        weight.mul_(held["balance"])
        held["balance"] = torch.zeros_like(held["balance"])

    assert (
        difference(update)
        == "aten.mul_.Tensor reads a tensor that another one replaces from update to update"
    )

    def reset(number: int) -> None:
        held["balance"] = torch.zeros_like(held["balance"])

    assert difference(reset) == ""


def test_what_the_host_reads_or_copies_is_named_on_another_device() -> None:
    place = torch.zeros(3, device=META)
    assert (
        difference(lambda n: place.copy_(torch.ones(3)), META) == "aten::copy_ copies from the host"
    )
    tape = Tape(META)
    with tape, pytest.raises(RuntimeError):
        place.nonzero().item()
    assert tape.why_not == "aten::nonzero reads the device on the host"


def test_numbers_that_python_changes_are_named_and_nan_is_no_change() -> None:
    before = dict(
        plain_values(
            "task", {"seen": 1, "worst": float("nan"), "parts": {"a": 2}, "tensor": torch.ones(1)}
        )
    )
    after = dict(
        plain_values(
            "task", {"seen": 1, "worst": float("nan"), "parts": {"a": 3}, "tensor": torch.zeros(1)}
        )
    )
    assert first_change(before, before | {"task.worst": float("nan")}) == ""
    assert first_change(before, after).startswith("task.parts.a changes from 2 to 3 in an update")
