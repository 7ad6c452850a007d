"""The device of a run: which one, and how networks get there."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mpt.errors import ConfigError
from mpt.nn.shared.devices import waiting_places
from mpt.seams import Task


def choose_device(wanted: str) -> torch.device:
    """Return the device for `auto`, `cpu`, `cuda` or `cuda:1`; ConfigError when it is not there.

    A GPU that is named by number becomes the current one: what torch does without a device in hand (pinned memory,
    emptying the cache) would open a context on GPU 0 otherwise.
    """
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ConfigError(f"device: {wanted!r} is no device; use auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda") and not (device.type == "mps" and torch.backends.mps.is_available()):
        raise ConfigError(f"device: {wanted!r} is no device that this machine has for mpt; use auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device: cuda is asked for, but torch sees no CUDA device; use --device cpu, or see `mpt doctor`"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device: found {wanted!r}; torch sees {torch.cuda.device_count()} CUDA device(s), from cuda:0"
        )
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def place(module: nn.Module, device: torch.device, fake: bool) -> nn.Module:
    """Move a module to its device, but for weights that wait on the host (`MemoryTrick.host`).

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
            if type(value) is Tensor and value.is_meta:  # plain attributes are where the builder made them: on the CPU
                vars(child)[name] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return module


def any_waits(task: Task) -> bool:
    """Return whether weights of trained networks wait on the host."""
    return any(True for root in task.trainable.values() for _ in waiting_places(root))
