"""Operators are refused on fake tensors for the dtypes for which they are refused on real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from mpt.planner.device.matching_dtypes import check_dtypes

pytestmark = pytest.mark.tier("fast")


def half(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bfloat16)


def full(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


def places() -> torch.Tensor:
    return torch.arange(2)


CALLS: dict[str, Callable[[], Any]] = {
    "mm": lambda: full(2, 2) @ half(2, 2),
    "linear": lambda: functional.linear(half(2, 2), half(2, 2), full(2)),
    "conv2d": lambda: functional.conv2d(half(1, 2, 4, 4), full(2, 2, 3, 3)),
    "index_add": lambda: full(4, 2).index_add_(0, places(), half(2, 2)),
    "index_copy": lambda: full(4, 2).index_copy(0, places(), half(2, 2)),
    "index_put": lambda: full(4, 2).__setitem__(places(), half(2, 2)),
    "grid_sample": lambda: functional.grid_sample(
        half(1, 1, 4, 4), full(1, 2, 2, 2), align_corners=False
    ),
    "binary_cross_entropy": lambda: functional.binary_cross_entropy(half(2), full(2)),
    "nll_loss": lambda: functional.cross_entropy(
        full(2, 2), torch.zeros(2, dtype=torch.int32)
    ),
    "solve": lambda: torch.linalg.solve(half(2, 2), half(2, 2)),
    "cholesky": lambda: torch.linalg.cholesky(half(2, 2)),
    "svd": lambda: torch.linalg.svd(half(2, 2)),
    "det": lambda: torch.linalg.det(half(2, 2)),
    "fft": lambda: torch.fft.rfft(half(8)),
    "complex": lambda: torch.complex(half(2), half(2)),
    "cdist": lambda: torch.cdist(half(2, 2), half(2, 2)),
}  # fmt: skip
TAKEN: dict[str, Callable[[], Any]] = {
    "mm": lambda: half(2, 2) @ half(2, 2),
    "linear": lambda: functional.linear(half(2, 2), half(2, 2), half(2)),
    "a number at a mask": lambda: half(4).__setitem__(half(4) > 0, full(1)),
    "index_add": lambda: half(4, 2).index_add_(0, places(), half(2, 2)),
    "labels": lambda: functional.cross_entropy(full(2, 2), torch.zeros(2, dtype=torch.int64)),
    "solve": lambda: torch.linalg.solve(torch.eye(2), full(2, 2)),
}


class Checked(TorchDispatchMode):
    """Asks about each operator before it is called."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        check_dtypes(func, args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CALLS)
def test_dtypes_that_kernels_refuse_are_refused_on_fake_tensors(name: str) -> None:
    with pytest.raises(RuntimeError):  # NotImplementedError is one
        CALLS[name]()
    with pytest.raises(RuntimeError), FakeTensorMode(), Checked():
        CALLS[name]()


@pytest.mark.parametrize("name", TAKEN)
def test_dtypes_that_kernels_take_are_not_refused(name: str) -> None:
    with Checked():
        TAKEN[name]()
