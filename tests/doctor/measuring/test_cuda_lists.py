"""On a CPU autocast follows CUDA's lists where they differ from its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mpt.doctor.measuring.cuda_lists import CudaLists
from mpt.doctor.measuring.half_arithmetic import RoundedHalf
from mpt.planner.device.cuda_stand_in import cuda_stands_in
from mpt.planner.device.fake_device import fake_gpu
from mpt.planner.facts.gpus import DEFAULT, find_gpu
from mpt.planner.step.run_fake import on_fake_gpu
from mpt.planner.trace.recorder import Recorder

X = torch.rand(4, 4, dtype=torch.float16) + 0.5


@pytest.mark.parametrize(
    "function",
    [
        torch.exp,
        Tensor.log,
        lambda x: x**2,
        Tensor.sum,
        lambda x: functional.softmax(x, 1),
        torch.linalg.vector_norm,
    ],
)
def test_what_cuda_lists_in_float32_is_computed_in_it(function: Callable[[Tensor], Tensor]) -> None:
    with torch.autocast("cpu", torch.float16), CudaLists() as lists:
        assert function(X).dtype == torch.float32
    assert len(lists.used) == 1
    with CudaLists():
        assert function(X).dtype == torch.float16, "without autocast nothing is cast"


COMPOSITES: list[Callable[[Tensor], Tensor]] = [
    Tensor.square,
    torch.square,
    torch.arccos,
    Tensor.arcsin,
    torch.linalg.norm,
    torch.trapezoid,
    torch.cumulative_trapezoid,
    functional.normalize,
    functional.gumbel_softmax,
    lambda x: functional.softmin(x, 1),
    lambda x: functional.pairwise_distance(x, x),
    lambda x: functional.multilabel_soft_margin_loss(x, x),
    torch.trace,
    lambda x: functional.interpolate(x[None], scale_factor=2, mode="linear"),
    lambda x: functional.interpolate(x[None, None], scale_factor=2),
]
LEFT: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.polar(x, x),
    lambda x: torch.view_as_complex(x.view(8, 2)),
    lambda x: functional.pad(x[None], (1, 1), mode="reflect"),
    lambda x: functional.avg_pool3d(x[None, None], 1),
    lambda x: functional.max_pool3d(x[None, None], 1),
    lambda x: functional.interpolate(x[None, None], size=2, mode="area"),
    lambda x: functional.grid_sample(x[None, None], x.view(1, 2, 4, 2), align_corners=False),
    lambda x: functional.grid_sample(
        x[None, None].float(), x.view(1, 2, 4, 2), align_corners=False
    ),
]


def test_functions_that_call_a_listed_operator_are_computed_as_on_a_card() -> None:
    """`x.square()` is `pow`, which torch calls inside; the planned card asks torch's own dispatcher."""
    gpu = find_gpu(DEFAULT)
    card = Recorder(fake_gpu().type)
    with on_fake_gpu(card, gpu), cuda_stands_in(gpu), torch.autocast("cuda", torch.float16):
        x = torch.rand(4, 4, device="cuda", dtype=torch.float16)
        assert [function(x).dtype for function in COMPOSITES] == [torch.float32] * len(COMPOSITES)
    with torch.autocast("cpu", torch.float16), CudaLists():
        found = [function(X / 2) for function in COMPOSITES]
    assert [one.dtype for one in found] == [torch.float32] * len(COMPOSITES)
    large = torch.full((4,), 300.0, dtype=torch.float16)
    with torch.autocast("cpu", torch.float16), CudaLists():
        assert large.square().mean() == 90000.0  # more than float16 has


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_functions_that_only_a_cpu_computes_in_float32_are_left_as_on_a_card() -> None:
    gpu = find_gpu(DEFAULT)
    card = Recorder(fake_gpu().type)
    with on_fake_gpu(card, gpu), cuda_stands_in(gpu), torch.autocast("cuda", torch.float16):
        x = torch.rand(4, 4, device="cuda", dtype=torch.float16)
        there = [function(x).dtype for function in LEFT]
    assert there == [torch.complex32] * 2 + [torch.float16] * 5 + [torch.float32]
    with torch.autocast("cpu", torch.float16), CudaLists(), RoundedHalf():
        assert [function(X / 2).dtype for function in LEFT] == there


def test_decompositions_stay_in_half_which_has_no_kernel_and_products_as_they_were() -> None:
    with torch.autocast("cpu", torch.float16), CudaLists():
        for decomposition in (torch.linalg.inv, torch.linalg.cholesky, torch.inverse):
            with pytest.raises(
                (RuntimeError, NotImplementedError), match=r"Half|half|Low precision"
            ):
                decomposition(X @ X.T)
        assert (X @ X).dtype == torch.float16
        assert (X + 1).dtype == torch.float16


@pytest.mark.parametrize(
    "function", [torch.fft.fft, torch.fft.rfft2, lambda x: torch.fft.irfft(torch.fft.rfft(x))]
)
def test_fourier_transforms_in_half_need_powers_of_two_as_on_a_gpu(
    function: Callable[[Tensor], Tensor],
) -> None:
    """Autocast for CPUs computes them in float32, and CUDA's leaves them."""
    with torch.autocast("cpu", torch.float16), CudaLists():
        assert function(X).shape[0] == 4
        with pytest.raises(RuntimeError, match="powers of two"):
            function(torch.ones(6, 6, dtype=torch.float16))
        assert function(torch.ones(6, 6)).shape[0] == 6, "in float32 any size will do"
        with pytest.raises(RuntimeError, match="BFloat16"):
            function(X.bfloat16())
