"""The distance of an exported file from its run that is still rounding."""

from __future__ import annotations

import torch
from torch import nn

from mpt.inference.proof import distance, expect, outputs_of


def deep_network() -> nn.Sequential:
    """Return 40 layers whose weights float16 holds exactly, as those of a run in fp16-pure or O3."""
    torch.manual_seed(0)
    layers = [nn.Linear(32, 32, bias=False) for _ in range(40)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)
        layer.half().float()
    return nn.Sequential(*layers)


def test_a_graph_in_half_may_be_off_by_its_arithmetic_though_its_weights_are_exact() -> None:
    network, inputs = deep_network(), torch.randn(4, 32)
    found = outputs_of(network, (inputs,))
    apart = distance(outputs_of(network.half(), (inputs.half(),)), found)
    network.float()
    assert apart > 1e-3
    called = {"net": (network, (inputs,), None)}
    assert apart < expect(called, "float16", computes=True)["net"].allowed < 2e-2
    # a file of weights is read back into float32, which is exact
    assert expect(called, "float16")["net"].allowed < 2e-3


def test_results_that_float16_does_not_hold_are_not_part_of_the_rounding() -> None:
    network = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        network[0].weight.fill_(1e5 / 2)
        network[1].weight.fill_(2e-4)
    inputs = torch.tensor([[4.0]])  # 200,000 between the layers, 40 after them
    allowed = expect({"net": (network, (inputs,), None)}, "float16", computes=True)["net"].allowed
    assert 1e-3 <= allowed < 1e-2
