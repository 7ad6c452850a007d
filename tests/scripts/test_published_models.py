"""What stands in for the models of published runs."""

from __future__ import annotations

import torch

from scripts.plans.published_models import Layer


def test_a_layer_of_bert_keeps_its_width() -> None:
    layer = Layer(16, 2, 32, 0.1)
    assert layer(torch.randn(2, 4, 16), torch.zeros(2, 1, 1, 4)).shape == (2, 4, 16)
