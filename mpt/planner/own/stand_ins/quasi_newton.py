"""`torch.optim.LBFGS` on fake tensors: its memory grows from step to step, and each of its decisions reads values.

With zeros for values its own step ends after the first evaluation, as if the training were done. Here it has all the
memory that it ever has: a full history from the first step on. No iteration ends it early, and a line search evaluates
four times, for as long as it may. Order and lives of tensors are those of `torch/optim/lbfgs.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

SEARCHES = 4
"""Evaluations of one line search."""


class QuasiNewton:
    """Takes the steps of a plan's optimizers; `history` is the longest of them, 0 if there is none."""

    def __init__(self) -> None:
        self.history = 0

    @torch.no_grad()
    def step(self, own: Any, closure: Callable[[], Any]) -> Any:
        """Take a step of one optimizer."""
        evaluate = torch.enable_grad()(closure)
        group, state = own.param_groups[0], own.state[own._params[0]]
        self.history = max(self.history, group["history_size"])
        first = evaluate()
        float(first)
        gradient, evaluations = own._gather_flat_grad(), 1
        if "old_dirs" not in state:
            start(state, gradient, group["history_size"])
        direction = state["d"]  # which the state keeps until the end
        for number in range(group["max_iter"]):
            direction, *held = turn(state, direction, gradient, group["lr"])
            if group["line_search_fn"] is not None:
                searches = min(SEARCHES, group["max_eval"] - evaluations)
                gradient = search(own, evaluate, gradient, direction, searches)
                evaluations += searches
                own._add_grad(1.0, direction)
            else:
                own._add_grad(group["lr"], direction)
                if number + 1 < group["max_iter"]:
                    float(evaluate())
                    gradient, evaluations = own._gather_flat_grad(), evaluations + 1
            if evaluations >= group["max_eval"]:
                break
        del held
        state["d"] = direction
        return first


def start(state: dict[str, Any], gradient: Tensor, history: int) -> None:
    """Fill the state as it is after many steps."""
    for name in ("old_dirs", "old_stps"):
        state[name] = [torch.empty_like(gradient) for _ in range(history)]
    for name in ("ro", "al"):
        state[name] = [gradient.new_empty(()) for _ in range(history)]
    state["d"], state["prev_flat_grad"] = (torch.empty_like(gradient) for _ in range(2))


def turn(state: dict[str, Any], direction: Tensor, gradient: Tensor, rate: Any) -> list[Tensor]:
    """Return the next direction and what is alive with it: also a change that is too small to be kept."""
    change, taken = gradient.sub(state["prev_flat_grad"]), direction.mul(rate)
    product, held = change.dot(taken), []
    for name, latest in (("old_dirs", change), ("old_stps", taken), ("ro", 1.0 / product)):
        held.append(state[name].pop(0))
        state[name].append(latest)
    state["H_diag"] = product / change.dot(change)
    past = list(zip(state["old_dirs"], state["old_stps"], state["ro"], strict=True))
    query = gradient.neg()
    for place, (change, taken, weight) in reversed([*enumerate(past)]):
        state["al"][place] = taken.dot(query) * weight
        query.add_(change)
    found = torch.mul(query, state["H_diag"])
    for change, taken, weight in past:
        change.dot(found).mul(weight)
        found.add_(taken)
    state["prev_flat_grad"].copy_(gradient)
    return [found, query, *held]


def search(
    own: Any, evaluate: Callable[[], Any], gradient: Tensor, direction: Tensor, searches: int
) -> Tensor:
    """Search along a direction; return the gradient at the point that is found."""
    weights, seen = own._clone_param(), [gradient.clone()]
    for _ in range(searches):
        own._add_grad(1.0, direction)
        float(evaluate())
        found = own._gather_flat_grad()
        own._set_param(weights)
        seen.append(found.clone())  # ends of the bracket, and what they were before
    return seen[-1]


@contextmanager
def quasi_newton() -> Iterator[QuasiNewton]:
    """Let LBFGS take such steps inside the block."""
    steps = QuasiNewton()

    def step(own: Any, closure: Callable[[], Any]) -> Any:
        return steps.step(own, closure)

    hooked: Any = Optimizer.profile_hook_step(step)
    hooked.hooked = True
    with mock.patch.object(LBFGS, "step", hooked):
        yield steps
