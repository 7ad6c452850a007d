"""The fake GPU casts as CUDA's autocast lists say, caches weight casts, and takes a real GPU's routes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from mpt.planner.device import direct_results
from mpt.planner.device.fake_device import header_path, read_operator_lists, register
from mpt.planner.device.routes import SPLIT_OPERATORS
from tests.parallel.forked import run_ranks
from tests.planner.configs import VIT
from tests.programs import run_program

HALF_OUT = {"mm", "linear", "conv2d", "conv_transpose2d", "bmm", "einsum", "sdpa"}
FULL_OUT = {
    "exp",
    "pow",
    "layer_norm",
    "group_norm",
    "mse_loss",
    "interpolate",
    "softmax",
    "log_softmax",
    "sum",
    "cumsum",
}
FULL_OUT |= {"norm"}
AS_GIVEN = {"relu", "add", "batch_norm"}


@pytest.fixture(scope="module")
def seen() -> Any:
    return json.loads(run_program("tests.planner.fake_parity")[-1])


def test_every_operator_of_the_installed_header_has_an_autocast_kernel(seen: Any) -> None:
    assert seen["missing"] == []
    assert seen["registered"] == sum(seen["lists"].values()) + 3


def test_convolutions_write_channels_last_where_input_or_weight_lie_so(seen: Any) -> None:
    assert seen["formats"] == {
        "neither": [False] * 3,
        "input": [True] * 3,
        "weight": [True] * 3,
        "both": [True] * 3,
    }


def test_operators_run_in_the_dtype_that_their_list_says(seen: Any) -> None:
    for given in ("float16", "float32"):
        dtypes = seen["dtypes"][given]
        assert {name for name in HALF_OUT if dtypes[name] != "float16"} == set()
        assert {name for name in FULL_OUT if dtypes[name] != "float32"} == set()
        assert {name for name in AS_GIVEN if dtypes[name] != given} == set()
        assert dtypes["addcmul"] == "float32"


def test_a_weight_is_cast_once_per_autocast_region_and_forgotten_after_it(seen: Any) -> None:
    assert (seen["casts_in_one_region"], seen["casts_in_two_regions"], seen["cache_left"]) == (
        1,
        2,
        0,
    )


def test_arguments_are_cast_in_the_order_of_torchs_own_kernels(seen: Any) -> None:
    """The plan had them from the first to the last: a 2 MiB segment of small blocks more, of an EfficientNet's 76."""
    assert seen["cast_order"] == seen["cast_order_of_torch"] == [1, 4, 3]


def test_binary_cross_entropy_is_refused_as_on_cuda(seen: Any) -> None:
    assert "unsafe to autocast" in seen["banned"]


def test_attention_takes_the_route_of_the_target_gpu(seen: Any) -> None:
    routes = seen["attention"]
    assert "aten::_scaled_dot_product_flash_attention" in routes["flash"]
    for name in ("efficient_turing", "efficient_float32", "efficient_mask"):
        assert "aten::_scaled_dot_product_efficient_attention" in routes[name], name
    for name in ("math_odd_head", "math_bias"):
        assert any("softmax" in one for one in routes[name]), name
        assert not any("attention" in one for one in routes[name]), name


def test_recurrent_layers_and_silu_run_as_single_kernels(seen: Any) -> None:
    assert seen["lstm_gradient"] == [24, 4]
    assert seen["silu_is_one_kernel"]


def test_an_operator_without_a_rule_for_shapes_gives_what_the_cpus_does(seen: Any) -> None:
    (rows, columns), device, (scales,), other = seen["without_a_rule"]
    assert min(rows, columns) == scales
    assert device == other == "fgpu"


def test_the_value_of_a_number_stays_known(seen: Any) -> None:
    assert seen["number"] == [3.0, "FakeTensor"]


def test_asking_for_a_device_is_no_operator(seen: Any) -> None:
    assert seen["operators_of_an_addition"] == ["aten::add"]


def test_the_lean_fake_mode_gives_the_traces_of_torchs_own(seen: Any) -> None:
    assert seen["lean_trace_is_torchs"] == {"dcgan": True, VIT: True}
    assert seen["torchs_mode_keeps_results_of_its_own"]  # so the two were not served from one cache
    assert seen["results_made_again"] == 0


def test_results_are_found_without_torchs_rules_in_a_release_for_which_that_was_compared(
    seen: Any,
) -> None:
    assert seen["wrong_rule_is_noticed"] == torch.__version__.startswith(direct_results.REVIEWED)


def test_what_a_model_compiles_itself_stays_eager(seen: Any) -> None:
    assert seen["graphs_compiled"] == 0


def test_the_installed_torch_has_no_route_that_was_not_reviewed(seen: Any) -> None:
    assert set(seen["split_operators"]) <= SPLIT_OPERATORS
    assert seen["warnings"] == []


def test_a_header_without_a_list_is_an_error() -> None:
    assert len(read_operator_lists(header_path().read_text())["FP32"]) > 40
    with pytest.raises(RuntimeError, match="AT_FORALL_LOWER_PRECISION_FP"):
        read_operator_lists("#define SOMETHING\n")


def test_a_process_that_planned_can_fork_ones_that_train() -> None:
    register()
    torch.ones((), requires_grad=True).mul(2).backward()
    assert run_ranks(1, lambda rank: torch.ones((), requires_grad=True).mul(2).backward()) == [None]
