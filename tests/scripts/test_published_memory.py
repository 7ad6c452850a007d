"""What the scripts of published memory add to plans, on small cases."""

from __future__ import annotations

import pytest
import torch

from mpt.systems.stylegan2.nn.shared.stylegan2_layers import demodulate
from scripts.plans.segmentation_memory import PUBLISHED, percent
from scripts.plans.segmentation_models import SoftmaxOf2020
from scripts.plans.stylegan2_memory import kernel_for_each_picture

pytestmark = pytest.mark.tier("fast")


def test_the_published_rows_are_told_apart() -> None:
    assert percent(110, 100) == pytest.approx(10)
    assert len({row.label for row in PUBLISHED}) == len(PUBLISHED) == 36


def test_the_softmax_of_2020_has_the_same_gradient_and_keeps_its_input() -> None:
    scores = torch.randn(2, 3, 4, requires_grad=True, dtype=torch.float64)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda one: kept.append(one.data_ptr()) or one, lambda one: one
    ):
        result = SoftmaxOf2020.apply(scores, 1, True)
    assert scores.data_ptr() in kept
    (found,) = torch.autograd.grad(result.square().sum(), scores)
    (wanted,) = torch.autograd.grad(scores.log_softmax(1).square().sum(), scores)
    assert torch.equal(found, wanted)


def test_a_kernel_for_each_picture_gives_the_same_norms() -> None:
    weight, style = torch.randn(5, 4, 3, 3), torch.randn(2, 4)
    torch.testing.assert_close(kernel_for_each_picture(weight, style), demodulate(weight, style))
