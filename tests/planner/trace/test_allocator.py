"""The allocator model keeps its invariants under any order of requests, and PyTorch's documented sizes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpt.planner.trace.allocator import (
    GRAPHS,
    MIB,
    CachingAllocator,
    ExpandableAllocator,
    OutOfMemory,
    round_request,
    segment_size,
)

SIZES = st.one_of(st.integers(1, 4096), st.integers(1, 3 * MIB), st.integers(MIB, 60 * MIB))
ORDERS = st.lists(st.tuples(SIZES, st.integers(0, 5)), min_size=1, max_size=60)
KINDS = st.sampled_from([CachingAllocator, ExpandableAllocator])


def replay(allocator: CachingAllocator, order: list[tuple[int, int]]) -> list[int]:
    """Allocate each size; after it free as many of the oldest requests as the order says. Return live keys."""
    live: list[int] = []
    for key, (size, frees) in enumerate(order):
        allocator.malloc(key, size)
        live.append(key)
        for _ in range(min(frees, len(live)) if frees < 3 else 0):
            allocator.free(live.pop(0))
        check(allocator)
    return live


def check(allocator: CachingAllocator) -> None:
    blocks = sorted((*allocator.used_blocks(), *allocator.free_blocks()), key=lambda b: b.address)
    for left, right in pairwise(blocks):
        assert left.address + left.size <= right.address, "blocks overlap"
        touching = left.next is right
        assert not (touching and not left.in_use and not right.in_use), (
            "free neighbours were not merged"
        )
    assert sum(block.size for block in blocks) == allocator.reserved
    assert sum(block.size for block in allocator.used_blocks()) == allocator.allocated
    assert allocator.allocated <= allocator.reserved <= allocator.peak_reserved
    assert allocator.allocated <= allocator.peak_allocated <= allocator.peak_reserved


@settings(max_examples=120, deadline=None)
@given(KINDS, ORDERS)
def test_blocks_never_overlap_and_counts_add_up(
    kind: type[CachingAllocator], order: list[tuple[int, int]]
) -> None:
    replay(kind(), order)


@settings(max_examples=60, deadline=None)
@given(KINDS, ORDERS)
def test_when_all_is_freed_all_can_be_given_back(
    kind: type[CachingAllocator], order: list[tuple[int, int]]
) -> None:
    allocator = kind()
    for key in replay(allocator, order):
        allocator.free(key)
    check(allocator)
    assert allocator.allocated == 0
    allocator.empty_cache()
    assert allocator.reserved == 0


@settings(max_examples=60, deadline=None)
@given(KINDS, ORDERS, st.integers(20, 200))
def test_the_limit_is_never_exceeded(
    kind: type[CachingAllocator], order: list[tuple[int, int]], mebibytes: int
) -> None:
    allocator = kind(mebibytes * MIB)
    try:
        replay(allocator, order)
    except OutOfMemory:
        assert allocator.retries > 0
    assert allocator.peak_reserved <= mebibytes * MIB


def test_requests_are_rounded_and_segments_sized_as_pytorch_does() -> None:
    assert [round_request(size) for size in (1, 512, 513)] == [512, 512, 1024]
    sizes = [512, MIB, MIB + 512, 10 * MIB - 512, 10 * MIB, 11 * MIB]
    assert [segment_size(size) // MIB for size in sizes] == [2, 2, 20, 20, 10, 12]


def test_small_rests_of_large_blocks_stay_with_the_block() -> None:
    allocator = CachingAllocator()
    allocator.malloc(0, 11 * MIB + 512)  # a 12-MiB segment whose rest is under 1 MiB
    assert allocator.allocated == 12 * MIB


def test_a_rest_of_just_one_mebibyte_stays_with_a_large_block_and_a_larger_one_is_split_off() -> (
    None
):
    whole, split = CachingAllocator(), CachingAllocator()
    whole.malloc(0, 11 * MIB)  # of a segment of 12 MiB
    split.malloc(0, 11 * MIB - 512)
    assert (whole.allocated, split.allocated) == (12 * MIB, 11 * MIB - 512)


def test_the_cache_is_emptied_and_the_request_tried_again_at_the_limit() -> None:
    allocator = CachingAllocator(40 * MIB)
    allocator.malloc(0, 30 * MIB)
    allocator.free(0)
    allocator.malloc(1, 34 * MIB)
    assert (allocator.retries, allocator.reserved) == (1, 34 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.malloc(2, 8 * MIB)


def test_an_expandable_segment_grows_in_place_where_fixed_segments_fragment() -> None:
    fixed, expandable = CachingAllocator(), ExpandableAllocator()
    for allocator in (fixed, expandable):
        for key, size in enumerate((30 * MIB, 40 * MIB, 50 * MIB, 60 * MIB)):
            allocator.malloc(key, size)
            allocator.free(key)
    assert fixed.peak_reserved == 180 * MIB
    assert expandable.peak_reserved == 60 * MIB


@pytest.mark.parametrize("kind", [CachingAllocator, ExpandableAllocator])
def test_a_block_freed_on_one_stream_is_not_given_to_another(kind: type[CachingAllocator]) -> None:
    allocator = kind()
    allocator.malloc(0, 20 * MIB)
    allocator.free(0)
    allocator.malloc(1, 20 * MIB, stream=1)
    assert allocator.reserved == 40 * MIB
    allocator.malloc(2, 20 * MIB)
    assert allocator.reserved == 40 * MIB
    allocator.free(1)
    allocator.free(2)
    allocator.empty_cache()
    assert allocator.reserved == 0


@pytest.mark.parametrize("kind", [CachingAllocator, ExpandableAllocator])
def test_what_cuda_graphs_used_stays_theirs(kind: type[CachingAllocator]) -> None:
    allocator = kind(60 * MIB)
    for key, stream in enumerate((GRAPHS, 0)):
        allocator.malloc(key, 20 * MIB, stream)
        allocator.free(key)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB
    allocator.malloc(2, 20 * MIB, GRAPHS)
    assert allocator.reserved == 20 * MIB
    with pytest.raises(OutOfMemory):
        allocator.malloc(3, 60 * MIB)
