"""The traced steps of somebody's own training, with their moments and the origins of tensors reported to the recorder.

Tensors carry no labels: networks are those that were made while the factory ran, a backward pass is a call
of `torch.autograd.backward` or `grad`, an optimizer's step is reported by torch's own hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mpt.planner.own.execution.created import Created
from mpt.planner.own.execution.source import Made
from mpt.planner.own.proposals.changes import (
    Changes,
    ForwardAutocast,
    apply_to_modules,
    apply_to_optimizers,
)
from mpt.planner.own.text.names import COMPILED, named_networks
from mpt.planner.own.text.passes import Passes
from mpt.planner.step.run_fake import STEPS
from mpt.planner.trace.recorder import Recorder
from mpt.planner.trace.watched_run import owners_of, watch_updates
from mpt.run.process.storage_trace import tensors_in

T = TypeVar("T")
NO_MODULE = "(parameters of no module)"
"""The owner of parameters that an optimizer updates and no network has."""


def perform(
    made: Made,
    created: Created,
    recorder: Recorder,
    changes: Changes,
    on_step: Callable[[int], None],
    passes: Passes | None = None,
) -> dict[str, nn.Module]:
    """Perform the traced steps of a training that was built; return its networks by name."""
    modules = name_modules(created, made.named)
    recorder.rename(modules)
    recorder.mark_modules(modules)
    recorder.mark(tensors_in(made.batch), "batch")
    apply_to_modules(changes, modules)
    apply_to_optimizers(changes, created.optimizers, modules.values())
    autocast = ForwardAutocast(changes)
    kept: Any = None
    with watch_step(recorder, modules, autocast, passes or Passes()):
        for step in range(STEPS):
            on_step(step)
            recorder.enter_moment(step, "", "forward")
            with autocast.around_step():
                kept = call(made.step)  # until the next is there, as a script keeps its last loss
            mark_afresh(recorder, modules, created)
        recorder.enter_moment(STEPS - 1, "", "after the step")
    del kept
    return modules


def mark_afresh(recorder: Recorder, modules: Mapping[str, nn.Module], created: Created) -> None:
    """Mark what a step may have made: weights of lazy modules and copies, gradients of weights that it froze no more,
    and states that it loaded."""
    now = name_modules(created, modules)
    recorder.mark_modules(now)
    weights = [one for module in now.values() for one in module.parameters()]
    recorder.mark((one.grad for one in weights if one.grad is not None), "gradients")
    for optimizer in created.optimizers:
        recorder.mark(tensors_in(dict(optimizer.state)), "optimizer state")


def call(function: Callable[[], T]) -> T:
    """Call a function of the user's. Raises RuntimeError, from its line, if that would end the program."""
    try:
        return function()
    except SystemExit as stop:
        reason = "it ends the program (values that it reads are taken as 0)"
        raise RuntimeError(reason).with_traceback(stop.__traceback__) from None


def name_modules(created: Created, named: Mapping[str, Any]) -> dict[str, nn.Module]:
    """Return the networks that are part of no other one and have weights, by name.

    Names are those of the factory's tuple, or of the variables that the step sees; else the networks' classes.
    """
    roots = named_networks(named)
    inside = {
        id(child) for module in created.modules for child in module.modules() if child is not module
    }
    inside |= {id(module) for root in roots.values() for module in root.modules()}
    for module in created.modules:
        has_weights = any(True for _ in module.parameters())
        if id(module) in inside or not has_weights or COMPILED in module._modules:
            continue
        stem = key = type(module).__name__
        number = 1
        while key in roots:
            number += 1
            key = f"{stem}{number}"
        roots[key] = module
    return roots


def updated_weights(created: Created) -> set[int]:
    """Return the identities of the weights that an optimizer updates: not those of moving averages and other copies."""
    groups = (group for optimizer in created.optimizers for group in optimizer.param_groups)
    return {id(parameter) for group in groups for parameter in group["params"]}


@contextmanager
def watch_step(
    recorder: Recorder,
    modules: Mapping[str, nn.Module],
    autocast: ForwardAutocast,
    passes: Passes | None = None,
) -> Iterator[None]:
    """Report tensors' origins and the moment of the step to the recorder, inside the block."""
    passes = passes or Passes()
    owners = owners_of(modules)
    weights = [
        one for module in modules.values() for one in module.parameters() if one.requires_grad
    ]

    def before_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        enter(recorder, "step")
        passes.step(optimizer)
        updated = [one for group in optimizer.param_groups for one in group["params"]]
        for one in updated:  # its memory may be other than before (`p.data = old`)
            owner = owners.setdefault(id(one), NO_MODULE)
            recorder.mark([one], "parameters", owner)
        recorder.mark((one.grad for one in updated if one.grad is not None), "gradients")

    def after_optimizer(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        enter(recorder, "forward")

    with ExitStack() as stack:
        stack.enter_context(watch_updates(recorder, weights, owners))
        stack.callback(register_optimizer_step_pre_hook(before_optimizer).remove)
        stack.callback(register_optimizer_step_post_hook(after_optimizer).remove)
        for name in ("backward", "grad"):
            noted = passes.backward if name == "backward" else lambda: None
            around = _as_backward(getattr(torch.autograd, name), recorder, autocast, noted)
            stack.enter_context(mock.patch.object(torch.autograd, name, around))
        yield


def enter(recorder: Recorder, moment: str) -> None:
    """Note that the same step is in another moment."""
    recorder.enter_moment(recorder.trace.spans[-1].step, "", moment)


def _as_backward(
    function: Callable[..., Any],
    recorder: Recorder,
    autocast: ForwardAutocast,
    noted: Callable[[], None],
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        noted()
        enter(recorder, "backward")
        with autocast.outside():
            result = function(*args, **kwargs)
        enter(recorder, "forward")
        return result

    return run
