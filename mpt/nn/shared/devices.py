"""The device that a network computes on, which not all of its weights need be on: some may wait on the host.

`memory.stream_weights` gives layers with such weights two attributes: `travelling_names`, the weights' names, and
`weights_travel_to`, the device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


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
