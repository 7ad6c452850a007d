"""Hidden channels of a network, and how whole ones are removed, so that it is really smaller (structured pruning).

Hidden are channels between two layers that nothing else reads. Those inside an `nn.Sequential` are found: layers that
follow each other there have no other reader. A module whose own forward holds some says so in a method
`hidden_channels`, for itself and what it contains. Concatenated or added channels keep their number, and so do
inputs and outputs, so names and layout stay.

A channel matters as much as the norm of its filter times the gain of the normalisation behind it (Li et al., "Pruning
filters for efficient ConvNets", 2017; Liu et al., "Network slimming", 2017).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

MULTIPLE = 4
"""Numbers of channels stay multiples of this."""
ALONE = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.SiLU,
    nn.ELU,
    nn.GELU,
    nn.Sigmoid,
    nn.Tanh,
    nn.Identity,
    nn.Dropout,
    nn.Upsample,
)
"""Layers that treat channels alike and hold nothing of them."""


class Hidden(NamedTuple):
    """Channels that `producer` makes, `followers` treat each by itself, and `consumer` alone reads."""

    producer: nn.Module
    followers: tuple[nn.Module, ...]
    consumer: nn.Module


def hidden_channels(network: nn.Module) -> Iterator[Hidden]:
    """Yield every group of hidden channels of a network."""
    own = getattr(network, "hidden_channels", None)
    if own is not None:
        yield from own()
    elif is_plain_sequential(network):
        yield from along(list(leaves(network)))
    else:
        for child in network.children():
            yield from hidden_channels(child)


def is_plain_sequential(module: nn.Module) -> bool:
    """Return whether a module runs its children one after the other and does nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def leaves(sequence: nn.Module) -> Iterator[nn.Module]:
    """Yield the layers of nested Sequentials in order; any other module is one layer."""
    for child in sequence.children():
        if is_plain_sequential(child) and not hasattr(child, "hidden_channels"):
            yield from leaves(child)
        else:
            yield child


def along(layers: list[nn.Module]) -> Iterator[Hidden]:
    """Yield the groups between layers that follow each other, and those inside of each."""
    producer: nn.Module | None = None
    followers: list[nn.Module] = []
    for layer in layers:
        if is_dense(layer):
            if producer is not None:
                yield Hidden(producer, tuple(followers), layer)
            producer, followers = layer, []
        elif producer is not None and follows(layer, width_of(producer)):
            followers.append(layer)
        elif type(layer) not in ALONE:
            producer = None
            yield from hidden_channels(layer)


def is_dense(layer: nn.Module) -> bool:
    """Return whether each output channel of a layer is a sum over all input channels."""
    sums = type(layer) is nn.Linear or (isinstance(layer, _ConvNd) and layer.groups == 1)
    # not computed from others
    return sums and dict(layer.named_parameters(recurse=False)).keys() >= {"weight"}


def follows(layer: nn.Module, width: int) -> bool:
    """Return whether a layer has numbers for each channel of its input by itself."""
    if isinstance(layer, _BatchNorm):
        return layer.num_features == width
    if isinstance(layer, nn.PReLU):
        return layer.num_parameters == width
    return (
        isinstance(layer, _ConvNd)
        and layer.groups == layer.in_channels == layer.out_channels == width
    )


def width_of(layer: nn.Module) -> int:
    """Return a layer's number of output channels."""
    if isinstance(layer, nn.Linear):
        return layer.out_features
    assert isinstance(layer, _ConvNd)
    return layer.out_channels


def kept_of(width: int, share: float) -> int:
    """Return how many of a group's channels are kept."""
    return min(width, MULTIPLE * math.ceil(width * share / MULTIPLE))


def narrow(network: nn.Module, share: float) -> int:
    """Keep a share of every group of hidden channels, in place: those that matter most. Return how many went."""
    removed = 0
    owners = Counter(
        id(one) for module in network.modules() for one in module.parameters(recurse=False)
    )
    with torch.no_grad():
        for hidden in list(hidden_channels(network)):
            layers = (hidden.producer, *hidden.followers, hidden.consumer)
            if any(
                owners[id(one)] > 1 for layer in layers for one in layer.parameters(recurse=False)
            ):
                continue  # another layer has the same weight
            width = width_of(hidden.producer)
            kept = kept_of(width, share)
            if kept == width:
                continue
            chosen = importance(hidden).topk(kept).indices.sort().values
            for layer in layers[:-1]:
                keep_outputs(layer, chosen)
            keep_inputs(hidden.consumer, chosen)
            removed += width - kept
    return removed


def importance(hidden: Hidden) -> Tensor:
    """Return how much each channel matters."""
    weight: Tensor = hidden.producer.get_parameter("weight")
    if isinstance(hidden.producer, _ConvTransposeNd):
        weight = weight.transpose(0, 1)
    norms: Tensor = weight.flatten(1).square().sum(1).sqrt()
    behind = hidden.followers[0] if hidden.followers else None
    return (
        norms * behind.weight.abs() if isinstance(behind, _BatchNorm) and behind.affine else norms
    )


def keep_outputs(layer: nn.Module, chosen: Tensor) -> None:
    """Keep these output channels of a layer."""
    axis = 1 if isinstance(layer, _ConvTransposeNd) and layer.groups == 1 else 0
    for name, tensor in [
        *layer.named_parameters(recurse=False),
        *layer.named_buffers(recurse=False),
    ]:
        if tensor.dim():  # BatchNorm's count of batches has none
            put(layer, name, tensor.index_select(axis if name == "weight" else 0, chosen))
    count = len(chosen)
    if isinstance(layer, nn.Linear):
        layer.out_features = count
    elif isinstance(layer, _BatchNorm):
        layer.num_features = count
    elif isinstance(layer, nn.PReLU):
        layer.num_parameters = count
    elif isinstance(layer, _ConvNd):
        layer.out_channels = count
        if layer.groups > 1:
            layer.groups = layer.in_channels = count


def keep_inputs(layer: nn.Module, chosen: Tensor) -> None:
    """Keep these input channels of a layer."""
    axis = 0 if isinstance(layer, _ConvTransposeNd) else 1
    put(layer, "weight", layer.get_parameter("weight").index_select(axis, chosen))
    if isinstance(layer, nn.Linear):
        layer.in_features = len(chosen)
    elif isinstance(layer, _ConvNd):
        layer.in_channels = len(chosen)


def put(layer: nn.Module, name: str, value: Tensor) -> None:
    """Put a tensor in the place of a parameter or buffer."""
    old = getattr(layer, name)
    setattr(
        layer,
        name,
        nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value,
    )
