"""Hidden channels that nothing else reads, and what is left when they go."""

import pytest
import torch
from torch import nn

from mpt.nn.shared.hidden_channels import hidden_channels, narrow
from mpt.systems.yolofuse.nn.layers.yolo_blocks import Conv
from mpt.systems.yolofuse.nn.yolofuse import Settings, YoloFuse

PAIR = (torch.rand(1, 3, 64, 64), torch.rand(1, 1, 64, 64))


@pytest.mark.parametrize("fusion", ["mid", "decision", "deyolo"])
def test_channels_that_give_nothing_can_go_without_a_change(fusion: str) -> None:
    """Half of every group is silenced: its BatchNorm gives 0, which SiLU keeps 0. Pruning must choose just these."""
    net = YoloFuse(Settings(fusion=fusion), 1).eval()
    for hidden in hidden_channels(net):
        for layer in hidden.followers:
            if isinstance(layer, nn.BatchNorm2d):
                with torch.no_grad():
                    layer.weight[layer.num_features // 2 :] = 0
                    layer.bias[layer.num_features // 2 :] = 0
    with torch.no_grad():
        before = net(*PAIR)
        narrow(net, 0.5)
        after = net(*PAIR)
    for first, second in zip(before, after, strict=True):
        torch.testing.assert_close(second, first, rtol=1e-4, atol=1e-4)


def test_a_pruned_network_is_smaller_trains_and_keeps_its_names() -> None:
    whole, pruned = YoloFuse(Settings(fusion="mid"), 1), YoloFuse(Settings(fusion="mid"), 1)
    narrow(pruned, 0.5)
    assert list(pruned.state_dict()) == list(whole.state_dict())
    counts = [sum(p.numel() for p in net.parameters()) for net in (whole, pruned)]
    assert counts == [1_185_027, 930_251]
    sum(level.sum() for level in pruned(*PAIR)).backward()
    assert all(
        module.conv.weight.grad is not None
        for module in pruned.modules()
        if isinstance(module, Conv)
    )


def test_pruned_shapes_do_not_depend_on_values() -> None:
    with torch.device("meta"):
        net = YoloFuse(Settings(fusion="mid"), 1)
        narrow(net, 0.5)
    other = YoloFuse(Settings(fusion="mid"), 1)
    narrow(other, 0.5)
    assert {k: v.shape for k, v in net.state_dict().items()} == {
        k: v.shape for k, v in other.state_dict().items()
    }


def test_both_heads_of_a_network_with_two_are_narrowed() -> None:
    net = YoloFuse(Settings(fusion="rgb", family="yolo26"), 1)
    narrow(net, 0.5)
    shapes = {name: tuple(value.shape) for name, value in net.head.state_dict().items()}
    answering = {
        name.removeprefix("one2one_"): shape
        for name, shape in shapes.items()
        if name.startswith("one2one_")
    }
    assert answering == {
        name: shape for name, shape in shapes.items() if not name.startswith("one2one_")
    }
