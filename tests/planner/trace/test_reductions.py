"""Scratch of sums: sizes that an H100's allocator was asked for, and the rule's on other cards."""

from __future__ import annotations

import pytest
import torch

from mpt.planner.facts.gpus import TABLE, find_gpu
from mpt.planner.facts.multiprocessors import COUNTS, multiprocessors, threads_of_one
from mpt.planner.trace.reductions import reduction_bytes

pytestmark = pytest.mark.tier("fast")
MIB = 2**20


def scratch(gpu: str, shape: tuple[int, ...], dims: list[int] | None, operator: str = "sum") -> int:
    card, source = find_gpu(gpu), torch.empty(shape, dtype=torch.bfloat16, device="meta")
    result = getattr(torch, operator)(source, dims) if dims else source.sum()
    args = (source, dims, False) if dims else (source,)
    threads = threads_of_one(card.capability)
    return reduction_bytes(f"aten::{operator}", args, result, multiprocessors(card), threads)


@pytest.mark.parametrize(
    ("shape", "bytes_of_it"),
    [
        ((32 * 256, 768), 48 * MIB),  # RoBERTa's, DeiT's and a convolution's gradients of biases
        ((32 * 256, 3072), 132 * MIB),
        ((64 * 197, 384), 38_731_776),
        ((64 * 197, 1152), 116_195_328),
    ],
)
def test_a_gradient_of_biases_fills_an_h100_with_parts(
    shape: tuple[int, ...], bytes_of_it: int
) -> None:
    assert scratch("h100", shape, [0]) == bytes_of_it


def test_a_smaller_card_has_room_for_fewer_parts() -> None:
    sizes = [scratch(gpu, (8192, 3072), [0]) for gpu in ("rtx2060", "rtx3060", "a100", "h100")]
    assert sizes == [10 * 1572864, 14 * 1572864, 72 * 1572864, 88 * 1572864]


def test_sums_along_rows_and_of_everything_have_none() -> None:
    assert scratch("h100", (8192, 3072), [1]) == 0
    assert scratch("h100", (8192, 3072), None) == 0


def test_a_sum_of_few_rows_has_next_to_none_but_the_same_events_as_one_of_many() -> None:
    assert scratch("h100", (64, 3072), [0]) == 1


def test_columns_in_channels_last_are_divided_too() -> None:
    pooled = torch.empty(128, 1280, 7, 7, device="meta").to(memory_format=torch.channels_last)
    found = reduction_bytes("aten::sum", (pooled, [0, 2, 3]), torch.empty(1280), 132, 2048)
    assert found == 4 * 1280 * 128 * 98  # each thread of four rows of 1,568 values, 16 at least


def test_a_mask_is_counted_in_integers() -> None:
    mask = torch.empty(
        64, 4, 49, 768, dtype=torch.bool, device="meta"
    )  # Hiera's, of the largest of four
    counts = torch.empty(64, 49, 768, dtype=torch.int64, device="meta")
    assert reduction_bytes("aten::sum", (mask, [1], False), counts, 132, 2048) == 77_070_336


def test_every_card_of_nvidia_has_its_multiprocessors() -> None:
    amd = [gpu.name for gpu in TABLE if gpu.name.startswith(("rx", "mi"))]
    assert {gpu.name for gpu in TABLE} == {*COUNTS, *amd}
    assert (COUNTS["rtx3060"], COUNTS["rtx2060"], COUNTS["h100"]) == (28, 30, 132)
