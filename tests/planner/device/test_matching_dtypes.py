"""Operators are refused on fake tensors for the dtypes for which they are refused on real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from mpt.planner.device.fake_device import fake_gpu
from mpt.planner.device.fake_mode import LeanFakeMode
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
    "cdist of two dtypes": lambda: torch.cdist(full(2, 2), half(2, 2)),
    "weights of a loss": lambda: functional.cross_entropy(half(2, 3), places(), weight=full(3)),
    "weights of a loss of pictures": lambda: functional.cross_entropy(
        half(2, 3, 2, 2), torch.zeros(2, 2, 2, dtype=torch.int64), weight=full(3)
    ),
    "labels of a loss of pictures": lambda: functional.cross_entropy(
        full(2, 3, 2, 2), torch.zeros(2, 2, 2, dtype=torch.int32)
    ),
    "huber_loss": lambda: functional.huber_loss(half(2).requires_grad_(), full(2)).backward(),
    "embedding_bag": lambda: functional.embedding_bag(
        places()[None], half(4, 2), per_sample_weights=full(1, 2), mode="sum"
    ),
    "layer_norm of float32 with half weights": lambda: functional.layer_norm(
        full(2, 4), (4,), half(4), half(4)
    ),
    "group_norm with a half bias": lambda: functional.group_norm(
        full(2, 4, 2), 2, full(4), half(4)
    ),
    "batch_norm of float32 with half weights": lambda: functional.batch_norm(
        full(2, 4), full(4), full(4), half(4), half(4), training=True
    ),
    "batch_norm with half statistics": lambda: functional.batch_norm(
        full(2, 4), half(4), half(4), full(4), full(4), training=True
    ),
    "cross": lambda: torch.linalg.cross(full(2, 3), half(2, 3)),
    "put": lambda: full(4).put_(places(), half(2)),
    "index_reduce": lambda: full(4).index_reduce_(0, places(), half(2), "mean"),
    "places in bytes": lambda: full(4, 2).index_select(0, places().byte()),
    "index_add at float places": lambda: full(4, 2).index_add_(0, full(2), full(2, 2)),
    "index_copy at int32 places": lambda: full(4, 2).index_copy(0, places().int(), full(2, 2)),
    "index_fill at int32 places": lambda: full(4, 2).index_fill(0, places().int(), 1.0),
    "softmax of integers": lambda: places().softmax(0),
    "gelu of integers": lambda: functional.gelu(places()),
    "std of integers": lambda: places().std(),
    "a mask made larger": lambda: functional.interpolate(
        torch.ones(1, 1, 4, 4, dtype=torch.int64), scale_factor=2
    ),
    "a mask that is subtracted": lambda: full(2) - (full(2) > 0),
    "a mask that is negated": lambda: -(full(2) > 0),
    "argmax of a mask": lambda: (full(2) > 0).argmax(),
    "a mask and a number": lambda: (full(2) > 0) & full(2),
    "eig": lambda: torch.linalg.eig(half(2, 2)),
    "solve_triangular": lambda: torch.linalg.solve_triangular(half(2, 2), half(2, 2), upper=True),
    "pdist": lambda: functional.pdist(half(3, 2)),
    "quantize": lambda: torch.quantize_per_tensor(half(2), 0.1, 0, torch.quint8),
    "weight norm": lambda: torch._weight_norm(full(4, 2), half(4, 1)),
}  # fmt: skip
TAKEN: dict[str, Callable[[], Any]] = {
    "mm": lambda: half(2, 2) @ half(2, 2),
    "linear": lambda: functional.linear(half(2, 2), half(2, 2), half(2)),
    "a number at a mask": lambda: half(4).__setitem__(half(4) > 0, full(1)),
    "index_add": lambda: half(4, 2).index_add_(0, places(), half(2, 2)),
    "labels": lambda: functional.cross_entropy(full(2, 2), torch.zeros(2, dtype=torch.int64)),
    "solve": lambda: torch.linalg.solve(torch.eye(2), full(2, 2)),
    "layer_norm of halves with float32 weights": lambda: functional.layer_norm(
        half(2, 4), (4,), full(4), full(4)
    ),
    "batch_norm of halves with float32 weights": lambda: functional.batch_norm(
        half(2, 4), full(4), full(4), full(4), full(4), training=True
    ),
    "embedding_bag": lambda: functional.embedding_bag(
        places()[None], half(4, 2), per_sample_weights=half(1, 2), mode="sum"
    ),
    "weights of a loss": lambda: functional.cross_entropy(half(2, 3), places(), weight=half(3)),
    "a mask of bytes made larger": lambda: functional.interpolate(
        torch.ones(1, 1, 4, 4, dtype=torch.uint8), scale_factor=2
    ),
    "int32 places": lambda: full(4, 2).index_select(0, places().int()),
    "two masks": lambda: (full(2) > 0) & (full(2) < 2),
    "a mask and one answer": lambda: (full(2) > 0) & True,
}


class Checked(TorchDispatchMode):
    """Asks about each operator before it is called."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        check_dtypes(func, args)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", CALLS)
def test_dtypes_that_kernels_refuse_are_refused_on_fake_tensors(name: str) -> None:
    with pytest.raises((RuntimeError, IndexError)):  # NotImplementedError is one
        CALLS[name]()
    with pytest.raises(RuntimeError), FakeTensorMode(), Checked():
        CALLS[name]()


@pytest.mark.parametrize("name", TAKEN)
def test_dtypes_that_kernels_take_are_not_refused(name: str) -> None:
    with Checked():
        TAKEN[name]()


def on_card(function: Callable[[Any], Any]) -> None:
    """Call a function of the fake card's device with an operator's dtypes checked."""
    with LeanFakeMode(allow_non_fake_inputs=True), Checked():
        function(fake_gpu())


def test_a_card_takes_float32_weights_of_a_half_input_in_batch_normalization_alone() -> None:
    def norms(kind: str) -> Callable[[Any], Any]:
        def call(device: Any) -> Any:
            values = torch.ones(2, 4, 2, dtype=torch.bfloat16, device=device)
            weight, bias = torch.ones(4, device=device), torch.ones(4, device=device)
            if kind == "batch":
                return functional.batch_norm(values, None, None, weight, bias, training=True)
            if kind == "group":
                return functional.group_norm(values, 2, weight, bias)
            return functional.layer_norm(values, (4, 2), torch.ones(4, 2, device=device))

        return call

    on_card(norms("batch"))
    for kind in ("group", "layer"):
        with pytest.raises(RuntimeError, match="one dtype"):
            on_card(norms(kind))
