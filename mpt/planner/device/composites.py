"""Operators made of others, which come whole to a mode under `torch.inference_mode`, and after it if they are given
tensors that were made there.

Otherwise autograd takes them apart before a mode sees them. Taken apart by hand they read values, allocate and cost
what their parts do, and attention and recurrent layers take a GPU's route (`mpt.planner.device.routes`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from mpt.planner.device import routes
from mpt.planner.device.fake_device import DEVICE

AUTOCAST = {True: "AutocastPrivateUse1", False: "AutocastCPU"}
"""Whether a tensor is on the card -> autocast's key."""


def parts_of(func: Any, args: Any) -> Callable[..., Any] | None:
    """Return a function that calls an operator's parts in its place; None if it is none of that kind."""
    if not is_composite(func):
        return None
    first = next((one for one in args if isinstance(one, torch.Tensor)), None)
    if not torch.is_inference_mode_enabled() and (first is None or not first.is_inference()):
        return None
    is_on_card = first is not None and first.device.type == DEVICE
    if is_on_card and func in routes.kernels:
        return routes.kernels[func]
    if func.has_kernel_for_dispatch_key(getattr(torch._C.DispatchKey, AUTOCAST[is_on_card])):
        return functools.partial(without_autocast, func.decompose)  # it has cast its arguments
    parts: Callable[..., Any] = func.decompose
    return parts


def without_autocast(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function whose parts autocast leaves alone."""
    with torch._C._DisableAutocast():
        return function(*args, **kwargs)


@functools.cache
def is_composite(func: Any) -> bool:
    """Return whether an operator has no kernel of its own."""
    name = func._schema.name
    return (
        name.startswith("aten::")
        and name not in routes.SPLIT_OPERATORS
        and func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    )
