"""States are finite before they are saved, and fit the model before they are loaded."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mpt.errors import CheckpointError
from mpt.run.checkpoints.state_checks import compare_keys, first_non_finite

pytestmark = pytest.mark.tier("fast")


def test_a_finite_state_passes_whatever_its_dtypes() -> None:
    state = {
        "weights": [
            torch.randn(5, dtype=dtype)
            for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.complex64)
        ],
        "small": torch.ones(3).to(torch.float8_e4m3fn),
        "largest": torch.full((4,), torch.finfo(torch.float32).max),
        "counts": (torch.arange(3), torch.empty(0), None, 1.0),
    }
    assert first_non_finite(state) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64]
)
def test_one_poisoned_element_is_found_by_name(value: float, dtype: torch.dtype) -> None:
    bad = torch.zeros(1000)
    bad[777] = value
    state = {"model": {"a": torch.ones(3)}, "optimizer": {0: {"exp_avg": bad.to(dtype)}}}
    assert first_non_finite(state) == "optimizer.0.exp_avg"


def test_a_poisoned_batch_norm_buffer_is_caught_though_parameters_are_finite() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    model[1].running_var[1] = float("nan")
    state = {"modules": nn.Linear(2, 2).state_dict(), "ema": model.state_dict()}
    assert first_non_finite(state) == "ema.1.running_var"


def test_another_architecture_is_refused_with_its_differences() -> None:
    expected = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)).state_dict()
    found = nn.Sequential(nn.Linear(2, 5), nn.Identity(), nn.Linear(3, 4)).state_dict()
    with pytest.raises(CheckpointError) as caught:
        compare_keys(expected, found)
    message = str(caught.value)
    assert "2 missing: 1.weight, 1.bias" in message
    assert "2 unexpected: 2.weight, 2.bias" in message
    assert "0.weight (5x2 instead of 3x2)" in message
    assert caught.value.exit_code == 4


def test_long_lists_of_keys_are_cut() -> None:
    with pytest.raises(CheckpointError, match=r"100 missing: k0, k1, k2, k3, k4, \.\.\."):
        compare_keys({f"k{i}": (1,) for i in range(100)}, {})


def test_equal_keys_and_shapes_pass() -> None:
    compare_keys({"a": (2, 3), "b": torch.ones(())}, {"b": (), "a": torch.zeros(2, 3)})
