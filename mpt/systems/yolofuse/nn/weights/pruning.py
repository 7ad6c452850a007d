"""Structured pruning: whole hidden channels of a detector go, those that matter least, so that it is really smaller.

Hidden are the channels between two convolutions that nothing else reads: inside bottlenecks, between the two layers of
a perceptron, inside the head's branches. Concatenated or added channels stay as they are, so the network's layout
and its names stay. A channel matters as much as the norm of its filter times the gain of its BatchNorm (Li et al.,
"Pruning filters for efficient ConvNets", 2017; Liu et al., "Network slimming", 2017).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mpt.systems.yolofuse.nn.layers.yolo_attention import AreaBlock, PositionBlock
from mpt.systems.yolofuse.nn.layers.yolo_blocks import EPSILON, MOMENTUM, Bottleneck, Conv
from mpt.systems.yolofuse.nn.layers.yolo_head import Detect

MULTIPLE = 4
"""Numbers of channels stay multiples of this."""


class Hidden(NamedTuple):
    """Channels that `producer` makes, depthwise convolutions pass on, and `consumer` alone reads."""

    producer: Conv
    passed: tuple[Conv, ...]
    consumer: nn.Conv2d


def hidden_channels(network: nn.Module) -> Iterator[Hidden]:
    """Yield every group of hidden channels of a detector."""
    for module in network.modules():
        if isinstance(module, Bottleneck):
            yield Hidden(module.cv1, (), module.cv2.conv)
        elif isinstance(module, PositionBlock | AreaBlock):
            first, second = module.ffn if isinstance(module, PositionBlock) else module.mlp
            yield Hidden(_conv(first), (), _conv(second).conv)
        elif isinstance(module, Detect):
            for boxes, kinds in module.branches():
                for branch in (*boxes, *kinds):
                    yield from _branch(list(branch.children()))


def _branch(layers: list[nn.Module]) -> Iterator[Hidden]:
    """Yield the hidden channels of one branch of the head: two hidden layers, plain or depthwise, and a 1x1."""
    first, second, last = layers
    assert isinstance(last, nn.Conv2d)
    if isinstance(first, Conv):
        yield Hidden(first, (), _conv(second).conv)
        yield Hidden(_conv(second), (), last)
        return
    assert isinstance(first, nn.Sequential)
    assert isinstance(second, nn.Sequential)
    yield Hidden(_conv(first[1]), (_conv(second[0]),), _conv(second[1]).conv)
    yield Hidden(_conv(second[1]), (), last)


def _conv(module: nn.Module) -> Conv:
    assert isinstance(module, Conv)
    return module


def narrow(network: nn.Module, share: float) -> None:
    """Keep a share of every group of hidden channels, in place: those that matter most."""
    for hidden in list(hidden_channels(network)):
        count = hidden.producer.conv.out_channels
        kept = min(count, MULTIPLE * math.ceil(count * share / MULTIPLE))
        if kept == count:
            continue
        with torch.no_grad():
            chosen = importance(hidden.producer).topk(kept).indices.sort().values
            keep_outputs(hidden.producer, chosen)
            for passed in hidden.passed:
                keep_outputs(passed, chosen)
                passed.conv.in_channels = passed.conv.groups = kept
            hidden.consumer.weight = nn.Parameter(hidden.consumer.weight[:, chosen].clone())
            hidden.consumer.in_channels = kept


def importance(layer: Conv) -> Tensor:
    """Return how much each output channel matters."""
    norms: Tensor = layer.conv.weight.flatten(1).square().sum(1).sqrt()
    return norms * layer.bn.weight.abs() if isinstance(layer.bn, nn.BatchNorm2d) else norms


def keep_outputs(layer: Conv, chosen: Tensor) -> None:
    """Keep these output channels of a convolution and its BatchNorm."""
    layer.conv.weight = nn.Parameter(layer.conv.weight[chosen].clone())
    layer.conv.out_channels = len(chosen)
    old = layer.bn
    assert isinstance(old, nn.BatchNorm2d)
    new = nn.BatchNorm2d(len(chosen), EPSILON, MOMENTUM, device=old.weight.device)
    for name in ("weight", "bias", "running_mean", "running_var"):
        value = getattr(old, name)[chosen].clone()
        setattr(new, name, nn.Parameter(value) if name in ("weight", "bias") else value)
    layer.bn = new.train(old.training)
