"""State of an optimizer of somebody's own that is not in its weights' dtype: a resume gives it back as it was."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from mpt.engine.state.state import capture, restore
from mpt.seams import Run
from tests.engine import parts
from tests.memory import mechanism

pytestmark = pytest.mark.tier("fast")


class Mixed(Optimizer):
    """Means in float32, codes of one byte and a single number in float64, whatever the weights are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state["mean"] = torch.zeros_like(weight, dtype=torch.float32)
                    state["codes"] = torch.zeros_like(weight, dtype=torch.int8)
                    state["size"] = torch.zeros((), dtype=torch.float64)
                    state["half"] = torch.zeros_like(weight, dtype=torch.bfloat16)
                gradient = weight.grad.float()
                state["mean"].lerp_(gradient, 0.1)
                state["codes"] += gradient.sign().to(torch.int8)
                state["size"] += 1 / 3
                state["half"].lerp_(gradient.bfloat16(), 0.1)
                moved = state["mean"] + 1e-3 * state["codes"] * state["size"] + state["half"]
                weight.sub_(group["lr"] * moved.to(weight.dtype))


def run_of(precision: str, monkeypatch: pytest.MonkeyPatch, **memory: Any) -> Run:
    monkeypatch.setattr(
        "mpt.optim.sgd.build", lambda settings, parameters: Mixed(parameters, {"lr": settings.lr})
    )
    return parts.classifier(precision, memory=memory)


def tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for one in state.values():
            yield from tensors(one)


@pytest.mark.parametrize("precision", ["fp32", "O2", "bf16-pure"])
@pytest.mark.parametrize("memory", [{}, {"cpu_optimizer": True}], ids=["plain", "on the host"])
def test_a_resume_keeps_the_dtypes_of_an_optimizer_s_state(
    precision: str, memory: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(precision, monkeypatch, **memory)
    mechanism.train(run, [parts.batch(0)])
    again = run_of(precision, monkeypatch, **memory)
    restore(again, copy.deepcopy(capture(run)))
    for one in (run, again):
        mechanism.train(one, [parts.batch(1)])
    before, after = (list(tensors(capture(one)["optimizers"])) for one in (run, again))
    assert {one.dtype for one in before} >= {torch.float32, torch.int8, torch.float64}
    assert [one.dtype for one in after] == [one.dtype for one in before]
    assert all(map(torch.equal, before, after))
    weights = [list(tensors(capture(one)["modules"])) for one in (run, again)]
    assert all(map(torch.equal, *weights))


def test_weights_of_another_dtype_take_the_state_along(monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_of("fp32", monkeypatch)
    mechanism.train(run, [parts.batch(0)])
    again = run_of("bf16-pure", monkeypatch)
    restore(again, copy.deepcopy(capture(run)))
    found = {one.dtype for one in tensors(dict(again.optimizers["net"].state))}
    assert found == {torch.bfloat16}
