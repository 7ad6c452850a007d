"""Step each parameter as soon as its gradient is whole, and release the gradient at once.

Only a few gradients then live at a time instead of one per parameter. The optimizer stays one object with one state:
its groups are narrowed to a single parameter for each small step, so checkpoints and learning rates are those of any
run. The result is bit-equal.

A phase with several losses steps during the last one's backward, when gradients are whole; how many there are is
counted once on fake tensors. Whatever needs all gradients before the first step is refused: dynamic loss scaling,
clipping by the total norm, master weights, and micro-batches, whose sums are complete only at the end. Out of memory,
an update in which no parameter has stepped yet can be repeated (`memory.on_oom: adapt`), a later one cannot.

Source: Lv et al., "Full parameter fine-tuning for large language models with limited resources" (LOMO), 2024; the
PyTorch tutorial "How to save memory by fusing the optimizer step into the backward pass".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from mpt.config.options import Options
from mpt.errors import ConfigError
from mpt.memory.recomputing.dry_run import count_losses
from mpt.seams import MemoryTrick, Phase, Run

CONFLICTS = {
    "micro_batch": "a gradient is whole only after the last micro-batch; use recompute to hold fewer activations",
    "cpu_optimizer": "that one moves all gradients to the host at once; use one of the two",
    "low_bit_optimizer": "8-bit optimizers keep state per parameter group; use one of the two",
    "release_grads_after": "gradients are released one by one already; leave that one out",
}
RELIEVES = "gradients"
PROPOSALS = (True,)
RANK = 1


class Settings(Options):
    """Nothing to set."""


class OptimizerInBackward(MemoryTrick):
    """Hooks on the parameters, active during the last backward of their phase's update."""

    name = "optimizer_in_backward"
    gradients = "consumed"

    def attach(self, run: Run) -> None:
        """Refuse settings that need all gradients at once; else hang a hook on every trained parameter."""
        refuse_incompatible(run)
        self.losses = count_losses(run, "memory.optimizer_in_backward")
        self.done = dict.fromkeys(self.losses, 0)
        self.active: Phase | None = None
        self.settings_before: dict[str, list[dict[str, Any]]] = {}
        """Values of the groups before the update: an optimizer's counters there count once per update."""
        self.owners: dict[str, dict[int, dict[str, Any]]] = {}
        """Phase -> the group of each parameter of its optimizer, in the update that is under way."""
        self.precision = run.precision
        for optimizer in dict.fromkeys(run.optimizers.values()):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.register_post_accumulate_grad_hook(self.step_one)

    @contextlib.contextmanager
    def backward(self, phase: Phase) -> Iterator[None]:
        """During the backward of the phase's last loss, let parameters step as they go."""
        self.settings_before.pop(phase.name, None)
        self.owners.pop(phase.name, None)
        self.done[phase.name] += 1
        if self.done[phase.name] == self.losses[phase.name]:
            self.active, self.done[phase.name] = phase, 0
        try:
            yield
        finally:
            self.active = None

    @contextlib.contextmanager
    def step(self, phase: Phase) -> Iterator[None]:
        """Let the phase's own step, on parameters that have a gradient left, be the one that counts."""
        groups = phase.optimizer.param_groups
        for group, before in zip(groups, self.settings_before.pop(phase.name, [])):
            group.update(before)
        everyone = [group["params"] for group in groups]
        for group in groups:
            group["params"] = [
                parameter for parameter in group["params"] if parameter.grad is not None
            ]
        try:
            yield
        finally:
            for group, parameters in zip(groups, everyone):
                group["params"] = parameters

    def abandon(self, phase: Phase) -> None:
        """Count the phase's losses from the start again."""
        self.done[phase.name], self.active = 0, None

    def step_one(self, parameter: nn.Parameter) -> None:
        """Step one parameter and release its gradient."""
        phase = self.active
        if phase is None:
            return
        optimizer = phase.optimizer
        if phase.name not in self.owners:
            self.owners[phase.name] = {
                id(one): group for group in optimizer.param_groups for one in group["params"]
            }
        owner = self.owners[phase.name].get(id(parameter))
        if owner is None:
            return
        everyone = [group["params"] for group in optimizer.param_groups]
        scaler = self.precision.scalers.get(phase.name)
        if scaler is not None:
            scaler.unscale([parameter])
        if phase.name not in self.settings_before:
            self.settings_before[phase.name] = [
                settings_of(group) for group in optimizer.param_groups
            ]
        for group, before in zip(optimizer.param_groups, self.settings_before[phase.name]):
            group.update(before)
        narrow(optimizer, parameter, owner)
        try:
            self.precision.optimize(phase)
        finally:
            for group, parameters in zip(optimizer.param_groups, everyone):
                group["params"] = parameters
        parameter.grad = None


def settings_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a parameter group without its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def narrow(optimizer: Optimizer, parameter: nn.Parameter, owner: dict[str, Any]) -> None:
    """Leave one parameter in the optimizer's groups, in its own."""
    for group in optimizer.param_groups:
        group["params"] = [parameter] if group is owner else []


def refuse_incompatible(run: Run) -> None:
    """Raise ConfigError with the reason and the way out."""
    dynamic = [name for name, scaler in run.precision.scalers.items() if scaler.dynamic]
    clipped = [name for name, norm in run.clip_norms.items() if norm is not None]
    refused = "memory.optimizer_in_backward: "
    if run.world.size > 1:
        raise ConfigError(
            f"{refused}it steps before gradients are summed over the processes. Leave it out; memory.cpu_optimizer "
            "keeps the optimizer's state off the card too"
        )
    if dynamic:
        raise ConfigError(
            f"{refused}{run.precision.name} scales its losses dynamically, and whether a step overflowed is known only "
            "when all gradients are there. Use precision=bf16, or a static scale such as precision.loss_scale=128"
        )
    if clipped:
        raise ConfigError(
            f"{refused}optimizer.clip_grad_norm needs the norm of all gradients before the first step. "
            "Leave one of the two out"
        )
    if run.precision.masters:
        raise ConfigError(
            f"{refused}{run.precision.name} copies gradients to float32 masters after backward. "
            "Use precision=amp with dtype bfloat16, or bf16-pure"
        )


def build(settings: Settings) -> OptimizerInBackward:
    """Build the trick."""
    return OptimizerInBackward()
