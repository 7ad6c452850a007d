"""What the memory tests measure: bytes kept for backward, arithmetic done, gradients alive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from mpt.engine.step.step import update
from mpt.precision.shared.module_state import module_state
from mpt.seams import Batch, Run


def saved_bytes(forward: Callable[[], Any], parameters: list[nn.Parameter]) -> int:
    """Return the bytes of distinct storages, parameters aside, that a forward keeps for its backward.

    They are counted when they reach the outermost hooks, so what is recomputed or offloaded does not count.
    """
    own = {p.untyped_storage()._cdata for p in parameters}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage()._cdata
        if key not in own:
            kept[key] = tensor.detach()
        # a graph that holds its own output and is never walked would not be freed
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
    total = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    del result
    return total


def saved_bytes_of_losses(run: Run, batch: Batch) -> int:
    """Return what the first phase's losses keep."""
    phase = run.phases[0]
    parameters = [p for module in run.task.modules.values() for p in module.parameters()]

    def forward() -> list[Any]:
        with run.precision.forward():
            return list(phase.losses(run.task.draw(batch, phase)))

    return saved_bytes(forward, parameters)


def step_flops(run: Run, batch: Batch) -> int:
    """Return the arithmetic of one update of every phase."""
    with FlopCounterMode(display=False) as counter:
        for phase in run.phases:
            update(run, phase, batch)
    return counter.get_total_flops()


def train(run: Run, batches: list[Batch]) -> None:
    """Perform a step of every phase on each batch, from a fixed state of the random generator."""
    torch.manual_seed(7)
    for batch in batches:
        for phase in run.phases:
            update(run, phase, batch)


def state(run: Run) -> dict[str, Tensor]:
    """Return copies of all weights and buffers."""
    return {
        f"{name}.{key}": value.detach().clone()
        for name, module in run.task.modules.items()
        for key, value in module_state(run.precision, module).items()
    }


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Return whether two states have the same names and bit-equal values."""
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)
