"""The device of a run: which one, and how networks get there."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mpt import accelerator
from mpt.errors import ConfigError
from mpt.nn.shared.devices import waiting_places
from mpt.seams import Task


def choose_device(wanted: str) -> torch.device:
    """Return the device for `auto`, `cpu`, `cuda`, `xpu` or `cuda:1`; ConfigError when it is not there.

    A card that is named by number becomes the current one.
    """
    kind = accelerator.available()
    if wanted == "auto":
        return torch.device("cpu" if kind is None or kind in accelerator.CHOSEN_BY_NAME else kind)
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ConfigError(f"device: {wanted!r} is no device; use auto, cpu or cuda") from error
    if device.type == "cpu":
        return device
    if device.type != kind:
        found = "CUDA device" if device.type == "cuda" else f"{device.type} device"
        instead = f"torch's accelerator here is {kind}" if kind else "use --device cpu, or see `mpt doctor`"
        raise ConfigError(f"device: {device.type} is asked for, but torch sees no {found}; {instead}")
    if (device.index or 0) >= (count := torch.accelerator.device_count()):
        shown = "CUDA" if kind == "cuda" else kind
        raise ConfigError(f"device: found {wanted!r}; torch sees {count} {shown} device(s), from {kind}:0")
    accelerator.select(device)
    return device


def place(module: nn.Module, device: torch.device, fake: bool) -> nn.Module:
    """Move a module to its device, but for weights that wait on the host (`HoldsWeights.host`).

    Fake modules get empty tensors of the same strides; shared weights stay shared.
    """
    waiting = {(layer, name): layer._parameters[name] for layer, name in waiting_places(module)}
    if not fake:
        for layer, name in waiting:
            layer._parameters[name] = None
        module.to(device)
        for (layer, name), parameter in waiting.items():
            layer._parameters[name] = parameter
        return module
    placed: dict[Tensor, Tensor] = {}
    on_host = {id(parameter) for parameter in waiting.values()}

    def twin(tensor: Tensor) -> Tensor:
        if tensor not in placed:
            where = "cpu" if id(tensor) in on_host else device
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=where)
            placed[tensor] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        return placed[tensor]

    for child in module.modules():
        for store in (child._parameters, child._buffers):
            for name, tensor in store.items():
                if tensor is not None:
                    store[name] = twin(tensor)  # type: ignore[assignment]
        for name, value in vars(child).items():
            if type(value) is Tensor and value.is_meta:  # plain attributes stay on the builder's device: the CPU
                vars(child)[name] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return module


def any_waits(task: Task) -> bool:
    """Return whether weights of trained networks wait on the host."""
    return any(True for root in task.trainable.values() for _ in waiting_places(root))
