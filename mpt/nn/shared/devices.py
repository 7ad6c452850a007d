"""The device that a network computes on, and how it gets there: not all of its weights need, some may wait on the host.

`memory.stream_weights` gives layers with such weights two attributes: `travelling_names`, the weights' names, and
`weights_travel_to`, the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


def waiting_places(network: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Yield the layers of a network with weights that wait on the host, and the names of those in them."""
    for layer in network.modules():
        for name in getattr(layer, "travelling_names", ()):
            yield layer, name


def compute_device(network: nn.Module) -> torch.device:
    """Return the device on which a network computes: that of its first weight, or the one to which this travels."""
    for module in network.modules():
        destination = getattr(module, "weights_travel_to", None)
        if destination is not None:
            assert isinstance(destination, torch.device)
            return destination
        for parameter in module.parameters(recurse=False):
            return parameter.device
    return torch.device("cpu")


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
            empty = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=where
            )
            placed[tensor] = (
                nn.Parameter(empty, tensor.requires_grad)
                if isinstance(tensor, nn.Parameter)
                else empty
            )
        return placed[tensor]

    for child in module.modules():
        for store in (child._parameters, child._buffers):
            for name, tensor in store.items():
                if tensor is not None:
                    store[name] = twin(tensor)  # type: ignore[assignment]
        for name, value in vars(child).items():
            # plain attributes stay on the builder's device: the CPU
            if type(value) is Tensor and value.is_meta:
                vars(child)[name] = torch.empty_strided(
                    value.shape, value.stride(), dtype=value.dtype, device="cpu"
                )
    return module


def any_waits(networks: Iterable[nn.Module]) -> bool:
    """Return whether weights of some networks wait on the host."""
    return any(True for network in networks for _ in waiting_places(network))
