"""What the published runs did otherwise than the installed torch does."""

from __future__ import annotations

from typing import Any

import torch

from scripts.published_models import EarlySoftmax, Layer


def test_softmax_keeps_its_input_too_and_has_the_same_gradient() -> None:
    scores = torch.randn(2, 3, 5, dtype=torch.float32, requires_grad=True)
    saved: list[torch.Size] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.shape)
        return tensor

    early: Any = EarlySoftmax.apply
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        weights = early(scores)
    assert saved == [scores.shape] * 2
    outer = torch.randn_like(weights)
    (gradient,) = torch.autograd.grad(weights, scores, outer)
    expected = scores.softmax(-1)
    assert torch.allclose(weights, expected)
    assert torch.allclose(gradient, torch.autograd.grad(expected, scores, outer)[0], atol=1e-6)


def test_a_layer_of_bert_keeps_its_width() -> None:
    layer = Layer(16, 2, 32, 0.1)
    assert layer(torch.randn(2, 4, 16), torch.zeros(2, 1, 1, 4)).shape == (2, 4, 16)
