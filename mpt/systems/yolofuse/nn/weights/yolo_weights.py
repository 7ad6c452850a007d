"""Start a detector from published weights, tensor by tensor, by their names.

Published YOLO files (`yolov8n.pt`) hold a pickled model, which would run code if it were unpickled. It is not: the
tensors are read by name from the file's description (`mpt.weights.weights_file`), without the publisher's package,
and any file that is not just a tree of modules is refused. Whoever would rather have a plain state dict writes one
if that package is:

    python -c "import sys; from ultralytics import YOLO; from safetensors.torch import save_file; \\
        save_file({k: v.contiguous() for k, v in YOLO(sys.argv[1]).model.float().state_dict().items()}, sys.argv[2])" \\
        yolov8n.pt yolov8n.safetensors

A file of the same network is loaded by name like any other. A one-camera YOLO file starts a fusion: its backbone goes
into both branches, layer n into the branch's n-th, and its neck and head into those behind the fusion if they are built
alike; a network that reads both cameras as channels takes all of it, its first convolution for the visible channels. A
layer is taken whole or not at all: shapes of single tensors agree by chance (counters, norms of one width) between
layers that do other things.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

NUMBERED = re.compile(r"^(?:net\.|model\.)*(\d+)\.(.+)$")
LEAST_OF_OWN = 0.5
"""Share of the network's tensors from which on a file is taken for one of the same network."""


def translate(
    net: nn.Module, branches: list[list[int]], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor] | None:
    """Return the tensors that a one-camera YOLO gives to a fusion, by our names.

    None if there is nothing to translate: the file is of this network already, or of no YOLO.
    """
    own = by_layer(net.state_dict())
    given = by_layer(tensors)
    fitting = sum(
        rest in own.get(layer, {}) and own[layer][rest].shape == tensor.shape
        for layer, rests in given.items()
        for rest, tensor in rests.items()
    )
    if len(branches) < 2 or not given or fitting >= LEAST_OF_OWN * sum(map(len, own.values())):
        return None
    taken: dict[str, Tensor] = {}

    def take(layer: int, source: int) -> None:
        theirs, mine = given.get(source, {}), own.get(layer, {})
        if mine and shapes_of(theirs) == shapes_of(mine):
            taken.update({f"model.{layer}.{rest}": tensor for rest, tensor in theirs.items()})

    for branch in branches:
        for position, layer in enumerate(branch):
            take(layer, position)
    # a neck without its backbone has nothing to read
    behind = behind_fusion(own, branches, given) if taken else []
    for layer, source in behind:
        take(layer, source)
    if behind:  # of the head also the layers that do not depend on the number of classes
        head, theirs_head = behind[-1]
        for rest, tensor in given[theirs_head].items():
            if own[head][rest].shape == tensor.shape:
                taken[f"model.{head}.{rest}"] = tensor
    return taken


def widened(net: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Return the tensors of a YOLO of fewer input channels for a network that reads more of them, by our names.

    The file's channels are taken for the first ones, and the others keep their initial values. None if the file's first
    convolution has as many channels, or is none.
    """
    own, given = net.state_dict(), by_layer(tensors)
    first, theirs = own["model.0.conv.weight"], given.get(0, {}).get("conv.weight")
    if (
        theirs is None
        or theirs.dim() != 4
        or theirs.shape[1] >= first.shape[1]
        or len(theirs) != len(first)
    ):
        return None
    taken = {
        f"model.{layer}.{rest}": tensor
        for layer, rests in given.items()
        for rest, tensor in rests.items()
    }
    wide = first.detach().clone()
    wide[:, : theirs.shape[1]] = theirs
    return {**taken, "model.0.conv.weight": wide}


def by_layer(tensors: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Return tensors by the number of their layer and the rest of their names."""
    layers: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = NUMBERED.match(name)
        if match:
            layers.setdefault(int(match[1]), {})[match[2]] = tensor
    return layers


def shapes_of(layer: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Return the shapes of a layer's tensors by name."""
    return {name: tensor.shape for name, tensor in layer.items()}


def behind_fusion(
    own: Mapping[int, Mapping[str, Tensor]],
    branches: list[list[int]],
    given: Mapping[int, Mapping[str, Tensor]],
) -> list[tuple[int, int]]:
    """Return which layer of the neck and head comes from which of the file, counted from the last.

    Only if all layers of the file's neck have a partner of the same kind of tensors: another neck has other roles.
    """
    backbone = max(map(len, branches))
    theirs = [layer for layer in sorted(given) if layer >= backbone]
    last, last_of_theirs = max(own), max(given)
    pairs = [(last - (last_of_theirs - layer), layer) for layer in theirs]
    alike = all(set(own.get(layer, {})) == set(given[source]) for layer, source in pairs)
    return pairs if alike and all(layer > max(map(max, branches)) for layer, _ in pairs) else []
