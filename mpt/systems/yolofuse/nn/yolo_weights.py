"""Start a detector from published weights: a state dict by name, never a pickled model.

Published YOLO files hold a pickled model, which runs code when it is opened and is therefore not read here. Whoever has
one and trusts it writes its state dict once, with the publisher's own package:

    python -c "import sys; from ultralytics import YOLO; from safetensors.torch import save_file; \\
        save_file({k: v.contiguous() for k, v in YOLO(sys.argv[1]).model.float().state_dict().items()}, sys.argv[2])" \\
        yolov8n.pt yolov8n.safetensors

A file of the same network is loaded by name; its class branches are left out where the number of classes differs. A
one-camera YOLO file starts a fusion: its backbone, layer by layer, goes into both branches as far as shapes agree.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mpt.errors import CheckpointError
from mpt.run.weights_file import load_weights_file

LEAST_SHARE = 0.25
"""Of a backbone's tensors that must fit, before a file is believed to be meant for it."""
NUMBERED = re.compile(r"^(?:model\.)*(\d+)\.(.+)$")


class Branched(Protocol):
    """What is asked of a detector here: layers by number, of which each camera has some of its own."""

    model: nn.ModuleList
    branches: list[list[int]]

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any: ...


def start_from(net: Branched, path: str) -> str:
    """Load what fits of a file into the network and return a sentence that says how much.

    Raises CheckpointError where there is no such file, it is refused, or too little of it fits.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"model.weights: there is no file {path}")
    state = canonical(load_weights_file(Path(path)))
    own = net.state_dict()
    whole = _fitting(own, state)
    body = [name for name in own if not name.startswith(f"model.{len(net.model) - 1}.")]
    if all(name in whole for name in body):
        net.load_state_dict(whole, strict=False)
        return f"{len(whole)} of {len(own)} tensors from {path}"
    copied = branch_state(net, own, state)
    backbone = sum(name.split(".")[1] in {str(n) for branch in net.branches for n in branch} for name in own)
    if len(copied) < LEAST_SHARE * backbone:
        raise CheckpointError(
            f"model.weights: {path} fits neither this network ({len(whole)} of {len(own)} tensors agree in name and "
            f"shape) nor its branches ({len(copied)} of {backbone}); give a state dict of the same design and scale"
        )
    net.load_state_dict(copied, strict=False)
    return f"{len(copied)} of the branches' {backbone} tensors from {path}"


def canonical(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state dict with names of the form model.N.rest, whatever number of `model.` the writer had."""
    named = {}
    for name, tensor in state.items():
        match = NUMBERED.match(name)
        if match:
            named[f"model.{match[1]}.{match[2]}"] = tensor.float() if tensor.is_floating_point() else tensor
    if not named:
        raise CheckpointError("model.weights: no tensor is named model.N..., so this is no YOLO state dict")
    return named


def branch_state(net: Branched, own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what a one-camera backbone gives to each branch, its layer n to the branch's n-th layer."""
    by_layer: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        _, number, rest = name.split(".", 2)
        by_layer.setdefault(number, {})[rest] = tensor
    renamed = {
        f"model.{layer}.{rest}": tensor
        for branch in net.branches
        for position, layer in enumerate(branch)
        for rest, tensor in by_layer.get(str(position), {}).items()
    }
    return _fitting(own, renamed)


def _fitting(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor.to(torch.int64) if own[name].dtype == torch.int64 else tensor
        for name, tensor in state.items()
        if name in own and own[name].shape == tensor.shape
    }
