"""Parts of the trained networks that stay as they were loaded: `train.freeze`.

A frozen parameter gets no gradient and no optimizer state, and tensors that only its gradient would need are not kept,
which the planner sees as any step does. BatchNorm layers that are frozen normalise by their running statistics and
leave them as they are, or by the batch's (`train.frozen_norm`).
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from mpt.errors import ConfigError
from mpt.optim.shared.groups import check_globs
from mpt.seams import Task


def freeze(task: Task, globs: Sequence[str], norm: str) -> str | None:
    """Freeze the parameters of the trained networks that a glob matches; return a line that says how many.

    Call before precision modes and memory tricks see the task. Raises ConfigError for a glob that matches nothing and
    for a network of which nothing is left to train.
    """
    if not globs:
        return None
    check_globs(dict(task.trainable), globs, "train.freeze")
    frozen, total = 0, 0
    for name, network in task.trainable.items():
        for key, parameter in network.named_parameters():
            total += parameter.numel()
            if matches(f"{name}.{key}", globs):
                parameter.requires_grad_(False)
                frozen += parameter.numel()
        if not any(parameter.requires_grad for parameter in network.parameters()):
            raise ConfigError(
                f"train.freeze: nothing of {name!r} is left to train; leave a part of it out"
            )
    layers = [
        layer
        for name, network in task.trainable.items()
        for layer in frozen_norms(name, network, globs)
    ]
    if norm == "eval":
        for layer in layers:
            # nothing puts networks in training mode again; evaluations put modes back as they were
            layer.eval()
    said = (
        f"; {len(layers)} BatchNorm layers keep their statistics"
        if layers and norm == "eval"
        else ""
    )
    return f"train.freeze: {frozen:,} of {total:,} parameters stay as they are{said}"


def matches(name: str, globs: Sequence[str]) -> bool:
    """Return whether a dotted name matches any glob."""
    return any(fnmatchcase(name, glob) for glob in globs)


def frozen_norms(name: str, network: nn.Module, globs: Sequence[str]) -> list[nn.Module]:
    """Return the BatchNorm layers of a network whose weights, or statistics if they have no weights, are frozen."""
    return [
        module
        for key, module in network.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        and module.running_mean is not None
        and matches(f"{name}.{key}.{'weight' if module.affine else 'running_mean'}", globs)
    ]
