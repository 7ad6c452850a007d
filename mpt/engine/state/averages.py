"""The weights that a run is evaluated with, if its optimizer trains others (`mpt.optim.shared.averaging`).

`averaged` exchanges them in place and puts the training weights back as they were, to the bit: they are copied, one
copy of the weights, because an average that is computed back and forth would lose bits at each evaluation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mpt.optim.shared.averaging import AveragingOptimizer
from mpt.precision.shared.module_state import module_state
from mpt.seams import Run

Exchanged = dict[nn.Parameter, Tensor]
"""Parameter of an optimizer -> its training weights, while it holds an average."""


@contextlib.contextmanager
def averaged(run: Run) -> Iterator[Exchanged]:
    """Inside the block the networks have the weights to evaluate; yield the training weights that wait meanwhile."""
    waiting: Exchanged = {}
    with torch.no_grad():
        for optimizer in run.optimizers.values():
            if not isinstance(optimizer, AveragingOptimizer):
                continue
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    average = optimizer.average(parameter, group)
                    if average is not None:
                        waiting[parameter] = parameter.detach().clone(
                            memory_format=torch.preserve_format
                        )
                        parameter.copy_(average)
        publish(run, waiting)
    try:
        yield waiting
    finally:
        with torch.no_grad():
            for parameter, weights in waiting.items():
                parameter.copy_(weights)
            publish(run, waiting)


def publish(run: Run, changed: Exchanged) -> None:
    """Refresh the half weights of changed masters."""
    for half, master in run.precision.masters.items():
        if master in changed:
            half.copy_(master)


def modules_to_save(run: Run) -> tuple[dict[str, dict[str, Tensor]], dict[str, dict[str, Tensor]]]:
    """Return the modules' state with the weights to evaluate, and, of those that differ, the training weights."""
    with averaged(run) as waiting:
        modules = {
            name: dict(module_state(run.precision, module))
            for name, module in run.task.modules.items()
        }
        training: dict[str, dict[str, Tensor]] = {}
        for name, module in run.task.modules.items() if waiting else ():
            for key, value in module.state_dict(keep_vars=True).items():
                weights = waiting.get(run.precision.masters.get(value, value))
                if weights is not None:
                    # else the restored values would be seen in it
                    modules[name][key] = modules[name][key].clone()
                    training.setdefault(name, {})[key] = weights
    return modules, training


def describe(run: Run) -> Iterator[str]:
    """Yield notes for the user of a run whose optimizer averages."""
    names = [name for name, one in run.optimizers.items() if isinstance(one, AveragingOptimizer)]
    if not names:
        return
    trained = [run.task.trainable[name] for name in names]
    if any(
        isinstance(m, _BatchNorm) and m.track_running_stats
        for net in trained
        for m in net.modules()
    ):
        yield (
            f"optimizer {run.config.optimizer.name} evaluates averaged weights, but BatchNorm's running statistics are "
            "those of the training weights: evaluation may suffer. Use a model without BatchNorm, or optimizer=adamw"
        )
    layouts = [set(net.state_dict()) for net in trained]
    twins = [
        name
        for name, module in run.task.modules.items()
        if all(module is not net for net in run.task.trainable.values())
        and set(module.state_dict()) in layouts
    ]
    if twins:
        yield (
            f"optimizer {run.config.optimizer.name}: {', '.join(twins)} is a moving average of the training weights, "
            "and what uses it does not see the optimizer's own. Set train.ema=null to evaluate that"
        )
