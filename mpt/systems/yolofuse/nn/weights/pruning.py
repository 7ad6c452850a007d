"""A detector's hidden channels: inside bottlenecks, between the two layers of a perceptron, inside the head's branches.

What is done with them is in `mpt.nn.shared.hidden_channels`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from mpt.nn.shared.hidden_channels import Hidden
from mpt.systems.yolofuse.nn.layers.yolo_attention import AreaBlock, PositionBlock
from mpt.systems.yolofuse.nn.layers.yolo_blocks import Bottleneck, Conv
from mpt.systems.yolofuse.nn.layers.yolo_head import Detect


def hidden_of_detector(network: nn.Module) -> Iterator[Hidden]:
    """Yield every group of hidden channels of a detector."""
    for module in network.modules():
        if isinstance(module, Bottleneck):
            yield between(module.cv1, (), module.cv2)
        elif isinstance(module, PositionBlock | AreaBlock):
            first, second = module.ffn if isinstance(module, PositionBlock) else module.mlp
            yield between(first, (), second)
        elif isinstance(module, Detect):
            for boxes, kinds in module.branches():
                for branch in (*boxes, *kinds):
                    yield from _branch(list(branch.children()))


def between(producer: nn.Module, passed: tuple[nn.Module, ...], consumer: nn.Module) -> Hidden:
    """Return the group between two layers with a BatchNorm each, past depthwise ones."""
    layers = [layer for one in (producer, *passed) for layer in (_conv(one).conv, _conv(one).bn)]
    return Hidden(
        layers[0],
        tuple(layers[1:]),
        _conv(consumer).conv if isinstance(consumer, Conv) else consumer,
    )


def _branch(layers: list[nn.Module]) -> Iterator[Hidden]:
    """Yield the hidden channels of one branch of the head: two hidden layers, plain or depthwise, and a 1x1."""
    first, second, last = layers
    if isinstance(first, Conv):
        yield between(first, (), second)
        yield between(second, (), last)
        return
    assert isinstance(first, nn.Sequential)
    assert isinstance(second, nn.Sequential)
    yield between(first[1], (second[0],), second[1])
    yield between(second[1], (), last)


def _conv(module: nn.Module) -> Conv:
    assert isinstance(module, Conv)
    return module
