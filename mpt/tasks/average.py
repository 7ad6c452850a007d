"""Averages of networks (EMA): twins that follow without synchronising."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn


def make_twin(module: nn.Module) -> nn.Module:
    """Return a frozen copy in evaluation mode, to hold an exponential moving average."""
    # A deep copy of a fake tensor takes a copy of its fake mode along, which nothing else can then be mixed with.
    copies: dict[int, Tensor] = {id(buffer): buffer.clone() for buffer in module.buffers()}
    copies |= {id(p): nn.Parameter(p.detach().clone(), requires_grad=False) for p in module.parameters()}
    return copy.deepcopy(module, {**copies}).eval()


@torch.no_grad()
def follow(twin: nn.Module, module: nn.Module, decay: float) -> None:
    """Move the twin's floating state a step of 1 - decay towards the module's; copy the rest (counters)."""
    ours, theirs = [p.detach() for p in twin.parameters()], [p.detach() for p in module.parameters()]
    if ours and ours[0].dtype != theirs[0].dtype:
        theirs = [p.to(o.dtype) for p, o in zip(theirs, ours, strict=True)]
    for device in dict.fromkeys(p.device for p in ours):  # weights that travel wait on the host, and their twins do too
        here = [place for place, mine in enumerate(ours) if mine.device == device]
        torch._foreach_lerp_([ours[place] for place in here], [theirs[place] for place in here], 1.0 - decay)
    for mine, buffer in zip(twin.buffers(), module.buffers(), strict=True):
        mine.copy_(buffer)
