"""Which kernels an operator is taken to launch, with their arithmetic and traffic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mpt.commands.planning.plan_tables import describe_range
from mpt.planner.device.outcomes import Cost, Kernel
from mpt.planner.facts.gpus import find_gpu
from mpt.planner.facts.time_band import BAND, UNCERTAIN_BAND
from mpt.planner.recipes.words import describe_band
from mpt.planner.trace.operator_costs import cost_of, window_operations
from mpt.planner.trace.time_model import Work

SIDE, BATCH, CHANNELS = 8, 2, 128


class Costs(TorchDispatchMode):
    """Keeps what each operator costs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Cost] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.found[func._schema.name.removeprefix("aten::")] = cost_of(
            func, args, kwargs or {}, result
        )
        return result


def costs(
    groups: int, dtype: torch.dtype = torch.float32, layout: Any = torch.contiguous_format
) -> dict[str, Cost]:
    """Return what a convolution of 128 channels costs, forward and backward."""
    weight = torch.empty(
        CHANNELS, CHANNELS // groups, 3, 3, dtype=dtype, device="meta", requires_grad=True
    )
    image = torch.empty(BATCH, CHANNELS, SIDE, SIDE, dtype=dtype, device="meta")
    image = image.contiguous(memory_format=layout).requires_grad_()
    with Costs() as seen:
        result: Tensor = torch.conv2d(image, weight, padding=1, groups=groups)
        result.backward(torch.empty_like(result))
    return seen.found


def operations(kernels: tuple[Kernel, ...]) -> list[int]:
    """Return each kernel's operations."""
    return [flops for flops, _ in kernels]


DENSE = 2 * BATCH * SIDE * SIDE * CHANNELS * CHANNELS * 9
"""Two for each multiplication and addition: samples x places x channels in x channels out x kernel."""


def test_a_backward_convolution_is_one_product_for_each_gradient() -> None:
    found = costs(1, layout=torch.channels_last)
    assert operations(found["convolution"].kernels) == [DENSE]
    assert operations(found["convolution_backward"].kernels) == [DENSE, DENSE]


