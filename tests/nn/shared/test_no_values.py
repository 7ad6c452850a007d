"""Networks that are built for their shapes alone."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal

from mpt.nn.shared.no_values import WithoutValues


def test_a_parametrization_is_not_left_half_made_where_an_operator_has_no_rule_for_shapes() -> None:
    """QR has none; torch takes NotImplementedError of `right_inverse` for "there is nothing to invert"."""
    with (
        pytest.raises(RuntimeError, match="no rule for shapes"),
        torch.device("meta"),
        WithoutValues(),
    ):
        orthogonal(nn.Linear(8, 4))
