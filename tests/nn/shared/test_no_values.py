"""Networks that are built for their shapes alone."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal
from torch.utils._python_dispatch import TorchDispatchMode

from mpt.nn.shared.no_values import WithoutValues


def test_a_parametrization_is_not_left_half_made_where_an_operator_has_no_rule_for_shapes() -> None:
    """QR has none; torch takes NotImplementedError of `right_inverse` for "there is nothing to invert"."""
    with (
        pytest.raises(RuntimeError, match="no rule for shapes"),
        torch.device("meta"),
        WithoutValues(),
    ):
        orthogonal(nn.Linear(8, 4))


class Calls(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_layers_are_initialised_without_an_operator_that_gives_values() -> None:
    with Calls() as calls, torch.device("meta"), WithoutValues():
        nn.Linear(8, 4)
        nn.init.normal_(nn.Embedding(3, 2).weight)
        nn.init.constant_(nn.Conv2d(1, 1, 3).bias, 1.0)
    assert set(calls.names) == {"aten.empty.memory_format"}


def test_a_vector_is_refused_as_ever() -> None:
    with pytest.raises(ValueError, match="fewer than 2 dimensions"), WithoutValues():
        nn.init.kaiming_uniform_(torch.empty(3, device="meta"))
