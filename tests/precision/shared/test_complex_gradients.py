"""Complex weights, as of layers in the frequency domain, under a loss scale: GradScaler's kernel takes real numbers."""

import pytest
import torch
from torch import nn

from mpt.precision.shared.scaler import LossScaler


@pytest.mark.parametrize(("part", "is_bad"), [(0.5, False), (float("inf"), True)])
def test_complex_gradients_are_unscaled_and_looked_at(part: float, is_bad: bool) -> None:
    scaler = LossScaler(1024.0)
    weights = [nn.Parameter(torch.zeros(2, dtype=torch.cfloat)), nn.Parameter(torch.zeros(2))]
    weights[0].grad = torch.tensor([1024 + 2048j, complex(0, part)])
    weights[1].grad = torch.tensor([512.0, 0.0])
    assert scaler.unscale(weights) == is_bad
    assert weights[0].grad[0] == 1 + 2j
    assert weights[1].grad[0] == 0.5