def test_groups_divide_the_operations_of_all_three_products_down_to_a_tile_of_64_channels() -> None:
    halves, quarters = (costs(groups, layout=torch.channels_last) for groups in (2, 4))
    assert operations(halves["convolution"].kernels) == [DENSE // 2]
    assert operations(halves["convolution_backward"].kernels) == [DENSE // 2] * 2
    # 32 channels take the time of 64
    assert operations(quarters["convolution"].kernels) == [DENSE // 4 * 2]
    assert operations(quarters["convolution_backward"].kernels) == [DENSE // 4 * 2] * 2


def test_depthwise_kernels_wait_for_memory_and_the_weight_gradient_longest() -> None:
    found = costs(CHANNELS)
    assert operations(found["convolution"].kernels) == [0]
    (_, of_input), (_, of_weight) = found["convolution_backward"].kernels
    assert of_weight == pytest.approx(6 * of_input)


def test_depthwise_windows_that_torch_has_no_kernel_for_take_eight_times_their_products() -> None:
    weight = torch.empty(12, 1, 44, 44, device="meta")
    assert window_operations(weight, 1000) == 8000
    assert window_operations(torch.empty(12, 1, 44, 1, device="meta"), 1000) == 8000
    assert window_operations(weight[..., :5, :5], 1000) == 0
    assert window_operations(weight.half(), 1000) == 0  # cuDNN's


def test_half_convolutions_of_contiguous_tensors_copy_them_to_channels_last() -> None:
    half = torch.float16
    ((flops, moved), (none, copied)) = costs(1, half)["convolution"].kernels
    assert (flops, none) == (DENSE, 0)
    assert copied == int(moved * 1.2)
    assert len(costs(1, half)["convolution_backward"].kernels) == 4
    assert len(costs(1, half, torch.channels_last)["convolution"].kernels) == 1


def test_float32_convolutions_are_copied_where_tf32_is_faster_and_allowed() -> None:
    found = costs(1)["convolution"]
    ((flops, moved), copy) = found.kernels
    assert (found.unit, copy) == ("convolution", (0, int(moved * 1.2)))
    assert costs(1, torch.float64)["convolution"].kernels == ((flops, 2 * moved),)
    allowed, refused = (Work(convolutions_in_tf32=is_allowed) for is_allowed in (True, False))
    for work in (allowed, refused):
        for kernel in found.kernels:
            work.add(*kernel, found.unit)
    a100, geforce = find_gpu("a100"), find_gpu("rtx3060")
    assert [allowed.kernels(gpu) for gpu in (a100, geforce)] == [2, 1]
    assert [refused.kernels(gpu) for gpu in (a100, geforce)] == [1, 1]
    assert allowed.seconds(geforce) == refused.seconds(geforce)


def test_steps_of_grouped_convolutions_in_channels_last_have_a_wider_band() -> None:
    bands = []
    for groups in (1, 4):
        work = Work()
        found = costs(groups, torch.float16, torch.channels_last)["convolution"]
        assert found.is_uncertain == (groups == 4)
        for flops, moved in found.kernels:
            work.add(flops, moved, found.unit)
            if found.is_uncertain:
                work.uncertain.add((flops, moved, found.unit))
        bands.append(work.band(find_gpu("rtx3060")))
    assert bands == [BAND, UNCERTAIN_BAND]
    said = [describe_range(1.0, band) for band in bands]
    assert said[0] == "give or take 300 ms"
    assert said[1].startswith(
        "600 ms to 5.0 s: no constant meets the published times of grouped convolutions"
    )
    assert [describe_band(band) for band in bands] == ["±30%", "×0.6 to 5"]
    # and few steps fill a card of 3.35 TB/s
    fast = Work().band(find_gpu("h100"))
    assert describe_band(fast) == "×0.85 to 2"
    assert describe_range(1.0, fast) == "850 ms to 2.0 s: few steps fill a card of such bandwidth"


def test_a_lookup_reads_of_a_table_what_it_returns() -> None:
    table, tokens = (
        torch.empty(10_000, 8, device="meta"),
        torch.empty(4, dtype=torch.int64, device="meta"),
    )
    with Costs() as seen:
        torch.nn.functional.embedding(tokens, table)
        table[tokens]
        table[:2].index_select(0, tokens)
    rows, indices = 4 * 8 * 4, 4 * 8
    assert (
        seen.found["embedding"].kernels == seen.found["index"].kernels == ((0, 2 * rows + indices),)
    )
    # a table of two rows
    assert seen.found["index_select"].kernels == ((0, 2 * 8 * 4 + rows + indices),)


def normalization(
    network: torch.nn.Module, *shape: int, layout: Any = torch.contiguous_format
) -> dict[str, Cost]:
    """Return the costs of a normalization, forward and backward."""
    given = torch.empty(shape, device="meta").contiguous(memory_format=layout).requires_grad_()
    with Costs() as seen:
        result: Tensor = network.to("meta")(given)
        result.backward(torch.empty_like(result))
    return seen.found


def test_a_batch_normalization_takes_as_long_as_one_channel_or_its_traffic() -> None:
    shape = (16, 32, 64, 64)
    found = normalization(torch.nn.BatchNorm2d(32), *shape)
    forward, backward = found["native_batch_norm"], found["native_batch_norm_backward"]
    of_channel = 16 * 64 * 64
    assert (forward.unit, forward.kernels[0][0]) == ("channel", of_channel)
    assert (backward.unit, backward.kernels[0][0]) == ("channel", 2.5 * of_channel)
    gpu, work = find_gpu("h100"), Work()
    assert work.operator_seconds(gpu, 19_000_000, 10, "channel") == pytest.approx(0.01)
    traffic = work.operator_seconds(gpu, 0, 10**9, "float32")
    assert work.operator_seconds(gpu, 10, 10**9, "channel") == traffic
    # in channels_last blocks take rows, and statistics that are given need no pass over a channel
    last = normalization(torch.nn.BatchNorm2d(32), *shape, layout=torch.channels_last)
    fixed = normalization(torch.nn.BatchNorm2d(32).eval(), *shape)
    rows = normalization(torch.nn.BatchNorm1d(32), 64, 32)
    for other in (last, fixed, rows):
        assert {other[name].unit for name in other if "batch_norm" in name} == {"float32"}


def test_the_gradients_of_a_layer_normalization_are_two_kernels_that_read_both_inputs() -> None:
    found = normalization(torch.nn.LayerNorm(64), 32, 16, 64)["native_layer_norm_backward"]
    whole, of_weights = found.kernels
    assert of_weights == (0, 2 * 4 * 32 * 16 * 64)
    assert whole[1] > 3 * 4 * 32 * 16 * 64


@pytest.mark.parametrize(
    ("first", "second"),
    [((48, 16), (4, 16, 32)), ((4, 32, 16), (16, 48)), ((16, 48), (48, 32))],
)
def test_products_in_groups_cost_what_all_groups_do_together(
    first: tuple[int, ...], second: tuple[int, ...]
) -> None:
    """48 tokens in four groups, forward and both gradients; torch's counter has no rule, so that they took no time."""
    given = [torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in (first, second)]
    ends = torch.empty(4, dtype=torch.int32, device="meta")
    product: Any = torch.ops.aten._grouped_mm.default
    args = (*given, ends)
    assert operations(cost_of(product, args, {}, product(*args)).kernels) == [2 * 48 * 16 * 32]


def test_heads_that_share_keys_compute_as_much_as_if_they_had_their_own() -> None:
    flash = torch.ops.aten._scaled_dot_product_flash_attention.default
    query = torch.empty(2, 8, 64, 32, dtype=torch.float16, device="meta")
    found = []
    for heads in (8, 2):
        key = torch.empty(2, heads, 64, 32, dtype=torch.float16, device="meta")
        [(operations, _)] = cost_of(flash, (query, key, key), {}, query).kernels
        found.append(operations)
    assert found == [4 * 2 * 8 * 64 * 64 * 32] * 2
