"""A trained run in half for inference: weights in two bytes, arithmetic under autocast.

Parameters are stored in half; normalisation layers and the modules that `precision.keep_fp32` names keep float32, for
their few weights cost nothing and their ranges do not fit. The forward runs under autocast, which finds the stored
halves already in its dtype (no casts of weights) and still takes the operators that need it to float32. EMA copies
are halved too: here they are read, no longer averaged into.

Whether half is faster is the device's affair, so `choose_half` describes this device's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from mpt.config.checking.precision_names import AUTOCAST
from mpt.config.load import change_precision
from mpt.config.schema import Config
from mpt.engine.building.build import build_run
from mpt.engine.state.state import restore_trained
from mpt.errors import ConfigError
from mpt.inference.trained import Trained
from mpt.nn.shared.named_modules import named_modules
from mpt.precision.shared.choice import DTYPES, cpu_has_fast_bfloat16
from mpt.precision.shared.float32_modules import Float32Module
from mpt.seams import Run
from mpt.seams.trick_kinds import fold

KEPT_FLOAT32 = (Float32Module, _NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
MULTIPLE = 8
"""Tensor cores work on tiles of this many half values; other sizes are padded or go the slow way."""


@dataclass(frozen=True)
class HalfChoice:
    """A half dtype for a device, and a sentence on its treatment there."""

    dtype: str
    statement: str


def choose_half(wanted: str | None, device: torch.device) -> HalfChoice:
    """Choose the half dtype for a device, float16 on GPUs by default. Raises ConfigError for anything that is no half
    dtype."""
    if wanted not in (None, *DTYPES):
        raise ConfigError(
            f"--dtype: found {wanted!r}; allowed with --half are {' and '.join(DTYPES)}."
        )
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        dtype = wanted or "float16"
        needed = (8, 0) if dtype == "bfloat16" else (7, 0)
        name = f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
        if (major, minor) >= needed:
            return HalfChoice(dtype, f"{dtype}: {name} has tensor cores for it.")
        return HalfChoice(
            dtype,
            f"{dtype}: {name} has no tensor cores for it, so memory is saved and time is hardly.",
        )
    if device.type != "cpu":
        return HalfChoice(wanted or "float16", f"{wanted or 'float16'} on {device.type}.")
    fast = cpu_has_fast_bfloat16()
    if wanted == "float16":
        return HalfChoice(
            wanted,
            "float16, as --dtype asks. This CPU has no native float16 arithmetic: the weights are held in float16 and "
            "converted for each operation, which is slower than float32.",
        )
    instead = "bfloat16 is used instead" if wanted is None else "bfloat16, as --dtype asks"
    if fast:
        return HalfChoice(
            "bfloat16",
            f"This CPU has no native float16; {instead}, which it multiplies natively.",
        )
    return HalfChoice(
        "bfloat16",
        f"This CPU has no native half arithmetic; {instead}: the weights are held in two bytes, and each operation "
        "converts them, so memory is saved and time is not.",
    )


def rebuild(trained: Trained, mode: str, dtype: str | None = None, folds: bool = True) -> Run:
    """Build a trained run again in another precision mode, with its weights and its `keep_fp32`.

    Unless `folds` is false, adapters that memory tricks have put into the networks are folded into the weights.
    """
    config = in_dtype(change_precision(trained.config, mode), dtype)
    run = build_run(config, trained.run.device, trained.train_data.spec, trains=False)
    restore_trained(run, trained.loaded.state)
    if folds:
        fold(run.tricks, run.task.modules)
    return run


def in_dtype(config: Config, dtype: str | None) -> Config:
    """Return the config with another `precision.dtype`."""
    if dtype is None:
        return config
    settings = config.precision.settings.model_copy(update={"dtype": dtype})
    return replace(config, precision=replace(config.precision, settings=settings))


def rebuild_half(trained: Trained, dtype: str) -> Run:
    """Build a trained run again with its weights in half, for inference."""
    run = rebuild(trained, AUTOCAST, dtype)
    for module in run.task.modules.values():
        halve(module, DTYPES[dtype])
    return run


def halve(module: nn.Module, dtype: torch.dtype) -> None:
    """Store the float32 parameters of a module and its children in half, except in norms and `Float32Module`s."""
    if isinstance(module, KEPT_FLOAT32):
        return
    for parameter in module._parameters.values():
        if parameter is not None and parameter.dtype == torch.float32:
            # the parameter stays the same object, so tied weights stay tied
            parameter.data = parameter.data.to(dtype)
    for child in module.children():
        halve(child, dtype)


@contextmanager
def watch_calls(
    modules: Mapping[str, nn.Module],
) -> Iterator[dict[str, tuple[nn.Module, tuple[Any, ...], Any]]]:
    """Collect which networks are called within the block: name -> module, first arguments, first result.

    Networks that inference does not call (a discriminator, weights behind an EMA copy) have no place in an exported
    file.
    """
    called: dict[str, tuple[nn.Module, tuple[Any, ...], Any]] = {}

    def remember(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        return lambda module, inputs, output: (
            called.setdefault(name, (module, inputs, output)) and None
        )

    handles = [module.register_forward_hook(remember(name)) for name, module in networks(modules)]
    try:
        yield called
    finally:
        for handle in handles:
            handle.remove()


def networks(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the networks by name; the members of a ModuleDict or ModuleList, which has no forward, by theirs."""
    for name, module in modules.items():
        if isinstance(module, nn.ModuleDict | nn.ModuleList):
            yield from networks({f"{name}.{key}": child for key, child in module.named_children()})
        else:
            yield name, module


def awkward_dimensions(modules: Mapping[str, nn.Module]) -> list[str]:
    """Name the layers with a dimension that is no multiple of 8, for which tensor cores pad or idle."""
    found = []
    for name, module in named_modules(modules):
        sizes: dict[str, int] = {}
        if isinstance(module, nn.Linear):
            sizes = {"in": module.in_features, "out": module.out_features}
        elif isinstance(module, nn.modules.conv._ConvNd):
            sizes = {"in": module.in_channels // module.groups, "out": module.out_channels}
        odd = [f"{side} {size}" for side, size in sizes.items() if size % MULTIPLE]
        if odd:
            found.append(f"{name} ({', '.join(odd)})")
    return found
