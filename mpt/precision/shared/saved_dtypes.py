"""Optimizer state that is loaded in the dtypes in which it was saved.

Torch casts the state of floating parameters to their dtype: codes of one byte would become numbers of the weights'
dtype, and bfloat16 means of float16 weights, or float32 ones of an optimizer of somebody's own, would lose bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer, saved: Mapping[str, Any]) -> Iterator[tuple[int, Tensor]]:
    """Yield the number of each parameter in a state dict, and the parameter."""
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    yield from zip(
        numbers, (one for group in optimizer.param_groups for one in group["params"]), strict=True
    )


def put_back_dtypes(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Give an optimizer that has loaded a state dict the tensors as they were saved, on the parameters' devices."""
    for number, parameter in parameters_of(optimizer, saved):
        for name, value in saved["state"].get(number, {}).items():
            if isinstance(value, Tensor):
                optimizer.state[parameter][name] = value.detach().clone().to(parameter.device)


def weights_of_other_dtypes(optimizer: Optimizer) -> list[str]:
    """Return the dtypes of the weights of an optimizer that keeps state in others; [] if it keeps all in the weights'.

    With them saved, `keep_saved_dtypes` can tell a resume from one with weights of another dtype.
    """
    optimizer = getattr(optimizer, "inner", optimizer)  # of one that works in host memory
    differs = any(
        isinstance(value, Tensor) and value.dtype != parameter.dtype and name != "step"
        for parameter, entries in optimizer.state.items()
        for name, value in entries.items()
    )
    return dtypes_of_weights(optimizer) if differs else []


def dtypes_of_weights(optimizer: Optimizer) -> list[str]:
    weights = (weight for group in optimizer.param_groups for weight in group["params"])
    return sorted({str(weight.dtype).removeprefix("torch.") for weight in weights})


def keep_saved_dtypes(
    optimizer: Optimizer, saved: Mapping[str, Any], weights: Sequence[str]
) -> None:
    """Give an optimizer that has loaded a state dict its tensors in the dtypes in which they were saved.

    Not if the weights, then of the dtypes `weights`, have others by now, nor if it loads in a way of its own.
    """
    optimizer = getattr(optimizer, "inner", optimizer)
    loads_plainly = type(optimizer).load_state_dict is Optimizer.load_state_dict
    hooks = optimizer._optimizer_load_state_dict_pre_hooks
    if not loads_plainly or hooks or list(weights) != dtypes_of_weights(optimizer):
        return
    for number, parameter in parameters_of(optimizer, saved):
        entries = optimizer.state[parameter]
        for name, value in saved["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.dtype != entries[name].dtype:
                entries[name] = value.detach().clone().to(entries[name].device)


def hold_state_in_bfloat16(optimizer: Optimizer) -> None:
    """Let every later `load_state_dict` of an optimizer keep codes, and hold the means of half weights in bfloat16.

    Single numbers, such as the means of a weight without dimensions, stay in the dtype in which they were saved.
    """
    loading: list[Mapping[str, Any]] = []

    def before(_: Optimizer, saved: dict[str, Any]) -> None:
        loading.append(saved)

    def after(loaded: Optimizer) -> None:
        for number, parameter in parameters_of(loaded, saved := loading.pop()):
            if parameter.dtype == torch.float32:
                continue
            entries = loaded.state[parameter]
            for name, value in saved["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.dim():
                    dtype = torch.bfloat16 if value.is_floating_point() else value.dtype
                    entries[name] = value.detach().to(parameter.device, dtype, copy=True)
                elif isinstance(value, Tensor):  # of one number: kept as the optimizer made it
                    entries[name] = value.detach().to(entries[name].device, copy=True)

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(after)
