"""Where a network computes, which is not where each of its weights is: some may wait on the host."""

from __future__ import annotations

import torch
from torch import nn


def compute_device(network: nn.Module) -> torch.device:
    """Return the device on which a network computes: that of its first weight, or the one to which this travels.

    `memory.stream_weights` keeps `weights_travel_to` beside the layers whose weights wait on the host.
    """
    for module in network.modules():
        destination = getattr(module, "weights_travel_to", None)
        if destination is not None:
            assert isinstance(destination, torch.device)
            return destination
        for parameter in module.parameters(recurse=False):
            return parameter.device
    return torch.device("cpu")
