"""A loss that is not finite is seen, whichever of an update it is. Copies are made at once, as there is no device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mpt.engine.step import loss_watch
from mpt.engine.step.loss_watch import LossWatch, all_finite

pytestmark = pytest.mark.tier("fast")
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("losses", "expected"),
    [((1.0, 2.0), True), ((NAN, 1.0), False), ((1.0, NAN), False), ((INF, -INF), False)],
)
def test_a_loss_that_is_not_finite_is_seen_wherever_it_comes(
    losses: tuple[float, ...], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    replaced = SimpleNamespace(
        empty=lambda *size, pin_memory: torch.empty(*size), Event=lambda device: event
    )
    monkeypatch.setattr(loss_watch, "torch", replaced)
    watch = LossWatch(torch.device("cpu"))
    for loss in losses:
        watch.look(torch.tensor(loss))
    assert all_finite({}, watch) is expected
