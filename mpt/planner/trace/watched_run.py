"""The owners of a traced run's tensors, and the moment of the update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from mpt.planner.trace.recorder import Recorder
from mpt.run.process.storage_trace import tensors_in
from mpt.seams import MemoryTrick, Phase, Run, TakesUpdates

MASTERS = "(master weights)"
"""The owner of parameters that an optimizer updates and no network has."""


@contextmanager
def watch_run(run: Run, recorder: Recorder) -> Iterator[None]:
    """Mark tensors' owners as they appear, and note moments; undone on leaving."""
    recorder.mark_modules(run.task.modules)
    owners = owners_of(run.task.modules)
    masters = {
        p
        for optimizer in run.optimizers.values()
        for group in optimizer.param_groups
        for p in group["params"]
    }
    recorder.mark((p for p in masters if id(p) not in owners), "parameters", MASTERS)
    for trick in run.tricks:
        if isinstance(trick, TakesUpdates):
            trick.private_pool = recorder.in_graphs
    moments = Moments(recorder, masters)
    run.tricks.append(moments)
    try:
        with watch_updates(recorder, trainable_weights(run), owners):
            yield
    finally:
        run.tricks.remove(moments)


def owners_of(modules: Mapping[str, nn.Module]) -> dict[int, str]:
    """Return the path of the module that has each parameter, by the parameter's id."""
    return {
        id(parameter): f"{key}.{name}".rpartition(".")[0]
        # of two networks that share one, the first counts
        for key, module in reversed([*modules.items()])
        for name, parameter in module.named_parameters()
    }


@contextmanager
def watch_updates(
    recorder: Recorder, weights: Iterable[nn.Parameter], owners: Mapping[int, str]
) -> Iterator[None]:
    """Mark the gradients of weights and the state of all optimizers as they appear, inside the block."""

    marked = WeakIdKeyDictionary()
    """Optimizer -> the parameters whose state is marked. Another may be made in the place of one that is gone."""

    def mark(parameter: Any, state: Mapping[Any, Any], known: WeakIdKeyDictionary) -> None:
        if isinstance(parameter, Tensor):  # and not a name, by which some optimizers keep more
            known[parameter] = True
        recorder.mark(
            tensors_in(state),
            "optimizer state",
            owners.get(id(parameter), MASTERS),
        )

    def after_optimizer(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer not in marked:
            marked[optimizer] = WeakIdKeyDictionary()
        known = marked[optimizer]
        # An optimizer that steps during backward has one parameter at a time in its groups.
        for parameter in (one for group in optimizer.param_groups for one in group["params"]):
            if parameter in optimizer.state:
                mark(parameter, optimizer.state[parameter], known)
        if len(known) < len(optimizer.state):
            for parameter, state in optimizer.state.items():
                if not isinstance(parameter, Tensor) or parameter not in known:
                    mark(parameter, state, known)

    with ExitStack() as stack:
        for weight in weights:
            stack.callback(watch_gradient(weight, owners.get(id(weight), ""), recorder))
        stack.callback(register_optimizer_step_post_hook(after_optimizer).remove)
        yield


class Moments(MemoryTrick):
    """Reports the moment of an update to the recorder."""

    name = "moments"

    def __init__(self, recorder: Recorder, updated: Iterable[nn.Parameter]) -> None:
        self.recorder, self.updated = recorder, list(updated)

    @contextmanager
    def backward(self, phase: Phase) -> Iterator[None]:
        """Note a backward, and the forward that follows it."""
        self._enter(phase, "backward")
        yield
        self._enter(phase, "forward")

    @contextmanager
    def step(self, phase: Phase) -> Iterator[None]:
        """Note the optimizer's step, and its gradients."""
        self._enter(phase, "step")
        self.recorder.mark((p.grad for p in self.updated if p.grad is not None), "gradients")
        yield

    def _enter(self, phase: Phase, moment: str) -> None:
        self.recorder.enter_moment(self.recorder.trace.spans[-1].step, phase.name, moment)


def trainable_weights(run: Run) -> list[nn.Parameter]:
    """Return the parameters that are trained."""
    return [
        p for module in run.task.trainable.values() for p in module.parameters() if p.requires_grad
    ]


def watch_gradient(parameter: nn.Parameter, owner: str, recorder: Recorder) -> Callable[[], None]:
    """Mark a parameter's gradient as soon as it exists; return a function that undoes that."""

    def mark(tensor: Tensor) -> None:
        if tensor.grad is not None:
            recorder.mark([tensor.grad], "gradients", owner)

    handle: Any = parameter.register_post_accumulate_grad_hook(mark)  # type: ignore[no-untyped-call]
    hooks: Any = parameter._post_accumulate_grad_hooks
    # before a trick that releases the gradient in its own hook
    hooks.move_to_end(handle.id, last=False)
    return lambda: handle.remove()
