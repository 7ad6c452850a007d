"""Moving averages of the weights (`train.ema`): twins of networks that follow the training and are evaluated.

A twin is a module of the task, `NAME_ema`, saved and loaded as any other. While the task evaluates, the task's own
references to a network lead to its twin, so that a task trains and evaluates by the same attribute and knows nothing of
averages. Twins stay float32 if the networks are half: with a decay of 0.999 an average would not move in half.

Decays: TensorFlow's `ExponentialMovingAverage` with `num_updates`, (1 + step) / (10 + step) at first; Ultralytics'
exponential ramp (`ramp_steps`); a half-life in images, at first a share of those seen (Karras et al. 2019). An average
that a file of weights gave has no such rise: it would be replaced by the first steps' weights.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mpt.config.schema import MovingAverage
from mpt.errors import ConfigError
from mpt.parallel.local import local
from mpt.seams import Run, Task

SUFFIX = "_ema"


def add_averages(task: Task, settings: MovingAverage | None) -> dict[str, nn.Module]:
    """Give a built task a twin of each network that is to be averaged; return them by the network's name."""
    if settings is None:
        return {}
    names = task.averaged or trained_modules(task)
    twins = {name: make_twin(task.modules[name]) for name in names}
    if not twins:
        raise ConfigError("train.ema: this task has no network by itself to average; leave it out")
    task.modules = {**task.modules, **{f"{name}{SUFFIX}": twin for name, twin in twins.items()}}
    return twins


@torch.no_grad()
def fill_averages(averages: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> list[str]:
    """Copy averages that a file of weights had (`gen_ema.layer.weight`) into the twins, if their shapes agree.

    Return the names of those that it had whole.
    """
    whole = []
    for name, twin in averages.items():
        is_whole = True
        for key, value in twin.state_dict(keep_vars=True).items():
            given = tensors.get(f"{name}{SUFFIX}.{key}")
            if given is not None and given.shape == value.shape:
                value.copy_(given)
            else:
                is_whole = False
        if is_whole:
            whole.append(name)
    return whole


def trained_modules(task: Task) -> list[str]:
    """Return the names of the task's modules that are trained, or are part of a trained one."""
    trained = {parameter for module in task.trainable.values() for parameter in module.parameters()}
    return [
        name
        for name, module in task.modules.items()
        if not trained.isdisjoint(module.parameters()) and trained.issuperset(module.parameters())
    ]


def make_twin(module: nn.Module) -> nn.Module:
    """Return a frozen copy in evaluation mode, to hold an average."""
    # A deep copy of a fake tensor takes a copy of its fake mode along, which nothing else can then be mixed with.
    copies: dict[int, Tensor] = {id(buffer): buffer.clone() for buffer in module.buffers()}
    # bytes of a packed weight are never trained, so both have the same
    for one in module.parameters():
        copies[id(one)] = (
            nn.Parameter(one.detach().clone(), requires_grad=False)
            if one.is_floating_point()
            else one
        )
    return copy.deepcopy(module, {**copies}).eval()


def evaluated_module(task: Task, name: str) -> nn.Module:
    """Return a module's average if there is one, else the module: the network that is evaluated and exported."""
    return task.modules.get(f"{name}{SUFFIX}", task.modules[name])


def follow_step(run: Run, step: int) -> None:
    """Let the task and the averages follow a finished step, counted from 0.

    Ranks agree on the task's counters before and after it acts on it.
    """
    several = run.world.size > 1
    if several:
        agree_on_notes(run)
    run.task.after_step(step, step * run.config.train.batch_size)
    if several:
        agree_on_notes(run)
    if run.averages:
        follow_averages(run, step)


def agree_on_notes(run: Run) -> None:
    """Give all ranks the mean of the task's counters over samples: running means, controllers."""
    state = run.task.state_dict().values()
    run.world.average(
        [value for value in state if isinstance(value, Tensor) and value.is_floating_point()]
    )


def follow_averages(run: Run, step: int) -> None:
    """Move the averages a step towards the networks."""
    settings = run.config.train.ema
    assert settings is not None
    for name, twin in run.averages.items():
        decay = decay_at(
            settings, step, run.config.train.batch_size, rises=name not in run.given_averages
        )
        follow(twin, run.task.modules[name], decay, settings.buffers == "average")


def decay_at(settings: MovingAverage, step: int, batch_size: int, rises: bool = True) -> float:
    """Return the share of an average that a step, counted from 0, leaves; without `rises` it is the last from the start
    on.
    """
    if settings.half_life_kimg is not None:
        half_life = settings.half_life_kimg * 1000
        if settings.rampup is not None and rises:
            half_life = min(half_life, step * batch_size * settings.rampup)
        return float(0.5 ** (batch_size / max(half_life, 1e-8)))
    assert settings.decay is not None
    if not rises or settings.ramp_steps == 0:
        return settings.decay
    if settings.ramp_steps is not None:
        return settings.decay * (1 - math.exp(-(step + 1) / settings.ramp_steps))
    return min(settings.decay, (1 + step) / (10 + step))


@torch.no_grad()
def follow(
    twin: nn.Module, module: nn.Module, decay: float, averages_buffers: bool = False
) -> None:
    """Move the twin's parameters a step of 1 - decay towards the module's, without waiting for the device.

    Buffers are copied; with `averages_buffers`, those of floating numbers move too.
    """
    ours: list[Tensor] = [p.detach() for p in twin.parameters() if p.is_floating_point()]
    theirs: list[Tensor] = [p.detach() for p in module.parameters() if p.is_floating_point()]
    for mine, buffer in zip(twin.buffers(), module.buffers(), strict=True):
        if averages_buffers and mine.is_floating_point():
            ours.append(mine)
            theirs.append(buffer)
        else:
            mine.copy_(buffer)
    ours, theirs = [local(mine) for mine in ours], [local(other) for other in theirs]
    theirs = [other.to(mine.dtype) for mine, other in zip(ours, theirs, strict=True)]
    # weights that travel wait on the host, as twins do
    for device in dict.fromkeys(mine.device for mine in ours):
        here = [place for place, mine in enumerate(ours) if mine.device == device]
        torch._foreach_lerp_(
            [ours[place] for place in here], [theirs[place] for place in here], 1.0 - decay
        )


@contextlib.contextmanager
def averages_in_place(run: Run) -> Iterator[None]:
    """Let the task's references to averaged networks lead to their averages inside the block.

    They are found among the task's attributes, and in the dicts, lists and tuples that are its attributes.
    """
    if not run.averages:
        yield
        return
    task = run.task
    twins = {run.task.modules[name]: twin for name, twin in run.averages.items()}
    before = {}
    for name, value in vars(task).items():
        if exchanged(value, twins) is not value:
            before[name] = value
    for name, value in before.items():
        setattr(task, name, exchanged(value, twins))
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(task, name, value)


def exchanged(value: Any, twins: Mapping[nn.Module, nn.Module]) -> Any:
    """Return a network's twin, or a container with twins in place of networks; anything else as it is."""
    if isinstance(value, nn.Module):
        return twins.get(value, value)
    if type(value) is dict:
        members = {key: exchanged(item, twins) for key, item in value.items()}
        return members if any(members[key] is not value[key] for key in value) else value
    if type(value) in (list, tuple):
        items = type(value)(exchanged(item, twins) for item in value)
        return (
            items if any(new is not old for new, old in zip(items, value, strict=True)) else value
        )
    return value
