"""Operators that take another route on a GPU than on an unknown device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mpt.planner.device.routes import composite_rms_norm


def saved_by(function: Any, *given: Any) -> list[tuple[torch.dtype, torch.Size]]:
    """Return dtype and shape of what autograd keeps of a call, each storage once."""
    seen: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        seen[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function(*given)
    return sorted(((tensor.dtype, tensor.shape) for tensor in seen.values()), key=str)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(("half", "half_weight"), [(False, False), (True, False), (True, True)])
def test_the_composite_rms_norm_keeps_what_torchs_own_keeps_on_a_cpu(
    half: bool, half_weight: bool
) -> None:
    tensor = torch.randn(
        3, 5, 8, dtype=torch.bfloat16 if half else torch.float32, requires_grad=True
    )
    weight = torch.randn(
        8, dtype=torch.bfloat16 if half_weight else torch.float32, requires_grad=True
    )
    given = tensor, [8], weight, None
    assert saved_by(composite_rms_norm, *given) == saved_by(functional.rms_norm, *given)
    assert torch.equal(composite_rms_norm(*given), functional.rms_norm(*given))
