"""Scratch of a sum over many rows: a place for the part of each thread that a card holds at once.

Where sums run along rows that lie next to each other, as the gradient of a linear layer's bias does, torch divides each
column among blocks of threads until the card is full. The blocks leave their parts in memory, and the last one adds
them up: up to 64 KiB for each block that the card holds, 132 MiB on an H100 and 21 MiB on an RTX 3060, whatever the
tensor's size. The rules are those of `setReduceConfig` and `ReduceConfig` (`ATen/native/cuda/Reduce.cuh`); an
allocator's history of 129 steps on an H100 has the same sizes to the byte (`scripts/card/operator_scratch.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

PART_BYTES = {"aten::var": 16, "aten::std": 16, "aten::var_mean": 16, "aten::std_mean": 16}
"""Bytes of a part where it is more than a sum: a mean, a sum of squares and two counts."""
REDUCTIONS = frozenset(
    {"aten::sum", "aten::mean", "aten::linalg_vector_norm", "aten::amax", "aten::amin", *PART_BYTES}
)
HALF = (torch.float16, torch.bfloat16)
NONE = 1
"""Bytes where a larger batch would have scratch: the events of a step are the same at each batch."""
MOST_THREADS, WARP = 512, 32
"""Of a block, before its outputs are taken together."""
LEAST_VALUES, MOST_VALUES = 16, 256
"""That a thread adds up: a column is divided among blocks where it would be more."""


def reduction_bytes(
    operator: str, args: Sequence[Any], result: Any, multiprocessors: int, threads: int
) -> int:
    """Return the bytes of scratch of a reduction on a card whose multiprocessors hold `threads` each."""
    source, out = args[0], result if isinstance(result, Tensor) else result[0]
    if not isinstance(source, Tensor) or not source.numel() or source.dtype.is_complex:
        return 0
    place = 2 if operator == "aten::linalg_vector_norm" else 1
    dims = args[place] if len(args) > place else None
    wide = 8 if source.dtype.itemsize == 8 or not source.dtype.is_floating_point else 4
    if _is_cast(source.dtype, out.dtype):
        return source.numel() * out.element_size()
    return _bytes(
        tuple(source.shape),
        source.stride(),
        _reduced(dims, source.dim()),
        PART_BYTES.get(operator, wide),
        multiprocessors,
        threads,
    ) * (out.numel() > 0)


def _is_cast(given: torch.dtype, made: torch.dtype) -> bool:
    """Return whether all values are converted first, as a mask's that are counted; kernels read halves for float32."""
    return given != made and not (given in HALF and made == torch.float32)


def _reduced(dims: Any, count: int) -> tuple[int, ...]:
    given = (dims,) if isinstance(dims, int) and not isinstance(dims, bool) else dims
    if not isinstance(given, (list, tuple)) or not given:
        return tuple(range(count))
    return tuple(sorted({one % count for one in given if count}))


@functools.lru_cache(4096)
def _bytes(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    reduced: tuple[int, ...],
    part: int,
    multiprocessors: int,
    threads_of_one: int,
) -> int:
    """Return the scratch from the forms alone."""
    inner = _merged([(shape[i], strides[i]) for i in reduced])
    outer = _merged([(shape[i], strides[i]) for i in range(len(shape)) if i not in reduced])
    if not inner or not outer:
        return 0  # one sum, of few parts
    outputs, inputs = (math.prod(size for size, _ in dims) for dims in (outer, inner))
    if inner[0][1] < outer[0][1]:
        return 0  # each column is a row of its own: blocks of a warp add it up
    vector = _vector(outer, inner) if outer[0][1] == 1 else 1
    most = MOST_THREADS // vector
    wide, high = _power_of_two(outputs // vector, most), _power_of_two(inputs, most)
    width = min(wide, WARP)
    height = min(high, most // width)
    width = min(wide, most // height)
    values = -(-inputs // height)
    held = multiprocessors * (threads_of_one // (width * height))
    grid = -(-(outputs // vector) // width)
    if inputs < min(height * 16, MOST_VALUES) or values < MOST_VALUES or grid > held:
        return NONE
    blocks = max(min(-(-held // grid), -(-values // LEAST_VALUES)), -(-values // MOST_VALUES))
    return part * outputs * blocks * width * vector if blocks > 1 else NONE


def _merged(dims: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return sizes and strides, the fastest first, those that lie one behind the other as one."""
    found: list[tuple[int, int]] = []
    for size, stride in sorted((one for one in dims if one[0] != 1), key=lambda one: one[1]):
        if found and found[-1][0] * found[-1][1] == stride:
            found[-1] = found[-1][0] * size, found[-1][1]
        else:
            found.append((size, stride))
    return found


def _vector(outer: list[tuple[int, int]], inner: list[tuple[int, int]]) -> int:
    """Return how many outputs a thread takes: 4 or less, by which the row and all other strides can be divided."""
    numbers = [outer[0][0], *(stride for _, stride in (*outer[1:], *inner))]
    return next(one for one in (4, 2, 1) if all(number % one == 0 for number in numbers))


def _power_of_two(number: int, most: int) -> int:
    """Return the largest power of two that is no larger than both."""
    return most if number >= most else 1 << max(0, number.bit_length() - 1)
