"""Bilinear resizing with a gradient by matrix products: torch's values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from mpt.systems.dain.nn.operators.resizing import Resizing, resized


@pytest.mark.parametrize("factor", [2, 4, 0.5, 0.25])
def test_the_gradient_is_torchs_but_for_the_order_of_its_sums(factor: float) -> None:
    x = torch.randn(2, 3, 8, 12, dtype=torch.float64, requires_grad=True)
    expected = functional.interpolate(x, scale_factor=factor, mode="bilinear", align_corners=False)
    grad = torch.randn_like(expected)
    found = Resizing.apply(x, factor)  # type: ignore[no-untyped-call]
    assert torch.equal(found, expected)
    both = [torch.autograd.grad(one, x, grad)[0] for one in (found, expected)]
    torch.testing.assert_close(*both)


def test_a_gradient_in_half_is_added_up_in_float32() -> None:
    x = torch.ones(1, 1, 4, 4, dtype=torch.bfloat16, requires_grad=True)
    (grad,) = torch.autograd.grad(Resizing.apply(x, 8).sum(), x)  # type: ignore[no-untyped-call]
    assert grad.dtype == torch.bfloat16
    assert grad.float().sum() == 1024


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_adds_it_up_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    x = torch.randn(8, 16, 64, 64, device="cuda", requires_grad=True)
    grad = torch.randn(8, 16, 128, 128, device="cuda")
    found = [torch.autograd.grad(resized(x, 2), x, grad)[0] for _ in range(20)]
    assert all(torch.equal(one, found[0]) for one in found)
