"""Check of pruning: of each group half of the channels is not read, and has small filters; just these must go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mpt.nn.shared.hidden_channels import hidden_channels, narrow, width_of


def outputs(net: nn.Module, given: Sequence[Tensor]) -> Tensor:
    """Return the first output."""
    with torch.no_grad():
        made: Any = net(*given)
    found: Tensor = made[0] if isinstance(made, tuple) else made
    return found


def check_that_what_gives_nothing_goes(net: nn.Module, given: Sequence[Tensor]) -> None:
    """Narrow a network in evaluation mode to half, and compare its output with that before."""
    for hidden in hidden_channels(net):
        half = width_of(hidden.producer) // 2
        makes, reads = (
            int(isinstance(one, nn.ConvTranspose2d)) for one in (hidden.producer, hidden.consumer)
        )
        with torch.no_grad():
            hidden.producer.get_parameter("weight").narrow(makes, half, half).mul_(1e-3)
            hidden.consumer.get_parameter("weight").narrow(1 - reads, half, half).zero_()
    before = outputs(net, given)
    count = sum(parameter.numel() for parameter in net.parameters())
    assert narrow(net, 0.5) > 0
    assert sum(parameter.numel() for parameter in net.parameters()) < count
    torch.testing.assert_close(outputs(net, given), before, rtol=1e-4, atol=1e-5)
